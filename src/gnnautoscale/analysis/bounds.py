r"""The paper's bounds on the error of histories, evaluated with measured quantities.

For a node and a layer, :math:`h` is the exact embedding, :math:`\tilde{h}` that of a batch, and :math:`\bar{h}` the row
in the history. Lemma 1 bounds the error of a layer by the closeness :math:`\delta = \| \tilde{h} - h \|` and the
staleness :math:`\epsilon = \| \bar{h} - \tilde{h} \|` of the layer below it, Theorem 1 the error of all layers by
staleness alone. All norms are Euclidean. ``docs/theory.md`` lists corrections to the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from gnnautoscale._util import checked, tensors_in
from gnnautoscale.attach import (
    CallModel,
    attached,
    attached_to_plain_graph,
    call_with_batch,
    collect,
    info_of,
    plan_of,
    sweep,
)
from gnnautoscale.errors import InputError
from gnnautoscale.forward import (
    ExchangePolicy,
    GraphMemory,
    Plan,
    RowStore,
    Session,
    StoreExchange,
    SweepExchange,
    TypedMemory,
    TypedPlan,
    as_matrix,
    evaluating,
)
from gnnautoscale.graph import BatchInfo, HaloLoader, TypedInfo
from gnnautoscale.history import History, codec_for, open_history

Number = TypeVar("Number", float, Tensor)
# How many rows of a history to read at once, because a GPU may not have room for all.
_CHUNK = 1 << 16


@checked(message={"least": 0}, update={"least": 0}, own={"least": 0}, width={"least": 1})
@dataclass(frozen=True)
class LayerConstants:
    r"""Constants of a layer :math:`h_v = U(h_v, \bigoplus_w c_{w,v} M(h_w))`.

    Modules between two layers, such as an activation, count towards ``message`` and ``own`` of the layer after them,
    and modules after the last layer towards its ``update``.

    Attributes:
        message: The Lipschitz constant :math:`k_1` of :math:`M`.
        update: A constant :math:`k_2` with :math:`\| U(a, b) - U(a', b') \| \leq k_2 (\| a - a' \| + \| b - b' \|)`,
            such as the Lipschitz constant of :math:`U` on both arguments side by side.
        aggregation: "sum", "mean" or "max".
        own: A factor to :math:`\| a - a' \|`: 1 in the paper; 0 if the node's own row comes by a self-loop.
        width: The width of messages, for a tighter bound with "max".
    """

    message: float
    update: float
    aggregation: Literal["sum", "mean", "max"] = "sum"
    own: float = 1.0
    width: int | None = None


@checked(edge_index={"dims": 2, "integers": True}, num_nodes={"least": 1}, weight={"dims": 1})
@dataclass(frozen=True)
class MessageEdges:
    """Sources and targets of messages, ``[2, num_edges]``, and the weights of these, ``[num_edges]``."""

    edge_index: Tensor
    num_nodes: int
    weight: Tensor | None = None

    def aggregate(self, layer: LayerConstants, error: Tensor) -> Tensor:
        r"""Bound the errors of aggregated messages, ``[num_nodes]``, by those of messages, ``[num_edges]``.

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

    def factor(self, layer: LayerConstants) -> Tensor:
        r"""The Lipschitz constant of the aggregation at each node, ``[num_nodes]``: Lemma 1's :math:`|N(v)|`.

        Without weights :math:`|N(v)|` for sum and 1 for mean, as in the paper. For max the paper's 1 does not hold,
        because each value may come from another neighbour; it is :math:`\sqrt{\min(|N(v)|, D)}`.

        Example:
            >>> star = MessageEdges(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5)
            >>> [float(star.factor(LayerConstants(1.0, 1.0, aggregation))[0]) for aggregation in ("sum", "mean", "max")]
            [4.0, 1.0, 2.0]
        """
        return self.aggregate(layer, torch.ones(self.edge_index.size(1)))


@checked()
def lemma1(layer: LayerConstants, factor: Number, *, closeness: Number, staleness: Number) -> Number:
    r"""Lemma 1: :math:`\| \tilde{h}_v - h_v \| \leq \delta k_2 + (\delta + \epsilon) k_1 k_2 |N(v)|`.

    Args:
        layer: The constants.
        factor: Replaces :math:`|N(v)|`: one value of :meth:`MessageEdges.factor`, or all.
        closeness: :math:`\delta`, the largest error of a batch's inputs.
        staleness: :math:`\epsilon`, the largest distance of histories from these inputs.

    Example:
        >>> lemma1(LayerConstants(message=2.0, update=3.0), 4.0, closeness=0.5, staleness=1.0)
        37.5
    """
    return closeness * layer.own * layer.update + (closeness + staleness) * layer.message * layer.update * factor


