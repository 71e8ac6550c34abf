"""The page: all sections that have content, one style sheet, and nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from gnnautoscale.report.reported_run import ReportedRun
from gnnautoscale.report.staleness import error_section, gradient_section, lipschitz_section, staleness_section
from gnnautoscale.report.summary import comparison_section, numbers_section, runs_section
from gnnautoscale.report.svg import COLORS
from gnnautoscale.report.training import learning_section, memory_section, parts_section, time_section, transfer_section

_SECTIONS = (
    runs_section,
    numbers_section,
    comparison_section,
    learning_section,
    staleness_section,
    error_section,
    gradient_section,
    lipschitz_section,
    parts_section,
    time_section,
    transfer_section,
    memory_section,
)


def page(runs: Sequence[ReportedRun]) -> str:
    """The report as one HTML document."""
    sections = [section for make in _SECTIONS if (section := make(runs)) is not None]
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} training runs"
    links = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    # These styles make the boxes of the chooser work.
    hides = [f":root:has(#show-{run.tag}:not(:checked)) .{run.group} {{ visibility: hidden; }}\n" for run in runs]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}{"".join(hides) if len(runs) > 1 else ""}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
{_chooser(runs) if len(runs) > 1 else ""}
<main>
{"".join(section.html() for section in sections)}
</main>
<footer>Made by <code>gas report</code>. Hover over a plot to read its values, or unfold "Data" below it for a
table.</footer>
</body>
</html>
"""


def _chooser(runs: Sequence[ReportedRun]) -> str:
    """The legend of all runs, which stays in sight; its boxes hide the curves of runs."""
    items = "".join(
        f'<label><input type="checkbox" id="show-{run.tag}" checked><span class="swatch c{run.number % COLORS}"></span>'
        f"{escape(run.name)}</label>"
        for run in runs
    )
    return f'<fieldset class="runs"><legend>Runs in the plots</legend><div>{items}</div></fieldset>'
