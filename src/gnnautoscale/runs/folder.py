"""The folder of a training run.

``run.json`` describes the run, ``metrics.jsonl`` has one line per measurement, a finished run adds ``result.json``, and
one that was verified ``verification.json``. ``docs/diagnostics.md`` explains the numbers. Each object has a checksum,
and a result the number of measurements, so that a damaged folder is noticed. While the run goes on, a lock keeps other
runs out of its folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TextIO

from gnnautoscale._util import FolderLock, checked, is_unchanged, ordinary, reason_of, with_checksum, write_atomically
from gnnautoscale.errors import InputError
from gnnautoscale.runs.result import jsonable

FORMAT = 1
RUN, METRICS, RESULT, VERIFICATION = "run.json", "metrics.jsonl", "result.json", "verification.json"
_LOCK, _CHECKSUM, _RECORDS = ".lock", "checksum", "records"
_KINDS = {"epoch": "epochs", "staleness": "staleness", "gradients": "gradients", "lipschitz": "lipschitz"}
_FIX = "Choose another one, or write none (--run-dir none on the command line)."


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder.

    Attributes:
        path: The folder.
        run: Description of the run: ``"title"``, ``"options"``, ``"data"``, ``"model"``, ``"score"``, ``"parts"`` and
            more.
        epochs: Loss, scores, times and transfers of each epoch.
        staleness: All measurements of the histories' errors.
        gradients: All measurements of the gradients' errors.
        lipschitz: All measurements of the layers' Lipschitz constants.
        result: The result, or ``None`` if the run has not finished.
        verification: Whether the trained model is exact, or ``None`` if nobody asked.
    """

    path: Path
    run: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    staleness: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    lipschitz: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    verification: dict[str, Any] | None = None

    def option(self, name: str) -> Any:
        """An option of the run; ``None`` if the folder does not say."""
        return self.run.get("options", {}).get(name)

    @property
    def on_gpu(self) -> bool:
        """Whether the run trained on a GPU."""
        return str(self.option("device") or "cpu").startswith("cuda")

    def last(self, name: str) -> Any:
        """A value of the last epoch; ``None`` if there is none."""
        return self.epochs[-1].get(name) if self.epochs else None

    @property
    def best_of(self) -> tuple[int, int]:
        """Number of the best and of the last epoch; 0 if unknown."""
        return (self.result or {}).get("best_epoch") or 0, self.last("epoch") or 0

    @property
    def settled_epochs(self) -> list[dict[str, Any]]:
        """The epochs without the first, which also builds batches and tries the model, unless it is the only one."""
        return [epoch for epoch in self.epochs[1:] or self.epochs if epoch.get("seconds")]

    def time_share(self, work: str) -> float:
        """The share of training time, without the first epoch, that went into some work."""
        total: float = sum(epoch["seconds"] for epoch in self.settled_epochs)
        return sum((epoch.get("time") or {}).get(work) or 0.0 for epoch in self.settled_epochs) / (total or 1.0)


