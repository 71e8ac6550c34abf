"""How a model behaves on the trial graph: observed as a whole, then compared in batches with that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import (
    ArgumentKind,
    EdgeSource,
    ExchangePolicy,
    Frame,
    LayerCall,
    Observer,
    Plan,
    RowStore,
    Session,
    Shortcut,
    StoreExchange,
    SweepExchange,
    by_constants,
    describe,
    own_attribute,
    takes_statistics,
)
from gnnautoscale.graph import BatchInfo, BatchTensor
from gnnautoscale.planner.trial_graph import NUM_NODES, TrialGraph, kind_of


@dataclass
class Truth:
    """What modules and slots gave on the whole trial graph."""

    outputs: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)


class Observation(ExchangePolicy, EdgeSource, Observer):
    """Runs the whole trial graph as it is, and fills in a plan with what it sees.

    It stands in for everything that follows a plan in other passes, since there is none yet.

    Args:
        trial: The trial graph.
        batch: All of it, as one batch.
        plan: The plan to fill in.
    """

    def __init__(self, trial: TrialGraph, batch: Data, plan: Plan) -> None:
        self.truth, self._plan = Truth(), plan
        self._info: BatchInfo = batch.edge_index.info
        self.session = Session(
            self._info,
            plan,
            trial.memory,
            trial.device,
            self,
            edges=self,
            observers=[self],
            normalize=self._normalize,
        )
        self._slot_of: dict[int, str] = {}
        self._leaves: list[Tensor] = []
        self._seen: Counter[str] = Counter()

    def note(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Keep what a module gave."""
        self.truth.outputs[_numbered(self._seen, name)] = map_tensors(lambda value: value.detach().clone(), out)

    def sources(self, out: Any) -> frozenset[str]:
        """The slots that a value was computed from."""
        return frozenset(self._slot_of[id(leaf)] for leaf in self._leaves_of(out) if id(leaf) in self._slot_of)

    def _leaves_of(self, out: Any) -> list[Tensor]:
        """The slots and weights that a value was computed from, found by walking back what autograd recorded."""
        found: list[Tensor] = []
        seen: set[Any] = set()
        stack: list[Any] = [value.grad_fn for value in tensors_in(out)]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            stack.extend(following for following, _ in node.next_functions)
        return found

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Note the slot and what it is computed from."""
        out = compute()
        call = self._plan.calls.get(slot)
        if call is not None and not call.num_propagations:
            return out
        session.check_rows(slot, out)
        self._plan.needs[slot] = self.sources(out)
        self._plan.rows[slot] = out.detach()[:0]
        self.truth.slots[slot] = out.detach().clone()
        leaf = out.detach().requires_grad_()
        self._leaves.append(leaf)
        self._slot_of[id(leaf)] = slot
        # A copy, since what follows may write into it, which autograd forbids on the leaf itself.
        return leaf.clone()

    def around_layer(self, session: Session, call: str, layer: MessagePassing, run: Callable[[], Any]) -> Any:
        """Note what a layer gives, and which shortcuts could apply to it."""
        with self._watching_inside(session, layer) as dense_after, BatchTensor.watched(None):
            out = run()
        self.note(call, layer, out)
        self._plan.calls[call].possible_shortcuts = self._possible_shortcuts(call, layer, bool(dense_after))
        return out

    @contextmanager
    def _watching_inside(self, session: Session, layer: MessagePassing) -> Iterator[list[nn.Module]]:
        """Note which modules of a layer compute on nodes once it has aggregated."""
        found: list[nn.Module] = []

        def note(module: nn.Module, _: Any, out: Any) -> None:
            rows = isinstance(out, Tensor) and out.dim() > 0 and out.size(0) == NUM_NODES
            if rows and not session.is_aggregating and session.frame is not None and session.frame.num_propagations:
                found.append(module)

        inside = [module for module in layer.modules() if not isinstance(module, MessagePassing)]
        handles = [module.register_forward_hook(note) for module in inside]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _possible_shortcuts(self, call: str, layer: MessagePassing, dense_after: bool) -> frozenset[Shortcut]:
        known = self._plan.calls[call]
        # A subclass that changes messages may have forgotten to change what fuses them.
        fuse = layer.fuse and all(_place(layer, "message_and_aggregate") <= _place(layer, name) for name in _UNFUSED)
        shortcuts: set[Shortcut] = {"fused"} if fuse else set()
        if call not in self._plan.inner and known.num_propagations == 1:
            shortcuts |= {"short"} if fuse else set()
            shortcuts |= {"pair"} if dense_after and known.kinds.count("node") == 1 else set()
        return frozenset(shortcuts)

    def known_call(self, call: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """Find out what the arguments of a call are."""
        tensors = tensors_in((args, kwargs))
        own = [own_attribute(self._info, value) for value in tensors]
        kinds: list[ArgumentKind] = [
            "own" if attribute is not None else kind_of(value, NUM_NODES, self._info.e_id.numel())
            for value, attribute in zip(tensors, own, strict=True)
        ]
        nested = any(isinstance(module, MessagePassing) for module in layer.modules() if module is not layer)
        return self._plan.calls.setdefault(call, LayerCall(kinds, own, nested=nested))

    def replace(
        self, frame: Frame, edge_index: Tensor, values: dict[str, Any], *, propagates: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Leave edges as they are; note what belongs to them, and what rows depend on."""
        num_edges = edge_index.size(1)
        frame.call.num_propagations += propagates
        frame.call.edge_names.append(
            frozenset(
                name
                for name, value in values.items()
                if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == num_edges
            )
        )
        if all(id(leaf) in self._slot_of for leaf in self._leaves_of(values)):
            frame.call.inward.add(len(frame.call.edge_names) - 1)
        return edge_index, values

    def _normalize(self, session: Session, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Note whether the norm sees nodes."""
        if not session.is_aggregating and x.size(0) == NUM_NODES:
            self._plan.node_norms.add(norm)
        return _row_by_row(norm, run, x)


class Rehearsal(Observer):
    """Compares a batch of the trial graph, whose histories hold the exact rows, with the whole.

    Args:
        trial: The trial graph.
        batch: One of its batches.
        plan: How the model is run.
        truth: What the whole graph gave.
        checking: Whether to compare what layers and modules give.
    """

    def __init__(self, trial: TrialGraph, batch: Data, plan: Plan, truth: Truth, *, checking: bool = True) -> None:
        self._trial, self._plan, self._truth, self._checking = trial, plan, truth, checking
        self._info: BatchInfo = batch.edge_index.info
        self._seen: Counter[str] = Counter()
        #: What each layer computed about edges that a record replaces.
        self.local_edges: list[tuple[str, Tensor]] = []

    def step(self) -> Session:
        """A training step."""
        return self._session(StoreExchange(_ExactRows(self._truth)), [self])

    def sweep(self, level: frozenset[str] | None) -> Session:
        """A sweep over one level, or over the output; what it writes is compared."""
        return self._session(SweepExchange(level, _ComparedRows(self._truth, self._compare)), [])

    def _session(self, exchange: ExchangePolicy, observers: list[Observer]) -> Session:
        return Session(
            self._info,
            self._plan,
            self._trial.memory,
            self._trial.device,
            exchange,
            observers=observers,
            normalize=self._normalize,
        )

    def check(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Compare the batch's rows with the whole graph's; the halo's may be meaningless after the last layer."""
        self._compare(name, module, out, self._truth.outputs[name])

    def check_numbered(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Compare the output of a module, which may be called several times."""
        self.check(_numbered(self._seen, name), module, out)

    def _compare(self, name: str, module: nn.Module | None, out: Any, whole: Any) -> None:
        if not self._checking:
            return
        got_values, want_values = tensors_in(out), tensors_in(whole)
        if len(got_values) != len(want_values):
            raise DeviationError(name, module)
        for value, expected in zip(got_values, want_values, strict=True):
            rows = (self._info.num_rows, self._info.batch_size)
            if value.dim() == 0 or value.size(0) not in rows or expected.size(0) != NUM_NODES:
                continue
            got = value[: self._info.batch_size].double()
            want = expected[self._info.nodes.to(expected.device)].double()
            tolerance = 1e-3 if value.dtype in (torch.float32, torch.float64) else 5e-2
            bound = tolerance * want.nan_to_num().abs().amax().clamp(min=1e-6) if want.numel() else 1.0
            if got.shape != want.shape or not torch.allclose(got, want, rtol=0.0, atol=float(bound), equal_nan=True):
                raise DeviationError(name, module)

    def around_layer(self, session: Session, call: str, layer: MessagePassing, run: Callable[[], Any]) -> Any:
        """Name a layer that fails, and compare what it gives."""
        try:
            with BatchTensor.watched(None):
                out = run()
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise LayerError(
                call,
                f"{describe(call, layer)} must run on a batch as it does on the whole graph",
                got=f"the error '{error}'",
                fix="Replace it by a layer that computes each node from its neighbours.",
            ) from error
        if self._checking:
            self.check(call, layer, out)
        return out

    def edges_used(self, session: Session, frame: Frame, edge_index: Tensor, values: dict[str, Any]) -> None:
        """Keep what a layer computed itself."""
        if frame.event is not None:
            name = describe(frame.name, frame.layer)
            for value in (edge_index, *(values.get(constant) for constant in frame.event.constants)):
                if isinstance(value, Tensor):
                    self.local_edges.append((name, value.detach().clone()))

    def _normalize(self, session: Session, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Normalize in a way that can be compared with the whole graph."""
        return session.by_own_statistics(norm, run, x) if norm.training else _row_by_row(norm, run, x)


class _ExactRows(RowStore):
    """Histories that hold exact rows."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """The exact rows."""
        return self._truth.slots[slot][session.info.n_id[which].to(session.device)]


class _ComparedRows(_ExactRows):
    """The same; what is written is compared with them."""

    def __init__(self, truth: Truth, compare: Callable[[str, nn.Module | None, Any, Any], None]) -> None:
        super().__init__(truth)
        self._compare = compare

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """Compare rows with the exact ones."""
        self._compare(slot, None, rows, self._truth.slots[slot])


class LayerError(UnsupportedModelError):
    """A layer that does not run on a batch."""

    def __init__(self, call: str, rule: str, *, got: str, fix: str) -> None:
        super().__init__(rule, got=got, fix=fix)
        self.call = call


class DeviationError(Exception):
    """A module whose rows in a batch are not those of the whole graph."""

    def __init__(self, name: str, module: nn.Module | None) -> None:
        super().__init__(name)
        self.name, self.module = name, module

    def error(self) -> UnsupportedModelError:
        """What to tell the user."""
        if self.module is None:
            return UnsupportedModelError(
                "every row of the model's output must depend on its node's neighbourhood only",
                got="an output that mixes all nodes of a batch after the last layer",
                fix="Move pooling and statistics over nodes out of the model.",
            )
        layer = isinstance(self.module, MessagePassing)
        return UnsupportedModelError(
            f"{describe(self.name.strip(), self.module)} must give a node the same row in a batch as in the graph",
            got="another row: it, or something right before it, "
            + ("uses more of the graph than a node's neighbours" if layer else "mixes all nodes of a batch"),
            fix="Replace it by a layer that computes each node from its neighbours."
            if layer
            else "Use a norm that treats each node by itself, such as BatchNorm or LayerNorm(mode='node').",
        )


# What a fused layer does not call.
_UNFUSED = ("message", "aggregate")


def _row_by_row(norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a norm does in evaluation; without its statistics if they would be those of the rows at hand."""
    return by_constants(norm, x) if takes_statistics(norm) else run(x)


def _place(layer: MessagePassing, method: str) -> int:
    """How far up among a layer's classes a method is defined."""
    return next(i for i, cls in enumerate(type(layer).__mro__) if method in vars(cls))


def _numbered(seen: Counter[str], name: str) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
