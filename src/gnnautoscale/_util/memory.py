"""Host memory that this process can still use."""

from __future__ import annotations

from pathlib import Path

# Where Linux says so.
_ROOT = Path("/")
# Control groups of version 2 and 1: their limit, what is taken of it, and how much of that is idle cache.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int | None:
    """Bytes of host memory that this process can still use within all limits; ``None`` on other systems than Linux."""
    available = _kilobytes(_ROOT / "proc/meminfo", "MemAvailable")
    if available is None:
        return None
    free = [available]
    for folder, limit, used, cached in _GROUPS:
        most, taken = _number(_ROOT / folder / limit), _number(_ROOT / folder / used)
        if most is not None and taken is not None:
            # Cached files count as taken, but make way.
            free.append(min(max(most - taken + _statistic(_ROOT / folder / "memory.stat", cached), 0), most))
    most = _data_limit()
    if most is not None:
        free.append(max(most - (_kilobytes(_ROOT / "proc/self/status", "VmData") or 0), 0))
    return min(free)


def _data_limit() -> int | None:
    """The most bytes of data that this process may have."""
    import resource  # Windows has no such module

    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if most == resource.RLIM_INFINITY else most


def _kilobytes(file: Path, name: str) -> int | None:
    """A line such as ``MemAvailable: 4 kB``, in bytes."""
    for line in _lines(file):
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _number(file: Path) -> int | None:
    try:
        return int(_lines(file)[0])
    except (IndexError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    lines = (line.partition(" ") for line in _lines(file))
    return next((int(value) for key, _, value in lines if key == name), 0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
