"""``fit`` on several ranks: one result, one run folder, and what ranks cannot do is refused before training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import whole
from gnnautoscale import ranks
from gnnautoscale.models import GCN
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import NodeClassification, NodeRegression, Task
from gnnautoscale.training.checkpoint import load_latest
from gnnautoscale.training.ranked import RankStrategy
from gnnautoscale.training.resharding import pieces_of, read_shards
from gnnautoscale.training.strategies import HistoryStrategy
from support.communities import (
    CLASSES,
    FEATURES,
    Weights,
    community_graph,
    multilabel_graph,
    same_bits,
    train_on,
    weights_of,
)
from support.ranks import outcomes, run_ranks


class Run(NamedTuple):
    """What a rank returns."""

    result: gas.FitResult
    weights: Weights


def model(outputs: int = CLASSES, *, norms: bool = False) -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, outputs, hidden=8, layers=3, dropout=0.3, batch_norm=norms)


def fit(data: Any, **options: Any) -> Run:
    made = model(options.pop("outputs", CLASSES), norms=options.get("sync_norms", False))
    return Run(gas.fit(made, data, **{"num_parts": 6, "batch_size": 2, "epochs": 3, **options}), weights_of(made))


def plain(result: gas.FitResult) -> dict[str, Any]:
    """What does not depend on the time that it took, nor on the rank."""
    values = result.to_dict()
    for name in ("seconds", "options", "peak_memory"):
        del values[name]
    return {**values, "epochs": [{**epoch, "seconds": 0} for epoch in values["epochs"]]}


class Deviation(Task):
    """A task of one's own."""

    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """All nodes."""
        return None, batch.y[: batch.batch_size]

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """Not reached."""
        raise AssertionError

    def score(self, out: Tensor, data: Data, split: str) -> float:
        """Not reached."""
        raise AssertionError


def one_class_apart(data: Data) -> Data:
    """Training nodes in a corner of the graph, so that some ranks have none, and one node of the last class."""
    data.y = data.y.clamp(max=CLASSES - 2)
    data.y[0] = CLASSES - 1
    train_on(data, torch.arange(data.num_nodes) < 5)
    return data


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_end_with_the_same_weights_and_scores_of_all_nodes(size: int, tmp_path: Path) -> None:
    data = one_class_apart(community_graph())
    folder = tmp_path / "run"
    found = run_ranks(size, fit, data, run_dir=str(folder))
    first = found[0]
    assert all(same_bits(run.weights, first.weights) for run in found)
    assert all(plain(run.result) == plain(first.result) for run in found)
    trained = model()
    trained.load_state_dict(first.weights)
    task, out = NodeClassification(CLASSES), whole(trained, data)
    assert first.result.scores == pytest.approx({split: task.score(out, data, split) for split in first.result.scores})
    record = read_run(folder)
    assert record.run["data"]["nodes"] == data.num_nodes
    assert record.run["data"]["train nodes in split"] == 5
    assert [epoch["loss"] for epoch in record.epochs] == [epoch.loss for epoch in first.result.epochs]
    assert record.result is not None


def test_a_folder_of_shards_gives_the_same_bits_as_the_graph(tmp_path: Path) -> None:
    data = one_class_apart(community_graph())
    labels = gas.HaloLoader(data, 6).labels
    ranks.write_shards(tmp_path / "shards", data, labels, 2)
    given, read = run_ranks(2, fit, data), run_ranks(2, fit, tmp_path / "shards")
    for one, other in zip(given, read, strict=True):
        assert same_bits(one.weights, other.weights)
        assert plain(one.result) == plain(other.result)


def test_labels_and_numbers_are_told_apart_by_all_shards_together(tmp_path: Path) -> None:
    data = multilabel_graph()
    labels = torch.arange(48) % 4
    ranks.write_shards(tmp_path / "labels", data, labels, 2)
    found = run_ranks(2, fit, tmp_path / "labels", outputs=4, epochs=1)
    assert found[0].result.metric == "micro-F1"
    data.y = torch.zeros(48)
    data.y[labels == 1] = 1.0
    data.y[labels == 2] = 2.5
    ranks.write_shards(tmp_path / "numbers", data, labels, 4)
    assert {
        run.result.metric for run in run_ranks(4, fit, tmp_path / "numbers", outputs=1, batch_size=1, epochs=1)
    } == {NodeRegression().metric}


