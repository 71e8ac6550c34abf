"""The runs of a report: finding them, naming them, and describing them in words."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnautoscale.errors import InputError
from gnnautoscale.report.readable import Point, bytes_text, finite, seconds_text, short
from gnnautoscale.report.svg import Series
from gnnautoscale.runs import RunRecord, read_run

# Options that say where files are, and nothing about what is computed.
_PATHS = ("run_dir", "checkpoint_dir", "resume", "history_dir", "cache_dir")
# Options that a mode does not use, whatever they are set to.
_OF_BATCHES = ("num_parts", "batch_size", "partition", "balance", "drawings", "steps_per_epoch", "lipschitz_radius")
_OF_HISTORIES = (
    *("storage", "history_dtype", "refresh", "refresh_every", "evaluation", "evaluate_parts", "compensate"),
    *("batches_on", "keep_batches", "capture", "lipschitz", "lipschitz_radius", "drawings", "exact_epochs"),
)
_UNUSED = {
    "full": (*_OF_BATCHES, "fan_out", "refresh", "refresh_every", "compensate", "evaluate_parts"),
    "cluster": (*_OF_HISTORIES, "fan_out"),
    "sage": (*_OF_HISTORIES, "partition", "balance"),
    "gas": ("fan_out",),
}
NOT_USED = "not used"
_UNITS = ("nodes", "edges", "features", "classes", "targets")


@dataclass(frozen=True)
class ReportedRun:
    """A run in the report; its number, from 0, determines colour and letter. A run that is alone needs no letter.

    Its ``label`` is what sets its title apart from those of the other runs.
    """

    record: RunRecord
    number: int
    label: str
    alone: bool = False

    @property
    def tag(self) -> str:
        """A letter or two: A to Z, then AA, AB, ..."""
        first, second = divmod(self.number, 26)
        return (chr(64 + first) if first else "") + chr(65 + second)

    @property
    def name(self) -> str:
        """The tag and the label; only the label if the run is alone."""
        return self.label if self.alone else f"{self.tag} · {self.label}"

    @property
    def group(self) -> str:
        """The CSS class of its curves and bars."""
        return f"run-{self.tag}"

    @cached_property
    def options(self) -> dict[str, str]:
        """Options in words, without paths, and which of them the mode does not use."""
        options = self.record.run.get("options") or {}
        unused = _UNUSED.get(str(options.get("mode")), ())
        return {
            name: NOT_USED if name in unused else words(value) for name, value in options.items() if name not in _PATHS
        }

    @cached_property
    def result(self) -> dict[str, Any]:
        """The result; for an unfinished run, what its epochs tell."""
        if self.record.result is not None:
            return self.record.result
        epochs = self.record.epochs
        scored = [epoch for epoch in epochs if finite((epoch.get("scores") or {}).get("val")) is not None]
        choose = max if self._about_score.get("higher_is_better", True) else min
        best = choose(scored, key=lambda epoch: epoch["scores"]["val"], default={})
        memory = [epoch["memory"] for epoch in epochs if finite(epoch.get("memory")) is not None]
        return {
            "scores": best.get("scores") or {},
            "best_epoch": best.get("epoch"),
            "steps": epochs[-1].get("steps") if epochs else 0,
            "peak_memory": max(memory, default=None),
        }

    @property
    def metric(self) -> str:
        """The name of the score."""
        return str(self.result.get("metric") or self._about_score.get("metric") or "score")

    @property
    def data(self) -> str:
        """The name of the data set."""
        return words((self.record.run.get("data") or {}).get("name"))

    @property
    def percent(self) -> bool:
        """Whether the score is in percent."""
        return bool(self._about_score.get("percent", True))

    @property
    def _about_score(self) -> dict[str, Any]:
        about: dict[str, Any] = self.record.run.get("score") or {}
        return about

    def score(self, split: str) -> float | None:
        """The score of the best epoch on a split, if known."""
        return finite((self.result.get("scores") or {}).get(split))

    def settled_seconds(self) -> list[Point]:
        """The time of each epoch but the first, which also prepares batches, unless it is the only one."""
        points = self.curve(("seconds",))
        return points[1:] or points

    @property
    def epoch_seconds(self) -> float | None:
        """The median of these times, if known."""
        seconds = [y for _, y in self.settled_seconds()]
        return statistics.median(seconds) if seconds else None

    @property
    def total_seconds(self) -> float | None:
        """The time of the whole run, if known."""
        seconds = [finite(value) or 0.0 for value in (self.result.get("seconds") or {}).values()]
        return sum(seconds) if seconds else None

    def curve(
        self, path: tuple[str, ...], records: Sequence[dict[str, Any]] | None = None, over: str = "epoch"
    ) -> list[Point]:
        """One number of all epochs (or other records) that have it, over the epoch or another number."""
        points = {}
        for record in self.record.epochs if records is None else records:
            value: Any = record
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            y, x = finite(value), finite(record.get(over))
            if x is not None and y is not None:
                points[x] = y
        return sorted(points.items())

    def series(self, points: Sequence[Point], *, dashed: bool = False, what: str = "") -> Series:
        """A curve with this run's colour and name."""
        name = f"{self.name}, {what}" if what else self.name
        return Series(name, points, self.number, "" if dashed or self.alone else self.tag, dashed, self.group)

    def facts(self) -> dict[str, str]:
        """What was run, and where."""
        run = self.record.run
        data, model, versions = (run.get(name) or {} for name in ("data", "model", "versions"))
        sizes = [f"{short(finite(data[unit]))} {unit}" for unit in _UNITS if finite(data.get(unit)) is not None]
        count = finite(model.get("parameters"))
        return {
            "data set": ", ".join([self.data, *sizes]),
            "model": words(model.get("name")) + (f", {short(count)} parameters" if count is not None else ""),
            "mode": self.options.get("mode", "-"),
            "score": self.metric,
            "machine": words(run.get("machine")),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "how steps run": words(self.result.get("how") or None),
            "histories": words(self.result.get("storage") or None),
            "started": words(run.get("started")).replace("T", " ").replace("+00:00", " UTC"),
            "state": "running, or stopped early" if self.record.result is None else "finished",
            "verification": words((self.record.verification or {}).get("summary")),
        }

    def key_numbers(self) -> dict[str, str]:
        """The most important numbers, in words."""
        result = self.result
        peak, histories = finite(result.get("peak_memory")), finite(result.get("history_bytes"))
        halo = finite(result.get("connectivity"))
        scores = {
            f"{split} score": score_text(self.score(split), percent=self.percent) for split in ("test", "val", "train")
        }
        return {
            **scores,
            "best epoch": f"{short(finite(result.get('best_epoch')))} of {len(self.record.epochs):,}",
            "steps": short(finite(result.get("steps"))),
            "time per epoch": seconds_text(self.epoch_seconds),
            "total time": seconds_text(self.total_seconds),
            "peak memory": bytes_text(peak),
            "histories": bytes_text(histories) if histories else "-",
            "halo per batch node": short(halo, 3) if halo else "-",
        }


