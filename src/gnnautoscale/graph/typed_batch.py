"""Batches of heterogeneous graphs, assembled where they are used.

All types are joined to one plain graph, which is cut into batches like any other. A batch is then sorted by type: the
nodes of a type, own ones first and the halo behind them, and the edges of a type between these. For each type of nodes
there is a :class:`BatchInfo` with an order of rows of its own, and for each type of edges one whose own rows are those
of the edges' targets. So histories and recorded edges of a type are those of a plain graph. All types are sorted at
once: the number of operations does not depend on how many there are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import copy_staged_together, for_later
from gnnautoscale.graph.assemble import Assembly, AttributeRows, BatchBuilder, rows_of_parts
from gnnautoscale.graph.batch import BatchInfo, BatchTensor, hand_over
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.edges import EdgeTable, FoundCut, RowOrder
from gnnautoscale.graph.ready import ReadyBatch
from gnnautoscale.graph.typed_graph import WHOLE_ID, EdgeType, TypedGraph
from gnnautoscale.graph.unread import UnreadRows
from gnnautoscale.kernels import Halo, OwnRows

# How many groups of parts a builder remembers.
_MOST_KNOWN = 1 << 14


@dataclass(eq=False)
class TypedInfo:
    """Where a batch of several types lies in its graph.

    Attributes:
        graph: The whole graph.
        joined: Where it lies in the joined graph.
        nodes: The own and the halo's rows of each type of nodes.
        edges: For each type of edges, its targets as own rows, and the edges between rows of both types.
        key: What tells the batch from others of its loader, and is the same whenever it comes back.
        buffers: The tensors that what is known of all types lies in.
    """

    graph: TypedGraph
    joined: BatchInfo
    nodes: dict[str, BatchInfo]
    edges: dict[EdgeType, BatchInfo]
    key: Hashable = None
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    #: See :class:`BatchInfo`.
    keeper: Callable[[Any], None] | None = field(default=None, init=False, repr=False)
    #: See :class:`BatchInfo`.
    recurring: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        #: The type of nodes or edges of each of their infos.
        self.kind_of: dict[BatchInfo, Any] = {info: kind for kind, info in (*self.nodes.items(), *self.edges.items())}
        for info in self._parts():
            info.typed, info.key, info.bidirectional = self, self.key, self.joined.bidirectional

    def _parts(self) -> tuple[BatchInfo, ...]:
        return *self.nodes.values(), *self.edges.values()

    @property
    def device(self) -> torch.device:
        """Where the batch was assembled."""
        return self.joined.device

    @property
    def table(self) -> EdgeTable:
        """The edges of the joined graph."""
        return self.joined.table

    @property
    def found(self) -> Halo:
        """The halo in the joined graph."""
        return self.joined.found

    @property
    def batch_size(self) -> int:
        """Number of the batch's own nodes of all types."""
        return self.joined.batch_size

    @property
    def holds_all_nodes(self) -> bool:
        """Whether the batch is the whole graph."""
        return self.joined.batch_size == self.graph.num_nodes

    @property
    def ready(self) -> torch.cuda.Event | None:
        """When a GPU has assembled the batch; ``None`` if the host did."""
        return self.joined.ready

    @ready.setter
    def ready(self, event: torch.cuda.Event | None) -> None:
        self.joined.ready = event
        for info in self._parts():
            info.ready = event

    @property
    def edges_ready(self) -> torch.cuda.Event | None:
        """When a GPU has prepared the recorded edges of the batch ahead; ``None`` if it has not."""
        return self.joined.edges_ready

    @edges_ready.setter
    def edges_ready(self, event: torch.cuda.Event | None) -> None:
        self.joined.edges_ready = event
        for info in self.edges.values():
            info.edges_ready = event

    def wait(self) -> None:
        """See :meth:`BatchInfo.wait`."""
        self.joined.wait()
        self.ready = self.edges_ready = None

    def shrink(self, rows: Mapping[str, Tensor]) -> None:
        """See :meth:`BatchInfo.shrink`; ``rows`` are those of each type of nodes."""
        for kind, info in self.nodes.items():
            info.shrink(rows[kind])
        for relation, info in self.edges.items():
            info.shrink(rows[relation[2]])
        self.buffers, self.ready, self.edges_ready = [], None, None
        joined = self.joined
        joined.shrink(torch.cat([joined.own.on(self.device), joined.found.rows]))
        joined.found = Halo.of(joined.found.rows, torch.empty(0, dtype=torch.int32, device=self.device))

    @property
    def upcoming(self) -> TypedInfo | None:
        """The batch that is likely to follow, a hint to pull its rows ahead."""
        following = next(iter(self.nodes.values())).upcoming
        return None if following is None else following.typed

    @contextmanager
    def followed_by(self, other: TypedInfo | None) -> Iterator[None]:
        """Announce the batch that is likely to follow while this one is used."""
        with ExitStack() as announced:
            for kind, info in self.nodes.items():
                announced.enter_context(info.followed_by(None if other is None else other.nodes[kind]))
            yield


