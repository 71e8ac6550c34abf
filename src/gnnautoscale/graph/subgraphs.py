"""Subgraphs of a graph: induced by nodes, or with sampled neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked, for_later
from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import select_attributes
from gnnautoscale.graph.graph import Graph, check_distinct_nodes

#: The fan-out that takes all neighbours.
ALL = -1


class Subgraphs:
    """Takes subgraphs out of a graph.

    A subgraph looks like a batch of PyG's ``NeighborLoader``: the first ``batch_size`` rows of every node-level
    attribute belong to the requested nodes, in their order; ``n_id`` and ``e_id`` are indices into the whole graph.

    Args:
        data: The whole graph, or only its edges, ``[2, num_edges]``. A subgraph gets its rows of all node- and
            edge-level tensors, and everything else as it is. Changes from now on are not seen.
        graph: The same graph with its edges grouped, if it exists already.
    """

    @checked()
    def __init__(self, data: Data | Tensor, graph: Graph | None = None) -> None:
        if isinstance(data, Tensor):
            data = Data(edge_index=data, num_nodes=int(data.max()) + 1 if data.numel() else 0)
        self.graph = Graph.of(data) if graph is None else graph
        _ = self.graph.incoming  # group the edges once here, not once per worker

    @checked()
    @for_later
    def induced(self, nodes: Tensor) -> Data:
        """The given nodes with all edges between them.

        Args:
            nodes: Distinct node indices, ``[count]``.

        Example:
            >>> path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
            >>> Subgraphs(path).induced(torch.tensor([2, 0, 1])).edge_index  # 0 -> 1 and 1 -> 2 in the path
            tensor([[2, 1],
                    [0, 2]])
        """
        nodes = self.check(nodes)
        target, source, e_id = self.graph.incoming.into(nodes)
        source = self.graph.locate(nodes, source)
        inside = source >= 0
        edge_index = torch.stack([source[inside], target[inside]])
        return select_attributes(self.graph.data, nodes, nodes.numel(), e_id[inside], edge_index)

    @checked(kinds={"dims": 1, "integers": True})
    @for_later
    def sample(
        self,
        nodes: Tensor,
        fan_out: Sequence[int],
        generator: torch.Generator | None = None,
        *,
        kinds: Tensor | None = None,
    ) -> Data:
        """The given nodes with neighbours sampled hop by hop, against the direction of the edges.

        Each node gets its edges when it is first reached, drawn without replacement, so no edge occurs twice, and
        nodes of the last hop have no edges into them. Parallel edges count as separate neighbours.

        Args:
            nodes: Distinct node indices, ``[count]``.
            fan_out: Number of neighbours per node, -1 for all: first for ``nodes``, last for the nodes furthest away,
                as in PyG's ``NeighborLoader``.
            generator: Source of random numbers; PyTorch's global one by default.
            kinds: The kind of each edge, ``[num_edges]``, ascending: then ``fan_out`` counts neighbours of each kind.

        Example:
            >>> star = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
            >>> Subgraphs(star).sample(torch.tensor([0]), [2]).num_edges
            2
        """
        n_id = frontier = self.check(nodes)
        if kinds is not None and kinds.numel() != self.graph.edge_index.size(1):
            got, fix = f"{kinds.numel()} for {self.graph.edge_index.size(1)} edges", "Give each edge one."
            raise InputError("kinds must hold one for each edge", got=got, fix=fix)
        edges: list[tuple[Tensor, Tensor, Tensor]] = []
        for count in check_fan_out(fan_out):
            target, source, e_id = self.graph.incoming.into(frontier)
            if count != ALL:
                group = target
                if kinds is not None:
                    group = target * (int(kinds.max()) + 1) + kinds[e_id]
                    order = group.argsort(stable=True)
                    group, target, source, e_id = group[order], target[order], source[order], e_id[order]
                drawn = draw_from_groups(group, count, generator)
                target, source, e_id = target[drawn], source[drawn], e_id[drawn]
            edges.append((source, n_id.numel() - frontier.numel() + target, e_id))
            frontier = torch.unique(source[self.graph.locate(n_id, source) < 0])
            n_id = torch.cat([n_id, frontier])
        source, target, e_id = (torch.cat(hops) for hops in zip(*edges, strict=True))
        edge_index = torch.stack([self.graph.locate(n_id, source), target])
        return select_attributes(self.graph.data, n_id, nodes.numel(), e_id, edge_index)

    def check(self, nodes: Tensor) -> Tensor:
        """Refuse anything but distinct nodes of the graph, ``[count]``; returns a copy in host memory."""
        return check_distinct_nodes(nodes, self.graph.num_nodes).clone()


@checked(hops={"least": 1, "fix": "Pass the number of layers."})
def whole_neighbourhood(graph: Subgraphs | Data | Tensor, nodes: Tensor, hops: int) -> Data:
    """All nodes and edges that the given nodes depend on through ``hops`` layers.

    Recursive sampling without a limit builds this: after a few hops, it is as large as the graph.

    Args:
        graph: The graph, or its edges ``[2, num_edges]``. A :class:`Subgraphs` groups the edges once for many calls.
        nodes: Distinct node indices, ``[count]``.
        hops: Number of hops, one per message-passing layer.

    Returns:
        A subgraph whose first ``batch_size`` rows are ``nodes``, with every edge into a node less than ``hops`` hops
        away.

    Example:
        >>> path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> found = whole_neighbourhood(path, torch.tensor([3]), hops=2)
        >>> found.n_id, found.e_id
        (tensor([3, 2, 1]), tensor([2, 1]))
    """
    subgraphs = graph if isinstance(graph, Subgraphs) else Subgraphs(graph)
    return subgraphs.sample(nodes, [ALL] * hops)


def draw_from_groups(group: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw up to ``count`` members of each group at random, without replacement.

    Takes the group of each member, ascending, and returns whether the member was drawn, both ``[num_members]``.
    """
    # Shuffle within each group, then take its first members.
    order = ((group << 32) + torch.randint(2**32, group.shape, generator=generator)).argsort()
    size = torch.bincount(group)
    rank = torch.arange(group.numel()) - (size.cumsum(0) - size)[group]
    drawn = torch.zeros(group.shape, dtype=torch.bool)
    drawn[order[rank < count]] = True
    return drawn


def check_fan_out(fan_out: Any) -> list[int]:
    """Refuse anything but a list of neighbour counts, and return it as a list."""
    numbers = list(fan_out) if isinstance(fan_out, Sequence) and not isinstance(fan_out, str) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not numbers or not whole or any(number < 1 and number != ALL for number in numbers):
        rule = "fan_out must be a list of integers, each at least 1, or -1 for all neighbours"
        raise InputError(rule, got=repr(fan_out), fix="Pass one number per layer, such as [10, 10].")
    return numbers
