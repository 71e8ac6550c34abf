"""How rows move between a training step and its histories: one after the other, or pulled ahead and pushed behind.

A step changes only its own batch's rows. All other rows that the next batch needs can therefore be pulled while the
step runs, and the rows that both share are on the GPU already: what the next step sees is exact, and hardly any of
the time is spent on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnautoscale.history import History
from gnnautoscale.kernels import merge_rows, use_triton
from gnnautoscale.loader import BatchInfo


class Transfer(ABC):
    """Moves the rows of one step at a time.

    A step calls :meth:`begin`, then for each slot :meth:`push` and :meth:`pull`, and :meth:`end` after its forward
    pass. A pull gives the halo's rows as all earlier steps left them; rows of the batch itself are never pulled.
    """

    @abstractmethod
    def begin(self, info: BatchInfo, histories: Mapping[str, History]) -> None:
        """Start a step on a batch, with the histories that exist so far."""

    @abstractmethod
    def push(self, slot: str, history: History, rows: Tensor) -> None:
        """Write the batch's rows, ``[batch_size, width]``."""

    @abstractmethod
    def pull(self, slot: str, history: History, dtype: torch.dtype) -> Tensor:
        """Read the halo's rows, ``[num_halo, width]``; valid until the next step begins."""

    @abstractmethod
    def end(self) -> None:
        """Say that everything was pushed."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything that follows see all pushes, and forget what was pulled ahead."""

    #: Changes when rows move to another address on the device.
    version = 0

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The step inside of this context, which may be captured, has begun already; it ends with its pushes."""
        yield


class Direct(Transfer):
    """Reads and writes when asked, in the order of the calls.

    Args:
        device: The compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, info: BatchInfo, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        self._info, self._index = info, info.index(self._device)

    def push(self, slot: str, history: History, rows: Tensor) -> None:
        """See :meth:`Transfer.push`."""
        history.push(rows, self._index[: self._info.batch_size])

    def pull(self, slot: str, history: History, dtype: torch.dtype) -> Tensor:
        """See :meth:`Transfer.pull`."""
        return history.pull(self._index[self._info.batch_size :], device=self._device, dtype=dtype)

    def end(self) -> None:
        """See :meth:`Transfer.end`."""

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""


