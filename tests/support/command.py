"""The command `gas` in this process. Its flags are put together once, which takes longer than most refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gnnautoscale.cli import app

_made = cache(get_command)


def invoke(arguments: Sequence[str], **options: Any) -> Any:
    """Run the command; what it raises is in the result, unless ``catch_exceptions`` is false."""
    with pytest.MonkeyPatch.context() as patch:
        if "--help" not in arguments:  # which writes flags in another way
            patch.setattr("typer.testing._get_command", _made)
        return CliRunner().invoke(app, arguments, **options)
