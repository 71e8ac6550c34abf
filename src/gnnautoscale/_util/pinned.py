"""Page-locks host memory where it lies, so that a GPU reads and writes it over the bus without a copy.

PyTorch's own pinned memory is allocated anew and in powers of two: a table would be copied, and take up to twice its
size.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAPS = Path("/proc/self/maps")
# Tensors of at least so many bytes have their pages to themselves: the C library maps memory for each of them.
_LARGE = 1 << 26
# How the names of mappings begin that are memory only.
_NO_FILES = ("/dev/shm/", "/memfd:", "/dev/zero", "[")  # noqa: S108
# Where tensors may begin in a buffer.
_ALIGNMENT = 16
# How many owners keep each range of memory locked, by its first byte and its size.
_OWNERS: Counter[tuple[int, int]] = Counter()
# Memory that nobody needs any more: the locked ranges and the tensors of each former owner.
_LEFT: list[tuple[list[tuple[int, int]], list[Tensor]]] = []


class Pinned:
    """Keeps tensors in page-locked host memory for as long as it lives.

    Large ones are locked where they lie; small ones, which may share a page with something else, are copied. None of
    this memory is given back before a GPU is done with it: kernels read it unknown to PyTorch's allocator.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        weakref.finalize(self, _release, os.getpid(), self._ranges, self._kept).atexit = False

    def pin(self, tensor: Tensor) -> Tensor | None:
        """The tensor, or a copy of it, in memory that a GPU can use directly.

        ``None`` if there is no GPU, if the tensor is in device memory or not contiguous, if it lies in a file, which
        would have to be read as a whole, or if the system refuses.
        """
        if tensor.is_cuda or not torch.cuda.is_available() or not tensor.is_contiguous():
            return None
        place = tensor.data_ptr(), tensor.nbytes
        if not _OWNERS[place]:
            if not tensor.nbytes or (tensor.is_pinned() and tensor.view(-1)[-1:].is_pinned()):
                return tensor
            if _is_in_file(place[0]):
                return None
            if tensor.nbytes < _LARGE:
                copied = tensor.pin_memory()
                self._kept.append(copied)
                return copied
            if _cuda_error(_runtime().cudaHostRegister(*place, 0)):
                return None
        _OWNERS[place] += 1
        self._ranges.append(place)
        self._kept.append(tensor)
        return tensor


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Pinned]:
    """Zeros in page-locked host memory, and what keeps them there; if the system refuses, PyTorch's error says so."""
    owner = Pinned()
    zeros = owner.pin(_lazy_zeros(shape, dtype))
    return torch.zeros(shape, dtype=dtype, pin_memory=True) if zeros is None else zeros, owner


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that begin with a page, so that rows begin with a line of the bus; the system makes pages when needed."""
    num_bytes = prod(shape) * dtype.itemsize
    room = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    first = -room.ctypes.data % mmap.PAGESIZE
    # Sliced by NumPy: PyTorch asks whether the first byte of a storage is pinned.
    return torch.from_numpy(room[first : first + num_bytes]).view(dtype).view(shape)


def copy_staged(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from host memory to a device, without waiting for what a GPU does.

    It goes through pinned memory that is never freed: freeing some while a CUDA graph is captured would break it.
    """
    return copy_staged_together([tensor], device)[0]


def copy_staged_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """See :func:`copy_staged`; several tensors take the time of one."""
    if device.type != "cuda" or not any(tensor.numel() for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    return _staging(device.index).copy(tensors, device)


class _Staging:
    """Pieces of pinned memory that are used in turn."""

    _PIECES = 16

    def __init__(self) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8) for _ in range(self._PIECES)]
        self._copied: list[torch.cuda.Event | None] = [None] * self._PIECES
        self._next = 0

    def copy(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors))
        turn, self._next = self._next, (self._next + 1) % self._PIECES
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()  # usually long done
        if self._pieces[turn].numel() < ends[-1]:
            self._pieces[turn] = torch.empty(2 * ends[-1], dtype=torch.uint8, pin_memory=True)
        staged = self._pieces[turn][: ends[-1]]
        for tensor, start in zip(tensors, [0, *ends], strict=False):
            _view(staged, start, tensor).copy_(tensor)
        there = staged.to(device, non_blocking=True)
        self._copied[turn] = torch.cuda.current_stream(device).record_event()
        return [_view(there, start, tensor) for tensor, start in zip(tensors, [0, *ends], strict=False)]


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor of the same type and shape in a buffer of bytes."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _staging(index: int | None) -> _Staging:
    """The pieces of this thread for a device."""
    known = _OF_THREAD.staging
    if index not in known:
        known[index] = _Staging()
    return known[index]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.staging: dict[int | None, _Staging] = {}


_OF_THREAD = _OfThread()


class _Places:
    """Places in pinned memory for numbers that come from a GPU, used in turn."""

    _COUNT = 1 << 16

    def __init__(self) -> None:
        self._numbers = torch.empty(self._COUNT, dtype=torch.int32, pin_memory=True)
        self._next = count()

    def take(self) -> Tensor:
        """The next place, ``[1]``, int32; it is taken again after many others."""
        place = next(self._next) % self._COUNT
        return self._numbers[place : place + 1]


@cache
def arriving_numbers() -> _Places:
    """The places of this process."""
    return _Places()


def _release(process: int, ranges: list[tuple[int, int]], kept: list[Tensor]) -> None:
    """Give back the memory of an owner; if a CUDA graph is being captured, which waiting would break, later."""
    if not kept or process != os.getpid():  # a worker that was forked has no part in it
        return
    _LEFT.append((ranges, kept))
    if torch.cuda.is_current_stream_capturing():
        return
    torch.cuda.synchronize()  # the GPU may still be using it
    while _LEFT:
        ranges, kept = _LEFT.pop()
        _OWNERS.subtract(ranges)
        for place in {place for place in ranges if not _OWNERS[place]}:
            del _OWNERS[place]
            _cuda_error(_runtime().cudaHostUnregister(place[0]))
        kept.clear()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cuda_error(result: object) -> bool:
    return int(result) != 0  # type: ignore[call-overload, no-any-return]


def _is_in_file(address: int) -> bool:
    """Whether an address belongs to a file that is mapped into memory; unknown on other systems than Linux."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        bounds, _, _, _, inode, *name = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            in_memory = not name or name[0].startswith(_NO_FILES)
            return inode != "0" and not in_memory
    return False
