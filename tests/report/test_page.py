"""The HTML page about runs: when it shows what, and how a browser renders it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gnnautoscale.cli as cli
from gnnautoscale.errors import InputError
from gnnautoscale.report import reported_run, training, write_report
from gnnautoscale.runs.folder import RunFolder, read_run

HOSTILE = "<script>alert('x')</script> & \"quoted\""
ALWAYS = {"runs", "numbers"}
VOID = {"meta", "input", "br", "hr", "img", "link"}


# Runs as training writes them


def epoch(number: int, **more: Any) -> dict[str, Any]:
    scores = {"train": 60.0 + number, "val": 50.0 + number, "test": 49.0 + number}
    return {"kind": "epoch", "epoch": number, "loss": 1 / number, "scores": scores, "steps": 4 * number, **more}


def timed(number: int) -> dict[str, Any]:
    time = {"loader": 0.1, "pull": 0.1, "push": 0.2, "compute": 0.4}
    return epoch(number, seconds=1.0, time=time)


def moved(number: int) -> dict[str, Any]:
    return epoch(number, pulled_bytes=2**21, pushed_bytes=2**20, hit_ratio=1.0, age={"mean": 3.5, "max": 7})


def staleness(number: int, layers: int = 2) -> dict[str, Any]:
    """Errors of a first layer, which is exact, of others, and of the output."""
    found: list[dict[str, Any]] = [
        {
            "layer": f"convs.{at}",
            "staleness": {"mean": 0.2, "max": 0.5, "relative": 0.1 / number},
            "closeness": {"mean": 0.1 * at, "max": 0.3 * at, "relative": 0.05 * at},
            "history": {"mean": 0.2, "max": 0.5, "relative": 0.1},
            "by_age": [{"age": age, "rows": 5, "staleness": 0.1 * age} for age in (1, 2, 3)],
            "bound": 2.0 * at,
        }
        for at in range(layers)
    ]
    closeness = {"mean": 0.1, "max": 0.2, "relative": 0.05}
    found.append({"layer": "output", "staleness": None, "history": None, "closeness": closeness, "bound": 4.0})
    return {"kind": "staleness", "epoch": number, "step": 4 * number, "layers": found}


def gradients(number: int) -> dict[str, Any]:
    layers = [{"layer": "convs.0", "cosine": 0.9, "norm_ratio": 0.8, "relative_error": 0.2}]
    plain = {"cosine": 0.95, "norm_ratio": 0.85, "relative_error": 0.1, "layers": layers}
    return {"kind": "gradients", "epoch": number, **plain, "compensated": {**plain, "cosine": 0.987}}


def lipschitz(number: int) -> dict[str, Any]:
    layers = [{"layer": f"convs.{at}", "whole": None, "message": 1.5 + at, "update": 1.0} for at in range(2)]
    return {"kind": "lipschitz", "epoch": number, "layers": layers}


PARTS = {
    "count": 3,
    "sizes": [10, 10, 20],
    "groups": 3,
    "halo": [[0.0, 0.5, 0.1], [0.4, 0.0, 0.0], [0.2, 0.3, 0.0]],
    "batches": {
        "nodes": [10, 10, 20],
        "halo": [6, 4, 10],
        "edges_inside": [30, 30, 60],
        "edges_crossing": [10, 10, 20],
    },
}
RESULT = {
    "metric": "accuracy",
    "best_epoch": 3,
    "scores": {"train": 63.0, "val": 53.0, "test": 52.0},
    "steps": 12,
    "seconds": {"train": 3.0, "evaluate": 1.0},
    "peak_memory": 3 * 2**20,
    "history_bytes": 2**20,
    "connectivity": 0.5,
    "how": "one after the other",
    "storage": "in memory",
}


def written(
    path: Path,
    records: Sequence[dict[str, Any]] = (),
    *,
    title: str = "a run",
    parts: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """The folder of a run."""
    run = {
        "title": title,
        "options": {"mode": "gas", "lr": 0.01, "seed": 0, "run_dir": str(path), **options},
        "data": {"name": "cora", "nodes": 2708, "edges": 10556, "features": 1433, "classes": 7},
        "model": {"name": "GCN", "parameters": 23063},
        "versions": {"python": "3.11", "torch": "2.9"},
        "machine": "CPU",
        "parts": parts,
    }
    with RunFolder.create(path, run) as folder:
        for record in records:
            folder.append(record)
        if result is not None:
            folder.finish(result)
    return path


def everything(epochs: int = 3) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for number in range(1, epochs + 1):
        records.append({**moved(number), **timed(number), "memory": 2**20 * (2 + number % 2)})
        records += [staleness(number), gradients(number), lipschitz(number)]
    return records


def full(path: Path, **options: Any) -> Path:
    return written(path, everything(), parts=PARTS, result=RESULT, **options)


class Page(HTMLParser):
    """What a page has; refuses tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.tags: list[str] = []
        self.resources: list[str] = []
        self.plots: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.resources += [str(values[name]) for name in ("src", "href", "srcset", "action") if name in values]
        if tag == "section":
            self.sections.append(str(values["id"]))
        if tag == "svg":
            assert values["role"] == "img"
            self.plots.append(str(values["aria-label"]))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data


