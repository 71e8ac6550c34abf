"""Heterogeneous graphs: nodes and edges of several types, cut into batches as one graph.

All types are joined to one plain graph, which is partitioned and cut into batches like any other. A batch is then
sorted by type: the nodes of a type, own ones first and the halo behind them, and the edges of a type between these. For
each type of nodes there is a :class:`BatchInfo` with an order of rows of its own, and for each type of edges one whose
own rows are those of the edges' targets. So histories and recorded edges of a type are those of a plain graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import for_later
from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import BatchBuilder
from gnnautoscale.graph.batch import BatchInfo, BatchTensor
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.edges import EdgeTable, RowOrder
from gnnautoscale.graph.graph import Graph, is_label
from gnnautoscale.graph.hashing import fingerprint
from gnnautoscale.graph.ready import ReadyBatch
from gnnautoscale.kernels import Halo, OwnRows

#: A type of edges: the type of their sources, a relation, and the type of their targets.
EdgeType: TypeAlias = tuple[str, str, str]
_HOST = torch.device("cpu")


class TypedGraph:
    """A heterogeneous graph as its data was at one moment: checked, and joined to one plain graph.

    Attributes:
        counts: The number of nodes of each type.
        first: The number of each type's first node in the joined graph.
        relations: For each type of edges a graph of its own, with their attributes. If sources and targets are of
            different types, its nodes are whichever are more, and only its edges mean something.
        first_edge: The number of each type's first edge in the joined graph.
        joined: All nodes and edges, without attributes.
    """

    @for_later
    def __init__(self, data: HeteroData) -> None:
        self.data = copy.copy(data)
        self.counts: dict[str, int] = {kind: _count(data, kind) for kind in data.node_types}
        if not sum(self.counts.values()):
            raise InputError("a graph needs at least one node", got="none", fix="Set x or num_nodes of a node type.")
        self.first = _firsts(self.counts)
        self.relations = {kind: self._relation(kind) for kind in data.edge_types}
        if not self.relations:
            raise InputError("a heterogeneous graph needs a type of edges", got="none", fix="Add an edge_index.")
        self.first_edge = _firsts({kind: graph.edge_index.size(1) for kind, graph in self.relations.items()})
        joined = [
            graph.edge_index + torch.tensor([[self.first[kind[0]]], [self.first[kind[2]]]])
            for kind, graph in self.relations.items()
        ]
        self.num_nodes = sum(self.counts.values())
        self.joined = Graph(Data(edge_index=torch.cat(joined, dim=1), num_nodes=self.num_nodes))
        self.rows = {kind: _rows(data[kind], "node") for kind in self.counts}
        self.edge_rows = {kind: _rows(data[kind], "edge") for kind in self.relations}
        self._check_rows()
        self._writes = {
            (kind, name): (value, value._version)
            for kind, store in (*data.node_items(), *data.edge_items())
            for name, value in store.items()
            if isinstance(value, Tensor) and not value.is_inference()
        }

    @staticmethod
    def of(data: HeteroData) -> TypedGraph:
        """The graph of some data, made once for all who ask, and anew if something was changed there since.

        Example:
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
            >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
            >>> graph = TypedGraph.of(data)
            >>> graph.joined.edge_index.tolist(), TypedGraph.of(data) is graph
            ([[0, 1], [4, 2]], True)
        """
        known = _KNOWN.get(id(data))
        if known is not None and known._is_of(data):
            return known
        made = TypedGraph(data)
        if known is None:
            finalize(data, _KNOWN.pop, id(data), None)
        _KNOWN[id(data)] = made
        return made

    @property
    def edge_index(self) -> Tensor:
        """The edges of the joined graph, ``[2, num_edges]``."""
        return self.joined.edge_index

    def follow(self, data: HeteroData) -> TypedGraph:
        """The graph of the same data as it is now, which must have as many nodes; itself if nothing changed."""
        now = TypedGraph.of(data)
        if now.counts != self.counts:
            raise InputError(
                f"the graph of a loader must keep its nodes ({_listed(self.counts)})",
                got=_listed(now.counts),
                fix="Make a new loader.",
            )
        return now

    def _is_of(self, data: HeteroData) -> bool:
        stores = (*data.node_items(), *data.edge_items())
        now = {(kind, name): value for kind, store in stores for name, value in store.items()}
        before = (*self.data.node_items(), *self.data.edge_items())
        then = {(kind, name): value for kind, store in before for name, value in store.items()}
        same = now.keys() == then.keys() and all(now[place] is then[place] for place in now)
        return same and not any(self._is_written(place) for place in self._writes)

    def _is_written(self, place: tuple[Any, str]) -> bool:
        value, version = self._writes[place]
        return value._version != version

    def check_unwritten(self, *, labels: bool) -> None:
        """Refuse to go on after a tensor was written to; labels and masks count only if ``labels``."""
        for kind, name in self._writes:
            if self._is_written((kind, name)) and (labels or not is_label(name)):
                raise InputError(
                    "data must not be written to while its batches are in use",
                    got=f"{name} of {kind!r}, whose values were changed in place",
                    fix="Write between two epochs, or assign a new tensor, which the next epoch takes over.",
                )

    @cached_property
    def key(self) -> str:
        """A fingerprint of edges, features and edge-level attributes: all that histories depend on besides weights."""
        parts = {str(kind): graph.key for kind, graph in self.relations.items()}
        features = {
            f"{kind} {name}": value
            for kind, rows in self.rows.items()
            for name, value in rows.items()
            if not is_label(name)
        }
        return fingerprint(*features.values(), nodes=_listed(self.counts), names=",".join(features), **parts)

    def _relation(self, kind: EdgeType) -> Graph:
        source, _, target = kind
        if source not in self.counts or target not in self.counts:
            missing = source if source not in self.counts else target
            fix = f"Set data[{missing!r}].x or data[{missing!r}].num_nodes."
            raise InputError(f"edges {kind!r} need nodes of both types", got=f"no {missing!r}", fix=fix)
        store = self.data[kind]
        most = max(self.counts[source], self.counts[target], 1)
        data = Data(edge_index=store.get("edge_index"), num_nodes=most)
        try:
            graph = Graph(data)  # before attributes are looked at
        except InputError as error:
            fix = f"Correct data[{kind!r}]."
            raise InputError(
                f"edges {kind!r} must be those of a graph", got=f"this: {error}".rstrip("."), fix=fix
            ) from error
        for row, end in zip(graph.edge_index, (source, target), strict=True):
            high = int(row.max()) if row.numel() else -1
            if high >= self.counts[end]:
                rule = f"edges {kind!r} must hold indices from 0 to {self.counts[end] - 1} of {end!r}"
                raise InputError(rule, got=f"{high}", fix="Renumber the nodes, or set num_nodes.")
        for name, value in _rows(store, "edge").items():
            data[name] = value
        return Graph(data)

    def _check_rows(self) -> None:
        for kind, rows in self.rows.items():
            for name in ("x", "y"):
                value = self.data[kind].get(name)
                if isinstance(value, Tensor) and name not in rows:
                    rule = f"{name} of {kind!r} must have one row for each of its {self.counts[kind]} nodes"
                    raise InputError(rule, got=f"shape {tuple(value.shape)}", fix="Give it one row per node.")
            x = rows.get("x")
            if x is not None and x.is_floating_point() and x.numel() and not bool(torch.isfinite(x).all()):
                rule = f"x of {kind!r} must be finite, or histories would keep the bad value"
                raise InputError(rule, got="NaN or infinity", fix="Replace or remove these values.")


# The graph of each HeteroData in use, by its id.
_KNOWN: dict[int, TypedGraph] = {}


@dataclass(eq=False)
class TypedInfo:
    """Where a batch of several types lies in its graph.

    Attributes:
        graph: The whole graph.
        joined: Where it lies in the joined graph.
        nodes: The own and the halo's rows of each type of nodes.
        edges: For each type of edges, its targets as own rows, and the edges between rows of both types.
        key: What tells the batch from others of its loader, and is the same whenever it comes back.
    """

    graph: TypedGraph
    joined: BatchInfo
    nodes: dict[str, BatchInfo]
    edges: dict[EdgeType, BatchInfo]
    key: Any = field(default=None)

    @property
    def device(self) -> torch.device:
        """Where the batch was assembled."""
        return self.joined.device

    @property
    def holds_all_nodes(self) -> bool:
        """Whether the batch is the whole graph."""
        return self.joined.batch_size == self.graph.num_nodes

    @contextmanager
    def followed_by(self, other: TypedInfo | None) -> Iterator[None]:
        """Announce the batch that is likely to follow while this one is used."""
        with ExitStack() as announced:
            for kind, info in self.nodes.items():
                announced.enter_context(info.followed_by(None if other is None else other.nodes[kind]))
            yield


class TypedBuilder:
    """Assembles batches of a heterogeneous graph in host memory; see :class:`BatchBuilder`."""

    def __init__(self, graph: TypedGraph, order: RowOrder, starts: list[int], bidirectional: bool) -> None:
        self.graph, self._starts, self._bidirectional = graph, starts, bidirectional
        self._joined = BatchBuilder(graph.joined, order, starts, bidirectional)
        nodes, kinds = order.nodes.long(), list(graph.counts)
        firsts = torch.tensor([graph.first[kind] for kind in kinds])
        # The type of each joined row, and its number among the rows of that type.
        self._kind = torch.searchsorted(firsts, nodes, right=True) - 1
        self._rank = torch.empty_like(nodes)
        self.orders: dict[str, RowOrder] = {}
        for number, kind in enumerate(kinds):
            rows = (self._kind == number).nonzero().squeeze(1)
            self._rank[rows] = torch.arange(rows.numel())
            self.orders[kind] = RowOrder(nodes[rows] - graph.first[kind])
        self._tables = {
            kind: EdgeTable(relation.edge_index, self.orders[kind[2]], source_order=self.orders[kind[0]])
            for kind, relation in graph.relations.items()
        }
        nothing = torch.empty(2, 0, dtype=torch.long)
        self._of_nodes = {kind: EdgeTable(nothing, order) for kind, order in self.orders.items()}
        self._edge_firsts = torch.tensor([graph.first_edge[kind] for kind in graph.relations])

    @property
    def table(self) -> EdgeTable:
        """The edges of the joined graph."""
        return self._joined.table

    def of(self, graph: TypedGraph) -> TypedBuilder:
        """A builder of the same parts of the same nodes, whose edges or attributes have changed."""
        return TypedBuilder(graph, self.table.order, self._starts, self._bidirectional)

    def own_rows(self, parts: PartGroup) -> OwnRows:
        """See :meth:`BatchBuilder.own_rows`."""
        return self._joined.own_rows(parts)

    def rows_of(self, nodes: Mapping[str, Tensor]) -> OwnRows:
        """The rows of distinct nodes of each type, ``[count]``, in their order."""
        joined = [self.graph.first[kind] + given for kind, given in nodes.items()]
        return self._joined.rows_of(torch.cat(joined))

    @for_later
    def build(self, own: OwnRows, key: Any = None) -> TypedBatch:
        """The batch of some rows."""
        plain, joined = self._joined.start(own, _HOST).finish()
        graph, rows, size = self.graph, joined.rows, own.size
        kind_of, local = self._kind[rows], torch.empty(rows.numel(), dtype=torch.long)
        batch, infos = copy.copy(graph.data), dict[str, BatchInfo]()
        for number, kind in enumerate(graph.counts):
            place = (kind_of == number).nonzero().squeeze(1)
            local[place] = torch.arange(place.numel())
            count = int((place < size).sum())
            ranks = self._rank[rows[place]]
            infos[kind] = self._info(graph.joined, self._of_nodes[kind], ranks, count)
            n_id = plain.n_id[place] - graph.first[kind]
            store = batch[kind]
            for name, value in graph.rows[kind].items():
                store[name] = _select(store, name, value, n_id)
            store.n_id, store.batch_size, store.num_nodes = n_id, count, place.numel()
        relation_of = torch.searchsorted(self._edge_firsts, plain.e_id, right=True) - 1
        by_relation = relation_of.argsort(stable=True)
        sizes = torch.bincount(relation_of, minlength=len(graph.relations)).tolist()
        edges = dict[EdgeType, BatchInfo]()
        for kind, chosen in zip(graph.relations, torch.split(by_relation, sizes), strict=True):
            e_id, store = plain.e_id[chosen] - graph.first_edge[kind], batch[kind]
            store.edge_index = local[plain.edge_index[:, chosen]]
            for name, value in graph.edge_rows[kind].items():
                store[name] = _select(store, name, value, e_id)
            store.e_id = e_id
            of = infos[kind[2]]
            found = Halo.of(of.found.rows, store.edge_index[0].int())
            table = self._tables[kind]
            edges[kind] = BatchInfo(graph.relations[kind], table, of.own, table.cut(of.own), found)
            edges[kind].sources = infos[kind[0]]
        info = TypedInfo(graph, joined, infos, edges, key)
        for each in (*infos.values(), *edges.values()):
            each.typed, each.key, each.bidirectional = info, key, joined.bidirectional
        return TypedBatch(batch, info)

    def _info(self, graph: Graph, table: EdgeTable, ranks: Tensor, count: int) -> BatchInfo:
        own = OwnRows.of(ranks[:count])
        found = Halo.of(ranks[count:], torch.empty(0, dtype=torch.int32))
        return BatchInfo(graph, table, own, table.cut(own), found)


class TypedBatch(ReadyBatch):
    """A built batch of several types, which the loader may yield many times."""

    info: Any

    def __init__(self, batch: HeteroData, info: TypedInfo) -> None:
        self._batch, self._lacks = batch, frozenset[str]()
        self.info = info
        self._write_counts = self._counts()

    def _counts(self) -> list[int]:
        stores = self._batch.stores
        return [value._version for store in stores for value in store.values() if isinstance(value, Tensor)]

    def intact(self) -> bool:
        """See :meth:`ReadyBatch.intact`."""
        return self._write_counts == self._counts()

    def tagged_copy(self) -> HeteroData:
        """See :meth:`ReadyBatch.tagged_copy`."""
        batch, info = copy.copy(self._batch), self.info
        for kind, of in info.nodes.items():
            batch[kind].n_id = BatchTensor.tag(batch[kind].n_id, of, "n_id")
        for kind, of in info.edges.items():
            store = batch[kind]
            for name in ("edge_index", *of.graph.edge_attributes):
                store[name] = BatchTensor.tag(store[name], of, name)
        return batch


def joined_labels(graph: TypedGraph, labels: Mapping[str, Tensor]) -> Tensor:
    """The part of each node of the joined graph, given that of each node of each type."""
    for kind, count in graph.counts.items():
        given = labels.get(kind)
        if not isinstance(given, Tensor) or given.shape != (count,):
            got = (
                "none" if given is None else f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else "no tensor"
            )
            rule = f"partition must give a part for each of the {count} nodes of {kind!r}"
            raise InputError(rule, got=got, fix="Pass a dictionary with a tensor for each type of nodes.")
    return torch.cat([labels[kind].long().cpu() for kind in graph.counts])


def _count(data: HeteroData, kind: str) -> int:
    count = data[kind].num_nodes
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    fix = f"Set data[{kind!r}].x or data[{kind!r}].num_nodes."
    raise InputError(f"the number of {kind!r} nodes must be known", got=repr(count), fix=fix)


def _rows(store: Any, level: str) -> dict[str, Tensor]:
    """The tensors of a type with a row for each of its nodes or edges, apart from the edges themselves."""
    has_rows = store.is_node_attr if level == "node" else store.is_edge_attr
    named = {name: value for name, value in store.items() if isinstance(value, Tensor) and name != "edge_index"}
    return {name: value for name, value in named.items() if "edge_label" not in name and has_rows(name)}


def _select(store: Any, name: str, value: Tensor, index: Tensor) -> Tensor:
    return value.index_select(store._parent().__cat_dim__(name, value, store), index.to(value.device))


def _firsts(counts: Mapping[Any, int]) -> dict[Any, int]:
    return dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
