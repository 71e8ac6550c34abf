"""Moves rows on CUDA streams beside the step: pulled ahead and pushed behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnautoscale.graph import BatchInfo, RowOrder
from gnnautoscale.history import Cast, Codec, History, Runs
from gnnautoscale.kernels import locate_rows, merge_rows
from gnnautoscale.transfer.base import Transfer


@dataclass
class _Buffers:
    """A slot's raw rows on the GPU.

    Attributes:
        staged: The halo's rows of this step and of the next, ``[2, most_halo, raw_width]``.
        recent: The rows that the last step pushed, ``[most_batch, raw_width]``.
        codec: What they are.
    """

    staged: Tensor
    recent: Tensor
    codec: Codec


class Ahead(Transfer):
    """Pulls the next batch's rows during a step and writes a step's rows behind it; histories in pinned host memory.

    Three streams work side by side: the step's own, one that pulls and one that pushes. Host code never waits.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pulls, self._pushes = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._buffers: dict[str, _Buffers] = {}
        self._most_batch, self._most_halo = 0, -1
        # Kept while kernels of the side streams may read them; those that were copied for this purpose apart.
        self._index: dict[BatchInfo, Tensor] = {}
        self._copied: dict[BatchInfo, Tensor] = {}
        # Which of the two tables belongs to this step: on the device, since a captured step must find it there. Every
        # step ends with a change of sides; `_side_left` is what is there once all steps so far are done.
        self._side = torch.zeros(1, dtype=torch.int32, device=device)
        self._side_left = self._current_side = 0
        # For both tables: which rows the step before writes itself, and where among its own they are.
        self._shared = torch.empty(2, 0, dtype=torch.int32, device=device)
        # The slots whose rows are in this step's table, and the histories that are pulled ahead for another batch.
        self._staged: set[str] = set()
        self._ahead: dict[str, History] = {}
        self._following: BatchInfo | None = None
        self._ahead_for: BatchInfo | None = None
        self._begun_already = False
        self._to_push: list[tuple[str, History, Tensor]] = []

    def reserve(self, batch_size: int, num_halo: int, histories: Mapping[str, History]) -> None:
        """Make room for batches of this size; where there is room already, no address changes."""
        if batch_size > self._most_batch or num_halo > self._most_halo:
            self.settle()
            self._buffers.clear()
            self._most_batch, self._most_halo = max(batch_size, self._most_batch), max(num_halo, self._most_halo)
            self._shared = self._room(2, self._most_halo, dtype=torch.int32)
            self.version += 1
        for slot, history in histories.items():
            if slot not in self._buffers:
                width, dtype = history.codec.raw_width, history.codec.raw_dtype
                staged = self._room(2, self._most_halo, width, dtype=dtype)
                self._buffers[slot] = _Buffers(staged, self._room(self._most_batch, width, dtype=dtype), history.codec)

    def _room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        room = torch.empty(shape, dtype=dtype, device=self._device)
        for stream in (self._pulls, self._pushes):
            room.record_stream(stream)  # once freed, it is not used again before these streams are done with it
        return room

    def begin(self, info: BatchInfo, order: RowOrder, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        if self._begun_already:
            return
        following = info.upcoming if histories else None
        batches = [info] if following is None else [info, following]
        self.reserve(max(b.batch_size for b in batches), max(b.num_halo for b in batches), histories)
        self._wait(self._main, self._pushes)  # the last step's rows are in their histories, its buffers free
        with self.times.during("pull"):
            self._wait(self._main, self._pulls)  # what was pulled ahead is there
        # Rows that the step before should have written are not there if it did not come to its end.
        ended = self._current_side != self._side_left
        ahead = self._ahead if self._ahead_for is info and ended else {}
        self.skips_shared = bool(ahead)
        self._info, self._order, self._staged = info, order, set(histories)
        self._copied = {batch: self._copy_of(batch) for batch in batches if order not in batch.placed}
        # Where it was placed if it was, since a captured step reads it there.
        self._index = {
            batch: self._copied[batch] if batch in self._copied else batch.placed[order] for batch in batches
        }
        self._to_push.clear()
        self._current_side = self._side_left
        if not ahead:
            self._shared[self._current_side].fill_(-1)
        with self.times.during("pull"):
            self._stage({slot: histories[slot] for slot in histories if slot not in ahead}, info, self._current_side)
        self._following, self._ahead_for, self._ahead = following, None, dict(histories)
        if following is not None:
            self._wait(self._pulls, self._main)  # the other table is not used any more, and the index is there

    def look_ahead(self) -> None:
        """See :meth:`Transfer.look_ahead`."""
        if self._begun_already or self._following is None:
            return
        following, side = self._following, 1 - self._current_side
        shared = self._shared[side, : following.num_halo]
        with torch.cuda.stream(self._pulls):
            _locate(self._index[following][following.batch_size :], self._rows_of(self._current).runs, shared)
            self._stage(self._ahead, following, side, shared)
        self._following, self._ahead_for = None, following

    def _stage(self, histories: Mapping[str, History], info: BatchInfo, side: int, skip: Tensor | None = None) -> None:
        """Read a batch's halo into a table."""
        index = self._index[info][info.batch_size :]
        if histories and info.num_halo:
            staged = [self._buffers[slot].staged[side, : info.num_halo] for slot in histories]
            first, *others = histories.values()
            first.read_together(others, index, staged, skip=skip)

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        info = self._current
        if slot not in self._staged:  # a history that did not exist when the step began
            self.reserve(info.batch_size, info.num_halo, {slot: history})
            self._stage({slot: history}, info, self._current_side)
            self._staged.add(slot)
        room = self._buffers[slot]
        full = rows
        if info.num_halo:
            full = _Merge.apply(rows, room, self._shared, self._side, info.num_rows)  # type: ignore[no-untyped-call]
        if push:
            # Without a halo the model goes on with these very rows and may write into them; with one, the last
            # step's rows are needed if the layer is run a second time.
            self._to_push.append((slot, history, rows.detach() if info.num_halo else rows.detach().clone()))
        return full

    def end(self) -> None:
        """See :meth:`Transfer.end`; what was pushed is written during the backward pass."""
        info = self._current
        where, runs = self._index[info][: info.batch_size], self._rows_of(info).runs
        for slot, _, rows in self._to_push:
            room = self._buffers[slot]
            raw = rows if isinstance(room.codec, Cast) else room.codec.encode(rows)
            room.recent[: info.batch_size].copy_(raw)
        self._wait(self._pushes, self._main)  # the rows are computed
        with torch.cuda.stream(self._pushes):
            for slot, history, _ in self._to_push:
                history.write(self._buffers[slot].recent[: info.batch_size], where, runs)
        self._to_push.clear()
        self._side.bitwise_xor_(1)
        if not (self._begun_already and torch.cuda.is_current_stream_capturing()):
            self._side_left = 1 - self._side_left

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """See :meth:`Transfer.replay`."""
        graph.replay()
        self._side_left = 1 - self._side_left

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        self._wait(self._main, self._pushes)
        self._wait(self._main, self._pulls)
        self._following = self._ahead_for = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """See :meth:`Transfer.begun`."""
        self._begun_already = True
        self._to_push.clear()  # of a capture that failed
        try:
            yield
            self._wait(self._main, self._pushes)
        finally:
            self._begun_already = False

    def _wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Let one stream wait for what another one has been given so far."""
        stream.wait_stream(other)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _copy_of(self, info: BatchInfo) -> Tensor:
        known = self._copied.get(info)
        return self._rows_of(info).on(self._device) if known is None else known


class _Merge(torch.autograd.Function):
    """The batch's rows with the halo's behind them, which are constants."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, room: _Buffers, shared: Tensor, side: Tensor, num_rows: int) -> Tensor:
        ctx.batch_size = rows.size(0)
        if isinstance(room.codec, Cast):
            out = rows.new_empty(num_rows, rows.size(1))
            merge_rows(rows.contiguous(), room.staged, room.recent, shared, side, out)
            return out
        raw = room.staged.new_empty(num_rows - rows.size(0), room.codec.raw_width)
        merge_rows(raw[:0], room.staged, room.recent, shared, side, raw)
        return torch.cat([rows, room.codec.decode(raw, rows.dtype)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad[: ctx.batch_size], None, None, None, None


def _locate(index: Tensor, runs: Runs, where: Tensor) -> None:
    """For each row of a history write its position in a batch, or -1.

    Args:
        index: Rows of a history, ``[count]``.
        runs: The batch's rows.
        where: Where to write, ``[count]``, int32.
    """
    if len(runs) == 1:
        locate_rows(index, *runs[0], where)
        return
    table = torch.tensor(sorted(runs) or [(0, 0, 0)], pin_memory=index.is_cuda).to(index.device, non_blocking=True)
    starts, firsts, counts = table.t().contiguous()
    run = torch.searchsorted(starts, index, right=True).sub_(1).clamp_(min=0)
    place = index - starts[run]
    where.copy_(torch.where((place >= 0) & (place < counts[run]), place + firsts[run], -1))
