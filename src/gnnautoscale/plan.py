"""Finds out how a model must be run with histories, and proves on a tiny graph that this gives the right rows.

The model is run on a small graph twice: as a whole, and in batches whose histories hold the exact rows. Every
layer, norm and output must then agree. So no table of layer types is needed: a layer that looks beyond its
neighbours is seen to deviate and gets a history at each of its propagations; if that does not help, or if
something outside of the layers mixes nodes, the model is refused and the culprit is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.batch import BatchInfo
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.record import ArgumentKind, Event, map_tensors, tensors_in
from gnnautoscale.session import Session, _Frame, describe, evaluating
from gnnautoscale.slots import SHORTCUTS, LayerCall, Plan, Shortcut
from gnnautoscale.sweep import Sweep, run_sweep
from gnnautoscale.tiny import NUM_NODES, TinyGraph, kind_of

RunModel = Callable[[Session, tuple[Any, ...], dict[str, Any]], Any]


def make_plan(model: nn.Module, run: RunModel, info: BatchInfo, arguments: BoundArguments, *, explicit: bool) -> Plan:
    """Find out how a model must be run, and check that its batches agree with the whole graph.

    Args:
        model: The attached model.
        run: Calls the model inside a session.
        info: The batch that the arguments come from.
        arguments: The arguments of a call with that batch.
        explicit: Whether the model names its own slots.

    Raises:
        UnsupportedModelError: If no placement of histories makes the model right; the message names the layer.
    """
    device = next((value.device for value in model.parameters()), info.n_id.device)
    cuda = [device] if device.type == "cuda" else []
    with evaluating(model), torch.autocast(device.type, enabled=False), torch.inference_mode(False):
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(0)
            tiny = TinyGraph(info, arguments, device)
        rehearsals = _Rehearsals(model, run, tiny, explicit)
        if any(is_lazy(parameter) for parameter in model.parameters()):
            # Weights that are drawn now must come from the user's own random state.
            rehearsals.observe(set())
        with torch.random.fork_rng(devices=cuda), _stirred(model):
            return rehearsals.plan()


class _Rehearsals:
    """The runs on the tiny graph that lead to a plan."""

    def __init__(self, model: nn.Module, run: RunModel, tiny: TinyGraph, explicit: bool) -> None:
        self.model, self.run, self.tiny, self.explicit = model, run, tiny, explicit

    def plan(self) -> Plan:
        """Try histories at the layers' outputs, and at inner propagations where these deviate."""
        inner: set[str] = set()
        everything_needed = False
        while True:
            plan, truth = self.observe(inner, everything_needed=everything_needed)
            deviation = self._rehearse(plan, truth) or self._sweep(plan, truth)
            if deviation is None:
                break
            call = plan.calls.get(deviation.name)
            if call is not None and call.num_propagations > 1 and deviation.name not in inner:
                inner = inner | {deviation.name}
            elif not everything_needed:
                # Autograd may not have seen what a slot is computed from, for example under no_grad.
                everything_needed = True
            else:
                raise deviation.error()
        with evaluating(self.model):
            self._check_training_mode(plan, truth)
        self._take_shortcuts(plan, truth)
        return plan

    def _take_shortcuts(self, plan: Plan, truth: _Truth) -> None:
        """Leave out whatever work turns out not to matter for the batch's rows."""
        for call in plan.calls.values():
            call.shortcuts = call.possible_shortcuts
        plan.short_tail = plan.bare = True
        while True:
            culprit = None
            try:
                deviation = self._rehearse(plan, truth) or self._sweep(plan, truth)
                if deviation is None:
                    return
                culprit = deviation.name
            except _LayerError as error:
                culprit = error.call
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                pass  # somewhere between the layers
            blamed = plan.calls.get(culprit or "")
            if blamed is not None and blamed.shortcuts:
                blamed.shortcuts -= {next(name for name in SHORTCUTS if name in blamed.shortcuts)}
            elif plan.short_tail:
                plan.short_tail = False
            elif plan.bare:
                plan.bare = False
            elif any(call.shortcuts for call in plan.calls.values()):
                for call in plan.calls.values():
                    call.shortcuts = frozenset()
            else:
                raise RuntimeError("a plan that was right has become wrong")

    def observe(self, inner: set[str], *, everything_needed: bool = False) -> tuple[Plan, _Truth]:
        """Run the whole tiny graph; note how every layer is called and what each slot is computed from."""
        plan = Plan(inner=inner, explicit=self.explicit)
        batch = next(iter(self.tiny.whole))
        session = _Observation(self.tiny, batch, plan)
        with torch.enable_grad(), _watching(self.model, session.note):
            out = self.run(session, *self.tiny.arguments(batch))
        plan.needs[Plan.OUTPUT] = session.sources(out)
        session.note(Plan.OUTPUT, None, out)
        if everything_needed:
            slots = list(plan.needs)
            plan.needs = {slot: frozenset(slots[:number]) for number, slot in enumerate(slots)}
        return plan, session.truth

    def _rehearse(self, plan: Plan, truth: _Truth) -> _DeviationError | None:
        """Run the tiny graph in batches with exact histories; returns the first deviation."""
        try:
            for batch in self.tiny.parts:
                session = _Rehearsal(self.tiny, batch, plan, truth)
                with torch.no_grad(), _watching(self.model, session.check_numbered):
                    out = self.run(session, *self.tiny.arguments(batch))
                session.check(Plan.OUTPUT, None, out)
        except _DeviationError as deviation:
            return deviation
        return None

    def _check_training_mode(self, plan: Plan, truth: _Truth) -> None:
        """Refuse layers that change recorded values at random while they train: the record would undo that."""
        batch = next(iter(self.tiny.parts))
        seen = []
        for training in (False, True):
            # The layers alone: norms inside of them must not take statistics from the tiny graph.
            for module in self.model.modules():
                if isinstance(module, MessagePassing):
                    module.training = training
            session = _Rehearsal(self.tiny, batch, plan, truth)
            session.checking = False  # dropout inside of layers may change their output
            with torch.no_grad():
                self.run(session, *self.tiny.arguments(batch))
            seen.append(session.local_edges)
        for (name, before), (_, after) in zip(*seen, strict=True):
            if before.shape != after.shape or not torch.equal(before, after):
                raise UnsupportedModelError(
                    f"{name} must hand the same edges and edge weights to propagate in training as in evaluation",
                    got="some that it changes at random while it trains",
                    fix="Set the layer's own dropout to 0 and use autoscale(..., edge_dropout=p).",
                )

    def _sweep(self, plan: Plan, truth: _Truth) -> _DeviationError | None:
        """Compute each level from the levels below, without the rows that nothing needs if the model runs so."""
        deviation: _DeviationError | None = None
        for skip_empty in (True, False):
            plan.skip_empty = skip_empty
            try:
                for batch in self.tiny.parts:
                    for level in (*plan.levels, None):
                        session = _TinySweep(self.tiny, batch, plan, truth, level)
                        with torch.no_grad():
                            out = run_sweep(partial(self.run, session, *self.tiny.arguments(batch)))
                        if level is None:
                            session.check(Plan.OUTPUT, None, out)
                return None
            except _DeviationError as error:
                deviation = error
            except (RuntimeError, ValueError, IndexError):
                if not plan.skip_empty:
                    raise
        return deviation


