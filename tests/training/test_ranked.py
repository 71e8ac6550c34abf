"""``fit`` on several ranks: one result, one run folder, and what ranks cannot do is refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import whole
from gnnautoscale import ranks
from gnnautoscale.models import GCN
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import NodeClassification, NodeRegression
from support.communities import CLASSES, FEATURES, Weights, community_graph, multilabel_graph, same_bits, weights_of
from support.ranks import outcomes, run_ranks


class Run(NamedTuple):
    """What a rank returns."""

    result: gas.FitResult
    weights: Weights


def model(outputs: int = CLASSES) -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, outputs, hidden=8, layers=3, dropout=0.3)


def fit(data: Any, **options: Any) -> Run:
    made = model(options.pop("outputs", CLASSES))
    return Run(gas.fit(made, data, **{"num_parts": 6, "batch_size": 2, "epochs": 3, **options}), weights_of(made))


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
    data.train_mask = torch.arange(data.num_nodes) < 5
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
        {"mode": "history", "edge_dropout": 0.2, "grad_norm": 0.5, "refresh_every": 2, "patience": 1},
    ],
)
def test_options_of_steps_run_on_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    if "history_dir" in options:
        options = {**options, "history_dir": str(tmp_path / "histories")}
    found = run_ranks(2, fit, community_graph(), **options)
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
        ({"task": "link"}, "something of nodes"),
        ({"num_parts": 1, "batch_size": 1}, "a part of its own"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    data: Any = community_graph()
    if options.get("task") == "link":
        data = gas.Dataset.of(data).split_links(0)
    for error in outcomes(2, fit_with, data, options):
        assert isinstance(error, gas.InputError), error
        assert message in str(error) or "one plain graph" in str(error)


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
