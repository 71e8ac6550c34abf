"""The sections about training itself: learning curves, time, transfers, memory, and the parts of the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gnnautoscale.report.markup import (
    Key,
    Section,
    facts_table,
    figure,
    figures,
    paragraph,
    plot_section,
    series_table,
    table,
)
from gnnautoscale.report.readable import Point, bytes_text, finite, seconds_text, short, unit_of_bytes
from gnnautoscale.report.reported_run import ReportedRun
from gnnautoscale.report.svg import Bar, bar_chart, bins, heat_map, histogram, line_chart

_TIMES = {"compute": "compute", "pull": "wait for pull", "push": "push", "loader": "loader", "other": "other"}
_MOST_PARTITIONS = 6
# If epochs differ by more than this factor in their number of steps, runs are compared by step.
_ALIKE = 1.5
# The parts, as the run folder describes them, and the runs that share them in brackets.
_Partition = tuple[dict[str, Any], str]


def curves(
    runs: Sequence[ReportedRun],
    title: str,
    points: Callable[[ReportedRun], list[Point]],
    y_title: str,
    *,
    over: str = "epoch",
    floor: Callable[[list[float]], float | None] = lambda _: None,
) -> list[str]:
    """A figure with one curve per run, over epochs by default; none if no run has points."""
    series = [run.series(found) for run in runs if (found := points(run))]
    if not series:
        return []
    values = [y for one in series for _, y in one.points]
    label = f"{title} by {over}, of {len(series)} {'run' if len(series) == 1 else 'runs'}"
    plot = line_chart(series, label=label, x_title=over, y_title=y_title, floor=floor(values))
    return [figure(title, plot, data=series_table(title, over, series))]


def learning_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Loss and scores by epoch, or by step if epochs of some runs have far more steps than those of others."""
    over = "epoch" if alike(runs) else "steps"
    metrics = {run.metric for run in runs if run.record.result is not None}
    unit = ", %" if all(run.percent for run in runs) else ""
    y_title = f"{metrics.pop() if len(metrics) == 1 else 'score'}{unit}"
    found = curves(runs, "Training loss", partial(ReportedRun.curve, path=("loss",), over=over), "loss", over=over)
    for split, name in (("train", "Training"), ("val", "Validation"), ("test", "Test")):
        points = partial(ReportedRun.curve, path=("scores", split), over=over)
        begin = {"floor": score_floor} if unit else {}  # errors begin high, and matter there
        found += curves(runs, f"{name} score", points, y_title, over=over, **begin)
    how = (
        "The loss should fall and level off. If the validation score worsens while the training score still improves, "
        "the model memorizes its training nodes; a run keeps the weights of its best validation score. If the first "
        "scores are far below the others, the axis begins above them."
    )
    return plot_section("learning", "Learning curves", how, found)


def alike(runs: Sequence[ReportedRun]) -> bool:
    """Whether epochs have about as many steps in all runs, as far as is known."""
    started = [run.record.epochs for run in runs if run.record.epochs]
    rates = [steps / len(epochs) for epochs in started if (steps := finite(epochs[-1].get("steps")))]
    return len(rates) < len(started) or max(rates, default=1.0) <= _ALIKE * min(rates, default=1.0)


