"""The surroundings of some nodes as a graph of their own, gathered from all ranks.

A rank knows the edges into its own nodes, and the nodes at both of their ends. So a search goes out from the nodes of
each rank hop by hop: every rank is asked by all others, and answers with what lies beside their nodes on its edges.
Nodes go by their numbers in the whole graph; those of a heterogeneous graph lie one type behind the other.
"""

from __future__ import annotations

import copy
import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import available_memory
from gnnautoscale.errors import InputError
from gnnautoscale.graph import EdgeType, TypedGraph, rows_of
from gnnautoscale.ranks.cutting import COUNTS
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import World

# The share of free memory that gathered rows may take.
_SHARE = 0.25
# A plain graph has one type of nodes, and one of edges, without names.
_PLAIN: EdgeType = ("", "", "")


def surroundings(world: World, shard: Shard | TypedShard, nodes: dict[str, Tensor], hops: int) -> Any:
    """The graph of everything at most so many hops from some nodes along or against edges; every rank calls it.

    Args:
        world: The ranks.
        shard: The share of this one.
        nodes: Some of its own nodes of each type, as rows, ``[count]``; a plain graph has one type, without a name.
        hops: How far to go.

    Returns:
        Of each type the nodes, then those around them, with all edges between any of these, and with their rows of all
        attributes; a ``Data`` or a ``HeteroData``, like that of the shard.
    """
    known = _Known(shard)
    found = frontier = torch.cat([known.first[kind] + shard.kinds[kind].nodes[rows] for kind, rows in nodes.items()])
    for _ in range(hops):
        answers = world.swap([known.beside(asked) for asked in world.gather(frontier)])
        beside = torch.unique(torch.cat(answers))
        frontier = beside[~torch.isin(beside, found)]
        found = torch.cat([found, frontier])
    _check_room(world, known, found.numel())
    pieces = world.swap([known.piece(asked) for asked in world.gather(found)])
    return known.joined(found, pieces)


class _Piece(NamedTuple):
    """What one rank knows of a graph, by type: its nodes, the ends of its edges, and the rows of attributes of both."""

    nodes: dict[str, Tensor]
    ends: dict[EdgeType, Tensor]
    node_rows: dict[str, dict[str, Tensor]]
    edge_rows: dict[EdgeType, dict[str, Tensor]]


