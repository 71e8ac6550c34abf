"""Node tasks: one class, several labels, yes or no, or numbers for each node."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.tasks.metrics import Kind, metric_named
from gnnautoscale.tasks.task import ClassWeight, Task

SPLITS = ("train", "val", "test")


class NodeTask(Task):
    """Predict something for each node: ``y``, and a mask ``[num_nodes]`` (bool) for each split.

    A node may be in no split. Nodes without a known target are never trained on or scored, whatever the masks say.
    """

    scores_anywhere = True

    def __init__(self, num_outputs: int, kind: Kind, metric: str) -> None:
        self.num_outputs, self.kind = num_outputs, kind
        self._choose(metric)

    def _choose(self, metric: str) -> None:
        self._metric = metric_named(metric, self.kind)
        self.metric, self.higher_is_better = self._metric.name, self._metric.higher_is_better
        self.percent = self._metric.percent

    def bound_to(self, dataset: Dataset, *, metric: str | None, class_weight: ClassWeight) -> NodeTask:
        """See :meth:`Task.bound_to`."""
        changed = copy.copy(self)
        if metric is not None:
            changed._choose(metric)
        if class_weight != "none":
            changed._balance(dataset)
        return changed

    def _balance(self, dataset: Dataset) -> None:
        fix = "Leave class_weight out."
        raise InputError("class_weight belongs to classification", got="it with a regression", fix=fix)

    @property
    def knows_rows_only(self) -> bool:
        """See :meth:`Task.knows_rows_only`; a class derived elsewhere may know anything."""
        return type(self).__module__ == NodeTask.__module__

    @abstractmethod
    def check_targets(self, data: Data) -> None:
        """Refuse ``y`` of the wrong form."""

    def check(self, data: Data, splits: Sequence[str]) -> None:
        """Refuse targets or masks of the wrong form, and splits without targets."""
        self.check_targets(data)
        for name in (f"{split}_mask" for split in SPLITS):
            mask = data.get(name)
            if mask is not None:
                form = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (data.num_nodes,)
                need(form, f"{name} must be bool, [{data.num_nodes}]", mask, "Give each node one True or False.")
        if len(splits) > 1:  # else the graph is that of one split
            _check_disjoint(data)
        for split in splits:
            mask = data.get(f"{split}_mask")
            fix = f"Set data.{split}_mask to a bool tensor that is True for the {split} nodes."
            need(mask is not None and bool(mask.any()), f"{split}_mask must hold at least one node", None, fix)
            if not bool((mask & known_rows(data.y)).any()):
                rule = f"{split}_mask must hold at least one node whose target is known"
                raise InputError(rule, got="only unknown ones", fix="Fill them in, or choose other nodes.")

    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select the training nodes whose targets are known."""
        own = batch.batch_size
        y = batch.y[:own]
        rows = (batch.train_mask[:own] & known_rows(y)).nonzero().squeeze(1)
        y = self.typed(y)
        return (None, y) if rows.numel() == own else (rows, y[rows])

    @abstractmethod
    def typed(self, y: Tensor) -> Tensor:
        """Targets as the loss takes them: classes ``[n]`` as int64, others ``[n, num_outputs]``."""

    @abstractmethod
    def losses(self, out: Any, targets: Tensor) -> Tensor:
        """The loss of each row, ``[num_targets]``; see :meth:`loss` for the arguments."""

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """The mean loss over nodes."""
        return self.losses(out, targets).mean()

    @checked()
    def score(self, out: Tensor, data: Data, split: str) -> float:
        """Score a split by the task's metric."""
        mask = data.get(f"{split}_mask")
        if mask is None:
            return math.nan
        rows = (mask & known_rows(data.y)).nonzero().squeeze(1)
        if not rows.numel():
            return math.nan
        return self._metric(out[rows.to(out.device)], self.typed(data.y[rows.to(data.y.device)]).to(out.device))

    def identity(self, data: Data) -> tuple[Tensor | None, ...]:
        """The targets and the masks."""
        return data.y, *(data.get(f"{split}_mask") for split in SPLITS)

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """Number of nodes in each split."""
        masks = {split: graph.get(f"{split}_mask") for graph, splits in dataset.graphs() for split in splits}
        return {f"{split} nodes in split": 0 if mask is None else int(mask.sum()) for split, mask in masks.items()}


