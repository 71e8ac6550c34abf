"""Runs a model on the trial graph: observed on the whole of it, then compared with that in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from gnnautoscale.forward import (
    ActiveLayer,
    ArgumentKind,
    Arguments,
    EdgeRecord,
    EdgeSource,
    ExchangePolicy,
    LayerCall,
    Observer,
    Plan,
    RowStore,
    Session,
    Shortcut,
    StoreExchange,
    SweepExchange,
    describe,
    has_rows,
    normalize_by_constants,
    own_attribute,
    uses_own_statistics,
)
from gnnautoscale.graph import BatchInfo, BatchTensor
from gnnautoscale.planner.trial_graph import NUM_NODES, TrialGraph, kind_of


@dataclass
class Reference:
    """Outputs of modules and rows of slots on the whole trial graph."""

    outputs: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class Observation(ExchangePolicy, EdgeSource, Observer):
    """Runs the whole trial graph, as one batch, on its own edges and fills in a plan.

    It is policy, edge source and observer at once, because the usual ones follow a plan.
    """

    def __init__(self, trial: TrialGraph, batch: Data, plan: Plan) -> None:
        self.reference, self._plan = Reference(), plan
        self._info: BatchInfo = batch.edge_index.info
        self.session = Session(
            self._info, plan, trial.memory, trial.device, self, edges=self, observers=[self], normalize=self._normalize
        )
        self._slot_of: dict[int, str] = {}
        self._leaves: list[Tensor] = []
        self._seen: Counter[str] = Counter()

    def note(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Keep a module's output."""
        self.reference.outputs[_numbered(self._seen, name)] = map_tensors(lambda value: value.detach().clone(), out)

    def sources(self, out: Any) -> frozenset[str]:
        """The slots that a value was computed from."""
        return frozenset(self._slot_of[id(leaf)] for leaf in self._leaves_of(out) if id(leaf) in self._slot_of)

    def _leaves_of(self, out: Any) -> list[Tensor]:
        """The slots and weights that a value was computed from, found by walking back through autograd's graph."""
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
        self.reference.rows[slot] = out.detach().clone()
        leaf = out.detach().requires_grad_()
        self._leaves.append(leaf)
        self._slot_of[id(leaf)] = slot
        # A copy, because autograd forbids in-place changes of the leaf itself.
        return leaf.clone()

    def around_layer(self, session: Session, call: str, layer: MessagePassing, run: Callable[[], Any]) -> Any:
        """Keep a layer's output, and note which shortcuts may apply to it."""
        after: list[str] = []  # the layer's modules that compute on nodes once it has aggregated

        def note(name: str, module: nn.Module, out: Any) -> None:
            aggregated = session.active and session.active[-1].num_propagations and not session.is_aggregating
            if aggregated and has_rows(out, NUM_NODES):
                after.append(name)

        inside = {name: module for name, module in layer.named_modules() if not isinstance(module, MessagePassing)}
        with watching(inside, note), BatchTensor.watched(None):
            out = run()
        self.note(call, layer, out)
        self._plan.calls[call].possible_shortcuts = self._possible_shortcuts(call, layer, bool(after))
        return out

    def _possible_shortcuts(self, call: str, layer: MessagePassing, dense_after: bool) -> frozenset[Shortcut]:
        planned = self._plan.calls[call]

        def depth(method: str) -> int:
            """How far up in the layer's class hierarchy a method is defined."""
            return next(i for i, cls in enumerate(type(layer).__mro__) if method in vars(cls))

        # A subclass may override messages and forget the method that fuses them.
        fuse = layer.fuse and depth("message_and_aggregate") <= min(depth("message"), depth("aggregate"))
        shortcuts: set[Shortcut] = {"fused"} if fuse else set()
        if call not in self._plan.inner and planned.num_propagations == 1:
            shortcuts |= {"short"} if fuse else set()
            shortcuts |= {"pair"} if dense_after and planned.kinds.count("node") == 1 else set()
        return frozenset(shortcuts)

    def start(self, call: str, layer: MessagePassing, arguments: Arguments) -> tuple[LayerCall, list[EdgeRecord]]:
        """Add a call to the plan, with the kinds of its arguments."""
        tensors = tensors_in(arguments)
        attributes = [own_attribute(self._info, value) for value in tensors]
        kinds: list[ArgumentKind] = [
            "own" if attribute is not None else kind_of(value, NUM_NODES, self._info.e_id.numel())
            for value, attribute in zip(tensors, attributes, strict=True)
        ]
        nested = any(isinstance(module, MessagePassing) for module in layer.modules() if module is not layer)
        return self._plan.calls.setdefault(call, LayerCall(kinds, attributes, nested=nested)), []

    def replace(self, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the edges; note which values belong to edges, and whether rows depend on weights."""
        active.call.num_propagations = active.num_propagations
        per_edge = (name for name, value in values.items() if has_rows(value, edge_index.size(1)))
        active.call.edge_names.append(frozenset(per_edge))
        if all(id(leaf) in self._slot_of for leaf in self._leaves_of(values)):
            active.call.constant_halo.add(len(active.call.edge_names) - 1)
        return edge_index, values

    def _normalize(self, session: Session, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Note norms that see one row per node."""
        if not session.is_aggregating and x.size(0) == NUM_NODES:
            self._plan.node_norms.add(norm)
        return _row_by_row(norm, run, x)


class Rehearsal(Observer, RowStore):
    """Compares a batch of the trial graph, whose histories hold the exact rows, with the whole graph.

    It stands in for these histories, and compares what a sweep writes to them. Without ``checking`` it only runs the
    batch.
    """

    def __init__(
        self, trial: TrialGraph, batch: Data, plan: Plan, reference: Reference, *, checking: bool = True
    ) -> None:
        self._trial, self._plan, self._reference, self._checking = trial, plan, reference, checking
        self._info: BatchInfo = batch.edge_index.info
        self._seen: Counter[str] = Counter()
        self._sweeping = False
        #: The edges and values that each layer computed itself and a record replaces.
        self.local_edges: list[tuple[str, Tensor]] = []

    def step(self) -> Session:
        """A training step."""
        return self._session(StoreExchange(self), [self])

    def sweep(self, level: frozenset[str] | None) -> Session:
        """A sweep over one level, or over the output; compares the rows it writes."""
        self._sweeping = True
        return self._session(SweepExchange(level, self), [])

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        return self._reference.rows[slot][session.info.n_id[which].to(session.device)]

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        if self._sweeping:
            self._compare(slot, None, rows, self._reference.rows[slot])

    def _session(self, exchange: ExchangePolicy, observers: list[Observer]) -> Session:
        trial = self._trial
        return Session(
            self._info, self._plan, trial.memory, trial.device, exchange, observers=observers, normalize=self._normalize
        )

    def check(self, name: str, module: nn.Module | None, out: Any) -> None:
        """Compare the batch's rows with the whole graph's; those of the halo may be meaningless."""
        if self._checking:
            name = _numbered(self._seen, name)
            self._compare(name, module, out, self._reference.outputs[name])

    def _compare(self, name: str, module: nn.Module | None, out: Any, whole: Any) -> None:
        got_values, want_values = tensors_in(out), tensors_in(whole)
        if len(got_values) != len(want_values):
            raise DeviationError(name, module)
        for value, expected in zip(got_values, want_values, strict=True):
            if not has_rows(value, self._info.num_rows, self._info.batch_size) or expected.size(0) != NUM_NODES:
                continue
            got = value[: self._info.batch_size].double()
            want = expected[self._info.nodes.to(expected.device)].double()
            bound = tolerance(value.dtype) * want.nan_to_num().abs().amax().clamp(min=1e-6) if want.numel() else 1.0
            if got.shape != want.shape or not torch.allclose(got, want, rtol=0.0, atol=float(bound), equal_nan=True):
                raise DeviationError(name, module)

    def around_layer(self, session: Session, call: str, layer: MessagePassing, run: Callable[[], Any]) -> Any:
        """Compare a layer's output; if the layer fails, say which one."""
        try:
            with BatchTensor.watched(None):
                out = run()
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise LayerError(
                call,
                f"{describe(call, layer)} must run on a batch as on the whole graph",
                got=f"the error '{error}'",
                fix="Replace it by a layer that computes each node's row from its neighbours.",
            ) from error
        self.check(call, layer, out)
        return out

    def edges_used(self, session: Session, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> None:
        """Keep the edges and values that the layer computed."""
        if active.record is not None:
            name = describe(active.name, active.layer)
            for value in (edge_index, *(values.get(constant) for constant in active.record.constants)):
                if isinstance(value, Tensor):
                    self.local_edges.append((name, value.detach().clone()))

    def _normalize(self, session: Session, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Normalize such that batches can be compared with the whole graph."""
        return session.by_own_statistics(norm, run, x) if norm.training else _row_by_row(norm, run, x)


class LayerError(UnsupportedModelError):
    """A layer fails on a batch."""

    def __init__(self, call: str, rule: str, *, got: str, fix: str) -> None:
        super().__init__(rule, got=got, fix=fix)
        self.call = call


class DeviationError(Exception):
    """A module computes other rows in a batch than on the whole graph."""

    def __init__(self, name: str, module: nn.Module | None) -> None:
        super().__init__(name)
        self.name, self.module = name, module

    def error(self) -> UnsupportedModelError:
        """The error to show to the user."""
        if self.module is None:
            return UnsupportedModelError(
                "every row of the model's output must depend on its node's neighbourhood only",
                got="an output that mixes all nodes of a batch after the last layer",
                fix="Move pooling and statistics over nodes out of the model.",
            )
        layer = isinstance(self.module, MessagePassing)
        return UnsupportedModelError(
            f"{describe(self.name.strip(), self.module)} must compute the same rows in a batch as in the whole graph",
            got="different rows: the module, or something right before it, "
            + ("uses more of the graph than a node's neighbours" if layer else "mixes all nodes of a batch"),
            fix="Replace it by a layer that computes each node's row from its neighbours."
            if layer
            else "Use a norm that treats each node separately, such as BatchNorm or LayerNorm(mode='node').",
        )


@contextmanager
def watching(modules: Mapping[str, nn.Module], note: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    """Call ``note(name, module, output)`` whenever one of the modules has run."""

    def hook(name: str, module: nn.Module, _: Any, out: Any) -> None:
        note(name, module, out)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(hook, name)))
        yield


def tolerance(dtype: torch.dtype) -> float:
    """How far two runs may differ by rounding, relative to the largest value."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def _row_by_row(norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Normalize as in evaluation; by constants if the norm would take statistics of its input."""
    return normalize_by_constants(norm, x) if uses_own_statistics(norm) else run(x)


def _numbered(seen: Counter[str], name: str) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
