"""Labels, masks, loss and scores of node classification."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.tasks import NodeClassification, NodeRegression, Task, task_for

EVERYWHERE = torch.ones(4, dtype=torch.bool)


def labelled(y: Tensor, **masks: Tensor) -> Data:
    return Data(x=torch.eye(y.size(0)), edge_index=torch.tensor([[0], [1]]), y=y, **masks)


def test_the_task_of_a_data_set_has_all_classes_of_its_graphs() -> None:
    train, val, test = (labelled(torch.tensor(y)) for y in ([0, 1], [0, 4], [2, 0]))
    task = task_for(Dataset("three", train, val, test))
    assert isinstance(task, NodeClassification)
    assert (task.metric, task.num_outputs, task.multilabel) == ("accuracy", 5, False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_the_task_of_several_labels(dtype: torch.dtype) -> None:
    task = task_for(Dataset.of(labelled(torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=dtype))))
    assert (task.metric, task.num_outputs) == ("micro-F1", 3)


# Targets and loss ####################################################################################################


def test_targets_are_those_of_training_nodes_without_the_halo() -> None:
    batch = labelled(torch.tensor([3, 1, 2, 0], dtype=torch.uint8), train_mask=torch.tensor([True, False, True, True]))
    rows, targets = NodeClassification(4).targets_of_graph(batch)
    assert "batch_size" not in batch
    assert rows is not None
    assert (rows.tolist(), targets.tolist(), targets.dtype) == ([0, 2, 3], [3, 2, 0], torch.int64)
    batch.batch_size = 2
    rows, targets = NodeClassification(4).targets(batch)
    assert rows is not None
    assert (rows.tolist(), targets.tolist()) == ([0], [3])
    batch.train_mask = torch.tensor([False, False, True, True])
    assert NodeClassification(4).targets(batch)[1].size(0) == 0


def test_no_rows_are_selected_where_all_are_trained_on() -> None:
    rows, targets = NodeClassification(2).targets_of_graph(labelled(torch.tensor([0, 1, 1, 0]), train_mask=EVERYWHERE))
    assert rows is None
    assert targets.tolist() == [0, 1, 1, 0]


def test_losses() -> None:
    out = torch.randn(3, 4)
    classes, labels = torch.tensor([0, 3, 1]), torch.tensor([[1, 0, 0, 1]] * 3, dtype=torch.bool)
    assert torch.equal(NodeClassification(4).loss(out, classes), F.cross_entropy(out, classes))
    expected = F.binary_cross_entropy_with_logits(out, labels.float())
    assert torch.equal(NodeClassification(4, multilabel=True).loss(out, labels), expected)
    assert NodeClassification(4).loss(out.bfloat16(), classes).dtype == torch.float32


@pytest.mark.parametrize("out", [torch.zeros(2, 2), torch.zeros(2), (torch.zeros(2, 3),)])
def test_outputs_that_do_not_fit_are_refused(out: Any) -> None:
    with pytest.raises(InputError, match="a tensor of 3 scores per node"):
        NodeClassification(3).loss(out, torch.tensor([0, 1]))


def test_only_classes_may_have_outputs_to_spare() -> None:
    NodeClassification(3).loss(torch.zeros(2, 4), torch.tensor([0, 2]))
    with pytest.raises(InputError, match="a tensor of 3 scores per node"):
        NodeClassification(3, multilabel=True).loss(torch.zeros(2, 4), torch.zeros(2, 3))


# Scores ##############################################################################################################


@pytest.mark.parametrize(("mask", "expected"), [([1, 1, 1, 1], 75.0), ([1, 0, 0, 1], 50.0), ([0, 1, 0, 0], 100.0)])
def test_accuracy_by_hand(mask: list[int], expected: float) -> None:
    out = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.5, 0.4]])
    data = labelled(torch.tensor([0, 1, 1, 1]), val_mask=torch.tensor(mask).bool())
    assert NodeClassification(2).score(out, data, "val") == expected


def test_micro_f1_by_hand() -> None:
    out = torch.tensor([[1.0, -1.0, 2.0], [-1.0, 3.0, -2.0], [5.0, 5.0, 5.0]])
    data = labelled(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    data.train_mask, data.test_mask = torch.tensor([True, True, False]), torch.tensor([True, True, True])
    task = NodeClassification(3, multilabel=True)
    # Two hits, one false alarm and one miss; then three false alarms more.
    assert task.score(out, data, "train") == pytest.approx(100 * 2 * 2 / (2 * 2 + 1 + 1))
    assert task.score(out, data, "test") == pytest.approx(100 * 2 * 2 / (2 * 2 + 4 + 1))


@pytest.mark.parametrize("y", [torch.tensor([0]), torch.tensor([[0.0, 1.0]])])
def test_no_nodes_have_no_score(y: Tensor) -> None:
    data, task = labelled(y, test_mask=torch.tensor([False])), NodeClassification(2, multilabel=y.dim() == 2)
    assert math.isnan(task.score(torch.zeros(1, 2), data, "test"))
    assert math.isnan(task.score(torch.zeros(1, 2), data, "val"))


def test_each_graph_is_evaluated_once() -> None:
    masks = {name: torch.tensor([True, False]) for name in ("train_mask", "val_mask", "test_mask")}
    seen, other = (labelled(torch.tensor([0, 1]), **masks) for _ in range(2))
    calls = []

    def output(split: str) -> Tensor:
        calls.append(split)
        return torch.eye(2) if split == "train" else 1 - torch.eye(2)

    scores = NodeClassification(2).evaluate(Dataset("two", seen, seen, other), output)
    assert (calls, scores) == (["train", "test"], {"train": 100.0, "val": 100.0, "test": 0.0})
    with pytest.raises(FloatingPointError, match="not finite"):
        NodeClassification(2).evaluate(Dataset.of(seen), lambda split: torch.full((2, 2), math.nan))


def test_predictions() -> None:
    out = torch.tensor([[2.0, 1.0], [-1.0, 1.0]])
    assert NodeClassification(2).predictions(out, Data())["classes"].tolist() == [0, 1]
    assert NodeClassification(2, multilabel=True).predictions(out, Data())["classes"].tolist() == [[1, 1], [0, 1]]
    assert NodeClassification(2).predictions(out, Data())["logits"] is out


def test_skew_of_classes() -> None:
    data = labelled(torch.tensor([0, 0, 1, 1, 2, 2]), train_mask=torch.tensor([True, True, True, True, False, True]))
    task = NodeClassification(3)
    # Shares 2/5, 2/5, 1/5; the parts have 1, 0, 0 | 0, 1, 0 | 0, 0, 1.
    assert task.skew(data, data.y) == pytest.approx((2 * 0.6 + 2 * 0.6 + 0.8) / 5)
    assert task.skew(data, torch.zeros(6, dtype=torch.long)) == 0.0
    assert task.skew(data, torch.tensor([0, 0, 1, 1, 2, 3])) == task.skew(data, data.y)
    several = labelled(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]), train_mask=EVERYWHERE)
    # Labels 3 : 3; the parts have 2 : 1 and 1 : 2.
    task = NodeClassification(2, multilabel=True)
    assert task.skew(several, torch.tensor([0, 0, 1, 1])) == pytest.approx(2 / 3 - 1 / 2)


# Binary, numbers, weights and unknown targets ########################################################################

NAN = math.nan


@pytest.mark.parametrize(
    ("y", "kind", "outputs", "metric"),
    [
        (torch.tensor([True, False]), NodeClassification, 1, "accuracy"),
        (torch.tensor([1.0, NAN]), NodeClassification, 1, "accuracy"),
        (torch.tensor([0, -1]), NodeClassification, 1, "accuracy"),
        (torch.tensor([[1.0, NAN], [0.0, 1.0]]), NodeClassification, 2, "micro-F1"),
        (torch.tensor([0.5, NAN]), NodeRegression, 1, "RMSE"),
        (torch.tensor([[0.5, 2.0, NAN], [1.0, 0.0, 1.0]]), NodeRegression, 3, "RMSE"),
    ],
)
def test_the_targets_say_which_task(y: Tensor, kind: type[Task], outputs: int, metric: str) -> None:
    task = task_for(Dataset.of(labelled(y)))
    assert (type(task), task.num_outputs, task.metric) == (kind, outputs, metric)


def test_a_name_says_which_task() -> None:
    assert isinstance(task_for(Dataset.of(labelled(torch.tensor([1, 5]))), "regression"), NodeRegression)
    with pytest.raises(InputError, match="a task is one of classification, regression"):
        task_for(Dataset.of(labelled(torch.tensor([1, 5]))), "clustering")
    with pytest.raises(InputError, match="y must be integers from 0"):
        task_for(Dataset.of(labelled(torch.tensor([0.5, 5]))), "classification")


@pytest.mark.parametrize("y", [torch.tensor([1, 0, 1]), torch.tensor([1.0, 0, 1]), torch.tensor([True, False, True])])
def test_yes_or_no(y: Tensor) -> None:
    data, task = labelled(y, train_mask=torch.tensor([True] * 3)), NodeClassification(1)
    task.check(data, ["train"])
    out = torch.tensor([[2.0], [-1.0], [-3.0]])
    rows, targets = task.targets_of_graph(data)
    assert rows is None
    expected = F.binary_cross_entropy_with_logits(out[:, 0], torch.tensor([1.0, 0, 1]))
    torch.testing.assert_close(task.loss(out, targets), expected)
    assert task.score(out, data, "train") == pytest.approx(100 * 2 / 3)
    assert task.predictions(out, Data())["classes"].tolist() == [True, False, False]
    assert task.describe(Dataset.of(data))["classes"] == 2
    assert task.skew(data, torch.tensor([0, 1, 0])) == pytest.approx((2 * (1 / 3) + 2 / 3) / 3)


def test_several_numbers() -> None:
    y = torch.tensor([[1.0, NAN], [NAN, NAN], [3.0, 5.0]])
    data, task = labelled(y, train_mask=torch.tensor([True] * 3)), NodeRegression(2, metric="mae")
    task.check(data, ["train"])
    rows, targets = task.targets_of_graph(data)
    assert rows is not None
    assert rows.tolist() == [0, 2]
    out = torch.tensor([[2.0, 100.0], [7.0, 7.0], [3.0, 4.0]], requires_grad=True)
    loss = task.loss(out[rows], targets)
    # The first node has one known number, off by 1, and the last one two, off by 0 and 1.
    assert float(loss.detach()) == pytest.approx((1 + (0 + 1) / 2) / 2)
    (slope,) = torch.autograd.grad(loss, out)
    assert torch.equal(slope[0, 1:], torch.zeros(1))
    assert torch.equal(slope[1], torch.zeros(2))
    assert task.score(out.detach(), data, "train") == pytest.approx((1 + 0 + 1) / 3)
    assert not task.higher_is_better
    assert task.predictions(out, Data())["values"] is out


def test_a_single_number_may_be_an_integer() -> None:
    data, task = labelled(torch.tensor([3, 5]), train_mask=torch.tensor([True, True])), NodeRegression()
    task.check(data, ["train"])
    _, targets = task.targets_of_graph(data)
    assert float(task.loss(torch.tensor([[3.0], [7.0]]), targets)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("task", "y"),
    [
        (NodeClassification(3), torch.tensor([2, -1, 0, -1])),
        (NodeClassification(2, multilabel=True), torch.tensor([[0.0, NAN], [NAN, NAN], [1.0, 0], [NAN, NAN]])),
        (NodeRegression(), torch.tensor([2.5, NAN, 0.5, NAN])),
    ],
)
def test_nodes_without_a_target_are_neither_trained_on_nor_scored(task: Task, y: Tensor) -> None:
    data = labelled(y, train_mask=EVERYWHERE, val_mask=torch.tensor([False, True, False, False]))
    task.check(data, ["train"])
    rows, targets = task.targets_of_graph(data)
    assert rows is not None
    assert (rows.tolist(), targets.size(0)) == ([0, 2], 2)
    out = torch.randn(4, task.num_outputs)
    before = task.score(out, data, "train")
    out[1] = out[3] = 1e6
    assert task.score(out, data, "train") == before
    assert math.isnan(task.score(out, data, "val"))
    with pytest.raises(InputError, match="val_mask must hold at least one node whose target is known"):
        task.check(data, ["val"])


def test_labels_that_are_unknown_have_no_part_in_the_loss() -> None:
    out = torch.tensor([[2.0, -1.0], [0.5, 3.0]])
    targets = torch.tensor([[1.0, NAN], [0.0, 1.0]])
    each = F.binary_cross_entropy_with_logits(out, targets.nan_to_num(), reduction="none")
    expected = (each[0, 0] + each[1].mean()) / 2
    torch.testing.assert_close(NodeClassification(2, multilabel=True).loss(out, targets), expected)


def test_weights_of_classes() -> None:
    out, y = torch.randn(4, 2), torch.tensor([0, 0, 0, 1])
    task = NodeClassification(2, class_weight=torch.tensor([0.5, 3.0]))
    each = F.cross_entropy(out, y, reduction="none")
    torch.testing.assert_close(task.loss(out, y), (each * torch.tensor([0.5, 0.5, 0.5, 3.0])).mean())
    labels = torch.tensor([[True, False], [False, True]])
    weighted = NodeClassification(2, multilabel=True, class_weight=torch.tensor([2.0, 5.0]))
    expected = F.binary_cross_entropy_with_logits(out[:2], labels.float(), pos_weight=torch.tensor([2.0, 5.0]))
    torch.testing.assert_close(weighted.loss(out[:2], labels), expected)


def test_balanced_weights() -> None:
    y, mask = torch.tensor([0, 0, 0, 1, 1, -1]), torch.tensor([True, True, True, True, False, True])
    data = labelled(y, train_mask=mask)
    task = NodeClassification(3).bound_to(Dataset.of(data), metric=None, class_weight="balanced")
    out = torch.randn(4, 3)
    # With PyTorch's division by the sum of weights, or without it: nodes weigh 1 on average.
    expected = F.cross_entropy(out, y[:4], weight=torch.tensor([1.0, 3.0, 1.0]))
    torch.testing.assert_close(task.loss(out, y[:4]), expected)
    labels = labelled(torch.tensor([[1.0], [0.0], [0.0], [NAN]]), train_mask=EVERYWHERE)
    one = NodeClassification(1, multilabel=True)
    balanced = one.bound_to(Dataset.of(labels), metric=None, class_weight="balanced")
    expected = F.binary_cross_entropy_with_logits(out[:3, :1], labels.y[:3], pos_weight=torch.tensor([2.0]))
    torch.testing.assert_close(balanced.loss(out[:3, :1], labels.y[:3]), expected)


@pytest.mark.parametrize("weight", [[1.0, 2.0], torch.ones(3), torch.tensor([1.0, -1.0]), torch.tensor([1.0, NAN])])
def test_odd_weights_are_refused(weight: Any) -> None:
    with pytest.raises(InputError, match=r"class_weight must be"):
        NodeClassification(2, class_weight=weight)


def test_integers_below_0_are_no_numbers_to_regress_on() -> None:
    """As classes they are unknown, and should not be left out without a word."""
    data = labelled(torch.tensor([-5, 3]), train_mask=torch.tensor([True, True]))
    with pytest.raises(InputError, match=r"must be floats if some are below 0.* from -5 to 3"):
        task_for(Dataset.of(data), "regression")
    data.y = data.y.float()
    assert task_for(Dataset.of(data), "regression").targets_of_graph(data)[1].tolist() == [[-5.0], [3.0]]


def test_a_regression_has_no_classes_to_weigh() -> None:
    with pytest.raises(InputError, match="class_weight belongs to classification"):
        NodeRegression().bound_to(Dataset.of(good()), metric=None, class_weight="balanced")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0.5, math.inf, 0]), "y must be numbers"),
        (torch.tensor([True, False, True]), "y must be numbers"),
        (torch.ones(3, 2), "y must hold 1 numbers per node, as the task says"),
        (torch.ones(2), "y must be numbers"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(y: Tensor, message: str) -> None:
    data = good()
    data.y = y
    with pytest.raises(InputError, match=message):
        NodeRegression().check(data, ["train"])


def test_outputs_of_a_regression() -> None:
    with pytest.raises(InputError, match="a tensor of 2 numbers per node, one for each target"):
        NodeRegression(2).loss(torch.zeros(3, 1), torch.zeros(3, 2))


# What is refused #####################################################################################################


def good() -> Data:
    return labelled(torch.tensor([0, 1, 1]), train_mask=torch.tensor([True, False, False]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("y", None, "y must hold the targets of nodes, but got none"),
        ("y", torch.eye(3).to_sparse(), "y must be a dense tensor"),
        ("y", torch.tensor([0, 1]), r"integers from 0, \[3\].* but got int64 \[2\]"),
        ("y", torch.tensor(1), r"integers from 0, \[3\]"),
        ("y", torch.tensor([0, -2, 1]), "from -2 to 1"),
        ("y", torch.tensor([0.5, 1, 0]), "y must be integers"),
        ("y", torch.tensor([True, False, True]), "y must hold 2 classes, as the task says"),
        ("y", torch.tensor([[0], [1], [1]]), r"y.squeeze\(1\)"),
        ("y", torch.tensor([[0.5], [1], [1]]), "from 0.5 to 1.0"),
        ("y", torch.tensor([0, 1, 2]), "y must hold 2 classes, as the task says"),
        ("y", torch.zeros(3, 2), "y must hold 2 classes, as the task says"),
        ("train_mask", torch.tensor([True, False]), r"train_mask must be bool, \[3\], but got bool \[2\]"),
        ("train_mask", torch.tensor([0, 1, 2]), "train_mask must be bool"),
        ("train_mask", torch.tensor([False] * 3), "train_mask must hold at least one node"),
        ("train_mask", None, "train_mask must hold at least one node"),
        ("val_mask", [True], r"val_mask must be bool, \[3\], but got a list"),
    ],
)
def test_labels_and_masks_that_do_not_fit_are_refused(name: str, value: Any, message: str) -> None:
    data, task = good(), NodeClassification(2)
    task.check(data, ["train"])
    data[name] = value
    with pytest.raises(InputError, match=message):
        task.check(data, ["train"])


def test_test_nodes_are_needed_only_in_a_graph_of_their_own() -> None:
    data = good()
    data.val_mask = ~data.train_mask
    NodeClassification(2).check_dataset(Dataset.of(data))
    with pytest.raises(InputError, match="test_mask must hold at least one node"):
        NodeClassification(2).check_dataset(Dataset("two", data, data, good()))
    del data.val_mask
    with pytest.raises(InputError, match="val_mask must hold at least one node"):
        NodeClassification(2).check_dataset(Dataset.of(data))
