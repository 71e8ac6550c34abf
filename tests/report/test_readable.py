"""Numbers for people: ticks, labels and thinned curves."""

from __future__ import annotations

import math

from gnnautoscale.report import readable


def test_only_finite_numbers_are_numbers() -> None:
    assert [readable.finite(value) for value in (3, None, math.nan, "3", True)] == [3.0, None, None, None, None]


def test_numbers_are_short() -> None:
    numbers = {1234567: "1,234,567", 1234.5: "1,234", 0.98765: "0.9877", 2.5e-7: "2.5e-7", 10: "10", None: "-"}
    assert {value: readable.short(value) for value in numbers} == numbers


def test_amounts_have_units() -> None:
    sizes = {512: "512 B", 3 * 2**20: "3 MB", 2.5 * 2**30: "2.5 GB", None: "-"}
    assert {value: readable.bytes_text(value) for value in sizes} == sizes
    assert readable.unit_of_bytes([10, 3000]) == (1024, "KB")
    assert readable.unit_of_bytes([]) == (1, "B")
    times = {0: "0 s", 2e-6: "2 µs", 0.0123: "12.3 ms", 2.5: "2.5 s", 150: "2.5 min", 9000: "2.5 h", None: "-"}
    assert {value: readable.seconds_text(value) for value in times} == times


def test_ticks_are_round_and_inside() -> None:
    assert readable.ticks(0, 0.3) == [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
    assert readable.ticks(-3, 3) == [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    assert readable.ticks(80.2, 83.9) == [81.0, 82.0, 83.0]
    assert readable.ticks(5, 5) == [5]
    assert readable.ticks(1, 2, whole=True) == [1.0, 2.0]
    assert readable.ticks(1, 200, 6, whole=True) == [50.0, 100.0, 150.0, 200.0]


def test_every_range_has_a_few_ticks() -> None:
    for span in (1e-9, 3e-4, 0.7, 12.0, 4e5, 8e11):
        for start in (-1.0, 0.0, 0.3, 1.0):
            low, high = start * span, (start + 1) * span
            found = readable.ticks(low, high)
            assert 3 <= len(found) <= 9
            assert all(low - 1e-9 * span <= tick <= high + 1e-9 * span for tick in found)


def test_logarithmic_ticks() -> None:
    assert readable.log_ticks(0.03, 3000) == [0.1, 1.0, 10.0, 100.0, 1000.0]
    assert readable.log_ticks(1.5, 30) == [2.0, 5.0, 10.0, 20.0]
    assert len(readable.log_ticks(1e-30, 1e30)) <= 8


def test_labels_of_ticks() -> None:
    assert readable.tick_labels([0.0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"]
    assert readable.tick_labels([0.0, 150000.0]) == ["0", "150k"]
    assert readable.tick_labels([0.0, 1.5e6]) == ["0", "1.5M"]
    assert readable.tick_labels([-0.5, 0.5]) == ["-0.5", "0.5"]
    assert readable.tick_labels([0.0, 20000.0]) == ["0", "20,000"]
    assert readable.tick_labels([0.0, 2e-6]) == ["0", "2e-6"]


def test_thinning_keeps_ends_and_peaks() -> None:
    points = [(float(x), math.sin(x / 500)) for x in range(10000)]
    points[7777] = (7777.0, 50.0)
    kept = readable.thin(points, 100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[7777]} <= set(kept)
    assert readable.thin(points[:100], 100) == points[:100]
    peak = [(x, 9.0 if x == 5 else 0.0) for x in range(12)]
    assert readable.thin(peak, 6) == [(0, 0.0), (1, 0.0), (5, 9.0), (6, 0.0), (11, 0.0)]


def test_indices_are_evenly_spaced() -> None:
    assert readable.spaced(3, 5) == [0, 1, 2]
    assert readable.spaced(9, 3) == [0, 4, 8]