@checked()
def theorem1(layers: Sequence[LayerConstants], factors: Sequence[float], *, staleness: Sequence[float]) -> list[float]:
    r"""Theorem 1: bounds on the errors of all layers by staleness alone; the first layer is exact.

    The recursion of the paper's proof: :math:`\delta^{(1)} = 0`, then Lemma 1. With the same constants everywhere

    .. math::
        \delta^{(L)} = \sum_{\ell = 1}^{L - 1} \epsilon^{(\ell)} k_1 k_2 N {(k_2 (1 + k_1 N))}^{L - \ell - 1}.

    Args:
        layers: The constants of each layer.
        factors: Replace :math:`|N(v)|`: for each layer the largest value of :meth:`MessageEdges.factor`.
        staleness: :math:`\epsilon^{(\ell)}` for each layer but the last.

    Example:
        >>> theorem1([LayerConstants(1.0, 1.0)] * 3, [2.0] * 3, staleness=[1.0, 1.0])
        [0.0, 2.0, 8.0]
    """
    _check_counts(len(layers), factors=len(factors), staleness=len(staleness) + 1)
    bounds = [0.0]
    for layer, factor, stale in zip(layers[1:], factors[1:], staleness, strict=True):
        bounds.append(lemma1(layer, factor, closeness=bounds[-1], staleness=stale))
    return bounds


@checked(crossing={"dims": 1})
def theorem1_by_node(
    layers: Sequence[LayerConstants], edges: MessageEdges, staleness: Sequence[Tensor], crossing: Tensor | None = None
) -> list[Tensor]:
    r"""Theorem 1 for each node, from its own neighbours; never above :func:`theorem1`.

    :math:`\delta_v^{(\ell)} = k_2 (\delta_v + k_1 \bigoplus_w |c_{w,v}| (\delta_w + \epsilon_w))`, where
    :math:`\epsilon_w` counts only if the edge leads from one batch into another.

    Args:
        layers: The constants of each layer.
        edges: The edges.
        staleness: For each layer but the last the staleness of every node, ``[num_nodes]``.
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
    r"""Errors of a layer at every node, each ``[num_nodes]``.

    Attributes:
        name: The layer's slot, or "output" for the last layer, which has no history; "output of" a type if outputs
            are of several types.
        closeness: :math:`\| \tilde{h}_v - h_v \|`, the paper's :math:`\delta`.
        staleness: :math:`\| \bar{h}_v - \tilde{h}_v \|`, the paper's :math:`\epsilon`.
        history: :math:`\| \bar{h}_v - h_v \|`, at most the sum of these.
        norm: :math:`\| h_v \|`, for relative errors.
        kind: The type of these nodes, in a heterogeneous graph.
        has_history: Whether it is a slot.
    """

    name: str
    closeness: Tensor
    staleness: Tensor
    history: Tensor
    norm: Tensor
    kind: str | None = None
    has_history: bool = True


@dataclass(frozen=True)
class LayerBounds:
    """Bounds on a layer's closeness: Lemma 1, ``[num_nodes]``, Theorem 1, and that by node, ``[num_nodes]``."""

    measured: LayerErrors
    lemma: Tensor
    theorem: float
    by_node: Tensor


@checked()
@torch.no_grad()
def measure(model: nn.Module, loader: HaloLoader, *, call: CallModel = call_with_batch) -> list[LayerErrors]:
    """Measure the current errors of the output and of all layers with a history.

    Every batch is computed in evaluation mode as if it came next, from the same histories, which are only read.

    Args:
        model: An autoscaled model; history rows that were never written count as zero.
        loader: Makes the batches of the training graph.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.

    Example:
        >>> import gnnautoscale as gas
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> [layer.name for layer in measure(model, gas.HaloLoader(data, num_parts=4))]
        ['convs.0', 'output']
    """
    kept, computed, zero = _histories(model, loader), dict[str, Tensor](), torch.zeros(())
    with evaluating(model):
        plan = plan_of(model, loader, call)
        outputs = _outputs(model, loader, call, _steps(kept, computed))
        exact = _exact(model, loader, call)
    kinds = {**plan.kinds, **_output_kinds(plan)} if isinstance(plan, TypedPlan) else {}
    found = []
    for name, now in (*computed.items(), *outputs.items()):
        old, right = now if name in outputs else kept.get(name, zero), exact[name]
        close, stale, off, norm = starmap(_distance, ((now, right), (old, now), (old, right), (right, zero)))
        found.append(LayerErrors(name, close, stale, off, norm, kinds.get(name), name not in outputs))
    return found