@dataclass
class _Buffers:
    """A slot's rows on the GPU, in the history's own precision.

    Attributes:
        staged: Rows pulled ahead for the next batch, ``[most_halo, width]``.
        halo: The current batch's halo, ``[most_halo, width]``.
        recent: The rows that the current step pushed, ``[most_batch, width]``.
    """

    staged: Tensor
    halo: Tensor
    recent: Tensor


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
        self._most_batch = self._most_halo = 0
        self._info: BatchInfo | None = None
        # Kept while kernels of the side streams may read them.
        self._index: dict[BatchInfo, Tensor] = {}
        # Which of the rows that are pulled ahead the current step writes, and where among its own they are.
        self._shared = torch.empty(0, dtype=torch.int32, device=device)
        self._staged_for: BatchInfo | None = None
        self._staged: frozenset[str] = frozenset()
        self._begun_already = False
        self._to_push: list[tuple[History, Tensor]] = []

    def reserve(self, batch_size: int, num_halo: int, histories: Mapping[str, History]) -> None:
        """Make room for batches of this size; where there is room already, no address changes."""
        if batch_size > self._most_batch or num_halo > self._most_halo:
            self.settle()
            self._buffers.clear()
            self._most_batch, self._most_halo = max(batch_size, self._most_batch), max(num_halo, self._most_halo)
            self._shared = self._room(self._most_halo + 1, dtype=torch.int32)
            self.version += 1
        for slot, history in histories.items():
            if slot not in self._buffers:
                sizes = self._most_halo, self._most_halo, self._most_batch
                self._buffers[slot] = _Buffers(*(self._room(s, history.width, dtype=history.dtype) for s in sizes))

    def _room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        room = torch.empty(shape, dtype=dtype, device=self._device)
        for stream in (self._pulls, self._pushes):
            room.record_stream(stream)  # once freed, it is not used again before these streams are done with it
        return room

    def begin(self, info: BatchInfo, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`; also starts to pull for the batch that is announced to follow."""
        if self._begun_already:
            return
        batches = [info] if info.upcoming is None else [info, info.upcoming]
        self.reserve(max(b.batch_size for b in batches), max(b.num_halo for b in batches), histories)
        self._wait(self._main, self._pushes)  # the last step's rows are in their histories, its buffers free
        self._wait(self._main, self._pulls)  # what was pulled ahead is there
        self._index = {batch: self._index_of(batch) for batch in batches}
        for slot, history in histories.items():
            room = self._buffers[slot]
            if self._staged_for is info and slot in self._staged:
                count = info.num_halo
                merge_rows(room.staged[:count], room.recent, self._shared[:count], room.halo[:count])
            else:
                history.read(self._halo(info), room.halo[: info.num_halo])
        self._info, self._staged_for, self._staged = info, None, frozenset(histories)
        self._to_push.clear()
        if info.upcoming is not None:
            self._pull_ahead(info, info.upcoming, histories)

    def _pull_ahead(self, info: BatchInfo, following: BatchInfo, histories: Mapping[str, History]) -> None:
        shared = self._shared[: following.num_halo + 1]
        _locate(self._halo(following), self._index[info][: info.batch_size], shared)
        self._wait(self._pulls, self._main)  # staged rows were merged, and it is known which rows to leave out
        with torch.cuda.stream(self._pulls):
            for slot, history in histories.items():
                staged = self._buffers[slot].staged[: following.num_halo]
                history.read(self._halo(following), staged, skip=shared[: following.num_halo])
        self._staged_for = following

    def push(self, slot: str, history: History, rows: Tensor) -> None:
        """See :meth:`Transfer.push`."""
        info = self._current
        self.reserve(info.batch_size, info.num_halo, {slot: history})
        recent = self._buffers[slot].recent[: info.batch_size]
        recent.copy_(rows)
        self._to_push.append((history, recent))

    def end(self) -> None:
        """See :meth:`Transfer.end`; what was pushed is written during the backward pass."""
        info = self._current
        self._wait(self._pushes, self._main)  # the rows are computed
        with torch.cuda.stream(self._pushes):
            for history, rows in self._to_push:
                history.push(rows, self._index[info][: info.batch_size])
        self._to_push.clear()

    def pull(self, slot: str, history: History, dtype: torch.dtype) -> Tensor:
        """See :meth:`Transfer.pull`."""
        info = self._current
        if slot in self._staged:
            return self._buffers[slot].halo[: info.num_halo].to(dtype)
        # A history that did not exist when the step began.
        return history.pull(self._halo(info), device=self._device, dtype=dtype)

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        self._wait(self._main, self._pushes)
        self._wait(self._main, self._pulls)
        self._staged_for = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """See :meth:`Transfer.begun`."""
        self._begun_already = True
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

    @property
    def _current(self) -> BatchInfo:
        if self._info is None:
            raise RuntimeError("begin() comes before push() and pull()")
        return self._info

    def _index_of(self, info: BatchInfo) -> Tensor:
        # Where it was placed if it was, since a captured step reads it there.
        known = self._index.get(info) if "n_id" not in info.placed else None
        return info.index(self._device) if known is None else known

    def _halo(self, info: BatchInfo) -> Tensor:
        return self._index[info][info.batch_size :]


def _locate(halo: Tensor, nodes: Tensor, shared: Tensor) -> None:
    """For each halo node write its position among the nodes, or -1.

    Args:
        halo: Node indices in ascending order, ``[num_halo]``.
        nodes: Distinct node indices, ``[count]``.
        shared: Where to write, ``[num_halo + 1]``; the last entry is scratch.
    """
    shared.fill_(-1)
    if not halo.numel():
        return
    place = torch.searchsorted(halo, nodes)
    found = halo[place.clamp(max=halo.numel() - 1)] == nodes
    place = torch.where(found, place, halo.numel())
    shared.scatter_(0, place, torch.arange(nodes.numel(), dtype=torch.int32, device=nodes.device))


def transfer_for(device: torch.device, *, host: bool) -> Transfer:
    """The fastest way to move rows between a device and histories in host memory or on the device itself."""
    return Ahead(device) if host and use_triton(torch.empty(0, device=device)) else Direct(device)
