"""Sections in words and tables: the runs, their key numbers, and what made a difference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from gnnautoscale.report.markup import LONG, Section, definitions, facts, folded, paragraph, table
from gnnautoscale.report.readable import bytes_text, finite, seconds_text
from gnnautoscale.report.shown import Shown, differing, score_text


def runs_section(runs: Sequence[Shown]) -> Section:
    """What was run: what all runs share, what differs, and all settings to unfold."""
    about = [run.facts() for run in runs]
    different = differing(about)
    shared = [(name, text) for name, text in about[0].items() if name not in different and text not in ("", "-")]
    options = [run.options for run in runs]
    changed = differing(options)
    body = [definitions(shared)]
    if different or changed:
        # Some facts are options, too, such as the mode.
        both = [{**_named(changed, run.options), **_named(different, its)} for run, its in _zip(runs, about)]
        # Long texts come last: a narrow screen shows the beginning.
        names = sorted(both[0], key=lambda name: max(len(its[name]) for its in both) > LONG)
        columns = [(run.name, [its[name] for name in names]) for run, its in _zip(runs, both)]
        body.append(facts(names, columns, caption="Where the runs differ"))
    names = list(dict.fromkeys(name for its in options for name in its))
    if names:
        columns = [(run.name, _chosen(run, names)) for run in runs]
        body.append(folded("All settings", facts(names, columns, caption="Settings")))
    return Section("runs", "Run" if len(runs) == 1 else "Runs", "".join(body))


def numbers_section(runs: Sequence[Shown]) -> Section:
    """The numbers to look at first."""
    numbers = [run.key_numbers() for run in runs]
    metric = ", ".join(sorted({run.metric for run in runs if run.record.result is not None})) or "as trained"
    names = [name for name in dict.fromkeys(n for its in numbers for n in its) if _known(numbers, name)]
    columns = [(run.name, [its.get(name, "-") for name in names]) for run, its in _zip(runs, numbers)]
    how = (
        f"Scores ({metric}) are in percent, those of the epoch with the best validation score: what a run is judged "
        "by. The time of an epoch is that of training alone, the median over epochs. Fewer halo nodes per batch "
        "node mean less to pull and smaller errors."
    )
    if len(runs) == 1:
        shown = definitions([(name, numbers[0][name]) for name in names], kind="tiles")
    else:
        shown = facts(names, columns, caption="Key numbers")
    return Section("numbers", "Key numbers", paragraph(how) + shown)


def comparison_section(runs: Sequence[Shown]) -> Section | None:
    """What differs between runs, in settings and in results; and runs that differ in their seeds alone as one."""
    if len(runs) < 2:
        return None
    first = runs[0]
    changed = differing([run.options for run in runs])
    columns = [(run.name, [*_chosen(run, changed), *_results(run, first)]) for run in runs]
    names = [*changed, "test score", "val score", "time per epoch", "peak memory", "histories"]
    known = [at for at in range(len(names)) if at < len(changed) or any(its[at] != "-" for _, its in columns)]
    columns = [(name, [its[at] for at in known]) for name, its in columns]
    how = (
        f"Settings that differ, and what came of it. {first.tag} is what others are compared with: scores as "
        "differences in percentage points, times and memory as ratios. Runs differ by chance, too: compare several "
        "seeds before you believe a small difference."
    )
    body = [paragraph(how)]
    groups = _groups(runs)
    if len(groups) < len(runs):
        rows = [
            [
                ", ".join(run.tag for run in group),
                group[0].facts()["data set"].split(",")[0],
                *_chosen(group[0], [name for name in changed if name != "seed"]),
                *(_spread([run.score(split) for run in group]) for split in ("test", "val")),
            ]
            for group in groups
        ]
        heads = ["runs", "data", *(name for name in changed if name != "seed"), "test", "val"]
        body.append(table(heads, rows, caption="Mean and standard deviation over seeds"))
    body.append(facts([names[at] for at in known], columns, caption="Settings and results that differ"))
    return Section("comparison", "Comparison", "".join(body))


def _named(names: Sequence[str], values: dict[str, str]) -> dict[str, str]:
    return {name: values.get(name, "-") for name in names}


def _zip(runs: Sequence[Shown], its: Sequence[dict[str, str]]) -> Iterator[tuple[Shown, dict[str, str]]]:
    return zip(runs, its, strict=True)


def _chosen(run: Shown, names: Sequence[str]) -> list[str]:
    return list(_named(names, run.options).values())


def _known(columns: Sequence[dict[str, str]], name: str) -> bool:
    return any(column.get(name, "-") != "-" for column in columns)


def _groups(runs: Sequence[Shown]) -> list[list[Shown]]:
    """Runs of the same data, model and options but for the seed."""
    groups: dict[object, list[Shown]] = {}
    for run in runs:
        options = frozenset((name, value) for name, value in run.options.items() if name != "seed")
        its = run.facts()
        groups.setdefault((options, its["data set"], its["model"]), []).append(run)
    return list(groups.values())


def _spread(scores: Sequence[float | None]) -> str:
    values = [score for score in scores if score is not None]
    if len(values) < 2:
        return score_text(values[0] if values else None)
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def _results(run: Shown, first: Shown) -> list[str]:
    """Results beside those of the first run: differences of scores, ratios of amounts; its own as they are."""
    found = []
    for split in ("test", "val"):
        score, base = run.score(split), first.score(split)
        found.append(score_text(score) if run is first or score is None or base is None else f"{score - base:+.2f}")
    for (amount, text), (base, _) in zip(_amounts(run), _amounts(first), strict=True):
        if amount == 0:
            found.append("none")
        else:
            found.append(text(amount) if run is first or amount is None or not base else f"× {amount / base:.2f}")  # noqa: RUF001
    return found


def _amounts(run: Shown) -> list[tuple[float | None, Callable[[float | None], str]]]:
    """Time of an epoch, peak memory and size of histories, each with how it is written."""
    sizes = (finite(run.result.get(name)) for name in ("peak_memory", "history_bytes"))
    return [(run.epoch_seconds, seconds_text), *((size, bytes_text) for size in sizes)]
