"""Runs a model on a trial graph: observed on the whole of it, then compared with that in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import leaves_of, map_tensors, others_in, tensors_in
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
    has_rows,
    held_tensors,
    own_attribute,
    uses_own_statistics,
)
from gnnautoscale.graph import BatchInfo, BatchTensor
from gnnautoscale.planner.blame import DeviationError, failed_layer, whole_table
from gnnautoscale.planner.comparison import tolerances
from gnnautoscale.planner.trial_graph import TrialGraph, kinds_of


@dataclass
class Reference:
    """What the modules of a model, called by name, did on the whole trial graph.

    Attributes:
        inputs: The tensors that each was called with.
        outputs: Their outputs.
        rows: The rows of slots.
        statistics: Mean and variance of the rows that batch norms saw.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether the model's output is."""
        return all(bool(torch.isfinite(value).all()) for value in tensors_in(self.outputs[Plan.OUTPUT]))


# Larger tensors are rows rather than something to branch on.
_MOST_READ = 4096


class _HostReads(TorchFunctionMode):
    """Collects the weights and buffers whose values a forward pass reads, to branch on them for example.

    A weight's name follows its value through functions that autograd does not track, such as comparisons.
    """

    _READING = frozenset(
        {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__}
    )

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._names: dict[int, tuple[Tensor, frozenset[str]]] = {
            id(value): (value, frozenset({name})) for name, value in named
        }
        self.found: set[str] = set()

    def _names_of(self, value: Tensor) -> frozenset[str]:
        leaves = (value, *leaves_of([value])) if value.grad_fn is not None else (value,)
        return frozenset[str]().union(*(self._names[id(leaf)][1] for leaf in leaves if id(leaf) in self._names))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._READING:
            self.found |= self._names_of(args[0])
        elif isinstance(result, Tensor) and result.grad_fn is None and result.numel() <= _MOST_READ:
            given = [value for value in tensors_in((args, kwargs)) if value.numel() <= _MOST_READ]
            if names := frozenset[str]().union(*map(self._names_of, given)):
                self._names[id(result)] = result, names
        return result


