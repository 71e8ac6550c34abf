"""Which nodes a model can tell apart: Weisfeiler-Lehman colours beside the outputs of GAS and of the baselines.

The paper shows that a GNN with histories tells apart what the Weisfeiler-Lehman test does (Theorem 2), and that one on
sampled edges gives different outputs to nodes of the same colour (its Proposition). Here both can be run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.attach import autoscale, infer
from gnnautoscale.errors import InputError
from gnnautoscale.graph import ClusterLoader, Graph, HaloLoader, SampleLoader

Parts = Literal["metis", "random"] | Tensor

#: Outputs that differ by less count as equal. In float64, rounding stays far below.
TOLERANCE = 1e-9

# Colours #############################################################################################################


def wl_colours(
    edge_index: Tensor, num_nodes: int, *, colours: Tensor | None = None, rounds: int | None = None
) -> Tensor:
    """Refine colours by Weisfeiler-Lehman: nodes stay alike if they and the nodes with an edge into them are alike.

    This is exact: neighbours' colours are compared one by one, and never hashed. Where two nodes are joined by several
    edges, each of these counts.

    Args:
        edge_index: Sources and targets, ``[2, num_edges]``. Colours flow from source to target.
        num_nodes: Number of nodes.
        colours: The colours to start from, integers ``[num_nodes]``; all alike if not given.
        rounds: Number of rounds; ``None`` for as many as change something.

    Returns:
        The colour of each node, ``[num_nodes]``, numbered from 0 in the order they first appear.

    Example:
        >>> path = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
        >>> wl_colours(path, 5)
        tensor([0, 1, 2, 1, 0])
        >>> wl_colours(path, 5, rounds=1)
        tensor([0, 1, 1, 1, 0])
    """
    if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0):
        raise InputError("rounds must be an integer from 0", got=repr(rounds), fix="Or leave it out.")
    graph = Graph(Data(edge_index=edge_index, num_nodes=num_nodes))
    now = torch.zeros(num_nodes, dtype=torch.long) if colours is None else _checked(colours, num_nodes)
    now = _numbered(now)
    target, source, _ = graph.incoming.into(torch.arange(num_nodes))
    for _ in range(num_nodes if rounds is None else rounds):
        refined = _refined(now, target, source)
        if int(refined.max()) == int(now.max()):  # as many colours: none was split
            break
        now = refined
    return now


def _refined(colours: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """One round, for edges grouped by target."""
    count = int(colours.max()) + 1
    neighbours = (target * count + colours[source]).sort().values % count  # ascending for each target
    degree = torch.bincount(target, minlength=colours.numel())
    first = degree.cumsum(0) - degree
    refined = torch.empty_like(colours)
    used = 0
    for width in torch.unique(degree).tolist():  # nodes of one degree make a table
        nodes = (degree == width).nonzero().squeeze(1)
        table = neighbours[first[nodes].unsqueeze(1) + torch.arange(width)]
        rows, place = torch.unique(torch.cat([colours[nodes].unsqueeze(1), table], 1), dim=0, return_inverse=True)
        refined[nodes] = used + place
        used += rows.size(0)
    return _numbered(refined)


def row_classes(rows: Tensor, tolerance: float = 0.0) -> Tensor:
    """Group rows that are equal, up to a tolerance in each column.

    In a sorted column, a gap above the tolerance begins a new group. A class is what is in one group in every column.

    Args:
        rows: Features or outputs, ``[num_nodes, num_columns]``.
        tolerance: The largest gap between values that count as equal.

    Returns:
        The class of each row, ``[num_nodes]``, numbered from 0 in the order they first appear.

    Example:
        >>> row_classes(torch.tensor([[0.5, 1.0], [0.0, 1.0], [0.5001, 1.0]]), tolerance=0.01)
        tensor([0, 1, 0])
    """
    if rows.dim() != 2 or not rows.numel() or not bool(torch.isfinite(rows).all()):
        got = f"shape {list(rows.shape)}, or NaN or infinity"
        raise InputError("rows must be finite, [num_nodes, num_columns]", got=got, fix="Check features and model.")
    ordered, order = rows.sort(dim=0)
    group = F.pad((ordered.diff(dim=0) > tolerance).long().cumsum(0), (0, 0, 1, 0))
    groups = torch.empty_like(order).scatter_(0, order, group)
    return _numbered(torch.unique(groups, dim=0, return_inverse=True)[1])


@dataclass(frozen=True)
class Comparison:
    """How classes of nodes differ from Weisfeiler-Lehman's.

    Args:
        colours: Number of Weisfeiler-Lehman's classes.
        classes: Number of classes that were compared with them.
        torn: How many of Weisfeiler-Lehman's classes lie in several of the others: too much is told apart.
        merged: How many share one of the others with another of their kind: too little is told apart.
    """

    colours: int
    classes: int
    torn: int
    merged: int

    @property
    def same(self) -> bool:
        """Whether both are the same classes."""
        return not self.torn and not self.merged


def compare(classes: Tensor, colours: Tensor) -> Comparison:
    """Compare classes of nodes with Weisfeiler-Lehman's; numbers need not agree.

    Args:
        classes: The class of each node, ``[num_nodes]``.
        colours: The colour of each node, ``[num_nodes]``.

    Example:
        >>> compare(torch.tensor([0, 1, 2, 2]), torch.tensor([5, 5, 3, 4]))
        Comparison(colours=3, classes=3, torn=1, merged=2)
    """
    colours = _numbered(_checked(colours, colours.numel()))
    classes = _numbered(_checked(classes, colours.numel()))
    pairs = torch.unique(torch.stack([colours, classes]), dim=1)
    pieces, sharers = torch.bincount(pairs[0]), torch.bincount(pairs[1])
    merged = torch.unique(pairs[0, sharers[pairs[1]] > 1])
    return Comparison(pieces.numel(), sharers.numel(), int((pieces > 1).sum()), merged.numel())


def same_classes(first: Tensor, second: Tensor) -> bool:
    """Whether two colourings tell the same nodes apart, whatever their colours are called.

    Example:
        >>> same_classes(torch.tensor([0, 1, 0]), torch.tensor([7, 3, 7]))
        True
    """
    return compare(first, second).same


def is_finer(first: Tensor, second: Tensor) -> bool:
    """Whether the first colouring tells apart all nodes that the second one tells apart, and maybe more.

    Example:
        >>> is_finer(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0]))
        True
        >>> is_finer(torch.tensor([0, 1, 0]), torch.tensor([0, 1, 2]))
        False
    """
    return compare(first, second).merged == 0


def _numbered(colours: Tensor) -> Tensor:
    """The same classes, numbered in the order they first appear."""
    distinct, place = torch.unique(colours, return_inverse=True)
    first = torch.full(distinct.shape, colours.numel()).scatter_reduce(0, place, torch.arange(place.numel()), "amin")
    return first.argsort().argsort()[place]


def _checked(colours: Tensor, num_nodes: int) -> Tensor:
    if colours.dtype not in (torch.int32, torch.int64) or colours.shape != (num_nodes,) or not num_nodes:
        raise InputError(
            f"colours must be integers, one for each of the {num_nodes or 'at least one'} nodes",
            got=f"{colours.dtype} of shape {list(colours.shape)}",
            fix="Use row_classes(x) to get them from features.",
        )
    return colours.to("cpu", torch.long)


# A model as powerful as Weisfeiler-Lehman ############################################################################


class PowerfulLayer(MessagePassing):  # type: ignore[misc]
    r"""A GIN layer with random weights: :math:`\sin(W((1 + \epsilon) h_v + \sum_w a_{vw} h_w) + b)`.

    It gives different outputs to different multisets, for almost all weights. A sine does not saturate, so that sums
    over many neighbours stay apart.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
        generator: Where the weights come from.
    """

    epsilon = math.sqrt(0.5)  # not rational: a node is not mistaken for one of its neighbours

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator | None = None) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(in_channels, out_channels, dtype=torch.double)
        nn.init.normal_(self.lin.weight, std=1 / math.sqrt(in_channels), generator=generator)
        nn.init.uniform_(self.lin.bias, 0, 2 * math.pi, generator=generator)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute one layer: ``x`` [num_nodes, in_channels] to [num_nodes, out_channels]."""
        total = self.propagate(edge_index, x=x, edge_weight=edge_weight) + (1 + self.epsilon) * x
        return torch.sin(self.lin(total))

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        """The neighbour, weighted."""
        return x_j if edge_weight is None else edge_weight.unsqueeze(1) * x_j


