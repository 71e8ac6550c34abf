"""The share of a heterogeneous graph that one rank holds: a family of plain shards, one for each type of nodes.

All types together are cut into parts, and a rank owns the nodes of all types in its parts. Of each type it has a shard:
own nodes first, then ghosts, which have an edge of any type into own nodes, then stand-ins. Along edges between nodes
of one type layers may compute something from both ends, so all of these that touch an own node or a ghost are there, as
in a plain shard. Between nodes of different types layers only look at the edges into a node, so the rank has those into
its own nodes and no others; a bidirectional shard also those into ghosts, where one stand-in takes the place of all
nodes that are further away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.graph import WHOLE_ID, EdgeType, TypedGraph
from gnnautoscale.ranks.assignment import edge_chunks
from gnnautoscale.ranks.shard import Layout, Shard, border, exchanged, near_edges, node_rows, ring


@dataclass(frozen=True, eq=False)
class TypedShard:
    """What one rank holds of a heterogeneous graph.

    Attributes:
        kinds: The shard of each type of nodes; its ``data`` has the attributes of the nodes, and no edges. Nodes are
            numbered within their types.
        edges: The edges of each type, between rows of its two types, and their attributes.
        extra: What the graph has besides nodes and edges.
        whole: Facts about the whole graph: numbers of nodes, edges, and more.
    """

    kinds: dict[str, Shard]
    edges: dict[EdgeType, Data]
    extra: dict[str, Any]
    whole: dict[str, Any]

    @cached_property
    def data(self) -> HeteroData:
        """The rank's graph; batches of it show the numbers of nodes in the whole one."""
        made = HeteroData()
        for name, value in self.extra.items():
            setattr(made, name, value)
        for kind, shard in self.kinds.items():
            for name, value in shard.data:
                made[kind][name] = value
            made[kind].num_nodes = shard.data.num_nodes
            made[kind][WHOLE_ID] = node_rows(shard.nodes, 0, torch.arange(shard.nodes.numel()), shard.data.num_nodes)
        for relation, edges in self.edges.items():
            for name, value in edges:
                made[relation][name] = value
        return made

    @property
    def _any(self) -> Shard:
        return next(iter(self.kinds.values()))

    @property
    def rank(self) -> int:
        """The rank."""
        return self._any.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._any.size

    @property
    def first_part(self) -> Tensor:
        """See :class:`Shard`."""
        return self._any.first_part

    @property
    def bidirectional(self) -> bool:
        """See :class:`Shard`."""
        return self._any.bidirectional

    @property
    def num_parts(self) -> int:
        """Number of parts that the rank owns."""
        return self._any.num_parts

    @property
    def num_own(self) -> int:
        """Number of nodes of all types that the rank owns."""
        return sum(shard.num_own for shard in self.kinds.values())

    def in_parts(self, count: int) -> TypedShard:
        """See :class:`Shard`; each part has its share of all types."""
        return replace(self, kinds={kind: shard.in_parts(count) for kind, shard in self.kinds.items()})

    @property
    def labels(self) -> dict[str, Tensor]:
        """The part of each row of each type; see :class:`Shard`."""
        return {kind: shard.labels for kind, shard in self.kinds.items()}


def cut_typed_shard(
    graph: TypedGraph, layout: Layout, rank: int, *, bidirectional: bool, whole: dict[str, Any]
) -> TypedShard:
    """The share of a rank; see :func:`cut_shard`.

    Args:
        graph: The whole graph; the nodes of all types are joined in the order of its types.
        layout: Where the nodes of the joined graph live.
        rank: The rank.
        bidirectional: See :class:`Shard`.
        whole: Facts about the whole graph to hand on.

    Example:
        >>> data = HeteroData()
        >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 2
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 0, 1], [0, 1, 1]])
        >>> layout = Layout(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1]), size=2)
        >>> shard = cut_typed_shard(TypedGraph.of(data), layout, 1, bidirectional=False, whole={})
        >>> {kind: each.nodes.tolist() for kind, each in shard.kinds.items()}, shard.num_own  # author 0 is a ghost
        ({'author': [1, 0], 'paper': [1]}, 2)
        >>> shard.data["author", "writes", "paper"].edge_index.tolist()
        [[1, 0], [0, 0]]
    """
    own = layout.own(rank)
    ghosts, sent = border(graph.edge_index, layout, rank, bidirectional)
    firsts = torch.tensor([*graph.first.values()])
    own_kind, ghost_kind = (torch.searchsorted(firsts, nodes, right=True) - 1 for nodes in (own, ghosts))
    peer, row = sent // max(own.numel(), 1), sent % max(own.numel(), 1)
    shards: dict[str, Shard] = {}
    for number, (kind, first) in enumerate(graph.first.items()):
        is_own = own_kind == number
        # How many of the rows before each are of the type, which makes those of the type one behind the other.
        before = torch.cat([torch.zeros(1, dtype=torch.long), is_own.cumsum(0)])
        of_kind, starts = is_own[row], before[layout.starts_of(rank)]
        theirs = ghosts[ghost_kind == number]
        shards[kind] = Shard(
            data=Data(num_nodes=0),
            rank=rank,
            size=layout.size,
            nodes=torch.cat([own[is_own], theirs]) - first,
            first_part=layout.first_part,
            bidirectional=bidirectional,
            whole=whole,
            **exchanged(layout, starts, peer[of_kind] * int(starts[-1]) + before[row[of_kind]], theirs),
        )
    near = {kind: _near(graph, kind, shard) for kind, shard in shards.items()}
    num_rows = {kind: nodes.numel() + 1 for kind, nodes in near.items()}  # with a stand-in
    edges = {}
    for relation in graph.relations:
        edges[relation], count = _edges(graph, relation, shards, near)
        num_rows[relation[0]] = max(num_rows[relation[0]], count)
    for kind, shard in shards.items():
        _add_rows(graph, kind, shard, _unlike_others(graph, kind, num_rows[kind]))
    extra = dict(graph.data._global_store.items())
    return TypedShard(shards, edges, extra, whole)


