"""Which edges a layer runs on: those of its record, cut to the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.plan import LayerCall, Plan
from gnnautoscale.forward.record import Event, Slice, align, keep_edges
from gnnautoscale.graph import BatchInfo, BatchTensor, EdgesByTarget


@dataclass
class Frame:
    """A layer call in progress."""

    name: str
    layer: MessagePassing
    events: list[Event] | None
    call: LayerCall
    num_events: int = 0
    num_propagations: int = 0
    # Edges that a layer derived itself, and those of them that dropout keeps.
    dropped: tuple[Tensor, Tensor] | None = None

    @property
    def event(self) -> Event | None:
        """What was recorded for the next ``propagate`` or ``edge_updater``, if anything was."""
        return next(iter((self.events or [])[self.num_events :]), None)


class EdgeSource(ABC):
    """Gives layers their edges."""

    @abstractmethod
    def known_call(self, call: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """What is known about a call of a layer."""

    def events(
        self, call: str, layer: MessagePassing, known: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Event] | None:
        """What the layer hands over on the whole graph; ``None`` if it runs on edges as they are."""
        return None

    @abstractmethod
    def replace(
        self, frame: Frame, edge_index: Tensor, values: dict[str, Any], *, propagates: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """The edges and values to run ``propagate``, or ``edge_updater``, on."""


class RecordedEdges(EdgeSource):
    """Replaces what a layer computed about edges inside the batch by what it computed on the whole graph.

    Args:
        info: The batch.
        plan: How the model is run.
        memory: Records of the batch's graph.
        device: The compute device.
        dropout: Share of the edges that is left out at random.
        input_gradients: Whether gradients of the model's inputs are wanted.
    """

    def __init__(
        self,
        info: BatchInfo,
        plan: Plan,
        memory: GraphMemory,
        device: torch.device,
        *,
        dropout: float = 0.0,
        input_gradients: bool = False,
    ) -> None:
        self._info, self._plan, self._memory, self._device = info, plan, memory, device
        self._dropout, self._input_gradients = dropout, input_gradients
        self._slices: dict[Event, Slice] = {}
        self._kept: dict[EdgesByTarget, Tensor] = {}

    def known_call(self, call: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """See :meth:`EdgeSource.known_call`; refuses a call that differs from the planned one."""
        known = self._plan.calls.get(call)
        if known is not None and known.own == [own_attribute(self._info, x) for x in tensors_in((args, kwargs))]:
            return known
        raise UnsupportedModelError(
            f"{describe(call, layer)} must be called in the same way every time, with the batch's own edges",
            got="other arguments than in the first forward pass, or edges or edge attributes changed since",
            fix="To drop edges at random, use autoscale(..., edge_dropout=p) instead of changing edge_index; do not "
            "write into batches.",
        )

    def events(
        self, call: str, layer: MessagePassing, known: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Event] | None:
        """See :meth:`EdgeSource.events`; recorded on the first call."""
        own_edges = any(attribute is not None and attribute.endswith("edge_index") for attribute in known.own)
        if not own_edges or not known.edge_names:
            return None
        return self._memory.record(self._info.graph, call, layer, known, args, kwargs)

    def replace(
        self, frame: Frame, edge_index: Tensor, values: dict[str, Any], *, propagates: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """See :meth:`EdgeSource.replace`."""
        position = frame.num_events
        frame.num_events += 1
        if frame.events is None:
            return self._drop_derived(frame, position, edge_index, values)
        if position >= len(frame.events):
            raise UnsupportedModelError(
                f"{describe(frame.name, frame.layer)} must propagate as often in every call",
                got="more propagations than in the first forward pass",
                fix="Make the number of propagations independent of the data.",
            )
        event = frame.events[position]
        part = self._slice(event, frame)
        if part.kept is None and frame.call.fuses(position, event.constants) and _can_fuse(frame.layer):
            return self._fused(frame, position, event, part, values)
        replaced = dict(values)
        for name in frame.call.edge_names[position]:
            value = values.get(name)
            if name in part.constants:
                constant = part.constants[name]
                replaced[name] = constant.to(value.dtype) if isinstance(value, Tensor) else constant
            elif isinstance(value, Tensor) and not frame.call.has_edge_updater:
                replaced[name] = value[self._alignment(event, frame, edge_index, part)]
        return part.edges, replaced

    def _fused(
        self, frame: Frame, position: int, event: Event, part: Slice, values: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The edges in the form that a layer aggregates over in one go, and their weight."""
        weight = frame.call.weight(position)
        adjacency = part.adjacency(weight, event.edges.target_row, self._info)
        if weight is not None:
            values = {**values, weight: adjacency.weight}
        # Where the halo's rows depend on no weight, their gradient would go nowhere.
        inward = position in frame.call.inward and not self._input_gradients
        grad_rows = self._info.batch_size if inward else None
        return part.fuse(adjacency, widened="short" not in frame.call.shortcuts, grad_rows=grad_rows), values

    def _slice(self, event: Event, frame: Frame) -> Slice:
        if event not in self._slices:
            part = self._info.placed(event)
            if part is None:
                part = event.slice_for(self._info, describe(frame.name, frame.layer))
                # On the CPU as it is, so that what is computed from it is kept with it.
                part = part if self._device.type == "cpu" else part.to(self._device)
            if self._dropout:
                if event.edges not in self._kept:
                    self._kept[event.edges] = keep_edges(part.edges, self._dropout)
                part = part.take(self._kept[event.edges])
            self._slices[event] = part
        return self._slices[event]

    def _drop_derived(
        self, frame: Frame, position: int, edge_index: Tensor, values: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Drop edges that the model derived from the batch's; once per layer, for all that it does with them."""
        if not self._dropout:
            return edge_index, values
        if frame.dropped is None or frame.dropped[0] is not edge_index:
            frame.dropped = edge_index, keep_edges(edge_index, self._dropout)
        kept = frame.dropped[1]
        # What edge_updater returned has lost the dropped edges already.
        reduced = {
            name: values[name][kept]
            for name in frame.call.edge_names[position]
            if isinstance(values[name], Tensor) and values[name].size(0) == edge_index.size(1)
        }
        return edge_index[:, kept], {**values, **reduced}

    def _alignment(self, event: Event, frame: Frame, local: Tensor, part: Slice) -> Tensor:
        name = describe(frame.name, frame.layer)
        wanted = event.slice_for(self._info, name).edges.to(self._device)
        position = align(local, wanted, event.edges.target_row, self._info.batch_size, name)
        return position if part.kept is None else position[part.kept]


def own_attribute(info: BatchInfo, value: Tensor) -> str | None:
    """Which attribute of the batch a tensor is; ``None`` if it is another tensor, was changed or is to be trained."""
    if not isinstance(value, BatchTensor):
        return None
    if value.info is not info:
        raise InputError(
            "all arguments of a call must come from the same batch",
            got=f"{value.attribute} of another batch",
            fix="Pass the attributes of one batch of one HaloLoader.",
        )
    return value.attribute if value.is_original and not value.requires_grad else None


def describe(call: str, layer: nn.Module) -> str:
    """A layer call as messages name it."""
    return f"{type(layer).__name__} ('{call}')"


def _can_fuse(layer: MessagePassing) -> bool:
    """Whether a layer has what it needs to fuse, and no hook wants to see its messages."""
    hooks = (
        layer._message_forward_pre_hooks,
        layer._message_forward_hooks,
        layer._aggregate_forward_pre_hooks,
        layer._aggregate_forward_hooks,
    )
    return layer.fuse and not any(hooks)