class Observation(ExchangePolicy, EdgeSource, Observer):
    """Runs a whole trial graph, as one batch, on its own edges and fills in a plan.

    It is policy, edge source and observer at once, because the usual ones follow a plan. The rows of the slots inside
    of one call can be ``shifted``, each value by another number of about the given size.
    """

    def __init__(self, trial: TrialGraph, batch: Data, plan: Plan, shifted: tuple[str, float] | None = None) -> None:
        self.reference, self.plan, self._trial = Reference(), plan, trial
        self._shifted = shifted
        self._info: BatchInfo = batch.edge_index.info
        self.session = Session(
            self._info, plan, trial.memory, trial.device, self, edges=self, observers=[self], normalize=self._normalize
        )
        #: For each call the kinds that each of its tensors may have, judged by this graph alone.
        self.kinds: dict[str, list[set[ArgumentKind]]] = {}
        self._slot_of: dict[int, str] = {}
        self._leaves: list[Tensor] = []
        self._seen: Counter[str] = Counter()

    def note(self, name: str, module: nn.Module | None, given: Any, out: Any) -> None:
        """Keep what a module was called with, and its output."""
        name = _numbered(self._seen, name)
        self.reference.inputs[name] = [value.detach().clone() for value in _inputs(given)]
        self.reference.outputs[name] = map_tensors(lambda value: value.detach().clone(), out)

    @contextmanager
    def noting_reads(self, model: nn.Module) -> Iterator[None]:
        """Note the weights and buffers whose values the model reads."""
        named = (*model.named_parameters(), *model.named_buffers(), *held_tensors(model))
        with _HostReads(named) as reads:
            yield
        self.plan.reads = frozenset(reads.found)

    def sources(self, out: Any) -> frozenset[str]:
        """The slots that a value was computed from."""
        return frozenset(self._slot_of[id(leaf)] for leaf in leaves_of(tensors_in(out)) if id(leaf) in self._slot_of)

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Note the slot and what it is computed from."""
        out = compute()
        call = self.plan.calls.get(slot)
        if call is not None and not call.num_propagations:
            return out
        if has_rows(out, self._trial.info.graph.num_nodes) and not has_rows(out, self._trial.num_nodes):
            raise whole_table(slot, out.size(0))
        session.check_rows(slot, out)
        self.plan.needs[slot] = self.sources(out)
        self.plan.rows[slot] = out.detach()[:0]
        self.reference.rows[slot] = out.detach().clone()
        leaf = out.detach().requires_grad_()
        self._leaves.append(leaf)
        self._slot_of[id(leaf)] = slot
        if self._shifted is not None and slot.startswith(f"{self._shifted[0]}/"):
            count = torch.arange(1.0, out.numel() + 1.0, dtype=out.dtype, device=out.device)
            return leaf + self._shifted[1] * count.sin().view_as(out)
        # A copy, because autograd forbids in-place changes of the leaf itself.
        return leaf.clone()

    def around_layer(
        self, session: Session, call: str, layer: MessagePassing, arguments: Arguments, run: Callable[[], Any]
    ) -> Any:
        """Keep a layer's output, and note which shortcuts may apply to it."""
        after: list[str] = []  # the layer's modules that compute on nodes once it has aggregated

        def note(name: str, module: nn.Module, given: Any, out: Any) -> None:
            aggregated = session.active and session.active[-1].num_propagations and not session.is_aggregating
            if aggregated and has_rows(out, self._trial.num_nodes):
                after.append(name)

        inside = {name: module for name, module in layer.named_modules() if not isinstance(module, MessagePassing)}
        with watching(inside, note), BatchTensor.watched(None):
            out = run()
        self.note(call, layer, arguments, out)
        self.plan.calls[call].possible_shortcuts = self._possible_shortcuts(call, layer, bool(after))
        return out

    def _possible_shortcuts(self, call: str, layer: MessagePassing, dense_after: bool) -> frozenset[Shortcut]:
        planned = self.plan.calls[call]
        shortcuts: set[Shortcut] = {"fused"} if may_fuse(layer) else {"lazy"}
        if call not in self.plan.inner and planned.num_propagations == 1:
            shortcuts |= {"short"}
            shortcuts |= {"pair"} if dense_after and sum("node" in kinds for kinds in self.kinds[call]) == 1 else set()
        return frozenset(shortcuts)

    def start(self, call: str, layer: MessagePassing, arguments: Arguments) -> tuple[LayerCall, list[EdgeRecord]]:
        """Add a call to the plan, with what is known about its arguments."""
        tensors = tensors_in(arguments)
        attributes = [own_attribute(self._info, value) for value in tensors]
        self.kinds[call] = [
            {"own"} if attribute is not None else kinds_of(value, self._trial.num_nodes, self._info.num_edges)
            for value, attribute in zip(tensors, attributes, strict=True)
        ]
        nested = any(isinstance(module, MessagePassing) for module in layer.modules() if module is not layer)
        others = enumerate(others_in(arguments))
        sizes = frozenset(place for place, value in others if type(value) is int and value == self._trial.num_nodes)
        return self.plan.calls.setdefault(call, LayerCall([], attributes, nested=nested, sizes=sizes)), []

    def replace(self, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the edges; note which values belong to edges, and whether rows depend on weights."""
        active.call.num_propagations = active.num_propagations
        per_edge = (name for name, value in values.items() if has_rows(value, edge_index.size(1)))
        active.call.edge_names.append(frozenset(per_edge))
        if all(id(leaf) in self._slot_of for leaf in leaves_of(tensors_in(values))):
            active.call.constant_halo.add(len(active.call.edge_names) - 1)
        return edge_index, values

    def _normalize(
        self, session: Session, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Note norms that see one row per node, and the statistics of those that take them."""
        if not session.is_aggregating and x.size(0) == self._trial.num_nodes:
            self.plan.node_norms.add(name)
        if not uses_own_statistics(norm):
            return run(x)
        with torch.no_grad():
            variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
        self.reference.statistics[_numbered(self._seen, _norm_call(session, name))] = mean, variance
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)


