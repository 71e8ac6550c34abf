"""Shows the progress of training on the error stream: a bar on a terminal or in a notebook, and lines when piped."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from gnnautoscale.runs.result import Epoch

#: The error stream.
terminal = Console(stderr=True)
_PATIENCE = 2.0  # seconds without a word


class Phases:
    """Shows which piece of work runs, once it takes longer than two seconds.

    ``show`` gets its name, and an empty one when something else begins. Those in ``at_once`` are shown when they begin:
    METIS and KaMinPar keep the interpreter, so that nothing could be shown later.
    """

    def __init__(self, show: Callable[[str], None], at_once: Collection[str] = ()) -> None:
        self._show, self._at_once = show, at_once
        self._running, self._is_shown = "", False
        self._timer: threading.Timer | None = None
        self._changing = threading.RLock()

    def __call__(self, name: str) -> None:
        """Say what runs from now on; nothing if the name is empty."""
        with self._changing:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_shown:
                self._show("")
            self._running, self._is_shown, self._timer = name, False, None
            if name in self._at_once:
                self._reveal(name)
            elif name:
                self._timer = threading.Timer(_PATIENCE, self._reveal, [name])
                self._timer.daemon = True
                self._timer.start()

    def _reveal(self, name: str) -> None:
        with self._changing:
            if name == self._running and not self._is_shown:
                self._is_shown = True
                self._show(name)


class Display(NamedTuple):
    """What to call to show the progress of training."""

    epoch: Callable[[Epoch], None]
    """After each epoch."""
    phase: Callable[[str], None]
    """When another piece of work begins."""


@contextmanager
def epochs_shown(
    title: str, epochs: int, *, quiet: bool, at_once: Collection[str] = (), percent: bool = True
) -> Iterator[Display]:
    """Show the progress of training on the error stream: epochs, and pieces of work that take longer than two seconds.

    Pieces in ``at_once`` are shown from their beginning. Scores are in percent, or plain numbers.
    """
    if quiet:
        yield Display(lambda _: None, lambda _: None)
    elif not _has_bars():
        every = max(1, epochs // 10)
        told: set[str] = {""}

        def line(epoch: Epoch) -> None:
            if epoch.number % every == 0 or epoch.number in (1, epochs):
                print_line(f"{title}: epoch {epoch.number}/{epochs} {_state(epoch, percent)}")

        def tell_once(name: str) -> None:
            if name not in told:
                told.add(name)
                print_line(f"{title}: {name}")

        phases = Phases(tell_once, at_once)
        try:
            yield Display(line, phases)
        finally:
            phases("")
    else:
        # On a narrow terminal the bar and the title give way to numbers, which are never cut.
        whole = partial(Column, no_wrap=True)
        name = RenderableColumn(Text(title, overflow="ellipsis", no_wrap=True))
        numbers = (MofNCompleteColumn(table_column=whole()), TimeRemainingColumn(table_column=whole()))
        fields = (TextColumn("{task.fields[state]}"), TextColumn("{task.fields[phase]}", style="dim"))
        bar = BarColumn(bar_width=40 if terminal.width >= 120 else 6)
        with Progress(name, bar, *numbers, *fields, console=terminal) as progress:
            task = progress.add_task(title, total=epochs, state="", phase="")
            state = ""

            def advance(epoch: Epoch) -> None:
                nonlocal state
                state = _state(epoch, percent) if epoch.scores or not state else state
                progress.update(task, completed=epoch.number, state=state)

            phases = Phases(lambda name: progress.update(task, phase=name, refresh=True), at_once)
            try:
                yield Display(advance, phases)
            finally:
                phases("")


def score_text(value: float, *, percent: bool = True) -> str:
    """A score for a table, with two decimals if it is in percent."""
    return "-" if math.isnan(value) else f"{value:.2f}" if percent else f"{value:.4g}"


def print_line(line: str) -> None:
    """Print a line at once: on the error stream, which a notebook paints red, so there on the output."""
    print(line, file=sys.stdout if terminal.is_jupyter else sys.stderr, flush=True)


def _state(epoch: Epoch, percent: bool) -> str:
    scores = " ".join(f"{split} {score_text(value, percent=percent)}" for split, value in epoch.scores.items())
    return f"loss {epoch.loss:.4f} {scores}".strip()


def _has_bars() -> bool:
    """Whether bars can be drawn; in a notebook rich needs ipywidgets for that."""
    return terminal.is_terminal or (terminal.is_jupyter and find_spec("ipywidgets") is not None)
