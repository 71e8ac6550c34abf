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
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.graph.assemble import build_each, write_counts
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.graph.partitioning import Partitioner
from gnnautoscale.graph.subgraphs import Subgraphs, check_fan_out
from gnnautoscale.graph.typed_subgraphs import TypedSubgraphs


class ClusterLoader:
    """Cluster-GCN's batches: some parts joined, with the edges between their nodes, and no halo.

    It splits the graph, draws batches and follows changes of ``data`` as a :class:`HaloLoader` with the same arguments
    does. Batches that recur every epoch are built once and kept in host memory.

    Args:
        data: The whole graph, plain or heterogeneous.
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

    @checked()
    def __init__(
        self,
        data: Data | HeteroData,
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
        self._subgraphs = _subgraphs(data, self.parts.graph)
        self._worker_seeds = torch.Generator().manual_seed(seed)
        self._kept: dict[PartGroup, tuple[Data, list[int]]] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Data]:
        graph = self.parts.follow()
        if graph is not self._subgraphs.graph:
            self._subgraphs, self._kept = _subgraphs(self.parts.data, graph), {}
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
        nodes: The nodes to draw into batches, each once, ``[count]``; of a heterogeneous graph by their numbers in the
            joined graph (:attr:`TypedGraph.first`).
        fan_out: How many neighbours to sample, see :meth:`Subgraphs.sample`; of a heterogeneous graph for each type of
            edges.
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

    @checked(num_batches={"least": 1}, num_workers={"least": 0, "below": 1025}, seed={"least": 0, "below": 2**32})
    def __init__(
        self,
        data: Data | HeteroData,
        nodes: Tensor,
        fan_out: Sequence[int],
        num_batches: int,
        *,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        self._data, self._subgraphs, self._fan_out = data, _subgraphs(data), check_fan_out(fan_out)
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
            self._subgraphs = _subgraphs(self._data, graph)
        # Each batch has its own seed, so it does not matter which process samples its neighbours.
        seeds = torch.randint(2**62, (len(groups),), generator=self._generator).tolist()
        build = partial(_sample, self._subgraphs, self._fan_out)
        for batch in build_each(build, zip(groups, seeds, strict=True), self._num_workers, self._worker_seeds):
            graph.check_unwritten(labels=True)
            yield batch


def _subgraphs(data: Data | HeteroData, graph: Any = None) -> Subgraphs | TypedSubgraphs:
    return (TypedSubgraphs if isinstance(data, HeteroData) else Subgraphs)(data, graph)


def _sample(subgraphs: Subgraphs | TypedSubgraphs, fan_out: list[int], job: tuple[Tensor, int]) -> Data:
    nodes, seed = job
    return subgraphs.sample(nodes, fan_out, torch.Generator().manual_seed(seed))