class NodeClassification(NodeTask):
    """Predict the class of each node, which of several labels it has, or whether it is of one kind.

    Each node may be in no split, or have no known target. ``y`` is one of

    * classes ``[num_nodes]``, integers from 0, and -1 if unknown: cross entropy, scored by accuracy;
    * labels ``[num_nodes, num_classes]``, 0 or 1 as bool or float, and NaN if unknown: binary cross entropy, scored by
      micro-F1. A node's loss is the mean over its known labels;
    * yes or no ``[num_nodes]``, with ``num_classes=1``: 0 or 1 as bool, float or integer: as one label, scored by
      accuracy. The model has one output.

    Args:
        num_classes: Number of classes, or of labels.
        multilabel: Whether a node can have several labels.
        metric: The score: ``"accuracy"``, ``"balanced-accuracy"``, ``"micro-F1"``, ``"macro-F1"``, ``"ROC-AUC"`` or
            ``"average-precision"``, in percent. The last two are means over labels, or over classes, each against the
            rest; of two classes they score the second.
        class_weight: A weight for each class, ``[num_classes]``: the loss is the mean over nodes of their loss times
            the weight of their class. For labels it is the weight of those that are there.

    Example:
        >>> task = NodeClassification(2)
        >>> everywhere = torch.tensor([True, True])
        >>> data = Data(x=torch.eye(2), y=torch.tensor([1, 1]), test_mask=everywhere)
        >>> task.score(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), data, "test")
        50.0
    """

    @checked(num_classes={"least": 1})
    def __init__(
        self,
        num_classes: int,
        *,
        multilabel: bool = False,
        metric: str | None = None,
        class_weight: Tensor | None = None,
    ) -> None:
        self.multilabel = multilabel
        labels = multilabel or num_classes == 1
        super().__init__(
            num_classes, "labels" if labels else "classes", metric or ("micro-F1" if multilabel else "accuracy")
        )
        self._weigh(class_weight)

    def _weigh(self, weight: Tensor | None) -> None:
        if weight is not None:
            fits = isinstance(weight, Tensor) and weight.shape == (self.num_outputs,) and weight.is_floating_point()
            rule = f"class_weight must be a tensor of positive floats, [{self.num_outputs}]"
            need(fits, rule, weight, "Give each class one weight.")
            need(bool((torch.isfinite(weight) & (weight > 0)).all()), rule, weight, "Give each class one weight.")
        # On each device once, since a captured step cannot wait for a copy.
        self._weights = {} if weight is None else {weight.device: weight.detach()}

    @staticmethod
    def of(dataset: Dataset) -> NodeClassification:
        """The task that the classes or labels of a data set pose."""
        for graph, _ in dataset.graphs():
            _check_classes(graph)
        y = dataset.train.y
        if y.dim() == 1 and kind_of(y) == "labels":
            return NodeClassification(1)
        # If no target is known there are none, which the check of the splits will say.
        return NodeClassification(dataset.num_classes or 2, multilabel=y.dim() == 2)

    def _balance(self, dataset: Dataset) -> None:
        self.balance(self.counts(dataset.train))

    def counts(self, data: Data) -> Tensor:
        """How many training nodes have each class or label, and of how many that is known, ``[2, num_outputs]``.

        Counts of the shares of a graph add up to those of the graph.
        """
        y = self.typed(data.y[data.train_mask & known_rows(data.y)])
        if self.kind == "labels":
            known = ~torch.isnan(y.float())
            return torch.stack([torch.nansum(y.float(), dim=0), known.sum(dim=0)]).double()
        there = torch.bincount(y, minlength=self.num_outputs)
        return torch.stack([there, torch.full_like(there, y.numel())]).double()

    def balance(self, counts: Tensor) -> None:
        """Weigh classes so that all have the same sum of weights over training nodes, and nodes 1 on average.

        Of each label, nodes that have it get the weight of those that do not. ``counts`` are those of :meth:`counts`.
        """
        there, known = counts.float()
        if self.kind == "labels":
            self._weigh((known - there).clamp(min=1) / there.clamp(min=1))
        else:
            self._weigh(known / ((there > 0).sum() * there.clamp(min=1)))

    def check_targets(self, data: Data) -> None:
        """Refuse ``y`` that does not hold as many classes or labels as the task says."""
        _check_classes(data)
        y = data.y
        if self.num_outputs == 1 and not self.multilabel:
            fits = y.numel() == data.num_nodes and bool(((y == 0) | (y == 1) | ~_known(y)).all())
            need(fits, f"y must be 0 or 1, [{data.num_nodes}], as the task says", y, _OTHER_TASK)
            return
        fits = (y.dim() == 2) == self.multilabel and (self.multilabel or not _is_label_like(y))
        found = y.size(1) if y.dim() == 2 else int(y.max()) + 1
        fits = fits and (found == self.num_outputs if self.multilabel else found <= self.num_outputs)
        rule = f"y must hold {self.num_outputs} {'labels' if self.multilabel else 'classes'}, as the task says"
        need(fits, rule, y, _OTHER_TASK)

    def typed(self, y: Tensor) -> Tensor:
        """See :meth:`NodeTask.typed`."""
        if self.kind == "classes":
            return y.long()
        return _as_column(y) if y.dim() == 1 else y

    def losses(self, out: Any, targets: Tensor) -> Tensor:
        """Cross entropy over classes, or over each known label by itself, for each row ``[num_targets]``."""
        width = out.size(1) if isinstance(out, Tensor) and out.dim() == 2 else 0
        # A class that no node of this graph has does no harm.
        if width < self.num_outputs or (self.kind == "labels" and width > self.num_outputs):
            raise wrong_outputs(out, f"{self.num_outputs} scores per node, one for each class", "classes")
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        weight = self._weight_on(out)
        if self.kind == "classes":
            losses = F.cross_entropy(out, targets, reduction="none")
            return losses if weight is None else losses * weight[targets]
        wanted = targets.to(out.dtype)
        losses = F.binary_cross_entropy_with_logits(out, wanted.nan_to_num(), pos_weight=weight, reduction="none")
        return mean_of_known(losses, wanted)

    def _weight_on(self, out: Tensor) -> Tensor | None:
        if not self._weights:
            return None
        if out.device not in self._weights:
            self._weights[out.device] = next(iter(self._weights.values())).to(out.device)
        return self._weights[out.device].to(out.dtype)

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """Number of classes, and number of nodes in each split."""
        classes = 2 if self.num_outputs == 1 and not self.multilabel else self.num_outputs
        return {"classes": classes, "multi-label": self.multilabel, **super().describe(dataset)}

    @checked(out={"dims": 2})
    def predictions(self, out: Tensor, data: Data) -> dict[str, Tensor]:
        """The class of each node, or whether it has each label; probabilities; and logits, the model's output."""
        if self.kind == "classes":
            return {"classes": out.argmax(dim=1), "probabilities": out.softmax(dim=1), "logits": out}
        logits = out if self.multilabel else out[:, 0]
        return {"classes": logits > 0, "probabilities": logits.sigmoid(), "logits": logits}

    def skew(self, data: Data, parts: Tensor) -> float:
        """Total variation between the classes of a part and of the graph, the mean over training nodes.

        Example:
            >>> y, everywhere = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
            >>> data, task = Data(x=torch.eye(4), y=y, train_mask=everywhere), NodeClassification(2)
            >>> task.skew(data, torch.tensor([0, 0, 1, 1])), task.skew(data, torch.tensor([0, 1, 0, 1]))
            (0.5, 0.0)
        """
        mask = (data.train_mask & known_rows(data.y)).cpu()
        y, num_parts = data.y.cpu()[mask], int(parts.max()) + 1
        if self.multilabel:
            counts = torch.zeros(num_parts, self.num_outputs, dtype=torch.double)
            counts.index_add_(0, parts[mask], y.double().nan_to_num())
        else:
            classes = max(self.num_outputs, 2)
            place = parts[mask] * classes + y.flatten().long()
            counts = torch.bincount(place, minlength=num_parts * classes).view(num_parts, -1).double()
        sizes = counts.sum(dim=1)
        shares = counts / sizes.clamp(min=1).unsqueeze(1)
        apart = 0.5 * (shares - counts.sum(dim=0) / sizes.sum().clamp(min=1)).abs().sum(dim=1)
        return float((apart * sizes).sum() / sizes.sum().clamp(min=1))


