"""Batches for link prediction by neighbour sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.graph import SampleLoader
from gnnautoscale.tasks.pairs import PAIR_NAMES, Pairs
from gnnautoscale.tasks.ranking import KnownEdges


class LinkSampleLoader(SampleLoader):
    """Pairs drawn at random in each epoch, around whose ends neighbours are sampled, as by ``LinkNeighborLoader``.

    A batch has ``links``, ``[num_pairs, 4]``: source, target, label and relation (0 if there are none), with numbers of
    nodes of the whole graph. Its own nodes are the ends of these.

    Args:
        data: The graph that messages pass through.
        pairs: The pairs to draw into batches, each once.
        known: Edges, which are not drawn as negatives.
        negatives: Number of pairs without an edge for each edge, drawn over the whole graph: two nodes, or for typed
            edges an edge with one end replaced. A few less where edges are drawn.
        fan_out: How many neighbours to sample.
        num_batches: Number of batches per epoch, at most one per pair.
        options: Further arguments of :class:`SampleLoader`.
    """

    kind = "neighbourhoods of pairs, sampled anew every epoch"

    def __init__(
        self,
        data: Data,
        pairs: Pairs,
        known: KnownEdges,
        negatives: int,
        fan_out: Sequence[int],
        num_batches: int,
        **options: Any,
    ) -> None:
        super().__init__(data, torch.unique(pairs.ends), fan_out, num_batches, **options)
        self._num_batches = min(num_batches, pairs.ends.size(1))
        self._pairs, self._known, self._negatives = pairs, known, negatives

    def __iter__(self) -> Iterator[Data]:
        order = torch.randperm(self._pairs.ends.size(1), generator=self._generator)
        groups = [self._with_negatives(self._pairs.at(chosen)) for chosen in order.tensor_split(len(self))]
        for batch, links in zip(self.around([torch.unique(each[:, :2]) for each in groups]), groups, strict=True):
            for name in PAIR_NAMES:
                if name in batch:
                    del batch[name]
            batch.links = links
            yield batch

    def _with_negatives(self, pairs: Pairs) -> Tensor:
        """The pairs of a batch, and those without an edge that are drawn for them, ``[num_pairs, 4]``."""
        zeros = torch.zeros_like(pairs.label, dtype=torch.long)
        given = torch.stack(
            [*pairs.ends, pairs.label.long(), zeros if pairs.relation is None else pairs.relation], dim=1
        )
        drawn = given[pairs.label].repeat(self._negatives, 1)
        drawn[:, 2] = 0
        count, random = drawn.size(0), self._generator
        if pairs.relation is None:
            drawn[:, :2] = torch.stack([pairs.draw((count,), random, end) for end in (0, 1)], dim=1)
        else:
            end = torch.randint(2, (count,), generator=random)
            drawn[torch.arange(count), end] = torch.randint(pairs.num_nodes, (count,), generator=random)
        source, target, _, relation = drawn.unbind(dim=1)
        edge = self._known.contain(source, target, None if pairs.relation is None else relation)
        return torch.cat([given, drawn[~edge & (source != target)]])
