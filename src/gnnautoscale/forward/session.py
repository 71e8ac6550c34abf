"""One forward pass over one batch: which layer runs on which edges, what is pushed, what is pulled.

At a slot of the model the batch's rows are pushed and the halo's rows are pulled, so that what follows sees all rows
as the whole graph would give them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import RandomState, map_tensors, tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import norms
from gnnautoscale.forward.memory import GraphMemory, check_finite
from gnnautoscale.forward.plan import LayerCall, Plan
from gnnautoscale.forward.record import Event, Recorder, Slice, align, keep_edges
from gnnautoscale.graph import BatchInfo, BatchTensor, EdgesByTarget
from gnnautoscale.transfer import Transfer


class Penalty(Protocol):
    """Something that compares a layer with itself on other inputs; see ``gnnautoscale.attach.regularize``."""

    def compare(
        self, out: Any, again: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], info: BatchInfo
    ) -> None:
        """Called with each layer's output and a way to run it again on other arguments."""


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


class Session:
    """A training step or an evaluation of one batch: computes every slot, pushes the batch, pulls the halo.

    Args:
        info: The batch.
        plan: How the model is run.
        memory: Histories and records of the batch's graph.
        device: The compute device.
        edge_dropout: Share of the edges that is left out at random.
        penalty: Called with every layer's output.
        push_all: Push even rows that no other batch can pull.
        input_gradients: Whether gradients of the model's inputs are wanted.
        begins: Whether the session begins and completes the step itself; if not, its caller does.
    """

    def __init__(
        self,
        info: BatchInfo,
        plan: Plan,
        memory: GraphMemory,
        device: torch.device,
        *,
        edge_dropout: float = 0.0,
        penalty: Penalty | None = None,
        push_all: bool = False,
        input_gradients: bool = False,
        begins: bool = True,
    ) -> None:
        self.info = info
        self.plan = plan
        self.memory = memory
        self.device = device
        self.edge_dropout = edge_dropout
        self.penalty = penalty
        self.push_all = push_all
        self.input_gradients = input_gradients
        self._begins = begins
        self._repeating = False
        self._frames: list[Frame] = []
        self._counts: Counter[str] = Counter()
        self._slices: dict[Event, Slice] = {}
        self._kept: dict[EdgesByTarget, Tensor] = {}
        self._inside_propagate = 0
        memory.prepare(plan, device)
        self._transfer: Transfer = memory.transfer(device)

    # What the attached model calls ###################################################################################

    def layer(
        self, layer: MessagePassing, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a message-passing layer; its output is a slot unless its propagations are."""
        return self._run_layer(self._name_call(name), layer, run, args, kwargs)

    def _run_layer(
        self, call: str, layer: MessagePassing, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = self._known_call(call, layer, args, kwargs)
        events = self._events(call, layer, known, args, kwargs)
        if not known.nested:
            args, kwargs = map_tensors(_plain, (args, kwargs))

        def compute(*args: Any, **kwargs: Any) -> Any:
            self._frames.append(Frame(call, layer, events, known))
            if "pair" in known.shortcuts:
                args, kwargs = self._paired(known, args, kwargs)
            try:
                out = run(*args, **kwargs)
            finally:
                self._frames.pop()
            # With edges as they are it may have computed more.
            return map_tensors(self._shortened, out) if "short" in known.shortcuts else out

        def compute_and_compare() -> Any:
            if self.penalty is None:
                return compute(*args, **kwargs)
            # A captured step cannot go back to an earlier random state; most layers need not.
            state = RandomState(self.device) if known.draws is not False else None
            again = partial(self._repeat, state, self._counts.copy(), compute)
            out = compute(*args, **kwargs)
            if known.draws is None and state is not None:
                known.draws = state.has_moved
            self.penalty.compare(out, again, args, kwargs, self.info)
            return out

        if self.plan.explicit or call in self.plan.inner:
            return compute_and_compare()
        return self.slot(call, compute_and_compare)

    def propagate(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        """Run a layer's ``propagate`` on the recorded edges."""
        frame = self._frames[-1]
        edge_index, values = self._recorded(frame, edge_index, values)
        slot = f"{frame.name}/{frame.num_propagations}"
        frame.num_propagations += 1

        def compute() -> Any:
            self._inside_propagate += 1
            try:
                return run(edge_index, size=size, **values)
            finally:
                self._inside_propagate -= 1

        if frame.name not in self.plan.inner:
            return compute()
        node_dim = frame.layer.node_dim
        return self.slot(slot, lambda: compute().movedim(node_dim, 0)).movedim(0, node_dim)

    def edge_updater(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        """Run a layer's ``edge_updater`` on the recorded edges."""
        edge_index, values = self._recorded(self._frames[-1], edge_index, values)
        return run(edge_index, size=size, **values)

    def batch_norm(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Normalize all rows by the statistics of the batch's own rows."""
        if not norms.takes_statistics(norm):
            return run(x)
        if not norm.training and self.info.batch_size < self.memory.num_nodes:
            norms.warn_of_batch_statistics()
        if self._repeating:
            run = partial(norms.without_tracking, norm)
        if self._inside_propagate or norm not in self.plan.node_norms or x.size(0) != self.info.num_rows:
            return run(x)
        return norms.by_own_rows(norm, run, x, self.info.batch_size)

    def begin(self) -> None:
        """Start the step: rows that it needs are on their way."""
        if self._begins:
            self.memory.begin(self.info, self._transfer)
            self._transfer.look_ahead()

    def slot(self, slot: str, compute: Callable[[], Any]) -> Any:
        """Compute a slot's rows, push the batch's, and pull the halo's."""
        out = compute()
        alone = self.info.batch_size == self.memory.num_nodes and not self.push_all
        if slot not in self.plan.live or alone:
            return self._widened(out)
        self._check_rows(slot, out)
        return self.exchange(slot, out)

    def _shortened(self, value: Tensor) -> Tensor:
        return self._own(value) if value.dim() and value.size(0) == self.info.num_rows else value

    def _own(self, rows: Tensor) -> Tensor:
        """The batch's rows; as they are if there are no others, since a slice costs its gradient a copy."""
        return rows if rows.size(0) == self.info.batch_size else rows[: self.info.batch_size]

    def _widened(self, out: Any) -> Any:
        """Give rows that were computed for the batch alone the halo's rows again, where what follows needs them."""
        if self.plan.short_tail or not self.info.num_halo:
            return out

        def widen(value: Tensor) -> Tensor:
            if value.dim() == 0 or value.size(0) != self.info.batch_size:
                return value
            return torch.cat([value, value.new_zeros((self.info.num_halo, *value.shape[1:]))])

        return map_tensors(widen, out)

    def finish(self, out: Any) -> Any:
        """End the step; cut the model's output to the batch's rows, since the halo's are meaningless."""
        self._transfer.end()
        if self._begins:
            self._transfer.complete()
        rows = 0

        def cut(value: Tensor) -> Tensor:
            nonlocal rows
            short = self.plan.short_tail and value.dim() > 0 and value.size(0) == self.info.batch_size
            if value.dim() == 0 or (value.size(0) != self.info.num_rows and not short):
                raise UnsupportedModelError(
                    "an autoscaled model returns one row per node",
                    got=f"an output of shape {tuple(value.shape)} for {self.info.num_rows} nodes",
                    fix="Return node-level outputs from the model and pool or pair them outside of it.",
                )
            rows += 1
            return self._own(value)

        out = map_tensors(cut, out)
        if not rows:
            raise UnsupportedModelError(
                "an autoscaled model returns a tensor, or a tuple, list or dictionary of tensors",
                got=type(out).__name__,
                fix="Return node-level outputs from the model.",
            )
        return out

    def _repeat(
        self, state: RandomState | None, counts: Counter[str], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer once more, with the same dropout and names as before; nothing is pushed or averaged."""
        counts_after, self._counts = self._counts, counts.copy()
        self._repeating = True
        try:
            with state.again() if state is not None else nullcontext():
                return run(*args, **kwargs)
        finally:
            self._repeating = False
            self._counts = counts_after

    # Histories #######################################################################################################

    def exchange(self, slot: str, out: Tensor) -> Tensor:
        """Push the batch's rows; returns them with the halo's, as constants, behind them."""
        rows = self._own(out)
        push = not self._repeating
        if push:
            self.memory.mark_changed()
        full = self._transfer.exchange(slot, self.memory.history(slot, rows), flat(rows), push=push)
        return full if out.dim() == 2 else full.view(-1, *out.shape[1:])

    # Edges ###########################################################################################################

    def _name_call(self, name: str) -> str:
        # Counted inside the calling layer, so that skipping a layer does not rename what follows it.
        prefix = f"{self._frames[-1].name}>{name}" if self._frames else name
        self._counts[prefix] += 1
        return prefix if self._counts[prefix] == 1 else f"{prefix}#{self._counts[prefix]}"

    def _known_call(self, call: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        known = self.plan.calls.get(call)
        if known is not None and known.own == [self._own_attribute(value) for value in tensors_in((args, kwargs))]:
            return known
        raise UnsupportedModelError(
            f"{describe(call, layer)} must be called in the same way every time, with the batch's own edges",
            got="other arguments than in the first forward pass, or edges or edge attributes changed since",
            fix="To drop edges at random, use autoscale(..., edge_dropout=p) instead of changing edge_index; keep "
            "in-place changes out of batches.",
        )

    def _own_attribute(self, value: Tensor) -> str | None:
        """Which attribute of the batch a tensor is; none if it was changed or is to be trained."""
        if not isinstance(value, BatchTensor):
            return None
        if value.info is not self.info:
            raise InputError(
                "all arguments of a call must come from the same batch",
                got=f"{value.attribute} of another batch",
                fix="Pass the attributes of one batch of one HaloLoader.",
            )
        return value.attribute if value.is_original and not value.requires_grad else None

    def _events(
        self, call: str, layer: MessagePassing, known: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Event] | None:
        own_edges = any(attribute is not None and attribute.endswith("edge_index") for attribute in known.own)
        if not own_edges or not known.edge_names:
            return None
        if call not in self.memory.events:
            if self.memory.recorder is None:
                self.memory.recorder = Recorder(self.info.graph)
            self.memory.events[call] = self.memory.recorder.record(
                layer, describe(call, layer), args, kwargs, known.kinds, len(known.edge_names)
            )
        return self.memory.events[call]

    def _recorded(self, frame: Frame, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Replace what a layer computed about edges inside the batch by what it computed on the whole graph."""
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
        adjacency = part.adjacency(weight, event.edges.target_row, self.info)
        if weight is not None:
            values = {**values, weight: adjacency.weight}
        # Where the halo's rows depend on no weight, their gradient would go nowhere.
        inward = position in frame.call.inward and not self.input_gradients
        grad_rows = self.info.batch_size if inward else None
        return part.fuse(adjacency, widened="short" not in frame.call.shortcuts, grad_rows=grad_rows), values

    def _paired(
        self, known: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the node-level rows as (all rows, the batch's rows)."""
        rows = next(x for x, kind in zip(tensors_in((args, kwargs)), known.kinds, strict=True) if kind == "node")

        def pair(value: Any) -> Any:
            return (value, self._own(value)) if value is rows else value

        return tuple(pair(value) for value in args), {name: pair(value) for name, value in kwargs.items()}

    def _slice(self, event: Event, frame: Frame) -> Slice:
        if event not in self._slices:
            part = self.info.placed(event)
            if part is None:
                part = event.cut(self.info, describe(frame.name, frame.layer))
                # On the CPU as it is, so that what is computed from it is kept with it.
                part = part if self.device.type == "cpu" else part.to(self.device)
            if self.edge_dropout:
                if event.edges not in self._kept:
                    self._kept[event.edges] = keep_edges(part.edges, self.edge_dropout)
                part = part.take(self._kept[event.edges])
            self._slices[event] = part
        return self._slices[event]

    def _drop_derived(
        self, frame: Frame, position: int, edge_index: Tensor, values: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Drop edges that the model derived from the batch's; once per layer, for all that it does with them."""
        if not self.edge_dropout:
            return edge_index, values
        if frame.dropped is None or frame.dropped[0] is not edge_index:
            frame.dropped = edge_index, keep_edges(edge_index, self.edge_dropout)
        kept = frame.dropped[1]
        names = frame.call.edge_names[position]
        # What edge_updater returned has lost the dropped edges already.
        reduced = {
            name: values[name][kept]
            for name in names
            if isinstance(values[name], Tensor) and values[name].size(0) == edge_index.size(1)
        }
        return edge_index[:, kept], {**values, **reduced}

    def _alignment(self, event: Event, frame: Frame, local: Tensor, part: Slice) -> Tensor:
        name = describe(frame.name, frame.layer)
        wanted = event.cut(self.info, name).edges.to(self.device)
        position = align(local, wanted, event.edges.target_row, self.info.batch_size, name)
        return position if part.kept is None else position[part.kept]

    def _check_rows(self, slot: str, out: Any) -> None:
        right = isinstance(out, Tensor) and out.is_floating_point() and out.dim() > 0
        if not right or out.size(0) not in (self.info.num_rows, self.info.batch_size):
            got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedModelError(
                f"layer '{slot}' must return one floating-point row for each of the {self.info.num_rows} nodes of the "
                "batch and its halo",
                got=got,
                fix="Call the model with all rows of batch.x; do not return attention weights from inner layers.",
            )
        check_finite(slot, self._own(out), self.info)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def describe(call: str, layer: nn.Module) -> str:
    """A layer call as messages name it."""
    return f"{type(layer).__name__} ('{call}')"


def _can_fuse(layer: MessagePassing) -> bool:
    """Whether a layer has what it needs to fuse, and nobody wants to see its messages."""
    hooks = (
        layer._message_forward_pre_hooks,
        layer._message_forward_hooks,
        layer._aggregate_forward_pre_hooks,
        layer._aggregate_forward_hooks,
    )
    return layer.fuse and not any(hooks)


def flat(rows: Tensor) -> Tensor:
    """Rows of any shape as rows of a matrix."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


def _plain(value: Tensor) -> Tensor:
    return value.plain if isinstance(value, BatchTensor) else value
