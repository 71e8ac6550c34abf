"""The folder of a training run, written and read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gnnautoscale.errors import InputError
from gnnautoscale.runs.folder import RunFolder, free_folder, is_run_dir, read_run

RUN: dict[str, Any] = {
    "title": "a run",
    "options": {"lr": 0.1, "epochs": 3, "fan_out": (1, 2)},
    "data": {"nodes": 4},
    "model": {"name": "GCN"},
}


def written(path: Path, epochs: int = 3) -> Path:
    """The folder of a run of some epochs, with a probe after each."""
    with RunFolder.create(path, RUN) as folder:
        for epoch in range(1, epochs + 1):
            folder.append({"kind": "epoch", "epoch": epoch, "loss": 1 / epoch})
            folder.append({"kind": "staleness", "epoch": epoch, "layers": []})
        folder.finish({"steps": 12})
        folder.verified({"exact": False, "inference": math.inf})
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    read = read_run(written(tmp_path / "deep" / "run"))
    assert read.run["title"] == "a run"
    assert read.run["format"] == 1
    assert read.run["started"].endswith("+00:00")
    assert [epoch["loss"] for epoch in read.epochs] == [1.0, 0.5, 1 / 3]
    assert [probe["epoch"] for probe in read.staleness] == [1, 2, 3]
    assert read.gradients == read.lipschitz == []
    assert read.result is not None
    assert read.result["steps"] == 12
    assert "finished" in read.result
    assert read.verification == {"exact": False, "inference": None}


def test_records_can_be_read_while_the_run_trains(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RUN) as folder:
        folder.append({"kind": "epoch", "epoch": 1})
        read = read_run(folder.path)
    assert len(read.epochs) == 1
    assert read.result is None
    assert read.verification is None


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {**RUN, "x": math.nan}) as folder:
        folder.append({"kind": "gradients", "epoch": 1, "cosine": math.nan, "layers": [{"cosine": math.inf}]})
    read = read_run(folder.path)
    assert read.run["x"] is None
    assert read.gradients[0]["cosine"] is None
    assert read.gradients[0]["layers"] == [{"cosine": None}]


def test_unknown_kinds_of_records_are_left_out(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RUN) as folder:
        folder.append({"kind": "weather", "epoch": 1})
        folder.append({"epoch": 1})
    read = read_run(folder.path)
    assert not read.epochs
    assert not read.staleness


def test_a_truncated_last_line_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    text = (path / "metrics.jsonl").read_text()
    for rest in ('{"kind": "epo', "[1, 2", "17"):
        (path / "metrics.jsonl").write_text(text + rest)
        assert len(read_run(path).epochs) == 3


def test_a_defect_before_the_last_line_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    text = (path / "metrics.jsonl").read_text()
    for line in ("{", "[]", "3", ""):
        (path / "metrics.jsonl").write_text(f"{line}\n{text}")
        with pytest.raises(InputError, match=r"metrics\.jsonl .*\(line 1"):
            read_run(path)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("run.json", '"nodes": 4', '"nodes": 5'),
        ("result.json", '"steps": 12', '"steps": 13'),
        ("metrics.jsonl", '"loss": 0.5', '"loss": 0.4'),
        ("verification.json", "false", "true"),
    ],
)
def test_a_changed_number_is_noticed_and_no_other_line_is_lost(
    tmp_path: Path, name: str, before: str, after: str
) -> None:
    path = written(tmp_path / "run")
    text = (path / name).read_text()
    assert before in text
    (path / name).write_text(text.replace(before, after))
    with pytest.raises(InputError, match="other values than its checksum was made of"):
        read_run(path)
    RunFolder.reopen(path, RUN, [{"kind": "epoch", "epoch": epoch, "loss": 0.5} for epoch in (1, 2, 3)]).close()
    read = read_run(path)
    assert [epoch["loss"] for epoch in read.epochs] == [1.0, 0.5, 1 / 3]
    assert [probe["epoch"] for probe in read.staleness] == [1, 2, 3]


def test_lines_that_are_missing_from_a_finished_run_are_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text("\n".join(text.split("\n")[:4]) + "\n")
    with pytest.raises(InputError, match="4 lines instead of 6"):
        read_run(path)


def test_other_defects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.json"):
        read_run(tmp_path)
    path = written(tmp_path / "run")
    (path / "result.json").write_text("half of {")
    with pytest.raises(InputError, match=r"result\.json must hold JSON"):
        read_run(path)
    (path / "result.json").unlink()
    assert read_run(path).result is None
    (path / "run.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match="format 1, but got 99"):
        read_run(path)


def test_a_new_run_needs_an_empty_folder(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, RUN).close()  # there, but empty
    with pytest.raises(InputError, match="new or empty"):
        RunFolder.create(tmp_path, RUN)
    with pytest.raises(InputError, match="writable folder"):
        RunFolder.create(tmp_path / "run.json" / "below", RUN)


def test_a_free_folder_has_a_plain_name_and_a_number(tmp_path: Path) -> None:
    names = [free_folder(tmp_path, "cora gcn/full seed 0")]
    names[0].mkdir()
    names.append(free_folder(tmp_path, "cora gcn/full seed 0"))
    assert [path.name for path in names] == ["cora-gcn-full-seed-0", "cora-gcn-full-seed-0-2"]


EPOCHS = [{"kind": "epoch", "epoch": number, "loss": 1.0 / number} for number in (1, 2)]


def test_reopening_drops_later_epochs(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    started = read_run(path).run["started"]
    with RunFolder.reopen(path, RUN, EPOCHS) as folder:
        assert read_run(path).result is None
        assert read_run(path).verification is None
        folder.append({"kind": "epoch", "epoch": 3, "loss": 7.0})
    read = read_run(path)
    assert [epoch["loss"] for epoch in read.epochs] == [1.0, 0.5, 7.0]
    assert [probe["epoch"] for probe in read.staleness] == [1, 2]
    assert read.run["started"] == started


def test_only_the_same_run_reopens(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    with pytest.raises(InputError, match="other model"):
        RunFolder.reopen(path, {**RUN, "model": {"name": "GIN"}}, EPOCHS)
    longer = {**RUN, "options": {**RUN["options"], "epochs": 9}}
    with pytest.raises(InputError, match="other options"):
        RunFolder.reopen(path, longer, EPOCHS)
    RunFolder.reopen(path, longer, EPOCHS, free={"epochs"}).close()
    assert len(read_run(path).epochs) == 2


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "result.json", "verification.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "null", None])
def test_a_damaged_folder_reopens(tmp_path: Path, name: str, content: str | None) -> None:
    path = written(tmp_path / "run")
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_text(content)
    assert is_run_dir(path)
    RunFolder.reopen(path, RUN, EPOCHS).close()
    read = read_run(path)
    assert [epoch["loss"] for epoch in read.epochs] == [1.0, 0.5]
    assert read.run["title"] == RUN["title"]
    assert read.result is None


def test_other_folders_hold_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert not any(is_run_dir(path) for path in (tmp_path, tmp_path / "missing"))


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, RUN) as folder:
        folder.append({"kind": "epoch", "epoch": 1})
        with pytest.raises(InputError, match=r"one run at a time, but got .*run, which another run is using"):
            RunFolder.reopen(path, RUN, [])
        folder.append({"kind": "epoch", "epoch": 2})
    assert sorted(each.name for each in path.iterdir()) == ["metrics.jsonl", "run.json"]
    assert len(read_run(path).epochs) == 2
    (path / ".lock").touch()  # what a run that was killed leaves
    RunFolder.reopen(path, RUN, [{"epoch": 1}, {"epoch": 2}]).close()
    assert is_run_dir(path)


def test_a_run_goes_on_in_its_folder_on_any_number_of_ranks_but_with_its_own_data(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    for more in ({"ranks": 4}, {"ranks": 2}, {}):
        RunFolder.reopen(path, {**RUN, "data": {"nodes": 4, **more}}, [{"epoch": 1}]).close()
    with pytest.raises(InputError, match=r"own folder.* with other data"):
        RunFolder.reopen(path, {**RUN, "data": {"nodes": 5}}, [{"epoch": 1}])
