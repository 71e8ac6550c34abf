"""Where the ends of pairs find their rows: in the batch, in what other ranks compute meanwhile, or as last known.

On several ranks a step is about the batches of all of them together. Each rank tells the others the outputs of its
batch, and scores the pairs that touch its own: a pair between two ranks is scored by both, with the roles exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.ranks import RankLoader
from gnnautoscale.tasks.pairs import Meetings, Pairs, chance_to_meet

# The place of nodes that are not in the batch: in that of another rank, or in none.
_ELSEWHERE, _ABSENT = -1, -2


class PairRows:
    """The rows that pairs are scored with, as of the last training step.

    Args:
        pairs: The pairs to train on.
        meetings: How often two nodes meet in a step.
        alone: Whether batches bring all rows that their pairs need, so that none is remembered.
    """

    def __init__(self, pairs: Pairs, meetings: Meetings, *, alone: bool = False) -> None:
        self._num_nodes, self._num_ends, self._between = pairs.num_nodes, pairs.num_ends, pairs.between
        self._meetings, self.alone = meetings, alone
        #: The last known output of each node, ``[num_nodes, width]``.
        self.known = torch.empty(0, 0)
        #: The batch's own nodes, ``[batch_size]``, and those of other ranks' batches.
        self.own = self.others = torch.empty(0, dtype=torch.long)
        # The place of each node in the batch, ``[num_nodes]``, and the output that was seen last.
        self._placed = torch.empty(0)
        self._seen: ref[Tensor] | None = None

    @staticmethod
    def on_ranks(pairs: Pairs, loader: RankLoader) -> PairRows:
        """The rows of a rank, which all ranks have to make."""
        return _SharedRows(pairs, loader)

    def see(self, out: Any, nodes: Tensor, *, remember: bool) -> None:
        """Take note of the output of the batch's own nodes, and remember it for other batches."""
        if not isinstance(out, Tensor) or out.dim() != 2:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            rule = "the model must return a tensor of one row per node"
            raise InputError(rule, got=got, fix="Return the last layer's output as it is.")
        nodes = nodes.as_subclass(Tensor).long()
        if self._placed.numel() != self._num_nodes:
            self._placed = torch.empty(self._num_nodes, dtype=torch.long, device=out.device)
        self._meetings = self._meetings.on(out.device)
        if not self.alone:
            if not self.known.numel():
                self.known = torch.zeros(self._num_nodes, out.size(1), dtype=out.dtype, device=out.device)
            if remember:
                self.known[nodes] = out.detach().to(self.known.dtype)
        self._placed.fill_(_ABSENT)
        self._placed[nodes] = torch.arange(nodes.numel(), device=out.device)
        self.own, self.others, self._seen = nodes, nodes[:0], ref(out)

    def belong_to(self, out: Any) -> bool:
        """Whether this is the output that was seen last."""
        return isinstance(out, Tensor) and self._seen is not None and self._seen() is out

    @property
    def is_whole(self) -> bool:
        """Whether the batch holds all nodes."""
        return self.own.numel() == self._num_ends

    def inside(self, nodes: Tensor) -> Tensor:
        """Whether nodes are in the batch, ``[count]``."""
        return self._placed[nodes] >= 0

    def draw(self, count: int) -> Tensor:
        """Random pairs of nodes of this step, ``[2, count]``; ``[2, 0]`` if it has no sources or no targets.

        At least one end is in the batch, and each pair is as likely as any other over all ranks: one between two ranks
        may be drawn by both, one inside a batch in either role.
        """
        own, every = self.own, torch.cat([self.own, self.others])
        ways = [(own, every), (every, own)] if self.others.numel() else [(own, own)]
        pools = [(self._able(source, 0), self._able(target, 1)) for source, target in ways]
        pools = [(sources, targets) for sources, targets in pools if sources.numel() and targets.numel()]
        if not pools:
            return own.new_empty(2, 0)
        found = [
            torch.stack([pool[torch.randint(pool.numel(), (count,), device=own.device)] for pool in both])
            for both in pools
        ]
        if len(found) == 1:
            return found[0]
        ahead, back = (sources.numel() * targets.numel() for sources, targets in pools)
        return torch.where(torch.rand(count, device=own.device) < back / (ahead + back), found[1], found[0])

    def _able(self, nodes: Tensor, end: int) -> Tensor:
        """Those of some nodes that can be at an end of a pair: at its source for 0, at its target for 1."""
        if self._between is None:
            return nodes
        low, high = self._between[end]
        return nodes[(nodes >= low) & (nodes < high)]

    def stand_for(self, source: Tensor, target: Tensor) -> Tensor:
        """What pairs without an edge stand for, ``[num_pairs]``.

        It is only themselves if the batch holds all nodes, and nothing if an end is not in this step.
        """
        if self.is_whole:
            return torch.ones(source.shape, device=source.device)
        absent = (self._placed[source] == _ABSENT) | (self._placed[target] == _ABSENT)
        return self._meetings.weight(source, target).masked_fill(absent, 0.0)

    def of(self, out: Tensor, nodes: Tensor, across: Tensor | None) -> Tensor:
        """The rows of ends of pairs, ``[num_pairs, width]``.

        Where pairs are ``across`` the batch's border, ``[num_pairs]``, rows inside have twice their gradient, and
        others are constants.
        """
        at = self._placed[nodes]
        if across is None or self.alone or self.is_whole:
            return out[at]
        near = out[at.clamp(min=0)]
        near = near + across.unsqueeze(1) * (near - near.detach())  # adds nothing but the gradient
        return torch.where(at.unsqueeze(1) >= 0, near, self.known[nodes].to(out.dtype))