@dataclass(eq=False)
class TypedRows:
    """A batch's own rows in the joined graph, and those of each type of nodes."""

    joined: OwnRows
    kinds: dict[str, OwnRows]

    @property
    def index(self) -> Tensor:
        """The joined rows one by one, ``[size]``, int64, in host memory."""
        return self.joined.index


class TypedBuilder:
    """Assembles batches of a heterogeneous graph; see :class:`BatchBuilder`."""

    def __init__(self, graph: TypedGraph, order: RowOrder, starts: list[int], bidirectional: bool) -> None:
        self.graph, self._starts, self._bidirectional = graph, starts, bidirectional
        self._joined = BatchBuilder(graph.joined, order, starts, bidirectional)
        nodes = order.nodes.long()
        self._firsts = torch.tensor([*graph.first.values()])
        self._first_edges = torch.tensor([*graph.first_edge.values()])
        kind_of = torch.searchsorted(self._firsts, nodes, right=True) - 1
        # The place of each joined row if rows are sorted by type; those of a type keep their order.
        place = torch.empty_like(nodes)
        place[kind_of.argsort(stable=True)] = torch.arange(nodes.numel())
        self._by_type = RowOrder(place)
        self.orders: dict[str, RowOrder] = {}
        # The first row of each part among those of a type.
        self._starts_of: dict[str, list[int]] = {}
        for number, kind in enumerate(graph.counts):
            is_of_kind = kind_of == number
            self.orders[kind] = RowOrder(nodes[is_of_kind] - graph.first[kind])
            before = torch.cat([torch.zeros(1, dtype=torch.long), is_of_kind.cumsum(0)])
            self._starts_of[kind] = before[starts].tolist()
        self._tables = {
            kind: EdgeTable(relation.edge_index, self.orders[kind[2]], source_order=self.orders[kind[0]])
            for kind, relation in graph.relations.items()
        }
        nothing = torch.empty(2, 0, dtype=torch.long)
        self._of_nodes = {kind: EdgeTable(nothing, order) for kind, order in self.orders.items()}
        self._own: dict[PartGroup, TypedRows] = {}
        self._rows: dict[Any, AttributeRows] = {}
        for kind, rows in (*graph.rows.items(), *graph.edge_rows.items()):
            store = graph.data[kind]
            self._rows[kind] = AttributeRows(
                {name: (value, graph.data.__cat_dim__(name, value, store)) for name, value in rows.items()}
            )

    @property
    def table(self) -> EdgeTable:
        """The edges of the joined graph."""
        return self._joined.table

    def of(self, graph: TypedGraph) -> TypedBuilder:
        """A builder of the same parts of the same nodes, whose edges or attributes have changed."""
        return TypedBuilder(graph, self.table.order, self._starts, self._bidirectional)

    def own_rows(self, parts: PartGroup) -> TypedRows:
        """See :meth:`BatchBuilder.own_rows`."""
        known = self._own.get(parts)
        if known is None:
            kinds = {kind: rows_of_parts(starts, parts) for kind, starts in self._starts_of.items()}
            known = TypedRows(self._joined.own_rows(parts), kinds)
            if len(self._own) < _MOST_KNOWN:
                self._own[parts] = known
        return known

    def rows_of(self, nodes: Mapping[str, Tensor]) -> TypedRows:
        """The rows of distinct nodes of each type, ``[count]``, in their order."""
        joined = [self.graph.first[kind] + given for kind, given in nodes.items()]
        none = torch.empty(0, dtype=torch.long)
        kinds = {kind: order.rows(nodes.get(kind, none)).long() for kind, order in self.orders.items()}
        return TypedRows(
            self._joined.rows_of(torch.cat(joined)), {kind: OwnRows.of(rows) for kind, rows in kinds.items()}
        )

    def start(self, own: TypedRows, device: torch.device, key: Hashable = None) -> TypedAssembly:
        """See :meth:`BatchBuilder.start`."""
        self._pin(device)
        return TypedAssembly(self, own, self._joined.start(own.joined, device), key)

    def start_again(self, own: TypedRows, halo: Tensor, device: torch.device, key: Hashable) -> TypedAssembly:
        """See :meth:`BatchBuilder.start_again`."""
        self._pin(device)
        return TypedAssembly(self, own, self._joined.start_again(own.joined, halo, device, None), key)

    def _pin(self, device: torch.device) -> None:
        if device.type == "cuda":
            for rows in self._rows.values():
                rows.pin()

    def take(self, kind: Any, name: str, info: BatchInfo, index: Tensor, *, unread: bool) -> Tensor:
        """The rows of an attribute of a type, for the nodes or edges of an index, ``[count]``, on its device."""
        on_host = (lambda: info.n_id) if isinstance(kind, str) else (lambda: info.e_id)
        return self._rows[kind].take(name, index, on_host, unread=unread)

    def sorted(self, own: TypedRows, plain: Any, joined: BatchInfo, key: Hashable) -> tuple[TypedInfo, SortedByType]:
        """Sort the rows and edges of a batch of the joined graph by type."""
        graph, device = self.graph, joined.device
        sizes = [own.kinds[kind[2]].size for kind in graph.relations]  # of the targets of each type of edges
        ends = list(accumulate(sizes, initial=0))
        there = copy_staged_together([self._firsts, self._first_edges, torch.tensor(ends)], device)
        by_type = _sort_by_type(plain.n_id, plain.e_id, plain.edge_index, self._by_type.nodes_at(joined.rows), *there)
        nodes = dict[str, BatchInfo]()
        for kind, rows in zip(graph.counts, by_type.split_nodes(by_type.rank), strict=True):
            table, mine = self._of_nodes[kind], own.kinds[kind]
            found = Halo.of(rows[mine.size :], torch.empty(0, dtype=torch.int32, device=device))
            nodes[kind] = BatchInfo(graph.joined, table, mine, table.cut(mine), found)
            nodes[kind].rows = rows
        edges = dict[EdgeType, BatchInfo]()
        # A CPU groups edges by source in another way.
        by_source = by_type.by_source() if device.type == "cuda" else [None] * len(sizes)
        sources, pointers = by_type.split_edges(by_type.source), by_type.pointers(sizes)
        split = zip(graph.relations, sources, pointers, by_source, strict=True)
        for kind, source, ptr, order in split:
            table, of = self._tables[kind], nodes[kind[2]]
            cut = FoundCut(table, of.own, ptr, source.numel())
            edges[kind] = BatchInfo(graph.relations[kind], table, of.own, cut, Halo.of(of.found.rows, source, order))
            edges[kind].sources = nodes[kind[0]]
        return TypedInfo(graph, joined, nodes, edges, key, by_type.buffers()), by_type