@checked()
def compare_bounds(
    model: nn.Module,
    loader: HaloLoader,
    layers: Sequence[LayerConstants],
    edges: MessageEdges,
    *,
    call: CallModel = call_with_batch,
) -> list[LayerBounds]:
    """Measure errors and evaluate their bounds, layer by layer.

    Args:
        model: An autoscaled model in which every layer reads only the layer before it.
        loader: Makes the batches of the training graph.
        layers: The constants of each layer.
        edges: The edges of messages, with those that layers add.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.
    """
    attached_to_plain_graph(model, "the paper's bounds")
    errors = measure(model, loader, call=call)
    needs = [(slot, needed) for slot, needed in cast(Plan, attached(model).plan).needs.items() if slot != Plan.OUTPUT]
    if any(needed != {before} for (before, _), (_, needed) in pairwise(needs)):
        rule, fix = "the paper's bounds need layers that read only the layer before", "Use measure, for any model."
        raise InputError(rule, got="a layer that reads others, such as a residual", fix=fix)
    batch_of = (loader.labels // loader.batch_size)[edges.edge_index]
    factors, stale = [edges.factor(layer) for layer in layers], [layer.staleness for layer in errors[:-1]]
    theorem = theorem1(layers, [float(at.max()) for at in factors], staleness=[float(rows.max()) for rows in stale])
    by_node = theorem1_by_node(layers, edges, stale, batch_of[0] != batch_of[1])
    lemmas = [torch.zeros_like(factors[0])] + [
        lemma1(layer, factor, closeness=below.closeness.max(), staleness=below.staleness.max())
        for layer, factor, below in zip(layers[1:], factors[1:], errors, strict=False)
    ]
    return [LayerBounds(*row) for row in zip(errors, lemmas, theorem, by_node, strict=True)]


@checked(sweeps={"least": 1})
@torch.no_grad()
def error_by_sweep(
    model: nn.Module, loader: HaloLoader, sweeps: int, *, call: CallModel = call_with_batch
) -> list[float]:
    r"""The largest error of the outputs in each of several passes over all batches, with fixed weights.

    Batches push and pull as in training, in evaluation mode, on a copy of the histories. The first pass makes the first
    layer exact, each further pass the next: :math:`L` layers have exact histories after pass :math:`L - 1` and exact
    outputs from pass :math:`L` on. With low-precision histories the rounding error remains.

    Args:
        model: An autoscaled model.
        loader: Makes the batches of the training graph.
        sweeps: Number of passes.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.

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
        raise InputError("sweeps must be at least 1", got=repr(sweeps), fix="Use the number of layers.")
    rows = _histories(model, loader)
    with evaluating(model):
        exact = _exact(model, loader, call)
        found = [_outputs(model, loader, call, _steps(rows, rows)) for _ in range(sweeps)]
    return [max(float(_distance(rows, exact[name]).max()) for name, rows in outputs.items()) for outputs in found]


class _Rows(RowStore):
    """Rows in place of histories, ``[num_nodes, width]`` in full precision; read ``rounded`` as histories would be."""

    def __init__(self, read: dict[str, Tensor], written: dict[str, Tensor], *, rounded: bool) -> None:
        self._read, self._written, self._rounded = read, written, rounded
        # The slots that were written, by the type of nodes that they have rows of.
        self._slots: dict[str, set[str]] = {}

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        nodes = session.info.n_id[which]
        if slot not in self._read:
            return like.new_zeros((nodes.numel(), *like.shape[1:]))
        rows = self._read[slot][nodes].to(like)
        if self._rounded:
            codec = codec_for(session.memory.dtype or like.dtype, rows.size(1))
            rows = codec.decode(codec.encode(rows), like.dtype)
        return rows.view(-1, *like.shape[1:])

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        rows, kept = as_matrix(rows).cpu(), self._written
        self._slots.setdefault(session.memory.kind, set()).add(slot)
        if slot not in kept:
            kept[slot] = torch.zeros(session.memory.num_nodes, rows.size(1), dtype=rows.dtype)
        kept[slot][session.info.nodes] = rows.to(kept[slot])

    def share(self, memory: Any, slots: Iterable[str]) -> None:
        sharing = getattr(memory, "sharing", None)
        if sharing is not None:
            of_kinds = {kind: sorted(written.intersection(slots)) for kind, written in self._slots.items()}
            tables = self._written
            sharing.share({kind: [_as_history(tables[slot]) for slot in of] for kind, of in of_kinds.items()})


def _as_history(rows: Tensor) -> History:
    """A history that these very rows are in, ``[num_nodes, width]``."""
    made = open_history("device", rows.size(0), rows.size(1), rows.dtype, device=rows.device)
    made.raw = rows
    return made


def _steps(read: dict[str, Tensor], written: dict[str, Tensor]) -> ExchangePolicy:
    return StoreExchange(_Rows(read, written, rounded=True), push_all=True)


def _exact(model: nn.Module, loader: HaloLoader, call: CallModel) -> dict[str, Tensor]:
    """The exact rows of every slot and of the output."""
    exact: dict[str, Tensor] = {}
    store = _Rows(exact, exact, rounded=False)
    sweep(model, loader, call, store)
    return exact | _outputs(model, loader, call, SweepExchange(None, store))


def _outputs(model: nn.Module, loader: HaloLoader, call: CallModel, exchange: ExchangePolicy) -> dict[str, Tensor]:
    """The model's outputs for all nodes, ``[num_nodes, width]``, by name; see :class:`LayerErrors`."""
    out = [as_matrix(value).double() for value in tensors_in(collect(model, loader, call, exchange))]
    plan = attached(model).plan
    if not isinstance(plan, TypedPlan):
        return {"output": torch.cat(out, dim=1)}
    return {
        name: torch.cat([value for value, its in zip(out, plan.output_kinds, strict=True) if its == kind], dim=1)
        for name, kind in _output_kinds(plan).items()
    }


def _output_kinds(plan: TypedPlan) -> dict[str, str]:
    """The type of nodes of each output, by its name."""
    kinds = list(dict.fromkeys(plan.output_kinds))
    return {"output": kinds[0]} if len(kinds) == 1 else {f"output of {kind}": kind for kind in kinds}


def _histories(model: nn.Module, loader: HaloLoader) -> dict[str, Tensor]:
    """The rows of all histories, in the order of nodes."""
    memory = attached(model).memory_of(loader.graph)
    memory.settle()
    info = info_of(next(loader.in_order()))
    found: dict[str, Tensor] = {}
    for of, its in memory_by_type(memory, info):
        found |= _rows_of_histories(of, torch.split(of.row_order(its).row_of, _CHUNK))
    return found


def memory_by_type(
    memory: GraphMemory | TypedMemory, info: BatchInfo | TypedInfo
) -> list[tuple[GraphMemory, BatchInfo]]:
    """The histories of each type of nodes and where a batch lies in them; a plain graph has one."""
    if isinstance(memory, TypedMemory) and isinstance(info, TypedInfo):
        return [(of, info.nodes[kind]) for kind, of in memory.kinds.items()]
    return [(cast(GraphMemory, memory), cast(BatchInfo, info))]


def _rows_of_histories(memory: GraphMemory, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    def all_rows(history: History) -> Tensor:
        dtype, where = torch.double if history.dtype == torch.double else torch.float, history.raw.device
        return torch.cat([history.pull(piece, device=where, dtype=dtype).cpu() for piece in pieces]).double()

    return {slot: all_rows(history) for slot, history in memory.histories.items()}


def _distance(rows: Tensor, others: Tensor) -> Tensor:
    return (rows.double() - others.double()).square().sum(dim=1).sqrt()


def _check_counts(num_layers: int, **counts: int) -> None:
    if wrong := [f"{name} for {count}" for name, count in counts.items() if count != num_layers]:
        rule = f"{num_layers} layers have {num_layers} factors, and one staleness less"
        raise InputError(rule, got=", ".join(wrong), fix="Pass one for each message-passing layer.")
