"""Node classification: classes, or several labels per node."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError

Objective = Callable[[Any, Tensor], Tensor]


def score(out: Tensor, y: Tensor, mask: Tensor) -> float:
    """Accuracy of class scores, or micro-averaged F1 of multi-label scores, in percent.

    Args:
        out: Scores, ``[num_nodes, num_classes]``.
        y: Classes ``[num_nodes]``, or labels 0 and 1 ``[num_nodes, num_classes]``.
        mask: The nodes that count, ``[num_nodes]``.

    Example:
        >>> score(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]), torch.tensor([True, True]))
        50.0
    """
    out, y = out[mask], y[mask]
    if not y.size(0):
        return math.nan
    if y.dim() == 1:
        return 100.0 * float((out.argmax(dim=-1) == y).double().mean())
    predicted, wanted = out > 0, y > 0.5
    both = int((predicted & wanted).sum())
    either = int(predicted.sum()) + int(wanted.sum())
    return 100.0 * 2 * both / either if either else math.nan


def class_loss(num_classes: int, out: Any, y: Tensor) -> Tensor:
    """Cross entropy over classes, or over each label by itself."""
    if not isinstance(out, Tensor) or out.dim() != 2 or out.size(1) != num_classes:
        raise InputError(
            f"the model must return a tensor of {num_classes} scores per node, one for each class",
            got=f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
            fix="Give its last layer as many outputs as there are classes.",
        )
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return F.cross_entropy(out, y) if y.dim() == 1 else F.binary_cross_entropy_with_logits(out, y.to(out.dtype))


def evaluate(dataset: Dataset, output: Callable[[str], Tensor]) -> dict[str, float]:
    """The scores of all splits, from the model's output for all nodes of each split's graph."""
    scores: dict[str, float] = {}
    outputs: dict[int, Tensor] = {}
    for split, graph in (("train", dataset.train), ("val", dataset.val), ("test", dataset.test)):
        if id(graph) not in outputs:
            outputs[id(graph)] = output(split)
            if not bool(torch.isfinite(outputs[id(graph)]).all()):
                raise FloatingPointError("the model's outputs are not finite any more")
        scores[split] = score(outputs[id(graph)], graph.y.cpu(), graph[f"{split}_mask"].cpu())
    return scores
