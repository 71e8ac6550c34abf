"""Batches of the baselines: plain subgraphs of joined parts (Cluster-GCN) and of sampled neighbours (GraphSAGE).

No history belongs to them: a model sees such a subgraph as if it were the whole graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import Group, cut_attributes, hand_over
from gnnautoscale.graph.graph import Graph
from gnnautoscale.graph.loader import HaloLoader, check_nodes

#: A fan-out that takes all neighbours.
ALL = -1


class Subgraphs:
    """Cuts plain subgraphs out of a graph.

    A subgraph looks like a batch of PyG's ``NeighborLoader``: the first ``batch_size`` rows of every node-level
    attribute belong to the nodes that were asked for, in their order; ``n_id`` and ``e_id`` name its nodes and edges
    in the whole graph.

    Args:
        data: The whole graph, or only its edges, ``[2, num_edges]``. All node- and edge-level tensors are cut,
            everything else is passed on as it is.
        graph: The same graph with its edges grouped, where that has been done already.
    """

    def __init__(self, data: Data | Tensor, graph: Graph | None = None) -> None:
        if isinstance(data, Tensor):
            data = Data(edge_index=data, num_nodes=int(data.max()) + 1 if data.numel() else 0)
        if not isinstance(data, Data):
            raise InputError(
                "subgraphs are cut out of a torch_geometric.data.Data, or out of an edge_index [2, num_edges]",
                got=type(data).__name__,
                fix="Pass one of these.",
            )
        self.data = data
        self.graph = Graph.of(data) if graph is None else graph
        _ = self.graph.incoming  # grouped here, once, so that workers do not each do it again

    @torch.inference_mode(False)  # batches may be kept for training
    def among(self, nodes: Tensor) -> Data:
        """The nodes with the edges between them.

        Args:
            nodes: Distinct node indices, ``[count]``.

        Example:
            >>> path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
            >>> Subgraphs(path).among(torch.tensor([2, 0, 1])).edge_index  # 0 -> 1 and 1 -> 2 in the path
            tensor([[2, 1],
                    [0, 2]])
        """
        nodes = self.checked(nodes)
        target, source, e_id = self.graph.incoming.into(nodes)
        source = self.graph.locate(nodes, source)
        inside = source >= 0
        return self._cut(nodes, nodes.numel(), e_id[inside], torch.stack([source[inside], target[inside]]))

    @torch.inference_mode(False)
    def around(self, nodes: Tensor, fan_out: Sequence[int], generator: torch.Generator | None = None) -> Data:
        """The nodes with neighbours drawn hop by hop: the ones with an edge into them, then those of these, and so on.

        Edges are drawn without replacement, into every node once: when it is met first. So no edge is there twice,
        and nodes that are met in the last hop have no edges into them. Where two nodes are joined by several edges,
        each of these counts as a neighbour.

        Args:
            nodes: Distinct node indices, ``[count]``.
            fan_out: How many neighbours are drawn for each node of a hop, -1 for all: first for ``nodes``, last for
                those furthest away, as PyG's ``NeighborLoader`` has it.
            generator: Where random numbers come from; PyTorch's global state if not given.

        Example:
            >>> star = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
            >>> Subgraphs(star).around(torch.tensor([0]), [2]).num_edges
            2
        """
        n_id = frontier = self.checked(nodes)
        edges: list[tuple[Tensor, Tensor, Tensor]] = []
        for count in check_fan_out(fan_out):
            target, source, e_id = self.graph.incoming.into(frontier)
            if count != ALL:
                drawn = draw_from_groups(target, count, generator)
                target, source, e_id = target[drawn], source[drawn], e_id[drawn]
            edges.append((source, n_id.numel() - frontier.numel() + target, e_id))
            frontier = torch.unique(source[self.graph.locate(n_id, source) < 0])
            n_id = torch.cat([n_id, frontier])
        source, target, e_id = (torch.cat(pieces) for pieces in zip(*edges, strict=True))
        return self._cut(n_id, nodes.numel(), e_id, torch.stack([self.graph.locate(n_id, source), target]))

    def checked(self, nodes: Tensor) -> Tensor:
        """Refuse what are not distinct nodes of the graph, ``[count]``; returns a copy in host memory."""
        nodes = check_nodes(nodes, self.graph.num_nodes)
        if torch.unique(nodes).numel() != nodes.numel():
            raise InputError(
                "a subgraph holds each node once", got="the same node twice", fix="Pass torch.unique(nodes)."
            )
        return nodes.clone()

    def _cut(self, n_id: Tensor, batch_size: int, e_id: Tensor, edge_index: Tensor) -> Data:
        subgraph = Data.from_dict(cut_attributes(self.data, n_id, e_id, edge_index))
        subgraph.num_nodes = n_id.numel()
        subgraph.n_id, subgraph.e_id, subgraph.batch_size = n_id, e_id, batch_size
        return subgraph


def whole_neighbourhood(graph: Subgraphs | Data | Tensor, nodes: Tensor, hops: int) -> Data:
    """All nodes that some nodes depend on through so many layers, and all edges on the way.

    This is what recursive sampling without a limit builds: as large as the graph after a few hops.

    Args:
        graph: The graph, or its edges ``[2, num_edges]``. A :class:`Subgraphs` groups the edges once for many calls.
        nodes: Distinct node indices, ``[count]``.
        hops: Number of hops, one for each message-passing layer.

    Returns:
        A subgraph whose first ``batch_size`` rows are ``nodes``; every edge into a node of fewer than ``hops`` hops
        away is in it.

    Example:
        >>> path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> found = whole_neighbourhood(path, torch.tensor([3]), hops=2)
        >>> found.n_id, found.e_id
        (tensor([3, 2, 1]), tensor([2, 1]))
    """
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 1:
        raise InputError("hops must be an integer from 1", got=repr(hops), fix="Pass the number of layers.")
    subgraphs = graph if isinstance(graph, Subgraphs) else Subgraphs(graph)
    return subgraphs.around(nodes, [ALL] * hops)


def draw_from_groups(group: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw some members of each group at random, without replacement.

    Args:
        group: The group of each member, ascending, ``[num_members]``.
        count: How many members are drawn of each group; smaller groups are taken whole.
        generator: Where random numbers come from.

    Returns:
        Whether each member was drawn, ``[num_members]``.

    Example:
        >>> draw_from_groups(torch.tensor([0, 0, 0, 1]), 3)
        tensor([True, True, True, True])
        >>> int(draw_from_groups(torch.tensor([0, 0, 0, 1]), 2).sum())
        3
    """
    # Shuffled inside the groups: the first ones of each are drawn.
    order = ((group << 32) + torch.randint(2**32, group.shape, generator=generator)).argsort()
    size = torch.bincount(group)
    rank = torch.arange(group.numel()) - (size.cumsum(0) - size)[group]
    drawn = torch.zeros(group.shape, dtype=torch.bool)
    drawn[order[rank < count]] = True
    return drawn


