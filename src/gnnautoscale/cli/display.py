"""Output of the commands: bars and tables on a terminal, plain lines when piped, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gnnautoscale.runs import Epoch, jsonable

errors = Console(stderr=True)
#: The flag ``--json``.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def say(line: str, **style: Any) -> None:
    """Print a line for the user on the error stream."""
    errors.print(line, soft_wrap=True, markup=False, highlight=False, **style)


def print_json(value: Any) -> None:
    """Print a value as JSON, with null for NaN and infinity."""
    print(json.dumps(jsonable(value)))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, or tab-separated lines when piped."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(row))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@contextmanager
def epochs_shown(title: str, epochs: int, *, quiet: bool) -> Iterator[Callable[[Epoch], None]]:
    """Show the progress of training on the error stream; yields a function to call after each epoch."""
    if quiet:
        yield lambda _: None
    elif not errors.is_terminal:
        every = max(1, epochs // 10)

        def line(epoch: Epoch) -> None:
            if epoch.number % every == 0 or epoch.number in (1, epochs):
                print(f"{title}: epoch {epoch.number}/{epochs} {_state(epoch)}", file=sys.stderr, flush=True)

        yield line
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[state]}"), console=errors) as progress:
            task = progress.add_task(title, total=epochs, state="")
            state = ""

            def advance(epoch: Epoch) -> None:
                nonlocal state
                state = _state(epoch) if epoch.scores or not state else state
                progress.update(task, completed=epoch.number, state=state)

            yield advance


def percent(value: float) -> str:
    """A score for a table."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def megabytes(value: int | None) -> str:
    """An amount of memory for a table."""
    return "-" if value is None else f"{value / 2**20:,.0f} MB"


def _state(epoch: Epoch) -> str:
    scores = " ".join(f"{split} {percent(value)}" for split, value in epoch.scores.items())
    return f"loss {epoch.loss:.4f} {scores}".strip()
