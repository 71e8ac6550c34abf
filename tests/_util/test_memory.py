"""How much host memory there is, within all limits."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

import gnnautoscale._util.memory as memory_module
from gnnautoscale._util import available_memory

GB = 2**30


def fill(folder: Path, **contents: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a system with 100 GB free and no limits."""
    monkeypatch.setattr(memory_module, "_ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    fill(tmp_path / "proc", meminfo=f"MemTotal: 5 kB\nMemAvailable:   {100 * 2**20} kB")
    return tmp_path


def test_without_limits_it_is_what_the_system_says(system: Path) -> None:
    assert available_memory() == 100 * GB


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "expected"),
    [
        ("max", 5 * GB, "anon 1", 100 * GB),
        (8 * GB, 5 * GB, "anon 1", 3 * GB),
        # Cached files make way.
        (8 * GB, 5 * GB, f"anon 1\ninactive_file {2 * GB}\nactive_file {GB}", 5 * GB),
        (8 * GB, 9 * GB, "anon 1", 0),
        (8 * GB, 7 * GB, f"inactive_file {9 * GB}", 8 * GB),
        (800 * GB, 5 * GB, "", 100 * GB),
        (8 * GB, 2 * GB, None, 6 * GB),
    ],
)
def test_limits_of_a_control_group_count(
    system: Path, limit: Any, used: int, statistics: str | None, expected: int
) -> None:
    fill(system / "sys/fs/cgroup", memory__max=limit, memory__current=used)
    if statistics is not None:
        fill(system / "sys/fs/cgroup", memory__stat=statistics)
    assert available_memory() == expected


def test_limits_of_an_older_control_group_count(system: Path) -> None:
    statistics = f"cache 7\ninactive_file 5\ntotal_inactive_file {GB}"
    folder = system / "sys/fs/cgroup/memory"
    fill(folder, memory__limit_in_bytes=8 * GB, memory__usage_in_bytes=6 * GB, memory__stat=statistics)
    assert available_memory() == 3 * GB


@pytest.mark.parametrize(("limit", "expected"), [(9 * GB, 6 * GB), (2 * GB, 0), (1000 * GB, 100 * GB)])
def test_limits_of_the_process_count(system: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit) if kind == resource.RLIMIT_DATA else None)
    fill(system / "proc/self", status=f"VmPeak: 1 kB\nVmData:\t {3 * 2**20} kB")
    assert available_memory() == expected


def test_this_machine_has_memory() -> None:
    assert 2**20 < (available_memory() or 0) < 2**50
    assert (memory_module._entry(Path("/proc/self/status"), "VmData:") or 0) > 2**10


def test_other_systems_do_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert available_memory() is None
