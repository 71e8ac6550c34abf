"""The sections with words and tables: the runs, their key numbers, and their comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from gnnautoscale.report.markup import ONE_LINE, Section, definitions, facts_table, folded, paragraph, table
from gnnautoscale.report.readable import bytes_text, finite, seconds_text
from gnnautoscale.report.reported_run import ReportedRun, differing, score_text


def runs_section(runs: Sequence[ReportedRun]) -> Section:
    """What was run: what all runs share, what differs, and all settings to unfold."""
    about = [run.facts() for run in runs]
    different = differing(about)
    shared = [(name, text) for name, text in about[0].items() if name not in different and text not in ("", "-")]
    options = [run.options for run in runs]
    changed = differing(options)
    body = [definitions(shared)]
    if different or changed:
        # Some facts are options, too, such as the mode.
        both = [{**_pick(changed, mine), **_pick(different, its)} for mine, its in zip(options, about, strict=True)]
        # Long texts come last, since a narrow screen shows only the first columns.
        names = sorted(both[0], key=lambda name: max(len(its[name]) for its in both) > ONE_LINE)
        columns = [(run.name, [its[name] for name in names]) for run, its in zip(runs, both, strict=True)]
        body.append(facts_table(names, columns, caption="Where the runs differ"))
    names = list(dict.fromkeys(name for its in options for name in its))
    if names:
        columns = [(run.name, [*_pick(names, run.options).values()]) for run in runs]
        body.append(folded("All settings", facts_table(names, columns, caption="Settings")))
    return Section("runs", "Run" if len(runs) == 1 else "Runs", "".join(body))


def numbers_section(runs: Sequence[ReportedRun]) -> Section:
    """The most important numbers."""
    numbers = [run.key_numbers() for run in runs]
    metric = ", ".join(sorted({run.metric for run in runs if run.record.result is not None})) or "as trained"
    names = [name for name in numbers[0] if any(its[name] != "-" for its in numbers)]
    how = (
        f"Scores ({metric}) {'are in percent, and ' if all(run.percent for run in runs) else ''}belong to the epoch "
        "with the best validation score. The time per epoch is the median, and covers training only. Fewer halo nodes "
        "per batch node mean less to pull and smaller errors."
    )
    if len(runs) == 1:
        shown = definitions([(name, numbers[0][name]) for name in names], kind="tiles")
    else:
        columns = [(run.name, [its[name] for name in names]) for run, its in zip(runs, numbers, strict=True)]
        shown = facts_table(names, columns, caption="Key numbers")
    return Section("numbers", "Key numbers", paragraph(how) + shown)


def comparison_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Settings and results that differ between runs, and means over runs that differ only in their seeds."""
    if len(runs) < 2:
        return None
    first = next((run for run in runs if run.options.get("mode") == "full"), runs[0])  # the yardstick, if there is one
    changed = differing([run.options for run in runs])
    columns = [(run.name, [*_pick(changed, run.options).values(), *_results(run, first)]) for run in runs]
    names = [*changed, "test score", "val score", "time per epoch", "total time", "peak memory", "histories"]
    known = [at for at in range(len(names)) if at < len(changed) or any(its[at] != "-" for _, its in columns)]
    columns = [(name, [its[at] for at in known]) for name, its in columns]
    how = (
        f"Settings that differ, and their results, relative to {first.name}: scores as "
        f"differences{' in percentage points' if first.percent else ''}, times and memory as ratios. Runs also differ "
        "by chance: compare several seeds before you trust a small difference."
    )
    if len({(run.data, run.metric) for run in runs}) > 1:
        how += " Runs on other data, or with another score, have their own numbers."
    body = [paragraph(how)]
    groups = _groups(runs)
    if len(groups) < len(runs):
        settings = [name for name in changed if name != "seed"]
        rows = [
            [
                ", ".join(run.tag for run in group),
                group[0].facts()["data set"].split(",")[0],
                *_pick(settings, group[0].options).values(),
                *(_mean_score(group, split) for split in ("test", "val")),
            ]
            for group in groups
        ]
        heads = ["runs", "data", *settings, "test", "val"]
        body.append(table(heads, rows, caption="Mean and standard deviation over seeds"))
    body.append(facts_table([names[at] for at in known], columns, caption="Settings and results that differ"))
    return Section("comparison", "Comparison", "".join(body))


def _pick(names: Sequence[str], values: dict[str, str]) -> dict[str, str]:
    return {name: values.get(name, "-") for name in names}


def _groups(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
    """Runs with the same data, model and options, except for the seed."""
    groups: dict[object, list[ReportedRun]] = {}
    for run in runs:
        options = frozenset((name, value) for name, value in run.options.items() if name != "seed")
        its = run.facts()
        groups.setdefault((options, its["data set"], its["model"]), []).append(run)
    return list(groups.values())


def _mean_score(runs: Sequence[ReportedRun], split: str) -> str:
    values, percent = [score for run in runs if (score := run.score(split)) is not None], runs[0].percent
    if len(values) < 2:
        return score_text(values[0] if values else None, percent=percent)
    mean, spread = (score_text(each(values), percent=percent) for each in (statistics.mean, statistics.stdev))
    return f"{mean} ± {spread}"


def _results(run: ReportedRun, first: ReportedRun) -> list[str]:
    """Scores as differences to the first run and amounts as ratios.

    For the first run itself, and for those on other data or with another score, the values.
    """
    found = []
    by_itself = run is first or run.data != first.data or run.metric != first.metric
    for split in ("test", "val"):
        score, base = run.score(split), first.score(split)
        if by_itself or score is None or base is None:
            found.append(score_text(score, percent=run.percent))
        else:
            found.append(score_text(score - base, percent=run.percent, sign="+"))
    for (amount, text), (base, _) in zip(_amounts(run), _amounts(first), strict=True):
        if amount == 0:
            found.append("none")
        else:
            found.append(text(amount) if by_itself or amount is None or not base else f"× {amount / base:.2f}")  # noqa: RUF001
    return found


def _amounts(run: ReportedRun) -> list[tuple[float | None, Callable[[float | None], str]]]:
    """Time of an epoch and of all of it, peak memory and size of the histories, each with its format."""
    sizes = (finite(run.result.get(name)) for name in ("peak_memory", "history_bytes"))
    times = (run.epoch_seconds, run.total_seconds)
    return [*((time, seconds_text) for time in times), *((size, bytes_text) for size in sizes)]