class NodeRegression(NodeTask):
    """Predict a number, or several, for each node.

    The data hold ``y``, ``[num_nodes]`` or ``[num_nodes, num_targets]``, with NaN where a number is unknown, and masks
    as in :class:`NodeClassification`. The loss is the squared error, the mean over nodes of the mean over their known
    numbers.

    Args:
        num_targets: How many numbers a node has.
        metric: The score: ``"RMSE"`` or ``"MAE"`` over all numbers, where less is better, or ``"R2"``, the mean over
            targets.

    Example:
        >>> task, everywhere = NodeRegression(metric="MAE"), torch.tensor([True, True])
        >>> data = Data(x=torch.eye(2), y=torch.tensor([1.0, 2.0]), test_mask=everywhere)
        >>> task.score(torch.tensor([[1.5], [2.0]]), data, "test")
        0.25
    """

    @checked(num_targets={"least": 1})
    def __init__(self, num_targets: int = 1, *, metric: str | None = None) -> None:
        super().__init__(num_targets, "numbers", metric or "RMSE")

    @staticmethod
    def of(dataset: Dataset) -> NodeRegression:
        """The task that the numbers of a data set pose."""
        for graph, _ in dataset.graphs():
            _check_numbers(graph)
        y = dataset.train.y
        return NodeRegression(1 if y.dim() == 1 else y.size(1))

    def check_targets(self, data: Data) -> None:
        """Refuse ``y`` that does not hold as many numbers as the task says."""
        _check_numbers(data)
        fits = (1 if data.y.dim() == 1 else data.y.size(1)) == self.num_outputs
        need(fits, f"y must hold {self.num_outputs} numbers per node, as the task says", data.y, _OTHER_TASK)

    def typed(self, y: Tensor) -> Tensor:
        """See :meth:`NodeTask.typed`."""
        return _as_column(y if y.is_floating_point() else y.float()) if y.dim() == 1 else y

    def losses(self, out: Any, targets: Tensor) -> Tensor:
        """Squared error of known numbers, for each row ``[num_targets]``."""
        if not isinstance(out, Tensor) or out.dim() != 2 or out.size(1) != self.num_outputs:
            raise wrong_outputs(out, f"{self.num_outputs} numbers per node, one for each target", "targets")
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        wanted = targets.to(out.dtype)
        return mean_of_known(F.mse_loss(out, wanted.nan_to_num(), reduction="none"), wanted)

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """Number of targets, and number of nodes in each split."""
        return {"targets": self.num_outputs, **super().describe(dataset)}

    def predictions(self, out: Tensor, data: Data) -> dict[str, Tensor]:
        """The numbers."""
        return {"values": out}


