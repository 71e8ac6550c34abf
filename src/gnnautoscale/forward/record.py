"""The edges and edge-level values of a layer on the whole graph, recorded once, and cut to batches.

In a batch the halo's degrees are wrong, so whatever a layer derives from the edges (self-loops, normalized weights)
may be wrong too. Therefore a copy of the layer, without weights or features, runs once over the whole graph's edges;
in a batch, its record replaces the layer's own result.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import Pinned, for_later, map_others, map_tensors, others_in, tensors_in, weights_of
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.batch_edges import BatchEdges, EdgeForm, GroupedEdges
from gnnautoscale.forward.watch import OVERRIDES, form_of, form_of_values
from gnnautoscale.graph import BatchInfo, BatchTensor, EdgeTable, Graph, RowOrder, assembly_stream
from gnnautoscale.kernels import Count, OwnRows, locate_and_count

if TYPE_CHECKING:
    from gnnautoscale.forward.plan import LayerCall

# The methods of a layer that take edges; hooks override them on the instance.
EDGE_METHODS = ("propagate", "edge_updater")

# How many different records of one call are kept: training and evaluation, in two precisions.
_MOST_FORMS = 4

ArgumentKind = Literal["own", "node", "edge", "other"]
#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class EdgeRecord:
    """The edges of one edge call on the whole graph, and its arguments that depend on these alone, by name.

    Each of these arguments is ``[num_edges, ...]``, in the order of the table. No layer fuses a ``plain`` record, which
    takes the place of edges that a layer derives others from.
    """

    edges: EdgeTable
    constants: dict[str, Tensor]
    plain: bool = False
    _pinned: Pinned | None = field(default=None, init=False, repr=False)

    @for_later
    def for_batch(self, info: BatchInfo, layer: str) -> BatchEdges:
        """The edges into a batch with their constants, where the batch was assembled."""
        return info.derive(self, lambda: self._cut(info, layer))

    def _cut(self, info: BatchInfo, layer: str) -> BatchEdges:
        table, device, own, halo = self.edges, info.device, info.own, info.found.rows
        if device.type == "cuda":
            self._pin()
        if self._is_own(info):
            there = info.edges.on(device)
            grouped = GroupedEdges(there.ptr, info.found.source, info.edges.longest, info.found.by_source)
        else:
            if table.order is not info.order:  # the record was made for another loader
                device, halo = torch.device("cpu"), table.order.rows(info.halo).long()
                own = OwnRows.of(table.order.rows(info.nodes).long())
            cut = table.cut(own)
            there = cut.on(device)
            # Once is enough for own rows that come back.
            counts, known = self not in own.known, own.known
            source, missing = locate_and_count(table.numbers, there.take(table.source), own, halo, count=counts)
            grouped = GroupedEdges(there.ptr, source, cut.longest, None, missing, layer)
            grouped.when_checked = partial(known.__setitem__, self, True)
        constants = {name: there.take(value) for name, value in self.constants.items()}
        return BatchEdges(constants, self.form(info), grouped=grouped)

    def _is_own(self, info: BatchInfo) -> bool:
        """Whether a batch's own edges are those of the record."""
        return self.edges is info.table

    def form(self, info: BatchInfo) -> EdgeForm:
        """Between which rows of a batch the edges are."""
        return EdgeForm(self.edges.target_row, info.batch_size, info.num_rows, info.num_sources)

    def used_by(self, call: LayerCall | None) -> EdgeRecord:
        """The record that a layer call cuts its edges from: this one, or the closed one."""
        return self.closed if call is not None and call.closed else self

    @cached_property
    def closed(self) -> ClosedRecord:
        """The same record, cut to the edges into a batch and into its halo."""
        return ClosedRecord(self.edges, self.constants, self.plain)

    def _pin(self) -> None:
        if self._pinned is None:
            self._pinned = Pinned()
            self.edges.pin()
            for name, value in list(self.constants.items()):
                pinned = self._pinned.pin(value)
                self.constants[name] = value if pinned is None else pinned


