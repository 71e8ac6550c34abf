"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, facts: Mapping[str, str]) -> str:
    """A table of two columns, as ``_repr_html_`` returns it.

    Example:
        >>> html_table("Loader", {"parts": "4"})
        '<table><caption>Loader</caption><tr><th>parts</th><td>4</td></tr></table>'
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
