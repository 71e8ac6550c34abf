"""Results by cell and variant, and reports: a table, the numbers behind it, and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from gnnautoscale.experiments.figure import save_figure
from gnnautoscale.experiments.reproduce.config import Job
from gnnautoscale.experiments.reproduce.store import Result, Store
from gnnautoscale.runs import jsonable


@dataclass
class Report:
    """The outcome of an experiment: a table with notes below it, and the numbers behind it as plain values.

    ``draw`` draws into an empty matplotlib figure, if there is something to draw.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Any], None] | None = None

    def markdown(self) -> str:
        """The table and its notes."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"


class Results:
    """The results so far, by cell and variant."""

    def __init__(self, runs: Sequence[Job], store: Store) -> None:
        self._results: dict[tuple[str, str], list[Result]] = {}
        for run in runs:
            result = store.get(run)
            if result is not None:
                self._results.setdefault((run.cell, run.variant), []).append(result)

    def cells(self) -> list[str]:
        """The cells with results, in order."""
        return list(dict.fromkeys(cell for cell, _ in self._results))

    def of(self, cell: str, variant: str) -> list[Result]:
        """The results of a variant of a cell, one per seed."""
        return self._results.get((cell, variant), [])

    def values(self, cell: str, variant: str, *path: str) -> list[float]:
        """One number of each result that has it; ``path`` holds its keys, from the outside in."""
        found: list[Any] = [reduce(getitem, path, result) for result in self.of(cell, variant)]
        return [float(value) for value in found if value is not None]

    def test_scores(self, cell: str, variant: str) -> list[float]:
        """The test score of each result."""
        return self.values(cell, variant, "scores", "test")

    def mean(self, cell: str, variant: str, *path: str) -> float:
        """The mean of one number over these results; NaN without any."""
        values = self.values(cell, variant, *path)
        return statistics.mean(values) if values else math.nan


def write_files(report: Report, folder: Path, name: str) -> list[Path]:
    """Write the table as Markdown, the numbers as JSON, and with matplotlib the figure as SVG; returns the files."""
    numbers = json.dumps(jsonable(report.values), indent=1) + "\n"
    files = {folder / f"{name}.md": report.markdown(), folder / f"{name}.json": numbers}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    figure = folder / f"{name}.svg"
    drawn = report.draw is not None and save_figure(report.draw, figure)
    return [*files, *([figure] if drawn else [])]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation for a table."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def number(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """A number for a table; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:{'+' if sign else ''},.{digits}f}"


def beside(ours: float, paper: float, *, sign: bool = False) -> str:
    """Our number, and the paper's in brackets."""
    return f"{number(ours, sign=sign)} ({paper:{'+' if sign else ''}.2f})"
