r"""The paper's bounds on the error of histories, evaluated with measured quantities.

For a node and a layer, :math:`h` is the exact embedding, :math:`\tilde{h}` what a batch computes, and :math:`\bar{h}`
the row in the history. Lemma 1 bounds the error of a layer by closeness :math:`\delta = \| \tilde{h} - h \|` and
staleness :math:`\epsilon = \| \bar{h} - \tilde{h} \|` of the layer below it, Theorem 1 the error of all layers by
staleness alone. All norms are Euclidean. ``docs/theory.md`` says what had to be corrected, and what does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from gnnautoscale._util import tensors_in
from gnnautoscale.attach import CallModel, attached, call_with_batch, outputs, plan_of
from gnnautoscale.errors import InputError
from gnnautoscale.forward import (
    ExchangePolicy,
    Plan,
    RowStore,
    Session,
    StoreExchange,
    SweepExchange,
    evaluating,
    flat,
)
from gnnautoscale.graph import BatchInfo, HaloLoader
from gnnautoscale.history import History, codec_for

Number = TypeVar("Number", float, Tensor)
# Rows of a history that are read at once, since a GPU may not have room for all.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Layer:
    r"""What the bounds need to know about a layer :math:`h_v = U(h_v, \bigoplus_w c_{w,v} M(h_w))`.

    What the model does with rows between two layers, such as an activation, belongs to ``message`` and ``own`` of the
    layer that follows; what it does after the last one belongs to that one's ``update``.

    Attributes:
        message: The Lipschitz constant :math:`k_1` of :math:`M`.
        update: A constant :math:`k_2` with :math:`\| U(a, b) - U(a', b') \| \leq k_2 (\| a - a' \| + \| b - b' \|)`,
            such as the Lipschitz constant of :math:`U` on both arguments side by side.
        aggregation: "sum", "mean" or "max".
        own: A factor to :math:`\| a - a' \|`. The paper has 1; 0 if the node's own row comes in by a self-loop.
        width: The width of messages, which limits what "max" can do.
    """

    message: float
    update: float
    aggregation: Literal["sum", "mean", "max"] = "sum"
    own: float = 1.0
    width: int | None = None

    def __post_init__(self) -> None:
        finite = all(0.0 <= number < math.inf for number in (self.message, self.update, self.own))
        if not finite or self.aggregation not in ("sum", "mean", "max") or (self.width is not None and self.width < 1):
            rule = "a layer has finite constants that are not negative, and aggregates by 'sum', 'mean' or 'max'"
            raise InputError(rule, got=repr(self), fix="See lipschitz_constant and jacobian_norm.")


@dataclass(frozen=True)
class MessageEdges:
    """Sources and targets of messages, ``[2, num_edges]``, and what messages are multiplied by, ``[num_edges]``."""

    edge_index: Tensor
    num_nodes: int
    weight: Tensor | None = None

    def aggregate(self, layer: Layer, error: Tensor) -> Tensor:
        r"""Bound errors of aggregated messages, ``[num_nodes]``, by those of all messages, ``[num_edges]``.

        :math:`\sum_w r_w` for sum, :math:`\frac{1}{|N(v)|} \sum_w r_w` for mean, and for max the smaller of
        :math:`\sqrt{\sum_w r_w^2}` and :math:`\sqrt{D} \max_w r_w` with messages of width :math:`D`.
        """
        target, zeros = self.edge_index[1], torch.zeros(self.num_nodes, dtype=torch.double)
        error = error.double() if self.weight is None else error.double() * self.weight.detach().double().abs()
        if layer.aggregation == "max":
            together = zeros.index_add(0, target, error.square()).sqrt()
            largest = zeros.scatter_reduce(0, target, error, "amax")
            return together if layer.width is None else torch.minimum(together, math.sqrt(layer.width) * largest)
        count = torch.bincount(target, minlength=self.num_nodes).clamp(1) if layer.aggregation == "mean" else 1
        return zeros.index_add(0, target, error) / count

    def factor(self, layer: Layer) -> Tensor:
        r"""The Lipschitz constant of the aggregation at each node, ``[num_nodes]``: Lemma 1's :math:`|N(v)|`.

        Without weights :math:`|N(v)|` for sum and 1 for mean, as in the paper. For max the paper has 1, which does not
        hold: each value may come from another neighbour, so it is :math:`\sqrt{\min(|N(v)|, D)}`.

        Example:
            >>> star = MessageEdges(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5)
            >>> [float(star.factor(Layer(1.0, 1.0, aggregation))[0]) for aggregation in ("sum", "mean", "max")]
            [4.0, 1.0, 2.0]
        """
        return self.aggregate(layer, torch.ones(self.edge_index.size(1)))


def lemma1(layer: Layer, factor: Number, *, closeness: Number, staleness: Number) -> Number:
    r"""Lemma 1: :math:`\| \tilde{h}_v - h_v \| \leq \delta k_2 + (\delta + \epsilon) k_1 k_2 |N(v)|`.

    Args:
        layer: The constants.
        factor: In place of :math:`|N(v)|` a value of :meth:`MessageEdges.factor`, or all.
        closeness: :math:`\delta`: the most by which inputs are off that a batch computes.
        staleness: :math:`\epsilon`: the most by which histories differ from these.

    Example:
        >>> lemma1(Layer(message=2.0, update=3.0), 4.0, closeness=0.5, staleness=1.0)
        37.5
    """
    return closeness * layer.own * layer.update + (closeness + staleness) * layer.message * layer.update * factor


def theorem1(layers: Sequence[Layer], factors: Sequence[float], *, staleness: Sequence[float]) -> list[float]:
    r"""Theorem 1: bounds on the errors of all layers, of which the first is exact, by staleness alone.

    The recursion of the paper's proof: :math:`\delta^{(1)} = 0`, then Lemma 1. With the same constants everywhere

    .. math::
        \delta^{(L)} = \sum_{\ell = 1}^{L - 1} \epsilon^{(\ell)} k_1 k_2 N {(k_2 (1 + k_1 N))}^{L - \ell - 1}.

    Args:
        layers: The constants of each layer.
        factors: In place of :math:`|N(v)|`, for each layer, the largest value of :meth:`MessageEdges.factor`.
        staleness: :math:`\epsilon^{(\ell)}` for each layer but the last.

    Example:
        >>> theorem1([Layer(1.0, 1.0)] * 3, [2.0] * 3, staleness=[1.0, 1.0])
        [0.0, 2.0, 8.0]
    """
    _check_counts(len(layers), factors=len(factors), staleness=len(staleness) + 1)
    bounds = [0.0]
    for layer, factor, stale in zip(layers[1:], factors[1:], staleness, strict=True):
        bounds.append(lemma1(layer, factor, closeness=bounds[-1], staleness=stale))
    return bounds


def theorem1_by_node(
    layers: Sequence[Layer], edges: MessageEdges, staleness: Sequence[Tensor], crossing: Tensor | None = None
) -> list[Tensor]:
    r"""Theorem 1 for each node, from its own neighbours; never above :func:`theorem1`.

    :math:`\delta_v^{(\ell)} = k_2 (\delta_v + k_1 \bigoplus_w |c_{w,v}| (\delta_w + \epsilon_w))`, where
    :math:`\epsilon_w` counts only if the edge leads from one batch into another.

    Args:
        layers: The constants of each layer.
        edges: The edges.
        staleness: For each layer but the last that of every node, ``[num_nodes]``.
        crossing: Whether each edge leads into another batch, ``[num_edges]``; by default all do.
    """
    _check_counts(len(layers), staleness=len(staleness) + 1)
    source = edges.edge_index[0]
    bounds = [torch.zeros(edges.num_nodes, dtype=torch.double)]
    for layer, stale in zip(layers[1:], staleness, strict=True):
        pulled = stale.double()[source] if crossing is None else stale.double()[source] * crossing
        arriving = layer.message * edges.aggregate(layer, bounds[-1][source] + pulled)
        bounds.append(layer.update * (layer.own * bounds[-1] + arriving))
    return bounds


@dataclass(frozen=True)
class LayerErrors:
    r"""Errors of a layer, for every node, ``[num_nodes]``.

    Attributes:
        name: The layer's slot, or "output" for the last, which has no history.
        closeness: :math:`\| \tilde{h}_v - h_v \|`, the paper's :math:`\delta`.
        staleness: :math:`\| \bar{h}_v - \tilde{h}_v \|`, the paper's :math:`\epsilon`.
        history: :math:`\| \bar{h}_v - h_v \|`, at most the sum of these.
        norm: :math:`\| h_v \|`, to compare them with.
    """

    name: str
    closeness: Tensor
    staleness: Tensor
    history: Tensor
    norm: Tensor


@dataclass(frozen=True)
class LayerBounds:
    """Bounds on a layer's closeness: by Lemma 1, ``[num_nodes]``, and by Theorem 1, for all and ``[num_nodes]``."""

    measured: LayerErrors
    lemma: Tensor
    theorem: float
    by_node: Tensor