@dataclass(eq=False)
class OwnEdges(EdgeRecord):
    """The record of a call that takes the graph's edges as they are, so that any loader's batches have them."""

    def _is_own(self, info: BatchInfo) -> bool:
        return True


@dataclass(eq=False)
class ClosedRecord(EdgeRecord):
    """A record that is cut to every edge into a batch, and every edge into its halo.

    Many of the latter come from nodes that are in neither. In their place stands the node that they point to: so each
    node has as many edges as in the whole graph, with the same values, which means, degrees and attention depend on.
    That node is of another type than the sources in some relations of a heterogeneous graph; then nodes of the
    sources' halo stand there in turn, and if there is none, such edges are left out.
    """

    def _cut(self, info: BatchInfo, layer: str) -> BatchEdges:
        table, sources = self.edges, info.sources or info
        (own, halo), (own_sources, halo_sources) = _rows_in(table.order, info), _rows_in(table.source_order, sources)
        if halo.is_cuda:
            self._pin()
        cut, longest = table.cut_at(torch.cat([own.on(halo.device), halo]))
        source, _ = locate_and_count(table.numbers, cut.take(table.source), own_sources, halo_sources, count=False)
        target, outside, ptr = cut.target, source < 0, cut.ptr
        missing = Count((outside & (target < own.size)).sum())
        constants = {name: cut.take(value) for name, value in self.constants.items()}
        if info.has_loops:
            source = torch.where(outside, target.to(source.dtype), source)
        elif sources.num_halo:
            place = torch.arange(source.numel(), dtype=source.dtype, device=source.device)
            source = torch.where(outside, sources.batch_size + place % sources.num_halo, source)
        else:
            kept = ~outside
            ptr = F.pad(kept.cumsum(0), (1, 0))[ptr.long()].to(ptr.dtype)
            source, constants = source[kept], {name: value[kept] for name, value in constants.items()}
        grouped = GroupedEdges(ptr, source, longest, None, missing, layer)
        return BatchEdges(constants, self.form(info), grouped=grouped)

    def form(self, info: BatchInfo) -> EdgeForm:
        """See :meth:`EdgeRecord.form`."""
        return EdgeForm(self.edges.target_row, info.num_rows, info.num_rows, info.num_sources)


def _rows_in(order: RowOrder, info: BatchInfo) -> tuple[OwnRows, Tensor]:
    """The own and the halo's rows of a batch in an order, which may be that of another loader."""
    if order is info.order:
        return info.own, info.found.rows
    return OwnRows.of(order.rows(info.nodes).long()), order.rows(info.halo).long()


def keep_edges(edge_index: Tensor, dropout: float, *, has_loops: bool = True) -> Tensor:
    """Draw the positions of the edges to keep when a share of them is dropped; self-loops, if there are any, stay."""
    kept = torch.rand(edge_index.size(1), device=edge_index.device) >= dropout
    return ((edge_index[0] == edge_index[1]) | kept if has_loops else kept).nonzero().squeeze(1)


