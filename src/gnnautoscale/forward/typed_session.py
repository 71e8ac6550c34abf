"""A forward pass over a batch of several types of nodes and edges.

A heterogeneous graph has a plain one for each type: rows of a type have histories of their own, in a
:class:`GraphMemory`, and a :class:`Session` of their own, which policies exchange them through. What is common to all
types is here: which type a layer's rows have, and when they are exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import is_capturing, map_tensors, tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward.edges import (
    ActiveLayer,
    EdgeSource,
    RecordedEdges,
    Values,
    drop_derived,
)
from gnnautoscale.forward.exchange import ExchangePolicy
from gnnautoscale.forward.node_sums import NodeSums
from gnnautoscale.forward.observe import Observer
from gnnautoscale.forward.pending import PendingRows, exchanged
from gnnautoscale.forward.plan import LayerCall, TypedPlan
from gnnautoscale.forward.record import Arguments, EdgeRecord, describe, has_rows
from gnnautoscale.forward.session import Normalize, Session, check_layout
from gnnautoscale.forward.typed_memory import TypedMemory
from gnnautoscale.graph import BatchTensor, EdgeType, TypedInfo, untagged


@dataclass(eq=False)
class TypedEdges(EdgeSource):
    """Gives layers on edges between nodes of one type recorded ones, and others the batch's own, which are complete.

    A layer that derives something from the edges of several types, or from those between nodes of different types, is
    right if it only looks at the edges into each node; a trial tells. If it takes the latter as they are, they come in
    a form that it can aggregate over in one kernel. Where the halo's rows are to be computed too, such a layer gets the
    edges into batch and halo.
    """

    info: TypedInfo
    plan: TypedPlan
    memory: TypedMemory
    device: torch.device
    dropout: float
    _recorded: dict[EdgeType, RecordedEdges] = field(default_factory=dict)
    # The type of edges that a layer call has records of.
    _kind_of: dict[str, EdgeType] = field(default_factory=dict)

    def start(self, call: str, layer: MessagePassing, arguments: Arguments) -> tuple[LayerCall, list[EdgeRecord]]:
        """See :meth:`EdgeSource.start`; refuses a call that differs from the plan."""
        planned = self.plan.calls.get(call)
        if planned is None or planned.attributes != attributes_of(self.info, arguments):
            raise UnsupportedModelError(
                f"{describe(call, layer)} must be called the same way every time, with the batch's own edges",
                got="arguments that differ from the first forward pass, or edges or edge attributes that were modified",
                fix="Pass the edges of a batch as they are.",
            )
        relations = relations_of(self.info, arguments)
        if len(relations) != 1 or not planned.edge_names:
            return planned, []
        kind = self._kind_of[call] = relations[0]
        own = [value for value in tensors_in(arguments) if isinstance(value, BatchTensor) and value.is_own_edges]
        # Between different types the record holds no attributes.
        derives = call not in self.plan.unchanged or (planned.closed and len(own) > 1)
        if kind[0] != kind[2] and derives:
            return planned, []
        return planned, self.memory.recorder.of_call(self.info.edges[kind], kind, call, layer, planned, arguments)

    def replace(self, active: ActiveLayer, edge_index: Tensor, values: Values) -> tuple[Tensor, Values]:
        """See :meth:`EdgeSource.replace`."""
        if not active.records:
            active.num_edge_calls += 1
            position = active.num_edge_calls - 1
            # Rows of different types have the same numbers.
            return drop_derived(active, position, edge_index, values, self.dropout, has_loops=False)
        return self._of_kind(self._kind_of[active.name]).replace(active, edge_index, values)

    def into_all_rows(self, call: str, layer: MessagePassing, value: BatchTensor) -> Tensor:
        """In place of a batch's edges of a type, or their attribute, those into batch and halo."""
        kind = self.info.kind_of[value.info]
        record = self.memory.recorder.of_all_rows(self.info.edges[kind], kind, call)
        found = self._of_kind(kind).cut(record, describe(call, layer))
        if not value.attribute.endswith("edge_index"):
            return found.constants[value.attribute]
        return found.edges if value.attribute == "edge_index" else found.edges.flip(0)

    def _of_kind(self, kind: EdgeType) -> RecordedEdges:
        if kind not in self._recorded:
            info, memory = self.info.edges[kind], self.memory.kinds[kind[2]]
            self._recorded[kind] = RecordedEdges(info, self.plan, memory, self.device, self.dropout, True)
        return self._recorded[kind]