# Targets #############################################################################################################

_OTHER_TASK = "Leave task out to take the one that fits the data."


def kind_of(y: Tensor) -> Kind:
    """What targets are: integers are classes, 0 and 1 as bool or float are labels, other floats are numbers.

    Example:
        >>> kind_of(torch.tensor([0, 2])), kind_of(torch.tensor([0.0, 1.0])), kind_of(torch.tensor([0.5]))
        ('classes', 'labels', 'numbers')
    """
    if not _is_label_like(y):
        return "classes"
    return "labels" if bool(((y == 0) | (y == 1) | ~_known(y)).all()) else "numbers"


def _check_disjoint(data: Data) -> None:
    """Refuse nodes that are trained on and scored as if they were not.

    Validation and test may share nodes, and to validate on exactly the training nodes is a choice, not a slip.
    """
    train = data.get("train_mask")
    for name in ("val_mask", "test_mask"):
        mask = data.get(name)
        both = 0 if train is None or mask is None else int((train & mask & known_rows(data.y)).sum())
        if both and not (name == "val_mask" and torch.equal(train, mask)):
            fix = f"Take them out of one of the two: data.{name} &= ~data.train_mask."
            raise InputError(f"train_mask and {name} must have no node in common", got=f"{both} nodes in both", fix=fix)


