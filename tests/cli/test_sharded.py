"""``torchrun -m gnnautoscale train`` on shards that ``gas partition --ranks`` wrote: one table, one run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]
from typer.testing import CliRunner

import gnnautoscale as gas
from gnnautoscale.cli import app
from gnnautoscale.runs import read_run
from support.ranks import run_ranks

GRAPH = ["--data", "communities", "--nodes", "200", "--classes", "4", "--num-parts", "8"]


def test_shards_are_written_and_trained_on(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shown = CliRunner().invoke(app, ["partition", *GRAPH, "--ranks", "2", "--output", str(shards), "--json"])
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout.splitlines()[-1])
    assert facts["own nodes of a rank, most"] >= 100
    trained = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29623"),
            *("-m", "gnnautoscale", "train", "--data", str(shards), "--hidden", "8", "--layers", "2"),
            *("--batch-size", "2", "--epochs", "2", "--run-dir", str(tmp_path / "run"), "--json"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    (line,) = [line for line in trained.stdout.splitlines() if line.startswith("{")]
    (run,) = json.loads(line)["runs"]
    assert run["steps"] == 4
    record = read_run(tmp_path / "run")
    assert record.run["data"]["nodes"] == 200
    assert len(record.epochs) == 2
    assert trained.stderr.count("epoch 2/2") == 1, "one rank shows progress"


def test_shards_of_a_heterogeneous_graph_are_written_and_trained_on(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data, shards = HeteroData(), tmp_path / "shards"
    data["paper"].x, data["author"].num_nodes = torch.randn(60, 5, generator=generator), 20
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    data["author"].y = torch.zeros(20)
    for relation in (("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")):
        ends = [torch.randint(data[kind].num_nodes, (90,), generator=generator) for kind in relation[::2]]
        data[relation].edge_index = torch.stack(ends)
    torch.save(data, tmp_path / "graph.pt")
    given = ["--data", str(tmp_path / "graph.pt"), "--target", "paper", "--num-parts", "6", "--ranks", "1"]
    shown = CliRunner().invoke(app, ["partition", *given, "--output", str(shards), "--json"])
    assert shown.exit_code == 0, shown.output
    how = ["--hidden", "8", "--layers", "2", "--epochs", "1", "--batch-size", "2"]
    how += ["--json", "--quiet", "--run-dir", "none"]
    for name, source in (("rgcn", shards), ("hetero-sage", shards)):
        trained = CliRunner().invoke(app, ["train", "--data", str(source), "--model", name, *how])
        assert trained.exit_code == 0, trained.output
        (run,) = json.loads(trained.stdout.splitlines()[-1])["runs"]
        assert run["metric"] == "accuracy"
        assert run["steps"] == 3
        again = CliRunner().invoke(app, ["train", *given[:6], "--model", name, *how])
        assert run["epochs"][-1]["loss"] == json.loads(again.stdout.splitlines()[-1])["runs"][0]["epochs"][-1]["loss"]


def on_rank(arguments: list[str]) -> str:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exception is None, shown.exception
    return shown.stdout


@pytest.mark.parametrize(
    "data",
    [
        ["--data", "communities", "--nodes", "200", "--classes", "4", "--task", "link", "--width", "8"],
        ["--data", "echoes", "--graphs", "2", "--nodes", "400", "--width", "8"],
    ],
    ids=["links", "graphs"],
)
def test_links_and_graphs_train_on_ranks(data: list[str]) -> None:
    how = ["--hidden", "8", "--num-parts", "16", "--batch-size", "4", "--epochs", "1", "--run-dir", "none", "--json"]
    shown, other = run_ranks(2, on_rank, ["train", *data, *how])
    assert other == "", "one rank talks"
    (run,) = json.loads(shown.splitlines()[-1])["runs"]
    assert run["scores"].keys() == {"train", "val", "test"}
    assert run["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["partition", *GRAPH, "--ranks", "2"], "--ranks needs a folder"),
        (["partition", *GRAPH, "--bidirectional"], "belongs to --ranks"),
        (["train", "--data", "shards", "--model", "pna"], "built from the whole graph"),
        (["train", "--data", "shards", "--task", "link"], "have targets of nodes"),
        (["train", "--data", "shards", "--num-parts", "4"], "cut and prepared already"),
        (["train", "--data", "shards"], "has shards for 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "shards" in arguments:
        written = CliRunner().invoke(app, ["partition", *GRAPH, "--ranks", "2", "--output", "shards"])
        assert written.exit_code == 0, written.output
    found = CliRunner().invoke(app, [*arguments])
    assert isinstance(found.exception, gas.InputError)
    assert message in str(found.exception)
