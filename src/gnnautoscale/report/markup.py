"""HTML of the page's elements: tables, figures with their data, sections. Text is escaped here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gnnautoscale.report.readable import short, spaced
from gnnautoscale.report.svg import COLORS, Series

ONE_LINE = 24  # table cells with longer text may wrap
_MOST_ROWS = 40


@dataclass(frozen=True)
class Section:
    """A section: its anchor, its heading, and its content as HTML."""

    name: str
    title: str
    body: str

    def html(self) -> str:
        """The section below its heading."""
        return f'<section id="{self.name}"><h2>{escape(self.title)}</h2>\n{self.body}\n</section>'


@dataclass(frozen=True)
class Key:
    """An entry of a legend; without a colour, it stands for lines of any colour."""

    name: str
    color: int | None
    dashed: bool = False


def plot_section(name: str, title: str, how: str, plots: Sequence[str], *more: str) -> Section | None:
    """A section that explains how to read some plots, shows them, and then more; ``None`` without plots."""
    return Section(name, title, paragraph(how) + figures(plots) + "".join(more)) if plots else None


def paragraph(text: str) -> str:
    """A paragraph of explanation."""
    return f'<p class="how">{escape(text)}</p>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table whose first column names the rows; wide tables scroll on their own."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = [f'<tr><th scope="row">{escape(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows]
    body = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>{body}</table></div>'


def _cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>' if len(text) > ONE_LINE else f"<td>{escape(text)}</td>"


def facts_table(names: Sequence[str], runs: Sequence[tuple[str, Sequence[str]]], *, caption: str) -> str:
    """A table of facts about runs, given as pairs (name, facts): a column per run, or a row if there are many."""
    if len(runs) <= 3:
        rows = [[name, *(values[index] for _, values in runs)] for index, name in enumerate(names)]
        return table(["", *(run for run, _ in runs)], rows, caption=caption)
    return table(["", *names], [[run, *values] for run, values in runs], caption=caption)


def definitions(pairs: Sequence[tuple[str, str]], *, kind: str = "facts") -> str:
    """Names and their values."""
    items = "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in pairs)
    return f'<dl class="{kind}">{items}</dl>'


def folded(summary: str, body: str) -> str:
    """Content to unfold."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figure(title: str, plot: str, *, data: str = "", keys: Sequence[Key] = ()) -> str:
    """A plot below its title, with a legend if it has keys, and its data to unfold."""
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3></figcaption>{plot}"
        f"{_legend(keys) if keys else ''}{folded('Data', data) if data else ''}</figure>"
    )


def _legend(keys: Sequence[Key]) -> str:
    items = []
    for key in keys:
        color = "any" if key.color is None else f"c{key.color % COLORS}"
        kind = f"swatch {color} dashed" if key.dashed else f"swatch {color}"
        items.append(f'<li><span class="{kind}"></span>{escape(key.name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def figures(found: Sequence[str]) -> str:
    """Figures side by side, as many as fit."""
    return f'<div class="figures">{"".join(found)}</div>' if found else ""


def series_table(title: str, x_title: str, series: Sequence[Series]) -> str:
    """The values of curves as a table of limited length."""
    values = [dict(one.points) for one in series]
    xs = sorted({x for points in values for x in points})
    chosen = [xs[index] for index in spaced(len(xs), _MOST_ROWS)]
    rows = [[short(x), *(short(points.get(x)) for points in values)] for x in chosen]
    some = f", {len(chosen)} of {len(xs)} rows" if len(chosen) < len(xs) else ""
    return table([x_title, *(one.name for one in series)], rows, caption=f"{title}{some}")
