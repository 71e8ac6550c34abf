"""Runs of a model on trial graphs with types: as a whole, which is observed, and in batches, which must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import leaves_of, map_tensors, tensors_in
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import (
    ActiveLayer,
    ArgumentKind,
    Arguments,
    EdgeRecord,
    EdgeSource,
    ExchangePolicy,
    KindSession,
    LayerCall,
    Plan,
    RowStore,
    Session,
    Shortcut,
    StoreExchange,
    SweepExchange,
    TypedPlan,
    TypedSession,
    attributes_of,
    exchanged,
    has_rows,
    relations_of,
    run_pass,
    uses_own_statistics,
)
from gnnautoscale.graph import EdgeType, TypedInfo
from gnnautoscale.planner.comparison import tolerances
from gnnautoscale.planner.rehearsal import may_fuse, watching
from gnnautoscale.planner.trial import other_modules
from gnnautoscale.planner.typed_trial_graph import TypedTrialGraph
from gnnautoscale.planner.understudy import Understudy


class TypedDeviationError(Exception):
    """Rows of a slot, or outputs, that differ from those of the whole graph."""

    def __init__(self, slot: str) -> None:
        super().__init__(slot)
        self.slot = slot


def rehearsed(
    graph: TypedTrialGraph, actor: Understudy, plan: TypedPlan, seen: TypedObservation
) -> TypedDeviationError | None:
    """Run the parts with exact histories, as steps and as sweeps; returns the first deviation."""
    try:
        for batch in graph.parts:
            info = batch[graph.relations[0]].edge_index.info.typed
            ways: list[Callable[[RowStore], ExchangePolicy]] = [
                StoreExchange,
                *(partial(SweepExchange, level) for level in (*plan.levels, None)),
            ]
            for way in ways:
                actor.reset()
                rehearsal = _Rehearsal(seen)
                policy = way(rehearsal)
                session = _RehearsingSession(
                    info, plan, graph.memory, graph.device, policy, normalize=rehearsal.normalize
                )
                session.begin()
                arguments = graph.arguments(batch)
                watched = other_modules(actor.model) if way is StoreExchange else {}
                with torch.no_grad(), watching(watched, partial(rehearsal.check_module, info)):
                    out = run_pass(partial(actor.run, session, arguments))
                if out is not None:
                    rehearsal.check_output(session, session.finish(out))
    except TypedDeviationError as deviation:
        return deviation.with_traceback(None)
    return None


class TypedLayerError(Exception):
    """A layer that cannot run in a trial."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.call = call


class _RehearsingSession(TypedSession):
    """A pass that says which layer has failed."""

    def _run_layer(self, call: str, layer: MessagePassing, run: Callable[..., Any], arguments: Arguments) -> Any:
        try:
            return super()._run_layer(call, layer, run, arguments)
        except (TypedDeviationError, TypedLayerError):
            raise
        except Exception as error:
            if any("pair" in each.shortcuts for each in self.plan.calls.values()):
                raise TypedLayerError(call) from error
            raise


@dataclass
class _Reference:
    """What a whole trial graph gives: rows of slots and of modules outside layers, and the statistics of norms."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class _ObservingSession(TypedSession):
    """A pass that shows where a model has slots; and where it adds up rows of all nodes, as far as that is wanted."""

    #: The places where it may do so, with the type of nodes and the dimension; ``None`` if anywhere.
    sums: Mapping[str, tuple[str, int]] | None = MappingProxyType({})

    @property
    def adds_up_nodes(self) -> bool:
        """Whether that is wanted at all."""
        return self.sums is None or bool(self.sums)

    def note_slot(self, slot: str, kind: str, calls: tuple[str, ...]) -> None:
        """Write the slot down."""
        self.plan.kinds[slot] = kind
        for call in calls:
            if call in self.plan.slot_of:
                self.plan.slot_of[call] = ""  # its rows are in several slots
            else:
                self.plan.slot_of[call] = slot

    def summed_kind(self, slot: str, value: Tensor, dim: int) -> str | None:
        """Tell the type by the number of rows."""
        kind = next((kind for kind, of in self.info.nodes.items() if of.num_rows == value.size(dim)), None)
        if kind is None or (self.sums is not None and self.sums.get(slot) != (kind, dim)):
            return None
        self.plan.kinds[slot], self.plan.node_sums[slot] = kind, dim
        return kind

    def total_of(self, session: KindSession, slot: str, rows: Tensor) -> Tensor:
        """Add up what follows from the slot's rows."""
        out: Tensor = self._exchange.at_slot(session, slot, lambda: rows).sum(0)
        return out

    def norm_kind(self, call: str, x: Tensor) -> str | None:
        """Tell the type by the number of rows."""
        kind = next((kind for kind, of in self.info.nodes.items() if of.num_rows == x.size(0)), None)
        if kind is not None and not self.is_aggregating:
            self.plan.norm_kinds[call] = kind
        return self.plan.norm_kinds.get(call)

    def _pending(self, call: str, kind: str, rows: Tensor) -> Tensor:
        self.plan.call_rows[call] = rows.detach()[:0]
        self.plan.call_kinds[call] = kind if self.plan.call_kinds.get(call, kind) == kind else ""
        return super()._pending(call, kind, rows)


