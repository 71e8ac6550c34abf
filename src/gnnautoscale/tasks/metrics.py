"""Scores by name, computed by torchmetrics.

What runs after every epoch by default, accuracy and micro-F1, is computed here, since loading that library takes a
second; tests compare both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gnnautoscale._util import check_names

#: What a row of targets holds: one class; labels, each 0 or 1; or numbers.
Kind = Literal["classes", "labels", "numbers"]


@dataclass(frozen=True)
class Metric:
    """A way to score outputs.

    Attributes:
        name: As shown.
        compute: Takes outputs ``[n, num_outputs]`` and known targets, classes ``[n]`` (int64) or the others
            ``[n, num_outputs]`` with NaN where one is unknown; returns the score as a share, or NaN if it is undefined.
        kinds: The kinds of targets that it scores.
        higher_is_better: Whether larger scores are better.
        percent: Whether scores are shares that are shown in percent.
    """

    name: str
    compute: Callable[[Tensor, Tensor], float]
    kinds: tuple[Kind, ...] = ("classes", "labels")
    higher_is_better: bool = True
    percent: bool = True

    def __call__(self, out: Tensor, targets: Tensor) -> float:
        """The score, in percent if the metric is a share."""
        return self.compute(out, targets) * (100.0 if self.percent else 1.0)


def metric_named(name: str, kind: Kind) -> Metric:
    """The metric of a name, in any spelling of case, dashes and blanks, for a kind of targets.

    Example:
        >>> metric_named("macro_f1", "classes").name
        'macro-F1'
        >>> metric_named("rmse", "classes")
        Traceback (most recent call last):
        ...
        gnnautoscale.errors.InputError: a metric of classes is one of accuracy, balanced-accuracy, ...
    """
    fitting = {each.name.lower(): each for each in METRICS if kind in each.kinds}
    plain = name.lower().replace("_", "-").replace(" ", "-")
    names = ", ".join(each.name for each in fitting.values())
    check_names([plain], fitting, f"a metric of {kind} is one of {names}", "Choose one of these.")
    return fitting[plain]


# Classes and labels ##################################################################################################


def _accuracy(out: Tensor, targets: Tensor) -> float:
    if targets.dim() == 1:
        return float((out.argmax(dim=-1) == targets).double().mean())
    predicted, wanted = _known(out, targets)
    return float(((predicted > 0) == (wanted > 0.5)).double().mean())


def _micro_f1(out: Tensor, targets: Tensor) -> float:
    if targets.dim() == 1:
        return _accuracy(out, targets)  # each miss of one class is a false alarm of another
    scores, wanted = _known(out, targets)
    predicted, there = scores > 0, wanted > 0.5
    either = int(predicted.sum()) + int(there.sum())
    return 2 * int((predicted & there).sum()) / either if either else math.nan


def _macro_f1(out: Tensor, targets: Tensor) -> float:
    score: Callable[..., Any]
    if targets.dim() == 1:
        from torchmetrics.functional.classification import multiclass_f1_score as score

        return float(score(out, targets, num_classes=out.size(1), average="macro", validate_args=False))
    from torchmetrics.functional.classification import binary_f1_score as score

    found = (score((scores > 0).long(), there.long(), validate_args=False) for scores, there in _columns(out, targets))
    return _mean(float(each) for each in found)


def _balanced_accuracy(out: Tensor, targets: Tensor) -> float:
    from torchmetrics.functional.classification import multiclass_recall

    def balanced(predicted: Tensor, wanted: Tensor, count: int) -> float:
        recalls = multiclass_recall(predicted, wanted, num_classes=count, average="none", validate_args=False)
        return float(
            recalls[torch.bincount(wanted, minlength=count) > 0].double().mean()
        )  # a class that no node has cannot be recalled

    if targets.dim() == 1:
        return balanced(out.argmax(dim=-1), targets, out.size(1))
    columns = _two_sided(_columns(out, targets))
    return _mean(balanced((scores > 0).long(), there.long(), 2) for scores, there in columns)


def roc_auc(scores: Tensor, there: Tensor) -> float:
    """How often a positive scores higher than a negative, ``scores`` and ``there`` (bool) being ``[n]``.

    Example:
        >>> roc_auc(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True]))
        0.5
    """
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(_ranks(scores), there.long(), validate_args=False))


def average_precision(scores: Tensor, there: Tensor) -> float:
    """Area under the curve of precision over recall, ``scores`` and ``there`` (bool) being ``[n]``.

    Example:
        >>> average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, False]))
        1.0
    """
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(_ranks(scores), there.long(), validate_args=False))


def _per_column(score: Callable[[Tensor, Tensor], float]) -> Callable[[Tensor, Tensor], float]:
    """The mean of a score over labels; of two classes the second one's; else that of each class against the rest."""

    def mean(out: Tensor, targets: Tensor) -> float:
        columns = _columns(out, targets) if targets.dim() == 2 else _against_the_rest(out, targets)
        return _mean(score(*column) for column in _two_sided(columns))

    return mean


def _against_the_rest(out: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if out.size(1) == 2:
        yield out[:, 1] - out[:, 0], targets == 1
        return
    shares = out.double().softmax(dim=1)  # comparable between nodes
    for number in range(out.size(1)):
        yield shares[:, number], targets == number


def _columns(out: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of each label, and whether it is there, where that is known."""
    for column in range(targets.size(1)):
        scores, wanted = _known(out[:, column], targets[:, column])
        yield scores, wanted > 0.5


def _two_sided(columns: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Those with positives and negatives, since without one of them there is nothing to tell apart."""
    return ((scores, there) for scores, there in columns if bool(there.any()) and not bool(there.all()))


def _ranks(scores: Tensor) -> Tensor:
    """Numbers from 0 to 1 in the same order, with the same ties; torchmetrics would squash others until they tie."""
    ranks: Tensor
    values, ranks = torch.unique(scores, return_inverse=True)
    return ranks.double().div(values.numel())


# Numbers #############################################################################################################


def _mean_absolute_error(out: Tensor, targets: Tensor) -> float:
    from torchmetrics.functional.regression import mean_absolute_error

    return float(mean_absolute_error(*_known(out.double(), targets.double())))


def _root_mean_squared_error(out: Tensor, targets: Tensor) -> float:
    from torchmetrics.functional.regression import mean_squared_error

    return float(mean_squared_error(*_known(out.double(), targets.double()), squared=False))


def _r2(out: Tensor, targets: Tensor) -> float:
    from torchmetrics.functional.regression import r2_score

    pairs = (_known(out[:, at].double(), targets[:, at].double()) for at in range(targets.size(1)))
    # Of equal targets there is nothing to explain.
    return _mean(float(r2_score(*pair)) for pair in pairs if pair[1].numel() > 1 and bool(pair[1].var() > 0))


def _known(out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets where these are not NaN, ``[count]``."""
    known = ~torch.isnan(targets) if targets.is_floating_point() else torch.ones_like(targets, dtype=torch.bool)
    return out[known], targets[known]


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan


METRICS = (
    Metric("accuracy", _accuracy),
    Metric("balanced-accuracy", _balanced_accuracy),
    Metric("micro-F1", _micro_f1),
    Metric("macro-F1", _macro_f1),
    Metric("ROC-AUC", _per_column(roc_auc)),
    Metric("average-precision", _per_column(average_precision)),
    Metric("MAE", _mean_absolute_error, ("numbers",), higher_is_better=False, percent=False),
    Metric("RMSE", _root_mean_squared_error, ("numbers",), higher_is_better=False, percent=False),
    Metric("R2", _r2, ("numbers",), percent=False),
)
