"""CUDA graphs of any work, the memory they share, and what stands in the way of one."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from gnnautoscale._util import as_if_captured


class GraphPool:
    """Captures work on a GPU; all of its graphs share memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def renew(self) -> None:
        """Let go of the memory of earlier graphs, which lives as long as any of them."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, work: Callable[[], Any], generators: Iterable[torch.Generator] = ()
    ) -> tuple[torch.cuda.CUDAGraph, Any, str | None]:
        """Capture some work; returns the graph, the work's result, and the reason if it could not be captured.

        It may draw from further random ``generators`` than the device's own.
        """
        if self._pool is None:
            self.renew()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        default = torch.cuda.default_generators[self._device.index]
        offset, before = default.get_offset(), default.graphsafe_get_state()
        result, reason = None, None
        # Other threads, such as a progress bar's, go on meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        except Exception as error:  # the work runs uncaptured next, and raises what has nothing to do with capture
            reason = (str(error) or type(error).__name__).splitlines()[0]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # nothing came before the error
                graph.capture_end()
            default.graphsafe_set_state(before)  # the work may have drawn from another one
        except RuntimeError as error:
            reason = reason or str(error).splitlines()[0]
            _recover_from_capture(self._device, self._pool, offset)  # the state before is still in the capture
        return graph, result, reason


@contextmanager
def on_training_stream(device: torch.device) -> Iterator[None]:
    """Work on the stream of all training, after what the current stream has been given; it waits for this work."""
    if device.type != "cuda" or torch.cuda.current_stream(device) == _training_stream(device):
        yield
        return
    main, stream = torch.cuda.current_stream(device), _training_stream(device)
    stream.wait_stream(main)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        main.wait_stream(stream)


@cache
def _training_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all training, since PyTorch keeps work space for each; steps precede transfers beside them."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


def _recover_from_capture(device: torch.device, pool: Any, offset: int) -> None:
    """Put PyTorch's allocator and random numbers right after a capture that ended with an error."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    fresh.set_offset(offset)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def watching(model: nn.Module) -> Iterator[list[str]]:
    """List the reasons why a step cannot be captured: work that a replay would not, or could not, repeat."""
    reasons: list[str] = []
    before = _host_state(model)
    with _waits_noticed() as waits, as_if_captured():
        yield reasons
    if waits:
        reasons.append("the model waits for values on the host (such as .item(), or indexing with a mask)")
    after = _host_state(model)
    reasons += [reason for reason, value in before.items() if value != after[reason]]


@contextmanager
def _waits_noticed() -> Iterator[list[str]]:
    """Collect PyTorch's warnings about operations that make the host wait for a GPU."""
    waits: list[str] = []
    if not torch.cuda.is_available():
        yield waits
        return
    this_thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()

    def note(message: Warning | str, *_: Any) -> None:
        # Threads that move rows may wait.
        if threading.get_ident() == this_thread and "called a synchronizing" in str(message):
            waits.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _host_state(model: nn.Module) -> dict[str, Any]:
    plain = {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    }
    return {
        "the model draws random numbers on the host": (
            random.getstate(),
            repr(np.random.get_state(legacy=False)["state"]),  # noqa: NPY002
            torch.get_rng_state().numpy().tobytes(),
        ),
        "the model's attributes change from step to step": plain,
    }
