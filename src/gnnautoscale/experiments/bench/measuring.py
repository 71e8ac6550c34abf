"""Wall-clock time and memory of a piece of work, and what is too large to be tried."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gnnautoscale._util import available_memory

#: What a benchmark measured, by name.
Numbers = dict[str, Any]
T = TypeVar("T")


def free_memory(device: torch.device) -> int:
    """Free garbage, cached GPU memory and cuBLAS workspaces; returns the bytes of these workspaces, 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    freed = before - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return freed


def wake(device: torch.device) -> None:
    """Let a device load what any program needs, so that nothing that is measured has to wait for it."""
    ones = torch.ones(8, 8, device=device)
    (ones @ ones).sum().item()


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """The seconds that a piece of work takes until the device is done, and its result."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def if_it_fits(work: Callable[[], T], needed: int, device: torch.device) -> T | None:
    """The result of a piece of work, or ``None`` if memory does not suffice.

    A GPU tries. A CPU looks first whether it has the ``needed`` bytes, because running out would end the process.
    """
    available = available_memory() if device.type == "cpu" else None
    if available is not None and available < needed:
        return None
    try:
        return work()
    except torch.OutOfMemoryError:
        return None
