"""Adds up the time of named pieces of work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the time of named pieces of work; a piece inside of another one is not counted twice."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time in this context for a piece of work."""
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work that was launched belongs to the piece that launched it
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] = self.total(self._running[-1]) + now - self._since
        self._since = now

    def total(self, name: str) -> float:
        """The time of a piece of work so far."""
        return self._seconds.get(name, 0.0)
