"""Reports: made from results by cell and variant, they hold a table, the numbers behind it, and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnautoscale.experiments.figure import save_figure
from gnnautoscale.experiments.reproduce.config import Run
from gnnautoscale.experiments.reproduce.store import Result, Store
from gnnautoscale.runs import jsonable

Draw = Callable[[Any], None]


@dataclass
class Report:
    """What an experiment gave.

    Attributes:
        title: What was done.
        columns: Heads of the table.
        rows: Its cells, as text.
        notes: Sentences below it.
        values: The numbers behind the table, as plain values.
        draw: Draws a figure, if there is something to draw.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    draw: Draw | None = None

    def markdown(self) -> str:
        """The table and its notes.

        Example:
            >>> print(Report("Sizes", ["graph", "nodes"], [["cora", "2,708"]], ["A note."]).markdown())
            ### Sizes
            <BLANKLINE>
            | graph | nodes |
            |---|---:|
            | cora | 2,708 |
            <BLANKLINE>
            A note.
            <BLANKLINE>
        """
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"


class Results:
    """The results there are, by cell and variant."""

    def __init__(self, runs: Sequence[Run], store: Store) -> None:
        self._results: dict[tuple[str, str], list[Result]] = {}
        for run in runs:
            result = store.get(run)
            if result is not None:
                self._results.setdefault((run.cell, run.variant), []).append(result)

    def cells(self) -> list[str]:
        """The cells that have any result, in order."""
        return list(dict.fromkeys(cell for cell, _ in self._results))

    def of(self, cell: str, variant: str) -> list[Result]:
        """The results of a cell's variant, one per seed."""
        return self._results.get((cell, variant), [])

    def values(self, cell: str, variant: str, *path: str) -> list[float]:
        """One number of each of these results that has it."""
        found = []
        for result in self.of(cell, variant):
            value: Any = result
            for name in path:
                value = value[name]
            if value is not None:
                found.append(float(value))
        return found

    def mean(self, cell: str, variant: str, *path: str) -> float:
        """The mean of one number over these results; not a number if there is none."""
        values = self.values(cell, variant, *path)
        return statistics.mean(values) if values else math.nan


def write_report(report: Report, folder: Path, name: str) -> list[Path]:
    """Write the table as Markdown, the numbers as JSON and the figure, if matplotlib is there, as SVG.

    Args:
        report: The report.
        folder: Where to write; it exists.
        name: Of the files, without their endings.

    Returns:
        The files.
    """
    numbers = json.dumps(jsonable(report.values), indent=1) + "\n"
    files = {folder / f"{name}.md": report.markdown(), folder / f"{name}.json": numbers}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    written = list(files)
    figure = folder / f"{name}.svg"
    if report.draw is not None and save_figure(report.draw, figure):
        written.append(figure)
    return written


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation for a table.

    Example:
        >>> spread([80.0, 82.0]), spread([80.0]), spread([])
        ('81.00 ± 1.41', '80.00', '-')
    """
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def number(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """A number for a table.

    Example:
        >>> number(1.234), number(1.234, 1, sign=True), number(math.nan)
        ('1.23', '+1.2', '-')
    """
    return "-" if math.isnan(value) else f"{value:{'+' if sign else ''},.{digits}f}"