class EdgePreparer(ABC):
    """Prepares the recorded edges of batches that a GPU assembles, beside what it does for others."""

    def __init__(self) -> None:
        # The layer calls that each batch was prepared for: those of another plan may need other edges.
        self._prepared_for: WeakKeyDictionary[Any, Mapping[str, LayerCall]] = WeakKeyDictionary()

    @for_later
    def prepare_from_now_on(self, info: Any, calls: Mapping[str, LayerCall], gradients: bool) -> None:
        """Prepare the edges of a batch that a GPU has assembled, if nobody did; whoever assembles others prepares them.

        ``gradients`` says whether edges are needed for a backward pass, too.
        """
        before, wanted = info.table.preparations.get(self), (calls, gradients)
        if before is None or before[0] is not calls or before[1] != gradients:
            info.table.preparations[self] = wanted
        if info.edges_ready is None or self._prepared_for.get(info) is not calls:
            with torch.cuda.stream(assembly_stream(info.device)):
                self.prepare(info, *wanted)

    def prepare(self, info: Any, calls: Mapping[str, LayerCall], gradients: bool) -> None:
        """Prepare the recorded edges of a batch on the current stream of its GPU, and note when they are ready."""
        self._prepare(info, calls, gradients)
        self._prepared_for[info] = calls
        info.edges_ready = assembly_stream(info.device).record_event()

    @abstractmethod
    def _prepare(self, info: Any, calls: Mapping[str, LayerCall], gradients: bool) -> None:
        """Prepare the recorded edges of a batch on the current stream."""


def prepare_edges(
    records: Mapping[str, list[EdgeRecord]], info: BatchInfo, calls: Mapping[str, LayerCall], gradients: bool
) -> None:
    """Prepare the recorded edges of layer calls for a batch, in the form that each needs."""
    seen = set()
    for name, made in records.items():
        call = calls.get(name)
        for position, each in enumerate(made):
            record = each.used_by(call)
            fuses = call is not None and not record.plain and call.fuses(position, record.constants)
            lazy = call is not None and "lazy" in call.shortcuts
            weight = call.weight(position) if call is not None and fuses else None
            if (record, fuses or lazy, weight) in seen:
                continue
            seen.add((record, fuses or lazy, weight))
            edges = record.for_batch(info, name)
            if fuses or lazy:
                edges.adjacency(weight).prepare(gradients=gradients)


