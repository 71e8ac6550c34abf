"""Fills the arguments of a docstring in from where they are declared."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

_MARK, _WIDTH = "{options}", 120


def describe_arguments(documented: Any, described: Mapping[str, str]) -> None:
    """Replace the line ``{options}`` in the docstring of a function or class by one entry per argument.

    Example:
        >>> def area(width, height):
        ...     '''The area.
        ...
        ...     Args:
        ...         {options}
        ...     '''
        >>> describe_arguments(area, {"width": "In metres.", "height": "In metres."})
        >>> [line.strip() for line in area.__doc__.splitlines()[2:5]]
        ['Args:', 'width: In metres.', 'height: In metres.']
    """
    doc = documented.__doc__ or ""  # none with python -OO
    indent = next((line[: -len(_MARK)] for line in doc.splitlines() if line.strip() == _MARK), "")
    entries = [
        textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ")
        for name, text in described.items()
    ]
    documented.__doc__ = doc.replace(indent + _MARK, "\n".join(entries))
