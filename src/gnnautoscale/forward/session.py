"""One forward pass over one batch, from the model's first layer to its output.

The modules of an attached model report to a session. Which edges a layer runs on is up to its :class:`EdgeSource`, what
happens at a slot to its :class:`ExchangePolicy`; observers only look. The session keeps track of where the pass is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import RandomState, map_tensors, tensors_in
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import norms
from gnnautoscale.forward.edges import EdgeSource, Frame, RecordedEdges
from gnnautoscale.forward.exchange import ExchangePolicy
from gnnautoscale.forward.memory import GraphMemory, check_finite
from gnnautoscale.forward.observe import LayerRun, Observer
from gnnautoscale.forward.plan import LayerCall, Plan
from gnnautoscale.graph import BatchInfo, BatchTensor

#: Normalizes rows in place of a batch norm: given the session, the norm, its forward pass and the rows.
Normalize = Callable[["Session", _BatchNorm, Callable[[Tensor], Tensor], Tensor], Tensor]


class Session:
    """A forward pass over one batch.

    Args:
        info: The batch.
        plan: How the model is run.
        memory: Histories and records of the batch's graph.
        device: The compute device.
        exchange: What happens at a slot.
        edges: Gives layers their edges; by default those of the record.
        normalize: What batch norms do; by default they take the statistics of the batch's own rows.
        observers: Look at layers and their edges.
        edge_dropout: Share of the edges that is left out at random.
        input_gradients: Whether gradients of the model's inputs are wanted.
        begins: Whether the session begins and completes the step itself; if not, its caller does.
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
        begins: bool = True,
    ) -> None:
        self.info, self.plan, self.memory, self.device = info, plan, memory, device
        self._exchange, self._normalize = exchange, normalize or Session.by_own_statistics
        self._edges = edges or RecordedEdges(
            info, plan, memory, device, dropout=edge_dropout, input_gradients=input_gradients
        )
        self._observers = observers
        self._repeaters = [observer for observer in observers if observer.repeats]
        self._frames: list[Frame] = []
        self._counts: Counter[str] = Counter()
        self._inside_propagate = 0
        #: Whether a layer is being run again for an observer.
        self.repeating = False

    # What the attached model calls ###################################################################################

    def begin(self) -> None:
        """Start the pass."""
        self.memory.prepare(self.plan, self.device)
        self._exchange.begin(self)

    def layer(
        self, layer: MessagePassing, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a message-passing layer; its output is a slot unless its propagations are."""
        call = self._name_call(name)
        work = partial(self._run_layer, call, layer, run, args, kwargs)
        for observer in self._observers:
            work = partial(observer.around_layer, self, call, layer, work)
        return work()

    def _run_layer(
        self, call: str, layer: MessagePassing, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = self._edges.known_call(call, layer, args, kwargs)
        events = self._edges.events(call, layer, known, args, kwargs)
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
            # A layer that ran on unfused edges may have computed the halo's rows too.
            return map_tensors(self._shortened, out) if "short" in known.shortcuts else out

        def compute_and_repeat() -> Any:
            if not self._repeaters:
                return compute(*args, **kwargs)
            # A captured step cannot go back to an earlier random state; most layers need not.
            state = RandomState(self.device) if known.draws is not False else None
            again = partial(self._repeat, state, self._counts.copy(), compute)
            out = compute(*args, **kwargs)
            if known.draws is None and state is not None:
                known.draws = state.has_moved
            for observer in self._repeaters:
                observer.layer_ran(LayerRun(call, layer, out, again, args, kwargs, self.info, bool(self._frames)))
            return out

        if self.plan.explicit or call in self.plan.inner:
            return compute_and_repeat()
        return self.slot(call, compute_and_repeat)

    def propagate(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        """Run a layer's ``propagate`` on the edges it is to use."""
        frame = self._frames[-1]
        edge_index, values = self._replaced(frame, edge_index, values, propagates=True)
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
        """Run a layer's ``edge_updater`` on the edges it is to use."""
        edge_index, values = self._replaced(self._frames[-1], edge_index, values, propagates=False)
        return run(edge_index, size=size, **values)

    def batch_norm(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a batch norm."""
        return self._normalize(self, norm, run, x)

    def slot(self, slot: str, compute: Callable[[], Any]) -> Any:
        """Let the policy decide about a slot's rows."""
        return self._exchange.at_slot(self, slot, compute)

    def finish(self, out: Any) -> Any:
        """End the pass; returns the model's output for the batch's rows, since the halo's are meaningless."""
        self._exchange.end(self)

        def cut(value: Tensor) -> Tensor:
            short = self.plan.short_tail and value.dim() > 0 and value.size(0) == self.info.batch_size
            if value.dim() == 0 or (value.size(0) != self.info.num_rows and not short):
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
        return map_tensors(cut, out)

    # What policies and observers ask #################################################################################

    @property
    def frame(self) -> Frame | None:
        """The layer call in progress, if any."""
        return self._frames[-1] if self._frames else None

    @property
    def is_aggregating(self) -> bool:
        """Whether a layer's ``propagate`` is running."""
        return self._inside_propagate > 0

    def own(self, rows: Tensor) -> Tensor:
        """The batch's rows; as they are if there are no others, since a slice costs its gradient a copy."""
        return rows if rows.size(0) == self.info.batch_size else rows[: self.info.batch_size]

    def widened(self, out: Any) -> Any:
        """Add rows for the halo, of zeros, to rows computed for the batch alone, where what follows needs them."""
        if self.plan.short_tail or not self.info.num_halo:
            return out

        def widen(value: Tensor) -> Tensor:
            if value.dim() == 0 or value.size(0) != self.info.batch_size:
                return value
            return torch.cat([value, value.new_zeros((self.info.num_halo, *value.shape[1:]))])

        return map_tensors(widen, out)

    def check_rows(self, slot: str, out: Any) -> None:
        """Refuse what cannot be kept in a history."""
        right = isinstance(out, Tensor) and out.is_floating_point() and out.dim() > 0
        if not right or out.size(0) not in (self.info.num_rows, self.info.batch_size):
            got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedModelError(
                f"layer '{slot}' must return one floating-point row for each of the {self.info.num_rows} nodes of the "
                "batch and its halo",
                got=got,
                fix="Call the model with all rows of batch.x; do not return attention weights from inner layers.",
            )
        check_finite(slot, self.own(out), self.info)

    def by_own_statistics(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Normalize all rows by the statistics of the batch's own rows."""
        if not norms.takes_statistics(norm):
            return run(x)
        if not norm.training and self.info.batch_size < self.memory.num_nodes:
            norms.warn_of_batch_statistics()
        if self.repeating:
            run = partial(norms.without_tracking, norm)
        if self.is_aggregating or norm not in self.plan.node_norms or x.size(0) != self.info.num_rows:
            return run(x)
        return norms.by_own_rows(norm, run, x, self.info.batch_size)

    # Inside ##########################################################################################################

    def _name_call(self, name: str) -> str:
        # Counted inside the calling layer, so that skipping a layer does not rename what follows it.
        prefix = f"{self._frames[-1].name}>{name}" if self._frames else name
        self._counts[prefix] += 1
        return prefix if self._counts[prefix] == 1 else f"{prefix}#{self._counts[prefix]}"

    def _replaced(
        self, frame: Frame, edge_index: Tensor, values: dict[str, Any], *, propagates: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        for observer in self._observers:
            observer.edges_used(self, frame, edge_index, values)
        return self._edges.replace(frame, edge_index, values, propagates=propagates)

    def _repeat(
        self, state: RandomState | None, counts: Counter[str], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer once more, with the same dropout and names as before; nothing is pushed or averaged."""
        counts_after, self._counts = self._counts, counts.copy()
        self.repeating = True
        try:
            with state.again() if state is not None else nullcontext():
                return run(*args, **kwargs)
        finally:
            self.repeating = False
            self._counts = counts_after

    def _paired(
        self, known: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the node-level rows as (all rows, the batch's rows)."""
        rows = next(x for x, kind in zip(tensors_in((args, kwargs)), known.kinds, strict=True) if kind == "node")

        def pair(value: Any) -> Any:
            return (value, self.own(value)) if value is rows else value

        return tuple(pair(value) for value in args), {name: pair(value) for name, value in kwargs.items()}

    def _shortened(self, value: Tensor) -> Tensor:
        return self.own(value) if value.dim() and value.size(0) == self.info.num_rows else value


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


def _plain(value: Tensor) -> Tensor:
    return value.plain if isinstance(value, BatchTensor) else value
