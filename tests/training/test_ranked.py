"""``fit`` on several ranks: one result, one run folder, and what ranks cannot do is refused before training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import whole
from gnnautoscale import ranks
from gnnautoscale.models import GCN
from gnnautoscale.ranks.exchange import Ghosts, RankTransfer
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import NodeClassification, NodeRegression
from gnnautoscale.training.checkpoint import load_latest
from gnnautoscale.training.journal import describe_parts
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


def model(outputs: int = CLASSES, *, layers: int = 3, norms: bool = False) -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, outputs, hidden=8, layers=layers, dropout=0.3, batch_norm=norms)


def fit(data: Any, **options: Any) -> Run:
    shape = {name: options.pop(name) for name in ("outputs", "layers") if name in options}
    made = model(**shape, norms=options.get("sync_norms", False))
    return Run(gas.fit(made, data, **{"num_parts": 6, "batch_size": 2, "epochs": 2, **options}), weights_of(made))


def plain(result: gas.FitResult) -> dict[str, Any]:
    """What does not depend on the time that it took, nor on the rank."""
    values = result.to_dict()
    for name in ("seconds", "options", "peak_memory"):
        del values[name]
    return {**values, "epochs": [{**epoch, "seconds": 0} for epoch in values["epochs"]]}


def one_class_apart(data: Data) -> Data:
    """Training nodes in a corner of the graph, so that some ranks have none, and one node of the last class."""
    data.y = data.y.clamp(max=CLASSES - 2)
    data.y[0] = CLASSES - 1
    train_on(data, torch.arange(data.num_nodes) < 5)
    return data


def test_all_ranks_end_with_the_same_weights_and_scores_of_all_nodes(tmp_path: Path) -> None:
    data = one_class_apart(community_graph())
    folder = tmp_path / "run"
    found = run_ranks(3, fit, data, run_dir=str(folder), epochs=3)
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
    assert [found["epoch"] for found in record.staleness] == [1, 3]
    (age, *_), moved = record.epochs[-1]["age"].values(), record.epochs[-1]["pulled_bytes"]
    assert age >= 1
    assert moved > 0
    whole_parts = describe_parts(data.edge_index, gas.HaloLoader(data, 6).labels)
    for name, values in record.run["parts"]["batches"].items():
        assert sorted(values) == sorted(whole_parts["batches"][name])


def stale_rows(data: Data) -> Any:
    """What a diagnosis finds after the weights have moved, of rows that were written before."""
    torch.manual_seed(4)
    trained = model().double()
    if ranks.current().size > 1:
        loader: Any = ranks.RankLoader(data, 6)
        ranks.autoscale(trained, loader)
    else:
        loader = gas.HaloLoader(data, 6)
        gas.autoscale(trained, data)
    gas.refresh(trained, loader)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.mul_(1.1)
    found = gas.diagnose(trained, loader, ["staleness", "gradients"], ages=loader.parts)
    return found["staleness"]["layers"], found["gradients"]


def test_staleness_and_gradients_are_those_of_all_nodes() -> None:
    data = one_class_apart(community_graph())
    data.x = data.x.double()
    alone, gradients = stale_rows(data)
    for found, of_steps in run_ranks(3, stale_rows, data):
        assert of_steps["why_not"] is not None
        for name in ("cosine", "norm_ratio", "relative_error"):
            assert of_steps[name] == pytest.approx(gradients[name], rel=1e-6)
        assert len(of_steps["layers"]) == len(gradients["layers"])
        for mine, wanted in zip(found, alone, strict=True):
            for what in ("staleness", "closeness", "history"):
                assert (mine[what] is None) == (wanted[what] is None)
                assert mine[what] is None or mine[what] == pytest.approx(wanted[what], rel=1e-9), what
            assert sum(group["rows"] for group in mine["by_age"]) == sum(group["rows"] for group in wanted["by_age"])


def ages_in_rows(data: Data, folder: Path, **options: Any) -> int:
    """A run whose rows are the number of their step; after each step its ages must be those of all rows it has."""
    strategies: list[RankStrategy] = []
    exchange, follow = RankTransfer.exchange, RankStrategy._follow

    def numbered(self: Any, slot: str, history: Any, rows: Tensor, *, push: bool = True) -> Tensor:
        flow = strategies[0].flow if strategies else None
        beside = self._ghosts.steps.is_aside  # a refresh, after the last step
        step = 0 if flow is None else flow.steps + (not beside)
        return exchange(self, slot, history, rows * 0 + step, push=push)

    def check(self: RankStrategy, item: Any) -> None:
        if not strategies:
            strategies.append(self)
        follow(self, item)
        assert self.flow is not None
        shard, ghosts = self._loader.shard, self._memory.sharing
        assert isinstance(ghosts, Ghosts)
        assert shard is not None
        ghosts._arrive(before=ghosts._passes + 1 - options["lag"])
        known = shard.nodes.numel()
        written = next(iter(self._memory.histories.values())).raw[:known, 0]
        ages, seen = self.flow.ages()[:known], written > 1  # rows of the first step are not numbered yet
        wanted = self.flow.steps + 1 - written[seen]
        assert torch.equal(ages[seen], wanted.long())
        checked.append(int(seen[shard.num_own :].sum()))

    checked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankTransfer, "exchange", numbered)
        patch.setattr(RankStrategy, "_follow", check)
        fit(data, batch_size=1, run_dir=str(folder), diagnose_every="never", **options)
    return sum(checked)


@pytest.mark.parametrize("options", [{"lag": 0, "refresh": 0}, {"lag": 1, "refresh": 1}])
def test_the_ages_of_own_rows_and_of_those_of_other_ranks_are_known(options: dict[str, Any], tmp_path: Path) -> None:
    assert min(run_ranks(2, ages_in_rows, community_graph(), tmp_path / "run", **options)) > 0


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
    found = run_ranks(2, fit, tmp_path / "labels", outputs=4, layers=1, epochs=1)
    assert found[0].result.metric == "micro-F1"
    data.y = torch.zeros(48)
    data.y[labels == 1] = 1.0
    data.y[labels == 2] = 2.5
    ranks.write_shards(tmp_path / "numbers", data, labels, 4)
    found = run_ranks(4, fit, tmp_path / "numbers", outputs=1, layers=1, batch_size=1, epochs=1)
    assert {run.result.metric for run in found} == {NodeRegression().metric}


@pytest.mark.parametrize(
    "options",
    [
        {
            "lipschitz": 0.1,
            "refresh_every": "epoch",
            "drawings": 2,
            "schedule": "plateau",
            "evaluation": "histories",
            "history_dtype": "int8",
            "storage": "disk",
            "history_dir": "histories",
        },
        {"mode": "history", "edge_dropout": 0.2, "grad_norm": 0.5, "refresh_every": 2, "patience": 1, "epochs": 3},
        {"compensate": "gradient", "refresh": 1, "accumulate": 2, "lag": 1, "batch_size": 1, "sync_norms": True},
        {"compensate": "momentum", "lipschitz": 0.1, "sync_norms": True, "verify": True},
    ],
)
def test_options_of_steps_run_on_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    if "history_dir" in options:
        options = {**options, "history_dir": str(tmp_path / "histories")}
    found = run_ranks(2, fit, one_class_apart(community_graph()), **options)
    assert same_bits(found[0].weights, found[1].weights)
    assert found[0].result.steps > 0
    for run in found:
        checked = run.result.verification
        assert (checked is not None) == ("verify" in options)
        assert checked is None or checked.exact


def shallow(data: Any, **options: Any) -> Run:
    """A run of a model of one layer, whose steps are the same whatever is in histories."""
    made = GCN(FEATURES, CLASSES, hidden=8, layers=1, dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for weight in made.parameters():
            nn.init.normal_(weight, std=0.3)
    made.double()
    return Run(gas.fit(made, data, num_parts=6, epochs=3, **options), weights_of(made))


@pytest.mark.parametrize(("size", "accumulate"), [(2, 3), (3, 7)])
def test_accumulated_steps_are_the_mean_over_the_batches_of_all_ranks(size: int, accumulate: int) -> None:
    data = community_graph()
    data.x = data.x.double()
    labels = gas.HaloLoader(data, 6).labels
    train_on(data, (labels < 3) | (torch.arange(data.num_nodes) % 5 == 0) & (labels < 5))
    found = run_ranks(size, shallow, data, accumulate=accumulate)
    alone = shallow(data, accumulate=6)
    for run in found:
        assert run.result.steps == alone.result.steps == 3
        for name, weight in alone.weights.items():
            torch.testing.assert_close(run.weights[name], weight, rtol=1e-9, atol=1e-12)


def deep(data: Any, **options: Any) -> Run:
    """A run of a model of three layers with batch norms, in double precision."""
    torch.manual_seed(2)
    made = GCN(FEATURES, CLASSES, hidden=8, layers=3, dropout=0.0, batch_norm=True).double()
    return Run(gas.fit(made, data, num_parts=6, lr=0.05, **options), weights_of(made))


@pytest.mark.parametrize(
    ("size", "options"),
    [(3, {"mode": "exact", "epochs": 2}), (2, {"exact_epochs": 2, "epochs": 2, "evaluate_parts": 2})],
)
def test_exact_steps_are_those_of_full_batch(size: int, options: dict[str, Any]) -> None:
    data = one_class_apart(community_graph())
    data.x = data.x.double()
    alone = deep(data, **options)
    for run in run_ranks(size, deep, data, **options):
        assert run.result.steps == alone.result.steps == options["epochs"]
        assert run.result.scores == pytest.approx(alone.result.scores)
        assert [each.loss for each in run.result.epochs] == pytest.approx([each.loss for each in alone.result.epochs])
        for name, weight in alone.weights.items():
            torch.testing.assert_close(run.weights[name], weight, rtol=1e-6, atol=1e-6)


def test_evaluation_in_other_batches_gives_the_same_scores() -> None:
    data = community_graph()
    first = run_ranks(2, fit, data, refresh_every="epoch")
    for parts in (1, 40):
        other = run_ranks(2, fit, data, refresh_every="epoch", evaluate_parts=parts)
        for one, two in zip(first[0].result.epochs, other[0].result.epochs, strict=True):
            assert one.scores == pytest.approx(two.scores)
            assert one.loss == pytest.approx(two.loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "cluster"}, "mode 'gas', 'history' or 'exact'"),
        ({"refresh": 2, "batch_size": 3}, "refresh must be at most the number of batches of a rank, 1"),
        ({"diagnose": ("lipschitz",)}, "ranks diagnose gradients and staleness"),
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


SETTINGS: dict[str, Any] = {"num_parts": 6, "batch_size": 1, "epochs": 3}


class StopError(Exception):
    """Ends a run."""


@pytest.mark.parametrize(
    "options",
    [
        {"compensate": "momentum", "checkpoint_every": 1, "accumulate": 3, "refresh": 1},
        {"compensate": "gradient", "history_dtype": "int8", "refresh": 2, "lag": 1},
    ],
)
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
    assert written.keys() == read.keys() != set()
    for name, rows in written.items():
        assert torch.equal(rows, read[name]), name
    if before > after > 1:
        found = run_ranks(after, resume, tmp_path)
        assert [epoch.number for epoch in found[0].result.epochs] == [1, 2, 3]
        assert same_bits(found[0].weights, found[1].weights)


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


def test_a_checkpoint_without_all_its_shards_is_none(tmp_path: Path) -> None:
    run_ranks(2, interrupted, tmp_path, 3)
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


def asked_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_rank_that_torchrun_ends_says_so() -> None:
    for rank, error in enumerate(outcomes(2, asked_to_end)):
        assert isinstance(error, ranks.LostRankError)
        assert f"rank {rank} of 2 ends, since torchrun asked it to" in str(error)


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
