"""Plots lie where their numbers say, and everyone can tell their colours apart."""

from __future__ import annotations

import math
import re
from importlib import resources

import pytest

from gnnautoscale.report import svg


def test_a_curve_lies_where_its_numbers_say() -> None:
    plot = svg.line_chart([svg.Series("a", [(0, 0.0), (10, 10.0)])], label="l", x_title="x", y_title="y")
    (places,) = re.findall(r'polyline points="([^"]*)"', plot)
    (x0, y0), (x1, y1) = (map(float, place.split(",")) for place in places.split())
    ends = {
        text: float(y)
        for y, text in re.findall(r'<text class="tick" x="[\d.]+" y="([\d.]+)" text-anchor="end">(\d+)', plot)
    }
    assert (y0, y1) == pytest.approx((ends["0"] - 4, ends["10"] - 4), abs=0.11)
    below = {
        text: float(x)
        for x, text in re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="middle">(\d+)', plot)
    }
    assert (x0, x1) == pytest.approx((below["0"], below["10"]), abs=0.11)


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    series = [svg.Series("a", [(1, 0.0), (2, 0.1), (3, 10.0)]), svg.Series("zero", [(1, 0.0)])]
    plot = svg.line_chart(series, label="l", x_title="x", y_title="y", log=True)
    assert [len(places.split()) for places in re.findall(r'points="([^"]*)"', plot)] == [2]
    assert svg.line_chart(series[1:], label="l", x_title="x", y_title="y", log=True) == ""


def test_tooltips_give_the_values_of_all_curves() -> None:
    series = [svg.Series("a", [(1, 0.5), (2, 0.25)]), svg.Series("b", [(2, 3.0)])]
    plot = svg.line_chart(series, label="l", x_title="epoch", y_title="y")
    titles = re.findall(r'class="band"[^>]*><title>([^<]*)', plot)
    assert titles == ["epoch 1\na: 0.5", "epoch 2\na: 0.25\nb: 3"]


def test_long_curves_stay_small() -> None:
    series = [svg.Series("a", [(float(x), math.sin(x)) for x in range(50000)])]
    assert len(svg.line_chart(series, label="l", x_title="x", y_title="y")) < 20000


def test_bars_are_as_long_as_their_values() -> None:
    bars = [svg.Bar("A", [("one", 1.0, 0), ("two", 3.0, 1)]), svg.Bar("B", [("one", 2.0, 0)])]
    plot = svg.bar_chart(bars, label="l", unit="ms", x_title="x")
    widths = [float(width) for width in re.findall(r'<rect class="c\d" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', plot)]
    assert widths == pytest.approx([99.5, 298.5, 199.0], abs=0.1)
    assert "A: two 3 ms (75 %)" in plot


def test_a_histogram_counts_every_value_once() -> None:
    values = [0.1, 0.15, 0.2, 0.5, 0.9]
    plot = svg.histogram(values, svg.bins(values), label="l", x_title="x", y_title="y")
    counts = [int(count) for count in re.findall(r"<title>[^<]*: (\d+)</title>", plot)]
    assert sum(counts) == len(values)
    assert counts[:2] == [2, 1]


def test_edges_of_a_histogram_are_round() -> None:
    assert svg.bins([0.07, 0.5]) == [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
    assert svg.bins([2.0, 2.0]) == [1.5, 2.5]


def test_heat_tells_small_values_apart() -> None:
    assert [svg.heat_level(value, 36.0) for value in (0.0, 0.5, 1.0, 1.1, 36.0)] == [0, 1, 1, 2, 6]
    plot = svg.heat_map([[0.0, 0.5], [1.0, 0.0]], 1.0, label="l", x_title="owner", y_title="puller")
    assert plot.count('class="h') == 2 + svg.HEAT_LEVELS


def test_a_curve_begins_at_the_floor() -> None:
    assert svg.risen([(0, 0.0), (1, 10.0), (2, 30.0), (3, 15.0)], 20) == [(1.5, 20), (2, 30.0), (3, 15.0)]


def test_tags_move_apart_if_there_is_room() -> None:
    assert svg.move_apart([10, 12, 99], 5, 100) == [10, 15, 99]
    assert svg.move_apart([98, 99], 5, 100) == [95, 100]
    assert svg.move_apart([1, 2, 3], 60, 100) == []


# Colours


def palettes() -> list[dict[str, str]]:
    """The colours of the style sheet on a light and on a dark ground."""
    style = resources.files("gnnautoscale.report").joinpath("style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks]


def linear(color: str) -> list[float]:
    """Red, green and blue as amounts of light."""
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    light = sorted(
        sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (one, other)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(red: float, green: float, blue: float) -> tuple[float, float, float]:
    """CIELAB, in which distances are about as large as they look."""
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


# Colours as people without one kind of cone see them (Machado et al., 2009, severity 1).
EYES: dict[str, list[list[float]]] = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def test_colours_stand_out_from_the_background() -> None:
    assert len(palettes()) == 2
    for colors in palettes():
        assert all(contrast(colors[f"s{number}"], colors["ground"]) >= 3 for number in range(svg.COLORS))
        assert all(contrast(colors[text], colors["ground"]) >= 4.5 for text in ("text", "muted", "link"))
        assert contrast(colors["muted"], colors["raised"]) >= 4.5


@pytest.mark.parametrize("eye", EYES)
def test_everyone_can_tell_colours_apart(eye: str) -> None:
    for colors in palettes():
        seen: list[tuple[float, float, float]] = []
        for number in range(svg.COLORS):
            light = linear(colors[f"s{number}"])
            mixed = [sum(a * b for a, b in zip(row, light, strict=True)) for row in EYES[eye]]
            seen.append(lab(*(min(1.0, max(0.0, part)) for part in mixed)))
        assert min(math.dist(seen[a], seen[b]) for a in range(svg.COLORS) for b in range(a)) > 20
