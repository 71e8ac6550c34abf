"""The optimizer with its groups of weights, and the schedule of its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.training.options import Schedule


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
