"""Pieces of work are shown once they take longer than two seconds, and only then."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from gnnautoscale.cli import display
from gnnautoscale.cli.display import working
from gnnautoscale.runs import Phases, epochs_shown, progress


class Timers:
    """Stands for ``threading.Timer``; :meth:`pass_time` lets two seconds pass."""

    def __init__(self) -> None:
        self._waiting: list[Timers.One] = []

    class One:
        def __init__(self, call: Callable[[], None], cancel: Callable[[Any], None]) -> None:
            self.call, self._cancel = call, cancel
            self.daemon = False

        def start(self) -> None:
            assert self.daemon, "must not keep the process alive"

        def cancel(self) -> None:
            self._cancel(self)

    def __call__(self, seconds: float, call: Callable[..., None], arguments: list[Any]) -> Timers.One:
        assert seconds == 2.0
        timer = Timers.One(lambda: call(*arguments), self._forget)
        self._waiting.append(timer)
        return timer

    def _forget(self, timer: Timers.One) -> None:
        if timer in self._waiting:
            self._waiting.remove(timer)

    def pass_time(self) -> None:
        due, self._waiting = self._waiting, []
        for timer in due:
            timer.call()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr(threading, "Timer", made)
    return made


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200)
    monkeypatch.setattr(display, "errors", console)
    monkeypatch.setattr(progress, "terminal", console)
    return stream


def test_only_long_work_is_shown(timers: Timers) -> None:
    shown: list[str] = []
    phases = Phases(shown.append)
    phases("partition")
    phases("train")
    assert shown == []
    timers.pass_time()
    assert shown == ["train"]
    phases("evaluate")
    assert shown == ["train", ""]
    phases("")
    timers.pass_time()
    assert shown == ["train", ""]


def test_what_keeps_the_interpreter_is_shown_at_once(timers: Timers) -> None:
    shown: list[str] = []
    phases = Phases(shown.append, at_once=["partition"])
    phases("partition")
    timers.pass_time()
    assert shown == ["partition"]
    phases("train")
    assert shown == ["partition", ""]


def test_a_timer_that_comes_too_late_shows_nothing(timers: Timers) -> None:
    shown: list[str] = []
    phases = Phases(shown.append)
    phases("partition")
    (late,) = timers._waiting
    phases("train")
    late.call()
    assert shown == []


def test_a_pipe_gets_a_line_for_each_kind_of_long_work(timers: Timers, capsys: pytest.CaptureFixture[str]) -> None:
    with epochs_shown("cora", 3, quiet=False) as show:
        for name in ("partition", "train", "evaluate", "train", ""):
            show.phase(name)
            if name != "evaluate":
                timers.pass_time()
    assert capsys.readouterr().err.splitlines() == ["cora: partition", "cora: train"]


def test_quiet_is_quiet(timers: Timers, capsys: pytest.CaptureFixture[str]) -> None:
    with epochs_shown("cora", 3, quiet=True, at_once=["partition"]) as show:
        show.phase("partition")
        timers.pass_time()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_it_beside_the_bar(timers: Timers, terminal: io.StringIO) -> None:
    with epochs_shown("cora", 3, quiet=False) as show:
        show.phase("partition")
        assert "partition" not in terminal.getvalue()
        timers.pass_time()
        assert "partition" in terminal.getvalue()
        show.phase("train")
        terminal.truncate(0)
    assert "partition" not in terminal.getvalue()  # the last picture of the bar


@pytest.mark.parametrize(
    ("long", "passes", "expected"), [(False, False, ""), (False, True, "halo\n"), (True, False, "halo\n")]
)
def test_other_work_gets_a_line(
    long: bool, passes: bool, expected: str, timers: Timers, capsys: pytest.CaptureFixture[str]
) -> None:
    with working("halo", long=long):
        if passes:
            timers.pass_time()
    timers.pass_time()
    assert capsys.readouterr().err == expected


def test_other_work_on_a_terminal(terminal: io.StringIO) -> None:
    with working("halo"):
        progress.terminal.print("line")
    assert "halo" in terminal.getvalue()
