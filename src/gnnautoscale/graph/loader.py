"""Batches of parts with their halo, in the conventions of PyG's loaders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import Assembly, Group, Pieces, hand_over
from gnnautoscale.graph.batch import BatchInfo, BatchTensor, PartOrder
from gnnautoscale.graph.graph import Graph
from gnnautoscale.graph.partitioning import check_labels, connectivity, partition


class HaloLoader:
    r"""Iterates over a graph in batches of whole parts, each with its halo.

    The graph is cut into parts. A batch is ``batch_size`` parts together with every node that has an edge into
    them, the halo. Batches look like those of PyG's ``NeighborLoader``: the first ``batch.batch_size`` rows of
    every node-level attribute belong to the batch's nodes, the rest to the halo; ``batch.n_id`` and ``batch.e_id``
    name nodes and edges in the whole graph. Edges point into the batch's nodes only, and none of those is missing.

    Args:
        data: The whole graph. All its node- and edge-level tensors are cut to the batch, everything else is
            passed on as it is.
        num_parts: Number of parts to cut into. Not needed when ``parts`` are given as labels.
        parts: ``"metis"``, ``"random"``, or the part of each node as integers ``[num_nodes]``.
        batch_size: Number of parts in a batch.
        shuffle: Draw parts into batches at random, anew for each epoch.
        drawings: Draw so many times only, and then take these drawings again at random: their batches come back, so
            that they can be kept, and their steps captured on a GPU. ``None`` draws for every epoch.
        seed: Makes partition and order reproducible.
        num_workers: Number of processes that prepare batches.
        bidirectional: Take nodes that edges from the batch point to into the halo as well. Layers that pass
            messages against the edges of a directed graph need it.
        keep: Whether batches that come back unchanged (one part each, no shuffling, all parts at once, or few
            drawings) are cut once and kept in host memory: changes of ``data`` after that are not seen. If not, they
            are cut anew each time, so that memory-mapped features may be larger than the memory.
        cache_dir: Where METIS partitions are kept between runs.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> loader = HaloLoader(KarateClub()[0], num_parts=4, batch_size=2, shuffle=True)
        >>> sum(batch.batch_size for batch in loader)
        34
    """

    def __init__(
        self,
        data: Data,
        num_parts: int | None = None,
        *,
        parts: Literal["metis", "random"] | Tensor = "metis",
        batch_size: int = 1,
        shuffle: bool = False,
        drawings: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        bidirectional: bool = False,
        keep: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        if not isinstance(data, Data):
            raise InputError(
                "HaloLoader takes one graph as torch_geometric.data.Data",
                got=type(data).__name__,
                fix="Convert a heterogeneous graph with to_homogeneous(), join several with Batch.from_data_list.",
            )
        counts = isinstance(batch_size, int) and isinstance(num_workers, int)
        if not counts or batch_size < 1 or num_workers < 0:
            raise InputError(
                "batch_size must be an integer of at least 1 and num_workers at least 0",
                got=f"batch_size={batch_size}, num_workers={num_workers}",
                fix="batch_size counts parts, not nodes.",
            )
        if drawings is not None and (not isinstance(drawings, int) or drawings < 1 or not shuffle):
            raise InputError(
                "drawings must be an integer of at least 1, and needs shuffle=True",
                got=f"drawings={drawings}, shuffle={shuffle}",
                fix="Leave drawings out to draw for every epoch.",
            )
        self.data = data
        self.graph = Graph.of(data)
        self.labels = _labels(self.graph, num_parts, parts, seed, cache_dir)
        self.num_parts = int(self.labels.max()) + 1
        if batch_size > self.num_parts:
            raise InputError(
                f"batch_size must be at most the number of parts, {self.num_parts}",
                got=f"{batch_size}",
                fix="Lower batch_size, or cut the graph into more parts.",
            )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drawings = drawings
        self.num_workers = num_workers
        self.keep = keep
        self.bidirectional = bidirectional
        self.seed = seed
        order = self.labels.argsort(stable=True)
        members = list(torch.split(order, torch.bincount(self.labels).tolist()))
        self._assembly = Assembly(data, self.graph, members, bidirectional)
        #: All nodes part by part, the order in which histories keep their rows.
        self.part_order = PartOrder.of(order)
        self._generator = torch.Generator().manual_seed(seed)
        # Workers draw their seeds from here and not from the user's random state.
        self._worker_seeds = torch.Generator().manual_seed(seed)
        self._ready: dict[Group, ReadyBatch] = {}
        self._current: list[Group] = []
        self._left_off = 0
        self._drawn_ahead: list[Group] | None = None
        self._drawn: list[list[Group]] = []

    def __len__(self) -> int:
        return -(-self.num_parts // self.batch_size)

    def __iter__(self) -> Iterator[Data]:
        return handed_out(self.ready())

    def ready(self) -> Iterator[ReadyBatch]:
        """The batches of an epoch as the loader keeps them: what ``iter(loader)`` hands out copies of."""
        if self._left_off:  # in the middle of an epoch
            first, self._left_off = self._left_off, 0
        else:
            first, self._current, self._drawn_ahead = 0, self._drawn_ahead or self.draw(), None
        return self._batches(self._current[first:], keep=self.is_fixed)

    def first_of_next_epoch(self) -> ReadyBatch | None:
        """The batch that the next epoch will begin with, if it is known and at hand."""
        self._drawn_ahead = self._drawn_ahead or self.draw()
        return self._ready.get(self._drawn_ahead[0])

    def state_dict(self, done: int = 0) -> dict[str, Any]:
        """What is needed to go on with the same batches, given how many of the current epoch are done; 0 between two.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=4, shuffle=True)
            >>> state = loader.state_dict()
            >>> order = [batch.n_id[0] for batch in loader]
            >>> loader.load_state_dict(state)
            >>> order == [batch.n_id[0] for batch in loader]
            True
        """
        return {
            "done": done,
            "current": _flat(self._current if done else []),
            "ahead": _flat(self._drawn_ahead or []),
            "drawn": [_flat(groups) for groups in self._drawn],
            "generator": self._generator.get_state(),
            "worker_seeds": self._worker_seeds.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the batches that would have come next when the state was taken."""
        self._left_off = state["done"]
        self._current = _groups(state["current"])
        self._drawn_ahead = _groups(state["ahead"]) or None
        self._drawn = [_groups(flat) for flat in state["drawn"]]
        self._generator.set_state(state["generator"])
        self._worker_seeds.set_state(state["worker_seeds"])

    def draw(self) -> list[Group]:
        """Draw the parts of an epoch into batches: the parts of each batch, in order."""
        if not self.shuffle:
            return self._grouped(torch.arange(self.num_parts))
        if len(self._drawn) == self.drawings:
            known = self._drawn[int(torch.randint(self.drawings, (), generator=self._generator))]
            return [known[place] for place in torch.randperm(len(known), generator=self._generator).tolist()]
        groups = self._grouped(torch.randperm(self.num_parts, generator=self._generator))
        if self.drawings is not None:
            self._drawn.append(groups)
        return groups

    def _grouped(self, order: Tensor) -> list[Group]:
        parts, size = order.tolist(), self.batch_size
        # Ascending inside a batch, so that the same parts give the same batch however they were drawn.
        return [tuple(sorted(parts[first : first + size])) for first in range(0, len(parts), size)]

    def nodes_of(self, parts: Group) -> Tensor:
        """The nodes of some parts, part by part, ``[num_nodes_in_parts]``."""
        return self._assembly.nodes(parts)

    @property
    def is_fixed(self) -> bool:
        """Whether the same batches come back, in whatever order."""
        same = not self.shuffle or self.drawings is not None or self.batch_size in (1, self.num_parts)
        return same and self.keep

    @property
    def num_batches(self) -> int:
        """How many batches come back, at most; those of one epoch if none do."""
        few = self.drawings is None or self.batch_size in (1, self.num_parts)
        return len(self) * (1 if few else self.drawings or 1)

    def in_order(self) -> Iterator[Data]:
        """The batches of a sweep: every part once, always in the same order and grouping.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=4, batch_size=2, shuffle=True)
            >>> len(list(loader.in_order()))
            2
        """
        return handed_out(self._batches(self._grouped(torch.arange(self.num_parts)), keep=self.keep))

    def _batches(self, groups: list[Group], *, keep: bool) -> Iterator[ReadyBatch]:
        # Decided now: another iteration may add to what is ready while this one goes on.
        ready = {group: self._ready[group] for group in groups if group in self._ready}
        fetched = self._fetched([group for group in groups if group not in ready])
        for group in groups:
            if group not in ready:
                batch = self._wrap(next(fetched))
            elif ready[group].intact():
                batch = ready[group]
            else:
                batch = self._wrap(self._assembly[group])
            if keep:
                self._ready[group] = batch
            yield batch

    def _fetched(self, groups: list[Group]) -> Iterator[Pieces]:
        yield from DataLoader(
            self._assembly,
            sampler=groups,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=hand_over,
            generator=self._worker_seeds,
        )

    @cached_property
    def connectivity(self) -> float:
        """Halo nodes per batch node, the mean over the parts (the paper's inter-/intra-connectivity ratio)."""
        return float(connectivity(self.graph.edge_index, self.labels).mean())

    def around(self, nodes: Tensor) -> Data:
        """The batch of the given nodes, in their order, and their halo.

        Args:
            nodes: Distinct node indices, ``[num_nodes_asked_for]``.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=2)
            >>> loader.around(torch.tensor([3, 0])).n_id[:2]
            tensor([3, 0])
        """
        nodes = check_nodes(nodes, self.graph.num_nodes)
        if torch.unique(nodes).numel() != nodes.numel():
            raise InputError("a batch holds each node once", got="the same node twice", fix="Pass torch.unique(nodes).")
        single = Assembly(self.data, self.graph, [nodes], self._assembly.bidirectional)
        return self._wrap(single[(0,)]).tagged_copy()

    def over(self, data: Data, parts: Tensor) -> HaloLoader:
        """A loader of another graph with the settings of this one.

        Args:
            data: The other graph.
            parts: The part of each of its nodes, ``[num_nodes]``.
        """
        return HaloLoader(
            data,
            parts=parts,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            drawings=self.drawings,
            seed=self.seed,
            num_workers=self.num_workers,
            bidirectional=self.bidirectional,
            keep=self.keep,
        )

    @torch.inference_mode(False)
    def _wrap(self, pieces: Pieces) -> ReadyBatch:
        batch = Data.from_dict(pieces.attributes)
        batch.num_nodes = pieces.n_id.numel()
        # Copies, since a user may write into the batch's.
        batch.n_id, batch.e_id, batch.batch_size = pieces.n_id.clone(), pieces.e_id.clone(), pieces.batch_size
        return ReadyBatch(batch, BatchInfo(self.graph, pieces.n_id, pieces.batch_size, pieces.e_id, self.part_order))


