"""The surroundings of some nodes as a graph of their own, gathered from all ranks.

A rank knows the edges into its own nodes, and the nodes at both of their ends. So a search goes out from the nodes of
each rank hop by hop: every rank is asked by all others, and answers with what lies beside their nodes on its edges.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import available_memory
from gnnautoscale.errors import InputError
from gnnautoscale.graph import rows_of
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.world import World

# The share of free memory that gathered rows may take.
_SHARE = 0.25


def surroundings(world: World, shard: Shard, nodes: Tensor, hops: int) -> Data:
    """The graph of everything at most so many hops from some nodes along or against edges; every rank calls it.

    Args:
        world: The ranks.
        shard: The share of this one.
        nodes: Some of its own nodes, as rows, ``[count]``.
        hops: How far to go.

    Returns:
        The nodes, then those around them, with all edges between any of these, and with their rows of all attributes.
    """
    known = _Known(shard)
    found = frontier = shard.nodes[nodes]
    for _ in range(hops):
        answers = world.swap([known.beside(asked) for asked in world.gather(frontier)])
        beside = torch.unique(torch.cat(answers))
        frontier = beside[~torch.isin(beside, found)]
        found = torch.cat([found, frontier])
    _check_room(world, shard, found.numel())
    return _joined(shard.data, found, world.swap([known.piece(asked) for asked in world.gather(found)]))


class _Piece(NamedTuple):
    """What one rank knows of a graph: its nodes, the ends of its edges, and rows of attributes of both."""

    nodes: Tensor
    ends: Tensor
    rows: dict[str, Tensor]


class _Known:
    """The edges into a rank's own nodes, and the nodes at their ends; nodes go by their numbers in the whole graph."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._nodes, self._rows = shard.nodes.sort()
        edge_index: Tensor = shard.data.edge_index
        self._edges = (edge_index[1] < shard.num_own).nonzero().squeeze(1)
        self._ends = edge_index[:, self._edges]

    def _is_asked(self, asked: Tensor) -> Tensor:
        """Which rows, own ones and ghosts, are those of some nodes, ``[num_known]``."""
        place = torch.searchsorted(self._nodes, asked).clamp(max=self._nodes.numel() - 1)
        is_asked = torch.zeros(self._nodes.numel(), dtype=torch.bool)
        is_asked[self._rows[place[self._nodes[place] == asked]]] = True
        return is_asked

    def beside(self, asked: Tensor) -> Tensor:
        """The nodes at the other ends of edges here from or to some nodes, ``[count]``."""
        is_asked, (source, target) = self._is_asked(asked), self._ends
        rows = torch.cat([source[is_asked[target]], target[is_asked[source]]])
        found: Tensor = torch.unique(self._shard.nodes[rows])
        return found

    def piece(self, asked: Tensor) -> _Piece:
        """What there is here of the graph of some nodes: this rank's own, and the edges into these."""
        shard, is_asked = self._shard, self._is_asked(asked)
        own = is_asked[: shard.num_own].nonzero().squeeze(1)
        inside = is_asked[self._ends].all(0)
        chosen = {"node": own, "edge": self._edges[inside]}
        rows = {
            name: value.index_select(shard.data.__cat_dim__(name, value), chosen[level])
            for name, value in shard.data
            if name != "edge_index" and (level := rows_of(shard.data, name)) in chosen
        }
        return _Piece(shard.nodes[own], shard.nodes[self._ends[:, inside]], rows)


def _joined(data: Data, nodes: Tensor, pieces: list[_Piece]) -> Data:
    """One graph of all pieces, whose nodes are in the given order; what has no rows is as in ``data``."""
    order, place = nodes.sort()

    def places(of: Tensor) -> Tensor:
        return place[torch.searchsorted(order, of)]

    made = copy.copy(data)
    where = places(torch.cat([piece.nodes for piece in pieces])).argsort()
    for name in pieces[0].rows:
        dim = data.__cat_dim__(name, data[name])
        rows = torch.cat([piece.rows[name] for piece in pieces], dim=dim)
        made[name] = rows.index_select(dim, where) if rows_of(data, name) == "node" else rows
    made.edge_index = places(torch.cat([piece.ends for piece in pieces], dim=1))
    made.num_nodes = nodes.numel()
    return made


def _check_room(world: World, shard: Shard, count: int) -> None:
    """Refuse surroundings of so many nodes on all ranks if one of them has no room for their rows."""
    tables: list[Any] = [value for name, value in shard.data if rows_of(shard.data, name) == "node"]
    needed = count * sum(value.nbytes // max(shard.data.num_nodes, 1) for value in tables)
    free = available_memory()
    worst = max(world.gather((needed / (math.inf if free is None else max(free, 1)), needed)))
    if worst[0] > _SHARE:
        raise InputError(
            "each rank needs room for what lies around the nodes that it verifies",
            got=f"{worst[1] / 1e9:.3g} GB of rows",
            fix="Verify fewer nodes, such as nodes=1.",
        )
