"""Runs that are interrupted go on as if nothing had happened, bit for bit; what is not the same run is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale.training.strategies as strategies_module
from conftest import history_rows
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.inference import infer_from_histories
from gnnautoscale.data import generate
from gnnautoscale.models import GCN, build_model
from gnnautoscale.runs.folder import read_run
from gnnautoscale.runs.result import Epoch, FitResult
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training.checkpoint import latest_checkpoint, load_latest, save_checkpoint
from gnnautoscale.training.identity import difference, identity_of
from gnnautoscale.training.resume import stop_requests
from support.communities import CLASSES, FEATURES, community_graph, multilabel_graph, same_bits, weights_of


class StopError(Exception):
    """Ends a run."""


class Trained:
    """A run: its model, its result, and what its histories hold at the end."""

    def __init__(self, name: str = "gcn", data: Data | gas.Dataset | None = None, **options: Any) -> None:
        data = community_graph() if data is None else data
        torch.manual_seed(1)
        graph = data.train if isinstance(data, gas.Dataset) else data
        classes = data.num_classes if isinstance(data, gas.Dataset) else CLASSES if data.y.dim() == 1 else 4
        given = options.pop("model_options", {})
        self.model = build_model(name, graph, classes, **{"hidden": 8, "layers": 3, "dropout": 0.3, **given})
        self.result = gas.fit(self.model, data, **{"num_parts": 5, "batch_size": 2, "epochs": 3, **options})
        self.weights = weights_of(self.model)
        attached(self.model).memory.settle()
        self.rows = history_rows(self.model)


@cache
def uninterrupted() -> Trained:
    """A run with all options left out."""
    return Trained()


def plain(result: FitResult) -> dict[str, Any]:
    """What does not depend on the time that it took, nor on how it was started."""
    values = result.to_dict()
    for name in ("seconds", "options", "peak_memory", "storage"):
        del values[name]
    for epoch in values["epochs"]:
        del epoch["seconds"]
    return values


def assert_same_run(first: Trained, second: Trained) -> None:
    assert plain(first.result) == plain(second.result)
    assert_same_tensors(first, second)


def assert_same_tensors(first: Trained, second: Trained) -> None:
    assert same_bits(first.weights, second.weights)
    assert first.rows.keys() == second.rows.keys()
    assert all(torch.equal(first.rows[slot], second.rows[slot]) for slot in first.rows)


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is removed."""
    monkeypatch.setattr(strategies_module, "save_checkpoint", partial(save_checkpoint, keep=10**6))


def steps_of(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("checkpoint-")) for path in sorted(folder.iterdir())]


def file_of(folder: Path, step: int) -> str:
    return str(folder / f"checkpoint-{step:09d}.pt")


# Bit for bit #########################################################################################################

# What is trained, how often it is saved, and from where it goes on: an epoch has three batches.
SCENARIOS: dict[str, tuple[dict[str, Any], Any, list[int]]] = {
    "after every epoch": ({}, "epoch", [3]),
    "drawings": ({"drawings": 2, "num_parts": 6, "epochs": 4}, 1, [10]),
    "plateau": ({"schedule": "plateau", "lr": 1e-7, "epochs": 13, "mode": "full"}, 1, [12]),
    "cosine, short epochs": (
        {"schedule": "cosine", "steps_per_epoch": 2, "batch_size": 1, "refresh_every": "epoch"},
        1,
        [3],
    ),
    "patience, naive": ({"patience": 2, "lr": 1e-7, "epochs": 9, "mode": "history"}, 4, [8]),
    "several labels": (
        {"data": multilabel_graph(), "edge_dropout": 0.3, "evaluate_every": 2, "evaluate_parts": 2},
        5,
        [5],
    ),
    "penalty, batch norm, few bits": (
        {"lipschitz": 0.1, "grad_norm": 0.5, "weight_decay_conv": 0.1, "precision": "bfloat16", "storage": "host"}
        | {"model_options": {"batch_norm": True}, "history_dtype": "int8", "epochs": 2},
        2,
        [4],
    ),
    "exact": ({"mode": "exact", "storage": "host", "lipschitz": 0.1}, 1, [2]),
    "exact at last": ({"epochs": 3, "exact_epochs": 2}, 1, [3, 4]),
    "accumulated": ({"accumulate": 2, "batch_size": 1, "refresh_every": 3, "epochs": 2}, 1, [4]),
    "compensated, accumulated": (
        {"compensate": "gradient", "storage": "host", "name": "gin", "accumulate": 2, "edge_dropout": 0.2},
        1,
        [3],
    ),
    "oldest refreshed": ({"refresh": 2, "batch_size": 1, "model_options": {"batch_norm": True}, "epochs": 2}, 1, [4]),
    "oldest refreshed, compensated": ({"refresh": 1, "compensate": "gradient", "storage": "host"}, 1, [4]),
    "momentum, inner": (
        {"compensate": "momentum", "name": "appnp", "evaluation": "histories", "history_dtype": "bfloat16"},
        2,
        [4],
    ),
    "other graphs": ({"data": gas.load("cluster", graphs=2), "num_parts": 6, "epochs": 2, "num_workers": 1}, 2, [2]),
}


