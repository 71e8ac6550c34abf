"""Scores by name, against values by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_f1_score, multiclass_accuracy

from gnnautoscale.errors import InputError
from gnnautoscale.tasks import METRICS
from gnnautoscale.tasks.metrics import Kind, metric_named, roc_auc

NAN = math.nan


def test_loading_the_library_does_not_load_torchmetrics() -> None:
    code = "import sys, gnnautoscale; print('torchmetrics' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "False"


# Predictions 0, 1, 1, 2, 2 of the classes 0, 0, 1, 1, 2; nobody has class 3.
OUT = torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 9, 0]])
CLASSES = torch.tensor([0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 60.0),
        ("micro-F1", 60.0),
        ("balanced-accuracy", 100 * (1 / 2 + 1 / 2 + 1) / 3),
        ("macro-F1", 100 * (2 / 3 + 1 / 2 + 2 / 3) / 3),
    ],
)
def test_scores_of_classes_by_hand(name: str, expected: float) -> None:
    assert metric_named(name, "classes")(OUT, CLASSES) == pytest.approx(expected)


def test_what_is_computed_here_is_what_torchmetrics_computes() -> None:
    torch.manual_seed(0)
    out, classes = torch.randn(50, 4), torch.randint(4, (50,))
    expected = float(multiclass_accuracy(out, classes, num_classes=4, average="micro"))
    assert metric_named("accuracy", "classes")(out, classes) == pytest.approx(100 * expected)
    labels = (torch.rand(50, 4) < 0.3).float()
    expected = float(binary_f1_score((out > 0).long().flatten(), labels.long().flatten()))
    assert metric_named("micro-F1", "labels")(out, labels) == pytest.approx(100 * expected)


# The first label is told apart but for one pair of four, and the second one perfectly where it is known.
SCORES = torch.tensor([[3.0, 1], [1.0, 9], [2.0, -2], [-1.0, -1]])
LABELS = torch.tensor([[1.0, 1], [1.0, NAN], [0.0, 0], [0.0, 0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 100 * 6 / 7),
        ("micro-F1", 100 * 2 * 3 / (2 * 3 + 1)),
        ("macro-F1", 100 * (4 / 5 + 1) / 2),
        ("balanced-accuracy", 100 * (3 / 4 + 1) / 2),
        ("ROC-AUC", 100 * (3 / 4 + 1) / 2),
        ("average-precision", 100 * ((1 + 2 / 3) / 2 + 1) / 2),
    ],
)
def test_scores_of_labels_by_hand(name: str, expected: float) -> None:
    assert metric_named(name, "labels")(SCORES, LABELS) == pytest.approx(expected)


def test_of_two_classes_the_second_one_is_ranked() -> None:
    out = torch.tensor([[0.0, 2.0], [5.0, 6.0], [0.0, 1.5]])  # by difference: 2, 1, 1.5
    auc = metric_named("ROC-AUC", "classes")
    assert auc(out, torch.tensor([1, 0, 0])) == 100.0
    assert auc(out, torch.tensor([0, 1, 0])) == 0.0


def test_several_classes_are_ranked_against_the_rest_and_absent_ones_left_out() -> None:
    out = torch.tensor([[4.0, 0, 0], [0, 4.0, 0], [3.0, 0, 0]])
    # Class 0: node 0 above nodes 1 and 2; class 1: node 1 above node 2, whose class 0 is wrong; class 2: nobody.
    assert metric_named("ROC-AUC", "classes")(out, torch.tensor([0, 1, 1])) == pytest.approx(100 * (1 + 1) / 2)
    assert metric_named("ROC-AUC", "classes")(out, torch.tensor([1, 0, 1])) == pytest.approx(100 * (0 + 0) / 2)


def test_large_scores_are_not_squashed_together() -> None:
    assert roc_auc(torch.tensor([200.0, 100.0]), torch.tensor([True, False])) == 1.0
    assert roc_auc(torch.tensor([5.0, 5.0]), torch.tensor([True, False])) == 0.5


# Differences 1, -2, 0 and, where it is known, 3.
NUMBERS = torch.tensor([[1.0, 4.0], [2.0, NAN], [3.0, 8.0]])
GUESSES = torch.tensor([[2.0, 7.0], [0.0, 0.0], [3.0, 8.0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MAE", (1 + 2 + 0 + 3 + 0) / 5),
        ("RMSE", math.sqrt((1 + 4 + 0 + 9 + 0) / 5)),
        ("R2", ((1 - 5 / 2) + (1 - 9 / 8)) / 2),
    ],
)
def test_scores_of_numbers_by_hand(name: str, expected: float) -> None:
    assert metric_named(name, "numbers")(GUESSES, NUMBERS) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ROC-AUC", "average-precision", "balanced-accuracy"])
def test_without_negatives_there_is_nothing_to_rank(name: str) -> None:
    assert math.isnan(metric_named(name, "labels")(torch.ones(2, 1), torch.ones(2, 1)))


def test_equal_targets_have_no_r2() -> None:
    assert math.isnan(metric_named("R2", "numbers")(torch.ones(3, 1), torch.ones(3, 1)))


def test_which_way_is_better() -> None:
    assert {each.name for each in METRICS if not each.higher_is_better} == {"MAE", "RMSE"}
    assert {each.name for each in METRICS if not each.percent} == {"MAE", "RMSE", "R2"}


@pytest.mark.parametrize(("name", "kind"), [("rmse", "labels"), ("F2", "classes"), ("accuracy", "numbers")])
def test_names_that_do_not_fit_are_refused(name: str, kind: Kind) -> None:
    with pytest.raises(InputError, match=f"a metric of {kind} is one of"):
        metric_named(name, kind)


@pytest.mark.parametrize("spelling", ["roc_auc", "ROC AUC", "Roc-Auc"])
def test_spellings(spelling: str) -> None:
    assert metric_named(spelling, "classes").name == "ROC-AUC"


def test_bool_labels() -> None:
    there: Tensor = LABELS.nan_to_num() > 0.5
    assert metric_named("accuracy", "labels")(SCORES, there) == pytest.approx(100 * 6 / 8)