def check_fan_out(fan_out: Any) -> list[int]:
    """Refuse what says nothing about how many neighbours to draw.

    Example:
        >>> check_fan_out((10, -1))
        [10, -1]
    """
    numbers = list(fan_out) if isinstance(fan_out, Sequence) and not isinstance(fan_out, str) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not numbers or not whole or any(number < 1 and number != ALL for number in numbers):
        raise InputError(
            "fan_out must be a list of integers, each at least 1, or -1 for all neighbours",
            got=repr(fan_out),
            fix="Pass one number per layer, such as [10, 10].",
        )
    return numbers


class ClusterLoader:
    """Cluster-GCN's batches: some parts joined, with the edges between their nodes, and no halo.

    Parts, and how they are drawn into batches, are those of a :class:`HaloLoader` with the same arguments. Batches
    that come back unchanged every epoch are cut once and kept in host memory.

    Args:
        data: The whole graph.
        num_parts: Number of parts to cut into. Not needed when ``partition`` gives the labels.
        partition: How to cut: ``"metis"``, ``"random"``, or the part of each node as integers ``[num_nodes]``.
        batch_size: Number of parts in a batch.
        shuffle: Draw parts into batches at random, anew for each epoch.
        seed: Makes partition and order reproducible.
        num_workers: Number of processes that prepare batches.
        cache_dir: Where METIS partitions are kept between runs.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> data = KarateClub()[0]
        >>> batches = list(ClusterLoader(data, num_parts=4))
        >>> sum(batch.num_nodes for batch in batches)
        34
        >>> sum(batch.num_edges for batch in batches) < data.num_edges
        True
    """

    #: What batches are, in words.
    kind = "joined parts with the edges inside of a batch only"

    def __init__(
        self,
        data: Data,
        num_parts: int | None = None,
        *,
        partition: Literal["metis", "random"] | Tensor = "metis",
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        self._parts = HaloLoader(
            data,
            num_parts,
            partition=partition,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
        )
        self._subgraphs = Subgraphs(data, self._parts.graph)
        self._worker_seeds = torch.Generator().manual_seed(seed)
        self._kept: dict[Group, tuple[Data, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Data]:
        groups = self._parts.draw()
        # One that somebody wrote into is cut again.
        kept = {group: batch for group, (batch, versions) in self._kept.items() if versions == _versions(batch)}
        jobs = [self._parts.nodes_of(group) for group in groups if group not in kept]
        made = _prepared(self._subgraphs.among, jobs, self._parts.num_workers, self._worker_seeds)
        for group in groups:
            batch = kept[group] if group in kept else next(made)
            if self._parts.is_fixed:
                self._kept[group] = batch, _versions(batch)
            yield copy.copy(batch)


class SampleLoader:
    """GraphSAGE's batches: nodes drawn at random, anew for each epoch, with neighbours sampled around them.

    Args:
        data: The whole graph.
        nodes: The nodes to draw into batches, each once, ``[count]``.
        fan_out: How many neighbours are drawn, see :meth:`Subgraphs.around`.
        num_batches: Number of batches of an epoch; as many as nodes if there are fewer. Their sizes differ by at most
            one.
        seed: Makes batches and neighbours reproducible, whatever the state of the global generators.
        num_workers: Number of processes that prepare batches.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> loader = SampleLoader(KarateClub()[0], torch.arange(34), [2, 2], num_batches=3)
        >>> [batch.batch_size for batch in loader]
        [12, 11, 11]
    """

    #: What batches are, in words.
    kind = "neighbourhoods that are sampled anew every epoch"

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
            raise InputError(
                "num_batches must be an integer of at least 1 and num_workers at least 0",
                got=f"num_batches={num_batches}, num_workers={num_workers}",
                fix="num_batches counts the batches of an epoch.",
            )
        subgraphs = Subgraphs(data)
        self._make = partial(_sampled, subgraphs, check_fan_out(fan_out))
        self._nodes = subgraphs.checked(nodes)
        self._num_batches = min(num_batches, self._nodes.numel())
        self._num_workers = num_workers
        self._generator = torch.Generator().manual_seed(seed)
        self._worker_seeds = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Data]:
        order = torch.randperm(self._nodes.numel(), generator=self._generator)
        # Each batch has a seed of its own, so that it does not matter which process draws its neighbours.
        seeds = torch.randint(2**62, (len(self),), generator=self._generator).tolist()
        jobs = zip(self._nodes[order].tensor_split(len(self)), seeds, strict=True) if len(self) else ()
        return _prepared(self._make, jobs, self._num_workers, self._worker_seeds)


def _sampled(subgraphs: Subgraphs, fan_out: list[int], job: tuple[Tensor, int]) -> Data:
    nodes, seed = job
    return subgraphs.around(nodes, fan_out, torch.Generator().manual_seed(seed))


def _versions(batch: Data) -> list[int]:
    return [value._version for _, value in batch if isinstance(value, Tensor)]


class _Jobs(Dataset[Data]):
    """Makes batches, in the main process or in workers."""

    def __init__(self, make: Callable[[Any], Data]) -> None:
        self._make = make

    def __getitem__(self, job: Any) -> Data:
        return self._make(job)


def _prepared(
    make: Callable[[Any], Data], jobs: Iterable[Any], num_workers: int, worker_seeds: torch.Generator
) -> Iterator[Data]:
    yield from DataLoader(
        _Jobs(make),
        sampler=list(jobs),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=hand_over,
        generator=worker_seeds,
    )
