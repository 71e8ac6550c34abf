"""Page-locks host memory where it lies, so that a GPU reads and writes it over the bus without a copy.

PyTorch's own pinned memory is allocated anew and in powers of two: a table would be copied, and take up to twice its
size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAPS = Path("/proc/self/maps")
# How many owners keep each range of memory locked, by its first byte and its size.
_OWNERS: Counter[tuple[int, int]] = Counter()


class Pinned:
    """Keeps tensors in page-locked host memory for as long as it lives.

    A tensor stays as it is if there is no GPU, if it is in device memory or pinned already, if the system refuses, or if
    it lies in a file, which would have to be read as a whole.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        weakref.finalize(self, _release, self._ranges, self._kept).atexit = False

    def add(self, tensor: Tensor) -> bool:
        """Lock a tensor's memory; returns whether a GPU can use it directly."""
        if tensor.is_cuda or not torch.cuda.is_available() or not tensor.is_contiguous():
            return False
        place = tensor.data_ptr(), tensor.nbytes
        if not tensor.nbytes or (not _OWNERS[place] and tensor.is_pinned()):
            return True
        if _is_in_file(place[0]):
            return False
        if not _OWNERS[place] and _cuda_error(_runtime().cudaHostRegister(*place, 0)):
            return False
        _OWNERS[place] += 1
        self._ranges.append(place)
        self._kept.append(tensor)
        return True


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Pinned]:
    """Zeros in page-locked host memory, and what keeps them there; if the system refuses, PyTorch's error says so."""
    zeros, pinned = torch.zeros(shape, dtype=dtype), Pinned()
    return (zeros, pinned) if pinned.add(zeros) else (torch.zeros(shape, dtype=dtype, pin_memory=True), pinned)


def _release(ranges: list[tuple[int, int]], kept: list[Tensor]) -> None:
    for place in ranges:
        _OWNERS[place] -= 1
        if not _OWNERS[place]:
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
            in_memory = not name or name[0].startswith(("/dev/shm/", "/memfd:", "/dev/zero", "["))
            return inode != "0" and not in_memory
    return False
