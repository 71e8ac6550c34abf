"""Node classification: one class, or several labels, per node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.tasks.task import Task


class NodeClassification(Task):
    """Predict the class of each node, or which of several labels it has.

    The data hold ``y``, either classes ``[num_nodes]`` (integers from 0) or labels ``[num_nodes, num_classes]`` (0 or
    1, as bool or float), and a mask ``[num_nodes]`` (bool) for each split. Classes are trained with cross entropy and
    scored by accuracy; labels are trained with binary cross entropy and scored by micro-F1. Scores are in percent.

    Args:
        num_classes: Number of classes, or of labels.
        multilabel: Whether a node can have several labels.

    Example:
        >>> task = NodeClassification(2)
        >>> everywhere = torch.tensor([True, True])
        >>> data = Data(x=torch.eye(2), y=torch.tensor([1, 1]), test_mask=everywhere)
        >>> task.score(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), data, "test")
        50.0
    """

    scores_anywhere = True

    def __init__(self, num_classes: int, *, multilabel: bool = False) -> None:
        self.num_outputs = num_classes
        self.multilabel = multilabel
        self.metric = "micro-F1" if multilabel else "accuracy"

    @staticmethod
    def of(dataset: Dataset) -> NodeClassification:
        """The task that the labels of a data set pose."""
        for graph, _ in dataset.graphs():
            _check_labels(graph)
        return NodeClassification(dataset.num_classes, multilabel=dataset.train.y.dim() == 2)

    def check(self, data: Data, splits: Sequence[str]) -> None:
        """Refuse labels or masks of the wrong form, and empty splits."""
        _check_labels(data)
        fits = (data.y.dim() == 2) == self.multilabel
        found = data.y.size(1) if data.y.dim() == 2 else int(data.y.max()) + 1
        fits = fits and (found == self.num_outputs if self.multilabel else found <= self.num_outputs)
        rule = f"y must hold {self.num_outputs} {'labels' if self.multilabel else 'classes'}, as the task says"
        _need(fits, rule, data.y, "Leave task out to take the one that fits the data.")
        for name in ("train_mask", "val_mask", "test_mask"):
            mask = data.get(name)
            if mask is not None:
                form = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (data.num_nodes,)
                _need(form, f"{name} must be bool, [{data.num_nodes}]", mask, "Give each node one True or False.")
        for split in splits:
            mask = data.get(f"{split}_mask")
            fix = f"Set data.{split}_mask to a bool tensor that is True for the {split} nodes."
            _need(mask is not None and bool(mask.any()), f"{split}_mask must hold at least one node", None, fix)

    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select the training nodes, with their classes as int64 or their labels as they are."""
        own = batch.batch_size
        y = batch.y[:own] if self.multilabel else batch.y[:own].long()
        rows = batch.train_mask[:own].nonzero().squeeze(1)
        return (None, y) if rows.numel() == own else (rows, y[rows])

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """Cross entropy over classes, or over each label by itself."""
        width = out.size(1) if isinstance(out, Tensor) and out.dim() == 2 else 0
        # A class that no node of this graph has does no harm.
        if width < self.num_outputs or (self.multilabel and width > self.num_outputs):
            raise InputError(
                f"the model must return a tensor of {self.num_outputs} scores per node, one for each class",
                got=f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
                fix="Give its last layer as many outputs as there are classes.",
            )
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        if not self.multilabel:
            return F.cross_entropy(out, targets)
        return F.binary_cross_entropy_with_logits(out, targets.to(out.dtype))

    def score(self, out: Tensor, data: Data, split: str) -> float:
        """Accuracy of classes, or micro-averaged F1 of labels, in percent."""
        mask = data.get(f"{split}_mask")
        if mask is None or not bool(mask.any()):
            return math.nan
        rows = mask.nonzero().squeeze(1)
        out, y = out[rows.to(out.device)], data.y[rows].to(out.device)
        if not self.multilabel:
            return 100.0 * float((out.argmax(dim=-1) == y).double().mean())
        predicted, wanted = out > 0, y > 0.5
        both = int((predicted & wanted).sum())
        either = int(predicted.sum()) + int(wanted.sum())
        return 100.0 * 2 * both / either if either else math.nan

    def identity(self, data: Data) -> tuple[Tensor | None, ...]:
        """The labels and the masks."""
        return data.y, *(data.get(f"{split}_mask") for split in ("train", "val", "test"))

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """Number of classes, and number of nodes in each split."""
        masks = {split: graph.get(f"{split}_mask") for graph, splits in dataset.graphs() for split in splits}
        nodes = {f"{split} nodes in split": 0 if mask is None else int(mask.sum()) for split, mask in masks.items()}
        return {"classes": self.num_outputs, "multi-label": self.multilabel, **nodes}

    def predictions(self, out: Tensor) -> dict[str, Tensor]:
        """The scores, and the class of each node or whether it has each label."""
        return {"scores": out, "classes": out > 0 if self.multilabel else out.argmax(dim=1)}

    def skew(self, data: Data, parts: Tensor) -> float:
        """Total variation between the classes of a part and of the graph, the mean over training nodes.

        Example:
            >>> y, everywhere = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
            >>> data, task = Data(x=torch.eye(4), y=y, train_mask=everywhere), NodeClassification(2)
            >>> task.skew(data, torch.tensor([0, 0, 1, 1])), task.skew(data, torch.tensor([0, 1, 0, 1]))
            (0.5, 0.0)
        """
        mask = data.train_mask.cpu()
        y, num_parts = data.y.cpu()[mask], int(parts.max()) + 1
        if self.multilabel:
            counts = torch.zeros(num_parts, self.num_outputs, dtype=torch.double)
            counts.index_add_(0, parts[mask], y.double())
        else:
            place = parts[mask] * self.num_outputs + y
            counts = torch.bincount(place, minlength=num_parts * self.num_outputs).view(num_parts, -1).double()
        sizes = counts.sum(dim=1)
        shares = counts / sizes.clamp(min=1).unsqueeze(1)
        apart = 0.5 * (shares - counts.sum(dim=0) / sizes.sum().clamp(min=1)).abs().sum(dim=1)
        return float((apart * sizes).sum() / sizes.sum().clamp(min=1))


def task_for(dataset: Dataset) -> Task:
    """The task that fits the targets of a data set: node classification.

    Example:
        >>> task_for(Dataset.of(Data(x=torch.eye(2), y=torch.tensor([0, 1])))).metric
        'accuracy'
    """
    return NodeClassification.of(dataset)


def _check_labels(data: Data) -> None:
    y, num_nodes = data.get("y"), data.num_nodes
    _need(isinstance(y, Tensor) and y.layout == torch.strided, "y must be a dense tensor", y, "Set data.y to one.")
    integers = not y.is_floating_point() and y.dtype != torch.bool
    classes = y.shape == (num_nodes,) and integers and bool((y >= 0).all())
    labels = y.dim() == 2 and y.size(0) == num_nodes and not integers and bool(((y == 0) | (y == 1)).all())
    _need(
        classes or labels,
        f"y must be integers from 0, [{num_nodes}], or 0 and 1 as bool or float, [{num_nodes}, labels]",
        y,
        "Give each node one row, classes from 0; use y.squeeze(1) if y is [nodes, 1].",
    )


def _need(holds: bool, rule: str, value: object, fix: str) -> None:
    if not holds:
        raise InputError(rule, got=_form(value), fix=fix)


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return "none" if value is None else f"a {type(value).__name__}"
    form = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return form if not value.numel() or value.is_sparse else f"{form} from {value.min().item()} to {value.max().item()}"