class ReadyBatch:
    """A batch that may be yielded many times."""

    def __init__(self, batch: Data, info: BatchInfo) -> None:
        self._batch, self.info = batch, info
        self._versions = self._current_versions()

    def intact(self) -> bool:
        """Whether nobody wrote into its tensors."""
        return self._versions == self._current_versions()

    def tagged_copy(self) -> Data:
        """A copy that the user may move and change without touching this one; tensors are shared."""
        batch = copy.copy(self._batch)
        for name in ("edge_index", "n_id", *self.info.graph.edge_attributes):
            batch[name] = BatchTensor.tag(batch[name], self.info, name)
        return batch

    def _current_versions(self) -> list[int]:
        return [value._version for _, value in self._batch if isinstance(value, Tensor)]


def handed_out(batches: Iterator[ReadyBatch]) -> Iterator[Data]:
    """Copies of the batches; each knows the one that follows while it is used."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        with batch.info.followed_by(None if following is None else following.info):
            yield batch.tagged_copy()
        batch = following


def _flat(groups: list[Group]) -> tuple[Tensor, Tensor]:
    """The parts of some batches one after another, and how many each batch has."""
    parts = torch.tensor([part for group in groups for part in group], dtype=torch.long)
    return parts, torch.tensor([len(group) for group in groups], dtype=torch.long)


def _groups(flat: tuple[Tensor, Tensor]) -> list[Group]:
    parts, sizes = flat
    return [tuple(group.tolist()) for group in torch.split(parts, sizes.tolist())] if sizes.numel() else []


def check_nodes(nodes: Tensor, num_nodes: int) -> Tensor:
    """Refuse what is not a list of node indices; returns it in host memory."""
    if not isinstance(nodes, Tensor) or nodes.dtype != torch.long or nodes.dim() != 1:
        got = f"{nodes.dtype} {tuple(nodes.shape)}" if isinstance(nodes, Tensor) else type(nodes).__name__
        raise InputError(
            "nodes must be a tensor of node indices, int64 and one-dimensional", got=got, fix="Use nodes.long()."
        )
    if nodes.numel() and (int(nodes.min()) < 0 or int(nodes.max()) >= num_nodes):
        raise InputError(
            f"nodes must hold indices from 0 to {num_nodes - 1}",
            got=f"values from {int(nodes.min())} to {int(nodes.max())}",
            fix="Check the node numbering.",
        )
    return nodes.cpu()


def _labels(graph: Graph, num_parts: int | None, parts: str | Tensor, seed: int, cache_dir: str | None) -> Tensor:
    if isinstance(parts, Tensor):
        labels = check_labels(parts, graph.num_nodes)
        if num_parts is not None and num_parts != int(labels.max()) + 1:
            raise InputError(
                f"num_parts must match the given labels, which name {int(labels.max()) + 1} parts",
                got=f"num_parts={num_parts}",
                fix="Leave num_parts out.",
            )
        return labels
    if num_parts is None:
        raise InputError(
            "HaloLoader needs the number of parts", got="num_parts=None", fix="Pass num_parts, or the labels as parts."
        )
    if parts not in ("metis", "random"):
        raise InputError(
            "parts must be 'metis', 'random' or a tensor of labels", got=repr(parts), fix="Choose one of these."
        )
    method: Literal["metis", "random"] = "metis" if parts == "metis" else "random"
    return partition(
        graph.edge_index,
        graph.num_nodes,
        num_parts,
        method=method,
        edge_weight=None,
        seed=seed,
        cache_dir=cache_dir,
    )