@dataclass(eq=False)
class SortedByType:
    """The rows and edges of a batch, one type behind the other.

    Attributes:
        n_id: The node of each row, among those of its type, ``[num_rows]``.
        rank: Its row in the order of its type, ``[num_rows]``.
        e_id: Each edge's number among those of its type, ``[num_edges]``.
        edge_index: The edges between rows of their types, ``[2, num_edges]``.
        source: The row that each edge comes from, ``[num_edges]``, int32.
    """

    n_id: Tensor
    rank: Tensor
    e_id: Tensor
    edge_index: Tensor
    source: Tensor
    # The type of each edge, the first target of each type of edges if all of these are numbered, and their number.
    _relation: Tensor
    _first_target: Tensor
    _row_counts: list[int]
    _edge_counts: list[int]
    # The first edge of each type.
    _first_edge: Tensor
    _made: list[Tensor] = field(default_factory=list)

    def split_nodes(self, values: Tensor) -> tuple[Tensor, ...]:
        """A tensor with an entry per row by type of nodes."""
        return torch.split(values, self._row_counts)

    def split_edges(self, values: Tensor) -> tuple[Tensor, ...]:
        """A tensor with an entry per edge, in its last dimension, by type of edges."""
        return torch.split(values, self._edge_counts, dim=-1)

    def pointers(self, sizes: list[int]) -> tuple[Tensor, ...]:
        """First edge of each target, ``[num_targets + 1]``, int32, by type of edges, which have so many targets."""
        target, device = self.edge_index[1] + self._first_target[self._relation], self.edge_index.device
        ptr = torch._convert_indices_from_coo_to_csr(target, sum(sizes), out_int32=True)
        # Those of a type end with the number of its edges.
        counts, total = self._first_target.diff() + 1, sum(sizes) + len(sizes)
        relation = torch.repeat_interleave(counts, output_size=total)
        place = torch.arange(total, device=device) - relation
        made = ptr[place] - self._first_edge[relation].int()
        self._made.append(made)
        return torch.split(made, [size + 1 for size in sizes])

    def by_source(self) -> list[tuple[Tensor, Tensor]]:
        """See :attr:`Halo.by_source`, by type of edges."""
        keys = self._relation * max(self.n_id.numel(), 1) + self.source
        order = keys.argsort(stable=True)
        source, order = self.source[order], order - self._first_edge[self._relation]
        self._made += [order, source]
        return list(zip(self.split_edges(order), self.split_edges(source), strict=True))

    def buffers(self) -> list[Tensor]:
        """All tensors that others are slices of."""
        return [self.n_id, self.rank, self.e_id, self.edge_index, self.source, *self._made]