class TypedObservation(ExchangePolicy, EdgeSource):
    """Runs a whole trial graph, as one batch, on its own edges and fills in a plan."""

    def __init__(
        self,
        graph: TypedTrialGraph,
        actor: Understudy,
        inner: Collection[str],
        sums: Mapping[str, tuple[str, int]] | None,
    ) -> None:
        self._batch = batch = graph.whole
        self._relation: EdgeType | None = None
        self._info: TypedInfo = batch[batch.edge_types[0]].edge_index.info.typed
        self.plan, self.reference = TypedPlan(inner=set(inner)), _Reference()
        self._slot_of: dict[int, str] = {}
        self._leaves: list[Tensor] = []
        self._norms: Counter[str] = Counter()
        self._modules: Counter[str] = Counter()
        session = _ObservingSession(
            self._info, self.plan, graph.memory, graph.device, self, edges=self, normalize=self._normalize
        )
        session.sums = sums
        actor.reset()
        with torch.enable_grad(), watching(other_modules(actor.model), self._note):
            out = map_tensors(exchanged, actor.run(session, graph.arguments(batch)))
        self.plan.needs[Plan.OUTPUT] = self._sources(out)
        self.plan.slot_of = {call: slot for call, slot in self.plan.slot_of.items() if slot}
        #: Where the model adds up rows of all nodes: the type of nodes, and the dimension that they lie along.
        self.sums = {slot: (self.plan.kinds[slot], dim) for slot, dim in self.plan.node_sums.items()}
        #: The number of nodes of each type.
        self.counts = {kind: of.num_rows for kind, of in self._info.nodes.items()}
        #: The model's output for the whole graph.
        self.outputs = [value.detach().clone() for value in tensors_in(out)]
        self.plan.output_kinds = [self._kind(value) for value in self.outputs]
        for name in self.plan.norm_kinds:
            self.plan.node_norms.add(name.split("#")[0])

    def _note(self, name: str, module: nn.Module, given: Any, out: Any) -> None:
        """Keep the output of a module."""
        self._modules[name] += 1
        if isinstance(out, Tensor):
            self.reference.modules[f"{name}#{self._modules[name]}"] = exchanged(out).detach().clone()

    def _kind(self, value: Tensor) -> str:
        for kind, of in self._info.nodes.items():
            if has_rows(value, of.num_rows):
                return kind
        raise UnsupportedModelError(
            "an autoscaled model returns one row per node of a type",
            got=f"an output of shape {tuple(value.shape)}",
            fix="Return node-level outputs from the model and pool or pair them outside it.",
        )

    def _sources(self, out: Any) -> frozenset[str]:
        return frozenset(self._slot_of[id(leaf)] for leaf in leaves_of(tensors_in(out)) if id(leaf) in self._slot_of)

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Note the slot and what it is computed from."""
        out = compute()
        session.check_rows(slot, out)
        self.plan.needs[slot] = self._sources(out)
        self.plan.rows[slot] = out.detach()[:0]
        self.reference.rows[slot] = out.detach().clone()
        leaf = out.detach().requires_grad_()
        self._leaves.append(leaf)
        self._slot_of[id(leaf)] = slot
        return leaf.clone()  # autograd forbids in-place changes of the leaf itself

    def start(self, call: str, layer: MessagePassing, arguments: Arguments) -> tuple[LayerCall, list[EdgeRecord]]:
        """Add a call to the plan, with what is known about its arguments."""
        attributes, relations = attributes_of(self._info, arguments), relations_of(self._info, arguments)
        if not relations:
            raise UnsupportedModelError(
                f"'{call}' must get the batch's own edges",
                got="other edges, or none",
                fix="Pass batch[...].edge_index, or batch.edge_index_dict, as it is.",
            )
        kinds: list[ArgumentKind] = []
        for value, attribute in zip(tensors_in(arguments), attributes, strict=True):
            kinds.append("own" if attribute is not None else self._argument_kind(value, relations[0]))
        nested = any(isinstance(module, MessagePassing) for module in layer.modules() if module is not layer)
        possible: set[Shortcut] = {"fused"} if len(relations) == 1 and may_fuse(layer) else set()
        if len(relations) == 1 and call not in self.plan.inner and self._takes_rows(arguments, relations[0]):
            possible |= {"pair", "short"}
        made = LayerCall(kinds, attributes, nested=nested, possible_shortcuts=frozenset(possible), layer=type(layer))
        self._relation = relations[0] if len(relations) == 1 else None
        return self.plan.calls.setdefault(call, made), []

    def _takes_rows(self, arguments: Arguments, relation: EdgeType) -> bool:
        """Whether a layer gets rows of both ends of edges first, or of the one type that both are of."""
        first = arguments[0][0] if arguments[0] else None
        targets = self._info.nodes[relation[2]].num_rows
        if isinstance(first, Tensor):
            return relation[0] == relation[2] and has_rows(first, targets)
        return isinstance(first, tuple) and len(first) == 2 and has_rows(first[1], targets)

    def _argument_kind(self, value: Tensor, relation: EdgeType) -> ArgumentKind:
        if has_rows(value, self._info.nodes[relation[2]].num_rows):
            return "node"
        return "edge" if has_rows(value, self._info.edges[relation].num_edges) else "other"

    def replace(self, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the edges; note which values belong to edges."""
        active.num_edge_calls += 1
        active.call.num_propagations = active.num_propagations
        names = (name for name, value in values.items() if has_rows(value, edge_index.size(1)))
        active.call.edge_names.append(frozenset(names))
        own = None if self._relation is None else self._batch[self._relation].edge_index.plain
        is_first = active.num_edge_calls == 1
        if own is None or not torch.equal(edge_index.cpu(), own):
            self.plan.unchanged.discard(active.name)
        elif is_first:
            self.plan.unchanged.add(active.name)
        return edge_index, values

    def _normalize(
        self, session: Session, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        if not uses_own_statistics(norm):
            return run(x)
        with torch.no_grad():
            variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
        self._norms[name] += 1
        self.reference.statistics[f"{name}#{self._norms[name]}"] = mean, variance
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)


