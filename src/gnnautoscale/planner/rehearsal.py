"""Sessions on the tiny graph: one observes how the model runs as a whole, others compare batches with that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import ArgumentKind, Event, Frame, LayerCall, Plan, Session, Shortcut, Sweep, describe, norms
from gnnautoscale.graph import BatchTensor
from gnnautoscale.planner.trial_graph import NUM_NODES, TinyGraph, kind_of


@dataclass
class Truth:
    """What modules and slots gave on the whole tiny graph."""

    outputs: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)


class Observation(Session):
    """Runs the whole tiny graph as it is and fills in the plan."""

    def __init__(self, tiny: TinyGraph, batch: Data, plan: Plan) -> None:
        super().__init__(batch.edge_index.info, plan, tiny.memory, tiny.device)
        self.truth = Truth()
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
        """Note the slot and what it is computed from."""
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
        with self._watching_inside(layer) as dense_after, BatchTensor.watched(None):
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
        # A subclass that changes messages may have forgotten to change what fuses them.
        fuse = layer.fuse and all(_place(layer, "message_and_aggregate") <= _place(layer, name) for name in _UNFUSED)
        shortcuts: set[Shortcut] = {"fused"} if fuse else set()
        if call not in self.plan.inner and known.num_propagations == 1:
            shortcuts |= {"short"} if fuse else set()
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

    def _recorded(self, frame: Frame, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
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
        """Note whether the norm sees nodes."""
        if not self._inside_propagate and x.size(0) == NUM_NODES:
            self.plan.node_norms.add(norm)
        return _norm_of_rows(norm, run)(x)

    def propagate(self, run: Callable[..., Any], edge_index: Tensor, size: Any, values: dict[str, Any]) -> Any:
        """Count propagations."""
        self._frames[-1].call.num_propagations += 1
        return super().propagate(run, edge_index, size, values)


class _ExactHistories(Session):
    """A session on the tiny graph whose histories hold the exact rows; what is pushed is compared with them."""

    truth: Truth
    checking = True

    def batch_norm(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Normalize in a way that can be compared with the whole graph."""
        return super().batch_norm(norm, run, x) if norm.training else _norm_of_rows(norm, run)(x)

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
                raise DeviationError(name, module)


class Rehearsal(_ExactHistories):
    """Runs a batch of the tiny graph and compares it with the whole."""

    def __init__(self, tiny: TinyGraph, batch: Data, plan: Plan, truth: Truth) -> None:
        super().__init__(batch.edge_index.info, plan, tiny.memory, tiny.device)
        self.truth = truth
        self.local_edges: list[tuple[str, Tensor]] = []
        self._seen: Counter[str] = Counter()

    def check_numbered(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Compare a module's output, which may be called several times."""
        self.check(_numbered(self._seen, name), module, out)

    def _run_layer(self, call: str, layer: MessagePassing, *rest: Any) -> Any:
        try:
            with BatchTensor.watched(None):
                out = super()._run_layer(call, layer, *rest)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise LayerError(
                call,
                f"{describe(call, layer)} must run on a batch as it does on the whole graph",
                got=f"the error '{error}'",
                fix="Replace it by a layer that computes each node from its neighbours.",
            ) from error
        if self.checking:
            self.check(call, layer, out)
        return out

    def _recorded(self, frame: Frame, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if frame.events is not None and frame.num_events < len(frame.events):
            name = describe(frame.name, frame.layer)
            constants = [values.get(constant) for constant in frame.events[frame.num_events].constants]
            for value in (edge_index, *constants):
                if isinstance(value, Tensor):
                    self.local_edges.append((name, value.detach().clone()))
        return super()._recorded(frame, edge_index, values)


class TinySweep(Sweep, _ExactHistories):
    """A sweep over the tiny graph."""

    def __init__(self, tiny: TinyGraph, batch: Data, plan: Plan, truth: Truth, level: frozenset[str] | None) -> None:
        super().__init__(batch.edge_index.info, plan, tiny.memory, tiny.device, level=level)
        self.truth = truth

    def push(self, slot: str, out: Tensor) -> None:
        """Compare with the exact rows."""
        self._compare(slot, None, out, self.truth.slots[slot])

    def pull(self, slot: str, like: Tensor) -> Tensor:
        """The exact rows of batch and halo."""
        return self.truth.slots[slot][self.info.n_id.to(self.device)]


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


def _norm_of_rows(norm: _BatchNorm, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What a norm does in evaluation; without its statistics if they would be those of the rows at hand."""
    return partial(norms.by_constants, norm) if norms.takes_statistics(norm) else run


def _place(layer: MessagePassing, method: str) -> int:
    """How far up among a layer's classes a method is defined."""
    return next(i for i, cls in enumerate(type(layer).__mro__) if method in vars(cls))


def _numbered(seen: Counter[str], name: str) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