class _Known:
    """The edges into a rank's own nodes, and the nodes at their ends.

    Attributes:
        first: The number of each type's first node among those of all types.
    """

    def __init__(self, shard: Shard | TypedShard) -> None:
        self._data: Any = shard.data
        self._kinds = shard.kinds
        counts = shard.whole.get(COUNTS) or {"": shard.whole["nodes"]}
        self._counts: dict[str, int] = {kind: counts[kind] for kind in self._kinds}
        self.first = _firsts(self._counts)
        self._rows_before = _firsts({kind: each.nodes.numel() for kind, each in self._kinds.items()})
        self._nodes = torch.cat([self.first[kind] + each.nodes for kind, each in self._kinds.items()])
        self._sorted, self._rows = self._nodes.sort()
        self._node_rows: dict[str, dict[str, Tensor]]
        self._edge_rows: dict[EdgeType, dict[str, Tensor]]
        if isinstance(shard, TypedShard):
            graph = TypedGraph.of(shard.data)
            self._node_rows, self._edge_rows = graph.rows, graph.edge_rows
        else:
            levels = {name: rows_of(shard.data, name) for name, _ in shard.data if name != "edge_index"}
            of_level = {each: [name for name, level in levels.items() if level == each] for each in ("node", "edge")}
            self._node_rows = {"": {name: shard.data[name] for name in of_level["node"]}}
            self._edge_rows = {_PLAIN: {name: shard.data[name] for name in of_level["edge"]}}
        # The edges of each type into own nodes, and the rows at their ends, which lie one type behind the other.
        self._edges: dict[EdgeType, Tensor] = {}
        self._ends: dict[EdgeType, Tensor] = {}
        for relation in self._edge_rows:
            source, _, target = relation
            ends = _store(self._data, relation).edge_index
            self._edges[relation] = into_own = (ends[1] < self._kinds[target].num_own).nonzero().squeeze(1)
            before = torch.tensor([[self._rows_before[source]], [self._rows_before[target]]])
            self._ends[relation] = ends[:, into_own] + before

    def _dim(self, kind: str | EdgeType, name: str, value: Tensor) -> int:
        """The dimension in which an attribute has its rows."""
        store = [_store(self._data, kind)] if isinstance(self._data, HeteroData) else []
        dim: int = self._data.__cat_dim__(name, value, *store)
        return dim

    def _is_asked(self, asked: Tensor) -> Tensor:
        """Which rows, own ones and ghosts, are those of some nodes, ``[num_known]``."""
        place = torch.searchsorted(self._sorted, asked).clamp(max=self._sorted.numel() - 1)
        is_asked = torch.zeros(self._sorted.numel(), dtype=torch.bool)
        is_asked[self._rows[place[self._sorted[place] == asked]]] = True
        return is_asked

    def beside(self, asked: Tensor) -> Tensor:
        """The nodes at the other ends of edges here from or to some nodes, ``[count]``."""
        is_asked, rows = self._is_asked(asked), []
        for source, target in self._ends.values():
            rows += [source[is_asked[target]], target[is_asked[source]]]
        found: Tensor = torch.unique(self._nodes[torch.cat(rows)])
        return found

    def piece(self, asked: Tensor) -> _Piece:
        """What there is here of the graph of some nodes: this rank's own, and the edges into these."""
        is_asked, made = self._is_asked(asked), _Piece({}, {}, {}, {})
        for kind, shard in self._kinds.items():
            own = is_asked.narrow(0, self._rows_before[kind], shard.num_own).nonzero().squeeze(1)
            made.nodes[kind] = self.first[kind] + shard.nodes[own]
            made.node_rows[kind] = self._chosen(kind, self._node_rows[kind], own)
        for relation, ends in self._ends.items():
            inside = is_asked[ends].all(0)
            made.ends[relation] = self._nodes[ends[:, inside]]
            made.edge_rows[relation] = self._chosen(relation, self._edge_rows[relation], self._edges[relation][inside])
        return made

    def _chosen(self, kind: str | EdgeType, rows: dict[str, Tensor], which: Tensor) -> dict[str, Tensor]:
        return {name: value.index_select(self._dim(kind, name, value), which) for name, value in rows.items()}

    def joined(self, nodes: Tensor, pieces: list[_Piece]) -> Any:
        """One graph of all pieces, whose nodes are in the given order; what has no rows is as in the rank's graph."""
        made, orders = copy.copy(self._data), {}
        for kind, first in self.first.items():
            orders[kind] = nodes[(nodes >= first) & (nodes < first + self._counts[kind])].sort()
            where = _places(orders[kind], torch.cat([piece.nodes[kind] for piece in pieces])).argsort()
            for name, value in self._node_rows[kind].items():
                dim = self._dim(kind, name, value)
                rows = torch.cat([piece.node_rows[kind][name] for piece in pieces], dim=dim)
                _store(made, kind)[name] = rows.index_select(dim, where)
            _store(made, kind).num_nodes = where.numel()
        for relation in self._ends:
            for name, value in self._edge_rows[relation].items():
                dim = self._dim(relation, name, value)
                rows = torch.cat([piece.edge_rows[relation][name] for piece in pieces], dim=dim)
                _store(made, relation)[name] = rows
            ends = torch.cat([piece.ends[relation] for piece in pieces], dim=1)
            of_both = zip((relation[0], relation[2]), ends, strict=True)
            _store(made, relation).edge_index = torch.stack([_places(orders[kind], each) for kind, each in of_both])
        return made

    def bytes_per_node(self) -> int:
        """The bytes that the rows of a node take at most."""
        needed: int = max(
            sum(value.nbytes // max(self._kinds[kind].data.num_nodes, 1) for value in rows.values())
            for kind, rows in self._node_rows.items()
        )
        return needed


def _store(data: Any, kind: str | EdgeType) -> Any:
    """Where a graph has the attributes of a type of nodes or edges."""
    return data[kind] if isinstance(data, HeteroData) else data


def _places(order: Any, nodes: Tensor) -> Tensor:
    """Where nodes are among some that were sorted."""
    values, places = order
    found: Tensor = places[torch.searchsorted(values, nodes)]
    return found


def _firsts(counts: dict[str, int]) -> dict[str, int]:
    return dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))


def _check_room(world: World, known: _Known, count: int) -> None:
    """Refuse surroundings of so many nodes on all ranks if one of them has no room for their rows."""
    needed, free = count * known.bytes_per_node(), available_memory()
    worst = max(world.gather((needed / (math.inf if free is None else max(free, 1)), needed)))
    if worst[0] > _SHARE:
        raise InputError(
            "each rank needs room for what lies around the nodes that it verifies",
            got=f"{worst[1] / 1e9:.3g} GB of rows",
            fix="Verify fewer nodes, such as nodes=1.",
        )
