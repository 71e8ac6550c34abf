"""Plots as SVG text: lines, stacked bars, histograms and heat maps.

Colours are classes (``c0`` to ``c7`` for series, ``h1`` to ``h6`` for heat), which the style sheet defines for light
and dark mode. Plots are 400 units wide; a phone shows them at about nine tenths of that. All text is escaped here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from gnnautoscale.report.readable import Point, log_ticks, short, spaced, thin, tick_labels, ticks

COLORS = 8
HEAT_LEVELS = 6
_WIDTH = 400.0
_HEIGHT, _TOP, _RIGHT, _BOTTOM = 240.0, 26.0, 28.0, 38.0
_LETTER = 6.6  # about the width of a digit
_BANDS = 60
_TAG_WIDTH = 16.0
_DOTS = 25  # curves with more points are drawn without dots
_Scale = Callable[[float], float]  # from values to places


@dataclass(frozen=True)
class Series:
    """A curve of points sorted by x.

    Colours repeat after :data:`COLORS`; the tag at its end tells it apart without them. The page hides it by its group.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    tag: str = ""
    dashed: bool = False
    group: str = ""


@dataclass(frozen=True)
class Bar:
    """A row of stacked bars; a segment is (name, value, colour)."""

    label: str
    segments: Sequence[tuple[str, float, int]]
    group: str = ""


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_title: str,
    y_title: str,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
    floor: float | None = None,
) -> str:
    """Curves over common axes, with a label for screen readers; empty if there are no points.

    A logarithmic axis leaves out points that are not above 0. The vertical axis spans at least ``y_range``; a linear
    one begins at ``floor``, and so do curves that rise from below.
    """
    curves = [(one, points) for one in series if (points := [(x, y) for x, y in one.points if not log or y > 0])]
    if not curves:
        return ""
    xs = sorted({x for _, points in curves for x, _ in points})
    ys = [y for _, points in curves for _, y in points] + [*(y_range or ())]
    low, high = _log_range(min(ys), max(ys)) if log else _linear_range(min(ys), max(ys))
    low = low if floor is None else floor
    y_ticks = log_ticks(low, high) if log else ticks(low, high)
    y_labels = [short(tick) for tick in y_ticks] if log else tick_labels(y_ticks)
    left, bottom = _left(y_labels), _HEIGHT - _BOTTOM
    x_low, x_high = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    place_x = _scale(x_low, x_high, left + 4, _WIDTH - _RIGHT)
    scale = math.log10 if log else float
    place_y = _scale(scale(low), scale(high), bottom, _TOP)

    body = _y_axis([place_y(scale(tick)) for tick in y_ticks], y_labels, left, y_title)
    x_ticks = [tick for tick in ticks(x_low, x_high, 6, whole=True) if x_low <= tick <= x_high]
    body += _x_axis(x_ticks, place_x, left, bottom, x_title)
    ends = []
    dotted = max(len(points) for _, points in curves) <= _DOTS
    for one, points in curves:
        drawn = [(place_x(x), place_y(scale(max(y, low)))) for x, y in risen(thin(points), low)]
        body.append(_curve(one, drawn, dotted=dotted or len(points) == 1))
        ends.append((one, *drawn[-1]))
    body += _tags(ends, bottom)
    body += _bands(curves, xs, place_x, bottom, x_title)
    return _svg(_HEIGHT, label, body)


def bar_chart(bars: Sequence[Bar], *, label: str, unit: str, x_title: str) -> str:
    """Stacked horizontal bars, one above the other."""
    totals = [sum(value for _, value, _ in bar.segments) for bar in bars]
    high = max(totals, default=0.0) or 1.0
    row = 42.0
    bottom = 4 + row * len(bars)
    place = _scale(0.0, high, 1.0, _WIDTH - 1)
    marks = ticks(0.0, high, 5)
    body = [_line("grid", place(tick), 2, place(tick), bottom) for tick in marks]
    for number, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        top = 16 + row * number
        name = bar.label if len(bar.label) <= 46 else bar.label[:45] + "…"
        parts = [_text("name", 0, top, name), _text("name", _WIDTH, top, f"{short(total, 3)} {unit}", "end")]
        start = 0.0
        for segment, value, color in bar.segments:
            share = f" ({100 * value / total:.0f} %)" if total and len(bar.segments) > 1 else ""
            title = f"{bar.label}: {segment} {short(value, 3)} {unit}{share}"
            wide = place(start + value) - place(start)
            parts.append(_rect(f"c{color % COLORS}", place(start), top + 5, wide, 16.0, title))
            start += value
        body.append(f'<g class="{escape(bar.group)}">{"".join(parts)}</g>')
    body += _x_axis(marks, place, 0.0, bottom, x_title, keep_inside=True)
    return _svg(bottom + _BOTTOM, label, body)


