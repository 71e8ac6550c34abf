"""The command ``gas report``: one HTML page about training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnautoscale._util import check_writable
from gnnautoscale.cli.display import say
from gnnautoscale.report import write_report


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders with run folders in them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page that compares training runs: curves, staleness, errors, parts, time and memory."""
    check_writable(output, rule="--output names a file in an existing folder")
    count = write_report(runs, output)
    say(f"written: {output}, about {count} {'run' if count == 1 else 'runs'}")
