"""Many graphs side by side as one, with a target for each of them.

The joined graph is a plain ``Data``: ``graph_id`` [N] is the graph of each node, ``graph_y`` [G] or [G, C] the target
of each graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.data import Dataset as PygDataset

from gnnautoscale._util import checked, shown
from gnnautoscale.errors import InputError
from gnnautoscale.graph import rows_of

_MASKS = ("train_mask", "val_mask", "test_mask")
# Numbers of folds, of which one is for tests and one for validation.
_FOLDS = 10


def is_collection(graphs: object) -> bool:
    """Whether this is a list of graphs, or one of PyG's data sets."""
    return isinstance(graphs, PygDataset) or (
        isinstance(graphs, (list, tuple)) and len(graphs) > 0 and all(isinstance(each, Data) for each in graphs)
    )


def holds_graphs(data: Data) -> bool:
    """Whether a graph is made of several, each with a target."""
    number = _numbers(data)
    if "graph_y" in data or number is None or not number.numel():
        return "graph_y" in data
    y = data.get("y")
    return isinstance(y, Tensor) and y.dim() > 0 and y.size(0) == int(number.max()) + 1 != data.num_nodes


def join_graphs(graphs: Any) -> Data:
    """Put graphs side by side as one.

    Args:
        graphs: A list of ``Data``, each with ``y`` of one row, or one of PyG's data sets; or several graphs that are
            joined already: a ``Batch``, or a ``Data`` with ``graph_id`` or ``batch``, ``[num_nodes]``, the graph of
            each node, and ``y`` with a row for each graph.

    Returns:
        A ``Data`` with all rows of nodes and edges, ``graph_id``, ``[num_nodes]``, and ``graph_y``, a row for each
        graph.

    Example:
        >>> edges = torch.tensor([[0], [1]])
        >>> pair = Data(x=torch.ones(2, 1), edge_index=edges, y=torch.tensor([1]))
        >>> joined = join_graphs([pair, pair, pair])
        >>> joined.graph_id, joined.graph_y
        (tensor([0, 0, 1, 1, 2, 2]), tensor([1, 1, 1]))
    """
    if not isinstance(graphs, Data):
        if not is_collection(graphs):
            empty = isinstance(graphs, (list, tuple)) and not graphs
            got = f"{'an empty' if empty else 'a'} {type(graphs).__name__}"
            raise InputError("graphs are a list of torch_geometric.data.Data", got=got, fix="Pass such a list.")
        graphs = Batch.from_data_list(list(graphs))
    number = _checked_numbers(graphs)
    count = int(number.max()) + 1
    y = graphs.get("graph_y", graphs.get("y"))
    if not isinstance(y, Tensor) or y.dim() not in (1, 2) or y.size(0) != count:
        raise InputError(
            f"y must have one row for each of the {count} graphs",
            got=f"shape {list(y.shape)}" if isinstance(y, Tensor) else "none",
            fix="Give each graph y of shape [1], or [1, targets] for several targets.",
        )
    plain = Data.from_dict({name: value for name, value in graphs.to_dict().items() if name not in ("y", "graph_y")})
    plain.num_nodes = graphs.num_nodes
    kept = {name: plain[name] for name in plain.keys() if name == "edge_index" or rows_of(plain, name) is not None}  # noqa: SIM118
    kept = {name: value for name, value in kept.items() if name not in ("batch", "ptr", "graph_id", "num_nodes")}
    source, target = kept["edge_index"] if "edge_index" in kept else torch.empty(2, 0, dtype=torch.long)
    if bool((number[source] != number[target]).any()):
        fix = "Remove them, or correct graph_id."
        raise InputError("edges stay inside their graph", got="edges from one graph to another", fix=fix)
    return Data(**kept, graph_id=number, graph_y=y)


@checked(chosen={"dims": 1, "integers": True})
def take_graphs(data: Data, chosen: Tensor) -> Data:
    """Some graphs of a joined one, ``[count]``, in this order of their numbers.

    Example:
        >>> edges = torch.tensor([[0], [1]])
        >>> graphs = [Data(x=torch.full((2, 1), float(i)), edge_index=edges, y=torch.tensor([i])) for i in range(3)]
        >>> taken = take_graphs(join_graphs(graphs), torch.tensor([2, 0]))
        >>> taken.graph_y, taken.graph_id, taken.num_edges
        (tensor([2, 0]), tensor([1, 1, 0, 0]), 2)
    """
    count = data.graph_y.size(0) if isinstance(data.get("graph_y"), Tensor) else 0
    ends = chosen.aminmax() if chosen.numel() else None
    if not count or (ends is not None and not 0 <= int(ends.min) <= int(ends.max) < count):
        got = f"{count} graphs and numbers {shown(chosen.tolist())}"
        raise InputError("graphs are chosen by their numbers in a joined graph", got=got, fix="Use join_graphs first.")
    place = torch.full((data.graph_y.size(0),), -1)
    place[chosen] = torch.arange(chosen.numel())
    there = place[data.graph_id] >= 0
    new = there.cumsum(0) - 1
    inside = there[data.edge_index[0]]
    kept: dict[str, Tensor] = {}
    for name, value in data.to_dict().items():
        level = rows_of(data, name) if name != "edge_index" else "edge"
        if isinstance(value, Tensor) and level is not None:
            chosen_rows = (inside if level == "edge" else there).nonzero().squeeze(1)
            kept[name] = value.index_select(data.__cat_dim__(name, value), chosen_rows)
    kept["edge_index"], kept["graph_id"] = new[kept["edge_index"]], place[kept["graph_id"]]
    return Data(**kept, graph_y=data.graph_y[chosen])


