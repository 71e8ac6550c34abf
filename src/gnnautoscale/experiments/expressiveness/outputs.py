"""A model as powerful as Weisfeiler-Lehman, and its outputs in full batch, with histories and on subgraphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.attach import autoscale, infer
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader

#: Outputs closer than this count as equal. In float64, rounding errors are far smaller.
TOLERANCE = 1e-9
_WIDTH = 16
_EPSILON = math.sqrt(0.5)  # irrational, so that a node is not mistaken for one of its neighbours


class PowerfulLayer(MessagePassing):  # type: ignore[misc]
    r"""A GIN layer with random weights: :math:`\sin(W((1 + \epsilon) h_v + \sum_w a_{vw} h_w) + b)`.

    For almost all weights it maps different multisets to different outputs. A sine does not saturate, so sums over
    many neighbours stay apart.
    """

    def __init__(self, in_channels: int, generator: torch.Generator) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(in_channels, _WIDTH, dtype=torch.double)
        nn.init.normal_(self.lin.weight, std=1 / math.sqrt(in_channels), generator=generator)
        nn.init.uniform_(self.lin.bias, 0, 2 * math.pi, generator=generator)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute one layer: ``x`` [num_nodes, in_channels] to [num_nodes, 16]."""
        total = self.propagate(edge_index, x=x, edge_weight=edge_weight) + (1 + _EPSILON) * x
        return torch.sin(self.lin(total))

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        """The neighbour, weighted."""
        return x_j if edge_weight is None else edge_weight.unsqueeze(1) * x_j


class PowerfulGNN(nn.Module):
    """Random layers in float64, 16 wide, that tell apart what as many rounds of Weisfeiler-Lehman do.

    Args:
        in_channels: Width of the features, which should have few distinct rows, such as one-hot colours.
        layers: Number of layers.
        seed: Draws the weights.

    Example:
        >>> from gnnautoscale.experiments.expressiveness import row_classes
        >>> path = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> row_classes(full_batch(PowerfulGNN(1, layers=2), path), TOLERANCE)
        tensor([0, 1, 0])
    """

    @checked(in_channels={"least": 1}, layers={"least": 1, "below": 2**16}, seed={"least": 0, "below": 2**32})
    def __init__(self, in_channels: int, layers: int, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        widths = [in_channels] + (layers - 1) * [_WIDTH]
        self.layers = nn.ModuleList(PowerfulLayer(width, generator) for width in widths)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute all layers: ``x`` [num_nodes, in_channels] to [num_nodes, 16]."""
        x = x.double()
        for layer in self.layers:
            x = layer(x, edge_index, edge_weight)
        return x


@checked()
@torch.no_grad()
def full_batch(model: nn.Module, data: Data) -> Tensor:
    """The model's outputs on the whole graph, ``[num_nodes, channels]``."""
    return _call(model, data)


@checked(passes={"least": 1, "fix": "Leave it out for exact histories."})
@torch.no_grad()
def with_histories(model: nn.Module, loader: HaloLoader, *, passes: int | None = None) -> Tensor:
    """The outputs of a copy of the model with histories (GAS) and fixed weights, ``[num_nodes, channels]``.

    Args:
        model: A model of PyG layers.
        loader: Yields the batches of the graph.
        passes: Number of passes over the batches, as in training and starting from empty histories; the outputs are
            those of the last pass. By default histories are computed layer by layer, so that outputs are exact.

    Example:
        >>> path = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> model = PowerfulGNN(1, layers=2)
        >>> bool(torch.allclose(with_histories(model, HaloLoader(path, 2)), full_batch(model, path)))
        True
    """
    scaled = autoscale(copy.deepcopy(model), loader.data)
    if passes is None:
        exact: Tensor = infer(scaled, loader, call=_call)
        return exact
    return [_one_pass(scaled, loader) for _ in range(passes)][-1]


@checked(epochs={"least": 0}, lr={"least": 0}, seed={"least": 0, "below": 2**32})
def while_training(
    model: nn.Module, loader: HaloLoader, *, epochs: int = 10, lr: float = 1e-3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The outputs of a copy of the model with the stale histories that training leaves behind, and the exact outputs.

    The copy learns random classes by gradient descent, so that every batch changes the weights. One more pass over the
    batches gives the outputs.

    Args:
        model: A model of PyG layers.
        loader: Yields the batches of the graph.
        epochs: Number of training passes.
        lr: Learning rate. The larger it is, the staler are the histories.
        seed: Draws the classes.

    Returns:
        Outputs with histories, and exact outputs of the same weights; each ``[num_nodes, channels]``.

    Example:
        >>> path = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> stale, exact = while_training(PowerfulGNN(1, layers=2), HaloLoader(path, 2))
        >>> 0 < float((stale - exact).abs().max()) < 0.1
        True
    """
    scaled = autoscale(copy.deepcopy(model), loader.data)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=lr)
    draw = torch.rand(loader.data.num_nodes, generator=torch.Generator().manual_seed(seed))
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            out = _call(scaled, batch)
            wanted = (draw[batch.n_id[: batch.batch_size]] * out.size(1)).long()
            F.cross_entropy(out, wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    exact: Tensor = infer(scaled, loader, call=_call, update_histories=False)
    with torch.no_grad():
        return _one_pass(scaled, loader), exact


@checked()
@torch.no_grad()
def on_subgraphs(model: nn.Module, data: Data, batches: Iterable[Data], *, rescale: bool = True) -> Tensor:
    """The model's outputs on subgraphs, without histories, ``[num_nodes, channels]``.

    Args:
        model: A model that takes edge weights.
        data: The whole graph.
        batches: Subgraphs of it, such as those of a ``SampleLoader`` (GraphSAGE) or a ``ClusterLoader`` (Cluster-GCN).
        rescale: Whether the remaining edges into a node are weighted to stand for all its edges, as in the paper's
            Proposition.
    """
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes).double()
    found = []
    for batch in batches:
        target = batch.edge_index[1]
        left = torch.bincount(target, minlength=batch.num_nodes)
        weight = degree[batch.n_id[target]] / left[target] if rescale else None
        found.append((batch, model(batch.x, batch.edge_index, weight)))
    if not found:
        raise InputError("there must be at least one batch", got="none", fix="Pass those of a SampleLoader.")
    return _in_order(found)


def _call(model: nn.Module, data: Data) -> Tensor:
    """Call the model without the graph's edge weights."""
    out: Tensor = model(data.x, data.edge_index)
    return out


def _one_pass(model: nn.Module, loader: HaloLoader) -> Tensor:
    """The outputs of one pass over the batches, which pushes what it computes."""
    return _in_order([(batch, _call(model, batch)) for batch in loader])


def _in_order(found: list[tuple[Data, Tensor]]) -> Tensor:
    nodes = torch.cat([batch.n_id[: batch.batch_size].as_subclass(Tensor) for batch, _ in found])
    return torch.cat([out[: batch.batch_size] for batch, out in found])[nodes.argsort()]
