"""Which edges a layer runs on: those of its record, cut to the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward.batch_edges import BatchEdges
from gnnautoscale.forward.lazy import LazyEdges
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.plan import LayerCall, Plan
from gnnautoscale.forward.record import Arguments, EdgeRecord, align, describe, has_rows, keep_edges
from gnnautoscale.graph import BatchInfo, BatchTensor, EdgeTable, hand_over

#: Named arguments of an edge call.
Values = dict[str, Any]


@dataclass
class ActiveLayer:
    """A layer call in progress, and how many edge calls and propagations it has made so far."""

    name: str
    layer: MessagePassing
    records: list[EdgeRecord]
    call: LayerCall
    num_edge_calls: int = 0
    num_propagations: int = 0
    # The batch's own edges among its arguments, and what functions returned for them, by their identity.
    edge_values: dict[int, Tensor] = field(default_factory=dict)
    num_functions: int = 0
    # Edges that the layer derived itself, and the positions of those that edge dropout keeps.
    dropped: tuple[Tensor, Tensor] | None = None

    @property
    def record(self) -> EdgeRecord | None:
        """The record of the next edge call, if it has one."""
        return next(iter(self.records[self.num_edge_calls :]), None)


class EdgeSource(ABC):
    """Gives layers their edges."""

    @abstractmethod
    def start(self, call: str, layer: MessagePassing, arguments: Arguments) -> tuple[LayerCall, list[EdgeRecord]]:
        """The plan's entry for a layer call and the records of its edge calls; none if it uses its own edges."""

    @abstractmethod
    def replace(self, active: ActiveLayer, edge_index: Tensor, values: Values) -> tuple[Tensor, Values]:
        """The edges and values to run an edge call on."""

    def finish(self, active: ActiveLayer) -> None:
        """Called when a layer has made its last edge call."""
        return


@dataclass(eq=False)
class RecordedEdges(EdgeSource):
    """Replaces the edges and edge-level values that a layer computes in a batch by recorded ones; see Session."""

    info: BatchInfo
    plan: Plan
    memory: GraphMemory
    device: torch.device
    dropout: float
    input_gradients: bool
    _edges: dict[EdgeRecord, BatchEdges] = field(default_factory=dict)
    _kept: dict[EdgeTable, Tensor] = field(default_factory=dict)

    def start(self, call: str, layer: MessagePassing, arguments: Arguments) -> tuple[LayerCall, list[EdgeRecord]]:
        """See :meth:`EdgeSource.start`; refuses a call that differs from the plan."""
        planned = self.plan.calls.get(call)
        attributes = [own_attribute(self.info, value) for value in tensors_in(arguments)]
        if planned is None or planned.attributes != attributes:
            raise UnsupportedModelError(
                f"{describe(call, layer)} must be called the same way every time, with the batch's own edges",
                got="arguments that differ from the first forward pass, or edges or edge attributes that were modified",
                fix="To drop edges at random, use autoscale(..., edge_dropout=p) instead of changing edge_index; do "
                "not write into batches.",
            )
        own_edges = any(name is not None and name.endswith("edge_index") for name in attributes)
        if not own_edges or not planned.edge_names:
            return planned, []
        return planned, self.memory.record(self.info.graph, call, layer, planned, arguments)

    def replace(self, active: ActiveLayer, edge_index: Tensor, values: Values) -> tuple[Tensor, Values]:
        """See :meth:`EdgeSource.replace`."""
        position = active.num_edge_calls
        active.num_edge_calls += 1
        if position >= len(active.call.edge_names):
            raise UnsupportedModelError(
                f"{describe(active.name, active.layer)} must propagate equally often in every call",
                got="more propagations than when the model was tried",
                fix="Make the number of propagations independent of the data.",
            )
        if not active.records:
            if active.call.closed:
                raise uncompensated(active.name, active.layer, "edges that the model derives itself")
            return drop_derived(active, position, edge_index, values, self.dropout)
        record = active.records[position].used_by(active.call)
        batch_edges = self._batch_edges(record, active)
        if batch_edges.kept is None and active.call.fuses(position, record.constants) and _can_fuse(active.layer):
            return self._fused(active, position, batch_edges, values)
        replaced = dict(values)
        for name in active.call.edge_names[position]:
            value = values.get(name)
            if name in batch_edges.constants:
                constant = batch_edges.constants[name]
                replaced[name] = constant.to(value.dtype) if isinstance(value, Tensor) else constant
            elif isinstance(value, Tensor):
                updated = active.call.has_edge_updater
                if active.call.closed and not (updated and has_rows(value, batch_edges.edges.size(1))):
                    got = f"values of edges, '{name}', that are computed before it"
                    raise uncompensated(active.name, active.layer, got)
                if not updated:
                    replaced[name] = value[self._alignment(record, active, edge_index, batch_edges)]
        if "lazy" not in active.call.shortcuts:
            return batch_edges.edges, replaced
        target_row = record.edges.target_row
        adjacency = batch_edges.adjacency(None)
        short = "short" in active.call.shortcuts
        return LazyEdges.of(batch_edges.edges, adjacency, target_row, short=short), replaced

    def finish(self, active: ActiveLayer) -> None:
        """See :meth:`EdgeSource.finish`; refuses a layer that left out an edge call."""
        if active.num_edge_calls < len(active.call.edge_names):
            raise UnsupportedModelError(
                f"{describe(active.name, active.layer)} must propagate equally often in every call",
                got=f"{active.num_edge_calls} times instead of {len(active.call.edge_names)}; relations that are "
                "skipped where a batch has no edges of them are a common cause",
                fix="Propagate every time: a relation without edges adds nothing.",
            )

    def _fused(
        self, active: ActiveLayer, position: int, batch_edges: BatchEdges, values: Values
    ) -> tuple[Tensor, Values]:
        """Edges and their weight in the form that layers aggregate over without a row per edge."""
        weight = active.call.weight(position)
        adjacency = batch_edges.adjacency(weight)
        if weight is not None:
            values = {**values, weight: adjacency.weight}
        # Halo rows that depend on no weight need no gradient.
        constant_halo = position in active.call.constant_halo and not active.call.closed and not self.input_gradients
        grad_rows = self.info.batch_size if constant_halo else None
        return batch_edges.fuse(adjacency, widened="short" not in active.call.shortcuts, grad_rows=grad_rows), values

    def _batch_edges(self, record: EdgeRecord, active: ActiveLayer) -> BatchEdges:
        if record not in self._edges:
            batch_edges = self.cut(record, describe(active.name, active.layer))
            if self.dropout:
                if record.edges not in self._kept:
                    has_loops = self.info.has_loops
                    self._kept[record.edges] = keep_edges(batch_edges.edges, self.dropout, has_loops=has_loops)
                batch_edges = batch_edges.take(self._kept[record.edges])
            self._edges[record] = batch_edges
        return self._edges[record]

    def cut(self, record: EdgeRecord, layer: str) -> BatchEdges:
        """A record, cut to the batch, before edge dropout."""
        batch_edges: BatchEdges | None = self.info.placed(record)
        if batch_edges is None:
            batch_edges = record.for_batch(self.info, layer).to(self.device)
            if self.info.edges_ready is not None:
                hand_over(batch_edges.tensors(), self.info.edges_ready)
        return batch_edges

    def _alignment(self, record: EdgeRecord, active: ActiveLayer, local: Tensor, batch_edges: BatchEdges) -> Tensor:
        name = describe(active.name, active.layer)
        wanted = record.for_batch(self.info, name).edges.to(self.device)
        position = align(local, wanted, record.edges.target_row, self.info.batch_size, name)
        return position if batch_edges.kept is None else position[batch_edges.kept]


