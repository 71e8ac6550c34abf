"""Captured steps without a GPU: a tape of tensor operations takes the place of a CUDA graph.

It notes every operation of a step, and plays them again on the same memory, as a replay does: nothing of the step's
Python runs. What it cannot show is what streams do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import gnnautoscale.forward.memory as memory_module
from gnnautoscale.graph.batch_source import BatchSource
from gnnautoscale.history import History
from gnnautoscale.ranks import exchange
from gnnautoscale.replay.graphs import GraphPool
from gnnautoscale.replay.packing import Packer
from gnnautoscale.replay.replayer import Replayer
from gnnautoscale.transfer import DirectTransfer, Transfer
from gnnautoscale.transfer.streams import StreamTransfer
from gnnautoscale.transfer.thread import ThreadTransfer


class Line:
    """A stream that does everything at once."""

    def __init__(self, *_: Any) -> None:
        """Any device will do."""

    def wait_stream(self, other: Any) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """Likewise."""


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what needs a GPU's streams run on the CPU, where nothing overlaps."""
    monkeypatch.setattr(torch.cuda, "Stream", Line)
    monkeypatch.setattr(torch.cuda, "current_stream", Line)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)


class DeviceLike(ThreadTransfer):
    """Moves rows between files and the CPU as it does on a GPU, where they pass through memory of their own."""

    def __init__(self, device: torch.device, first_late: int | None = None) -> None:
        super().__init__(device, first_late)
        self._on_gpu = True

    def _make_room(self, history: History) -> Any:
        self._on_gpu = False
        room = super()._make_room(history)
        self._on_gpu = True
        room.halo = torch.empty(self._most_halo, history.codec.raw_width, dtype=history.codec.raw_dtype)
        return room

    def _mark(self) -> Any:
        return Line()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of some work, which ran when it was taped; the first replay is that run."""

    #: How often tapes were played, so that a test sees that they were.
    played = 0
    #: Whether one is being made.
    recording = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, list[Any]]] = []
        self._is_first = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note it."""
        out = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, tree_leaves(out)))
        return out

    def replay(self) -> None:
        """Run all operations again; their results take the place of those before."""
        Tape.played += 1
        if self._is_first:
            self._is_first = False
            return
        # What has another size than before, such as the positions of some rows, cannot take its place.
        resized: dict[int, Tensor] = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for func, args, kwargs, outs in self._steps:
                args, kwargs = tree_map(lambda value: resized.get(id(value), value), (args, kwargs))
                for before, now in zip(outs, tree_leaves(func(*args, **kwargs)), strict=True):
                    # Views, and matrices made of others, show what is in the same memory.
                    is_new = isinstance(before, Tensor) and before.layout == torch.strided
                    if is_new and before.shape != now.shape:
                        resized[id(before)] = now
                    elif is_new and before.data_ptr() != now.data_ptr():
                        before.copy_(now)


def _record(pool: GraphPool, work: Callable[[], Any], generators: Iterable[Any] = ()) -> tuple[Tape, Any, None]:
    Tape.recording = True
    with (tape := Tape()):
        result = work()
    Tape.recording = False
    return tape, result, None


def capture_on_tape(monkeypatch: pytest.MonkeyPatch, *, resident: bool = True) -> None:
    """Capture steps on the CPU, with the transfers that a GPU has; batches stay in place, or take turns."""

    checked = BatchSource._checked

    def recurring(source: BatchSource, batch: Any, info: Any) -> Any:
        info.recurring, info.key = 1, info.key or tuple(info.own.runs)
        return checked(source, batch, info)

    def transfer(medium: str | None, device: torch.device, *, first_late: int | None = None, **_: Any) -> Transfer:
        if medium == "device":
            return DirectTransfer()
        return (StreamTransfer if medium == "host" else DeviceLike)(device, first_late)

    without_streams(monkeypatch)
    monkeypatch.setattr(exchange, "is_capturing", lambda: Tape.recording)
    monkeypatch.setattr(Replayer, "_obstacle", lambda *_: None)
    monkeypatch.setattr(BatchSource, "_checked", recurring)
    monkeypatch.setattr(memory_module, "open_transfer", transfer)
    monkeypatch.setattr(GraphPool, "renew", lambda _: None)
    monkeypatch.setattr(GraphPool, "record", _record)
    monkeypatch.setattr(Packer, "_should_stay", lambda *_: resident)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
