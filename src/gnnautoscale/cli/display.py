"""Output of the commands: bars and tables on a terminal, plain lines when piped, JSON for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gnnautoscale.runs import Phases, jsonable, print_line
from gnnautoscale.runs import terminal as errors

#: The flag ``--json``.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def say(line: str, **style: Any) -> None:
    """Print a line for the user on the error stream; a terminal breaks it between words."""
    errors.print(line, soft_wrap=not errors.is_terminal, markup=False, highlight=False, **style)


def tell(text: str) -> None:
    """Print sentences that are a result, as :func:`say` does, but on the output."""
    console = Console()
    console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print a value as JSON, with null for NaN and infinity."""
    print(json.dumps(jsonable(value)))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, or tab-separated lines when piped.

    On a narrow terminal headings break between words, then the lines go, and at last each row becomes a list.
    """
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(row))
        return
    console = Console()
    broken = [re.sub(r" (?!%)", "\n", column) for column in columns]
    for heads, style in ((columns, HEAVY_HEAD), (broken, HEAVY_HEAD), (broken, SIMPLE_HEAD)):
        narrow = style is SIMPLE_HEAD
        shape: dict[str, Any] = {
            "box": style,
            "collapse_padding": narrow,
            "show_edge": not narrow,
            "pad_edge": not narrow,
        }
        table = Table(title=title, title_justify="left", title_style="bold", **shape)
        for number, column in enumerate(heads):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
            console.print(table)
            return
    console.print(title, style="bold", markup=False)
    for row in rows:
        for number, (column, value) in enumerate(zip(columns, row, strict=True)):
            print(f"{'' if not number else '  '}{column}: {value}" if column else value)


@contextmanager
def working(phase: str, *, long: bool = False) -> Iterator[None]:
    """Show on the error stream what runs in this context: on a terminal while it does, and else by a line.

    The line is printed once it takes longer than two seconds, or at once if it will be ``long``.
    """
    if errors.is_terminal:
        with errors.status(phase):
            yield
        return
    phases = Phases(lambda name: print_line(name) if name else None, [phase] if long else [])
    phases(phase)
    try:
        yield
    finally:
        phases("")


def megabytes(value: int | None) -> str:
    """An amount of memory for a table."""
    return "-" if value is None else f"{value / 2**20:,.0f} MB"


def show_facts(title: str, facts: dict[str, Any], json: bool) -> None:
    """Print named numbers as a table, or as JSON."""
    if json:
        print_json(facts)
    else:
        print_table(title, ["", "value"], [[name, _text(value)] for name, value in facts.items()])


def _text(value: bool | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
