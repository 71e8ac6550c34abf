"""The optimizer and the learning rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.training.options import Optimization, Schedule


def make_optimizer(model: nn.Module, options: Optimization, *, also: nn.Module | None = None) -> torch.optim.Optimizer:
    """Adam with the two weight-decay groups of the paper's experiments; its steps on a GPU can be captured.

    What is ``also`` trained counts among the other weights.
    """
    named = getattr(model, "decayed_modules", None)
    modules = named() if named else [module for module in model.modules() if isinstance(module, MessagePassing)]
    first = {id(weight): weight for module in modules for weight in module.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in first]
    rest += [] if also is None else list(also.parameters())
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": options.weight_decay if own is None else own}
        for weights, own in ((list(first.values()), options.weight_decay_conv), (rest, options.weight_decay_other))
        if weights
    ]
    if not any(weight.requires_grad for group in groups for weight in group["params"]):
        rule, fix = "a model to train has weights that need a gradient", "Pass a model with layers, not frozen."
        raise InputError(rule, got=f"{type(model).__name__}, which has none", fix=fix)
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return torch.optim.Adam(groups, lr=options.lr)
    # A captured step reads the learning rate from memory; each group has its own, since schedules write into it.
    groups = [{**group, "lr": torch.tensor(options.lr, device=device)} for group in groups]
    return torch.optim.Adam(groups, lr=torch.tensor(options.lr, device=device), fused=True, capturable=True)


class LearningRate:
    """Updates the learning rate after each epoch, see the option ``schedule``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, epochs: int, *, higher_is_better: bool = True
    ) -> None:
        self._scheduler: lr_scheduler.ReduceLROnPlateau | lr_scheduler.CosineAnnealingLR | None = None
        if schedule == "plateau":
            self._scheduler = lr_scheduler.ReduceLROnPlateau(
                optimizer,
                mode="max" if higher_is_better else "min",
                factor=0.5,
                patience=9,
                threshold=0.0,
            )
        elif schedule == "cosine":
            self._scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    def step(self, val_score: float | None) -> None:
        """Update the rate, with the validation score if the epoch was evaluated."""
        if isinstance(self._scheduler, lr_scheduler.CosineAnnealingLR):
            self._scheduler.step()
        elif self._scheduler is not None and val_score is not None:
            self._scheduler.step(val_score)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {} if self._scheduler is None else dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)