class _Rehearsal(RowStore):
    """Compares a batch of a trial graph, whose histories hold the exact rows, with the whole graph."""

    def __init__(self, seen: TypedObservation) -> None:
        self._reference, self._outputs, self._counts = seen.reference, seen.outputs, seen.counts
        self._norms: Counter[str] = Counter()
        self._modules: Counter[str] = Counter()

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        return self._reference.rows[slot][session.info.n_id[which].to(session.device)]

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        if not same_rows(rows, self._reference.rows[slot][session.info.nodes.to(session.device)]):
            raise TypedDeviationError(slot)

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`RowStore.total`."""
        whole, own = self._reference.rows[slot], session.info.nodes.to(session.device)
        return whole.sum(0) + (rows - whole[own]).sum(0)

    def check_module(self, info: TypedInfo, name: str, module: nn.Module, given: Any, out: Any) -> None:
        """Compare the rows of a module outside layers, to name the first that deviates."""
        self._modules[name] += 1
        whole = self._reference.modules.get(f"{name}#{self._modules[name]}")
        for kind, of in info.nodes.items():
            if has_rows(whole, self._counts[kind]) and has_rows(out, of.num_rows):
                own = exchanged(out)[: of.batch_size]
                if not same_rows(own, whole[of.nodes.to(own.device)]):
                    raise TypedDeviationError(f"{name.strip()} ({type(module).__name__})")

    def check_output(self, session: TypedSession, out: Any) -> None:
        """Compare the output of a batch."""
        for value, whole, kind in zip(tensors_in(out), self._outputs, session.plan.output_kinds, strict=True):
            if not same_rows(value, whole[session.info.nodes[kind].nodes.to(whole.device)]):
                raise TypedDeviationError(Plan.OUTPUT)

    def normalize(
        self, session: Session, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Normalize by the whole graph's statistics: in a batch they differ, which is known and accepted."""
        if not uses_own_statistics(norm):
            return run(x)
        self._norms[name] += 1
        known = self._reference.statistics.get(f"{name}#{self._norms[name]}")
        if known is None:
            return session.by_own_statistics(name, norm, run, x)
        return F.batch_norm(x, *known, norm.weight, norm.bias, False, 0.0, norm.eps)


def same_rows(got: Tensor, want: Tensor) -> bool:
    """Whether rows agree up to rounding, column by column."""
    if got.shape != want.shape:
        return False
    got, size = got.double(), want.double().nan_to_num().abs()
    relative, least = tolerances(want.dtype)
    if not size.numel():
        return True
    bound = relative * size.amax(0) + least * size.max().clamp(min=1e-6)
    return bool(((got - want.double()).abs() <= bound).logical_or(got.isnan() & want.isnan()).all())
