"""Shows the results of an experiment beside the published ones: a table, the numbers behind it, and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnautoscale.errors import InputError
from gnnautoscale.reproduce.config import Experiment, Run, published
from gnnautoscale.reproduce.store import Result, Store

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


class Found:
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
        """One number of each of these results."""
        found = []
        for result in self.of(cell, variant):
            value: Any = result
            for name in path:
                value = value[name]
            found.append(float(value))
        return found

    def mean(self, cell: str, variant: str, *path: str) -> float:
        """The mean of one number over these results; not a number if there is none."""
        values = self.values(cell, variant, *path)
        return statistics.mean(values) if values else math.nan


def make_report(experiment: Experiment, runs: Sequence[Run], store: Store) -> Report:
    """Sum up what there is so far.

    Args:
        experiment: The experiment.
        runs: Its runs, or some of them.
        store: Where results are kept.
    """
    found = Found(runs, store)
    if not found.cells():
        raise InputError("a report needs results", got="none", fix="Look at what the runs said.")
    report = _REPORTS[experiment.name](found)
    seeds = sorted({run.seed for run in runs})
    report.values |= {"experiment": experiment.name, "seeds": seeds, **store.origin(runs)}
    made_on = " and ".join(report.values["machines"])
    report.notes.append(f"{len(seeds)} seeds at most; made on {made_on} with {'; '.join(report.values['versions'])}.")
    return report


def write_report(report: Report, folder: Path, name: str) -> list[Path]:
    """Write the table as Markdown, the numbers as JSON and the figure as SVG; returns the files."""
    files = {folder / f"{name}.md": report.markdown(), folder / f"{name}.json": json.dumps(report.values, indent=1)}
    for path, text in files.items():
        path.write_text(text + ("\n" if not text.endswith("\n") else ""))
    written = list(files)
    if report.draw is not None:
        try:
            from matplotlib import pyplot
        except ImportError:
            return written
        figure = pyplot.figure(figsize=(10, 3.6), layout="constrained")
        report.draw(figure)
        figure.savefig(folder / f"{name}.svg")
        pyplot.close(figure)
        written.append(folder / f"{name}.svg")
    return written


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def _number(value: float, digits: int = 2, *, sign: bool = False) -> str:
    return "-" if math.isnan(value) else f"{value:{'+' if sign else ''}.{digits}f}"


def _table1(found: Found) -> Report:
    paper = published()["table1"]
    rows, values = [], {}
    differences: dict[str, dict[str, list[float]]] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        full_paper, full_std, gas_paper, gas_std = paper[model].get(dataset, [math.nan] * 4)
        tests = {name: found.values(cell, name, "scores", "test") for name in ("full", "gas", "refreshed")}
        values[cell] = tests
        means = {name: statistics.mean(scores) if scores else math.nan for name, scores in tests.items()}
        for name in ("gas", "refreshed"):
            differences.setdefault(model, {}).setdefault(name, []).append(means[name] - means["full"])
        far = [
            name
            for name, wanted, std in (
                ("full", full_paper, full_std),
                ("gas", gas_paper, gas_std),
                ("refreshed", gas_paper, gas_std),
            )
            if abs(means[name] - wanted) > 2 * std
        ]
        rows.append(
            [
                f"{model} {dataset}",
                f"{full_paper:.2f} ± {full_std:.2f}" if not math.isnan(full_paper) else "-",
                _spread(tests["full"]),
                f"{gas_paper:.2f} ± {gas_std:.2f}" if not math.isnan(gas_paper) else "-",
                _spread(tests["gas"]),
                _spread(tests["refreshed"]),
                _number(means["gas"] - means["full"], sign=True),
                ", ".join(far) or "all",
            ]
        )
    notes = []
    for model, by_variant in differences.items():
        for name, points in by_variant.items():
            known = [point for point in points if not math.isnan(point)]
            if known:
                wanted = paper["mean_delta"][model]
                notes.append(
                    f"{model}: mean difference {name} - full batch {statistics.mean(known):+.2f} points over "
                    f"{len(known)} data sets (paper {wanted:+.2f})."
                )
    notes.append("The last column names what is further than two of the paper's standard deviations from it.")
    columns = [
        "test accuracy (%)",
        "full batch, paper",
        "full batch",
        "GAS, paper",
        "GAS",
        "GAS, refreshed",
        "GAS - full",
        "within 2 std, or not",
    ]
    return Report("Full batch and GAS on small graphs (Table 1)", columns, rows, notes, {"test": values})


def _table2(found: Found) -> Report:
    paper = published()["table2"]
    rows = []
    values: dict[str, dict[str, float]] = {}
    for cell in found.cells():
        dataset = cell.split(".")[1]
        place = paper["columns"].index(dataset)
        full = found.mean(cell, "full", "scores", "test")
        row = [dataset, _number(full)]
        values[dataset] = {"full": full}
        for variant in ("baseline", "regularization", "metis", "gas"):
            points = found.mean(cell, variant, "scores", "test") - full
            values[dataset][variant] = points
            row.append(f"{_number(points, sign=True)} ({paper[variant][place]:+.2f})")
        rows.append(row)
    heads = ["GCNII", "full batch (%)", "neither", "regularization", "METIS", "both"]
    notes = ["Points relative to full batch; in brackets the paper's."]
    return Report("What METIS and regularization contribute (Table 2)", heads, rows, notes, {"points": values})


def _table5(found: Found) -> Report:
    paper = published()["table5"]
    rows = []
    values: dict[str, dict[str, list[float]]] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        wanted = paper[f"gas-{model.removesuffix('-jk')}"][paper["datasets"].index(dataset)]
        tests = {name: found.values(cell, name, "scores", "test") for name in ("gas", "refreshed")}
        values[cell] = tests
        rows.append([f"{model} {dataset}", _number(wanted), *(_spread(scores) for scores in tests.values())])
    return Report("Large graphs (Table 5)", ["", "GAS, paper", "GAS", "GAS, refreshed"], rows, [], {"test": values})


def _table6(found: Found) -> Report:
    paper = published()["table6"]
    rows, values = [], {}
    for cell in found.cells():
        parts = found.of(cell, "random" if found.of(cell, "random") else "metis")[0]["parts"]
        ours = {name: found.mean(cell, name, "connectivity") for name in ("random", "metis")}
        values[cell] = {"parts": parts, **ours}
        rows.append(
            [
                cell,
                f"{parts:,}",
                _number(paper["random"][cell]),
                _number(ours["random"]),
                _number(paper["metis"][cell]),
                _number(ours["metis"]),
                "yes" if ours["metis"] <= 1.25 * paper["metis"][cell] + 0.05 else "no",
            ]
        )
    columns = ["", "parts", "random, paper", "random", "METIS, paper", "METIS", "at most 1.25 x paper + 0.05"]
    notes = ["Halo nodes per batch node. Parts are calibrated by the paper's random column."]
    return Report("Connectivity of parts (Table 6)", columns, rows, notes, {"connectivity": values})


def _table7(found: Found) -> Report:
    paper = published()["table7"]
    cell = found.cells()[0]
    rows, values = [], {}
    for variant, wanted in paper.items():
        ours = {split: found.mean(cell, variant, "scores", split) for split in ("train", "val", "test")}
        values[variant] = ours
        rows.append(
            [variant.replace("_", " "), *(f"{_number(ours[s])} ({w:.2f})" for s, w in zip(ours, wanted, strict=True))]
        )
    heads = ["accuracy (%)", "train", "validation", "test"]
    return Report("A 4-layer GIN on CLUSTER (Table 7)", heads, rows, ["In brackets the paper's."], {"accuracy": values})


def _figure3(found: Found) -> Report:
    names = {"full": "full batch", "history": "naive history", "gas": "GAS"}
    rows = [
        [cell, *(_number(found.mean(cell, variant, "scores", "test")) for variant in names)] for cell in found.cells()
    ]
    curves = {cell: {v: found.of(cell, v)[0]["curve"] for v in names if found.of(cell, v)} for cell in found.cells()}

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        styles = {"full": "k-", "history": "C3-", "gas": "C0-"}
        for axes, (cell, by_variant) in zip(panels, curves.items(), strict=True):
            for variant, curve in by_variant.items():
                last = curve["epoch"][-1]
                axes.plot([n / last for n in curve["epoch"]], curve["val"], styles[variant], label=names[variant])
            axes.set_title(cell)
            axes.set_xlabel("share of training")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("validation accuracy (%)")
        panels[0].legend(frameon=False)

    heads = ["test accuracy (%)", *names.values()]
    return Report("Learning curves (Figure 3)", heads, rows, [], {"curves": curves}, draw)


_REPORTS: dict[str, Callable[[Found], Report]] = {
    "figure3": _figure3,
    "table1": _table1,
    "table2": _table2,
    "table5": _table5,
    "table6": _table6,
    "table7": _table7,
}
