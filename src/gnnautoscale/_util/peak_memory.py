"""Measures the peak memory of a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


class PeakMemory:
    """Watches memory while the context is open.

    On a GPU it counts what PyTorch's allocator held at its peak. On a CPU it counts how far the process's resident
    memory rose above its value on entry, sampled every few milliseconds; ``None`` on other systems than Linux.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._looking = threading.Lock()
        self._start = self._highest = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._stop.clear()
        self._highest = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif _STATM.exists():
            _return_free_memory()
            self._start = self._highest = _resident()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._highest = max(self._highest, _resident())
        self.num_bytes = self.so_far

    @property
    def so_far(self) -> int | None:
        """The peak so far, as of the last sample."""
        if self.device.type == "cuda":
            return max(self._highest, torch.cuda.max_memory_allocated(self.device))
        return None if self._thread is None else self._highest - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Work in this context does not count."""
        if self.device.type == "cuda":
            self._highest = max(self._highest, torch.cuda.max_memory_allocated(self.device))
            yield
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with self._looking:
                yield
                _return_free_memory()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            with self._looking:
                self._highest = max(self._highest, _resident())


def _return_free_memory() -> None:
    """Hand freed memory back to the system, so that using it again counts."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


def resident_memory() -> int | None:
    """Bytes that this process holds in host memory, of what it has not freed; ``None`` on other systems than Linux."""
    _return_free_memory()
    return _resident() if _STATM.exists() else None


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