class TypedSession(Session):
    """A forward pass over one batch of several types; see :class:`Session`."""

    info: TypedInfo  # type: ignore[assignment]
    plan: TypedPlan
    memory: TypedMemory  # type: ignore[assignment]

    def __init__(
        self,
        info: TypedInfo,
        plan: TypedPlan,
        memory: TypedMemory,
        device: torch.device,
        exchange: ExchangePolicy,
        *,
        edges: EdgeSource | None = None,
        normalize: Normalize | None = None,
        observers: Sequence[Observer] = (),
        edge_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            info,  # type: ignore[arg-type]
            plan,
            memory,  # type: ignore[arg-type]
            device,
            exchange,
            edges=edges,
            normalize=normalize,
            observers=observers,
        )
        self._edges = edges or TypedEdges(info, self.plan, memory, device, edge_dropout)
        #: A session for each type of nodes.
        self.kinds = {kind: KindSession(self, kind, exchange, normalize) for kind in info.nodes}
        self._slots: Counter[str] = Counter()
        self._norms: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        # The type of nodes that each layer in progress computes rows of, if that is one.
        self._targets: list[str | None] = []

    def begin(self) -> None:
        """Start the pass."""
        for kind in self.kinds.values():
            kind.begin()
        if not is_capturing():
            self.memory.prepare_edges(self.info.upcoming, self.plan.calls, gradients=torch.is_grad_enabled())

    def around_model(self) -> AbstractContextManager[Any]:
        """See :meth:`Session.around_model`."""
        return NodeSums(self._node_sum) if self.adds_up_nodes else nullcontext()

    @property
    def adds_up_nodes(self) -> bool:
        """Whether the model adds rows up over all nodes."""
        return bool(self.plan.node_sums)

    def layer(self, layer: MessagePassing, name: str, run: Callable[..., Any], arguments: Arguments) -> Any:
        """Run a message-passing layer; its rows are pending, unless its propagations are slots."""
        return super().layer(layer, name, run, map_tensors(exchanged, arguments))

    def _run_layer(self, call: str, layer: MessagePassing, run: Callable[..., Any], arguments: Arguments) -> Any:
        planned, records = self._edges.start(call, layer, arguments)
        relations = relations_of(self.info, arguments)
        ends = {kind[2] if layer.flow == "source_to_target" else kind[0] for kind in relations}
        target = next(iter(ends)) if len(relations) == 1 else None
        own_edges: dict[int, Tensor] = {}

        def own(value: Tensor) -> Tensor:
            if not isinstance(value, BatchTensor) or not value.is_own_edges:
                return untagged(value)
            if planned.closed and not records and isinstance(self._edges, TypedEdges):
                return self._edges.into_all_rows(call, layer, value)
            if not empties:
                return untagged(value)
            empty = value.emptied().plain
            own_edges[id(empty)] = empty
            return empty

        empties = bool(records) and call in self.plan.emptied
        args, kwargs = map_tensors(own, arguments)
        slot = self.plan.slot_of.get(call)
        # A layer that takes rows by type returns them by type, and is computed in any case.
        by_type = any(isinstance(value, dict) for value in (*args, *kwargs.values()))
        slot = None if by_type else slot
        if slot is not None and target is not None and not self._exchange.computes(self.kinds[target], slot):
            like, of = self.plan.call_rows[call], self.info.nodes[target]
            count = of.batch_size if self.plan.own_rows else of.num_rows
            return self._pending(call, target, like.new_zeros((count, *like.shape[1:]), device=self.device))

        def compute(*args: Any, **kwargs: Any) -> Any:
            if "pair" in planned.shortcuts:
                args = self._with_own_targets(relations[0], args[0]), *args[1:]
            self.active.append(ActiveLayer(call, layer, records, planned, edge_values=dict(own_edges)))
            self._targets.append(target)
            try:
                out = run(*args, **kwargs)
            finally:
                active = self.active.pop()
                self._targets.pop()
            self._edges.finish(active)
            return out

        info = self.info.edges[relations[0]] if len(relations) == 1 else self.info
        run_layer = partial(self._run_and_repeat, call, layer, planned, compute, (args, kwargs), info)
        out: Any = self._exchange.run_layer(self, call, run_layer)
        if self.active:  # the layer around this one knows what to do with its rows
            return out
        if isinstance(out, Tensor) and target is not None:
            return self._pending(call, target, out)
        if isinstance(out, dict) and out.keys() <= self.info.nodes.keys():
            return {kind: rows if rows is None else self._pending(call, kind, rows) for kind, rows in out.items()}
        raise UnsupportedModelError(
            f"{describe(call, layer)} must return rows of the type of nodes that its edges point to, or a dictionary "
            "with rows of several types",
            got=type(out).__name__,
            fix="Call it with the edges of one type, or return a dictionary by type.",
        )

    def _pending(self, call: str, kind: str, rows: Tensor) -> Tensor:
        info = self.info.nodes[kind]
        if not has_rows(rows, info.num_rows, info.batch_size):
            got = f"shape {tuple(rows.shape)}"
            rule = f"'{call}' must return one row for each of the {info.num_rows} {kind!r} nodes of batch and halo"
            raise UnsupportedModelError(rule, got=got, fix="Call it with all rows of batch[...].x.")
        if call in self.plan.inner:
            return rows
        if self.plan.own_rows and not self.plan.calls[call].closed:
            rows = self.kinds[kind].own(rows)
        return PendingRows.of(rows, self._exchange_pending, kind, (call,))

    def _exchange_pending(self, kind: str, calls: tuple[str, ...], rows: Tensor) -> Tensor:
        """Exchange rows of a type that some layer calls have computed together."""
        slot = self._numbered(self._slots, _slot_name(kind, calls))
        self.note_slot(slot, kind, calls)
        session = self.kinds[kind]
        out: Tensor = session.widened(self._exchange.at_slot(session, slot, lambda: rows))
        return out

    def _node_sum(self, value: Tensor, dim: int) -> tuple[Tensor, int] | None:
        """The sum of some values over all nodes of a type, and their number; ``None`` if they are no nodes' values."""
        if self.is_aggregating:
            return None
        where = self.active[-1].name if self.active else "the model"
        slot = self._numbered(self._sums, f"{where} over all nodes")
        kind = self.summed_kind(slot, value, dim)
        if kind is None:
            return None
        if self.repeating:
            raise UnsupportedModelError(
                "layers that run twice for a penalty must not add up rows of all nodes",
                got=f"'{slot}'",
                fix="Leave the penalty out.",
            )
        session = self.kinds[kind]
        return self.total_of(session, slot, session.own(exchanged(value).movedim(dim, 0))), session.memory.num_nodes

    def summed_kind(self, slot: str, value: Tensor, dim: int) -> str | None:
        """The type of the nodes that some values are added up over; ``None`` if they are none."""
        return self.plan.kinds[slot] if self.plan.node_sums.get(slot) == dim else None

    def total_of(self, session: KindSession, slot: str, rows: Tensor) -> Tensor:
        """The sum of a slot's rows over all nodes, given the batch's own, ``[batch_size, ...]``."""
        if session.holds_all_nodes:
            return rows.sum(0)
        self.note_slot(slot, session.kind, (slot,))
        total = self._exchange.total(session, slot, rows)
        self._exchange.at_slot(session, slot, lambda: rows)
        return total

    def _with_own_targets(self, relation: EdgeType, rows: Any) -> tuple[Tensor, Tensor]:
        """The rows that messages of a type come from, and the batch's own that they go to."""
        source, target = rows if isinstance(rows, tuple) else (rows, rows)
        return source, self.kinds[relation[2]].own(target)

    def note_slot(self, slot: str, kind: str, calls: tuple[str, ...]) -> None:
        """Called before a slot's rows are exchanged."""
        if slot not in self.plan.needs:
            raise UnsupportedModelError(
                "an autoscaled model combines the rows of its layers in the same way in every forward pass",
                got=f"rows of {', '.join(map(repr, calls))} that are used by themselves, unlike when it was tried",
                fix="Combine the same layers every time: without edges a layer adds nothing.",
            )

    def slot(self, slot: str, compute: Callable[[], Any]) -> Any:
        """Exchange the rows of a propagation inside of a layer."""
        target = self._targets[-1]
        if target is None:
            raise UnsupportedModelError(
                "a layer that propagates several times does so along edges of one type",
                got=f"several types in '{slot}'",
                fix="Use one layer for each type of edges, as HeteroConv does.",
            )
        self.note_slot(slot, target, (slot,))
        return self._exchange.at_slot(self.kinds[target], slot, compute)

    def batch_norm(self, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a batch norm on rows of the type of nodes that it saw when the model was tried."""
        x = exchanged(x)
        kind = self.norm_kind(self._numbered(self._norms, name), x)
        return run(x) if kind is None else self.kinds[kind].batch_norm(name, norm, run, x)

    def norm_kind(self, call: str, x: Tensor) -> str | None:
        """The type of nodes of the rows that a norm sees; ``None`` if they are no nodes' rows."""
        return self.plan.norm_kinds.get(call)

    def finish(self, out: Any) -> Any:
        """End the pass and return the output rows of the batch."""
        out = map_tensors(exchanged, out)
        for kind in self.kinds.values():
            self._exchange.end(kind)
        if unseen := self.unseen_calls():
            raise UnsupportedModelError(
                "an autoscaled model calls the same layers in every forward pass",
                got=f"a pass without '{unseen[0]}', which ran when the model was tried",
                fix="Call every layer every time: without edges it adds nothing to its messages.",
            )
        kinds = iter(self.plan.output_kinds)

        def cut(value: Tensor) -> Tensor:
            check_layout(value)
            kind = next(kinds, None)
            if kind is None or not has_rows(value, self.info.nodes[kind].num_rows):
                raise UnsupportedModelError(
                    "an autoscaled model returns one row per node, of the same types every time",
                    got=f"an output of shape {tuple(value.shape)}",
                    fix="Return node-level outputs from the model.",
                )
            return self.kinds[kind].own(value)

        return self._exchange.output(self, map_tensors(cut, out))

    @property
    def holds_all_nodes(self) -> bool:
        """See :attr:`Session.holds_all_nodes`."""
        return self.info.holds_all_nodes

    def _repeat(self, *how: Any, **kwargs: Any) -> Any:
        for kind in self.kinds.values():
            kind.repeating = True
        norms = self._norms.copy()
        try:
            return super()._repeat(*how, **kwargs)
        finally:
            self._norms = norms
            for kind in self.kinds.values():
                kind.repeating = False

    @staticmethod
    def _numbered(counts: Counter[str], name: str) -> str:
        counts[name] += 1
        return name if counts[name] == 1 else f"{name}#{counts[name]}"


class KindSession(Session):
    """The part of a pass that concerns one type of nodes."""

    def __init__(self, whole: TypedSession, kind: str, exchange: ExchangePolicy, normalize: Normalize | None) -> None:
        # In a cycle, the batch would stay on a GPU until Python looks for such cycles.
        self._whole, self.kind = ref(whole), kind
        info, memory = whole.info.nodes[kind], whole.memory.kinds[kind]
        super().__init__(info, whole.plan.of_kind(kind), memory, whole.device, exchange, normalize=normalize)
        self.plan = whole.plan.of_kind(kind)  # the whole pass has the policy's plan

    @property
    def whole(self) -> TypedSession:
        """See :attr:`Session.whole`."""
        whole = self._whole()
        if whole is None:
            raise RuntimeError("a pass over one type of nodes ends with that over all of them")
        return whole

    @property
    def holds_all_nodes(self) -> bool:
        """Whether the batch has all nodes of all types."""
        return self.whole.holds_all_nodes

    @property
    def repeats(self) -> bool:
        """See :attr:`Session.repeats`."""
        return self.whole.repeats

    def by_own_statistics(self, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See :meth:`Session.by_own_statistics`; a rare type may have no two nodes in a batch, so no statistics."""
        if self.info.batch_size < 2 and norm.running_mean is not None:
            weights = norm.running_mean, norm.running_var, norm.weight, norm.bias
            return F.batch_norm(x, *weights, training=False, eps=norm.eps)
        return super().by_own_statistics(name, norm, run, x)


def relations_of(info: TypedInfo, arguments: Any) -> list[EdgeType]:
    """The types of the batch's edges among a call's arguments."""
    tagged = [value for value in tensors_in(arguments) if isinstance(value, BatchTensor)]
    edges = dict.fromkeys(value.info for value in tagged if value.attribute.endswith("edge_index"))
    return [info.kind_of[of] for of in edges]


def attributes_of(info: TypedInfo, arguments: Any) -> list[str | None]:
    """The names of the batch's attributes that the tensors among arguments are, with their types."""
    names: list[str | None] = []
    for value in tensors_in(arguments):
        if not isinstance(value, BatchTensor):
            names.append(None)
            continue
        if value.info.typed is not info:
            raise InputError(
                "all arguments of a call must come from the same batch",
                got=f"{value.attribute} of another batch",
                fix="Pass the attributes of one batch of one HaloLoader.",
            )
        own = value.is_original and not value.requires_grad
        names.append(f"{value.attribute} of {info.kind_of[value.info]}" if own else None)
    return names


def _slot_name(kind: str, calls: tuple[str, ...]) -> str:
    """What layer calls have in common, and the type of nodes."""
    parts = zip(*(call.split(".") for call in calls), strict=False)
    shared = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts))
    return f"{shared} to {kind}" if shared else f"to {kind}"
