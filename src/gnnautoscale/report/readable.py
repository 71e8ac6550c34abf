"""Numbers for people: axis ticks, units, and curves with fewer points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Point = tuple[float, float]


def finite(value: Any) -> float | None:
    """The value as a finite number, or ``None``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``, spaced by 1, 2 or 5 times a power of ten.

    With ``whole``, they are whole numbers. If ``high`` is not above ``low``, the only tick is ``low``.
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Rounded to twelve digits, so that 3 * 0.1 is 0.3.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)] or [low]


def log_ticks(low: float, high: float) -> list[float]:
    """About six powers of ten between two positive numbers; within two decades also 2 and 5 times these."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    factors = (1, 2, 5) if high <= 100 * low else (1,)
    found = [float(f"{factor}e{power}") for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels for ticks, all with as many decimals as the finest one needs."""
    largest = max((abs(value) for value in values), default=0.0)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if largest >= size:
            divided = [value / (1e3 if unit == "k" else size) for value in values]
            return [label + unit if label.strip("0.") else "0" for label in tick_labels(divided)]
    if 0 < largest < 1e-3:
        return [short(value) for value in values]
    decimals = max((_decimals(value) for value in values), default=0)
    return [f"{value:,.{decimals}f}" for value in values]


def _decimals(value: float) -> int:
    """Number of decimals of a round number."""
    return next((digits for digits in range(9) if math.isclose(value, round(value, digits), rel_tol=1e-9)), 9)


def short(value: float | None, digits: int = 4) -> str:
    """A number with a few digits, for tables and tooltips; a dash for ``None``."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def bytes_text(value: float | None) -> str:
    """An amount of memory; a dash for ``None``."""
    if value is None:
        return "-"
    size, unit = unit_of_bytes([value])
    return f"{short(value / size, 3)} {unit}"


def unit_of_bytes(values: Sequence[float]) -> tuple[int, str]:
    """The largest unit of memory that the largest amount reaches: its size and its name."""
    largest = max(values, default=0)
    units = ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB"))
    return next(((1024**power, unit) for power, unit in units if largest >= 1024**power), (1, "B"))


def seconds_text(value: float | None) -> str:
    """A duration; a dash for ``None``."""
    if value is None:
        return "-"
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if value >= size * (2 if size > 1 else 1):
            return f"{short(value / size, 3)} {unit}"
    return f"{short(value * 1e6, 3)} µs" if value else "0 s"


def thin(points: Sequence[Point], count: int = 240) -> list[Point]:
    """At most ``count`` (at least 4) points of a curve: its ends, and the lowest and highest of each stretch."""
    if len(points) <= count:
        return list(points)
    inner = range(1, len(points) - 1)
    stretches = (count - 2) // 2
    kept = {0, len(points) - 1}
    for number in range(stretches):
        stretch = inner[len(inner) * number // stretches : len(inner) * (number + 1) // stretches]
        kept |= {choose(stretch, key=lambda index: points[index][1]) for choose in (min, max)}
    return [points[index] for index in sorted(kept)]


def spaced(count: int, most: int) -> list[int]:
    """At most ``most`` (at least 2) indices below ``count``, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
