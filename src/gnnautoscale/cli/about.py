"""The command ``gas`` itself: what it is for, and its version."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gas {metadata.version('gnnautoscale')}")
        raise typer.Exit


def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train graph neural networks on graphs that do not fit a GPU, with historical embeddings."""