def _near(graph: TypedGraph, kind: str, shard: Shard) -> Tensor:
    """The nodes of a type whose edges to others of the type a rank has: own ones, ghosts, and perhaps a ring."""
    within = [
        graph.relations[relation].edge_index for relation in graph.relations if relation[0] == relation[2] == kind
    ]
    if not shard.bidirectional or not within:
        return shard.nodes
    rings = [ring(edges, shard.nodes, graph.counts[kind]) for edges in within]
    return torch.cat([shard.nodes, torch.unique(torch.cat(rings))])


def _edges(
    graph: TypedGraph, relation: EdgeType, shards: dict[str, Shard], near: dict[str, Tensor]
) -> tuple[Data, int]:
    """The edges of a type that a rank has, with their attributes, and the number of rows that this takes."""
    source, _, target = relation
    edge_index, num_rows = graph.relations[relation].edge_index, 0
    if source == target:
        e_id, ends, num_rows = near_edges(edge_index, near[source], graph.counts[source])
    else:
        first, second = (_rows_of(near[kind], graph.counts[kind]) for kind in (source, target))
        known = shards[target].nodes.numel() if shards[target].bidirectional else shards[target].num_own
        e_id, ends = _edges_into(edge_index, first, second, known, near[source].numel())
    store, made = graph.data[relation], Data()
    for name, value in store.items():
        is_of_edges = name in graph.edge_rows[relation]
        made[name] = value.index_select(graph.data.__cat_dim__(name, value, store), e_id) if is_of_edges else value
    made.edge_index = ends
    return made, num_rows


def _unlike_others(graph: TypedGraph, kind: str, num_rows: int) -> int:
    """A number of rows, not less than the given one, that no tensor has which is not one of rows."""
    store = graph.data[kind]
    others = [value for name, value in store.items() if isinstance(value, Tensor) and name not in graph.rows[kind]]
    taken = {size for value in others for size in value.shape}
    while num_rows in taken:
        num_rows += 1
    return num_rows


def _rows_of(nodes: Tensor, count: int) -> Tensor:
    """The row of each node of a type, ``[count]``, -1 of those without one."""
    return torch.full((count,), -1, dtype=torch.int32).index_copy_(0, nodes, torch.arange(nodes.numel()).int())


def _edges_into(
    edges: Tensor, source_row: Tensor, target_row: Tensor, count: int, stand_in: int
) -> tuple[Tensor, Tensor]:
    """The edges into the first rows, in their order: which they are, and both ends as rows.

    A row, the ``stand_in``, takes the place of sources without one.
    """
    found = []
    for part in edge_chunks(edges):
        target = target_row[edges[1, part]]
        kept = ((target >= 0) & (target < count)).nonzero().squeeze(1)
        source = source_row[edges[0, part][kept]]
        found.append((kept + part.start, torch.stack([torch.where(source < 0, stand_in, source), target[kept]]).long()))
    e_id, ends = (torch.cat([each[at] for each in found], dim=-1) for at in (0, 1))
    return e_id, ends


def _add_rows(graph: TypedGraph, kind: str, shard: Shard, num_rows: int) -> None:
    """Add the rows of all attributes of a type of nodes to its shard."""
    store = graph.data[kind]
    for name, value in store.items():
        if name in graph.rows[kind]:
            nodes = shard.nodes[: shard.num_own] if name.endswith("_mask") else shard.nodes
            value = node_rows(value, graph.data.__cat_dim__(name, value, store), nodes, num_rows)
        shard.data[name] = value
    shard.data.num_nodes = num_rows
