"""One HTML page about training runs: settings, learning curves, staleness, errors, time and memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gnnautoscale._util import checked, write_atomically
from gnnautoscale.report.page import page
from gnnautoscale.report.reported_run import find_runs
from gnnautoscale.runs import as_run_wrote

__all__ = ["write_report"]


@checked()
def write_report(paths: Iterable[str | Path], output: str | Path) -> int:
    """Write one self-contained HTML page about some runs: it needs no network and no other files.

    Args:
        paths: Run folders, as ``fit(run_dir=...)`` and ``gas train`` write them, or folders that contain run folders.
        output: The file to write.

    Returns:
        The number of runs in the report.

    Example:
        >>> from tempfile import mkdtemp
        >>> from gnnautoscale.runs import RunFolder
        >>> folder = Path(mkdtemp())
        >>> with RunFolder.create(folder / "run", {"title": "my run"}) as run:
        ...     run.append({"kind": "epoch", "epoch": 1, "loss": 0.5, "scores": {}})
        >>> write_report([folder], folder / "report.html")
        1
        >>> "<h1>my run</h1>" in (folder / "report.html").read_text()
        True
    """
    given = [Path(path) for path in paths]
    with as_run_wrote(*given):
        runs = find_runs(given)
        text = page(runs)
    write_atomically(Path(output), lambda stream: stream.write(text.encode()), rule="the report must be writable")
    return len(runs)