def source(tmp_path: Path, *folders: Path) -> str:
    write_report(folders, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def report(tmp_path: Path, *folders: Path) -> Page:
    return Page(source(tmp_path, *folders))


# The page


@pytest.mark.parametrize(
    ("records", "more", "expected"),
    [
        ([], {}, set()),
        ([{"kind": "epoch", "epoch": 1, "loss": None, "scores": {}}], {}, set()),
        ([timed(1), timed(2)], {}, {"learning", "time"}),
        ([moved(1)], {}, {"learning", "transfers"}),
        ([epoch(1, memory=2**20)], {}, {"learning", "memory"}),
        ([staleness(1)], {}, {"staleness", "errors"}),
        ([gradients(1)], {}, {"gradients"}),
        ([lipschitz(1)], {}, {"lipschitz"}),
        ([], {"parts": PARTS}, {"parts"}),
        ([], {"result": RESULT}, {"memory"}),
    ],
)
def test_a_section_is_there_if_its_data_is(
    tmp_path: Path, records: list[dict[str, Any]], more: dict[str, Any], expected: set[str]
) -> None:
    page = report(tmp_path, written(tmp_path / "run", records, **more))
    assert len(page.sections) == len(set(page.sections))
    assert set(page.sections) == ALWAYS | expected


def test_everything_about_one_run(tmp_path: Path) -> None:
    page = report(tmp_path, full(tmp_path / "run"))
    wanted = {"learning", "staleness", "errors", "gradients", "lipschitz", "parts", "time", "transfers", "memory"}
    assert set(page.sections) == ALWAYS | wanted
    assert page.tags.count("h1") == page.tags.count("main") == 1
    assert page.tags.count("h2") == len(page.sections)
    assert page.tags.count("figure") == page.tags.count("h3") == page.tags.count("svg") == len(page.plots)
    assert page.tags.count("details") >= len(page.plots), "every plot has its data as a table"
    assert all(page.plots)
    for text in ("52.00", "3 of 3", "3 MB", "1 MB", "2,708 nodes", "23,063 parameters", "one after the other"):
        assert text in page.text
    assert "script" not in page.tags


def test_gradients_of_plain_and_compensated_steps(tmp_path: Path) -> None:
    both = report(tmp_path, written(tmp_path / "both", [gradients(1)])).text
    assert "compensated" in both
    assert "0.987" in both
    before = {name: value for name, value in gradients(1).items() if name != "compensated"}
    assert "0.987" not in report(tmp_path, written(tmp_path / "plain", [before])).text


def test_a_verification_is_told_once(tmp_path: Path) -> None:
    folder = full(tmp_path / "run")
    assert "verification" not in report(tmp_path, folder).text
    (folder / "verification.json").write_text(json.dumps({"exact": False, "summary": f"NOT exact: {HOSTILE}"}))
    page = report(tmp_path, folder)
    assert page.text.count(f"NOT exact: {HOSTILE}") == 1
    told = page.text.index("NOT exact")
    assert page.text.index("versions") < told < page.text.index("Key numbers", page.text.index("versions"))


def test_several_runs_are_compared(tmp_path: Path) -> None:
    better = {**RESULT, "scores": {"train": 64.0, "val": 54.0, "test": 54.5}, "peak_memory": 6 * 2**20}
    folders = [
        full(tmp_path / "a"),
        written(tmp_path / "b", everything(), parts=PARTS, result=better, lr=0.1),
        full(tmp_path / "c", seed=1),
    ]
    page = report(tmp_path, *folders)
    assert "comparison" in page.sections
    assert "Who pulls from whom (A, B, C)" in page.text, "the same partition is drawn once"
    for text in ("+2.50", "× 2.00", "52.00 ± 0.00", "A, C"):  # noqa: RUF001
        assert text in page.text
    assert page.tags.count("input") == 3
    differences = page.text.split("Where the runs differ")[1].split("All settings")[0]
    assert "lr" in differences
    assert "run_dir" not in page.text


@pytest.mark.parametrize(("steps", "over"), [((10, 15), "epoch"), ((10, 16), "steps"), ((10, None), "epoch")])
def test_runs_are_compared_by_step_if_their_epochs_are_not_alike(
    tmp_path: Path, steps: tuple[int, int | None], over: str
) -> None:
    folders = [
        written(tmp_path / str(at), [{**epoch(n), "steps": per and per * n} for n in (1, 2, 3)])
        for at, per in enumerate(steps)
    ]
    text = source(tmp_path, *folders)
    assert f"Training loss by {over}, of 2 runs" in text
    assert f"Test score by {over}, of 2 runs" in text


def test_a_run_is_compared_with_one_that_has_no_histories(tmp_path: Path) -> None:
    whole = {"count": 1, "halo": [[0.0]], "batches": {"nodes": [40], "halo": [0]}}
    first = written(tmp_path / "a", [epoch(1)], parts=whole, result={**RESULT, "history_bytes": 0}, mode="full")
    page = report(tmp_path, first, full(tmp_path / "b"))
    compared = page.text.split("Settings and results that differ")[1]
    assert "none" in compared
    assert "1 MB" in compared
    assert "Who pulls from whom (B)" in page.text
    assert "Who pulls from whom (A)" not in page.text, "the whole graph pulls from nowhere"


def test_full_batch_is_the_yardstick_and_shows_only_what_it_used(tmp_path: Path) -> None:
    batches = written(tmp_path / "a", [epoch(1)], parts=PARTS, result=RESULT, mode="gas", num_parts=8, batch_size=2)
    whole = written(tmp_path / "b", [epoch(1)], result=RESULT, mode="full", num_parts=8, batch_size=4)
    page = report(tmp_path, batches, whole)
    assert "relative to B" in page.text
    differences = page.text.split("Where the runs differ")[1].split("All settings")[0]
    assert "num_parts" not in differences
    assert page.text.split("All settings")[1].split("Key numbers")[0].count("not used") >= 2


def test_runs_are_found_in_folders(tmp_path: Path) -> None:
    for name in ("b", "a"):
        full(tmp_path / "runs" / "deep" / name, title=f"run {name}")
    page = report(tmp_path, tmp_path / "runs", tmp_path / "runs" / "deep" / "a")
    assert "A · a" in page.text
    assert "B · b" in page.text
    assert "C ·" not in page.text


def test_an_unfinished_run_has_its_best_so_far(tmp_path: Path) -> None:
    page = report(tmp_path, written(tmp_path / "run", [epoch(2), epoch(1), epoch(3, scores={"val": None})]))
    assert "51.00" in page.text
    assert "2 of 3" in page.text
    assert "stopped early" in page.text


def test_missing_numbers_do_not_break_a_curve(tmp_path: Path) -> None:
    records = [epoch(1), epoch(2, loss=None), epoch(3, loss=math.nan, scores={}), epoch(4)]
    text = source(tmp_path, written(tmp_path / "run", records))
    loss = re.findall(r'aria-label="Training loss[^>]*>.*?points="([^"]*)"', text, re.DOTALL)[0]
    assert len(loss.split()) == 2
    assert "nan" not in re.sub(r"<style>.*</style>", "", text, flags=re.DOTALL).lower()


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = source(tmp_path, full(tmp_path / "a"), full(tmp_path / "b"))
    assert all(resource.startswith("#") for resource in Page(text).resources)
    assert not re.search(r"https?://|url\(|@import|<script|<link", text)


def test_text_of_users_is_escaped(tmp_path: Path) -> None:
    records = [{**staleness(1), "layers": [{**staleness(1)["layers"][1], "layer": HOSTILE}]}]
    folders = [written(tmp_path / name, [*records, *everything()], title=HOSTILE, cut=HOSTILE + name) for name in "ab"]
    run = json.loads((folders[0] / "run.json").read_text())
    del run["checksum"]
    run |= {"machine": HOSTILE, "versions": {HOSTILE: HOSTILE}, "model": {"name": HOSTILE}, "data": {"name": HOSTILE}}
    (folders[0] / "run.json").write_text(json.dumps(run))
    for chosen in (folders, folders[:1]):
        text = source(tmp_path, *chosen)
        page = Page(text)
        assert HOSTILE in page.text
        assert "script" not in page.tags
        assert "<script" not in text


def test_deep_models_are_drawn_in_part(tmp_path: Path) -> None:
    page = report(tmp_path, written(tmp_path / "run", [staleness(1, layers=64), staleness(2, layers=64)]))
    assert "6 of 64 layers" in page.text
    assert "convs.63" in page.text


def test_wrong_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, message in (("empty", "has no run.json"), ("file", "is not a folder"), ("missing", "is not a folder")):
        with pytest.raises(InputError, match=message):
            write_report([tmp_path / name], tmp_path / "report.html")
    monkeypatch.setattr("gnnautoscale.report.reported_run._MOST_FOLDERS", 2)
    (tmp_path / "empty" / "a" / "b").mkdir(parents=True)
    with pytest.raises(InputError, match="more than 2 folders"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    with pytest.raises(InputError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(InputError, match="writable"):
        write_report([full(tmp_path / "run")], tmp_path)


def test_the_command(tmp_path: Path) -> None:
    full(tmp_path / "runs" / "a")
    full(tmp_path / "runs" / "b")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "runs"), "-o", str(page)])
    assert result.exception is None
    assert result.stdout == ""
    assert "2 training runs" in Page(page.read_text(encoding="utf-8")).text


