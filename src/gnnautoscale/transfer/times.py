"""Measures what training steps spend their time on, without waiting for a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

_NOTHING = nullcontext()


class Times:
    """Adds up the time of named pieces of training steps; this one measures nothing and costs nothing."""

    def during(self, name: str) -> AbstractContextManager[None]:
        """Count the time in this context for a piece of work; pieces do not contain each other."""
        return _NOTHING

    def taken(self) -> dict[str, float]:
        """The seconds of each piece since the last call, once all work is done."""
        return {}

    def stop(self) -> None:
        """Stop measuring."""


class HostTimes(Times):
    """Times of the host's own work."""

    def __init__(self) -> None:
        self._pieces: dict[str, _Piece] = {}

    def during(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Times.during`."""
        return self._pieces.setdefault(name, _Piece())

    def taken(self) -> dict[str, float]:
        """See :meth:`Times.taken`."""
        pieces, self._pieces = self._pieces, {}
        return {name: piece.seconds for name, piece in pieces.items()}


class _Piece(AbstractContextManager[None]):
    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._start


class DeviceTimes(Times):
    """Times that a GPU's stream spends on a piece of work, or waits for it, between two events on that stream.

    Events are read once all work is done, and used again afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: list[tuple[str, _Marks]] = []
        self._spare: list[_Marks] = []
        self._stopped = False

    def during(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Times.during`."""
        if self._stopped:
            return _NOTHING
        marks = self._spare.pop() if self._spare else _Marks(self._device)
        self._used.append((name, marks))
        return marks

    def taken(self) -> dict[str, float]:
        """See :meth:`Times.taken`."""
        seconds: dict[str, float] = {}
        for name, marks in self._used:
            marks.last.synchronize()
            seconds[name] = seconds.get(name, 0.0) + marks.first.elapsed_time(marks.last) / 1000
            self._spare.append(marks)
        self._used.clear()
        return seconds

    def stop(self) -> None:
        """See :meth:`Times.stop`; events would pile up without further calls of :meth:`taken`."""
        self._stopped = True
        self._used.clear()


class _Marks(AbstractContextManager[None]):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        self.first.record(torch.cuda.current_stream(self._device))

    def __exit__(self, *_: object) -> None:
        self.last.record(torch.cuda.current_stream(self._device))


def times_for(device: torch.device) -> Times:
    """Measures the times of training steps on a device."""
    return DeviceTimes(device) if device.type == "cuda" else HostTimes()
