"""The optimizer and the learning rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.training.options import Optimization, Schedule


def make_optimizer(model: nn.Module, options: Optimization) -> torch.optim.Optimizer:
    """Adam with the two weight-decay groups of the paper's experiments; its steps on a GPU can be captured.

    Example:
        >>> from gnnautoscale.models import APPNP
        >>> optimizer = make_optimizer(APPNP(8, 3), Optimization(weight_decay=0.1, weight_decay_other=0.0))
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.1, 0.0]
    """
    named = getattr(model, "decayed_modules", None)
    modules = named() if named else [module for module in model.modules() if isinstance(module, MessagePassing)]
    first = {id(weight): weight for module in modules for weight in module.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in first]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": options.weight_decay if own is None else own}
        for weights, own in ((list(first.values()), options.weight_decay_conv), (rest, options.weight_decay_other))
        if weights
    ]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return torch.optim.Adam(groups, lr=options.lr)
    # A captured step reads the learning rate from memory; each group has its own, since schedules write into it.
    groups = [{**group, "lr": torch.tensor(options.lr, device=device)} for group in groups]
    return torch.optim.Adam(groups, lr=torch.tensor(options.lr, device=device), fused=True, capturable=True)


class LearningRate:
    """Updates the learning rate after each epoch, see the option ``schedule``."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule, epochs: int) -> None:
        self._plateau = self._cosine = None
        if schedule == "plateau":
            self._plateau = lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=9, threshold=0.0)
        elif schedule == "cosine":
            self._cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    def step(self, val_score: float | None) -> None:
        """Update the rate, with the validation score if the epoch was evaluated."""
        if self._cosine is not None:
            self._cosine.step()
        elif self._plateau is not None and val_score is not None:
            self._plateau.step(val_score)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        scheduler = self._plateau or self._cosine
        return {} if scheduler is None else dict(scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        scheduler = self._plateau or self._cosine
        if scheduler is not None:
            scheduler.load_state_dict(state)
