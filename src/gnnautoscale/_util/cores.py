"""CPU cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Number of cores that this process may use; at least 1."""
    if hasattr(os, "sched_getaffinity"):  # Linux, where a job may have few cores of a large machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