def split_graphs(data: Any, split: Tensor | None, seed: int) -> list[Data]:
    """Training, validation and test graphs; see ``Dataset.of_graphs``."""
    if isinstance(data, (list, tuple)) and len(data) == 3 and all(is_collection(each) for each in data):
        if split is not None:
            raise InputError("three lists are split already", got="split as well", fix="Leave split out.")
        return [join_graphs(each) for each in data]
    joined = join_graphs(data)
    count = joined.graph_y.size(0)
    split = _given_split(data, count) if split is None else split
    if split is None:
        fold = folds(joined.graph_y, _FOLDS)
        split = torch.where(fold == seed % _FOLDS, 2, torch.where(fold == (seed + 1) % _FOLDS, 1, 0))
    form = isinstance(split, Tensor) and split.shape == (count,) and split.dtype == torch.long
    if not form or not bool(((split >= -1) & (split <= 3)).all()):
        got = f"{split.dtype} {list(split.shape)}" if isinstance(split, Tensor) else type(split).__name__
        rule = f"split must be int64, [{count}]: 0 (training), 1 (validation), 2 (test), or 3 or -1 (none)"
        raise InputError(rule, got=got, fix="Give each graph one of these.")
    parts = [(split == number).nonzero().squeeze(1) for number in range(3)]
    for name, part in zip(("training", "validation", "test"), parts, strict=True):
        if not part.numel():
            raise InputError(f"{name} needs at least one graph", got="none", fix="Change split, or add graphs.")
    return [take_graphs(joined, part) for part in parts]


@checked(count={"least": 2}, seed={"least": 0, "below": 2**32})
def folds(y: Tensor, count: int, seed: int = 0) -> Tensor:
    """Deal graphs into so many folds at random, each class (``y`` [G] as integers) evenly; returns [G].

    Example:
        >>> folds(torch.tensor([0, 0, 0, 0, 1, 1]), 2).bincount()
        tensor([3, 3])
    """
    order = torch.randperm(y.size(0), generator=torch.Generator().manual_seed(seed))
    if y.dim() == 1 and not y.is_floating_point():
        order = order[y[order].long().argsort(stable=True)]
    fold = torch.empty_like(order)
    fold[order] = torch.arange(order.numel()) % count
    return fold


def _given_split(data: Any, count: int) -> Tensor | None:
    """The split that joined graphs bring along: ``graph_split``, or a mask of graphs for each split."""
    if not isinstance(data, Data):
        return None
    given: Tensor | None = data.get("graph_split")
    masks = {name: data[name] for name in _MASKS if name in data}
    if given is not None or not masks:
        return given
    fits = all(
        isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (count,) for mask in masks.values()
    )
    if not fits or len(masks) < 3:
        rule = f"graphs are split by train_mask, val_mask and test_mask, each bool, [{count}]"
        raise InputError(
            rule, got=", ".join(masks), fix="Give each graph one True or False in each, or set graph_split."
        )
    given = torch.full((count,), -1)
    for number, name in enumerate(_MASKS):
        given[masks[name].cpu()] = number
    return given


def _numbers(data: Data) -> Tensor | None:
    """The graph of each node, if several graphs are joined."""
    number = data.get("graph_id", data.get("batch"))
    return number if isinstance(number, Tensor) and number.layout == torch.strided else None


def _checked_numbers(data: Data) -> Tensor:
    number = _numbers(data)
    if number is None:
        fix = "Set data.graph_id, the number of each node's graph, or pass a list of graphs."
        raise InputError("several graphs in one need graph_id", got="none", fix=fix)
    number = number.cpu()
    form = number.dtype == torch.long and number.shape == (data.num_nodes,) and number.numel() > 0
    if not form or int(number.min()) < 0 or not bool(torch.bincount(number).all()):
        raise InputError(
            f"graph_id must number the graphs of {data.num_nodes} nodes from 0, int64, each with at least one node",
            got=f"{number.dtype} {list(number.shape)}, or graphs without nodes",
            fix="Renumber with graph_id.unique(return_inverse=True)[1]; leave out graphs without nodes.",
        )
    return number