@pytest.mark.usefixtures("keep_all")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, scenario: str) -> None:
    options, every, steps = SCENARIOS[scenario]
    whole = Trained(checkpoint_dir=str(tmp_path), checkpoint_every=every, **options)
    found = steps_of(tmp_path)
    assert set(steps) < set(found)
    for step in steps:
        assert_same_run(whole, Trained(resume=file_of(tmp_path, step), **options))
    if scenario == "plateau":
        assert len({epoch.learning_rate for epoch in whole.result.epochs}) == 2
    if scenario == "patience, naive":
        assert (len(whole.result.epochs), found) == (3, [4, 8, 9])


@pytest.mark.gpu
@pytest.mark.usefixtures("keep_all")
@pytest.mark.parametrize("storage", ["device", "host", "disk"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_run_on_a_gpu_goes_on_bit_for_bit(tmp_path: Path, storage: str, capture: bool) -> None:
    options: dict[str, Any] = {"storage": storage, "batch_size": 1, "epochs": 4, "device": "cuda", "capture": capture}
    if storage == "disk":
        options["history_dir"] = str(tmp_path / "histories")
    whole = Trained(checkpoint_dir=str(tmp_path / "kept"), checkpoint_every=1, **options)
    assert capture == whole.result.how.startswith("captured")
    gas.detach(whole.model)
    for step in (5, 12):
        again = Trained(resume=file_of(tmp_path / "kept", step), **options)
        gas.detach(again.model)
        assert [epoch.loss for epoch in again.result.epochs] == [epoch.loss for epoch in whole.result.epochs]
        assert_same_tensors(whole, again)


@pytest.mark.usefixtures("keep_all")
def test_a_run_goes_on_from_every_step_and_checkpoints_change_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_parts": 3, "batch_size": 1, "epochs": 2, "refresh_every": 2}
    whole = Trained(checkpoint_dir=str(tmp_path), checkpoint_every=1, **options)
    assert_same_run(whole, Trained(**options))
    assert steps_of(tmp_path) == list(range(1, 7))
    for step in range(1, 6):
        assert_same_run(whole, Trained(resume=file_of(tmp_path, step), **options))


@pytest.mark.parametrize(
    ("first", "second"), [("disk", "disk"), ("device", "auto"), ("disk", "host"), ("auto", "disk")]
)
def test_histories_may_move_when_a_run_goes_on(tmp_path: Path, first: str, second: str) -> None:
    options: dict[str, Any] = {"history_dir": str(tmp_path / "rows"), "checkpoint_dir": str(tmp_path / "saved")}

    def stop(epoch: Epoch) -> None:
        if epoch.number == 2:
            raise StopError

    with pytest.raises(StopError) as caught:
        Trained(storage=first, checkpoint_every=2, callback=stop, **options)
    assert steps_of(tmp_path / "saved") == [4, 6]
    # While the traceback still holds on to the run that failed.
    resumed = Trained(storage=second, checkpoint_every=4, resume=file_of(tmp_path / "saved", 4), **options)
    assert caught.value is not None
    assert attached(resumed.model).memory.medium == ("device" if second == "auto" else second)
    assert_same_run(resumed, uninterrupted())
    assert steps_of(tmp_path / "saved") == [8, 9]


def test_a_run_that_fails_again_and_again_comes_to_its_end(tmp_path: Path) -> None:
    chance, expected = random.Random(4), Trained(epochs=6)
    folder = tmp_path / "saved"
    stops = 0
    while True:
        stop_at = chance.randint(1, 4)

        def stop(epoch: Epoch, stop_at: int = stop_at, before: int = stops) -> None:
            if epoch.number >= before % 6 + stop_at:
                raise StopError

        resume = {"resume": str(folder)} if folder.exists() and steps_of(folder) else {}
        try:
            last = Trained(epochs=6, checkpoint_dir=str(folder), checkpoint_every=2, callback=stop, **resume)
            break
        except StopError:
            stops += 1
    assert stops > 2
    assert_same_run(expected, last)


def test_all_kinds_of_random_numbers_go_on(tmp_path: Path) -> None:
    """A model may draw them from anywhere, and ``fit`` does not seed all of them."""

    class Noisy(GCN):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
            if self.training:
                x = x * (1 + random.random() + float(np.random.rand())) + torch.rand(())  # noqa: NPY002
            return super().forward(x, edge_index, edge_weight)

    def train(**options: Any) -> list[float]:
        torch.manual_seed(1)
        model = Noisy(FEATURES, CLASSES, hidden=8)
        return [epoch.loss for epoch in gas.fit(model, community_graph(), num_parts=4, epochs=4, **options).epochs]

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    losses = train(checkpoint_dir=str(tmp_path), checkpoint_every=3)
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert train() != losses
    assert train(resume=file_of(tmp_path, 15)) == losses


# Runs that have ended ################################################################################################


@pytest.mark.parametrize(
    "options",
    [{}, {"patience": 1, "lr": 1e-7}, {"storage": "disk", "refresh_every": "epoch", "num_parts": 1, "batch_size": 1}],
    ids=["epochs", "patience", "refreshed"],
)
def test_a_run_that_has_ended_gives_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 2, **options}
    first = Trained(history_dir=str(tmp_path / "first"), **options)
    found = steps_of(tmp_path / "saved")
    monkeypatch.setattr(NodeClassification, "evaluate", None)  # nothing is to be done

    def never(epoch: Epoch) -> None:
        raise AssertionError

    options["callback"] = never
    again = Trained(resume=str(tmp_path / "saved"), history_dir=str(tmp_path / "again"), **options)
    assert_same_run(first, again)
    assert steps_of(tmp_path / "saved") == found
    # Histories are read in the order they were written in, whoever reads them first.
    data = community_graph()
    for loader in (gas.HaloLoader(data, 3, partition="random"), gas.HaloLoader(data, 5)):
        expected, got = (infer_from_histories(run.model, loader) for run in (first, again))
        assert torch.equal(expected, got)


def test_more_epochs_go_on_where_fewer_ended(tmp_path: Path) -> None:
    Trained(epochs=2, checkpoint_dir=str(tmp_path))
    assert_same_run(Trained(epochs=4), Trained(epochs=4, resume=str(tmp_path), checkpoint_dir=str(tmp_path)))
    assert steps_of(tmp_path) == [9, 12]


def test_fewer_epochs_than_are_done_do_nothing(tmp_path: Path) -> None:
    whole = Trained(epochs=3, checkpoint_dir=str(tmp_path))
    assert_same_run(whole, Trained(epochs=1, resume=str(tmp_path)))


@pytest.mark.usefixtures("keep_all")
@pytest.mark.parametrize("refresh_every", ["never", "epoch"])
def test_a_run_without_epochs_left_is_evaluated_if_it_never_was(tmp_path: Path, refresh_every: str) -> None:
    options: dict[str, Any] = {"evaluate_every": 4, "refresh_every": refresh_every}
    Trained(epochs=4, checkpoint_dir=str(tmp_path), **options)
    after_two = file_of(tmp_path, 6)
    assert_same_run(Trained(epochs=2, **options), Trained(epochs=2, resume=after_two, **options))
    fewer = Trained(epochs=1, resume=after_two, **options).result
    assert (len(fewer.epochs), fewer.best_epoch) == (2, 2)
    assert fewer.scores == fewer.epochs[1].scores != {}


def test_times_add_up(tmp_path: Path) -> None:
    first = Trained(epochs=2, checkpoint_dir=str(tmp_path)).result
    second = Trained(epochs=3, checkpoint_dir=str(tmp_path), resume=str(tmp_path)).result
    assert first.epochs == second.epochs[:2]
    assert set(second.seconds) == {"partition", "train", "evaluate", "checkpoint"}
    assert all(second.seconds[name] > first.seconds[name] for name in ("train", "evaluate"))


# Refusals ############################################################################################################


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of two epochs."""
    folder = tmp_path_factory.mktemp("saved")
    torch.set_num_threads(1)
    Trained(epochs=2, checkpoint_dir=str(folder))
    return folder


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", 0.02, "lr was 0.01 and is 0.02"),
        ("seed", 1, "seed was 0 and is 1"),
        ("num_parts", 6, "num_parts was 5 and is 6"),
        ("mode", "history", "mode was 'gas' and is 'history'"),
        ("partition", "random", "partition was 'metis' and is 'random'"),
        ("schedule", "plateau", "schedule was 'constant' and is 'plateau'"),
        ("history_dtype", "int8", "history_dtype was 'same' and is 'int8'"),
        ("refresh_every", 2, "refresh_every was 'never' and is 2"),
        ("edge_dropout", 0.1, "edge_dropout was 0.0 and is 0.1"),
        ("precision", "bfloat16", "precision was 'float32' and is 'bfloat16'"),
        ("steps_per_epoch", 2, "steps_per_epoch was None and is 2"),
    ],
)
def test_another_option_is_refused(saved: Path, option: str, value: Any, message: str) -> None:
    expected = f"{file_of(saved, 6)} must be of the same run, but got another option: {message}. Give the options"
    with pytest.raises(gas.InputError, match=f"^{expected}"):
        Trained(epochs=2, resume=str(saved), **{option: value})


def test_what_only_makes_a_run_faster_or_longer_may_change(saved: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "epochs": 3, "patience": 7, "storage": "disk", "history_dir": str(tmp_path / "rows"), "batches_on": "host",
        "capture": False, "cache_dir": str(tmp_path / "cache"), "checkpoint_dir": str(tmp_path / "saved"),
        "checkpoint_every": 2, "num_workers": 1,
    }  # fmt: skip
    assert_same_run(uninterrupted(), Trained(resume=str(saved), **options))


def test_another_number_of_epochs_is_refused_where_it_changes_the_schedule(tmp_path: Path) -> None:
    Trained(epochs=2, schedule="cosine", checkpoint_dir=str(tmp_path))
    with pytest.raises(gas.InputError, match="another option: epochs was 2 and is 3"):
        Trained(epochs=3, schedule="cosine", resume=str(tmp_path))


def changed(name: str, change: Callable[[Tensor], Any]) -> Data:
    data = community_graph()
    data[name] = change(data[name])
    return data


def without_one(mask: Tensor) -> Tensor:
    fewer = mask.clone()
    fewer[int(mask.nonzero()[0])] = False
    return fewer


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (generate.communities(49, degree=4.0, num_features=6, num_classes=3), "it had 48 nodes and has 49"),
        (changed("edge_index", lambda edges: edges[:, 2:]), "its edges, features, labels or masks differ"),
        (changed("x", lambda x: x + 1e-3), "its edges, features, labels or masks differ"),
        (changed("y", lambda y: (y + 1) % 3), "its edges, features, labels or masks differ"),
        (changed("train_mask", without_one), "its edges, features, labels or masks differ"),
        (changed("val_mask", without_one), "its edges, features, labels or masks differ"),
    ],
    ids=["nodes", "edges", "features", "labels", "training nodes", "validation nodes"],
)
def test_another_graph_is_refused(saved: Path, data: Data, message: str) -> None:
    expected = f"{file_of(saved, 6)} must be of the same run, but got another graph: {message}. Use the data"
    with pytest.raises(gas.InputError, match=f"^{expected}"):
        Trained(data=data, epochs=2, resume=str(saved))


def test_a_model_of_another_type_is_refused(saved: Path) -> None:
    model = GCN(FEATURES, CLASSES, hidden=8, layers=3, dropout=0.3).double()
    with pytest.raises(gas.InputError, match=r"another weights: convs.0.bias was '\[8\] torch.float32' and is"):
        gas.fit(model, community_graph(), num_parts=5, batch_size=2, epochs=2, resume=str(saved))
    assert not hasattr(model, "_autoscaler")


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_checkpoint_is_refused_and_a_good_one_named(tmp_path: Path, damage: str) -> None:
    Trained(epochs=2, checkpoint_dir=str(tmp_path))
    newest, good = Path(file_of(tmp_path, 6)), file_of(tmp_path, 3)
    content = newest.read_bytes()
    other = content.replace(b"batches", b"batchet", 1)
    assert other != content
    newest.write_bytes({"cut": content[:-100], "changed": other, "emptied": b""}[damage])
    expected = f"newest checkpoint must be whole, but got {newest} .*The newest good one is {good}: resume from that"
    with pytest.raises(gas.InputError, match=expected):
        Trained(epochs=2, resume=str(tmp_path))
    with pytest.raises(gas.InputError, match=f"must be a whole file.*{newest}"):
        Trained(epochs=2, resume=str(newest))
    # A run that begins anew does not overwrite it either.
    with pytest.raises(gas.InputError, match=f"without checkpoints.*{newest.name}"):
        Trained(epochs=2, checkpoint_dir=str(tmp_path))
    if damage == "cut":
        assert_same_run(uninterrupted(), Trained(checkpoint_dir=str(tmp_path), resume=good))
        assert_same_run(uninterrupted(), Trained(resume=str(tmp_path)))


def test_what_is_no_checkpoint_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gas.InputError, match="it does not exist"):
        Trained(resume=str(tmp_path / "checkpoint-000000003.pt"))
    save_checkpoint(tmp_path, 3, {"something": "else"})
    with pytest.raises(gas.InputError, match=r"checkpoint of a run, but got .*checkpoint-000000003"):
        Trained(resume=str(tmp_path))


def test_a_new_run_needs_a_fresh_folder(saved: Path, tmp_path: Path) -> None:
    before = steps_of(saved)
    expected = f"new run needs a folder without checkpoints, but got {saved}, which has checkpoint-000000006"
    with pytest.raises(gas.InputError, match=expected):
        Trained(epochs=2, checkpoint_dir=str(saved))
    # So does a run that goes on from somewhere else.
    save_checkpoint(tmp_path, 99, {})
    with pytest.raises(gas.InputError, match=f"got {tmp_path}, which has checkpoint-000000099"):
        Trained(epochs=2, checkpoint_dir=str(tmp_path), resume=str(saved))
    assert steps_of(saved) == before
    assert steps_of(tmp_path) == [99]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path, monkeypatch: Any) -> None:
    def never(epoch: Epoch) -> None:
        raise AssertionError

    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(gas.InputError, match=f"must be writable, but got {path}"):
            Trained(checkpoint_dir=str(path), callback=never)


def test_the_first_start_has_the_command_of_all_others(tmp_path: Path) -> None:
    same = {"checkpoint_dir": str(tmp_path / "a"), "resume": str(tmp_path / "a"), "run_dir": str(tmp_path / "run")}

    def stop(epoch: Epoch) -> None:
        raise StopError

    for _ in range(2):  # killed before the first checkpoint, the second time with a folder of the run there
        with (
            pytest.warns(UserWarning, match="no checkpoint yet, so training starts anew"),
            pytest.raises(StopError),
        ):
            Trained(callback=stop, **same)
    with pytest.warns(UserWarning, match="starts anew"):
        first = Trained(epochs=2, **same)
    (tmp_path / "run" / "run.json").write_text("{")
    (tmp_path / "run" / "result.json").write_bytes(b"\xff")
    assert_same_run(uninterrupted(), Trained(**same))
    assert len(first.result.epochs) == 2
    assert len(read_run(tmp_path / "run").epochs) == 3
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(gas.InputError, match="run_dir must be a new or empty folder"):
        Trained(**{**same, "run_dir": str(tmp_path / "foreign")})


def test_a_folder_of_checkpoints_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    refused: list[str] = []

    def start_another(epoch: Epoch) -> None:
        for options in ({}, {"resume": str(tmp_path)}):
            with pytest.raises(gas.InputError, match="one run at a time") as caught:
                Trained(checkpoint_dir=str(tmp_path), **options)
            refused.append(str(caught.value))

    Trained(checkpoint_dir=str(tmp_path), callback=start_another)
    assert len(refused) == 6
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}  # the lock is gone


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(gas.InputError, match="does not exist"):
        Trained(checkpoint_dir=str(tmp_path / "new"), resume=str(tmp_path / "checkpoint-000000003.pt"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model_options": {"dropout": 0.4}}, "another model: dropout was 0.3 and is 0.4"),
        ({"model_options": {"residual": True}}, "another model: residual was False and is True"),
        ({"model_options": {"drop_input": False}}, "another model: drop_input was True and is False"),
        ({"model_options": {"hidden": 9}}, "another model: hidden was 8 and is 9"),
        ({"model_options": {"batch_norm": True}}, "another model: batch_norm was False and is True"),
        ({"name": "gin"}, "another model: its class was 'GCN' and is 'GIN'"),
        ({"data": gas.Dataset.of(community_graph())}, None),
    ],
)
def test_how_the_model_was_built_must_be_the_same(saved: Path, change: dict[str, Any], what: str | None) -> None:
    if what is None:
        assert_same_run(uninterrupted(), Trained(resume=str(saved), **change))
        return
    with pytest.raises(gas.InputError, match=f"must be of the same run, but got {what}"):
        Trained(resume=str(saved), **change)


def test_graphs_for_validation_and_tests_must_be_the_same(tmp_path: Path) -> None:
    def made(far: float) -> gas.Dataset:
        other = community_graph()
        other.x = other.x + far
        return gas.Dataset("graphs", community_graph(), other, other)

    Trained(data=made(0.0), epochs=1, checkpoint_dir=str(tmp_path))
    with pytest.raises(gas.InputError, match="another graph: its edges, features"):
        Trained(data=made(1.0), resume=str(tmp_path))


def test_options_of_the_data_are_named(tmp_path: Path) -> None:
    def made(**options: Any) -> gas.Dataset:
        return replace(gas.Dataset.of(community_graph()), made_from=options)

    Trained(data=made(undirected=True), epochs=1, checkpoint_dir=str(tmp_path))
    for other, words in (
        ({"undirected": False}, "is False"),
        ({}, "is None"),
        ({"split": 1}, "split was None and is 1"),
    ):
        with pytest.raises(gas.InputError, match=f"got another data: .*{words}"):
            Trained(data=made(**other), resume=str(tmp_path))


def test_a_plain_module_is_described_by_its_numbers_and_functions() -> None:
    from torch_geometric.nn import APPNP, GCN2Conv, SAGEConv  # type: ignore[import-untyped]

    def identity(**options: Any) -> dict[str, Any]:
        model = torch.nn.ModuleList(
            [
                GCN2Conv(4, alpha=options.get("alpha", 0.1), theta=options.get("theta", 0.5), layer=1),
                SAGEConv(4, 4, aggr=options.get("aggr", "mean")),
                APPNP(K=options.get("K", 3), alpha=0.1),
            ]
        )
        return identity_of(model, NodeClassification(3), gas.Dataset.of(community_graph()))

    assert difference(identity(), identity()) is None
    for option, value in {"alpha": 0.2, "theta": 1.0, "aggr": "max", "K": 4}.items():
        assert difference(identity(), identity(**{option: value})) is not None


class Own(torch.nn.Module):
    """A module whose settings are of many kinds."""

    def __init__(self, settings: Any, *, fixed: bool = False, shown: float = 1.0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2).requires_grad_(not fixed)
        self._settings = settings
        self.register_buffer("shown", torch.tensor(shown), persistent=False)


def test_what_is_the_users_own_is_described_to_the_last_setting() -> None:
    def identity(model: torch.nn.Module) -> dict[str, Any]:
        return identity_of(model, NodeClassification(3), gas.Dataset.of(community_graph()))

    before = identity(Own({"p": 0.5, "device": "cpu"}))
    assert difference(before, identity(Own(SimpleNamespace(p=0.5, device="cuda")))) is None
    for other, words in (
        (Own({"p": 0.4}), "model: _settings was {'p': 0.5} and is {'p': 0.4}"),
        (Own({"p": 0.5}, fixed=True), "model: linear.weight.requires_grad was True and is False"),
        (Own({"p": 0.5}, shown=2.0), "model: shown was 1.0 and is 2.0"),
        (Own(torch.arange(3)), "model: _settings was {'p': 0.5} and is '[3] "),
        (Own(partial(max, 1)), "model: _settings was {'p': 0.5} and is ['max', 1, {}]"),
    ):
        assert words in (difference(before, identity(other)) or "")


# Ctrl-C ##############################################################################################################


class Keyboard:
    """How often models press Ctrl-C, in training or evaluation. As attributes of theirs, copies would press it too."""

    presses = 0
    in_training = True


KEYBOARD = Keyboard()


class Interrupted(GCN):
    """Presses Ctrl-C in its steps, once told to."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(FEATURES, CLASSES, hidden=8, layers=3, dropout=0.3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        if self.training == KEYBOARD.in_training:
            while KEYBOARD.presses:
                KEYBOARD.presses -= 1
                signal.raise_signal(signal.SIGINT)
        return super().forward(x, edge_index, edge_weight)


OPTIONS: dict[str, Any] = {"num_parts": 5, "batch_size": 2, "epochs": 3}


@pytest.fixture(autouse=True)
def _handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C does what it does in a terminal, and does so after a test as before."""
    monkeypatch.setattr(KEYBOARD, "presses", 0)
    monkeypatch.setattr(KEYBOARD, "in_training", True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("where", "every", "step"),
    [("step", "epoch", 4), ("step", 1, 4), ("evaluation", "epoch", 6), ("callback", 2, 3)],
)
def test_ctrl_c_ends_training_with_a_checkpoint(tmp_path: Path, where: str, every: Any, step: int) -> None:
    model = Interrupted()
    KEYBOARD.in_training = where == "step"

    def press(epoch: Epoch) -> None:
        if epoch.number == 1 and where == "callback":
            signal.raise_signal(signal.SIGINT)
        elif epoch.number == 1:
            KEYBOARD.presses = 1

    kept: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_every": every, **OPTIONS}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        gas.fit(model, community_graph(), callback=press, **kept)
    assert signal.getsignal(signal.SIGINT) is before
    assert not hasattr(model, "_autoscaler")
    # The step, or the epoch, that was running is done.
    assert max(steps_of(tmp_path)) == step
    resumed = Interrupted()
    got = gas.fit(resumed, community_graph(), resume=str(tmp_path), **kept)
    assert plain(got) == plain(uninterrupted().result)
    assert same_bits(uninterrupted().weights, weights_of(resumed))


def test_a_second_ctrl_c_ends_training_at_once(tmp_path: Path) -> None:
    model = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        gas.fit(
            model, community_graph(), checkpoint_dir=str(tmp_path),
            callback=lambda _: setattr(KEYBOARD, "presses", 2), **OPTIONS,
        )  # fmt: skip
    assert steps_of(tmp_path) == [3]


def test_without_checkpoints_ctrl_c_does_what_it_always_does() -> None:
    model, before = Interrupted(), signal.getsignal(signal.SIGINT)
    heard: list[int] = []

    def press(epoch: Epoch) -> None:
        assert signal.getsignal(signal.SIGINT) is before
        heard.append(epoch.number)
        KEYBOARD.presses = 1

    with pytest.raises(KeyboardInterrupt):
        gas.fit(model, community_graph(), callback=press, **OPTIONS)
    assert heard == [1]
    assert not hasattr(model, "_autoscaler")


def test_the_handler_comes_back_after_every_kind_of_end(tmp_path: Path) -> None:
    def stop(epoch: Epoch) -> None:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        raise StopError

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(StopError):
        Trained(checkpoint_dir=str(tmp_path / "first"), callback=stop)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    Trained(checkpoint_dir=str(tmp_path / "second"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_one_s_own_hears_the_second_ctrl_c() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        with stop_requests(True) as stop:
            assert not stop.is_set()
            signal.raise_signal(signal.SIGINT)
            assert stop.is_set()
            assert heard == []
            signal.raise_signal(signal.SIGINT)
            assert heard == [1]
        with stop_requests(False) as stop:
            signal.raise_signal(signal.SIGINT)
            assert heard == [1, 1]
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_who_ignores_ctrl_c_goes_on_ignoring_it(tmp_path: Path) -> None:
    heard: list[int] = []

    def press(epoch: Epoch) -> None:
        signal.raise_signal(signal.SIGINT)
        heard.append(epoch.number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Trained(checkpoint_dir=str(tmp_path), callback=press)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [1, 2, 3]


def test_a_run_in_another_thread_has_checkpoints_too(tmp_path: Path) -> None:
    results: list[Trained] = []
    thread = threading.Thread(target=lambda: results.append(Trained(checkpoint_dir=str(tmp_path))))
    thread.start()
    thread.join()
    assert_same_run(results[0], uninterrupted())
    assert latest_checkpoint(tmp_path) is not None


# kill -9 #############################################################################################################

SCRIPT = """
import gc, json, os, random, signal, sys, time
from pathlib import Path

import torch

torch.set_num_threads(1)
import gnnautoscale as gas
from gnnautoscale.data import generate
from gnnautoscale.models import GCN

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
saved = folder / "saved"
data = generate.communities(48, degree=4.0, num_features=6, num_classes=3)


def train(name, **options):
    torch.manual_seed(1)
    model = GCN(6, 3, hidden=8, layers=3, dropout=0.3)
    options = {"schedule": "plateau", "refresh_every": 7, "evaluate_every": 5, **options}
    result = gas.fit(model, data, num_parts=5, batch_size=2, epochs=15, **options)
    losses = [epoch.loss for epoch in result.epochs]
    torch.save([model.state_dict(), losses, result.scores, result.best_epoch, result.steps], folder / name)


def newest():
    names = sorted(saved.glob("checkpoint-*.pt")) if saved.exists() else []
    return int(names[-1].stem[11:]) if names else 0


def resumed():
    options = {"resume": str(saved)} if newest() else {}
    rows = str(folder / "rows")
    train("resumed", checkpoint_dir=str(saved), checkpoint_every=1, storage="disk", history_dir=rows, **options)


train("whole")
gc.freeze()
chance, at = random.Random(0), []
for attempt in range(kills + 1):
    before, last = newest(), attempt == kills
    child = os.fork()
    if not child:
        try:
            resumed()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if not last:
        # At any time at all, or after some steps and a part of another one.
        wanted = before + chance.choice([0, 1, 1, 2, 3])
        while newest() < wanted and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.001)
        time.sleep(chance.random() * (0.25 if wanted == before else 0.02))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) == last:
        sys.exit(f"attempt {attempt} ended with {status} at step {newest()}")
    at.append(newest())
print(json.dumps(at))
"""


def test_runs_that_are_killed_go_on_bit_for_bit(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    at = json.loads(done.stdout)
    # It was killed 6 times while it ran, and then came to its end: 15 epochs of three batches.
    assert len(at) == 7
    assert at == sorted(at)
    assert 0 < at[-2] < at[-1] == 45
    whole, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "resumed"))
    assert same_bits(whole[0], resumed[0])
    assert whole[1:] == resumed[1:]
    # Nothing is left of what was cut off.
    assert steps_of(tmp_path / "saved") == [44, 45]
    found = load_latest(tmp_path / "saved")
    assert found is not None
    assert [path.name for path in (tmp_path / "rows").iterdir() if path.suffix != ".rows"] == ["lock"]
