"""The common part of transfers that work beside the step: buffers, and what the last step wrote."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from gnnautoscale._util import for_later
from gnnautoscale.history import Cast, History
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.rows import BatchRows


@dataclass
class Room:
    """A slot's raw rows on their way.

    Attributes:
        staged: The halo's rows of this step and of the next, ``[2, most_halo, raw_width]``.
        recent: The rows that the last step pushed, on the compute device, ``[most_batch, raw_width]``.
    """

    staged: Tensor
    recent: Tensor


class Recent(NamedTuple):
    """Whose rows the rooms hold as recent, and for which slots."""

    rows: BatchRows
    slots: frozenset[str]


R = TypeVar("R", bound=Room)


class StagedTransfer(Transfer, Generic[R]):
    """Keeps a room for each slot, of which one side serves the step and the other side the next step.

    Rows from ``first_late`` on are not read ahead of a step, since other processes write them before it begins.
    """

    def __init__(self, device: torch.device, first_late: int | None = None) -> None:
        self._device, self._first_late = device, first_late
        self._rooms: dict[str, R] = {}
        self._most_batch, self._most_halo = 0, -1
        self._side = 0
        self._following: BatchRows | None = None
        self._histories: dict[str, History] = {}
        # Slots whose halo is in this step's side of their room.
        self._staged: set[str] = set()
        self._to_push: dict[str, tuple[History, Tensor]] = {}
        # Where this step pushes to, and the steps on batches that come back: captured ones push there again.
        self._pushes_of_step: dict[str, History] | None = None
        self._pushes_of: dict[Hashable, dict[str, History]] = {}
        self._recent: Recent | None = None

    def begin(self, rows: BatchRows, following: BatchRows | None, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        if not histories:
            following = None  # there is nothing to pull ahead from
        batches = [rows] if following is None else [rows, following]
        self._reserve(max(b.batch_size for b in batches), max(b.num_halo for b in batches), histories)
        self._rows, self._following, self._histories = rows, following, dict(histories)
        self._side = 1 - self._side
        self._to_push.clear()
        self._pushes_of_step = None
        recent, self._recent = self._recent, None  # until this step is complete
        self._stage(recent)
        self._staged = set(histories)

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        batch = self._current
        if slot not in self._staged:  # a history that did not exist when the step began
            self._reserve(batch.batch_size, batch.num_halo, {slot: history})
            self._stage_late(slot, history)
            self._staged.add(slot)
        if push:
            # Without a halo the model goes on with these very rows and may write into them.
            self._to_push[slot] = history, rows.detach() if batch.num_halo else rows.detach().clone()
        return self._with_halo(slot, history, rows) if batch.num_halo else rows

    def end(self) -> None:
        """See :meth:`Transfer.end`."""
        batch = self._current
        for slot, (history, rows) in self._to_push.items():
            raw = rows if isinstance(history.codec, Cast) else history.codec.encode(rows)  # a copy casts on the way
            self._rooms[slot].recent[: batch.batch_size].copy_(raw)
        self._pushes_of_step = {slot: history for slot, (history, _) in self._to_push.items()}
        if batch.key is not None:
            self._pushes_of[batch.key] = self._pushes_of_step
        self._to_push.clear()

    def complete(self) -> None:
        """See :meth:`Transfer.complete`."""
        self._recent = Recent(self._current, frozenset(self._pushed))

    @property
    def _pushed(self) -> dict[str, History]:
        """Where the step pushes to; that of a replayed step is known from its capture."""
        if self._pushes_of_step is not None:
            return self._pushes_of_step
        return self._pushes_of.get(self._current.key, {})

    @for_later
    def _reserve(self, batch_size: int, num_halo: int, histories: Mapping[str, History]) -> None:
        """Make room for batches of this size; addresses change only if there was less."""
        if batch_size > self._most_batch or num_halo > self._most_halo:
            self.settle()
            self._rooms.clear()
            self._recent = None
            self._most_batch, self._most_halo = max(batch_size, self._most_batch), max(num_halo, self._most_halo)
            self._resized()
            self.version += 1
        for slot, history in histories.items():
            if slot not in self._rooms:
                self._rooms[slot] = self._make_room(history)

    def _resized(self) -> None:
        """Called when batches became larger."""
        return

    @abstractmethod
    def _make_room(self, history: History) -> R:
        """A room for batches of the largest size so far."""

    @abstractmethod
    def _stage(self, recent: Recent | None) -> None:
        """Bring the halo's rows of all histories to this step's side, unless they were pulled ahead."""

    @abstractmethod
    def _stage_late(self, slot: str, history: History) -> None:
        """Bring the halo's rows of one more history there."""

    @abstractmethod
    def _with_halo(self, slot: str, history: History, rows: Tensor) -> Tensor:
        """The batch's rows with the halo's behind them."""