class PowerfulGNN(nn.Module):
    """Layers with random weights in float64 that tell apart what as many rounds of Weisfeiler-Lehman do.

    Args:
        in_channels: Width of the features. They should be few distinct rows, such as one-hot colours.
        layers: Number of layers.
        channels: Width of the layers.
        seed: Other seeds give other weights.

    Example:
        >>> path = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> row_classes(full_batch(PowerfulGNN(1, layers=2), path), TOLERANCE)
        tensor([0, 1, 0])
    """

    def __init__(self, in_channels: int, layers: int, *, channels: int = 16, seed: int = 0) -> None:
        super().__init__()
        if min(in_channels, layers, channels) < 1:
            got = f"in_channels={in_channels}, layers={layers}, channels={channels}"
            raise InputError("a model has at least one layer and one channel", got=got, fix="Ask for more.")
        generator = torch.Generator().manual_seed(seed)
        widths = [in_channels] + (layers - 1) * [channels]
        self.layers = nn.ModuleList(PowerfulLayer(width, channels, generator) for width in widths)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute all layers: ``x`` [num_nodes, in_channels] to [num_nodes, channels]."""
        x = x.double()
        for layer in self.layers:
            x = layer(x, edge_index, edge_weight)
        return x


# Outputs, each way ###################################################################################################


@torch.no_grad()
def full_batch(model: nn.Module, data: Data) -> Tensor:
    """The model's outputs on the whole graph, ``[num_nodes, channels]``."""
    out: Tensor = model(data.x, data.edge_index)
    return out