class Recorder(EdgePreparer):
    """Records the layer calls of a model over one graph; equal records are shared.

    A call is recorded again when the layer's attributes or its arguments other than tensors have changed.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        #: The records of each call, as of its last use.
        self.records: dict[str, list[EdgeRecord]] = {}
        # What the records in use were made for, and all that were made.
        self._made_for: dict[str, tuple[LayerCall, list[torch.dtype], list[Any]]] = {}
        self._made: dict[Any, list[EdgeRecord]] = {}
        self._shared_records: list[EdgeRecord] = []
        self._order: RowOrder | None = None

    def of_call(self, call: str, layer: MessagePassing, known: LayerCall, arguments: Arguments) -> list[EdgeRecord]:
        """The records of a layer call, with its arguments in a batch."""
        dtypes = [value.dtype for value in tensors_in(arguments)]
        others = [None if place in known.sizes else value for place, value in enumerate(others_in(arguments))]
        made_for = self._made_for.get(call)
        if (
            made_for is not None
            and made_for[0] is known
            and made_for[1] == dtypes
            and _same_values(made_for[2], others)
        ):
            return self.records[call]
        self._made_for[call] = known, dtypes, others
        if known.like is not None:
            made_for = self._made_for.get(known.like[0])
            if made_for is not None and made_for[0] is known.like[1] and made_for[1] == dtypes:
                self.records[call] = self.records[known.like[0]]
                return self.records[call]
        kinds = tuple(known.kinds), tuple(known.attributes), tuple(dtypes), len(known.edge_names)
        key = call, form_of(layer), form_of_values(others), kinds
        if key not in self._made:
            self._forget_oldest(call)
            self._made[key] = self._record(layer, describe(call, layer), arguments, known)
        self.records[call] = self._made[key]
        return self.records[call]

    def _prepare(self, info: BatchInfo, calls: Mapping[str, LayerCall], gradients: bool) -> None:
        prepare_edges(self.records, info, calls, gradients)

    def _forget_oldest(self, call: str) -> None:
        """Make room for other records of a call, since a number may change in every step."""
        forms = [key for key in self._made if key[0] == call]
        for key in forms[: max(0, len(forms) + 1 - _MOST_FORMS)]:
            del self._made[key]
        used = {record for records in self._made.values() for record in records}
        self._shared_records = [record for record in self._shared_records if record in used]

    @for_later
    def _record(self, layer: MessagePassing, name: str, arguments: Arguments, known: LayerCall) -> list[EdgeRecord]:
        """Run a copy of the layer over the whole graph's edges and record its edge calls."""
        failures = []
        # The weightless copy cannot multiply edge features with weights. Such features are left out of the record;
        # the layer then uses the batch's own.
        for edge_features in (True, False):
            whole = self._whole_graph_arguments(arguments, known, edge_features)
            try:
                caught = _run_without_weights(layer, whole, len(known.edge_names))
            except RuntimeError as error:
                failures.append(error)
                continue
            found = []
            while caught:  # each of them may take much memory
                found.append(self._shared(layer, own_batch(arguments), *caught.pop(0)))
            return found
        raise UnsupportedModelError(
            f"{name} must compute the edges and edge weights of propagate from its edges alone",
            got=f"the error '{failures[-1]}' in a run without features",
            fix="Replace the layer, or move the computation before propagate into message().",
        ) from failures[-1]

    def _whole_graph_arguments(self, arguments: Arguments, known: LayerCall, edge_features: bool) -> Arguments:
        remaining, places = iter(known.kinds), count()

        def convert(value: Tensor) -> Tensor:
            kind = next(remaining)
            if kind == "own":
                name = cast(BatchTensor, value).attribute
                if name == "edge_index":
                    return self._shown(self.graph.edge_index)
                if name == "reversed edge_index":
                    return self._shown(self.graph.edge_index).flip(0)
                if name == "n_id":
                    return self._kept(torch.arange(self.graph.num_nodes))
                whole = self.graph.edge_attributes[name]
                return whole if edge_features else whole.to("meta")
            if kind != "other":
                num_rows = self.graph.num_nodes if kind == "node" else self.graph.edge_index.size(1)
                return value.new_empty((num_rows, *value.shape[1:]), device="meta")
            return value.to("meta") if value.is_floating_point() else value.cpu()

        def resize(value: Any) -> Any:
            return self.graph.num_nodes if next(places) in known.sizes else value

        return map_others(resize, map_tensors(convert, arguments))

    def _shown(self, nodes: Tensor) -> Tensor:
        """What layers see instead of some nodes."""
        return nodes if self.graph.shown is None else self.graph.shown[nodes]

    def _kept(self, shown: Tensor) -> Tensor:
        """The nodes of some numbers that layers saw."""
        if self.graph.shown is None:
            return shown
        kept = self.graph.shown.argsort()[shown]
        return self.graph.edge_index if torch.equal(kept, self.graph.edge_index) else kept

    def _shared(
        self, layer: MessagePassing, info: BatchInfo, edge_index: Tensor, constants: dict[str, Tensor]
    ) -> EdgeRecord:
        """A record in the order of rows of the loader that came first, or an equal one that is there already."""
        self._order = order = self._order or info.order
        row = 1 if layer.flow == "source_to_target" else 0
        edge_index = self._kept(edge_index)
        own = edge_index is self.graph.edge_index and row == 1 and info.order is order
        extended = info.table.with_loops(edge_index) if row == 1 and info.order is order and not own else None
        edges = info.table if own else extended or EdgeTable(edge_index, order, row)
        del edge_index
        constants = {name: value[edges.edge] for name, value in constants.items()}
        if edges is not info.table:
            edges.edge = edges.edge[:0].clone()  # of no use from now on
        for record in self._shared_records:
            if record.edges is not edges and (own or not record.edges.has_same_edges(edges)):
                continue
            edges, same_names = record.edges, record.constants.keys() == constants.keys()
            if same_names and all(_same(record.constants[name], constants[name]) for name in constants):
                return record
        record = EdgeRecord(edges, constants)
        self._shared_records.append(record)
        return record


