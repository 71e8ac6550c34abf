"""Keeps ghosts up to date: after each step, the rows that it pushed go to the ranks where they are ghosts.

Which parts every rank trains on in every step of an epoch is exchanged once, when they are drawn. So both sides know
the rows of a step in advance, and nothing but rows is sent, those of all slots together, as histories keep them. They
travel while the step goes on with its backward pass, and are in place before the next one pulls: **a pull sees all
pushes of all ranks up to the step before.** With a *lag* they have a step more to travel: then it sees those of other
ranks up to the step before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.history import History
from gnnautoscale.kernels import Runs
from gnnautoscale.ranks.agreement import check_agreement
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.world import Arrival, World
from gnnautoscale.transfer import BatchRows, Transfer

#: The parts of one batch, as its rank numbers them.
Group = tuple[int, ...]


class Ghosts:
    """The rows that a rank shares with others: which ones, in which step, and how they get there."""

    def __init__(self, shard: Shard, world: World) -> None:
        self.shard, self.world = shard, world
        #: Whether the last forward pass waits for a backward pass, or for :attr:`skip`, which takes part without one.
        self.unanswered = False
        self.skip: Callable[[], None] | None = None
        #: Called when the model is detached.
        self.on_close: Callable[[], None] | None = None
        #: How many steps the rows of other ranks may lag behind those of the step before, 0 or 1.
        self.lag = 0
        self._sent_starts, self._starts = shard.sent_starts.tolist(), shard.starts.tolist()
        self._ghost_starts, self._first_part = shard.ghost_starts.tolist(), shard.first_part.tolist()
        # The groups of all ranks in each step of the epoch, and the step of each of this rank's batches.
        self._steps: list[list[Group]] = []
        self._step_of: dict[tuple[object, ...], int] = {}
        self._last = -1
        self._pending: deque[tuple[Arrival, list[History], Tensor]] = deque()
        self._records: Callable[[], Mapping[str, Sequence[Any]]] = dict
        self._seen: list[Any] = []

    def announce(self, groups: Sequence[Group], runs: Sequence[Runs]) -> None:
        """Tell all ranks which parts this one trains on in each step of an epoch, and learn theirs.

        ``runs`` are the rows of these batches.
        """
        everyone = self.world.gather(list(groups))
        self._steps = [list(step) for step in zip(*everyone, strict=True)]
        self._step_of = {tuple(each): step for step, each in enumerate(runs)}
        self._last = -1

    def begin(self, rows: BatchRows) -> None:
        """Begin a step on a batch, which must be the next one of the loader, or the same once more."""
        self._arrive(left=self.lag)
        step = self._step_of.get(tuple(rows.runs))
        if step is None or not self._last <= step <= self._last + 1:
            got = "another batch" if step is None else f"batch {step + 1} after batch {self._last + 1}"
            rule = "ranks step together, each on every batch of its loader in turn"
            raise InputError(rule, got=got, fix="Call the model once with each batch that the loader yields.")
        self._last = step

    def send(self, histories: Sequence[History]) -> None:
        """Start to send the rows that the present step pushed, and to receive those of the other ranks."""
        groups = self._steps[self._last]
        rank, size = self.shard.rank, self.shard.size
        sent = [[self._sent(peer, part) for part in groups[rank]] for peer in range(size)]
        received = [[self._ghosts(peer, part) for part in groups[peer]] for peer in range(size)]
        if histories:
            self._pending.append(self._exchange(histories, sent, received))

    def share(self, histories: Sequence[History]) -> None:
        """Send all rows that are ghosts elsewhere, and receive all ghosts."""
        rank, size = self.shard.rank, self.shard.size
        sent = [[slice(starts[0], starts[-1])] for starts in self._sent_starts]
        ends = [(self._first_part[peer], self._first_part[peer + 1]) for peer in range(size)]
        received = [[slice(self._ghost_starts[first], self._ghost_starts[end])] for first, end in ends]
        sent[rank], received[rank] = [], []
        if histories:
            _write(*self._exchange(histories, sent, received))

    def settle(self) -> None:
        """Wait for all rows of other ranks, and write them into the rows of ghosts."""
        self._arrive(left=0)

    def _arrive(self, left: int) -> None:
        while len(self._pending) > left:
            _write(*self._pending.popleft())

    def close(self) -> None:
        """Wait for rows on their way, which the other ranks have sent, and let the model go."""
        self.settle()
        if self.on_close is not None:
            self.on_close()
        self.skip, self.on_close, self.unanswered = None, None, False

    def around(self, transfer: Transfer) -> Transfer:
        """A transfer that also keeps ghosts up to date."""
        return RankTransfer(transfer, self)

    def _sent(self, peer: int, part: int) -> slice:
        return slice(self._sent_starts[peer][part], self._sent_starts[peer][part + 1])

    def _ghosts(self, peer: int, part: int) -> slice:
        first = self._first_part[peer] + part
        return slice(self._ghost_starts[first], self._ghost_starts[first + 1])

    def follow(self, records: Callable[[], Mapping[str, Sequence[Any]]]) -> None:
        """Compare what layers make of edges, the ``records`` of each call, with other ranks whenever it changes."""
        self._records = records

    def _check_records(self) -> None:
        records = self._records()
        seen = [record for made in records.values() for record in made]
        if len(seen) != len(self._seen) or any(one is not other for one, other in zip(seen, self._seen, strict=True)):
            self._seen = seen
            check_agreement(self.world, self.shard, records)

    def _exchange(
        self, histories: Sequence[History], sent: list[list[slice]], received: list[list[slice]]
    ) -> tuple[Arrival, list[History], Tensor]:
        """Start to send rows; returns those on their way here, for which histories, and their places in them."""
        self._check_records()
        shard = self.shard
        pieces = [shard.sent[piece] for pieces in sent for piece in pieces]
        rows = torch.cat(pieces) if pieces else shard.sent[:0]
        arriving = [torch.arange(piece.start, piece.stop) for pieces in received for piece in pieces]
        where = shard.num_own + (torch.cat(arriving) if arriving else rows[:0])
        raw = [_raw_rows(history, rows, self.world.wire).view(torch.uint8) for history in histories]
        together = raw[0] if len(raw) == 1 else torch.cat(raw, dim=1)
        arrival = self.world.exchange(together, _counts(sent), _counts(received))
        return arrival, list(histories), where


class RankTransfer(Transfer):
    """Lets another transfer move the rows of steps, and sends those that are ghosts elsewhere."""

    def __init__(self, inner: Transfer, ghosts: Ghosts) -> None:
        self._inner, self._ghosts = inner, ghosts
        self._pushed: dict[str, History] = {}

    def begin(self, rows: BatchRows, following: BatchRows | None, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        self._ghosts.begin(rows)
        self._pushed.clear()
        self._inner.begin(rows, following, histories)

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        if push:
            self._pushed[slot] = history
        return self._inner.exchange(slot, history, rows, push=push)

    def end(self) -> None:
        """See :meth:`Transfer.end`."""
        self._inner.end()
        self._ghosts.send([self._pushed[slot] for slot in sorted(self._pushed)])
        self._ghosts.unanswered = torch.is_grad_enabled()

    def complete(self) -> None:
        """See :meth:`Transfer.complete`."""
        self._inner.complete()

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        self._inner.settle()
        self._ghosts.settle()

    def close(self) -> None:
        """See :meth:`Transfer.close`."""
        self._inner.close()


def _raw_rows(history: History, rows: Tensor, wire: torch.device) -> Tensor:
    """Raw rows of a history, ``[count, raw_width]``, where it is, or where rows are sent from."""
    shape, device = (rows.numel(), history.codec.raw_width), history.raw.device if history.raw.is_cuda else wire
    raw = torch.empty(shape, dtype=history.codec.raw_dtype, device=device)
    history.read(rows.to(device), raw)
    return raw


def _write(arrival: Arrival, histories: list[History], where: Tensor) -> None:
    """Wait for rows of other ranks, those of all histories side by side, and write them."""
    raw, place = arrival.wait(), 0
    for history in histories:
        width = history.codec.raw_width * history.codec.raw_dtype.itemsize
        rows = raw[:, place : place + width].contiguous().view(history.codec.raw_dtype)
        history.write(rows, where)
        place += width


def _counts(pieces: list[list[slice]]) -> list[int]:
    return [sum(piece.stop - piece.start for piece in each) for each in pieces]
