"""``fit`` on several ranks that share a heterogeneous graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.data import TypedDataset
from gnnautoscale.models import build_model
from gnnautoscale.runs import read_run
from gnnautoscale.training import summary_of
from gnnautoscale.training.checkpoint import load_latest
from gnnautoscale.training.resharding import pieces_of, read_shards
from gnnautoscale.training.strategies import HistoryStrategy
from gnnautoscale.training.typed_ranked import TypedRankStrategy
from support.communities import Weights, same_bits, weights_of
from support.ranks import outcomes, run_ranks
from support.typed import MODELS, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
SETTINGS: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "epochs": 3, "lr": 0.02, "progress": False}


class Run(NamedTuple):
    """What a rank returns."""

    scores: dict[str, float]
    losses: list[float]
    weights: Weights


def graph() -> HeteroData:
    """Papers to classify; terms have no features, and one rank no papers to train on."""
    data = typed_graph(6).apply(lambda x: x.float() if x.is_floating_point() else x)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    place = torch.arange(40) % 4
    for name, which in (("train", place < 2), ("val", place == 2), ("test", place == 3)):
        data["paper"][f"{name}_mask"] = which
    del data["term"].x
    data["term"].num_nodes = 12
    return data


def model(data: HeteroData, name: str = "hetero-sage") -> nn.Module:
    torch.manual_seed(1)
    return build_model(name, data, 2, ["paper"], hidden=8, layers=2, dropout=0.3)


def fit(name: str, data: Any, **options: Any) -> Run:
    made = model(graph(), name)
    result = gas.fit(made, data, **{**SETTINGS, **options})
    return Run(result.scores, [epoch.loss for epoch in result.epochs], weights_of(made))


def whole(weights: Weights, name: str) -> Tensor:
    """The outputs of a trained model for all papers."""
    data = graph()
    trained = model(data, name)
    trained.load_state_dict(weights)
    out: Tensor = gas.infer(gas.autoscale(trained, data), data)
    return out


@pytest.mark.parametrize(("size", "name"), [(2, "hetero-sage"), (3, "rgcn")])
def test_all_ranks_end_with_the_same_weights_and_scores_of_all_nodes(size: int, name: str, tmp_path: Path) -> None:
    data, folder = graph(), tmp_path / "run"
    found = run_ranks(size, fit, name, data, run_dir=str(folder))
    assert all(same_bits(run.weights, found[0].weights) for run in found)
    assert all(run[:2] == found[0][:2] for run in found)
    right = (whole(found[0].weights, name).argmax(1) == data["paper"].y)[data["paper"].test_mask]
    assert 100 * float(right.double().mean()) == pytest.approx(found[0].scores["test"])
    record = read_run(folder)
    assert record.run["data"]["nodes"] == data.num_nodes
    assert record.run["data"]["train nodes in split"] == 20


def test_a_folder_of_shards_gives_the_same_bits_as_the_graph(tmp_path: Path) -> None:
    data, folder = graph(), tmp_path / "shards"
    ranks.write_shards(folder, data, gas.HaloLoader(data, 6).labels, 2)
    given, read = run_ranks(2, fit, "hgt", data), run_ranks(2, fit, "hgt", folder)
    for one, other in zip(given, read, strict=True):
        assert one[:2] == other[:2]
        assert same_bits(one.weights, other.weights)


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    dataset = summary_of(folder)
    assert isinstance(dataset, TypedDataset)
    return {name: tuple(each.shape) for name, each in model(dataset.graph).state_dict().items()}


@pytest.mark.parametrize("without", ["term", "paper"])
def test_models_are_built_from_what_a_folder_says(without: str, tmp_path: Path) -> None:
    data = graph()
    if without == "paper":
        del data["paper"].x
        data["paper"].num_nodes = 40
    ranks.write_shards(tmp_path / "shards", data, gas.HaloLoader(data, 6).labels, 2)
    expected = {name: tuple(each.shape) for name, each in model(data).state_dict().items()}
    assert run_ranks(2, weight_shapes, tmp_path / "shards") == [expected, expected]