@pytest.mark.parametrize(
    "options",
    [
        {"compensate": "gradient"},
        {"lipschitz": 0.1, "refresh_every": "epoch", "drawings": 2, "schedule": "plateau"},
        {"evaluation": "histories", "history_dtype": "int8", "storage": "disk", "history_dir": "histories"},
        {"lag": 1, "sync_norms": True},
        {"mode": "history", "edge_dropout": 0.2, "grad_norm": 0.5, "refresh_every": 2, "patience": 1},
    ],
)
def test_options_of_steps_run_on_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    if "history_dir" in options:
        options = {**options, "history_dir": str(tmp_path / "histories")}
    found = run_ranks(2, fit, one_class_apart(community_graph()), **options)
    assert same_bits(found[0].weights, found[1].weights)
    assert found[0].result.steps > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "cluster"}, "mode 'gas' or 'history'"),
        ({"mode": "exact"}, "mode 'gas' or 'history'"),
        ({"accumulate": 2}, "accumulate must be 1"),
        ({"exact_epochs": 1}, "exact_epochs must be 0"),
        ({"refresh": 1}, "refresh must be 0"),
        ({"evaluate_parts": 1}, "evaluate_parts must be None"),
        ({"verify": True}, "verify must be False"),
        ({"compensate": "momentum"}, "by gradients"),
        ({"diagnose_every": 1}, "diagnose_every"),
        ({"sync_norms": True, "lipschitz": 0.1}, "sync_norms needs plain steps"),
        ({"task": Deviation()}, "ranks know tasks of nodes, links and graphs, but got a Deviation"),
        ({"num_parts": 1, "batch_size": 1}, "a part of its own"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    for error in outcomes(2, fit_with, community_graph(), options):
        assert isinstance(error, gas.InputError), error
        assert message in str(error)


def fit_with(data: Any, options: dict[str, Any]) -> Run:
    return fit(data, **options)


def fit_differently(what: str) -> Run:
    rank = ranks.current().rank
    if what == "model":
        return fit(community_graph(), outputs=CLASSES + rank)
    return fit(community_graph(), **{what: 0.1 * (1 + rank)})


@pytest.mark.parametrize("what", ["lr", "model"])
def test_ranks_that_differ_are_refused(what: str) -> None:
    for error in outcomes(2, fit_differently, what):
        assert f"all ranks must have the same {what}" in str(error)


# Faults ##############################################################################################################


def interrupted(folder: Path, after: int, **options: Any) -> None:
    """A run that fails on all ranks after some epochs."""

    def fail(epoch: Any) -> None:
        if epoch.number == after:
            raise StopError

    with pytest.raises(StopError):
        gas.fit(model(), community_graph(), callback=fail, checkpoint_dir=str(folder), **{**SETTINGS, **options})


SETTINGS: dict[str, Any] = {"num_parts": 6, "batch_size": 1, "epochs": 4}


class StopError(Exception):
    """Ends a run."""


@pytest.mark.parametrize("options", [{"checkpoint_every": 1}, {"compensate": "gradient", "history_dtype": "int8"}])
def test_a_run_resumes_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    plain_run = run_ranks(2, fit, community_graph(), **SETTINGS, **options)
    run_ranks(2, interrupted, tmp_path, 2, **options)
    if "checkpoint_every" in options:  # go on in the middle of the second epoch, from the one before the newest
        for path in tmp_path.glob("checkpoint-000000006.*"):
            path.unlink()
    resumed = run_ranks(2, fit, community_graph(), resume=str(tmp_path), **SETTINGS, **options)
    for one, other in zip(plain_run, resumed, strict=True):
        assert same_bits(one.weights, other.weights)
        assert plain(one.result) == plain(other.result)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 2)])
