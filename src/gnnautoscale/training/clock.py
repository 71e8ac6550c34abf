"""Adds up the time of named pieces of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the seconds of named pieces of work in place; time inside a nested piece counts for that piece only.

    It waits for a GPU, so that work counts for the piece that launched it. ``switched`` is called with the name of the
    piece that runs from now on, and with an empty one when none does.
    """

    def __init__(
        self, seconds: dict[str, float], device: torch.device, switched: Callable[[str], None] | None = None
    ) -> None:
        self._seconds, self._device, self._switched = seconds, device, switched
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time in this context for a piece of work."""
        self._count()
        self._running.append(name)
        self._tell()
        try:
            yield
        finally:
            self._count()
            self._running.pop()
            self._tell()

    def _tell(self) -> None:
        if self._switched is not None:
            self._switched(self._running[-1] if self._running else "")

    def _count(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] = self.total(self._running[-1]) + now - self._since
        self._since = now

    def total(self, name: str) -> float:
        """Seconds of a piece of work so far."""
        return self._seconds.get(name, 0.0)
