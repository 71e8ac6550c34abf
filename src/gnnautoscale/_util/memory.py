"""How much host memory this process can still use."""

from __future__ import annotations

import resource
from pathlib import Path

# Where control groups of version 2 and 1 say what a process may take, what is taken, and what of that is idle cache.
_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def available_memory() -> int:
    """Bytes of host memory that this process can still use, as far as the system and its limits tell."""
    free = [_meminfo("MemAvailable")]
    for folder, limit, used, cached in _GROUPS:
        most, taken = _number(folder / limit), _number(folder / used)
        if most is not None and taken is not None:
            # What is cached of files counts as taken there, but makes way for what is needed.
            free.append(min(max(most - taken + _statistic(folder / "memory.stat", cached), 0), most))
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        free.append(max(most - _status("VmData"), 0))
    return min(free)


def _meminfo(name: str) -> int:
    return _field(Path("/proc/meminfo"), name)


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name)


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{file} has no {name}")


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = (line.partition(" ") for line in file.read_text().splitlines())
        return next((int(value) for key, _, value in lines if key == name), 0)
    except OSError:
        return 0
