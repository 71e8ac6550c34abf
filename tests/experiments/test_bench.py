"""The benchmarks measure what they say, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCN  # type: ignore[import-untyped]
from typer.testing import CliRunner

from gnnautoscale.attach.autoscaler import autoscale
from gnnautoscale.cli import app
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench, figure
from gnnautoscale.experiments.bench import BenchGraph, bench_io, bench_step, make_loader, time_epochs, with_computation
from gnnautoscale.training.journal import describe_machine

CPU = torch.device("cpu")
SMALL = BenchGraph(nodes=300, batch_nodes=20, batches=3, degree=4, halo_degree=2, features=8, classes=5)
FLAGS = ["--device", "cpu", "--nodes", "300", "--batch-nodes", "20", "--batches", "3", "--degree", "4", "--width", "8"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
def test_every_batch_is_as_described(ratio: float) -> None:
    loader = make_loader(SMALL, ratio)
    halo = int(20 * ratio)
    for number, batch in zip(range(3), loader, strict=False):
        assert batch.n_id[:20].tolist() == list(range(20 * number, 20 * number + 20))
        assert batch.num_nodes == 20 + halo
        source, target = batch.edge_index
        inside = source < 20
        assert torch.equal(target[inside].bincount(minlength=20), torch.full((20,), 4))
        assert torch.equal(source[~inside].bincount(minlength=20 + halo)[20:], torch.full((halo,), 2))
    again = make_loader(SMALL, ratio)
    assert torch.equal(again.graph.edge_index, loader.graph.edge_index)


def test_epochs_are_timed() -> None:
    loader = make_loader(SMALL, 1.0)
    model = autoscale(GCN(8, 4, num_layers=2, out_channels=5), 300)
    row = time_epochs(model, loader, batches=3, epochs=2)
    assert row["step"] == row["epoch"] / 3 > 0
    assert row["how"] == "uncaptured: CUDA graphs need a GPU"
    assert row["peak_memory"] is None


def test_overheads_are_relative_to_histories_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.1, 1.05, 1.5, 4.0, 2.0, 2.4, 2.1, 5.0, 6.0])
    monkeypatch.setattr(bench, "time_epochs", lambda *_, **__: {"step": next(times) / 1e3})
    first, second = with_computation(bench_step(SMALL, ratio, CPU, layers=2) for ratio in (0.0, 2.0))
    assert first["computation"] == 0.0
    assert second["computation"] == pytest.approx(1.0)
    assert first["I/O"]["host fp32"] == pytest.approx(0.1)
    assert second["I/O"]["host fp32"] == pytest.approx(0.2)
    assert second["milliseconds"]["host fp32, eager"] == pytest.approx(6.0)


@pytest.mark.gpu
def test_transfers_are_measured() -> None:
    rows = bench_io(torch.device("cuda"), nodes=10_000, rows=1000)
    assert {(row["what"], row["dtype"]) for row in rows} == {
        (what, dtype) for what in ("pull", "push") for dtype in ("float32", "bfloat16")
    }
    assert all(row["share"] == row["GB/s"] / row["copy GB/s"] > 0 for row in rows)


def test_steps_are_printed_written_and_drawn(tmp_path: Path) -> None:
    file, plot = tmp_path / "steps.json", tmp_path / "steps.svg"
    text = call("step", *FLAGS, "--ratios", "0,2", "--epochs", "1", "--output", str(file), "--plot", str(plot))
    lines = [line.split("\t") for line in text.splitlines()]
    assert lines[0][0] == "halo / batch"
    assert [line[0] for line in lines[1:]] == ["0", "2"]
    written = json.loads(file.read_text())
    assert [row["ratio"] for row in written["rows"]] == [0.0, 2.0]
    assert written["setup"]["layers"] == 4
    assert written["machine"] == describe_machine("cpu")
    assert "halo nodes per batch node" in plot.read_text()


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figure, "save_figure", lambda *_: False)
    with pytest.raises(InputError, match="needs matplotlib"):
        call("step", *FLAGS, "--ratios", "0", "--epochs", "1", "--plot", str(tmp_path / "steps.svg"))


def test_every_medium_and_precision_is_timed(tmp_path: Path) -> None:
    printed = call("storage", str(tmp_path / "rows"), *FLAGS, "--layers", "3", "--epochs", "1", "--json")
    rows = {row["histories"]: row for row in json.loads(printed)["rows"]}
    assert list(rows) == list(bench.MEDIA)
    near = rows["host float32"]
    assert near["to host"] == 1.0
    # Two histories of 8 values for 300 nodes; a step moves the rows of 20 nodes of a batch and 20 of its halo.
    assert near["history"] == 2 * 300 * 8 * 4
    assert near["megabytes"] == pytest.approx(2 * 40 * 8 * 4 / 1e6)
    assert rows["disk bfloat16"]["history"] == near["history"] / 2
    assert rows["disk int8"]["history"] == 2 * 300 * 16  # 4 bytes of scale, 8 values, and room to 16
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert not list((tmp_path / "rows").glob("*.rows"))


def test_the_hidden_share_compares_with_no_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = dict.fromkeys(bench.MEDIA, 3.0) | {"device float32": 1.0, "host float32": 2.0, "host float32, serial": 5.0}
    left = iter(times.values())
    monkeypatch.setattr(bench, "time_epochs", lambda *_, **__: {"step": next(left) / 1e3})
    rows = {row["histories"]: row for row in bench.bench_storage(SMALL, 1.0, CPU, tmp_path)}
    assert rows["host float32"]["overlap"] == pytest.approx(0.75)
    assert rows["disk float32"]["overlap"] == pytest.approx(0.0)
    assert rows["disk int8"]["overlap"] is None
    assert rows["disk int8"]["to host"] == pytest.approx(1.5)


def test_epochs_are_printed_as_json() -> None:
    found = json.loads(
        call("epoch", "--device", "cpu", "--num-parts", "3", "--part-nodes", "50", "--width", "4", "--json")
    )
    assert found["setup"]["nodes"] == 150
    assert [row["batches"] for row in found["rows"]] == ["device", "host"]


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["step", *FLAGS, "--ratios", "one"], "separated by commas"),
        (["step", *FLAGS, "--ratios", "-1"], "ratios at least 0"),
        (["step", *FLAGS, "--layers", "0"], "at least 1"),
        (["step", *FLAGS, "--ratios", "20"], "for the largest halo"),
        (["step", *FLAGS, "--batches", "16"], "for all batches"),
        (["step", "--device", "nowhere"], "device"),
        (["io", "--device", "cpu"], "needs a GPU"),
    ],
)
def test_odd_input_is_refused(flags: list[str], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        CliRunner().invoke(app, ["bench", *flags], catch_exceptions=False)
