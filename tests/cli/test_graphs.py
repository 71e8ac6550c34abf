"""Graph-level prediction on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnautoscale.errors import InputError
from support.command import invoke

FAST = ["--model", "gin", "--epochs", "2", "--num-parts", "4", "--batch-size", "2"]
TASK = ["--width", "8", "--readout", "mean", "--head", "mlp"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Any:
    return invoke(list(arguments))


def answer(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = call(*arguments)
    assert isinstance(result.exception, InputError), (result.exception, result.output)
    return str(result.exception)


def archive() -> str:
    """Thirty paths of 3 to 7 nodes, in the current folder."""
    sizes = 3 + np.arange(30) % 5
    first = np.concatenate([[0], np.cumsum(sizes)])
    nodes = np.setdiff1d(np.arange(first[-1]), first[1:] - 1)  # all but the last of each
    tags, edges = np.arange(first[-1]) % 3, np.stack([nodes, nodes + 1])
    np.savez("paths.npz", ptr=first, node_tag=tags, edge_index=edges, y=np.arange(30) % 2)
    return "paths.npz"


def test_a_file_of_graphs_is_trained_saved_and_predicted() -> None:
    data = ["--data", archive(), "--undirected", *TASK]
    (run,) = answer("train", *data, *FAST, "--task", "graph", "--save", "model.pt")["runs"]
    assert (run["metric"], set(run["scores"])) == ("accuracy", {"train", "val", "test"})
    facts = answer("infer", "model.pt", *data, "--output", "out.npz")
    assert facts["accuracy test"] == pytest.approx(run["scores"]["test"])
    out = np.load("out.npz")
    assert (out["probabilities"].shape, out["classes"].shape) == ((3, 2), (3,))
    assert "was trained with --head mlp" in refused("infer", "model.pt", *data, "--head", "linear")


@pytest.mark.parametrize("flags", [["--mode", "cluster"], ["--mode", "exact"], ["--stale-dropout", "0.5"]])
def test_modes_and_options(flags: list[str]) -> None:
    (run,) = answer("train", "--data", "echoes", "--graphs", "2", "--nodes", "400", *TASK, *FAST, *flags)["runs"]
    assert len(run["epochs"]) == 2


def test_graphs_are_described() -> None:
    facts = answer("data", "--data", archive())
    assert [facts[f"{split} graphs"] for split in ("train", "val", "test")] == [24, 3, 3]


def test_flags_of_other_tasks_are_refused() -> None:
    file = archive()
    assert "--decoder belong to --task link" in refused("train", "--data", file, *FAST, "--decoder", "dot")
    nodes = ["--data", "communities", "--nodes", "60", "--degree", "4", "--features", "5", "--classes", "3"]
    assert "--readout belong to --task graph" in refused("train", *nodes, *FAST, "--readout", "sum")
    assert "graphs with a target each" in refused("train", *nodes, *FAST, "--task", "graph")
    assert "sage" in refused("train", "--data", file, *FAST, "--mode", "sage", "--fan-out", "2,2,2,2")
