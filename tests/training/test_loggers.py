"""Loggers get what the folder of a run gets; Weights & Biases and MLflow by stand-ins for their packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gnnautoscale as gas
from gnnautoscale.errors import InputError
from gnnautoscale.models import GCN
from gnnautoscale.runs import Epoch
from gnnautoscale.training import MLflow, WandB
from support.communities import CLASSES, FEATURES, community_graph

SMALL: dict[str, Any] = {"num_parts": 4, "epochs": 2, "device": "cpu", "progress": False}


def gcn() -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, CLASSES, hidden=8)


class Noted:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, about: Mapping[str, Any]) -> None:
        self.told.append(about["title"])

    def log(self, numbers: Mapping[str, float], epoch: int) -> None:
        self.told.append((epoch, dict(numbers)))

    def end(self, result: gas.FitResult | None) -> None:
        self.told.append(None if result is None else result.scores)


def test_a_logger_of_your_own_hears_everything() -> None:
    logger = Noted()
    result = gas.fit(gcn(), community_graph(), loggers=[logger], **SMALL)
    title, *epochs, scores = logger.told
    assert title == "data gcn gas seed 0"
    assert [epoch for epoch, _ in epochs] == [1, 2]
    assert [numbers["loss"] for _, numbers in epochs] == [epoch.loss for epoch in result.epochs]
    assert epochs[0][1]["scores/val"] == result.epochs[0].scores["val"]
    assert scores == result.scores


def test_a_failure_is_told() -> None:
    def fail(epoch: Epoch) -> None:
        raise ValueError

    logger = Noted()
    with pytest.raises(ValueError):  # noqa: PT011 - ours
        gas.fit(gcn(), community_graph(), loggers=[logger], callback=fail, **SMALL)
    assert logger.told[-1] is None


def test_a_logger_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    class Unreachable(Noted):
        def start(self, about: Mapping[str, Any]) -> None:
            raise ConnectionError("no such server")

    first = Noted()
    with pytest.raises(InputError, match="Unreachable must be able to start, but got no such server"):
        gas.fit(gcn(), community_graph(), loggers=[first, Unreachable()], run_dir=str(tmp_path / "run"), **SMALL)
    assert first.told == ["data gcn gas seed 0", None]
    assert not (tmp_path / "run").exists()


def test_a_logger_that_fails_later_ends_no_run() -> None:
    class Lost(Noted):
        def log(self, numbers: Mapping[str, float], epoch: int) -> None:
            raise ConnectionError("the server is gone")

    lost, kept = Lost(), Noted()
    with pytest.warns(UserWarning, match="Lost gets no more numbers, since it failed: the server is gone"):
        result = gas.fit(gcn(), community_graph(), loggers=[lost, kept], **SMALL)
    assert len(lost.told) == 1
    assert kept.told[-1] == result.scores


class Recorder(ModuleType):
    """Stands for a package: writes down every call of its functions, and returns itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str) -> Recorder:
        found = Recorder(name)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    return make


def test_weights_and_biases(stand_in: Any) -> None:
    package = stand_in("wandb")
    result = gas.fit(gcn(), community_graph(), loggers=[WandB(project="graphs")], **SMALL)
    (init, _, given), *logs, (finish, _, ended) = package.calls
    assert (init, given["project"], given["name"]) == ("init", "graphs", "data gcn gas seed 0")
    assert given["config"]["num_parts"] == 4
    assert [(name, kwargs["step"]) for name, _, kwargs in logs] == [("log", 1), ("log", 2)]
    assert logs[0][1][0]["loss"] == result.epochs[0].loss
    assert (finish, ended) == ("finish", {"exit_code": 0})
    assert package.summary["best/test"] == result.scores["test"]


def test_mlflow(stand_in: Any) -> None:
    package = stand_in("mlflow")
    result = gas.fit(gcn(), community_graph(), loggers=[MLflow("graphs")], **SMALL)
    names = [name for name, _, _ in package.calls]
    assert names == ["set_experiment", "start_run", "log_params", *["log_metrics"] * 3, "end_run"]
    assert package.calls[3][1][0]["loss"] == result.epochs[0].loss
    assert package.calls[-2][1][0]["best/val"] == result.scores["val"]
    assert package.calls[-1][1] == ("FINISHED",)


def test_what_is_no_logger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("wandb", [object()], None):
        with pytest.raises(InputError, match="loggers must be a list"):
            gas.fit(gcn(), community_graph(), loggers=wrong, **SMALL)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"needs the package wandb.*Run: pip install wandb"):
        WandB()


# Progress, summaries, and what is left behind ########################################################################


def test_progress_is_shown_and_can_be_turned_off(capfd: pytest.CaptureFixture[str]) -> None:
    gas.fit(gcn(), community_graph(), **{**SMALL, "progress": True})
    shown = capfd.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [line.split(" loss")[0] for line in lines] == [f"data gcn gas seed 0: epoch {n}/2" for n in (1, 2)]
    gas.fit(gcn(), community_graph(), **SMALL)
    assert capfd.readouterr() == ("", "")


def test_a_second_fit_goes_on_from_the_weights() -> None:
    model, data = gcn(), community_graph()
    first = gas.fit(model, data, **{**SMALL, "epochs": 20})
    again = gas.fit(model, data, **{**SMALL, "epochs": 1})
    assert again.epochs[0].loss < first.epochs[0].loss
    assert gas.infer(model, data).size(0) == data.num_nodes


def test_results_and_loaders_are_short_to_read() -> None:
    data = community_graph()
    result = gas.fit(gcn(), data, **SMALL)
    assert repr(result).startswith(f"FitResult(train accuracy {result.scores['train']:.2f}, ")
    assert "best epoch" in repr(result)
    assert "\n" not in repr(result)
    assert f"<tr><th>test accuracy</th><td>{result.scores['test']:.2f}</td></tr>" in result._repr_html_()
    loader = gas.HaloLoader(data, num_parts=4, batch_size=2, shuffle=True)
    size = f"nodes: {data.num_nodes}, edges: {data.num_edges:,}, parts: 4"
    assert repr(loader) == f"HaloLoader({size}, batches: 2 of 2 parts, shuffled, assembled: on cpu)"
    assert "<tr><th>parts</th><td>4</td></tr>" in loader._repr_html_()


def test_a_refused_run_leaves_no_empty_folders(tmp_path: Path) -> None:
    def interrupt(name: str) -> None:
        if name == "partition":
            raise KeyboardInterrupt

    folders: dict[str, Any] = {"run_dir": str(tmp_path / "runs" / "a"), "checkpoint_dir": str(tmp_path / "kept")}
    with pytest.raises(KeyboardInterrupt):
        gas.fit(gcn(), community_graph(), on_phase=interrupt, **folders, **SMALL)
    assert list(tmp_path.iterdir()) == []
