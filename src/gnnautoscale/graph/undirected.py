"""The simple undirected graph under any edges, in the form that partitioners read; fast and lean on large graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**22  # edges that are looked at together
_RANGES = 16  # ranges of nodes whose edges are sorted one after the other


class UndirectedGraph(NamedTuple):
    """A graph without self-loops and duplicates, each connected pair of nodes in both directions."""

    starts: Tensor
    """Where the neighbours of each node begin, ``[num_nodes + 1]``, int64."""
    neighbors: Tensor
    """The neighbours of all nodes, those of each node in ascending order, ``[2 * num_pairs]``, int32 or int64."""
    weight: Tensor | None
    """A weight for each neighbour, ``[2 * num_pairs]``, float64, or ``None`` if all pairs weigh the same."""


def undirected(edge_index: Tensor, num_nodes: int, weight: Tensor | None = None) -> UndirectedGraph:
    """Make a graph simple and undirected.

    Args:
        edge_index: Edges in host memory, in any order, ``[2, num_edges]``, int32 or int64.
        num_nodes: The number of nodes.
        weight: A weight for each edge, ``[num_edges]``, float64. The weights of all edges between two nodes add up,
            whatever their direction, relative to the largest weight of an edge.

    Example:
        >>> graph = undirected(torch.tensor([[0, 1, 2, 2], [1, 0, 1, 2]]), num_nodes=3)
        >>> graph.starts, graph.neighbors
        (tensor([0, 1, 3, 4]), tensor([1, 0, 2, 1], dtype=torch.int32))
    """
    source, target = edge_index
    if any(bool((source[part] == target[part]).any()) for part in chunks(source.numel())):
        keep = source != target
        source, target = source[keep], target[keep]
        weight = None if weight is None else weight[keep]
    if source.numel() == 0:
        weight = None
    ways = [(source, target), (target, source)]
    if weight is None and is_symmetric(edge_index, num_nodes):
        for row, column in ways:
            if _is_ascending(row, column):
                return UndirectedGraph(_starts(torch.bincount(row, minlength=num_nodes)), column, None)
        ways = ways[:1]
    return _sorted(ways, num_nodes, weight)


def is_symmetric(edge_index: Tensor, num_nodes: int) -> bool:
    """Whether every edge in host memory, ``[2, num_edges]``, has a reverse edge; duplicates as many as there are.

    Example:
        >>> is_symmetric(torch.tensor([[0, 1, 1], [1, 0, 2]]), num_nodes=3)
        False
    """
    # Sum a random hash over all edges (source, target), and over all reversed edges. The sums are equal if the graph is
    # symmetric, and otherwise only by an unlikely coincidence. This needs no sorting.
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(-(2**62), 2**62, (num_nodes,), generator=generator) for _ in range(2))
    total = torch.zeros((), dtype=torch.int64)
    for part in chunks(edge_index.size(1)):
        source, target = edge_index[:, part]
        total += (first[source] * second[target]).sum() - (first[target] * second[source]).sum()
    return bool(total == 0)


def chunks(num_edges: int) -> Iterator[slice]:
    """Slices that cover all edges, so that what is computed of them takes little memory."""
    return (slice(first, first + _CHUNK) for first in range(0, num_edges, _CHUNK))


def _is_ascending(row: Tensor, column: Tensor) -> bool:
    """Whether edges are sorted by row and then by column, without duplicates."""
    for part in chunks(row.numel() - 1):
        before, after = (slice(part.start + shift, min(part.stop, row.numel() - 1) + shift) for shift in (0, 1))
        later = column[after] > column[before]
        if not ((row[after] > row[before]) | ((row[after] == row[before]) & later)).all():
            return False
    return True


def _sorted(ways: list[tuple[Tensor, Tensor]], num_nodes: int, weight: Tensor | None) -> UndirectedGraph:
    """Sort edges and drop duplicates; ``ways`` has the rows and columns of all edges in one direction or both."""
    ends = torch.stack([torch.bincount(row, minlength=num_nodes) for row, _ in ways]).sum(0).cumsum(0)
    # One range of nodes after the other, with about as many edges each, since sorting takes ten times their memory.
    num_ranges = min(_RANGES, 1 + int(ends[-1]) // _CHUNK)
    range_of = ((ends - 1).clamp(min=0) * num_ranges // ends[-1]).to(torch.uint8)
    ranges = [range_of[row] for row, _ in ways]
    if weight is not None:
        # Relative to the largest weight, since a sum of huge ones could overflow.
        weight = weight / weight.max().clamp(min=torch.finfo(weight.dtype).tiny)
    index_type = torch.int32 if num_nodes <= 2**31 else torch.int64
    neighbors, weights, degree = [], [], torch.zeros(num_nodes, dtype=torch.int64)
    for number in range(num_ranges):
        chosen = [(each == number).nonzero().view(-1) for each in ranges]
        pairs = [(row[some].long(), column[some]) for (row, column), some in zip(ways, chosen, strict=True)]
        keys = torch.cat([row * num_nodes + column for row, column in pairs])
        if weight is None:
            keys = torch.unique_consecutive(keys.sort().values)
        else:
            keys, order = keys.sort(stable=True)
            keys, place = torch.unique_consecutive(keys, return_inverse=True)
            given = torch.cat([weight[some] for some in chosen])[order]
            weights.append(weight.new_zeros(keys.numel()).index_add_(0, place, given))
        row = keys // num_nodes
        neighbors.append((keys - row * num_nodes).to(index_type))  # faster than %
        degree += torch.bincount(row, minlength=num_nodes)
    summed = torch.cat(weights) if weights else None
    equal = summed is None or bool(summed.min() == summed.max())
    return UndirectedGraph(_starts(degree), torch.cat(neighbors), None if equal else summed)


def _starts(degree: Tensor) -> Tensor:
    starts = torch.zeros(degree.numel() + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=starts[1:])
    return starts
