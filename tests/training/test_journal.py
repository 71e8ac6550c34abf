"""What a training run writes down, and that this changes nothing about training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale.training.journal as journal_module
from conftest import history_rows
from gnnautoscale.analysis.diagnostics import DIAGNOSTICS
from gnnautoscale.attach.autoscaler import is_autoscaled
from gnnautoscale.data import generate
from gnnautoscale.errors import InputError
from gnnautoscale.models import GAT, GCN, build_model
from gnnautoscale.runs.findings import explain
from gnnautoscale.runs.folder import RunFolder, RunRecord, read_run
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training.journal import describe_parts

FEATURES, CLASSES = 6, 3


@pytest.fixture
def data() -> Data:
    """A graph with a halo around every part."""
    return generate.communities(48, degree=4.0, num_features=FEATURES, num_classes=CLASSES)


def fit(data: Data, run_dir: Path | None = None, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = model or GCN(FEATURES, CLASSES, hidden=8, layers=3)
    options = {"num_parts": 6, "epochs": 4, **options}
    return model, gas.fit(model, data, run_dir=None if run_dir is None else str(run_dir), **options)


def record(data: Data, run_dir: Path, **options: Any) -> RunRecord:
    fit(data, run_dir, **options)
    return read_run(run_dir)


# Nothing changes #####################################################################################################

SCENARIOS: dict[str, dict[str, Any]] = {
    "batches drawn anew by workers": {"batch_size": 2, "num_workers": 1},
    "host, few bits": {"storage": "host", "history_dtype": "int8"},
    "disk, refresh, seldom evaluated": {
        "storage": "disk",
        "refresh_every": "epoch",
        "evaluation": "histories",
        "evaluate_every": 2,
        "batch_size": 2,
    },
    "penalty, without kept batches": {"lipschitz": 0.1, "keep_batches": False},
    "edge dropout, refresh after steps": {"edge_dropout": 0.3, "refresh_every": 4},
    "full": {"mode": "full"},
    "history": {"mode": "history"},
    "cluster": {"mode": "cluster"},
    "sage": {"mode": "sage", "fan_out": [3, 3, 3]},
}
# On a GPU these are not the same from run to run: PyG adds up messages in whatever order threads come.
ROUNDED = ("edge dropout, refresh after steps", "cluster", "sage")


def final(data: Data, run_dir: Path | None, tmp_path: Path, model: nn.Module | None, **options: Any) -> list[Tensor]:
    """All that is left after training: weights, histories, losses and the random state."""
    if options.get("storage") == "disk":
        options["history_dir"] = str(tmp_path / f"histories-{run_dir is None}")
    model, result = fit(data, run_dir, model, **options)
    rows = list(history_rows(model).values()) if is_autoscaled(model) else []
    losses = torch.tensor([[epoch.loss, *epoch.scores.values()] for epoch in result.epochs if epoch.scores])
    return [*(value.clone() for value in model.state_dict().values()), *rows, losses, torch.get_rng_state()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_is_the_same_bit_for_bit(name: str, device: str, data: Data, tmp_path: Path) -> None:
    options = {"epochs": 2, **SCENARIOS[name], "device": device}
    if device == "cuda":
        options.pop("num_workers", None)  # a GPU assembles batches itself
    plain = final(data, None, tmp_path, None, **options)
    watched = final(data, tmp_path / "run", tmp_path, None, **options, diagnose=DIAGNOSTICS, diagnose_every=1)
    assert len(plain) == len(watched)
    if device == "cuda" and name in ROUNDED:
        torch.testing.assert_close(watched, plain, rtol=1e-3, atol=1e-4)
    else:
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    found = read_run(tmp_path / "run")
    assert len(found.epochs) == 2
    for epoch in found.epochs:
        assert sum(epoch["time"].values()) == pytest.approx(epoch["seconds"])


def test_a_layer_that_draws_is_compared_with_the_same_numbers_after_a_look(data: Data, tmp_path: Path) -> None:
    """The penalty repeats dropout inside of layers, whatever was found out about them in evaluation mode."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return GAT(FEATURES, CLASSES, hidden=4, dropout=0.5)

    options = {"lipschitz": 0.1, "epochs": 2, "num_parts": 3}
    plain = final(data, None, tmp_path, model(), **options)
    watched = final(data, tmp_path / "run", tmp_path, model(), **options, diagnose=DIAGNOSTICS, diagnose_every=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_a_run_goes_on_in_its_folder_bit_for_bit(data: Data, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_parts": 3, "epochs": 3, "diagnose": DIAGNOSTICS, "diagnose_every": 1}
    expected, _ = fit(data, tmp_path / "whole", **options)
    for every in ("epoch", 4):
        (tmp_path / str(every)).mkdir()
        options["checkpoint_every"] = every
        check_goes_on(data, expected, read_run(tmp_path / "whole"), tmp_path / str(every), **options)


def check_goes_on(data: Data, expected: nn.Module, whole: RunRecord, folder: Path, **options: Any) -> None:
    kept, run = folder / "kept", folder / "run"

    def stop(epoch: Any) -> None:
        if epoch.number == 2:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(data, run, checkpoint_dir=str(kept), callback=stop, **options)
    assert [epoch["epoch"] for epoch in read_run(run).epochs] == [1, 2]
    assert read_run(run).result is None
    model, _ = fit(data, run, checkpoint_dir=str(kept), resume=str(kept), **options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    read = read_run(run)
    assert read.result is not None
    assert [epoch["epoch"] for epoch in read.epochs] == [1, 2, 3]
    assert [probe["epoch"] for probe in read.staleness] == [1, 2, 3]
    for name in ("loss", "hit_ratio", "age", "pulled_bytes", "pushed_bytes", "steps"):
        assert [epoch[name] for epoch in read.epochs] == [epoch[name] for epoch in whole.epochs], name
    assert [probe["layers"] for probe in read.staleness] == [probe["layers"] for probe in whole.staleness]
    assert [probe["cosine"] for probe in read.gradients] == [probe["cosine"] for probe in whole.gradients]


def test_a_run_without_a_folder_goes_on_with_one(data: Data, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    _, first = fit(data, epochs=2, checkpoint_dir=kept)
    fit(data, tmp_path / "run", epochs=3, checkpoint_dir=kept, resume=kept)
    read = read_run(tmp_path / "run")
    assert [epoch["loss"] for epoch in read.epochs][:2] == [epoch.loss for epoch in first.epochs]
    assert read.epochs[2]["hit_ratio"] == 1.0


def test_another_run_s_folder_is_refused(data: Data, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    fit(data, epochs=2, checkpoint_dir=kept)
    fit(data, tmp_path / "run", epochs=2, lr=0.5)
    with pytest.raises(InputError, match=r"own folder.* with other options"):
        fit(data, tmp_path / "run", checkpoint_dir=kept, resume=kept)


def test_a_folder_that_holds_something_is_refused_before_training(data: Data, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="run_dir must be a new or empty folder"):
        fit(data, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# What is written #####################################################################################################


def test_what_a_run_is(data: Data, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = build_model("gcn", data, CLASSES, hidden=8, layers=3)
    fit(data, tmp_path, model, batch_size=2)
    run = read_run(tmp_path).run
    assert run["title"] == "data gcn gas seed 0"
    assert run["options"]["hidden"] == 8
    assert run["options"]["batch_size"] == 2
    assert run["data"] == {
        "name": "data",
        "nodes": 48,
        "edges": data.num_edges,
        "features": FEATURES,
        "classes": CLASSES,
        "multi-label": False,
        "train nodes in split": 24,
        "val nodes in split": 12,
        "test nodes in split": 12,
    }
    assert run["model"] == {"name": "GCN", "parameters": sum(weight.numel() for weight in model.parameters())}
    assert run["versions"].keys() == {"python", "torch", "torch-geometric", "gnnautoscale"}
    assert run["machine"].startswith("CPU (")
    assert run["parts"]["count"] == 6
    assert sum(run["parts"]["sizes"]) == 48


def test_what_an_epoch_takes_and_moves(data: Data, tmp_path: Path) -> None:
    read = record(data, tmp_path, evaluate_every=2)
    assert read.run["parts"] is not None
    halo = sum(read.run["parts"]["batches"]["halo"])
    row_bytes = 2 * 8 * 4  # two histories of 8 values
    first, *_, last = read.epochs
    for epoch in read.epochs:
        assert epoch["pulled_bytes"] == halo * row_bytes
        assert epoch["pushed_bytes"] == 48 * row_bytes
        assert epoch["time"].keys() == {"loader", "pull", "push", "compute"}
        assert sum(epoch["time"].values()) == pytest.approx(epoch["seconds"])
        assert min(epoch["time"].values()) > 0
        assert epoch["memory"] is None or epoch["memory"] >= 0
    assert 0.0 < first["hit_ratio"] < 1.0
    assert last["hit_ratio"] == 1.0
    assert 1.0 <= last["age"]["mean"] <= last["age"]["max"] <= 11
    assert [epoch["steps"] for epoch in read.epochs] == [6, 12, 18, 24]
    assert [bool(epoch["scores"]) for epoch in read.epochs] == [False, True, False, True]


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_bytes_are_those_of_the_rows_that_are_kept(storage: str, data: Data, tmp_path: Path) -> None:
    folder = str(tmp_path / "histories") if storage == "disk" else None
    read = record(data, tmp_path / "run", storage=storage, history_dir=folder, history_dtype="bfloat16")
    assert read.epochs[-1]["pushed_bytes"] == 48 * 2 * 8 * 2
    assert read.epochs[-1]["time"].keys() == {"loader", "pull", "push", "compute"}


def test_rows_are_young_after_a_refresh(data: Data, tmp_path: Path) -> None:
    read = record(data, tmp_path, refresh_every=1)
    assert [epoch["age"] for epoch in read.epochs[1:]] == [{"mean": 1.0, "max": 1}] * 3


@pytest.mark.parametrize("options", [{"mode": "full"}, {"mode": "cluster"}, {"mode": "sage", "fan_out": [3, 3, 3]}])
def test_without_a_halo_there_is_less_to_tell(options: dict[str, Any], data: Data, tmp_path: Path) -> None:
    read = record(data, tmp_path, **options)
    assert read.staleness == []
    assert len(read.epochs) == 4
    for epoch in read.epochs:
        assert not {"hit_ratio", "age", "pulled_bytes", "pushed_bytes"} & epoch.keys()
        assert epoch["time"].keys() == {"loader", "compute"}
    assert read.result is not None


def test_what_a_run_gave(data: Data, tmp_path: Path) -> None:
    _, result = fit(data, tmp_path)
    read = read_run(tmp_path)
    assert read.result is not None
    assert "epochs" not in read.result
    assert read.result["scores"] == result.scores
    assert read.result["seconds"]["diagnose"] > 0
    assert [epoch["loss"] for epoch in read.epochs] == [epoch.loss for epoch in result.epochs]


# Verification ########################################################################################################


@pytest.mark.parametrize("name", ["host, few bits", "edge dropout, refresh after steps", "full"])
def test_verified_runs_end_bit_for_bit_as_others(name: str, data: Data, tmp_path: Path) -> None:
    options = {"epochs": 2, **SCENARIOS[name]}
    plain = final(data, None, tmp_path, None, **options)
    verified = final(data, tmp_path / "run", tmp_path, None, **options, verify=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, verified, strict=True))
    found, result = read_run(tmp_path / "run").verification, read_run(tmp_path / "run").result
    assert found is not None
    assert found["exact"]
    assert found["nodes"] == 48
    assert found["precision"] == ("int8" if "few bits" in name else "float32")
    assert found["summary"].startswith("exact: 48 nodes recomputed on the whole graph")
    assert result is not None
    assert result["seconds"]["verify"] > 0
    assert "verification" not in result


def test_the_trained_model_is_verified(data: Data) -> None:
    model, result = fit(data, verify=True)
    assert result.verification == gas.verify(model, gas.HaloLoader(data, 6))
    assert result.to_dict()["verification"]["exact"] is True
    assert fit(data)[1].verification is None


def test_a_deviation_is_kept(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Centred(GCN):
        """Goes wrong in a way that nothing about it shows."""

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
            out = super().forward(x, edge_index, edge_weight)
            return out - out.mean(0) if "CENTRING" in os.environ else out

    model = Centred(FEATURES, CLASSES, hidden=8, layers=3)
    _, result = fit(
        data,
        tmp_path / "run",
        model,
        epochs=1,
        callback=lambda _: monkeypatch.setenv("CENTRING", "1"),
        verify=True,
    )
    found = read_run(tmp_path / "run")
    assert found.verification is not None
    assert not found.verification["exact"]
    assert found.verification["inference"] == result.verification.inference > 0.01
    assert [finding.name for finding in explain(found)][:1] == ["not exact"]


def test_a_verification_that_fails_does_not_lose_the_run(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert read_run(tmp_path / "run").result is not None, "the result is safe before anything else can happen"
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(journal_module, "verify", fail)
    with pytest.warns(UserWarning, match=r"could not be verified: CUDA out of memory"):
        _, result = fit(data, tmp_path / "run", verify=True)
    assert result.verification is None
    assert read_run(tmp_path / "run").verification is None
    assert read_run(tmp_path / "run").result is not None


@pytest.mark.parametrize("mode", ["cluster", "sage"])
def test_modes_without_histories_have_nothing_to_verify(mode: str, data: Data) -> None:
    with pytest.raises(InputError, match="verify must be False"):
        fit(data, mode=mode, verify=True)


def test_lines_are_written_as_epochs_end(data: Data, tmp_path: Path) -> None:
    counts = []

    def look(epoch: Any) -> None:
        counts.append(len(read_run(tmp_path).epochs))

    fit(data, tmp_path, callback=look)
    assert counts == [1, 2, 3, 4]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


# When errors are measured ############################################################################################


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5]), ("2", [2, 4, 5]), (9, [5]), ("never", [])])
def test_errors_are_measured_when_asked(every: Any, expected: list[int], data: Data, tmp_path: Path) -> None:
    read = record(data, tmp_path, epochs=5, diagnose_every=every)
    assert [probe["epoch"] for probe in read.staleness] == expected
    assert [probe["step"] for probe in read.staleness] == [6 * epoch for epoch in expected]


def test_by_default_they_are_measured_while_that_is_cheap(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes a second, and so does the training of an epoch."""
    found: dict[str, Any] = {"staleness": {"seconds": 1.0, "layers": []}}
    monkeypatch.setattr(journal_module, "diagnose", lambda *args, **kwargs: found)
    writer = journal_module.Journal(
        RunFolder.create(tmp_path, {}),
        _Way(),  # type: ignore[arg-type]
        nn.Linear(1, 1),
        gas.HaloLoader(data, 4),
        NodeClassification(CLASSES),
        measured=True,
        what=["staleness"],
        every="auto",
    )
    monkeypatch.setattr(writer, "_fits", lambda: True)
    probed = []
    with writer:
        for epoch in range(1, 401):
            if writer.is_due(epoch, last=epoch == 400, trained=float(epoch)):
                writer.probe(epoch)
                probed.append(epoch)
    assert probed == [1, 100, 150, 200, 250, 300, 350, 400]
    assert not writer.is_due(400, last=True, trained=400.0)


class _Way:
    steps, flow = 7, None


def test_rows_that_do_not_fit_are_not_compared_unless_asked(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "available_memory", lambda: 1000)
    assert record(data, tmp_path / "auto").staleness == []
    assert len(record(data, tmp_path / "asked", diagnose_every=4).staleness) == 1


def test_the_last_epoch_is_looked_at_when_training_stops_early(data: Data, tmp_path: Path) -> None:
    _, result = fit(data, tmp_path, epochs=50, patience=3, lr=1e-9, diagnose_every=40)
    read = read_run(tmp_path)
    assert len(result.epochs) < 50
    assert [probe["epoch"] for probe in read.staleness] == [len(result.epochs)]


def test_a_refresh_comes_after_the_look(data: Data, tmp_path: Path) -> None:
    read = record(data, tmp_path, refresh_every="epoch", diagnose_every=4)
    assert read.staleness[0]["layers"][0]["staleness"]["mean"] > 1e-3


def test_ages_of_rows_are_told_with_their_staleness(data: Data, tmp_path: Path) -> None:
    read = record(data, tmp_path, diagnose_every=4)
    groups = read.staleness[0]["layers"][0]["by_age"]
    assert [group["age"] for group in groups] == [1, 2, 3, 4, 5, 6]
    pulled = sum(group["rows"] for group in groups)
    mean = sum(group["rows"] * group["staleness"] for group in groups) / pulled
    assert mean == pytest.approx(read.staleness[0]["layers"][0]["staleness"]["mean"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diagnose": ["all"]}, "diagnose must be some of"),
        ({"diagnose_every": "epoch"}, "diagnose_every must be one of auto, never, or an integer of at least 1"),
        ({"diagnose_every": 0}, "diagnose_every must be"),
        ({"tensorboard": True}, "tensorboard needs a run_dir"),
    ],
)
def test_impossible_wishes_are_refused(options: dict[str, Any], message: str, data: Data) -> None:
    with pytest.raises(InputError, match=message):
        fit(data, **options)


# Parts ###############################################################################################################


def test_many_parts_are_told_in_groups() -> None:
    nodes = torch.arange(2400)
    ring = torch.stack([nodes, (nodes + 1) % 2400])
    parts = describe_parts(ring, nodes // 4)  # 600 parts of 4, each pulls one node of the one before
    assert parts["count"] == 600
    assert parts["groups"] == len(parts["halo"]) == len(parts["halo"][0]) == 48
    assert len(parts["sizes"]) == 600
    assert len(parts["batches"]["nodes"]) == 512
    assert set(parts["batches"]["halo"]) == {1}
    matrix = torch.tensor(parts["halo"], dtype=torch.double)
    torch.testing.assert_close(matrix.sum(dim=1), torch.full((48,), 0.25, dtype=torch.double))
    assert int((matrix > 0).sum()) == 96  # from the group itself and the one before it


def test_a_node_is_pulled_once_by_each_part() -> None:
    edges = torch.tensor([[0, 0, 0, 1], [1, 2, 3, 0]])
    parts = describe_parts(edges, torch.tensor([0, 1, 1, 2]))
    assert parts["batches"]["halo"] == [1, 1, 1]
    assert parts["batches"]["edges_crossing"] == [1, 2, 1]
    assert parts["halo"] == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_a_measurement_that_fails_does_not_end_training(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(journal_module, "diagnose", fail)
    with pytest.warns(UserWarning, match="not measured any more.*CUDA out of memory"):
        found = record(data, tmp_path / "run", diagnose_every=1)
    assert (calls, len(found.epochs), found.staleness) == (1, 4, [])
    assert found.result is not None