@torch.no_grad()
def measure(model: nn.Module, loader: HaloLoader, *, call: CallModel = call_with_batch) -> list[LayerErrors]:
    """Measure the errors of all layers that have a history, and of the output, with histories as they are now.

    Every batch is computed as if it came next: from the same histories, which are only read, in evaluation mode.

    Args:
        model: An autoscaled model; rows of its histories that were never written are zero.
        loader: Cuts the training graph into batches.
        call: How to call the model with a batch, if ``model(batch)`` is not right.

    Example:
        >>> import gnnautoscale as gas
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> [layer.name for layer in measure(model, gas.HaloLoader(data, num_parts=4))]
        ['convs.0', 'output']
    """
    kept, computed = _histories(model, loader), dict[str, Tensor]()
    with evaluating(model):
        output = _outputs(model, loader, call, _StepRows.exchange(kept, computed))
        exact = _exact(model, loader, call)
    kept["output"] = computed["output"] = output
    rows = [(name, now, kept.get(name, torch.zeros(())), exact[name]) for name, now in computed.items()]
    pairs = [(name, (now, old, old, right), (right, now, right, torch.zeros(()))) for name, now, old, right in rows]
    return [LayerErrors(name, *map(_distance, ones, others)) for name, ones, others in pairs]


def compare_bounds(
    model: nn.Module,
    loader: HaloLoader,
    layers: Sequence[Layer],
    edges: MessageEdges,
    *,
    call: CallModel = call_with_batch,
) -> list[LayerBounds]:
    """Evaluate the bounds beside the errors they are about, layer by layer.

    Args:
        model: An autoscaled model in which every layer reads the layer before it and no other.
        loader: Cuts the training graph into batches.
        layers: The constants of each layer.
        edges: The edges that messages pass, with those that layers add.
        call: How to call the model with a batch, if ``model(batch)`` is not right.
    """
    errors = measure(model, loader, call=call)
    needs = [(slot, needed) for slot, needed in cast(Plan, attached(model).plan).needs.items() if slot != Plan.OUTPUT]
    if any(needed != {before} for (before, _), (_, needed) in pairwise(needs)):
        rule, fix = "the paper's bounds need layers that each read the layer before", "Use measure for any model."
        raise InputError(rule, got="a layer that reads others, as with residuals", fix=fix)
    batch_of = (loader.labels // loader.batch_size)[edges.edge_index]
    factors, stale = [edges.factor(layer) for layer in layers], [layer.staleness for layer in errors[:-1]]
    theorem = theorem1(layers, [float(at.max()) for at in factors], staleness=[float(rows.max()) for rows in stale])
    by_node = theorem1_by_node(layers, edges, stale, batch_of[0] != batch_of[1])
    lemmas = [torch.zeros_like(factors[0])] + [
        lemma1(layer, factor, closeness=below.closeness.max(), staleness=below.staleness.max())
        for layer, factor, below in zip(layers[1:], factors[1:], errors, strict=False)
    ]
    return [LayerBounds(*row) for row in zip(errors, lemmas, theorem, by_node, strict=True)]


@torch.no_grad()
def error_by_sweep(
    model: nn.Module, loader: HaloLoader, sweeps: int, *, call: CallModel = call_with_batch
) -> list[float]:
    r"""The largest error of the outputs in each of several passes over all batches, with fixed weights.

    Batches push and pull as in training, in evaluation mode, on a copy of the histories as they are. In the first pass
    the first layer is exact, in each further one the next: from pass :math:`L` on all outputs of :math:`L` layers are,
    and the histories already after pass :math:`L - 1`. In few bits, the error of rounding remains.

    Args:
        model: An autoscaled model.
        loader: Cuts the training graph into batches.
        sweeps: How many passes to make.
        call: How to call the model with a batch, if ``model(batch)`` is not right.

    Example:
        >>> import gnnautoscale as gas
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=3, out_channels=4), data)
        >>> [error < 1e-4 for error in error_by_sweep(model, gas.HaloLoader(data, num_parts=4), 4)]
        [False, False, True, True]
    """
    if isinstance(sweeps, bool) or not isinstance(sweeps, int) or sweeps < 1:
        raise InputError("sweeps must be at least 1", got=repr(sweeps), fix="As many as the model has layers suffice.")
    rows = _histories(model, loader)
    with evaluating(model):
        exact = _exact(model, loader, call)["output"]
        found = [_outputs(model, loader, call, _StepRows.exchange(rows, rows)) for _ in range(sweeps)]
    return [float(_distance(output, exact).max()) for output in found]


class _StepRows(RowStore):
    """Rows in place of histories, ``[num_nodes, width]`` in full precision; read in the precision of histories."""

    def __init__(self, read: dict[str, Tensor], written: dict[str, Tensor]) -> None:
        self._read, self._written = read, written

    @staticmethod
    def exchange(read: dict[str, Tensor], written: dict[str, Tensor]) -> ExchangePolicy:
        """Steps that read and write these rows."""
        return StoreExchange(_StepRows(read, written), push_all=True)

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        nodes = session.info.n_id[which]
        if slot not in self._read:
            return like.new_zeros((nodes.numel(), *like.shape[1:]))
        rows = self._read[slot][nodes].to(like)
        codec = codec_for(session.memory.dtype or like.dtype, rows.size(1))
        return codec.decode(codec.encode(rows), like.dtype).view(-1, *like.shape[1:])

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        _put(self._written, slot, session.info, rows)


class _ExactRows(RowStore):
    """Rows of an exact evaluation, apart from histories and in full precision."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self._rows = rows

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        return self._rows[slot][session.info.n_id[which]].to(like).view(-1, *like.shape[1:])

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        _put(self._rows, slot, session.info, rows)


def _exact(model: nn.Module, loader: HaloLoader, call: CallModel) -> dict[str, Tensor]:
    """The exact rows of every slot, and of the output, computed batch by batch."""
    exact: dict[str, Tensor] = {}
    for level in plan_of(model, loader, call).levels:
        _outputs(model, loader, call, SweepExchange(level, _ExactRows(exact)))
    exact["output"] = _outputs(model, loader, call, SweepExchange(None, _ExactRows(exact)))
    return exact


def _outputs(model: nn.Module, loader: HaloLoader, call: CallModel, exchange: ExchangePolicy) -> Tensor:
    """Run the model on all batches; returns its outputs side by side, ``[num_nodes, width]``, if it gets that far."""
    found: dict[str, Tensor] = {}
    for info, out in outputs(model, loader, call, attached(model).running(exchange)):
        if out is not None:
            _put(found, "output", info, torch.cat([flat(value).double() for value in tensors_in(out)], dim=1))
    return found.get("output", torch.empty(0))


def _histories(model: nn.Module, loader: HaloLoader) -> dict[str, Tensor]:
    """The rows of all histories in the order of the nodes."""
    memory = attached(model).memory_of(loader.graph)
    memory.settle()
    pieces = torch.split(memory.row_order(next(loader.in_order()).edge_index.info).row_of, _PIECE)

    def all_rows(history: History) -> Tensor:
        dtype = torch.double if history.dtype == torch.double else torch.float
        where = history.raw.device
        return torch.cat([history.pull(piece, device=where, dtype=dtype).cpu() for piece in pieces]).double()

    return {slot: all_rows(history) for slot, history in memory.histories.items()}


def _put(kept: dict[str, Tensor], slot: str, info: BatchInfo, rows: Tensor) -> None:
    rows = flat(rows).cpu()
    if slot not in kept:
        kept[slot] = torch.zeros(info.graph.num_nodes, rows.size(1), dtype=rows.dtype)
    kept[slot][info.nodes] = rows.to(kept[slot])


def _distance(rows: Tensor, others: Tensor) -> Tensor:
    return (rows.double() - others.double()).square().sum(dim=1).sqrt()


def _check_counts(num_layers: int, **counts: int) -> None:
    if wrong := [f"{name} for {count}" for name, count in counts.items() if count != num_layers]:
        rule = f"{num_layers} layers have as many factors, and a history between each two"
        raise InputError(rule, got=", ".join(wrong), fix="Pass one for each message-passing layer.")
