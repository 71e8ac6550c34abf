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
from gnnautoscale.tasks import NodeClassification, task_for

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
    assert NodeClassification(2).predictions(out)["classes"].tolist() == [0, 1]
    assert NodeClassification(2, multilabel=True).predictions(out)["classes"].tolist() == [[1, 1], [0, 1]]
    assert NodeClassification(2).predictions(out)["scores"] is out


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


# What is refused #####################################################################################################


def good() -> Data:
    return labelled(torch.tensor([0, 1, 1]), train_mask=torch.tensor([True, False, False]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("y", None, "y must be a dense tensor, but got none"),
        ("y", torch.eye(3).to_sparse(), "y must be a dense tensor"),
        ("y", torch.tensor([0, 1]), r"integers from 0, \[3\].* but got int64 \[2\]"),
        ("y", torch.tensor(1), r"integers from 0, \[3\]"),
        ("y", torch.tensor([0, -1, 1]), "from -1 to 1"),
        ("y", torch.tensor([0.5, 1, 0]), "y must be integers"),
        ("y", torch.tensor([True, False, True]), "y must be integers"),
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