# Computed numbers


def test_time_of_a_step_leaves_out_the_first_epoch(tmp_path: Path) -> None:
    slow = {**timed(1), "seconds": 50.0, "time": {"compute": 50.0}}
    run = reported_run.ReportedRun(read_run(written(tmp_path / "run", [slow, timed(2), timed(3)])), 0, "run")
    expected = {"compute": 0.1, "pull": 0.025, "push": 0.05, "loader": 0.025, "other": 0.05}
    assert training.step_times(run) == pytest.approx(expected)
    assert run.epoch_seconds == 1.0


def test_runs_have_letters(tmp_path: Path) -> None:
    record = read_run(written(tmp_path / "run"))
    assert [reported_run.ReportedRun(record, number, "run").tag for number in (0, 25, 26, 52)] == ["A", "Z", "AA", "BA"]


def test_values_in_words() -> None:
    words = [reported_run.words(value) for value in (None, True, 0.0005, [10, 5], "metis")]
    assert words == ["-", "yes", "0.0005", "[10, 5]", "metis"]


def test_settings_that_differ() -> None:
    columns = [{"lr": "0.1", "seed": "0"}, {"lr": "0.1", "seed": "1", "new": "2"}]
    assert reported_run.differing(columns) == ["seed", "new"]


def test_low_scores_do_not_squeeze_the_others() -> None:
    assert training.score_floor([10.0, *range(70, 90)]) == 62.0
    assert training.score_floor([60.0, 70.0, 80.0]) is None