def known_rows(y: Tensor) -> Tensor:
    """Which nodes have a known target, at least one of several, ``[num_nodes]``."""
    known = _known(y)
    return known if known.dim() == 1 else known.any(dim=1)


def mean_of_known(losses: Tensor, targets: Tensor) -> Tensor:
    """For each node the mean of its losses where targets are not NaN, both ``[n, num_outputs]``; returns ``[n]``."""
    known = ~torch.isnan(targets)
    # Each row has a known target; none of these operations waits for a GPU.
    return (losses * known).sum(dim=1) / known.sum(dim=1)


def wrong_outputs(out: Any, what: str, each: str) -> InputError:
    """The error of a model with outputs of another form."""
    got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    fix = f"Give its last layer as many outputs as there are {each}."
    return InputError(f"the model must return a tensor of {what}", got=got, fix=fix)


def need(holds: bool, rule: str, value: object, fix: str) -> None:
    """Refuse a value, described by its form, unless a rule holds."""
    if not holds:
        raise InputError(rule, got=_form(value), fix=fix)


def _known(y: Tensor) -> Tensor:
    if y.is_floating_point():
        return ~torch.isnan(y)
    return torch.ones_like(y, dtype=torch.bool) if y.dtype == torch.bool else y >= 0


def _is_label_like(y: Tensor) -> bool:
    return y.is_floating_point() or y.dtype == torch.bool


def _as_column(y: Tensor) -> Tensor:
    return y.unsqueeze(1)


def _check_dense(data: Data) -> Tensor:
    y: Tensor = data.get("y")
    fix = "Set data.y; in a table of nodes it is the column y, label, class or target."
    need(y is not None, "y must hold the targets of nodes", y, fix)
    dense = isinstance(y, Tensor) and y.layout == torch.strided and not y.is_complex()
    need(dense, "y must be a dense tensor", y, "Set data.y to one.")
    return y


def _check_classes(data: Data) -> None:
    y, num_nodes = _check_dense(data), data.num_nodes
    label_like = _is_label_like(y)
    classes = y.shape == (num_nodes,) and not label_like and bool((y >= -1).all())
    labels = y.dim() in (1, 2) and y.size(0) == num_nodes and label_like and kind_of(y) == "labels"
    labels = labels and (y.dim() == 1 or y.size(1) > 1)  # a column of 0 and 1 may as well be classes
    need(
        classes or labels,
        f"y must be integers from 0, [{num_nodes}], or 0 and 1 as bool or float, [{num_nodes}, labels]",
        y,
        "Give each node one row, classes from 0 (-1 and NaN if unknown); use y.squeeze(1) if y is [nodes, 1].",
    )


def _check_numbers(data: Data) -> None:
    y, num_nodes = _check_dense(data), data.num_nodes
    fits = y.dim() in (1, 2) and y.size(0) == num_nodes and y.dtype != torch.bool and not y.is_complex()
    rule = f"y must be numbers, [{num_nodes}] or [{num_nodes}, targets]"
    need(fits and not bool(torch.isinf(y).any()), rule, y, "Give each node one row; NaN stands for unknown.")
    told_apart = y.is_floating_point() or not bool((y < 0).any())
    rule = "numbers to regress on must be floats if some are below 0, since such integers are unknown classes"
    need(told_apart, rule, y, "Convert them with y.float(), and unknown ones to NaN; in a file, write -1.0.")


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return "none" if value is None else f"a {type(value).__name__}"
    form = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    plain = value.numel() and not value.is_sparse and not value.is_complex()
    return form if not plain else f"{form} from {value.min().item()} to {value.max().item()}"