# How many folders are searched for runs.
_MOST_FOLDERS = 10_000


def find_runs(paths: Iterable[Path]) -> list[ReportedRun]:
    """Read the given run folders, and all run folders inside the other given folders, the oldest run first."""
    records: dict[Path, RunRecord] = {}
    for path in paths:
        found = _below(path)
        if not found:
            raise InputError(
                "each path must be a run folder, or contain run folders",
                got=f"{path}, which {'has no run.json' if path.is_dir() else 'is not a folder'}",
                fix="Pass a folder of gas train (--run-dir) or fit(run_dir=...).",
            )
        read = sorted(map(read_run, found), key=lambda record: str(record.run.get("started") or ""))
        records |= {record.path.resolve(): record for record in read}
    if not records:
        raise InputError("a report needs at least one run", got="none", fix="Pass one or more run folders.")
    labels = told_apart([str(record.run.get("title") or record.path.name) for record in records.values()])
    alone = len(records) == 1
    return [
        ReportedRun(record, number, label, alone)
        for number, (record, label) in enumerate(zip(records.values(), labels, strict=True))
    ]


def told_apart(titles: Sequence[str]) -> list[str]:
    """Titles without the words that all of them begin or end with, if something is left of each.

    Example:
        >>> told_apart(["cora gcn gas seed 0", "cora gcn full seed 0"])
        ['gas', 'full']
    """
    split = [re.findall(r"seed \d+|\S+", title) for title in titles]
    for at in (0, -1):
        while all(len(words) > 1 for words in split) and len({words[at] for words in split}) == 1:
            for words in split:
                del words[at]
    labels = [" ".join(words) for words in split]
    return labels if len(set(labels)) > 1 else list(titles)


def _below(path: Path) -> list[Path]:
    """The run folders in a folder, or itself; refuses to search a whole disk."""
    found, left, count = [], [path], 0
    while left:
        folder = left.pop()
        count += 1
        if count > _MOST_FOLDERS:
            got = f"{path}, which has more than {_MOST_FOLDERS:,} folders"
            raise InputError("runs are looked for below a folder of runs", got=got, fix="Pass the folders of runs.")
        if (folder / "run.json").is_file():
            found.append(folder)
            continue
        with suppress(OSError), os.scandir(folder) as entries:  # one that cannot be read holds no run for this user
            left += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(found)


def differing(columns: Sequence[dict[str, str]]) -> list[str]:
    """The names whose values differ between columns, in order; a missing value differs, too, but not an unused one."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [name for name in names if len({column.get(name) for column in columns} - {NOT_USED}) > 1]


def words(value: Any) -> str:
    """A JSON value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def score_text(value: float | None, *, percent: bool = True, sign: str = "") -> str:
    """A score, with two decimals if it is in percent, and with its sign if that is ``"+"``."""
    return "-" if value is None else f"{value:{sign}.2f}" if percent else f"{value:{sign}.4g}"