class RunFolder:
    """Writes the folder of a run while it trains."""

    def __init__(self, path: Path, stream: TextIO, lock: FolderLock, records: int = 0) -> None:
        self.path = path
        self._stream, self._lock, self._records = stream, lock, records

    @staticmethod
    def create(path: Path, run: Mapping[str, Any]) -> RunFolder:
        """Start a run in a new or empty folder; its description gets format and time."""
        check_run_dir(path)
        with _only_writer(path) as lock:
            _write_json(path / RUN, {"format": FORMAT, "started": _now(), **run})
            return RunFolder(path, _open(path, "w"), lock)

    @staticmethod
    def reopen(
        path: Path, run: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], *, free: Collection[str] = ()
    ) -> RunFolder:
        """Continue a run after some epochs, and drop what it measured later, since it will be measured again.

        The description must match the folder's, except for options named in ``free``. What is damaged in the folder is
        written anew: ``epochs`` are the records of those epochs.
        """
        with _only_writer(path) as lock:
            _continue_description(path, run, free)
            lines = [line for line in _whole_lines(path / METRICS) if 0 < _number(line.get("epoch")) <= len(epochs)]
            known = {line["epoch"] for line in lines if line.get("kind") == "epoch"}
            lines += [dict(record) for record in epochs if record["epoch"] not in known]
            lines.sort(key=lambda line: _number(line["epoch"]))
            try:
                _write(path / METRICS, "".join(map(_as_line, lines)))
                for name in (RESULT, VERIFICATION):
                    (path / name).unlink(missing_ok=True)
            except OSError as error:
                raise _unwritable(path, error) from None
            return RunFolder(path, _open(path, "a"), lock, len(lines))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, and flush it to the file."""
        try:
            self._stream.write(_as_line(record))
            self._stream.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from None
        self._records += 1

    def finish(self, result: Mapping[str, Any]) -> None:
        """Mark the run as finished, and write its result."""
        _write_json(self.path / RESULT, {**result, _RECORDS: self._records, "finished": _now()})

    def verified(self, found: Mapping[str, Any]) -> None:
        """Write whether the trained model is exact."""
        _write_json(self.path / VERIFICATION, found)

    def close(self) -> None:
        """Close the folder; nothing more can be appended."""
        with suppress(OSError):  # what could not be written has been reported already
            self._stream.close()
        self._lock.remove()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _only_writer(path: Path) -> Iterator[FolderLock]:
    """Keep other runs out of a folder; if this fails, not any more."""
    try:
        lock = FolderLock(path / _LOCK)
    except OSError as error:
        raise _unwritable(path, error) from None
    if not lock.taken:
        lock.release()
        rule, fix = "a run's folder belongs to one run at a time", "Wait for it to end, or choose another folder."
        raise InputError(rule, got=f"{path}, which another run is using", fix=fix)
    try:
        yield lock
    except BaseException:
        lock.remove()
        raise


def _continue_description(path: Path, run: Mapping[str, Any], free: Collection[str]) -> None:
    """See that a folder describes a run, but for options named in ``free``; a damaged description is written anew."""
    try:
        known = _described(path)
    except InputError:
        _write_json(path / RUN, {"format": FORMAT, "started": _now(), **run})
        return
    here, there = (json.loads(json.dumps(_identity(which, free))) for which in (jsonable(dict(run)), known))
    if here != there:
        names = ", ".join(name for name in here if here[name] != there[name])
        got = f"{path}, with other {names}"
        raise InputError("a run must continue in its own folder", got=got, fix="Choose another run_dir.")


def check_run_dir(path: Path) -> None:
    """Create the folder, and refuse one that is not empty or not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = any(each.name != _LOCK for each in path.iterdir())
        writable = os.access(path, os.W_OK)
    except OSError as error:
        raise InputError("run_dir must be a writable folder", got=f"{path} ({reason_of(error)})", fix=_FIX) from None
    if taken or not writable:
        got = f"{path}, which {'is not empty' if taken else 'cannot be written to'}"
        raise InputError("run_dir must be a new or empty folder", got=got, fix=_FIX)


@contextmanager
def as_run_wrote(*paths: Path) -> Iterator[None]:
    """Name the folders of runs whose files hold values of other types than a run writes."""
    try:
        yield
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            "the files of a run must hold what the run wrote",
            got=f"{', '.join(map(str, paths[:3]))} ({reason})",
            fix="Restore them, or leave this run out.",
        ) from error


def is_run_dir(path: Path) -> bool:
    """Whether a folder holds a run, or what is left of one: files of a run and nothing else."""
    try:
        names = [each.name for each in path.iterdir()]
    except OSError:
        return False
    files = "|".join(map(re.escape, (RUN, METRICS, RESULT, VERIFICATION)))
    own = re.compile(rf"({files})(\.\w+\.part)?|events\..*|{re.escape(_LOCK)}")
    return RUN in names or (bool(names) and all(own.fullmatch(name) for name in names))