@torch.no_grad()
def with_histories(
    model: nn.Module,
    data: Data,
    num_parts: int | None = None,
    *,
    partition: Parts = "metis",
    passes: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The model's outputs with histories (GAS), whose weights stay as they are.

    Args:
        model: A model of PyG layers; a copy of it is used.
        data: The graph.
        num_parts: Number of parts to cut it into; a batch is one part.
        partition: ``"metis"``, ``"random"``, or the part of each node.
        passes: Number of passes over the batches as in training, from empty histories; the outputs are those of the
            last one. ``None`` brings histories up to date layer by layer instead.
        seed: Makes parts and the order of batches reproducible.

    Returns:
        ``[num_nodes, channels]``.
    """
    if passes is not None and passes < 1:
        raise InputError("passes must be at least 1", got=str(passes), fix="Leave it out for exact histories.")
    model, loader = _scaled(model, data, num_parts, partition, seed)
    if passes is None:
        exact: Tensor = infer(model, loader)
        return exact
    return [_pass(model, loader) for _ in range(passes)][-1]


def while_training(
    model: nn.Module,
    data: Data,
    num_parts: int | None = None,
    *,
    partition: Parts = "metis",
    epochs: int = 10,
    lr: float = 1e-3,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The model's outputs with the stale histories that training leaves behind, and the exact ones beside them.

    A copy of the model learns random classes by gradient descent, so that every batch changes the weights. The outputs
    are those of one more pass.

    Args:
        model: A model of PyG layers.
        data: The graph.
        num_parts: Number of parts.
        partition: As for :func:`with_histories`.
        epochs: Number of passes that train.
        lr: Step size. The larger, the staler are histories.
        seed: Makes parts, order and what is to be learned reproducible.

    Returns:
        Outputs with histories, and exact ones for the same weights; each ``[num_nodes, channels]``.
    """
    model, loader = _scaled(model, data, num_parts, partition, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    draw = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(seed))
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            wanted = (draw[batch.n_id[: batch.batch_size]] * out.size(1)).long()
            F.cross_entropy(out, wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    exact: Tensor = infer(model, loader, update_histories=False)
    with torch.no_grad():
        return _pass(model, loader), exact


def nearest_colours(out: Tensor, exact: Tensor, colours: Tensor) -> Tensor:
    """The map of Theorem 2: each output gets the colour of the exact output that it is nearest to.

    Args:
        out: Outputs that are only near the exact ones, ``[num_nodes, channels]``.
        exact: The exact outputs, ``[num_nodes, channels]``.
        colours: The colour of each node, ``[num_nodes]``.

    Returns:
        ``[num_nodes]``; takes time and memory for every pair of nodes.

    Example:
        >>> nearest_colours(torch.tensor([[0.1], [0.8]]), torch.tensor([[0.0], [1.0]]), torch.tensor([4, 7]))
        tensor([4, 7])
    """
    return colours[torch.cdist(out, exact, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)]


@torch.no_grad()
def with_samples(
    model: nn.Module,
    data: Data,
    fan_out: Sequence[int],
    *,
    num_batches: int = 4,
    rescale: bool = True,
    seed: int = 0,
) -> Tensor:
    """The model's outputs on sampled neighbourhoods (GraphSAGE), ``[num_nodes, channels]``.

    Args:
        model: The model.
        data: The graph.
        fan_out: How many neighbours are drawn, one number per layer.
        num_batches: Number of batches that the nodes are drawn into.
        rescale: Weight the edges that were drawn by how many there are for each, as the paper's Proposition does.
        seed: Makes batches and neighbours reproducible.
    """
    loader = SampleLoader(_plain(data), torch.arange(data.num_nodes), fan_out, num_batches, seed=seed)
    return _on_subgraphs(model, data, loader, rescale)


@torch.no_grad()
def with_clusters(
    model: nn.Module,
    data: Data,
    num_parts: int | None = None,
    *,
    partition: Parts = "metis",
    rescale: bool = True,
    seed: int = 0,
) -> Tensor:
    """The model's outputs without the edges between batches (Cluster-GCN), ``[num_nodes, channels]``.

    Args:
        model: The model.
        data: The graph.
        num_parts: Number of parts.
        partition: As for :func:`with_histories`.
        rescale: Weight the edges that remain by how many there were for each.
        seed: Makes parts reproducible.
    """
    return _on_subgraphs(model, data, ClusterLoader(_plain(data), num_parts, partition=partition, seed=seed), rescale)


def _scaled(
    model: nn.Module, data: Data, num_parts: int | None, partition: Parts, seed: int
) -> tuple[nn.Module, HaloLoader]:
    data = _plain(data)
    scaled = autoscale(copy.deepcopy(model), data)
    return scaled, HaloLoader(data, num_parts, partition=partition, shuffle=True, seed=seed)


def _on_subgraphs(model: nn.Module, data: Data, batches: Iterable[Data], rescale: bool) -> Tensor:
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes).double()
    found = []
    for batch in batches:
        target = batch.edge_index[1]
        left = torch.bincount(target, minlength=batch.num_nodes)
        weight = degree[batch.n_id[target]] / left[target] if rescale else None
        out = model(batch.x, batch.edge_index, weight)
        found.append((batch.n_id[: batch.batch_size], out[: batch.batch_size]))
    return _in_order(found)


def _pass(model: nn.Module, loader: HaloLoader) -> Tensor:
    """The outputs of one pass over the batches, which pushes what it computes."""
    found = []
    for batch in loader:
        nodes = batch.n_id[: batch.batch_size].as_subclass(Tensor)
        found.append((nodes, model(batch.x, batch.edge_index)))
    return _in_order(found)


def _in_order(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    nodes, rows = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    return rows[nodes.argsort()]


def _plain(data: Data) -> Data:
    """Features and edges only: neither weights nor labels are for the model to see."""
    if data.x is None:
        raise InputError("the graph needs features x", got="none", fix="Set data.x = torch.ones(data.num_nodes, 1).")
    return Data(x=data.x, edge_index=data.edge_index)
