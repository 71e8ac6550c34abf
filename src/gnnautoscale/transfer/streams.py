"""Moves rows on CUDA streams beside the step: pulled ahead and pushed behind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnautoscale.history import Cast, Codec, History
from gnnautoscale.kernels import merge_rows
from gnnautoscale.transfer.rows import BatchRows
from gnnautoscale.transfer.staging import Recent, Room, StagedTransfer


class _Ahead(NamedTuple):
    """Rows that were pulled ahead: for which batch, during whose step, and of which slots."""

    rows: BatchRows
    before: BatchRows
    slots: frozenset[str]


class StreamTransfer(StagedTransfer[Room]):
    """Pulls the next batch's rows during a step and writes a step's rows behind it; histories in pinned host memory.

    Three streams work side by side: the step's own, one that pulls and one that pushes. Host code never waits.
    """

    def __init__(self, device: torch.device, first_late: int | None = None) -> None:
        super().__init__(device, first_late)
        self._pulls, self._pushes = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        # The step's side of the rooms, on the device, where a captured step looks it up.
        self._side_there = torch.zeros(1, dtype=torch.int32, device=device)
        # For both sides: the position of each halo row among the rows of the step before, or -1 for the others.
        self._shared = torch.empty(2, 0, dtype=torch.int32, device=device)
        # Kept while kernels on the side streams may read them.
        self._index = self._next_index = torch.empty(0, dtype=torch.long, device=device)
        self._ahead: _Ahead | None = None

    def look_ahead(self) -> None:
        """See :meth:`Transfer.look_ahead`."""
        following, self._following = self._following, None
        if following is None:
            return
        side, index = 1 - self._side, self._next_index[following.batch_size :]
        shared = self._shared[side, : following.num_halo]
        with torch.cuda.stream(self._pulls):
            self._current.locate(index, shared)
            skip = shared if self._first_late is None else torch.where(index < self._first_late, shared, 0)
            self._read(self._histories, index, side, skip)
        self._ahead = _Ahead(following, self._current, frozenset(self._histories))

    def end(self) -> None:
        """See :meth:`Transfer.end`; rows are written during the backward pass."""
        super().end()
        batch = self._current
        self._wait(self._pushes, self._main)  # the rows are computed
        with torch.cuda.stream(self._pushes):
            for slot, history in self._pushed.items():
                recent = self._rooms[slot].recent[: batch.batch_size]
                history.write(recent, self._index[: batch.batch_size], batch.runs)

    def join(self) -> None:
        """See :meth:`Transfer.join`."""
        self._wait(self._main, self._pushes)

    def after_pushes(self) -> AbstractContextManager[None]:
        """See :meth:`Transfer.after_pushes`."""
        self._wait(self._pushes, self._main)
        context: AbstractContextManager[None] = torch.cuda.stream(self._pushes)
        return context

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        self._wait(self._main, self._pushes)
        self._wait(self._main, self._pulls)
        self._following = self._ahead = None

    def close(self) -> None:
        """See :meth:`Transfer.close`."""
        self.settle()

    def _stage(self, recent: Recent | None) -> None:
        batch, main = self._current, self._main
        self._wait(main, self._pushes)  # the last step's rows are in their histories
        with self.times.during("pull"):
            self._wait(main, self._pulls)  # what was pulled ahead is there
        there = self._pulled_ahead(recent)
        self.skips_shared = bool(there)
        if not there:
            self._shared[self._side].fill_(-1)
        self._side_there.fill_(self._side)
        self._index = batch.on(self._device)
        missing = {slot: history for slot, history in self._histories.items() if slot not in there}
        halo = self._index[batch.batch_size :]
        with self.times.during("pull"):
            self._read(missing, halo, self._side)
            if there and self._first_late is not None:
                late = {slot: history for slot, history in self._histories.items() if slot in there}
                self._read(late, halo, self._side, (halo < self._first_late).int() - 1)
        if self._following is not None:
            self._next_index = self._following.on(self._device)
            self._wait(self._pulls, main)  # the other side is free, and a copied index is there
            if self._following.ready is not None:
                self._pulls.wait_event(self._following.ready)

    def _pulled_ahead(self, recent: Recent | None) -> frozenset[str]:
        """The slots whose rows were pulled ahead for this step and can be used."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.rows is not self._current:
            return frozenset()
        # Rows shared with the step before were not pulled, so that step must have come to its end.
        if recent is None or recent.rows is not ahead.before or not self._histories.keys() <= recent.slots:
            return frozenset()
        return ahead.slots

    def _stage_late(self, slot: str, history: History) -> None:
        self._read({slot: history}, self._index[self._current.batch_size :], self._side)

    def _with_halo(self, slot: str, history: History, rows: Tensor) -> Tensor:
        num_rows = self._current.num_rows
        out: Tensor = _Merge.apply(  # type: ignore[no-untyped-call]
            rows, self._rooms[slot], history.codec, self._shared, self._side_there, num_rows
        )
        return out

    def _read(self, histories: Mapping[str, History], index: Tensor, side: int, skip: Tensor | None = None) -> None:
        """Read rows of some histories to a side of their rooms."""
        if histories and index.numel():
            staged = [self._rooms[slot].staged[side, : index.numel()] for slot in histories]
            first, *others = histories.values()
            first.read_together(others, index, staged, skip=skip)

    def _resized(self) -> None:
        self._shared = self._empty(2, self._most_halo, dtype=torch.int32).fill_(-1)  # a position, or none, at any time

    def _make_room(self, history: History) -> Room:
        width, dtype = history.codec.raw_width, history.codec.raw_dtype
        staged = self._empty(2, self._most_halo, width, dtype=dtype)
        return Room(staged, self._empty(self._most_batch, width, dtype=dtype))

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=self._device)
        for stream in (self._pulls, self._pushes):
            empty.record_stream(stream)  # once freed, it is not used again before these streams are done with it
        return empty

    def _wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Let one stream wait for what another one has been given so far."""
        stream.wait_stream(other)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.index)


class _Merge(torch.autograd.Function):
    """The batch's rows with the halo's behind them, which are constants."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, room: Room, codec: Codec, shared: Tensor, side: Tensor, num_rows: int
    ) -> Tensor:
        ctx.batch_size = rows.size(0)
        if isinstance(codec, Cast):
            out = rows.new_empty(num_rows, rows.size(1))
            merge_rows(rows.contiguous(), room.staged, room.recent, shared, side, out)
            return out
        raw = room.staged.new_empty(num_rows - rows.size(0), codec.raw_width)
        merge_rows(raw[:0], room.staged, room.recent, shared, side, raw)
        return torch.cat([rows, codec.decode(raw, rows.dtype)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[: ctx.batch_size], None, None, None, None, None
