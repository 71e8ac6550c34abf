"""Moves rows between a step and histories on disk: one thread reads ahead, another writes behind.

While a step runs, the next batch's rows are read, and those of the step before are written. Rows that the running step
writes and the next one needs never pass through the file, so a read waits only for writes that came before its step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gnnautoscale._util import available_cores, copy_staged
from gnnautoscale.history import DiskHistory, History
from gnnautoscale.transfer.rows import BatchRows
from gnnautoscale.transfer.staging import Recent, Room, StagedTransfer

# Threads that copy rows into place, which leave a core to the step.
_WORKERS = max(1, min(16, available_cores() - 1))
# Bytes of rows that are worth a thread of their own.
_SHARE = 1 << 22


@dataclass
class _DiskRoom(Room):
    """A slot's raw rows; ``staged`` is in host memory.

    Attributes:
        outgoing: The rows of this step and of the one before on their way to the file, ``[2, most_batch, raw_width]``.
        halo: The halo's rows on the GPU, ``[most_halo, raw_width]``; ``None`` if the host computes.
    """

    outgoing: Tensor
    halo: Tensor | None


@dataclass
class _Read:
    """Rows of some slots that a thread reads for a batch, while the step of the batch ``before`` runs, if there is one.

    ``shared`` gives which of the halo's rows that step writes itself, and their positions in its batch.
    """

    rows: BatchRows
    slots: frozenset[str]
    before: BatchRows | None
    shared: Future[tuple[Tensor, Tensor]]


class ThreadTransfer(StagedTransfer[_DiskRoom]):
    """Reads ahead and writes behind in threads; histories on disk."""

    pushes_late = True

    def __init__(self, device: torch.device, first_late: int | None = None) -> None:
        super().__init__(device, first_late)
        self._on_gpu = device.type == "cuda"
        self._reader, self._writer = ThreadPoolExecutor(1, "reads"), ThreadPoolExecutor(1, "writes")
        self._workers = ThreadPoolExecutor(_WORKERS, "rows")
        weakref.finalize(self, _end_threads, self._reader, self._writer, self._workers, wait=False)
        self._read: _Read | None = None
        self._written: list[Future[None] | None] = [None, None]
        self._free_to_read: list[torch.cuda.Event | None] = [None, None]

    def look_ahead(self) -> None:
        """See :meth:`Transfer.look_ahead`."""
        following, self._following = self._following, None
        if following is not None:
            self._read = self._start(following, 1 - self._side, self._current)

    def complete(self) -> None:
        """See :meth:`Transfer.complete`; the step's rows go to their files while the next step runs."""
        batch, side = self._current, self._side
        histories, count = dict(self._pushed), batch.batch_size
        with self.times.during("push"):
            self._raise_failures(side)
            for slot in histories:
                room = self._rooms[slot]
                room.outgoing[side, :count].copy_(room.recent[:count], non_blocking=True)
        super().complete()
        copied = self._mark() if self._on_gpu else None

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            self._together(
                [
                    partial(history.write, self._rooms[slot].outgoing[side, :count], batch.on_host[:count], batch.runs)
                    for slot, history in histories.items()
                ]
            )

        self._written[side] = self._writer.submit(write)

    def finish_pushes(self) -> None:
        """See :meth:`Transfer.finish_pushes`."""
        self._raise_failures()

    def after_pushes(self) -> AbstractContextManager[None]:
        """See :meth:`Transfer.after_pushes`; this waits for them."""
        self._raise_failures()
        return nullcontext()

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        self._following = None
        read, self._read = self._read, None
        if read is not None:
            read.shared.result()
        self._reader.submit(lambda: None).result()
        self._raise_failures()

    def close(self) -> None:
        """See :meth:`Transfer.close`; failures of pending writes are not raised."""
        _end_threads(self._reader, self._writer, self._workers, wait=True)

    def _stage(self, recent: Recent | None) -> None:
        batch = self._current
        read, self._read = self._read, None
        if read is not None and (read.rows is not batch or read.slots != self._histories.keys()):
            read.shared.result()
            read = None
        if read is None:
            read = self._start(batch, self._side, None)
        with self.times.during("pull"):
            places, positions = (copy_staged(each, self._device) for each in read.shared.result())
            if read.before is not None:
                self._read_late(batch.on_host[batch.batch_size :])
            for slot in self._histories:
                # If that step did not come to its end, or pushed nothing here, the file has the right rows.
                fresh = recent is not None and recent.rows is read.before and slot in recent.slots
                self._arrive(slot, *(places, positions) if fresh else _nothing())
        if self._on_gpu:
            self._free_to_read[self._side] = self._mark()

    def _stage_late(self, slot: str, history: History) -> None:
        batch = self._current
        staged = self._rooms[slot].staged[self._side, : batch.num_halo]
        wait(self._pending_writes())
        history.read(batch.on_host[batch.batch_size :], staged)
        self._arrive(slot, *_nothing())

    def _with_halo(self, slot: str, history: History, rows: Tensor) -> Tensor:
        halo = self._halo(slot)[: self._current.num_halo]
        return torch.cat([rows, history.codec.decode(halo, rows.dtype)])

    def _start(self, rows: BatchRows, side: int, before: BatchRows | None) -> _Read:
        """Read a batch's halo of all histories to a side of their rooms."""
        histories, free, earlier = self._histories, self._free_to_read[side], self._pending_writes()

        def work() -> tuple[Tensor, Tensor]:
            wait(earlier)
            if free is not None:
                free.synchronize()  # a GPU has taken what was there
            index = rows.on_host[rows.batch_size :]
            rooms = [(history, self._rooms[slot].staged[side, : rows.num_halo]) for slot, history in histories.items()]
            self._gather(index, rooms)
            return _nothing() if before is None else _shared(index, before)

        return _Read(rows, frozenset(histories), before, self._reader.submit(work))

    def _read_late(self, index: Tensor) -> None:
        """Read those rows of the halo again that other processes have written since they were read ahead."""
        if self._first_late is None:
            return
        late = (index >= self._first_late).nonzero().squeeze(1)
        for slot, history in self._histories.items() if late.numel() else ():
            staged = self._rooms[slot].staged[self._side]
            rows = torch.empty(late.numel(), staged.size(1), dtype=staged.dtype)
            history.read(index[late], rows)
            staged.index_copy_(0, late, rows)

    def _gather(self, index: Tensor, tables: list[tuple[History, Tensor]]) -> None:
        """Read the same rows of several histories, in several threads if they are many."""
        jobs: list[Callable[[], None]] = []
        for history, out in tables:
            if not isinstance(history, DiskHistory):
                history.read(index, out)
                continue
            history.announce(index)
            least = max(1, _SHARE // max(out.size(1) * out.element_size(), 1))
            size = max(least, -(-index.numel() * len(tables) // _WORKERS))
            for first in range(0, index.numel(), size):
                piece = slice(first, first + size)
                jobs.append(partial(history.gather, index[piece], out[piece]))
        self._together(jobs)

    def _together(self, jobs: list[Callable[[], None]]) -> None:
        """Do several jobs side by side, one of them in this thread, and wait for all of them."""
        # Handing a job to another thread may take longer than the job.
        given = [self._workers.submit(job) for job in jobs[1:]]
        try:
            for job in jobs[:1]:
                job()
        finally:
            wait(given)
        for each in given:
            each.result()

    def _arrive(self, slot: str, places: Tensor, positions: Tensor) -> None:
        """Bring a slot's staged rows to the device, and put those that the last step wrote into their places."""
        room, count, halo = self._rooms[slot], self._current.num_halo, self._halo(slot)
        if room.halo is not None:
            room.halo[:count].copy_(room.staged[self._side, :count], non_blocking=True)
        if places.numel():
            halo.index_copy_(0, places, room.recent.index_select(0, positions))

    def _halo(self, slot: str) -> Tensor:
        room = self._rooms[slot]
        return room.staged[self._side] if room.halo is None else room.halo

    def _make_room(self, history: History) -> _DiskRoom:
        codec = history.codec

        def rows(*shape: int, near: bool) -> Tensor:
            shape = (*shape, codec.raw_width)
            if near or not self._on_gpu:
                return torch.empty(shape, dtype=codec.raw_dtype, device=self._device)
            return torch.empty(shape, dtype=codec.raw_dtype, pin_memory=True)

        return _DiskRoom(
            staged=rows(2, self._most_halo, near=False),
            recent=rows(self._most_batch, near=True),
            outgoing=rows(2, self._most_batch, near=False),
            halo=rows(self._most_halo, near=True) if self._on_gpu else None,
        )

    def _pending_writes(self) -> list[Future[None]]:
        return [written for written in self._written if written is not None]

    def _raise_failures(self, *sides: int) -> None:
        """Wait for earlier writes, and raise the error of one that failed."""
        for side in sides or (0, 1):
            written, self._written[side] = self._written[side], None
            if written is not None:
                written.result()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _end_threads(*executors: ThreadPoolExecutor, wait: bool) -> None:
    """End threads after what they were given; tasks of the first ones need the last ones."""
    for executor in executors:
        executor.shutdown(wait=wait)


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)


def _shared(halo: Tensor, written: BatchRows) -> tuple[Tensor, Tensor]:
    """The places in a halo of the rows that another batch writes, and their positions in that batch."""
    where = torch.empty(halo.numel(), dtype=torch.int32)
    written.locate(halo, where)
    places = (where >= 0).nonzero().squeeze(1)
    return places, where[places].long()
