"""Moves rows between a training step and histories on disk: read ahead and written behind by a thread.

The thread does one thing after another, in the order they were asked for: it reads the next batch's rows while a step
runs, and writes a step's rows while the next one runs. As in :class:`Ahead`, rows that the
running step writes and the next one needs do not take the way through the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnautoscale.graph import BatchInfo, RowOrder
from gnnautoscale.history import DiskHistory, History
from gnnautoscale.transfer.base import Transfer

# Threads that copy rows into place; more do not make memory faster.
_WORKERS = max(1, min(4, (os.cpu_count() or 1) - 1))
# Rows that are worth a thread of their own.
_SHARE = 1 << 20


@dataclass
class _Room:
    """A slot's raw rows in host memory, for two steps, and on a GPU for the one that runs.

    Attributes:
        pulled: The halo's rows of this step and of the next, ``[2, most_halo, raw_width]``.
        pushed: The rows of this step and of the one before on their way to the file, ``[2, most_batch, raw_width]``.
        halo: The halo's rows on the GPU, ``[most_halo, raw_width]``; ``None`` if the host computes.
        recent: The rows that the last step pushed, on the device, ``[most_batch, raw_width]``.
    """

    pulled: Tensor
    pushed: Tensor
    halo: Tensor | None
    recent: Tensor


@dataclass
class _Read:
    """Rows that are being read for a batch.

    Attributes:
        info: The batch.
        side: Where in the rooms they go.
        slots: The slots whose rows are read.
        before: The batch whose step runs meanwhile.
        done: Gives which of the halo's rows the step before writes itself, and which of its own rows they are.
    """

    info: BatchInfo
    side: int
    slots: set[str]
    before: BatchInfo | None
    done: Future[tuple[Tensor, Tensor]]


class Threaded(Transfer):
    """Reads ahead and writes behind in a thread; histories on disk.

    Args:
        device: The compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "histories")
        self._workers = ThreadPoolExecutor(_WORKERS, "rows")
        self._rooms: dict[str, _Room] = {}
        self._most_batch = self._most_halo = 0
        self._histories: Mapping[str, History] = {}
        self._staged: set[str] = set()
        self._side = 0
        self._read: _Read | None = None
        self._written: list[Future[None] | None] = [None, None]
        self._free_to_read: list[torch.cuda.Event | None] = [None, None]
        self._to_push: list[tuple[str, History, Tensor]] = []
        self._begun_already = False
        # Whose rows a slot's `recent` holds, and which histories a captured step pushes to.
        self._recent_of: dict[str, BatchInfo] = {}
        self._captured: dict[BatchInfo, dict[str, History]] = {}

    def begin(self, info: BatchInfo, order: RowOrder, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        if self._begun_already:
            return
        self._to_push.clear()
        self._reserve(info.batch_size, info.num_halo, histories)
        self._info, self._order, self._histories, self._staged = info, order, dict(histories), set()
        read, self._read = self._read, None
        if read is not None and (read.info is not info or read.slots != set(histories)):
            read.done.result()
            read = None
        self._side = read.side if read is not None else 1 - self._side
        if read is None:
            read = self._start(info, self._side, None)
        with self.times.during("pull"):
            places, rows = read.done.result()
            for slot in histories:
                # If that step did not come to its end, the file has the right rows.
                fresh = read.before is not None and self._recent_of.get(slot) is read.before
                self._arrive(slot, *(places, rows) if fresh else _nothing())
        self._recent_of.clear()  # until this step comes to its end
        self._staged = set(histories)
        if self._on_gpu:
            self._free_to_read[self._side] = self._mark()

    def look_ahead(self) -> None:
        """See :meth:`Transfer.look_ahead`."""
        info = self._info
        if self._begun_already or info is None or info.upcoming is None or not self._histories or self._read:
            return
        following = info.upcoming
        if following.batch_size <= self._most_batch and following.num_halo <= self._most_halo:
            self._read = self._start(following, 1 - self._side, info)

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        info = self._current
        if slot not in self._staged:  # a history that did not exist when the step began
            self._reserve(info.batch_size, info.num_halo, {slot: history})
            index = self._rows_of(info).index[info.batch_size :]
            self._do(lambda: history.read(index, self._rooms[slot].pulled[self._side, : info.num_halo])).result()
            self._arrive(slot, *_nothing())
            self._staged.add(slot)
        if push:
            # Without a halo the model goes on with these very rows and may write into them.
            self._to_push.append((slot, history, rows.detach() if info.num_halo else rows.detach().clone()))
        if not info.num_halo:
            return rows
        room = self._rooms[slot]
        halo = room.pulled[self._side] if room.halo is None else room.halo
        return torch.cat([rows, history.codec.decode(halo[: info.num_halo], rows.dtype)])

    def end(self) -> None:
        """See :meth:`Transfer.end`."""
        for slot, history, rows in self._to_push:
            self._rooms[slot].recent[: rows.size(0)].copy_(history.codec.encode(rows))
        if not self._begun_already:
            self._write_behind({slot: history for slot, history, _ in self._to_push})
            self._to_push.clear()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """See :meth:`Transfer.replay`."""
        graph.replay()
        self._write_behind(self._captured[self._current])

    @contextmanager
    def begun(self) -> Iterator[None]:
        """See :meth:`Transfer.begun`."""
        self._begun_already = True
        self._to_push.clear()
        try:
            yield
        finally:
            self._begun_already = False
        pushed = {slot: history for slot, history, _ in self._to_push}
        self._to_push.clear()
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            self._captured[self._current] = pushed
        else:
            self._write_behind(pushed)

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        read, self._read = self._read, None
        if read is not None:
            read.done.result()
        self._do(lambda: None).result()
        self._raise_failures()

    def _write_behind(self, histories: Mapping[str, History]) -> None:
        """Take the step's rows to their files while the next one runs."""
        info, side = self._current, self._side
        count, runs = info.batch_size, self._rows_of(info)
        with self.times.during("push"):
            self._raise_failures(side)
            for slot in histories:
                room = self._rooms[slot]
                room.pushed[side, :count].copy_(room.recent[:count], non_blocking=True)
                self._recent_of[slot] = info
        copied = self._mark() if self._on_gpu else None

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            self._together(
                partial(history.write, self._rooms[slot].pushed[side, :count], runs.index[:count], runs.runs)
                for slot, history in histories.items()
            )

        self._written[side] = self._do(write)

    def _start(self, info: BatchInfo, side: int, before: BatchInfo | None) -> _Read:
        """Read a batch's halo of all histories; what the batch before it writes does not count."""
        histories, order, free = self._histories, self._order, self._free_to_read[side]
        if order is None:
            raise RuntimeError("a step has to begin before rows are read")

        def work() -> tuple[Tensor, Tensor]:
            if free is not None:
                free.synchronize()  # a GPU has taken what was there
            index = order.rows(info).index[info.batch_size :]
            outs = {slot: self._rooms[slot].pulled[side, : info.num_halo] for slot in histories}
            self._gather(index, [(histories[slot], outs[slot]) for slot in histories])
            return _nothing() if before is None else _shared(index, order.rows(before).index[: before.batch_size])

        return _Read(info, side, set(histories), before, self._do(work))

    def _gather(self, index: Tensor, tables: list[tuple[History, Tensor]]) -> None:
        """Read the same rows of several histories, on several threads if they are many."""
        jobs: list[Callable[[], None]] = []
        for history, out in tables:
            if not isinstance(history, DiskHistory):
                history.read(index, out)
                continue
            history.announce(index)
            size = max(1, _SHARE // max(out.size(1) * out.element_size(), 1))
            for first in range(0, index.numel(), size):
                piece = slice(first, first + size)
                jobs.append(partial(history.gather, index[piece], out[piece]))
        self._together(jobs)

    def _together(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Do several things side by side, and wait for all of them."""
        for _ in self._workers.map(lambda job: job(), jobs):
            pass

    def _arrive(self, slot: str, places: Tensor, rows: Tensor) -> None:
        """Bring a slot's rows to the device, and put those that the last step wrote itself into place."""
        room, count = self._rooms[slot], self._current.num_halo
        halo = room.pulled[self._side] if room.halo is None else room.halo
        if room.halo is not None:
            room.halo[:count].copy_(room.pulled[self._side, :count], non_blocking=True)
        if places.numel():
            where, which = places.to(self._device, non_blocking=True), rows.to(self._device, non_blocking=True)
            halo.index_copy_(0, where, room.recent.index_select(0, which))

    def _reserve(self, batch_size: int, num_halo: int, histories: Mapping[str, History]) -> None:
        """Make room for batches of this size; where there is room already, no address changes."""
        if batch_size > self._most_batch or num_halo > self._most_halo:
            self.settle()
            self._rooms.clear()
            self._recent_of.clear()
            self._captured.clear()
            self._most_batch, self._most_halo = max(batch_size, self._most_batch), max(num_halo, self._most_halo)
            self.version += 1
        for slot, history in histories.items():
            if slot not in self._rooms:
                self._rooms[slot] = self._room(history)

    @torch.inference_mode(False)  # training goes on with it
    def _room(self, history: History) -> _Room:
        codec = history.codec

        def rows(*shape: int, near: bool) -> Tensor:
            shape = (*shape, codec.raw_width)
            if near or not self._on_gpu:
                return torch.empty(shape, dtype=codec.raw_dtype, device=self._device)
            return torch.empty(shape, dtype=codec.raw_dtype, pin_memory=True)

        return _Room(
            pulled=rows(2, self._most_halo, near=False),
            pushed=rows(2, self._most_batch, near=False),
            halo=rows(self._most_halo, near=True) if self._on_gpu else None,
            recent=rows(self._most_batch, near=True),
        )

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the thread do something after all it was given before."""
        return self._thread.submit(work)

    def _raise_failures(self, *sides: int) -> None:
        """Wait for earlier writes and say so if one of them failed."""
        for side in sides or (0, 1):
            written, self._written[side] = self._written[side], None
            if written is not None:
                written.result()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)


def _shared(halo: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of a halo another batch writes, by their place in the halo and in that batch.

    Example:
        >>> _shared(torch.tensor([4, 7, 9]), torch.tensor([9, 4]))
        (tensor([0, 2]), tensor([1, 0]))
    """
    ordered, order = written.sort()
    place = torch.searchsorted(ordered, halo).clamp_(max=max(written.numel() - 1, 0))
    found = (ordered[place] == halo).nonzero().squeeze(1) if written.numel() else torch.empty(0, dtype=torch.long)
    return found, order[place[found]]