@dataclass
class _Truth:
    """What modules and slots gave on the whole tiny graph."""

    outputs: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)


class _Observation(Session):
    """Runs the whole tiny graph as it is and fills in the plan."""

    def __init__(self, tiny: TinyGraph, batch: Data, plan: Plan) -> None:
        super().__init__(batch.edge_index.info, plan, tiny.memory, tiny.device)
        self.truth = _Truth()
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

    def slot(self, slot: str, compute: Callable[[], Any]) -> Any:
        out = compute()
        call = self.plan.calls.get(slot)
        if call is not None and not call.num_propagations:
            return out
        self._check_rows(slot, out)
        self.plan.needs[slot] = self.sources(out)
        self.plan.rows[slot] = out.detach()[:0]
        self.truth.slots[slot] = out.detach().clone()
        leaf = out.detach().requires_grad_()
        self._leaves.append(leaf)
        self._slot_of[id(leaf)] = slot
        # A copy, since what follows may write into it, which autograd forbids on the leaf itself.
        return leaf.clone()

    def _run_layer(self, call: str, layer: MessagePassing, *rest: Any) -> Any:
        with self._watching_inside(layer) as dense_after:
            out = super()._run_layer(call, layer, *rest)
        self.note(call, layer, out)
        self.plan.calls[call].possible_shortcuts = self._possible_shortcuts(call, layer, bool(dense_after))
        return out

    @contextmanager
    def _watching_inside(self, layer: MessagePassing) -> Iterator[list[nn.Module]]:
        """Note which modules of a layer compute on nodes once it has aggregated."""
        found: list[nn.Module] = []

        def note(module: nn.Module, _: Any, out: Any) -> None:
            rows = isinstance(out, Tensor) and out.dim() > 0 and out.size(0) == NUM_NODES
            if rows and not self._inside_propagate and self._frames and self._frames[-1].num_propagations:
                found.append(module)

        inside = [module for module in layer.modules() if not isinstance(module, MessagePassing)]
        handles = [module.register_forward_hook(note) for module in inside]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _possible_shortcuts(self, call: str, layer: MessagePassing, dense_after: bool) -> frozenset[Shortcut]:
        known = self.plan.calls[call]
        shortcuts: set[Shortcut] = {"fused"} if layer.fuse else set()
        if call not in self.plan.inner and known.num_propagations == 1:
            shortcuts |= {"short"} if layer.fuse else set()
            shortcuts |= {"pair"} if dense_after and known.kinds.count("node") == 1 else set()
        return frozenset(shortcuts)

    def _known_call(self, call: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        tensors = tensors_in((args, kwargs))
        own = [self._own_attribute(value) for value in tensors]
        kinds: list[ArgumentKind] = [
            "own" if attribute is not None else kind_of(value, NUM_NODES, self.info.e_id.numel())
            for value, attribute in zip(tensors, own, strict=True)
        ]
        nested = any(isinstance(module, MessagePassing) for module in layer.modules() if module is not layer)
        return self.plan.calls.setdefault(call, LayerCall(kinds, own, nested=nested))

    def _events(self, *_: Any) -> list[Event] | None:
        return None

    def _recorded(self, frame: _Frame, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        num_edges = edge_index.size(1)
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

    def batch_norm(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self._inside_propagate and x.size(0) == NUM_NODES:
            self.plan.node_norms.add(norm)
        return run(x)

    def propagate(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        self._frames[-1].call.num_propagations += 1
        return super().propagate(run, edge_index, size, values)


class _ExactHistories(Session):
    """A session on the tiny graph whose histories hold the exact rows; what is pushed is compared with them."""

    truth: _Truth
    checking = True

    def exchange(self, slot: str, out: Tensor) -> Tensor:
        halo = self.truth.slots[slot][self.info.halo.to(self.device)]
        return torch.cat([out[: self.info.batch_size], halo])

    def check(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Compare the batch's rows with the whole graph's; the halo's may be meaningless after the last layer."""
        self._compare(name, module, out, self.truth.outputs[name])

    def _compare(self, name: str, module: nn.Module | None, out: Any, whole: Any) -> None:
        if not self.checking:
            return
        for value, expected in zip(tensors_in(out), tensors_in(whole), strict=True):
            rows = (self.info.num_rows, self.info.batch_size)
            if value.dim() == 0 or value.size(0) not in rows or expected.size(0) != NUM_NODES:
                continue
            got = value[: self.info.batch_size].double()
            want = expected[self.info.nodes.to(expected.device)].double()
            tolerance = 1e-3 if value.dtype in (torch.float32, torch.float64) else 5e-2
            bound = tolerance * want.nan_to_num().abs().amax().clamp(min=1e-6) if want.numel() else 1.0
            if got.shape != want.shape or not torch.allclose(got, want, rtol=0.0, atol=float(bound), equal_nan=True):
                raise _DeviationError(name, module)


class _Rehearsal(_ExactHistories):
    """Runs a batch of the tiny graph and compares it with the whole."""

    def __init__(self, tiny: TinyGraph, batch: Data, plan: Plan, truth: _Truth) -> None:
        super().__init__(batch.edge_index.info, plan, tiny.memory, tiny.device)
        self.truth = truth
        self.local_edges: list[tuple[str, Tensor]] = []
        self._seen: Counter[str] = Counter()

    def check_numbered(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Compare a module's output, which may be called several times."""
        self.check(_numbered(self._seen, name), module, out)

    def _run_layer(self, call: str, layer: MessagePassing, *rest: Any) -> Any:
        try:
            out = super()._run_layer(call, layer, *rest)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, UnsupportedModelError):
                raise
            raise _LayerError(
                call,
                f"{describe(call, layer)} must run on a batch as it does on the whole graph",
                got=f"the error '{error}'",
                fix="Replace it by a layer that computes each node from its neighbours.",
            ) from error
        self.check(call, layer, out)
        return out

    def _recorded(self, frame: _Frame, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if frame.events is not None and frame.num_events < len(frame.events):
            name = describe(frame.name, frame.layer)
            constants = [values.get(constant) for constant in frame.events[frame.num_events].constants]
            for value in (edge_index, *constants):
                if isinstance(value, Tensor):
                    self.local_edges.append((name, value.detach().clone()))
        return super()._recorded(frame, edge_index, values)


class _TinySweep(Sweep, _ExactHistories):
    """A sweep over the tiny graph."""

    def __init__(self, tiny: TinyGraph, batch: Data, plan: Plan, truth: _Truth, level: frozenset[str] | None) -> None:
        super().__init__(batch.edge_index.info, plan, tiny.memory, tiny.device, level=level)
        self.truth = truth

    def push(self, slot: str, out: Tensor) -> None:
        self._compare(slot, None, out, self.truth.slots[slot])

    def pull(self, slot: str, like: Tensor) -> Tensor:
        return self.truth.slots[slot][self.info.n_id.to(self.device)]


class _LayerError(UnsupportedModelError):
    """A layer that does not run on a batch."""

    def __init__(self, call: str, rule: str, *, got: str, fix: str) -> None:
        super().__init__(rule, got=got, fix=fix)
        self.call = call


class _DeviationError(Exception):
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


@contextmanager
def _watching(model: nn.Module, note: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    """Call ``note`` with the output of every module that neither is, nor is in, nor holds a message-passing layer."""
    layers = [name for name, module in model.named_modules() if isinstance(module, MessagePassing)]
    handles = []
    for name, module in model.named_modules():
        related = any(
            name == layer or not layer or not name or name.startswith(f"{layer}.") or layer.startswith(f"{name}.")
            for layer in layers
        )
        if not related:
            handles.append(
                # The blank keeps these names apart from those of layer calls.
                module.register_forward_hook(lambda module, _, out, name=name: note(f"{name} ", module, out))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _stirred(model: nn.Module) -> Iterator[None]:
    """Give weights that are all the same, such as gates that start at zero, values that let nothing hide."""
    originals = {
        weight: weight.data
        for weight in model.parameters()
        if weight.numel() and bool((weight == weight.flatten()[0]).all())
    }
    try:
        for weight, value in originals.items():
            weight.data = value + 0.3 * torch.randn_like(value) if value.is_floating_point() else value
        yield
    finally:
        for weight, value in originals.items():
            weight.data = value


def _numbered(seen: Counter[str], name: str) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