def test_a_run_resumes_on_other_ranks_with_the_rows_of_all_nodes(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(before, interrupted, tmp_path, 2)
    written, read = rows_in(tmp_path), run_ranks(after, rows_found, tmp_path)[0]
    for name, rows in written.items():
        assert torch.equal(rows, read[name]), name


def rows_in(folder: Path) -> dict[str, Tensor]:
    """The rows of all nodes in the newest checkpoint, by slot."""
    checkpoint = load_latest(folder)
    assert checkpoint is not None
    pieces = pieces_of(checkpoint, read_shards(checkpoint))
    nodes, slots = torch.cat([piece.nodes for piece in pieces]), pieces[0].rows["histories"]
    found = {slot: torch.cat([piece.rows["histories"][slot]["raw"] for piece in pieces]) for slot in slots}
    return {slot: torch.empty_like(rows).index_copy_(0, nodes, rows) for slot, rows in found.items()}


def rows_found(folder: Path) -> dict[str, Tensor]:
    """The rows of all nodes as a run finds them when it resumes."""
    found: dict[str, Tensor] = {}
    kind = HistoryStrategy if ranks.current().size == 1 else RankStrategy
    restore = kind.restore

    def look(strategy: Any, checkpoint: Any, device: Any) -> None:
        restore(strategy, checkpoint, device)
        loader = strategy._loader
        order = loader.row_order.nodes.long()
        for slot, history in strategy._memory.histories.items():
            if not isinstance(loader, ranks.RankLoader):
                found[slot] = torch.empty_like(history.raw).index_copy_(0, order, history.raw)
                continue
            own, nodes = loader.num_own, loader.shard.nodes
            found[slot] = loader.world.broadcast(loader.gathered(history.raw[:own].clone()))
            assert torch.equal(history.raw[own : nodes.numel()], found[slot][nodes[own:]]), "ghosts are up to date"
        raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "restore", look)
        with pytest.raises(StopError):
            gas.fit(model(), community_graph(), resume=str(folder), **SETTINGS)
    return found


def test_a_resumed_run_on_other_ranks_goes_on(tmp_path: Path) -> None:
    run_ranks(3, interrupted, tmp_path, 2)
    found = run_ranks(2, fit, community_graph(), resume=str(tmp_path), **SETTINGS)
    assert [epoch.number for epoch in found[0].result.epochs] == [1, 2, 3, 4]
    assert same_bits(found[0].weights, found[1].weights)


def test_a_checkpoint_without_all_its_shards_is_none(tmp_path: Path) -> None:
    run_ranks(2, interrupted, tmp_path, 4)
    newest = max(tmp_path.glob("checkpoint-?????????.pt"))
    next(tmp_path.glob(f"{newest.stem}.rank-1-*")).unlink()
    for error in outcomes(2, resume, tmp_path):
        assert "its shard" in str(error)
        assert "The newest good one is" in str(error)
    assert len(list(tmp_path.glob("*.pt"))) == 2 * 3 - 1, "older ones are removed with their shards"


def resume(folder: Path) -> Run:
    return fit(community_graph(), resume=str(folder), **SETTINGS)


def dying(how: str) -> Run:
    def die(epoch: Any) -> None:
        if epoch.number == 2 and ranks.current().rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4)

    return Run(gas.fit(model(), community_graph(), callback=die, **SETTINGS), {})


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_rank_that_is_gone_ends_the_others_with_one_sentence(how: str) -> None:
    start = time.monotonic()
    found = outcomes(3, dying, how, timeout=1.5)
    assert time.monotonic() - start < 20
    for rank in (0, 2):
        assert isinstance(found[rank], ranks.LostRankError)
        assert f"rank {rank} of 3 ends, because another rank has failed or did not answer in time" in str(found[rank])
        assert "\n" not in str(found[rank])


def stopped(folder: Path) -> int:
    """One rank is asked to stop; returns how many epochs were done."""
    done = 0

    def ask(epoch: Any) -> None:
        nonlocal done
        done = epoch.number
        if epoch.number == 1 and ranks.current().rank == 1:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        gas.fit(model(), community_graph(), callback=ask, checkpoint_dir=str(folder), **SETTINGS)
    return done


def test_ctrl_c_on_one_rank_ends_all_after_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(2, stopped, tmp_path) == [1, 1]
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 4
    plain_run = run_ranks(2, fit, community_graph(), **SETTINGS)
    resumed = run_ranks(2, fit, community_graph(), resume=str(tmp_path), **SETTINGS)
    assert same_bits(plain_run[0].weights, resumed[1].weights)