class _Recorded(BaseException):
    """Stops a layer after its last edge call."""


def _run_without_weights(
    layer: MessagePassing, arguments: Arguments, num_edge_calls: int
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    copied = weightless_copy(layer)
    caught: list[tuple[Tensor, dict[str, Tensor]]] = []

    def catch(method: Callable[..., Any], edge_index: Tensor, size: Any = None, **values: Any) -> Any:
        per_edge = {name: value for name, value in values.items() if has_rows(value, edge_index.size(1))}
        caught.append((edge_index, {name: value for name, value in per_edge.items() if not value.is_meta}))
        if len(caught) == num_edge_calls:
            raise _Recorded
        # Shapes suffice to reach the next edge call.
        return _on_meta(method, edge_index, size=size, **values)

    for module in copied.modules():
        if isinstance(module, MessagePassing):
            for method in EDGE_METHODS:
                run = catch if module is copied else _on_meta
                setattr(module, method, partial(run, getattr(module, method)))
    try:
        # Modes of whoever runs the model do not matter here, and would slow this run down.
        with torch.no_grad(), _disable_current_modes():
            copied(*arguments[0], **arguments[1])
    except _Recorded:
        return caught
    raise RuntimeError(f"it called propagate {len(caught)} times instead of {num_edge_calls}")


def _on_meta(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = map_tensors(lambda value: value.to("meta"), (args, kwargs))
    return method(*args, **kwargs)


def weightless_copy(layer: MessagePassing) -> MessagePassing:
    """A copy of the layer, in evaluation mode, whose weights have shapes but no values."""
    memo: dict[int, Any] = {}
    for tensor in (*weights_of(layer), *layer.buffers()):
        memo[id(tensor)] = tensor.detach().to("meta")
    for module in layer.modules():
        # Tensors that a layer keeps from its last call cannot be copied while autograd tracks them.
        memo.update({id(value): value.detach() for value in vars(module).values() if isinstance(value, Tensor)})
        hooks = [module.__dict__[name] for name in OVERRIDES & module.__dict__.keys()]
        memo.update({id(hook): None for hook in hooks if hook is not True})
    copied = copy.deepcopy(layer, memo)
    for module in copied.modules():
        for name in OVERRIDES:
            module.__dict__.pop(name, None)
        module.training = False
    return copied


def align(local: Tensor, wanted: Tensor, target_row: int, batch_size: int, layer: str) -> Tensor:
    """The position of each recorded edge, ``[num_edges]``, among those a layer computed in a batch.

    ``local`` holds the layer's own edges, ``[2, num_local_edges]``, ``wanted`` the recorded ones, ``[2, num_edges]``.
    """
    inside = (local[target_row] < batch_size).nonzero().squeeze(1)
    position = inside[local[target_row, inside].argsort(stable=True)]
    if not _same(local[:, position], wanted):
        raise UnsupportedModelError(
            f"{layer} weights edges with values that need a gradient, so it must derive the same edges in a batch as "
            "in the whole graph",
            got="different edges",
            fix="Compute such values in message() or edge_update(), or pass constant edge weights.",
        )
    return position


def describe(call: str, layer: nn.Module) -> str:
    """A layer call's name in messages."""
    return f"{type(layer).__name__} ('{call}')"


def own_batch(arguments: Arguments) -> BatchInfo:
    """The batch that a call's arguments belong to."""
    return next(value.info for value in tensors_in(arguments) if isinstance(value, BatchTensor))


def has_rows(value: Any, *counts: int) -> TypeGuard[Tensor]:
    """Whether a value is a tensor with one of these numbers of rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) in counts


def _same_values(some: list[Any], others: list[Any]) -> bool:
    """Whether values are the same, or equal where that can be told."""
    return len(some) == len(others) and all(
        a is b or (type(a) is type(b) and isinstance(a, (int, float, complex, str)) and a == b)
        for a, b in zip(some, others, strict=True)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))
