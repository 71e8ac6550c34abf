"""Help pages that fit terminals of 80 columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose help names a switch once, as ``--[no-]undirected``.

    Beside a column for the names that switch off, narrow terminals have no room for the others.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page; nothing else happens with a command after that, so its parameters may change."""
        for param in self.params:
            if param.secondary_opts:
                param.opts = [f"--[no-]{param.opts[0].removeprefix('--')}"]
                param.secondary_opts = []
        super().format_help(ctx, formatter)