class _SharedRows(PairRows):
    """Rows of a step of several ranks, which tell each other their batches' outputs."""

    def __init__(self, pairs: Pairs, loader: RankLoader) -> None:
        super().__init__(pairs, RankMeetings.of_ranks(loader))
        self._world = loader.world

    def see(self, out: Any, nodes: Tensor, *, remember: bool) -> None:
        """See :meth:`PairRows.see`; every rank calls it in every step."""
        super().see(out, nodes, remember=remember)
        if remember:
            self.others, rows = self._world.rows_of_others(self.own, out)
            self.known[self.others] = rows.to(self.known.dtype)
            self._placed[self.others] = _ELSEWHERE


@dataclass(frozen=True, eq=False)
class RankMeetings(Meetings):
    """How often a node of this rank meets any other one in a step of all ranks.

    Attributes:
        rank: This rank.
        ranks: The rank of each node, ``[num_nodes]``.
        chances: The chance that a part of this rank is drawn into the same step as a part of each rank, ``[size]``.
    """

    rank: int
    ranks: Tensor
    chances: Tensor

    @staticmethod
    def of_ranks(loader: RankLoader) -> RankMeetings:
        """See :meth:`Meetings.of`; every rank calls it."""
        world, here = loader.world, loader.parts_in_batches
        everyone = world.gather((loader.joined_nodes, here))
        labels = loader.labels_of_all()
        ranks = torch.empty_like(labels)
        for rank, (nodes, _) in enumerate(everyone):
            ranks[nodes] = rank
        chances = [
            sum(first * second for first, second in zip(here, there, strict=True)) / (sum(here) * sum(there))
            for _, there in everyone
        ]
        inside = [chance_to_meet(sizes, shuffled=loader.shuffle) for _, sizes in everyone]
        chances[world.rank] = inside[world.rank]
        return RankMeetings(labels, chances[world.rank], world.rank, ranks, torch.tensor(chances))

    def on(self, device: torch.device) -> Meetings:
        """See :meth:`Meetings.on`."""
        there = {name: getattr(self, name).to(device) for name in ("labels", "ranks", "chances")}
        return self if self.labels.device == device else replace(self, **there)

    def weight(self, source: Tensor, target: Tensor) -> Tensor:
        """See :meth:`Meetings.weight`; of each pair at least one node is of this rank."""
        first, second = self.ranks[source], self.ranks[target]
        chance = self.chances[torch.where(first == self.rank, second, first)]
        return torch.where(self.labels[source] == self.labels[target], 1.0, 1.0 / chance)
