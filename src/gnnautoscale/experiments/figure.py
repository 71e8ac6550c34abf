"""Figures that need matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def save_figure(draw: Callable[[Any], None], path: Path) -> bool:
    """Draw into an empty matplotlib figure and save it; without matplotlib, write nothing and return ``False``."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return False
    figure = pyplot.figure(figsize=(10, 3.7), layout="constrained")
    draw(figure)
    figure.savefig(path)
    pyplot.close(figure)
    return True
