"""Data sets of heterogeneous graphs: the targets are those of one type of nodes. Opens files of either kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.data.datasets import Dataset, from_file, refuse_ratio, split_at_random
from gnnautoscale.data.hetero_files import is_typed_file, read_typed_names
from gnnautoscale.errors import InputError
from gnnautoscale.graph import TypedGraph


@dataclass(frozen=True)
class TypedDataset(Dataset):
    """A heterogeneous graph, one type of whose nodes has targets.

    Its ``train``, ``val`` and ``test`` are the nodes of that type, without edges: all that a task looks at.

    Args:
        graph: The whole graph.
        target: The type of nodes with targets.
    """

    graph: HeteroData
    target: str

    @staticmethod
    @checked()
    def of_types(graph: HeteroData, target: str | None = None, name: str = "data") -> TypedDataset:
        """Make a data set; by default its targets are those of the only type of nodes that has ``y``.

        Example:
            >>> import torch
            >>> from torch_geometric.data import HeteroData
            >>> graph = HeteroData()
            >>> graph["author"].num_nodes, graph["paper"].num_nodes = 2, 3
            >>> graph["paper"].y = torch.tensor([0, 1, 0])
            >>> graph["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
            >>> TypedDataset.of_types(graph).target
            'paper'
        """
        named = [kind for kind, store in graph.node_items() if isinstance(store.get("y"), Tensor)]
        if target is None and len(named) != 1:
            raise InputError(
                "one type of nodes has targets",
                got=f"y for {', '.join(named)}" if named else "no y at all",
                fix="Name one of them: --target on the command line, TypedDataset.of_types(data, target=...) in Python."
                if named
                else "Set y of the nodes to predict, or predict edges: --task link, task='link'.",
            )
        target = named[0] if target is None else target
        if target not in graph.node_types:
            rule = f"target is one of the types of nodes, {', '.join(graph.node_types)}"
            raise InputError(rule, got=repr(target), fix="Choose one of these.")
        nodes = nodes_of_type(graph, target)
        return TypedDataset(name, nodes, nodes, nodes, graph, target)

    def passing(self, split: str = "train") -> HeteroData:
        """See :meth:`Dataset.passing`."""
        return self.graph

    @property
    def targets(self) -> tuple[str, ...]:
        """See :meth:`Dataset.targets`."""
        return (self.target,)

    def seen(self, batch: HeteroData) -> Data:
        """What a task looks at in a batch: the nodes with targets, without edges."""
        return nodes_of_type(batch, self.target)

    def seen_whole(self) -> tuple[Data, Tensor]:
        """What a task looks at in the training graph, and the numbers there of the nodes that :meth:`own_rows` has."""
        return self.train, torch.arange(self.train.num_nodes)

    def own_rows(self, rows: dict[str, Tensor]) -> Tensor:
        """The rows of what is seen in a batch, given those of the target types' own nodes."""
        return rows[self.target]

    def all_rows(self, rows: dict[str, Tensor]) -> Tensor:
        """The rows that a task scores, given those of all nodes of the target types."""
        return rows[self.target]

    @property
    def num_features(self) -> int:
        """Columns of ``x`` of the nodes with targets; 0 if they have none."""
        x = self.train.get("x")
        return int(x.size(1)) if isinstance(x, Tensor) and x.dim() > 1 else 0

    def check(self) -> None:
        """Refuse graphs that no model can be trained on; targets and splits are checked by the task."""
        TypedGraph.of(self.graph)


@checked(split={"least": 0}, max_features={"least": 1, "fix": "Leave it out to keep all."})
def open_file(
    path: str | Path,
    *,
    target: str | None = None,
    split: int = 0,
    split_ratio: Sequence[float] | None = None,
    undirected: bool = False,
    max_features: int | None = None,
    **options: Any,
) -> Dataset:
    """Make a data set of a plain or a heterogeneous graph in a file or folder.

    Args:
        path: See :func:`read_typed_graph` for heterogeneous graphs, ``from_file`` for plain ones.
        target: The type of nodes with targets, if several types have some.
        split: Seed of a random split, if the file has none.
        split_ratio: Shares of training, validation and test nodes in it; 60, 20 and 20 by default.
        undirected: Add the reverse of each edge; of a heterogeneous graph, as types of their own.
        max_features: Keep only the first columns of ``x``.
        options: Further arguments of ``from_file``, for plain graphs.

    Example:
        >>> import numpy as np
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp()) / "papers.npz"
        >>> edges = {"edges_author__writes__paper": [[0, 1], [2, 0]]}
        >>> np.savez(file, node_types=["author", "paper"], num_nodes=[2, 3], y_paper=[0, 1, 0], **edges)
        >>> dataset = open_file(file)
        >>> dataset.name, dataset.target, int(dataset.train.train_mask.sum())
        ('papers', 'paper', 2)
    """
    path = Path(path)
    chosen: dict[str, Any] = {"undirected": undirected, "max_features": max_features}
    if not is_typed_file(path):
        if target is not None:
            fix = "Leave it out."
            raise InputError("target is a type of nodes of a heterogeneous graph", got=f"{path}, a plain one", fix=fix)
        return from_file(path, split=split, split_ratio=split_ratio, **chosen, **options)
    if options:
        fix = "Leave them out; see the documentation of gnnautoscale.data.read_typed_graph."
        raise InputError("a heterogeneous graph comes in one file or folder", got=", ".join(options), fix=fix)
    graph, names = read_typed_names(path, **chosen)
    dataset = TypedDataset.of_types(graph, target, path.stem)
    note = ""
    if "train_mask" in graph[dataset.target]:
        refuse_ratio(path, split_ratio)
    else:
        drawn = nodes_of_type(graph, dataset.target)
        note = split_at_random(drawn, split, split_ratio, path.name)
        for name in ("train_mask", "val_mask", "test_mask"):
            graph[dataset.target][name] = drawn[name]
        dataset = TypedDataset.of_types(graph, dataset.target, path.stem)
    dataset.check()
    return replace(dataset, names=names.get(dataset.target, dataset.names), note=note)


def nodes_of_type(graph: HeteroData, kind: str) -> Any:
    """The nodes of a type, of a graph or of a batch, as a plain graph without edges."""
    store = graph[kind]
    nodes = Data(**{name: value for name, value in store.items() if name != "num_nodes"})
    nodes.num_nodes = store.num_nodes
    return nodes
