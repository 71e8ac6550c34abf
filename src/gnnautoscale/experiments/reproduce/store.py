"""A file with the results of finished runs, so that an interrupted experiment can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnnautoscale._util import ordinary, reason_of, versions
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.reproduce.config import Job

Result = dict[str, Any]


class Store:
    """A file with one line of JSON per finished run; it and its folder are created if missing.

    If a crash cuts off the last line, it is dropped when the file is read, and its run is repeated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = ordinary(path).read_text() if path.exists() else ""
        except OSError as error:
            raise InputError(
                "results must be readable and writable", got=f"{path} ({reason_of(error)})", fix="Check --output."
            ) from None
        *lines, cut = text.split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                read = json.loads(line)
                self._lines[read["key"]] = read
            except (ValueError, TypeError, KeyError):
                rule, got = f"every line of {path.name} is a result", f"line {number}: {line[:40]}"
                raise InputError(rule, got=got, fix="Remove it.") from None
        if cut:
            with path.open("r+b") as stream:
                stream.truncate(len(text.encode()) - len(cut.encode()))

    def get(self, run: Job) -> Result | None:
        """The result of a run, or ``None``."""
        line = self._lines.get(run.key)
        return None if line is None else line["result"]

    def add(self, run: Job, result: Result, *, seconds: float, machine: str) -> None:
        """Append the result of a run, with the time it took and the machine and versions that made it."""
        line = {
            "key": run.key,
            "run": str(run),
            "work": run.work,
            "result": result,
            "seconds": round(seconds, 2),
            "machine": machine,
            "versions": versions(),
        }
        with self.path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        self._lines[run.key] = line

    def origin(self, runs: Iterable[Job]) -> dict[str, list[str]]:
        """The machines and versions behind the results of some runs."""
        lines = [self._lines[run.key] for run in runs if run.key in self._lines]
        return {
            "machines": sorted({line["machine"] for line in lines}),
            "versions": sorted({", ".join(f"{k} {v}" for k, v in line["versions"].items()) for line in lines}),
        }
