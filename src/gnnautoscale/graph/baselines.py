"""Batches of the baselines, without histories: joined parts (Cluster-GCN) and sampled neighbours (GraphSAGE).

A model treats such a subgraph as if it were the whole graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import for_later
from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import build_each, select_attributes, write_counts
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.graph import Graph, check_distinct_nodes
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.graph.partitioning import Partitioner

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

    def __init__(self, data: Data | Tensor, graph: Graph | None = None) -> None:
        if isinstance(data, Tensor):
            data = Data(edge_index=data, num_nodes=int(data.max()) + 1 if data.numel() else 0)
        if not isinstance(data, Data):
            rule = "subgraphs need a torch_geometric.data.Data, or an edge_index [2, num_edges]"
            raise InputError(rule, got=type(data).__name__, fix="Pass one of these.")
        self.graph = Graph.of(data) if graph is None else graph
        _ = self.graph.incoming  # group the edges once here, not once per worker

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

    @for_later
    def sample(self, nodes: Tensor, fan_out: Sequence[int], generator: torch.Generator | None = None) -> Data:
        """The given nodes with neighbours sampled hop by hop, against the direction of the edges.

        Each node gets its edges when it is first reached, drawn without replacement, so no edge occurs twice, and
        nodes of the last hop have no edges into them. Parallel edges count as separate neighbours.

        Args:
            nodes: Distinct node indices, ``[count]``.
            fan_out: Number of neighbours per node, -1 for all: first for ``nodes``, last for the nodes furthest away,
                as in PyG's ``NeighborLoader``.
            generator: Source of random numbers; PyTorch's global one by default.

        Example:
            >>> star = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
            >>> Subgraphs(star).sample(torch.tensor([0]), [2]).num_edges
            2
        """
        n_id = frontier = self.check(nodes)
        edges: list[tuple[Tensor, Tensor, Tensor]] = []
        for count in check_fan_out(fan_out):
            target, source, e_id = self.graph.incoming.into(frontier)
            if count != ALL:
                drawn = draw_from_groups(target, count, generator)
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
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError("hops must be an integer of at least 1", got=repr(hops), fix="Pass the number of layers.")
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


class ClusterLoader:
    """Cluster-GCN's batches: some parts joined, with the edges between their nodes, and no halo.

    It splits the graph, draws batches and follows changes of ``data`` as a :class:`HaloLoader` with the same arguments
    does. Batches that recur every epoch are built once and kept in host memory.

    Args:
        data: The whole graph.
        num_parts: Number of parts to cut into. Not needed when ``partition`` gives the labels.
        partition: How to cut: ``"metis"``, ``"kaminpar"`` or ``"random"``, as :func:`gnnautoscale.partition` does, or
            the part of each node as integers ``[num_nodes]``.
        balance: Let each part have about as many training nodes as any other.
        batch_size: Number of parts in a batch.
        shuffle: Draw parts into batches at random, anew for each epoch.
        seed: Makes partition and order reproducible.
        num_workers: Number of processes that build batches.
        cache_dir: Where partitions are kept between runs.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> data = KarateClub()[0]
        >>> batches = list(ClusterLoader(data, num_parts=4))
        >>> sum(batch.num_nodes for batch in batches)
        34
        >>> sum(batch.num_edges for batch in batches) < data.num_edges
        True
    """

    #: Describes the batches to people.
    kind = "joined parts, with only the edges inside a batch"

    def __init__(
        self,
        data: Data,
        num_parts: int | None = None,
        *,
        partition: Partitioner | Tensor = "metis",
        balance: bool = False,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        #: Cuts the graph and draws parts.
        self.parts = HaloLoader(
            data,
            num_parts,
            partition=partition,
            balance=balance,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
        )
        self._subgraphs = Subgraphs(data, self.parts.graph)
        self._worker_seeds = torch.Generator().manual_seed(seed)
        self._kept: dict[PartGroup, tuple[Data, list[int]]] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Data]:
        graph = self.parts.follow()
        if graph is not self._subgraphs.graph:
            self._subgraphs, self._kept = Subgraphs(self.parts.data, graph), {}
        groups, keep_in = self.parts.draw(), self._kept
        # Batches that somebody wrote into are built again.
        kept = {group: batch for group, (batch, before) in keep_in.items() if before == write_counts(batch)}
        jobs = [self.parts.nodes_of(group) for group in groups if group not in kept]
        built = build_each(self._subgraphs.induced, jobs, self.parts.num_workers, self._worker_seeds)
        for group in groups:
            if group in kept:
                batch = kept[group]
            else:
                batch = next(built)
                graph.check_unwritten(labels=True)
            if self.parts.is_fixed:
                keep_in[group] = batch, write_counts(batch)
            yield copy.copy(batch)


class SampleLoader:
    """GraphSAGE's batches: nodes drawn at random in each epoch, with sampled neighbours.

    Args:
        data: The whole graph; changes are followed as by a :class:`HaloLoader`.
        nodes: The nodes to draw into batches, each once, ``[count]``.
        fan_out: How many neighbours to sample, see :meth:`Subgraphs.sample`.
        num_batches: Number of batches per epoch, at most one per node. Their sizes differ by at most one.
        seed: Makes batches and neighbours reproducible, whatever the global random state.
        num_workers: Number of processes that build batches.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> loader = SampleLoader(KarateClub()[0], torch.arange(34), [2, 2], num_batches=3)
        >>> [batch.batch_size for batch in loader]
        [12, 11, 11]
    """

    #: Describes the batches to people.
    kind = "neighbourhoods sampled anew every epoch"

    def __init__(
        self,
        data: Data,
        nodes: Tensor,
        fan_out: Sequence[int],
        num_batches: int,
        *,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        counts = isinstance(num_batches, int) and isinstance(num_workers, int)
        if not counts or num_batches < 1 or num_workers < 0:
            rule = "num_batches must be an integer of at least 1 and num_workers at least 0"
            got = f"num_batches={num_batches}, num_workers={num_workers}"
            raise InputError(rule, got=got, fix="num_batches is the number of batches per epoch.")
        self._data, self._subgraphs, self._fan_out = data, Subgraphs(data), check_fan_out(fan_out)
        self._nodes = self._subgraphs.check(nodes)
        self._num_batches = min(num_batches, self._nodes.numel())
        self._num_workers = num_workers
        self._generator = torch.Generator().manual_seed(seed)
        self._worker_seeds = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Data]:
        order = torch.randperm(self._nodes.numel(), generator=self._generator)
        return self.around(self._nodes[order].tensor_split(len(self)) if len(self) else ())

    def around(self, groups: Sequence[Tensor]) -> Iterator[Data]:
        """A batch around each of some groups of distinct nodes, ``[count]`` each."""
        graph = self._subgraphs.graph.follow(self._data)
        if graph is not self._subgraphs.graph:
            self._subgraphs = Subgraphs(self._data, graph)
        # Each batch has its own seed, so it does not matter which process samples its neighbours.
        seeds = torch.randint(2**62, (len(groups),), generator=self._generator).tolist()
        build = partial(_sample, self._subgraphs, self._fan_out)
        for batch in build_each(build, zip(groups, seeds, strict=True), self._num_workers, self._worker_seeds):
            graph.check_unwritten(labels=True)
            yield batch


def _sample(subgraphs: Subgraphs, fan_out: list[int], job: tuple[Tensor, int]) -> Data:
    nodes, seed = job
    return subgraphs.sample(nodes, fan_out, torch.Generator().manual_seed(seed))
