"""What training is made of besides the model and its batches: objective, score, optimizer, schedule and clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.datasets import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.options import Schedule


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


def make_optimizer(model: nn.Module, lr: float, decay_conv: float, decay_other: float) -> torch.optim.Optimizer:
    """Adam with the two weight-decay groups of the paper's experiments; on a GPU such that steps can be captured.

    Args:
        model: The model, on its device.
        lr: Learning rate.
        decay_conv: Weight decay of the message-passing layers, or of what ``model.decayed_modules()`` names.
        decay_other: Weight decay of all other weights.
    """
    named = getattr(model, "decayed_modules", None)
    modules = named() if named else [module for module in model.modules() if isinstance(module, MessagePassing)]
    first = {id(weight): weight for module in modules for weight in module.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in first]
    groups = [
        {"params": list(first.values()), "weight_decay": decay_conv},
        {"params": rest, "weight_decay": decay_other},
    ]
    groups = [group for group in groups if group["params"]]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return torch.optim.Adam(groups, lr=lr)
    # A captured step reads the learning rate from memory; each group has its own, since schedules write into it.
    groups = [{**group, "lr": torch.tensor(lr, device=device)} for group in groups]
    return torch.optim.Adam(groups, lr=torch.tensor(lr, device=device), fused=True, capturable=True)


class LearningRate:
    """Moves the learning rate on after each epoch.

    Args:
        optimizer: Has the rates.
        schedule: See :func:`gnnautoscale.fit`.
        epochs: Number of epochs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule, epochs: int) -> None:
        self._plateau = self._cosine = None
        if schedule == "plateau":
            self._plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, mode="max", factor=0.5, patience=9, threshold=0.0
            )
        elif schedule == "cosine":
            self._cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    def step(self, val_score: float | None) -> None:
        """Move on, with the validation score if the epoch was evaluated."""
        if self._cosine is not None:
            self._cosine.step()
        elif self._plateau is not None and val_score is not None:
            self._plateau.step(val_score)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on from here."""
        scheduler = self._plateau or self._cosine
        return {} if scheduler is None else dict(scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        scheduler = self._plateau or self._cosine
        if scheduler is not None:
            scheduler.load_state_dict(state)


class Clock:
    """Adds up the time of named pieces of work; a piece inside of another one is not counted twice."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time in this context for a piece of work."""
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work that was launched belongs to the piece that launched it
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] = self.total(self._running[-1]) + now - self._since
        self._since = now

    def total(self, name: str) -> float:
        """The time of a piece of work so far."""
        return self._seconds.get(name, 0.0)
