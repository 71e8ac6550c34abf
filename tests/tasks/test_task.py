"""Tasks of one's own, through everything that asks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.errors import InputError
from gnnautoscale.models import GCN
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import NodeClassification, Task
from gnnautoscale.tuning import tune
from support.communities import CLASSES, FEATURES, community_graph, same_bits, weights_of


class Regression(Task):
    """Predict a number for each node; the first nodes are for training, the last for tests."""

    metric = "R2"

    def targets(self, batch: Data) -> tuple[Tensor, Tensor]:
        rows = (batch.n_id[: batch.batch_size] < 24).nonzero().squeeze(1)
        return rows, batch.height[rows]

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        loss: Tensor = (out.squeeze(1) - targets).square().mean()
        return loss

    def score(self, out: Tensor, data: Data, split: str) -> float:
        nodes = {"train": slice(0, 24), "val": slice(24, 36), "test": slice(36, 48)}[split]
        wanted, got = data.height[nodes], out[nodes, 0]
        return 1 - float((got - wanted).square().sum() / (wanted - wanted.mean()).square().sum())


def heights() -> Data:
    """A graph without classes or masks, whose targets are a smooth function of features."""
    data = community_graph()
    return Data(x=data.x, edge_index=data.edge_index, height=data.x.sum(1) / 3 + 1)


def regressor() -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, 1, hidden=16, dropout=0.0)


@pytest.mark.parametrize(
    "options",
    [{"num_parts": 4, "batch_size": 2}, {"mode": "cluster", "num_parts": 4}, {"mode": "sage", "fan_out": [4, 4]}],
)
def test_a_regression_is_trained_and_scored(options: dict[str, Any]) -> None:
    data, model = heights(), regressor()
    result = gas.fit(model, data, task=Regression(), epochs=20, lr=0.02, **options)
    assert result.metric == "R2"
    assert result.epochs[-1].loss < result.epochs[0].loss
    assert result.scores["val"] == max(epoch.scores["val"] for epoch in result.epochs)
    plain = regressor().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        out = plain(data.x, data.edge_index)
    expected = {split: Regression().score(out, data, split) for split in ("train", "val", "test")}
    assert result.scores == pytest.approx(expected, abs=1e-5)


def test_first_loss_by_hand() -> None:
    data, model = heights(), regressor()
    with torch.no_grad():
        expected = (model(data.x, data.edge_index)[:24, 0] - data.height[:24]).square().mean()
    result = gas.fit(model, data, task=Regression(), mode="full", epochs=1)
    assert result.epochs[0].loss == pytest.approx(float(expected), abs=1e-6)


def test_a_run_folder_and_its_gradients(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_parts": 4, "epochs": 2, "run_dir": str(tmp_path / "run"), "diagnose": ["gradients"]}
    gas.fit(regressor(), heights(), task=Regression(), **options)
    record = read_run(tmp_path / "run")
    assert record.run["data"].keys() == {"name", "nodes", "edges", "features"}
    assert record.gradients[-1]["cosine"] > 0.3


def test_checkpoints_know_the_targets(tmp_path: Path) -> None:
    data, model, resumed = heights(), regressor(), regressor()
    options: dict[str, Any] = {"task": Regression(), "num_parts": 4, "batch_size": 2}
    gas.fit(regressor(), data, epochs=2, checkpoint_dir=str(tmp_path), **options)
    gas.fit(resumed, data, epochs=4, resume=str(tmp_path), **options)
    gas.fit(model, data, epochs=4, **options)
    assert same_bits(weights_of(gas.detach(model)), weights_of(gas.detach(resumed)))
    data.height = data.height + 1
    with pytest.raises(InputError, match="graph"):
        gas.fit(regressor(), data, epochs=4, resume=str(tmp_path), **options)


def test_a_named_model_gets_the_outputs_of_the_task() -> None:
    widths: set[int] = set()

    class Watched(Regression):
        def loss(self, out: Any, targets: Tensor) -> Tensor:
            widths.add(out.size(1))
            return super().loss(out, targets)

    tune("gcn", heights(), task=Watched(), model_options={"hidden": 4})
    assert widths == {1}


def test_without_a_task_the_data_must_fit_one() -> None:
    with pytest.raises(InputError, match="y must be a dense tensor, but got none"):
        gas.fit(regressor(), heights(), epochs=1)


def test_a_score_of_one_s_own_chooses_the_epoch() -> None:
    class Backwards(NodeClassification):
        def score(self, out: Tensor, data: Data, split: str) -> float:
            return -float(super().score(out, data, split))

    torch.manual_seed(1)
    result = gas.fit(GCN(FEATURES, CLASSES), community_graph(), task=Backwards(CLASSES), num_parts=4, epochs=6)
    assert result.scores["val"] == max(epoch.scores["val"] for epoch in result.epochs)
    assert -100.0 <= result.scores["val"] < 0.0
