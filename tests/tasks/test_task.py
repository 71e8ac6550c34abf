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
from gnnautoscale.training.optimizer import LearningRate
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
    with pytest.raises(InputError, match="y must hold the targets of nodes, but got none"):
        gas.fit(regressor(), heights(), epochs=1)


def test_a_score_of_one_s_own_chooses_the_epoch() -> None:
    class Backwards(NodeClassification):
        def score(self, out: Tensor, data: Data, split: str) -> float:
            return -float(super().score(out, data, split))

    torch.manual_seed(1)
    result = gas.fit(GCN(FEATURES, CLASSES), community_graph(), task=Backwards(CLASSES), num_parts=4, epochs=6)
    assert result.scores["val"] == max(epoch.scores["val"] for epoch in result.epochs)
    assert -100.0 <= result.scores["val"] < 0.0


# Node tasks through training #########################################################################################

NAN = float("nan")


def posed(kind: str) -> tuple[Data, int]:
    """A graph with targets of a kind, of which some are unknown, and the number of outputs of its task."""
    data = community_graph()
    height = data.x.sum(1)
    data.y, outputs = {
        "classes": (torch.where(torch.arange(48) % 7 == 0, -1, data.y), CLASSES),
        "yes or no": (torch.where(torch.arange(48) % 7 == 0, NAN, (height > 0).float()), 1),
        "labels": (torch.where(torch.rand(48, 3) < 0.3, NAN, (data.x[:, :3] > 0).float()), 3),
        "number": (torch.where(torch.arange(48) % 7 == 0, NAN, height), 1),
        "numbers": (torch.where(torch.rand(48, 3) < 0.3, NAN, data.x[:, :3] + height.unsqueeze(1)), 3),
    }[kind]
    data.train_mask[:4] = False  # in no split
    return data, outputs


KINDS = ["classes", "yes or no", "labels", "number", "numbers"]


@pytest.mark.parametrize("kind", KINDS)
def test_exact_steps_have_the_loss_and_gradient_of_full_batch(kind: str) -> None:
    data, outputs = posed(kind)
    weight: dict[str, Any] = {"class_weight": "balanced"} if kind in KINDS[:3] else {}
    losses, trained = [], []
    for mode, parts in (("full", 1), ("exact", 4)):
        torch.manual_seed(1)
        model = GCN(FEATURES, outputs, hidden=8, dropout=0.0)
        result = gas.fit(model, data, mode=mode, num_parts=parts, epochs=3, lr=0.05, **weight)
        losses.append([epoch.loss for epoch in result.epochs])
        trained.append(torch.cat([value.flatten() for value in gas.detach(model).parameters()]).detach())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])  # the others are those with one column
def test_runs_of_all_kinds_resume_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    data, outputs = posed(kind)

    def model() -> GCN:
        torch.manual_seed(1)
        return GCN(FEATURES, outputs, hidden=8, dropout=0.5)

    options: dict[str, Any] = {"num_parts": 4, "batch_size": 2, "run_dir": str(tmp_path / "run")}
    whole, resumed = model(), model()
    gas.fit(whole, data, num_parts=4, batch_size=2, epochs=4)
    gas.fit(model(), data, epochs=2, checkpoint_dir=str(tmp_path / "kept"), **options)
    result = gas.fit(resumed, data, epochs=4, resume=str(tmp_path / "kept"), **options)
    assert same_bits(weights_of(gas.detach(whole)), weights_of(gas.detach(resumed)))
    assert read_run(tmp_path / "run").run["score"] == {
        "metric": result.metric,
        "higher_is_better": result.higher_is_better,
        "percent": result.percent,
    }


@pytest.mark.parametrize(
    ("kind", "metric"),
    [("classes", "macro-F1"), ("labels", "ROC-AUC"), ("yes or no", "average-precision"), ("numbers", "R2")],
)
def test_the_metric_is_chosen_by_name(kind: str, metric: str) -> None:
    data, outputs = posed(kind)
    model = GCN(FEATURES, outputs, hidden=8, dropout=0.0)
    result = gas.fit(model, data, num_parts=4, epochs=3, metric=metric.lower())
    assert (result.metric, result.options["metric"]) == (metric, metric.lower())
    assert result.scores["val"] == max(epoch.scores["val"] for epoch in result.epochs)


@pytest.mark.parametrize("metric", ["MAE", "RMSE"])
def test_the_best_epoch_has_the_smallest_error(metric: str) -> None:
    data, outputs = posed("number")
    model = GCN(FEATURES, outputs, hidden=8, dropout=0.0)
    result = gas.fit(model, data, num_parts=4, epochs=60, lr=0.2, metric=metric, patience=3, schedule="plateau")
    errors = [epoch.scores["val"] for epoch in result.epochs]
    assert result.scores["val"] == min(errors)
    assert result.best_epoch == 1 + errors.index(min(errors))
    assert len(errors) == 60 or len(errors) == result.best_epoch + 3
    assert len(errors) > 4  # it got better at first


def test_the_rate_is_lowered_where_errors_do_not_fall() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))

    def rate_after(scores: list[float]) -> float:
        optimizer = torch.optim.SGD([weight], lr=1.0)
        rate = LearningRate(optimizer, "plateau", len(scores), higher_is_better=False)
        for score in scores:
            rate.step(score)
        return float(optimizer.param_groups[0]["lr"])

    assert rate_after([float(20 - number) for number in range(12)]) == 1.0
    assert rate_after([float(number) for number in range(12)]) == 0.5


# What is no task #####################################################################################################


class Broken(Regression):
    """Does one thing wrong."""

    def __init__(self, name: str, value: Any) -> None:
        setattr(self, name, lambda *_: value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            object(),
            "task must be a name or an object of a class derived from gnnautoscale.tasks.Task, but got a object",
        ),
        ("clusters", "a task is one of classification, regression"),
        (Broken("targets", torch.ones(3)), "Broken.targets must return rows and targets, but got a Tensor"),
        (Broken("targets", ([0], torch.ones(1))), "rows of Broken.targets must be indices of the batch's own nodes"),
        (Broken("targets", (torch.tensor([99]), torch.ones(1))), "rows of Broken.targets must be indices"),
        (Broken("targets", (None, torch.tensor(1.0))), "targets of Broken.targets must have a row each"),
        (Broken("loss", torch.ones(3, requires_grad=True)), "Broken.loss must return a tensor of one number"),
        (Broken("loss", 3.0), "Broken.loss must return a tensor of one number, but got a float"),
        (Broken("score", torch.ones(2)), "Broken.score must return a number, but got a tensor of shape"),
        (Broken("score", None), "Broken.score must return a number, but got a NoneType"),
    ],
)
def test_tasks_that_do_not_do_what_they_must_are_refused(task: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gas.fit(regressor(), heights(), task=task, num_parts=2, epochs=1)


@pytest.mark.parametrize("options", [{"metric": "MAE"}, {"class_weight": "balanced"}])
def test_a_task_of_one_s_own_has_its_own_score_and_loss(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="metric and class_weight belong to tasks that know them"):
        gas.fit(regressor(), heights(), task=Regression(), epochs=1, **options)
