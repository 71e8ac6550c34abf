"""Numbers for people: ticks, labels and thinned curves."""

from __future__ import annotations

import math

from gnnautoscale.report import readable


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


def test_thinning_keeps_ends_and_peaks() -> None:
    points = [(float(x), math.sin(x / 500)) for x in range(10000)]
    points[7777] = (7777.0, 50.0)
    kept = readable.thin(points, 100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[7777]} <= set(kept)
    assert readable.thin(points[:100], 100) == points[:100]
