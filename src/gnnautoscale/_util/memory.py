"""Host memory that this process can still use."""

from __future__ import annotations

from pathlib import Path

import torch

# Messages of plain RuntimeErrors that mean a lack of memory.
_NO_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "CUDA error: out of memory",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
    "unable to mmap",
    "can't start new thread",
    "std::bad_alloc",
)
# Where Linux says so.
_ROOT = Path("/")
# Control groups of version 2 and 1: their limit, what is taken of it, and how much of that is idle cache.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int | None:
    """Bytes of host memory that this process can still use within all limits; ``None`` on other systems than Linux."""
    available = _entry(_ROOT / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    import resource  # Windows has no such module

    free = [available * 1024]
    for folder, limit, used, cached in _GROUPS:
        most, taken = _number(_ROOT / folder / limit), _number(_ROOT / folder / used)
        if most is not None and taken is not None:
            # Cached files count as taken, but make way.
            free.append(min(max(most - taken + (_entry(_ROOT / folder / "memory.stat", cached) or 0), 0), most))
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        free.append(max(most - (_entry(_ROOT / "proc/self/status", "VmData:") or 0) * 1024, 0))
    return min(free)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated, on the host or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _entry(file: Path, name: str) -> int | None:
    """The number in a line such as ``MemAvailable: 4 kB``."""
    lines = (line.split() for line in _lines(file))
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def _number(file: Path) -> int | None:
    try:
        return int(_lines(file)[0])
    except (IndexError, ValueError):
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
