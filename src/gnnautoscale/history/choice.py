"""Which medium histories fit into."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Literal

import torch

from gnnautoscale.errors import InputError

Medium = Literal["device", "host", "disk"]
Storage = Literal["device", "host", "disk", "auto"]

# The share of what is free that histories may take: the rest is for the model, its batches and everything else.
_SHARE = 0.5
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


def choose_medium(num_bytes: int, device: torch.device, *, disk: bool) -> tuple[Medium, str]:
    """The fastest medium that has room for all histories.

    Args:
        num_bytes: Bytes that they take.
        device: The compute device.
        disk: Whether there is a folder for histories on disk.

    Returns:
        The medium, and why it is this one.

    Example:
        >>> choose_medium(1000, torch.device("cpu"), disk=False)[0]
        'device'
    """
    needed = f"histories take {_amount(num_bytes)}"
    reasons = []
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if num_bytes <= _SHARE * free:
            return "device", f"{needed}, and {_amount(free)} of the GPU's memory are free"
        reasons.append(f"more than half of the GPU's free {_amount(free)}")
    free = available_memory()
    if num_bytes <= _SHARE * free:
        medium: Medium = "host" if device.type == "cuda" else "device"
        return medium, ", ".join([needed, *reasons, f"and {_amount(free)} of host memory are free"])
    reasons.append(f"more than half of the free {_amount(free)} of host memory")
    if not disk:
        raise InputError(
            "histories must fit into memory if there is no folder for them on disk",
            got=f"{_amount(num_bytes)}, {' and '.join(reasons)}",
            fix="Pass history_dir, keep histories in a smaller type, or choose the storage yourself.",
        )
    return "disk", ", ".join([needed, " and ".join(reasons)])


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


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
