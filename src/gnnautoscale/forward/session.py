"""One forward pass over one batch, from the model's first layer to its output.

The modules of an attached model call a session. Its :class:`EdgeSource` gives layers their edges, its
:class:`ExchangePolicy` decides what happens at a slot, observers only watch; the session keeps track of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import RandomState, lacks_memory, map_tensors, tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import norms
from gnnautoscale.forward.edges import ActiveLayer, EdgeSource, RecordedEdges, Values
from gnnautoscale.forward.exchange import ExchangePolicy
from gnnautoscale.forward.memo import handed_on
from gnnautoscale.forward.memory import GraphMemory, check_finite
from gnnautoscale.forward.observe import LayerRun, Observer
from gnnautoscale.forward.plan import LayerCall, Plan
from gnnautoscale.forward.record import Arguments, describe, has_rows
from gnnautoscale.graph import BatchInfo, BatchTensor, TypedInfo, untagged

Normalize = Callable[["Session", str, _BatchNorm, Callable[[Tensor], Tensor], Tensor], Tensor]


class Session:
    """A forward pass over one batch.

    By default layers get the recorded edges, less a share of ``edge_dropout``, and batch norms use the statistics of
    the batch's own rows. ``normalize`` is called in place of a batch norm with the session, the norm's name, the norm,
    its forward pass and the rows; ``input_gradients`` says whether the model's inputs need gradients.
    """

    def __init__(
        self,
        info: BatchInfo,
        plan: Plan,
        memory: GraphMemory,
        device: torch.device,
        exchange: ExchangePolicy,
        *,
        edges: EdgeSource | None = None,
        normalize: Normalize | None = None,
        observers: Sequence[Observer] = (),
        edge_dropout: float = 0.0,
        input_gradients: bool = False,
    ) -> None:
        self.info, self.plan, self.memory, self.device = info, plan, memory, device
        self._exchange, self._normalize = exchange, normalize or type(self).by_own_statistics
        self._observers = observers
        self._repeaters = [observer for observer in observers if observer.repeats]
        self.plan = exchange.plan_for(self)
        self._edges = edges or RecordedEdges(info, self.plan, memory, device, edge_dropout, input_gradients)
        #: The layer calls in progress, the innermost last.
        self.active: list[ActiveLayer] = []
        self._counts: Counter[str] = Counter()
        self._seen_calls: set[str] = set()
        #: Whether a layer's ``propagate`` is running.
        self.is_aggregating = False
        #: Whether a layer is being repeated for an observer.
        self.repeating = False

    # Called by the attached model ####################################################################################

    def around_model(self) -> AbstractContextManager[Any]:
        """What the model's forward pass runs in."""
        return nullcontext()

    def begin(self) -> None:
        """Start the pass."""
        self.memory.prepare(self.plan, self.device)
        self._exchange.begin(self)

    def layer(self, layer: MessagePassing, name: str, run: Callable[..., Any], arguments: Arguments) -> Any:
        """Run a message-passing layer; its output is a slot unless its propagations are slots."""
        # Counted per calling layer, so that skipping a layer does not rename later calls.
        call = f"{self.active[-1].name}>{name}" if self.active else name
        self._counts[call] += 1
        call = call if self._counts[call] == 1 else f"{call}#{self._counts[call]}"
        self._seen_calls.add(call)
        work = partial(self._run_layer, call, layer, run, arguments)
        for observer in self._observers:
            work = partial(observer.around_layer, self, call, layer, arguments, work)
        return work()

    def _run_layer(self, call: str, layer: MessagePassing, run: Callable[..., Any], arguments: Arguments) -> Any:
        planned, records = self._edges.start(call, layer, arguments)
        args, kwargs = arguments if planned.nested else map_tensors(untagged, arguments)
        own_edges: dict[int, Tensor] = {}
        if self.plan.ignores_edges and records:
            pairs = zip(tensors_in(arguments), tensors_in((args, kwargs)), strict=True)
            own_edges = {id(plain): plain for own, plain in pairs if isinstance(own, BatchTensor) and own.is_own_edges}

        def compute(*args: Any, **kwargs: Any) -> Any:
            self.active.append(ActiveLayer(call, layer, records, planned, edge_values=own_edges))
            if "pair" in planned.shortcuts:
                args, kwargs = self._paired(planned, args, kwargs)
            try:
                out = run(*args, **kwargs)
            finally:
                active = self.active.pop()
            self._edges.finish(active)
            # On unfused edges a layer may have computed the halo's rows too.
            return map_tensors(shorten, out) if "short" in planned.shortcuts else out

        def shorten(value: Tensor) -> Tensor:
            return self.own(value) if has_rows(value, self.info.num_rows) else value

        run_layer = partial(self._run_and_repeat, call, layer, planned, compute, (args, kwargs), self.info)
        if self.plan.explicit or call in self.plan.inner:
            return run_layer()
        return self.slot(call, run_layer)

    def _run_and_repeat(
        self,
        call: str,
        layer: MessagePassing,
        planned: LayerCall,
        compute: Callable[..., Any],
        arguments: Arguments,
        info: BatchInfo | TypedInfo,
    ) -> Any:
        """Run a layer, and let observers repeat it on other arguments."""
        args, kwargs = arguments
        compute = partial(_computed, compute, call, layer, info)
        if not self._repeaters:
            return compute(*args, **kwargs)
        # A captured step cannot restore a random state, so it is saved only for layers that may draw numbers.
        state = RandomState(self.device) if planned.draws is not False else None
        again = partial(self._repeat, state, self._counts.copy(), compute)
        out = compute(*args, **kwargs)
        if planned.draws is None and state is not None:
            planned.draws = state.has_moved
        for observer in self._repeaters:
            observer.layer_ran(LayerRun(call, layer, out, again, args, kwargs, info, bool(self.active)))
        return out

    def propagate(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        """Run a layer's ``propagate`` on the right edges."""
        active = self.active[-1]
        slot = f"{active.name}/{active.num_propagations}"
        active.num_propagations += 1
        edge_index, values = self._replaced(active, edge_index, values)

        def compute() -> Any:
            outer, self.is_aggregating = self.is_aggregating, True
            try:
                return run(edge_index, size=size, **values)
            finally:
                self.is_aggregating = outer

        if active.name not in self.plan.inner:
            return compute()
        node_dim = active.layer.node_dim
        return self.slot(slot, lambda: compute().movedim(node_dim, 0)).movedim(0, node_dim)

    def edge_updater(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        """Run a layer's ``edge_updater`` on the right edges."""
        edge_index, values = self._replaced(self.active[-1], edge_index, values)
        return run(edge_index, size=size, **values)

    def batch_norm(self, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a batch norm."""
        return self._normalize(self, name, norm, run, x)

    def slot(self, slot: str, compute: Callable[[], Any]) -> Any:
        """Exchange a slot's rows as the policy decides."""
        return self._exchange.at_slot(self, slot, compute)

    def finish(self, out: Any) -> Any:
        """End the pass and return the output rows of the batch; those of the halo are meaningless."""
        self._exchange.end(self)
        if unseen := self.unseen_calls():
            raise UnsupportedModelError(
                "an autoscaled model calls the same layers in every forward pass",
                got=f"a pass without '{unseen[0]}', which ran when the model was tried; a layer that is skipped where "
                "a batch has no edges of some kind is a common cause",
                fix="Call every layer every time: without edges it adds nothing to its messages.",
            )

        def cut(value: Tensor) -> Tensor:
            check_layout(value)
            short = self.plan.short_tail and has_rows(value, self.info.batch_size)
            if not short and not has_rows(value, self.info.num_rows):
                raise UnsupportedModelError(
                    "an autoscaled model returns one row per node",
                    got=f"an output of shape {tuple(value.shape)} for {self.info.num_rows} nodes",
                    fix="Return node-level outputs from the model and pool or pair them outside it.",
                )
            return self.own(value)

        if not tensors_in(out):
            raise UnsupportedModelError(
                "an autoscaled model returns a tensor, or a tuple, list or dictionary of tensors",
                got=type(out).__name__,
                fix="Return node-level outputs from the model.",
            )
        return self._exchange.output(self, map_tensors(cut, out))

    def unseen_calls(self) -> list[str]:
        """The plan's layer calls that this pass left out; those inside of layers that it skipped do not count."""
        calls = self.plan.calls.keys() - self._seen_calls - self.plan.optional
        return [call for call in self.plan.calls if call in calls and (">" not in call or not self._exchange.skips)]

    # Used by policies and observers ##################################################################################

    @property
    def whole(self) -> Session:
        """The session of the whole pass: this one, unless it is that of one type of nodes."""
        return self

    @property
    def holds_all_nodes(self) -> bool:
        """Whether the batch is the whole graph, so that no other batch pulls its rows."""
        return self.info.batch_size == self.memory.num_nodes

    @property
    def repeats(self) -> bool:
        """Whether an observer repeats layers."""
        return bool(self._repeaters)

    def own(self, rows: Tensor) -> Tensor:
        """The batch's rows; not sliced if there are no others, because a slice's gradient costs a copy."""
        return rows if rows.size(0) == self.info.batch_size else rows[: self.info.batch_size]

    def widened(self, out: Any) -> Any:
        """Append zero rows for the halo to rows computed for the batch alone, unless the plan needs none."""
        if self.plan.short_tail or not self.info.num_halo:
            return out

        def widen(value: Tensor) -> Tensor:
            zeros = value.new_zeros((self.info.num_halo, *value.shape[1:]))
            return torch.cat([value, zeros]) if has_rows(value, self.info.batch_size) else value

        return map_tensors(widen, out)

    def check_rows(self, slot: str, out: Any) -> None:
        """Refuse an output that a history cannot hold."""
        if not has_rows(out, self.info.num_rows, self.info.batch_size) or not out.is_floating_point():
            got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedModelError(
                f"layer '{slot}' must return one floating-point row for each of the {self.info.num_rows} nodes of the "
                "batch and its halo",
                got=got,
                fix="Call the model with all rows of batch.x; do not return attention weights from inner layers.",
            )
        check_finite(slot, self.own(out), self.info)

    def by_own_statistics(self, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Normalize all rows by the statistics of the batch's own rows."""
        if not norms.uses_own_statistics(norm):
            return run(x)
        if not norm.training and not self.holds_all_nodes:
            norms.warn_of_batch_statistics()
        if self.repeating:
            run = partial(norms.normalize_untracked, norm)
        if self.is_aggregating or name not in self.plan.node_norms or x.size(0) != self.info.num_rows:
            return run(x)
        return norms.normalize_by_own_rows(norm, run, x, self.info.batch_size)

    # Private #########################################################################################################

    def _replaced(self, active: ActiveLayer, edge_index: Tensor, values: Values) -> tuple[Tensor, Values]:
        edge_index, values = handed_on(active, edge_index, values)
        for observer in self._observers:
            observer.edges_used(self, active, edge_index, values)
        return self._edges.replace(active, edge_index, values)

    def _repeat(
        self, state: RandomState | None, counts: Counter[str], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Repeat a layer with the same dropout and call names, without pushes or updates of running averages."""
        counts_after, self._counts = self._counts, counts.copy()
        self.repeating = True
        try:
            with state.again() if state is not None else nullcontext():
                return run(*args, **kwargs)
        finally:
            self.repeating = False
            self._counts = counts_after

    def _paired(self, planned: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Replace the node-level rows by the pair (all rows, the batch's rows)."""
        rows = next(x for x, kind in zip(tensors_in((args, kwargs)), planned.kinds, strict=True) if kind == "node")

        def pair(value: Any) -> Any:
            return (value, self.own(value)) if value is rows else value

        return tuple(pair(value) for value in args), {name: pair(value) for name, value in kwargs.items()}


def check_layout(value: Tensor) -> None:
    """Refuse a sparse output."""
    if value.layout != torch.strided:
        raise UnsupportedModelError(
            "an autoscaled model returns dense rows", got=str(value.layout), fix="Return the output .to_dense()."
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards each module is back in its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _computed(
    compute: Callable[..., Any],
    call: str,
    layer: MessagePassing,
    info: BatchInfo | TypedInfo,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a layer computes; says so if it cannot compute anything without edges, as ChebConv without nodes."""
    try:
        return compute(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(info, TypedInfo) or info.num_edges or isinstance(error, InputError) or lacks_memory(error):
            raise
        raise UnsupportedModelError(
            f"{describe(call, layer)} must run on batches without edges",
            got=f"{type(error).__name__}: {error}",
            fix="Use fewer parts, more parts in a batch, or more nodes at a time, so that each batch has such edges.",
        ) from error
