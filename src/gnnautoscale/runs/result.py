"""What training gives: curves, scores, times and memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """What an epoch gave.

    Attributes:
        number: From 1.
        loss: Mean training loss over the epoch's training nodes, without penalties.
        scores: Score on ``"train"``, ``"val"`` and ``"test"``; empty when the epoch was not evaluated.
        learning_rate: The learning rate it was trained with.
        seconds: Time of training, with waiting for batches, without evaluation and refresh.
    """

    number: int
    loss: float
    scores: dict[str, float]
    learning_rate: float
    seconds: float


@dataclass
class FitResult:
    """What training gave.

    Attributes:
        epochs: The curves.
        best_epoch: Number of the epoch with the best validation score, whose weights the model has now.
        scores: Score of that epoch on ``"train"``, ``"val"`` and ``"test"``.
        metric: Name of the score, such as ``"accuracy"``.
        steps: Number of optimizer steps.
        seconds: Time spent on ``"partition"``, ``"train"``, ``"refresh"``, ``"evaluate"`` and ``"checkpoint"``.
        peak_memory: Bytes in use at the peak of training, or ``None`` where that cannot be measured. Evaluations count,
            except in the modes ``"cluster"`` and ``"sage"``, where they run on the whole graph at once.
        history_bytes: Bytes that the histories take.
        connectivity: Halo nodes per batch node, the mean over the parts; 0 in modes without a halo.
        options: What :func:`fit` was called with.
        how: How training steps were run, in words.
        storage: Where histories live, and why there, in words; empty in modes without histories.
    """

    metric: str
    options: dict[str, Any]
    epochs: list[Epoch] = field(default_factory=list)
    best_epoch: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int | None = None
    history_bytes: int = 0
    connectivity: float = 0.0
    how: str = ""
    storage: str = ""

    @property
    def evaluations_since_best(self) -> int:
        """Number of evaluations after that of the best epoch."""
        return sum(bool(epoch.scores) and epoch.number > self.best_epoch for epoch in self.epochs)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        values: dict[str, Any] = jsonable(asdict(self))
        return values


def jsonable(value: Any) -> Any:
    """The value with numbers that JSON does not have replaced by ``None``."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
