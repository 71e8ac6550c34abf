"""The benchmarks measure what they say, at toy size."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

from gnnautoscale.attach import autoscale
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench, figure
from gnnautoscale.experiments.bench import (
    BenchGraph,
    bench_infer,
    bench_io,
    bench_loop,
    bench_memory,
    bench_start,
    bench_step,
    make_data,
    make_loader,
    measuring,
    start_up,
    steps,
    time_epochs,
    with_computation,
)
from gnnautoscale.experiments.bench.measuring import if_it_fits
from gnnautoscale.experiments.bench.own_loop import make_model, own_step, plain_batches, run_epoch
from gnnautoscale.training.journal import describe_machine
from support.command import invoke

CPU = torch.device("cpu")
SMALL = BenchGraph(nodes=300, batch_nodes=20, batches=3, degree=4, halo_degree=2, features=8, classes=5)
TINY = BenchGraph(nodes=120, batch_nodes=20, batches=6, degree=4, halo_degree=2, features=8, classes=5)
SIZES = ["--device", "cpu", "--num-parts", "6", "--part-nodes", "20", "--width", "4", "--layers", "2", "--json"]
FLAGS = ["--device", "cpu", "--nodes", "300", "--batch-nodes", "20", "--batches", "3", "--degree", "4", "--width", "8"]


def call(*arguments: str) -> str:
    result = invoke(["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return str(result.stdout)


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
    monkeypatch.setattr(steps, "time_epochs", lambda *_, **__: {"step": next(times) / 1e3})
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
    options = ["--ratios", "0,2", "--layers", "2", "--epochs", "1"]
    text = call("step", *FLAGS, *options, "--output", str(file), "--plot", str(plot))
    lines = [line.split("\t") for line in text.splitlines()]
    assert lines[0][0] == "halo / batch"
    assert [line[0] for line in lines[1:]] == ["0", "2"]
    written = json.loads(file.read_text())
    assert [row["ratio"] for row in written["rows"]] == [0.0, 2.0]
    assert written["setup"]["layers"] == 2
    assert written["machine"] == describe_machine("cpu")
    assert "halo nodes per batch node" in plot.read_text()


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figure, "save_figure", lambda *_: False)
    monkeypatch.setattr(steps, "time_epochs", lambda *_, **__: {"step": 1.0})
    with pytest.raises(InputError, match="needs matplotlib"):
        call("step", *FLAGS, "--ratios", "0", "--epochs", "1", "--plot", str(tmp_path / "steps.svg"))


def test_every_medium_and_precision_is_timed(tmp_path: Path) -> None:
    printed = call("storage", str(tmp_path / "rows"), *FLAGS, "--layers", "2", "--epochs", "1", "--json")
    rows = {row["histories"]: row for row in json.loads(printed)["rows"]}
    assert list(rows) == list(bench.MEDIA)
    near = rows["host float32"]
    assert near["to host"] == 1.0
    # A history of 8 values for 300 nodes; a step moves the rows of 20 nodes of a batch and 20 of its halo.
    assert near["history"] == 300 * 8 * 4
    assert near["megabytes"] == pytest.approx(40 * 8 * 4 / 1e6)
    assert rows["disk bfloat16"]["history"] == near["history"] / 2
    assert rows["disk int8"]["history"] == 300 * 16  # 4 bytes of scale, 8 values, and room to 16
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert not list((tmp_path / "rows").glob("*.rows"))


def test_the_hidden_share_compares_with_no_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = dict.fromkeys(bench.MEDIA, 3.0) | {"device float32": 1.0, "host float32": 2.0, "host float32, serial": 5.0}
    left = iter(times.values())
    monkeypatch.setattr(steps, "time_epochs", lambda *_, **__: {"step": next(left) / 1e3})
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


def test_halos_of_few_nodes_are_distinct_and_anywhere() -> None:
    data = make_data(BenchGraph(nodes=4000, batch_nodes=50, batches=2, degree=1, halo_degree=1, features=1), 2.0)
    outside = [source[source // 50 != part] for part, source in enumerate(data.edge_index[0].chunk(2))]
    for halo in outside:
        assert halo.unique().numel() == halo.numel() == 100
        assert 1500 < halo.float().mean() < 2500


def test_plain_batches_hold_the_same_rows_and_edges() -> None:
    loader = make_loader(TINY, 1.0)
    for batch, plain in zip(loader, plain_batches(loader, CPU), strict=True):
        assert type(plain.edge_index) is torch.Tensor
        assert torch.equal(plain.edge_index, batch.edge_index.plain)
        assert torch.equal(plain.x, batch.x)
        assert plain.batch_size == 20


def test_the_plain_step_trains_on_the_own_nodes_of_a_batch() -> None:
    model = make_model(TINY, CPU, layers=2, width=4)
    batch = next(plain_batches(make_loader(TINY, 1.0), CPU))
    wanted = torch.nn.functional.cross_entropy(model(batch.x, batch.edge_index)[:20], batch.y[:20])
    step, _ = own_step(model)
    assert step(batch).item() == pytest.approx(wanted.item())
    assert step(batch).item() < wanted.item()
    assert run_epoch(step, [batch, batch, batch]) == 3


def test_own_loops_are_compared_with_plain_pyg() -> None:
    rows = bench_loop(TINY, 1.0, CPU, layers=2, width=4, together=2, epochs=1)
    assert [(row["batches"], row["loop"]) for row in rows] == [
        (batches, loop) for batches in ("fixed", "drawn") for loop in bench.LOOPS
    ]
    for row, base in zip(rows, [rows[0]] * 3 + [rows[3]] * 3, strict=True):
        assert row["to PyG"] == row["epoch"] / base["epoch"] > 0
        assert row["milliseconds"] == pytest.approx(1e3 * row["epoch"] / 6)  # as many batches of either kind
        assert row["how"] == ("uncaptured: CUDA graphs need a GPU" if "captured" in row["loop"] else "in Python")


def test_inference_equals_that_of_plain_pyg() -> None:
    exact, *plain = bench_infer(TINY, 1.0, CPU, layers=2, width=4, repeats=1)
    assert exact["difference"] is None
    assert len(plain) == 2
    assert all(row["difference"] < 1e-5 for row in plain)
    fastest = min(row["seconds"] for row in plain)
    assert [row["to PyG"] for row in (exact, *plain)] == [row["seconds"] / fastest for row in (exact, *plain)]


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_memory", lambda: 0)
    _, edges, matrix = bench_infer(TINY, 1.0, CPU, layers=2, width=4, repeats=1)
    assert edges["seconds"] is edges["difference"] is edges["to PyG"] is None
    assert matrix["to PyG"] == 1.0
    assert "does not fit" in call("infer", *SIZES[:-1])
    last = bench_memory(TINY, 1.0, CPU, layers=2, width=4)[-1]
    assert last["peak"] is None
    assert last["note"] == "does not fit"


def test_a_gpu_tries_whether_it_fits() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    gpu = torch.device("cuda")
    assert if_it_fits(fail, 0, gpu) is None
    assert if_it_fits(lambda: 3, 2**60, gpu) == 3


def test_phases_of_the_start_are_timed() -> None:
    rows = bench_start(TINY, 1.0, CPU, layers=2, width=4, partitioners=["metis"])
    assert [row["phase"] for row in rows] == ["partition, metis", "loader", "autoscale", "first step", "second step"]
    assert all(row["seconds"] > 0 for row in rows)
    assert all(row["to PyG"] == row["seconds"] / row["PyG seconds"] for row in rows[-2:])


def test_partitioners_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaminpar", None)
    monkeypatch.setattr(start_up, "ClusterData", lambda *_, **__: importlib.import_module("kaminpar"))
    metis, kaminpar = bench_start(TINY, 1.0, CPU, layers=2, width=4)[:2]
    assert metis["PyG seconds"] is None
    assert "kaminpar" in metis["note"]
    assert kaminpar["seconds"] is None
    assert "needs the package kaminpar" in kaminpar["note"]


def test_memory_is_compared_with_what_it_must_be() -> None:
    rows = {row["phase"]: row for row in bench_memory(TINY, 1.0, CPU, layers=3, width=4)}
    assert list(rows) == ["start", "data", "loader", "first epoch", "inference", "plain PyG, whole graph"]
    graph = 8 * make_data(TINY, 1.0).num_edges + 4 * 120 * 8
    assert rows["data"]["needed"] == rows["loader"]["needed"] == graph
    assert rows["first epoch"]["needed"] == graph + 2 * 4 * 120 * 4
    assert rows["inference"]["needed"] == graph + 2 * 4 * 120 * 4 + 4 * 120 * 5
    assert all(row["device peak"] is None for row in rows.values())
    if sys.platform == "linux":
        assert all(row["peak"] > 10**6 and row["resident"] > 10**6 for row in rows.values())


@pytest.mark.parametrize(
    ("command", "flags", "fields"),
    [
        ("loop", ["--together", "5", "--epochs", "1"], {"batches", "loop", "epoch", "first epoch", "milliseconds"}),
        ("infer", ["--repeats", "1"], {"way", "first", "seconds", "peak_memory", "to PyG", "difference"}),
        ("start", ["--partition", "none"], {"phase", "seconds", "PyG seconds", "to PyG", "note"}),
        ("memory", [], {"phase", "resident", "peak", "device peak", "needed", "note"}),
    ],
)
def test_what_users_run_is_printed_and_written(
    command: str, flags: list[str], fields: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "numbers.json"
    measure = getattr(bench, f"bench_{command}")
    measured: list[list[bench.Numbers]] = []

    def once(*arguments: Any, **options: Any) -> list[bench.Numbers]:
        """The same numbers as JSON and as a table."""
        if not measured:
            measured.append(measure(*arguments, **options))
        return measured[0]

    monkeypatch.setattr(bench, f"bench_{command}", once)
    found = json.loads(call(command, *SIZES, *flags, "--output", str(file)))
    assert found["setup"] == {**found["setup"], "nodes": 120, "width": 4, "layers": 2, "ratio": 2.0}
    assert all(fields <= row.keys() for row in found["rows"])
    assert json.loads(file.read_text()) == found
    heads, *lines = call(command, *SIZES[:-1], *flags).splitlines()
    assert [len(line.split("\t")) for line in lines] == [len(heads.split("\t"))] * len(found["rows"])


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
        (["loop", *SIZES, "--together", "3"], "a multiple of --together"),
        (["infer", *SIZES, "--repeats", "0"], "at least 1"),
        (["start", *SIZES, "--partition", "scotch"], "--partition must be"),
        (["memory", *SIZES, "--ratio", "9"], "for the largest halo"),
    ],
)
def test_odd_input_is_refused(flags: list[str], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        invoke(["bench", *flags], catch_exceptions=False)