class Rehearsal(Observer, RowStore):
    """Compares a batch of a trial graph, whose histories hold the exact rows, with the whole graph.

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
        # Modules since the last one that agreed, whose outputs cannot be compared row by row.
        self._suspects: list[tuple[str, nn.Module]] = []
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
        if self._sweeping and not self._agrees(rows, self._reference.rows[slot]):
            raise DeviationError(slot, None)

    def _session(self, exchange: ExchangePolicy, observers: list[Observer]) -> Session:
        trial = self._trial
        return Session(
            self._info, self._plan, trial.memory, trial.device, exchange, observers=observers, normalize=self._normalize
        )

    def check(self, name: str, module: nn.Module | None, given: Any, out: Any) -> None:
        """Compare the batch's rows with the whole graph's; those of the halo may be meaningless."""
        if not self._checking:
            return
        name = _numbered(self._seen, name)
        got, want = tensors_in(out), tensors_in(self._reference.outputs.get(name))
        if len(got) != len(want):
            raise DeviationError(name, module)
        if not all(self._is_comparable(*pair) for pair in zip(got, want, strict=True)):
            if module is not None:
                self._suspects.append((name, module))
            return
        if all(self._agrees(*pair) for pair in zip(got, want, strict=True)):
            self._suspects.clear()
            return
        before = self._reference.inputs.get(name, [])
        # A layer reads the halo's rows as well; to other modules they may be meaningless.
        layer = isinstance(module, MessagePassing)
        mixed_before = module is not None and any(
            self._is_comparable(value, expected) and not self._agrees(value, expected, halo=layer)
            for value, expected in zip(_inputs(given), before, strict=False)
        )
        raise DeviationError(name, module, mixed_before=mixed_before, suspects=self._suspects)

    def _is_comparable(self, value: Tensor, whole: Tensor) -> bool:
        per_node = has_rows(value, self._info.num_rows, self._info.batch_size)
        return per_node and has_rows(whole, self._trial.num_nodes)

    def _agrees(self, value: Tensor, whole: Tensor, *, halo: bool = False) -> bool:
        """Whether rows agree with the whole graph's up to rounding, column by column; by default the batch's rows."""
        count = value.size(0) if halo else self._info.batch_size
        got = value[:count].double()
        want = whole[self._info.n_id[:count].to(whole.device)].double()
        if got.shape != want.shape:
            return False
        relative, least = tolerances(value.dtype)
        size = whole.double().nan_to_num().abs()
        bound = relative * size.amax(0) + least * size.max().clamp(min=1e-6) if size.numel() else size.new_zeros(())
        return bool(((got - want).abs() <= bound).logical_or(got.isnan() & want.isnan()).logical_or(got == want).all())

    def around_layer(
        self, session: Session, call: str, layer: MessagePassing, arguments: Arguments, run: Callable[[], Any]
    ) -> Any:
        """Compare a layer's output; if the layer fails, say which one."""
        try:
            with BatchTensor.watched(None):
                out = run()
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise failed_layer(call, layer, error) from error
        self.check(call, layer, arguments, out)
        return out

    def edges_used(self, session: Session, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> None:
        """Keep the edges and values that the layer computed."""
        if active.record is not None:
            for value in (edge_index, *(values.get(constant) for constant in active.record.constants)):
                if isinstance(value, Tensor):
                    self.local_edges.append((active.name, value.detach().clone()))

    def _normalize(
        self, session: Session, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Normalize by the whole graph's statistics: in a batch they differ, which is known and accepted.

        A norm over other rows than those of nodes or edges gets its own, to see whether that matters.
        """
        if not uses_own_statistics(norm):
            return run(x)
        known = self._reference.statistics.get(_numbered(self._seen, _norm_call(session, name)))
        per_node = name in self._plan.node_norms and has_rows(x, self._info.num_rows, self._info.batch_size)
        usual = session.is_aggregating or per_node or has_rows(x, self._info.num_edges)
        if not self._checking or known is None or not usual:
            return session.by_own_statistics(name, norm, run, x)
        return F.batch_norm(x, *known, norm.weight, norm.bias, False, 0.0, norm.eps)


@contextmanager
def watching(modules: Mapping[str, nn.Module], note: Callable[[str, nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call ``note(name, module, arguments, output)`` whenever one of the modules has run."""

    def hook(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        note(name, module, (args, kwargs), out)

    with ExitStack() as hooks:
        for name, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                hooks.enter_context(module.register_forward_hook(partial(hook, name), with_kwargs=True))
        yield


def may_fuse(layer: MessagePassing) -> bool:
    """Whether a layer may aggregate its messages in one kernel."""

    def depth(method: str) -> int:
        """How far up in the layer's class hierarchy a method is defined."""
        return next(i for i, cls in enumerate(type(layer).__mro__) if method in vars(cls))

    # A subclass may override messages and forget the method that fuses them.
    return layer.fuse and depth("message_and_aggregate") <= min(depth("message"), depth("aggregate"))


def _norm_call(session: Session, name: str) -> str:
    """The name of a norm's call, which does not change if other layers are skipped."""
    return f"{session.active[-1].name if session.active else ''} {name} statistics"


def _inputs(given: Any) -> list[Tensor]:
    """The tensors that a module was called with, apart from those of the batch itself."""
    return [value for value in tensors_in(given) if not isinstance(value, BatchTensor)]


def _numbered(seen: Counter[str], name: str) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