def free_folder(parent: Path, name: str) -> Path:
    """A path that does not exist yet: the name without characters that file systems dislike, and a number if needed."""
    plain = re.sub(r"[^\w.-]+", "-", name)
    found, number = parent / plain, 1
    while found.exists():
        number += 1
        found = parent / f"{plain}-{number}"
    return found


@checked()
def read_run(path: str | Path) -> RunRecord:
    """Read the folder of a run, finished or not.

    A last line that a crash cut off is dropped, and so are records of unknown kinds.

    Example:
        >>> read_run("nowhere")
        Traceback (most recent call last):
        ...
        gnnautoscale.errors.InputError: a run's folder must hold run.json, but got nowhere. Pass a folder of --run-dir.
    """
    path = Path(path)
    run = _described(path)
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in _KINDS.values()}
    lines = _lines(path / METRICS)
    for line in lines:
        kind = line.get("kind")
        if isinstance(kind, str) and kind in _KINDS:
            records[_KINDS[kind]].append(line)
    result, verification = (
        _read_json(path / name) if (path / name).exists() else None for name in (RESULT, VERIFICATION)
    )
    measured = len(lines) if result is None else result.pop(_RECORDS, len(lines))
    if measured != len(lines):
        raise _unreadable(path / METRICS, f"{len(lines)} lines instead of {measured}")
    return RunRecord(path, run, result=result, verification=verification, **records)


def _described(path: Path) -> dict[str, Any]:
    """The description in a run's folder."""
    if not (path / RUN).is_file():
        raise InputError(f"a run's folder must hold {RUN}", got=str(path), fix="Pass a folder of --run-dir.")
    run = _read_json(path / RUN)
    if run.get("format") != FORMAT:
        got, fix = repr(run.get("format")), "Use the version that wrote it."
        raise InputError(f"{RUN} must have format {FORMAT}", got=got, fix=fix)
    return run


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0


def _identity(run: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """What must match for two runs to be the same."""
    options = {name: value for name, value in run.get("options", {}).items() if name not in free}
    # A run may go on on another number of ranks.
    data = {name: value for name, value in (run.get("data") or {}).items() if name != "ranks"}
    return {"title": run.get("title"), "data": data, "model": run.get("model"), "options": options}


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = ordinary(path).read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise _unreadable(path, str(error)) from None
    *lines, last = text.split("\n")
    read = [_parsed(line, path, number) for number, line in enumerate(lines, start=1)]
    with suppress(InputError):  # the last line is empty, unless a crash cut it off
        read.append(_parsed(last, path, len(lines) + 1))
    return read


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are not damaged."""
    try:
        text = ordinary(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        with suppress(InputError):
            found.append(_parsed(line, path, number))
    return found


def _as_line(record: Mapping[str, Any]) -> str:
    return json.dumps(with_checksum(jsonable(dict(record))), allow_nan=False) + "\n"


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _unreadable(path, f"line {number}: {error}") from None
    if not isinstance(value, dict):
        raise _unreadable(path, f"line {number}: {type(value).__name__} instead of an object")
    if _CHECKSUM in value and not is_unchanged(value):
        raise _unreadable(path, f"line {number}: other values than its checksum was made of")
    return {name: each for name, each in value.items() if name != _CHECKSUM}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parsed(ordinary(path).read_text(encoding="utf-8"), path, 1)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Path, what: str) -> InputError:
    return InputError(
        f"{path.name} must hold JSON objects as the run wrote them", got=f"{path} ({what})", fix="Restore or remove it."
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write(path, json.dumps(with_checksum(jsonable(dict(value))), indent=1, allow_nan=False))


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda stream: stream.write(text.encode()), rule="run_dir must be writable")


def _open(path: Path, mode: Literal["w", "a"]) -> TextIO:
    try:
        return (path / METRICS).open(mode, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError("run_dir must be a writable folder", got=f"{path} ({reason_of(error)})", fix=_FIX)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
