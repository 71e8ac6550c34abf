"""Balances a partition by groups of nodes, such as types: partitioners balance all nodes together only.

Nodes move out of parts that have too many of their group, those first whose edges lose least; then nodes around these
move wherever that saves edges and keeps the balance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale.graph.undirected import UndirectedGraph

# How far the number of a group's nodes in a part may be from the mean.
_SLACK = 0.05
# The most times that all nodes that have to move choose a part among their neighbours', and that others follow.
_ROUNDS, _FOLLOWING = 20, 10


def balanced(graph: UndirectedGraph, labels: Tensor, groups: Tensor, num_parts: int) -> Tensor:
    """Move nodes between parts until each part has about as many nodes of each group as any other.

    Args:
        graph: The graph.
        labels: The part of each node, ``[num_nodes]``.
        groups: The group of each node, numbered from 0, ``[num_nodes]``.
        num_parts: The number of parts.

    Returns:
        The new part of each node, ``[num_nodes]``. A part has at most 5 % more or less nodes of a group than the mean,
        or one of the whole numbers next to it.

    Example:
        >>> from gnnautoscale.graph.undirected import undirected
        >>> pairs = undirected(torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]]), num_nodes=4)
        >>> balanced(pairs, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), 2)
        tensor([1, 0, 0, 1])
    """
    cells = _Cells(labels.clone(), groups, num_parts)
    mean = torch.bincount(groups).double() / num_parts
    most = torch.maximum(mean.ceil(), (mean * (1 + _SLACK)).floor()).long()
    least = torch.minimum(mean.floor(), (mean * (1 - _SLACK)).ceil()).long()
    for bound in (most, least):
        for number in range(_ROUNDS):
            surplus, room = cells.beyond(bound)
            if not int(torch.minimum(surplus.sum(1), room.sum(1)).sum()):
                break
            moving = (surplus.flatten()[cells.of()] > 0).nonzero().squeeze(1)
            moved = cells.move(*_choices(graph, cells, moving, room), surplus, room)
            if not moved or number == _ROUNDS - 1:
                cells.place(*cells.beyond(bound))
    moved_nodes = (cells.labels != labels).nonzero().squeeze(1)
    around = torch.unique(torch.cat([moved_nodes, _edges_of(graph, moved_nodes)[1]]))
    for number in range(_FOLLOWING):
        count = cells.count()
        surplus, room = (count - least.unsqueeze(1)).clamp(min=0), (most.unsqueeze(1) - count).clamp(min=0)
        nodes, part, gain = _choices(graph, cells, around, room)
        # In one direction at a time, or two neighbours would change places for ever.
        better = (gain > 0) & ((part > cells.labels[nodes]) == bool(number % 2))
        if not cells.move(nodes[better], part[better], gain[better], surplus, room) and number:
            break
    return cells.labels


class _Cells:
    """The nodes of each group in each part: a cell is ``group * num_parts + part``."""

    def __init__(self, labels: Tensor, groups: Tensor, num_parts: int) -> None:
        self.labels, self.groups, self.num_parts = labels, groups, num_parts
        self.num_groups = int(groups.max()) + 1

    def of(self, nodes: Tensor | None = None) -> Tensor:
        """The cell of some nodes, or of all."""
        groups, labels = (each if nodes is None else each[nodes] for each in (self.groups, self.labels))
        return groups * self.num_parts + labels

    def count(self) -> Tensor:
        """The number of nodes in each cell, ``[num_groups, num_parts]``."""
        size = self.num_groups * self.num_parts
        return torch.bincount(self.of(), minlength=size).view(self.num_groups, self.num_parts)

    def beyond(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """How many nodes each cell has above a bound for its group, and how many are missing there."""
        above = self.count() - bound.unsqueeze(1)
        return above.clamp(min=0), (-above).clamp(min=0)

    def move(self, nodes: Tensor, part: Tensor, gain: Tensor, surplus: Tensor, room: Tensor) -> int:
        """Move nodes to parts, the largest gain first, as far as there are surplus and room; returns how many."""
        order = gain.argsort(descending=True, stable=True)
        nodes, part = nodes[order], part[order]
        for limit in (surplus, room):
            cell = self.groups[nodes] * self.num_parts + (self.labels[nodes] if limit is surplus else part)
            kept = _rank(cell) < limit.flatten()[cell]
            nodes, part = nodes[kept], part[kept]
        self.labels[nodes] = part
        return nodes.numel()

    def place(self, surplus: Tensor, room: Tensor) -> None:
        """Move what is too much to wherever there is room, whatever that costs."""
        cell = self.of()
        spare = (_rank(cell) < surplus.flatten()[cell]).nonzero().squeeze(1)
        slots = torch.arange(room.numel()).repeat_interleave(room.flatten())
        group = slots // self.num_parts
        first = torch.searchsorted(group, torch.arange(self.num_groups))
        of_group = self.groups[spare]
        rank, count = _rank(of_group), torch.bincount(group, minlength=self.num_groups)
        fits = rank < count[of_group]
        self.labels[spare[fits]] = slots[(first[of_group] + rank)[fits]] % self.num_parts


def _choices(graph: UndirectedGraph, cells: _Cells, nodes: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each node with a neighbour in another part that has room: the node, the best such part, edges gained."""
    node, neighbor, weight = _edges_of(graph, nodes)
    key, place = torch.unique(node * cells.num_parts + cells.labels[neighbor], return_inverse=True)
    held = torch.zeros(key.numel(), dtype=torch.double).index_add_(0, place, weight)
    node, part = key // cells.num_parts, key % cells.num_parts
    inside = part == cells.labels[node]
    own = torch.zeros(cells.labels.numel(), dtype=torch.double)
    own[node[inside]] = held[inside]
    able = ~inside & (room[cells.groups[node], part] > 0)
    node, part, gain = node[able], part[able], (held - own[node])[able]
    order = gain.argsort(descending=True, stable=True)
    order = order[node[order].argsort(stable=True)]
    first = _rank(node[order]) == 0
    best = order[first]
    return node[best], part[best], gain[best]


def _edges_of(graph: UndirectedGraph, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The edges of some nodes: these nodes, their neighbours, and weights, ``[num_edges]`` each."""
    first, count = graph.starts[nodes], graph.starts[nodes + 1] - graph.starts[nodes]
    offset = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    place = first.repeat_interleave(count) + offset
    weight = torch.ones(place.numel(), dtype=torch.double) if graph.weight is None else graph.weight[place]
    return nodes.repeat_interleave(count), graph.neighbors[place].long(), weight


def _rank(keys: Tensor) -> Tensor:
    """The number of equal keys before each, ``[count]``."""
    order = keys.argsort(stable=True)
    ordered = keys[order]
    new = torch.ones(ordered.shape, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(new, torch.arange(ordered.numel()), 0).cummax(0).values if ordered.numel() else ordered
    rank = torch.empty_like(order)
    rank[order] = torch.arange(ordered.numel()) - first
    return rank