def histogram(values: Sequence[float], edges: Sequence[float], *, label: str, x_title: str, y_title: str) -> str:
    """How many values lie between each pair of edges; :func:`bins` chooses these."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(0, bisect_left(edges, value) - 1), len(counts) - 1)] += 1
    y_ticks = ticks(0.0, max(counts), 4, whole=True)
    left, bottom = _left(tick_labels(y_ticks)), _HEIGHT - _BOTTOM
    place_x, place_y = _scale(edges[0], edges[-1], left + 4, _WIDTH - _RIGHT), _scale(0, max(counts), bottom, _TOP)
    body = _y_axis([place_y(tick) for tick in y_ticks], tick_labels(y_ticks), left, y_title)
    for count, (low, high) in zip(counts, pairwise(edges), strict=True):
        x, y, title = place_x(low) + 0.5, place_y(count), f"{short(low)} to {short(high)}: {count}"
        body.append(_rect("c0", x, y, place_x(high) - place_x(low) - 1, bottom - y, title))
    body += _x_axis(ticks(edges[0], edges[-1], 6), place_x, left, bottom, x_title)
    return _svg(_HEIGHT, label, body)


def bins(values: Sequence[float]) -> list[float]:
    """Round, equally spaced edges around the values."""
    low, high = min(values), max(values)
    inner = ticks(low, high, 12)
    if len(inner) < 2:
        return [low - 0.5, low + 0.5]
    step = inner[1] - inner[0]
    before = [inner[0] - step] if inner[0] > low else []
    after = [inner[-1] + step] if inner[-1] < high else []
    return [float(f"{edge:.12g}") for edge in [*before, *inner, *after]]


def heat_map(matrix: Sequence[Sequence[float]], high: float, *, label: str, x_title: str, y_title: str) -> str:
    """A square matrix as coloured cells, from the top row down; ``high`` has the strongest colour, 0 has none."""
    size = len(matrix)
    left, top = _left([str(size)]), 20.0
    cell = (_WIDTH - left - 2) / max(1, size)
    bottom = top + cell * size
    body = [_text("axis", 0, 12, y_title), _rect("frame", left, top, cell * size, cell * size)]
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            if level := heat_level(value, high):
                title = f"{row + 1} from {column + 1}: {short(value, 3)}"
                body.append(_rect(f"h{level}", left + cell * column, top + cell * row, cell, cell, title))
    for mark in ticks(1, size, 6, whole=True):
        middle = cell * (mark - 0.5)
        body.append(_text("tick", left - 5, top + middle + 4, f"{mark:.0f}", "end"))
        body.append(_text("tick", left + middle, bottom + 14, f"{mark:.0f}", "middle"))
    body.append(_text("axis", _WIDTH, bottom + 29, x_title, "end"))
    # The scale, with the upper end of each level.
    for level in range(1, HEAT_LEVELS + 1):
        at = left + 46.0 * (level - 1)
        body.append(_rect(f"h{level}", at, bottom + 38, 44, 9))
        body.append(_text("tick", at + 44, bottom + 60, short(high * (level / HEAT_LEVELS) ** 2, 2), "end"))
    return _svg(bottom + 66, label, body)


def heat_level(value: float, high: float) -> int:
    """The colour level of a value, from 1; 0 for nothing. Levels grow quadratically, to tell small values apart."""
    if value <= 0 or high <= 0:
        return 0
    return min(HEAT_LEVELS, max(1, math.ceil(HEAT_LEVELS * math.sqrt(value / high) - 1e-9)))


def risen(points: Sequence[Point], floor: float) -> list[Point]:
    """A curve without its start below the floor, if it rises above it later."""
    first = next((index for index, (_, y) in enumerate(points) if y >= floor), 0)
    if first == 0:
        return list(points)
    (x0, y0), (x1, y1) = points[first - 1], points[first]
    return [(x0 + (x1 - x0) * (floor - y0) / (y1 - y0), floor), *points[first:]]


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _linear_range(low: float, high: float) -> tuple[float, float]:
    """A range with some room around the values; it starts at 0 if they come near."""
    if low == high:
        around = abs(low) * 0.1 or 1.0
        return low - around, high + around
    room = 0.04 * (high - low)
    return 0.0 if 0 <= low < 0.4 * high else low - room, high + room


def _log_range(low: float, high: float) -> tuple[float, float]:
    """A range of at least a decade, with some room around positive values."""
    missing = max(0.0, 1.0 - math.log10(high / low)) / 2
    factor = 10 ** max(missing, 0.04 * math.log10(high / low))
    return low / factor, high * factor


def _curve(one: Series, drawn: Sequence[Point], *, dotted: bool) -> str:
    places = " ".join(f"{_n(x)},{_n(y)}" for x, y in drawn)
    dash = ' stroke-dasharray="5 3"' if one.dashed else ""
    dots = "".join(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="2.6"/>' for x, y in drawn) if dotted else ""
    return (
        f'<g class="c{one.color % COLORS} {escape(one.group)}"><polyline points="{places}"{dash}/>{dots}'
        f"<title>{escape(one.name)}</title></g>"
    )


def _tags(ends: Sequence[tuple[Series, float, float]], bottom: float) -> list[str]:
    """The tags at the ends of curves, moved apart where they would overlap; none if there is no room."""
    clusters: list[list[tuple[Series, float, float]]] = []
    for end in sorted((end for end in ends if end[0].tag), key=lambda end: end[1]):
        if clusters and end[1] - clusters[-1][-1][1] < _TAG_WIDTH:
            clusters[-1].append(end)
        else:
            clusters.append([end])
    found = []
    for cluster in clusters:
        cluster.sort(key=lambda end: end[2])
        places = move_apart([y for _, _, y in cluster], 12.0, bottom - 5)
        for (one, x, _), y in zip(cluster, places, strict=False):
            found.append(_text(f"tag c{one.color % COLORS} {escape(one.group)}", x + 5, y + 4, one.tag))
    return found


def move_apart(places: Sequence[float], apart: float, limit: float) -> list[float]:
    """Move sorted places to be ``apart`` from each other and at most ``limit``; empty if there are too many."""
    if apart * (len(places) - 1) > limit:
        return []
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + apart) if moved else place)
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - apart
    return moved


def _bands(
    curves: Sequence[tuple[Series, Sequence[Point]]], xs: Sequence[float], place: _Scale, bottom: float, x_title: str
) -> list[str]:
    """Invisible columns whose tooltips show the values of all curves."""
    chosen = [xs[index] for index in spaced(len(xs), _BANDS)]
    middles = [(place(a) + place(b)) / 2 for a, b in pairwise(chosen)]
    edges = [place(chosen[0]) - 4, *middles, place(chosen[-1]) + 4]
    found = []
    for x, (start, end) in zip(chosen, pairwise(edges), strict=True):
        lines = [f"{x_title} {short(x)}"]
        for one, points in curves:
            index = bisect_left(points, x, key=lambda point: point[0])
            if index < len(points) and points[index][0] == x:
                lines.append(f"{one.name}: {short(points[index][1])}")
        found.append(_rect("band", start, _TOP, end - start, bottom - _TOP, "\n".join(lines)))
    return found


def _left(labels: Sequence[str]) -> float:
    """Where a plot begins, to the right of the labels of its vertical axis."""
    return 10 + _LETTER * max(len(text) for text in labels)


def _y_axis(places: Sequence[float], labels: Sequence[str], left: float, title: str) -> list[str]:
    """The title above the vertical axis, and a line across the plot for each tick."""
    body = [_text("axis", 0, 12, title)]
    for at, text in zip(places, labels, strict=True):
        body.append(_line("grid", left, at, _WIDTH - _RIGHT + 4, at))
        body.append(_text("tick", left - 5, at + 4, text, "end"))
    return body


def _x_axis(
    marks: Sequence[float], place: _Scale, left: float, bottom: float, title: str, *, keep_inside: bool = False
) -> list[str]:
    """The horizontal axis with its ticks, and its title below the right end."""
    end = _WIDTH if keep_inside else _WIDTH - _RIGHT + 4
    body = [_line("base", left, bottom, end, bottom)]
    for tick, text in zip(marks, tick_labels(marks), strict=True):
        half = _LETTER * len(text) / 2 if keep_inside else 0.0
        body.append(_text("tick", min(max(place(tick), half), _WIDTH - half), bottom + 15, text, "middle"))
    return [*body, _text("axis", end, bottom + 31, title, "end")]


def _svg(height: float, label: str, body: Sequence[str]) -> str:
    box = f"0 0 {_n(_WIDTH)} {_n(height)}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str = "") -> str:
    box = f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f"{box}><title>{escape(title)}</title></rect>" if title else f"{box}/>"


def _text(kind: str, x: float, y: float, text: str, anchor: str = "") -> str:
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}"{anchored}>{escape(text)}</text>'


def _n(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}".removesuffix(".0")