def drop_derived(
    active: ActiveLayer, position: int, edge_index: Tensor, values: Values, dropout: float, *, has_loops: bool = True
) -> tuple[Tensor, Values]:
    """Drop some edges that the model derived from the batch's; the same ones in all edge calls of a layer."""
    if not dropout:
        return edge_index, values
    if active.dropped is None or active.dropped[0] is not edge_index:
        active.dropped = edge_index, keep_edges(edge_index, dropout, has_loops=has_loops)
    kept = active.dropped[1]
    # Values from edge_updater lack the dropped edges already.
    whole = [name for name in active.call.edge_names[position] if has_rows(values[name], edge_index.size(1))]
    reduced = {name: values[name][kept] for name in whole}
    return edge_index[:, kept], {**values, **reduced}


def uncompensated(call: str, layer: MessagePassing, got: str) -> UnsupportedModelError:
    """Refuses a layer whose rows of the halo cannot be computed."""
    return UnsupportedModelError(
        f"{describe(call, layer)} must propagate over recorded edges, so that the halo's rows can be computed too",
        got=got,
        fix="Compute such values in message() or edge_update(), or use compensate='none'.",
    )


def own_attribute(info: BatchInfo, value: Tensor) -> str | None:
    """The name of the batch's attribute that a tensor is; ``None`` if it is none, was modified or needs a gradient."""
    if not isinstance(value, BatchTensor):
        return None
    if value.info is not info:
        raise InputError(
            "all arguments of a call must come from the same batch",
            got=f"{value.attribute} of another batch",
            fix="Pass the attributes of one batch of one HaloLoader.",
        )
    return value.attribute if value.is_original and not value.requires_grad else None


def _can_fuse(layer: MessagePassing) -> bool:
    """Whether a layer fuses, and no hook waits for its messages."""
    hooks = (layer._message_forward_pre_hooks, layer._message_forward_hooks)
    return layer.fuse and not any((*hooks, layer._aggregate_forward_pre_hooks, layer._aggregate_forward_hooks))
