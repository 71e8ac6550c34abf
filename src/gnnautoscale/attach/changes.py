"""What has changed between two versions of a graph: edges, their values, and features; and how far that reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnautoscale.forward import EdgeRecord, as_matrix
from gnnautoscale.graph import Graph

# How many rows to compare at once.
_MOST_COMPARED = 1 << 20


class EdgeList(NamedTuple):
    """Sources and targets of edges, each ``[num_edges]``, and edge-level values by name, each ``[num_edges, ...]``."""

    source: Tensor
    target: Tensor
    values: dict[str, Tensor]

    @staticmethod
    def of(record: EdgeRecord) -> EdgeList:
        """The edges of a record, in the direction of messages."""
        row = record.edges.target_row
        return EdgeList(record.edges.edge_index[1 - row], record.edges.edge_index[row], record.constants)

    @staticmethod
    def of_graph(graph: Graph, *, reverse: bool = False) -> EdgeList:
        """A graph's own edges, or their reverse."""
        source, target = graph.edge_index.flip(0) if reverse else graph.edge_index
        return EdgeList(source, target, graph.edge_attributes)


def pair_edges(old: EdgeList, new: EdgeList, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions of common edges in the old and in the new graph, each ``[num_common]``, and of their other edges.

    Parallel edges are paired in their order.

    Example:
        >>> old = EdgeList(torch.tensor([0, 1]), torch.tensor([1, 2]), {})
        >>> new = EdgeList(torch.tensor([1, 2, 0]), torch.tensor([2, 0, 1]), {})
        >>> pair_edges(old, new, num_nodes=3)
        (tensor([0, 1]), tensor([2, 0]), tensor([], dtype=torch.int64), tensor([1]))
    """
    keys_old, order_old = (old.source * num_nodes + old.target).sort(stable=True)
    keys_new, order_new = (new.source * num_nodes + new.target).sort(stable=True)
    place = (torch.searchsorted(keys_new, keys_old) + rank(keys_old)).clamp(max=keys_new.numel())
    found = torch.cat([keys_new, keys_new.new_full((1,), -1)])[place] == keys_old
    added = torch.ones(keys_new.numel(), dtype=torch.bool)
    added[place[found]] = False
    return order_old[found], order_new[place[found]], order_old[~found], order_new[added]


def changed_targets(old: EdgeList | None, new: EdgeList, num_nodes: int) -> Tensor:
    """The nodes with different incoming edges or edge values; all nodes if these cannot be compared."""
    if old is None or old.values.keys() != new.values.keys():
        return torch.arange(num_nodes)
    before, after, gone, added = pair_edges(old, new, num_nodes)
    changed = torch.zeros(after.numel(), dtype=torch.bool)
    for name, values in old.values.items():
        changed |= differ(values[before], new.values[name][after])
    return torch.cat([old.target[gone], new.target[added], new.target[after[changed]]])


class ReachedNodes:
    """The nodes that a change to a graph reaches, level by level; at first those that are ``changed``, ``[num_nodes]``.

    Example:
        >>> path = EdgeList(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), {})
        >>> nodes = ReachedNodes(torch.tensor([True, False, False, False]))
        >>> [nodes.next_level({"path": (path, path)}).tolist() for _ in range(2)]
        [[0, 1], [0, 1, 2]]
    """

    def __init__(self, changed: Tensor) -> None:
        self._nodes = changed
        self._targets: dict[Any, Tensor] = {}  # shared by layers with the same records

    def next_level(self, used: Mapping[Any, tuple[EdgeList | None, EdgeList]]) -> Tensor:
        """The nodes that messages along the edges of a level, before and after, bring the change to, ``[count]``."""
        reached = self._nodes.clone()
        for key, (before, after) in used.items():
            reached[after.target[self._nodes[after.source]]] = True
            if key not in self._targets:
                self._targets[key] = changed_targets(before, after, reached.numel())
            reached[self._targets[key]] = True
        self._nodes = reached
        return reached.nonzero().squeeze(1)


def differ(before: Tensor, after: Tensor) -> Tensor:
    """Mask of the rows that differ, ``[num_rows]``."""
    after = after.to(before.device)
    if before.dtype == after.dtype and torch.equal(before, after):
        return torch.zeros(before.size(0), dtype=torch.bool)
    pieces = zip(torch.split(before, _MOST_COMPARED), torch.split(after, _MOST_COMPARED), strict=True)
    return torch.cat([as_matrix(one != other).any(1).cpu() for one, other in pieces])


def by_node(data: Any, name: str, value: Tensor) -> Tensor:
    """An attribute with its nodes or edges in the first dimension."""
    return value.movedim(data.__cat_dim__(name, value), 0)


def rank(values: Tensor) -> Tensor:
    """For each of some sorted values the number of equal ones before it."""
    return torch.arange(values.numel()) - torch.searchsorted(values, values)
