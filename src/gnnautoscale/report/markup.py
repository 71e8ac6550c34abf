"""Pieces of the page: tables, figures with their data, sections. Text is escaped here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gnnautoscale.report.readable import short, spaced
from gnnautoscale.report.svg import COLORS, Series

LONG = 24  # the longest text that stays on one line of a table
_ROWS = 40


@dataclass(frozen=True)
class Section:
    """A section: its address within the page, its heading, and what is in it, as HTML."""

    name: str
    title: str
    body: str

    def html(self) -> str:
        """The section under its heading."""
        return f'<section id="{self.name}"><h2>{escape(self.title)}</h2>\n{self.body}\n</section>'


@dataclass(frozen=True)
class Key:
    """An entry of a legend; without a colour, it is about lines of any."""

    name: str
    color: int | None
    dashed: bool = False


def paragraph(text: str, *, kind: str = "how") -> str:
    """A paragraph of text."""
    return f'<p class="{kind}">{escape(text)}</p>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table whose first cells name their rows; wide ones scroll by themselves.

    Example:
        >>> table(["", "loss"], [["A", "<1"]], caption="Loss").count("&lt;1</td>")
        1
    """
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = [f'<tr><th scope="row">{escape(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows]
    body = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>{body}</table></div>'


def _cell(text: str) -> str:
    """A cell; only long text may go over several lines."""
    return f'<td class="text">{escape(text)}</td>' if len(text) > LONG else f"<td>{escape(text)}</td>"


def facts(names: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]], *, caption: str) -> str:
    """A table of facts about runs: beside each other if they are few, else below each other.

    Args:
        names: What each fact is called.
        columns: Each run's name, and its facts.
        caption: What the table has.
    """
    if len(columns) <= 3:
        rows = [[name, *(values[index] for _, values in columns)] for index, name in enumerate(names)]
        return table(["", *(run for run, _ in columns)], rows, caption=caption)
    return table(["", *names], [[run, *values] for run, values in columns], caption=caption)


def definitions(pairs: Sequence[tuple[str, str]], *, kind: str = "facts") -> str:
    """Names and what they stand for."""
    items = "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in pairs)
    return f'<dl class="{kind}">{items}</dl>'


def legend(keys: Sequence[Key]) -> str:
    """What the colours and dashes of a plot mean."""
    items = []
    for key in keys:
        color = "any" if key.color is None else f"c{key.color % COLORS}"
        kind = f"swatch {color} dashed" if key.dashed else f"swatch {color}"
        items.append(f'<li><span class="{kind}"></span>{escape(key.name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def folded(summary: str, body: str) -> str:
    """Something to unfold."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figure(title: str, plot: str, *, data: str = "", keys: Sequence[Key] = ()) -> str:
    """A plot under its title, with a legend if it needs one, and its data to unfold."""
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3></figcaption>{plot}"
        f"{legend(keys) if keys else ''}{folded('Data', data) if data else ''}</figure>"
    )


def figures(found: Sequence[str]) -> str:
    """Figures beside each other, as many as there is room for."""
    return f'<div class="figures">{"".join(found)}</div>' if found else ""


def series_table(title: str, x_title: str, series: Sequence[Series]) -> str:
    """The values of curves, at no more than some forty places."""
    values = [dict(one.points) for one in series]
    xs = sorted({x for points in values for x in points})
    chosen = [xs[index] for index in spaced(len(xs), _ROWS)]
    rows = [[short(x), *(short(points.get(x)) for points in values)] for x in chosen]
    some = f", at {len(chosen)} of {len(xs)} places" if len(chosen) < len(xs) else ""
    return table([x_title, *(one.name for one in series)], rows, caption=f"{title}{some}")