# In a browser

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
in_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

MEASURE = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const style = (choice) => getComputedStyle(page.querySelector(choice));
  const found = {};
  for (const open of [false, true]) {
    page.querySelectorAll("details").forEach((details) => { details.open = open; });
    found[open ? "opened" : "closed"] = page.documentElement.scrollWidth;
  }
  found.inner = document.querySelector("iframe").contentWindow.innerWidth;
  if (page.querySelector("polyline")) {
    found.ground = style("body").backgroundColor;
    found.line = style("polyline").stroke;
    found.text = style("h1").color;
    const heights = [...page.querySelectorAll("svg text")].map((text) => text.getBoundingClientRect().height);
    found.small = Math.min(...heights);
  }
  const box = page.querySelector("#show-A");
  if (box) {
    found.before = style("g.run-A").visibility;
    box.checked = false;
    found.after = style("g.run-A").visibility;
    found.other = style("g.run-B").visibility;
  }
  document.body.dataset.found = JSON.stringify(found);
});
"""


def browse(tmp_path: Path, text: str, width: int, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """Show a page in a frame of some width; gives what was measured there, and lines of the browser's console."""
    assert BROWSER is not None
    outer = tmp_path / "outer.html"
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(text)}"></iframe>'
    outer.write_text(f"<!DOCTYPE html><body>{frame}<script>{MEASURE}</script></body>", encoding="utf-8")
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    command = [BROWSER, *fixed, f"--user-data-dir={tmp_path / 'profile'}", *flags, "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    lines = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(found.replace("&quot;", '"')), lines


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report on several runs, one of them with a long title."""
    folder = tmp_path_factory.mktemp("runs")
    titles = {"a": "a run", "b": "a_run_with_a_title_that_has_no_place_to_break_it_anywhere_" * 2, "c": HOSTILE}
    for name, title in titles.items():
        full(folder / name, title=title, seed=ord(name))
    return source(folder, folder)


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_does_not_scroll_sideways(tmp_path: Path, compared: str, width: int) -> None:
    found, console = browse(tmp_path, compared, width)
    assert found["inner"] == width
    assert max(found["closed"], found["opened"]) <= width
    assert found["small"] >= 10, "text in plots is large enough to read"
    assert console == []


@pytest.mark.browser
@in_browser
def test_one_long_title_does_not_scroll_sideways(tmp_path: Path) -> None:
    found, console = browse(tmp_path, source(tmp_path, full(tmp_path / "run", title="long" * 60)), 360)
    assert max(found["closed"], found["opened"]) <= 360
    assert console == []


@pytest.mark.browser
@in_browser
def test_the_browser_tells_of_what_goes_wrong(tmp_path: Path) -> None:
    """The tests above could fail: a wide page is seen as such, and so is an error."""
    wide = '<div style="width: 900px">wide</div><script>undefinedFunction()</script>'
    found, console = browse(tmp_path, wide, 360)
    assert found["opened"] == 908
    assert "undefinedFunction" in "".join(console)


@pytest.mark.browser
@in_browser
def test_dark_mode_has_other_colours(tmp_path: Path, compared: str) -> None:
    light, _ = browse(tmp_path, compared, 800, "--blink-settings=preferredColorScheme=1")
    dark, _ = browse(tmp_path, compared, 800, "--blink-settings=preferredColorScheme=0")
    assert light["ground"] == "rgb(255, 255, 255)"
    assert dark["ground"] == "rgb(20, 23, 29)"
    assert light["line"] != dark["line"]
    assert light["text"] != dark["text"]


@pytest.mark.browser
@in_browser
def test_runs_can_be_hidden(tmp_path: Path, compared: str) -> None:
    found, _ = browse(tmp_path, compared, 800)
    assert (found["before"], found["after"], found["other"]) == ("visible", "hidden", "visible")


def test_runs_with_another_score_are_not_compared(tmp_path: Path) -> None:
    same = [full(tmp_path / name, mode=mode) for name, mode in (("a", "full"), ("b", "gas"))]
    other = written(tmp_path / "c", everything(), result={**RESULT, "metric": "ROC-AUC"})
    page = report(tmp_path, *same, other)
    assert page.text.split("Settings and results that differ")[1].count("+0.00") == 2  # test and validation of b
    assert "have their own numbers" in page.text
    assert "have their own numbers" not in report(tmp_path, *same).text
