"""How much memory a piece of work needs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import gnnautoscale._util.peak_memory
from gnnautoscale._util.peak_memory import PeakMemory, resident_memory

CPU = torch.device("cpu")
MEGABYTE = 2**20

needs_statm = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not tell how much memory a process has"
)


def allocate(megabytes: int) -> torch.Tensor:
    """Memory that is really there: every page is written, and seen by a sample."""
    rows = torch.ones(megabytes * MEGABYTE, dtype=torch.uint8)
    time.sleep(0.05)
    return rows


@needs_statm
def test_an_allocation_is_seen() -> None:
    with PeakMemory(CPU) as peak:
        kept = allocate(64)
    assert peak.num_bytes is not None
    assert 60 * MEGABYTE <= peak.num_bytes <= 90 * MEGABYTE
    assert kept.numel() == 64 * MEGABYTE


@needs_statm
def test_the_peak_counts_and_not_the_end() -> None:
    with PeakMemory(CPU) as peak:
        allocate(64)
        allocate(16)
    assert peak.num_bytes is not None
    assert 60 * MEGABYTE <= peak.num_bytes <= 100 * MEGABYTE


@needs_statm
def test_a_pause_does_not_count() -> None:
    with PeakMemory(CPU) as peak:
        allocate(32)
        with peak.paused():
            allocate(128)
        allocate(8)
    assert peak.num_bytes is not None
    assert 28 * MEGABYTE <= peak.num_bytes <= 64 * MEGABYTE


@needs_statm
def test_what_was_there_before_does_not_count() -> None:
    before = allocate(64)
    with PeakMemory(CPU) as peak:
        time.sleep(0.02)
    assert peak.num_bytes is not None
    assert 0 <= peak.num_bytes < 16 * MEGABYTE
    assert before.numel() == 64 * MEGABYTE


@needs_statm
def test_a_watch_can_be_used_again() -> None:
    peak = PeakMemory(CPU)
    with peak:
        pass
    with peak:
        kept = allocate(64)
    assert peak.num_bytes is not None
    assert 60 * MEGABYTE <= peak.num_bytes <= 90 * MEGABYTE
    assert kept.numel() == 64 * MEGABYTE


@needs_statm
def test_an_error_passes_and_ends_the_watch() -> None:
    peak = PeakMemory(CPU)
    with pytest.raises(ZeroDivisionError), peak:
        _ = 1 // 0
    assert peak.num_bytes is not None
    assert peak._thread is not None
    assert not peak._thread.is_alive()


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gnnautoscale._util.peak_memory, "_STATM", tmp_path / "statm")
    with PeakMemory(CPU) as peak:
        pass
    assert peak.num_bytes is None


@needs_statm
def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_memory()
    kept = allocate(64)
    after = resident_memory()
    assert before is not None
    assert after is not None
    assert 60 * MEGABYTE <= after - before <= 90 * MEGABYTE
    assert kept.numel() == 64 * MEGABYTE


def test_resident_memory_is_unknown_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gnnautoscale._util.peak_memory, "_STATM", Path("nowhere"))
    assert resident_memory() is None