def _sort_by_type(
    node: Tensor, edge: Tensor, ends: Tensor, place: Tensor, firsts: Tensor, first_edges: Tensor, first_target: Tensor
) -> SortedByType:
    """Sort the rows and edges of a batch of the joined graph by type.

    Args:
        node: The joined node of each row, ``[num_rows]``.
        edge: The joined number of each edge, ``[num_edges]``.
        ends: The edges between rows, ``[2, num_edges]``.
        place: The place of each row in the order of all rows by type, ``[num_rows]``.
        firsts: The first joined node of each type, ``[num_types]``.
        first_edges: The first joined edge of each type, ``[num_relations]``.
        first_target: See :class:`SortedByType`.
    """
    device = node.device
    kind, order = (torch.searchsorted(firsts, node, right=True) - 1).sort(stable=True)
    first_row = torch.searchsorted(kind, torch.arange(firsts.numel() + 1, device=device))
    local = torch.empty_like(order)
    local[order] = torch.arange(order.numel(), device=device) - first_row[kind]
    relation, edge_order = (torch.searchsorted(first_edges, edge, right=True) - 1).sort(stable=True)
    first_edge = torch.searchsorted(relation, torch.arange(first_edges.numel() + 1, device=device))
    edge_index = local[ends[:, edge_order]]
    counts = torch.cat([first_row.diff(), first_edge.diff()]).tolist()  # a GPU is waited for once
    return SortedByType(
        n_id=node[order] - firsts[kind],
        rank=place[order] - firsts[kind],
        e_id=edge[edge_order] - first_edges[relation],
        edge_index=edge_index,
        source=edge_index[0].to(torch.int32),
        _relation=relation,
        _first_target=first_target,
        _row_counts=counts[: firsts.numel()],
        _edge_counts=counts[firsts.numel() :],
        _first_edge=first_edge,
    )


