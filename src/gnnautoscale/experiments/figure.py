"""Figures that need matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def save_figure(draw: Callable[[Any], None], path: Path) -> bool:
    """Draw a figure and save it.

    Args:
        draw: Draws into an empty matplotlib figure.
        path: An ``.svg`` or ``.png`` file.

    Returns:
        Whether matplotlib is installed; without it, nothing is written.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        return False
    figure = pyplot.figure(figsize=(10, 3.7), layout="constrained")
    draw(figure)
    figure.savefig(path)
    pyplot.close(figure)
    return True