def score_floor(scores: list[float]) -> float | None:
    """Where an axis of scores begins, so that a few low ones do not squeeze all others together."""
    low, high = sorted(scores)[len(scores) // 10], max(scores)
    floor = low - 0.5 * (high - low)
    return float(math.floor(floor)) if min(scores) < floor else None


def time_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Where the time of a step goes, and the time of epochs."""
    split = [(run, times) for run in runs if (times := step_times(run))]
    found = []
    if split:
        names = [name for name in _TIMES if any(name in times for _, times in split)]
        bars = [
            Bar(run.name, [(_TIMES[n], 1e3 * times[n], at) for at, n in enumerate(names) if n in times], run.group)
            for run, times in split
        ]
        label = "Milliseconds per training step, by kind of work"
        plot = bar_chart(bars, label=label, unit="ms", x_title="milliseconds per step")
        columns = [(run.name, [seconds_text(times.get(name)) for name in names]) for run, times in split]
        data = facts_table([_TIMES[name] for name in names], columns, caption="Time of a step")
        keys = [Key(_TIMES[name], at) for at, name in enumerate(names)]
        found.append(figure("Where the time of a step goes", plot, data=data, keys=keys))
    found += curves(runs, "Time of an epoch", ReportedRun.settled_seconds, "seconds", floor=_from_zero)
    how = (
        "Means over all epochs but the first, which also prepares batches. Pulls ahead of a step and pushes behind it "
        "take no time of their own: the plot shows how long training had to wait. A large share of the loader or of "
        "pulls means that computing is not the bottleneck. With full batch, a step is a whole epoch."
    )
    return plot_section("time", "Time", how, found)


def step_times(run: ReportedRun) -> dict[str, float]:
    """Seconds per step by kind of work, the rest as "other"; empty if unknown."""
    epochs = [epoch for epoch in run.record.epochs if epoch.get("time") and finite(epoch.get("steps"))]
    before = epochs[0]["steps"] if len(epochs) > 1 else 0
    counted = epochs[1:] or epochs
    if not counted or counted[-1]["steps"] <= before:
        return {}
    steps = counted[-1]["steps"] - before
    times = {
        name: sum(finite(epoch["time"].get(name)) or 0.0 for epoch in counted) / steps
        for name in _TIMES
        if any(name in epoch["time"] for epoch in counted)
    }
    other = sum(finite(epoch.get("seconds")) or 0.0 for epoch in counted) / steps - sum(times.values())
    # Clocks read one after the other never agree exactly.
    return {**times, "other": other} if other > 0.005 * sum(times.values()) else times


def transfer_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Bytes pulled and pushed, and the age of pulled rows."""
    found = _byte_curves(runs, "Bytes pulled", "pulled_bytes") + _byte_curves(runs, "Bytes pushed", "pushed_bytes")
    found += curves(runs, "Rows written before", _hit_percentage, "% of pulled rows")
    for name, title in (("mean", "Mean age of pulled rows"), ("max", "Largest age of pulled rows")):
        found += curves(runs, title, partial(ReportedRun.curve, path=("age", name)), "steps", floor=_from_zero)
    how = (
        "A step pulls the halo's rows from histories, and pushes the batch's rows to them. Rows that were never "
        "written are zero: after the first epoch, all pulled rows should have been written. The age of a row is the "
        "number of steps since it was written. The more batches an epoch has, the older and less exact rows become."
    )
    return plot_section("transfers", "Pulls and pushes", how, found)


def memory_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Peak memory, and the size of histories."""
    found = []
    for name, title in (("peak_memory", "Peak memory"), ("history_bytes", "Histories")):
        amounts = [(run, value) for run in runs if (value := finite(run.result.get(name)))]
        if amounts:
            size, unit = unit_of_bytes([value for _, value in amounts])
            bars = [Bar(run.name, [(title, value / size, run.number)], run.group) for run, value in amounts]
            plot = bar_chart(bars, label=f"{title} of each run", unit=unit, x_title=unit)
            data = facts_table([title], [(run.name, [bytes_text(value)]) for run, value in amounts], caption=title)
            found.append(figure(title, plot, data=data))
    found += _byte_curves(runs, "Memory by epoch", "memory")
    how = (
        "The peak of training, on the device that computes. It includes histories on that device, but not those in "
        "host memory beside a GPU or on disk."
    )
    return plot_section("memory", "Memory", how, found)


def parts_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Which parts pull from which, and the sizes of halos."""
    partitions: list[tuple[dict[str, Any], list[str]]] = []
    for run in runs:
        parts = run.record.run.get("parts")
        if parts and parts.get("count", 0) > 1:
            tags = next((tags for known, tags in partitions if known == parts), None)
            if tags is None:
                partitions.append((parts, tags := []))
            tags.append(run.tag)
    several = len(runs) > 1
    drawn = [(parts, f" ({', '.join(tags)})" if several else "") for parts, tags in partitions[:_MOST_PARTITIONS]]
    maps, sizes = _heat_maps(drawn), _halo_sizes(drawn)
    found = figures(maps + sizes) if len(maps) == len(sizes) == 1 else figures(maps) + figures(sizes)
    if not found:
        return None
    how = (
        "The part of a row pulls from the part of a column: the stronger the colour of a cell, the more nodes it pulls "
        "per node of its own. A good partition has few filled cells and small halos; parts of a random one pull from "
        "everywhere. Each part counts by itself here, although parts of the same batch do not pull from each other."
    )
    left_out = len(partitions) - _MOST_PARTITIONS
    note = paragraph(f"{left_out} more partitions are not drawn.") if left_out > 0 else ""
    return Section("parts", "Parts and their halos", paragraph(how) + found + note)


def _heat_maps(partitions: Sequence[_Partition]) -> list[str]:
    """Who pulls from whom, for each partition, all on the same scale."""
    maps = [
        (parts, [[finite(value) or 0.0 for value in row] for row in parts["halo"]], whose)
        for parts, whose in partitions
        if parts.get("halo")
    ]
    high = max((value for _, matrix, _ in maps for row in matrix for value in row), default=0.0)
    found = []
    for parts, matrix, whose in maps:
        count = parts.get("count") or len(matrix)
        what = "group of parts" if count > len(matrix) else "part"
        label = f"Heat map of halo nodes per batch node between {count} parts, as {len(matrix)} rows and columns"
        plot = heat_map(matrix, high, label=label, x_title=f"{what} that owns", y_title=f"{what} that pulls")
        rows = []
        for number, row in enumerate(matrix, start=1):
            most = max(range(len(row)), key=row.__getitem__)
            rows.append([str(number), short(sum(row), 3), f"{most + 1} ({short(row[most], 3)})"])
        data = table([what, "halo nodes per batch node", "most of it from"], rows, caption=f"Halo of each {what}")
        found.append(figure(f"Who pulls from whom{whose}", plot, data=data))
    return found


def _halo_sizes(partitions: Sequence[_Partition]) -> list[str]:
    """Distribution of halo sizes over parts, for each partition, all on the same axis."""
    found = []
    halos = [(parts["batches"], whose) for parts, whose in partitions if (parts.get("batches") or {}).get("nodes")]
    ratios = [[h / n for n, h in zip(its["nodes"], its["halo"], strict=True) if n] for its, _ in halos]
    edges = bins([ratio for some in ratios for ratio in some]) if any(ratios) else []
    for (its, whose), some in zip(halos, ratios, strict=True):
        if not some:
            continue
        title = f"Halo nodes per batch node{whose}"
        label = f"Histogram of {title} over {len(some)} parts"
        plot = histogram(some, edges, label=label, x_title="halo nodes per batch node", y_title="parts")
        inside, crossing = (sum(its.get(name) or ()) for name in ("edges_inside", "edges_crossing"))
        rows = [
            ["parts", short(len(some))],
            ["nodes per part", f"{short(min(its['nodes']))} to {short(max(its['nodes']))}"],
            ["halo nodes per batch node", f"{short(min(some), 3)} to {short(max(some), 3)}"],
            ["their mean", short(sum(some) / len(some), 3)],
            ["edges from other parts", f"{100 * crossing / (inside + crossing):.1f} %" if inside + crossing else "-"],
        ]
        found.append(figure(title, plot, data=table(["", "value"], rows, caption=title)))
    return found


def _hit_percentage(run: ReportedRun) -> list[Point]:
    return [(x, 100 * y) for x, y in run.curve(("hit_ratio",))]


def _from_zero(_: list[float]) -> float:
    return 0.0


def _byte_curves(runs: Sequence[ReportedRun], title: str, name: str) -> list[str]:
    """Curves of amounts of memory, in a suitable unit."""
    size, unit = unit_of_bytes([y for run in runs for _, y in run.curve((name,))])
    return curves(runs, title, lambda run: [(x, y / size) for x, y in run.curve((name,))], unit, floor=_from_zero)