class TypedAssembly:
    """A batch of several types on its way; see :class:`Assembly`."""

    def __init__(self, builder: TypedBuilder, own: TypedRows, joined: Assembly, key: Hashable) -> None:
        self._builder, self._own, self._joined, self._key = builder, own, joined, key

    @for_later
    def finish(self, only: Collection[str] | None = None, *, unread: bool = False) -> tuple[HeteroData, TypedInfo]:
        """The batch, once its halo is known; it has all attributes, whatever ``only`` says."""
        builder, graph = self._builder, self._builder.graph
        info, by_type = builder.sorted(self._own, *self._joined.finish(), self._key)
        batch = copy.copy(graph.data)
        for kind, n_id in zip(graph.counts, by_type.split_nodes(by_type.n_id), strict=True):
            store, of = batch[kind], info.nodes[kind]
            for name in graph.rows[kind]:
                store[name] = builder.take(kind, name, of, n_id, unread=unread and name != WHOLE_ID)
            store.n_id = store[WHOLE_ID] if WHOLE_ID in graph.rows[kind] else n_id
            store.batch_size, store.num_nodes = of.batch_size, n_id.numel()
        ends, numbers = by_type.split_edges(by_type.edge_index), by_type.split_edges(by_type.e_id)
        for kind, edge_index, e_id in zip(graph.relations, ends, numbers, strict=True):
            store = batch[kind]
            store.edge_index = edge_index
            for name in graph.edge_rows[kind]:
                store[name] = builder.take(kind, name, info.edges[kind], e_id, unread=False)
            store.e_id = e_id
        return batch, info


class TypedBatch(ReadyBatch):
    """A built batch of several types, which the loader may yield many times."""

    info: Any

    def __init__(self, batch: HeteroData, info: TypedInfo) -> None:
        self._batch, self._lacks = batch, frozenset[str]()
        self.info = info
        self._write_counts = self._counts()

    def _counts(self) -> list[int]:
        values = (value for store in self._batch.stores for value in store.values())
        return [value._version for value in values if isinstance(value, Tensor) and not value.is_inference()]

    def intact(self) -> bool:
        """See :meth:`ReadyBatch.intact`."""
        return self._write_counts == self._counts()

    def _arrive(self) -> None:
        """See :meth:`ReadyBatch._arrive`."""
        info = self.info
        if info.ready is not None:
            names = {kind: (*info.graph.rows[kind],) for kind in info.nodes}
            names |= {kind: (*info.graph.edge_rows[kind],) for kind in info.edges}
            rows = (self._batch[kind][name] for kind, each in names.items() for name in each)
            taken = [value for value in rows if value.is_cuda and not isinstance(value, UnreadRows)]
            hand_over([*info.buffers, info.joined.found.rows, info.joined.rows, *taken], info.ready)

    def tagged_copy(self) -> HeteroData:
        """See :meth:`ReadyBatch.tagged_copy`."""
        self._arrive()
        batch, info = copy.copy(self._batch), self.info
        for kind, of in info.nodes.items():
            batch[kind].n_id = BatchTensor.tag(batch[kind].n_id, of, "n_id")
        for kind, of in info.edges.items():
            store = batch[kind]
            for name in ("edge_index", *of.graph.edge_attributes):
                store[name] = BatchTensor.tag(store[name], of, name)
        return batch
