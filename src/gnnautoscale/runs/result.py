"""The result of training: curves, scores, times and memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from gnnautoscale._util import html_table
from gnnautoscale.attach import Verification


@dataclass(frozen=True)
class Epoch:
    """Loss, scores and time of an epoch.

    Attributes:
        number: From 1.
        loss: Mean training loss over the epoch's training nodes, without penalties.
        scores: Scores on ``"train"``, ``"val"`` and ``"test"``; empty if the epoch was not evaluated.
        seconds: Training time, including waits for batches, but neither evaluation nor refresh.
    """

    number: int
    loss: float
    scores: dict[str, float]
    learning_rate: float
    seconds: float


@dataclass(repr=False)
class FitResult:
    """The result of training.

    Attributes:
        epochs: The curves.
        best_epoch: The epoch with the best validation score; the model has its weights.
        scores: Scores of that epoch on ``"train"``, ``"val"`` and ``"test"``.
        metric: Name of the score, such as ``"accuracy"``.
        higher_is_better: Whether larger scores are better.
        percent: Whether scores are in percent.
        steps: Number of optimizer steps.
        seconds: Time spent on ``"partition"``, ``"train"``, ``"refresh"``, ``"evaluate"``, ``"checkpoint"`` and
            ``"verify"``.
        peak_memory: Peak of training in bytes, or ``None`` if it cannot be measured. It includes evaluations, except in
            the modes ``"cluster"`` and ``"sage"``, which evaluate on the whole graph at once.
        history_bytes: Size of the histories in bytes, and of their gradients.
        connectivity: Halo nodes per batch node, averaged over the parts; 0 in modes without a halo.
        options: The options of :func:`fit`.
        how: How training steps ran, in words.
        storage: Where the histories are, and why, in words; empty in modes without histories.
        verification: What :func:`verify` found for the trained model, if it was asked for and could run.
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
    verification: Verification | None = None
    higher_is_better: bool = True
    percent: bool = True

    @property
    def evaluations_since_best(self) -> int:
        """Number of evaluations after the best epoch."""
        return sum(bool(epoch.scores) and epoch.number > self.best_epoch for epoch in self.epochs)

    def seconds_to(self, score: float) -> float:
        """Seconds of partitioning and training until a validation score was reached; infinite if it never was.

        Evaluations do not count, and what happens between them is not seen.

        Example:
            >>> curve = [Epoch(1, 0.9, {"val": 60.0}, 0.01, 2.0), Epoch(2, 0.5, {"val": 80.0}, 0.01, 2.0)]
            >>> FitResult("accuracy", {}, curve, seconds={"partition": 1.0}).seconds_to(75.0)
            5.0
        """
        seconds, sign = self.seconds.get("partition", 0.0), 1 if self.higher_is_better else -1
        for epoch in self.epochs:
            seconds += epoch.seconds
            if epoch.scores and sign * epoch.scores["val"] >= sign * score:
                return seconds
        return math.inf

    def summary(self) -> dict[str, str]:
        """What to tell people, by name: scores, epochs, steps, times and memory."""
        digits = ".2f" if self.percent else ".4g"
        told = {f"{split} {self.metric}": f"{score:{digits}}" for split, score in self.scores.items()}
        told["best epoch"] = f"{self.best_epoch} of {len(self.epochs)}"
        told["steps"] = f"{self.steps:,}"
        told["seconds"] = f"{sum(self.seconds.values()):.1f}"
        told["memory"] = "unknown" if self.peak_memory is None else f"{self.peak_memory / 2**20:,.0f} MB"
        return told

    def __repr__(self) -> str:
        return f"FitResult({', '.join(f'{name} {value}' for name, value in self.summary().items())})"

    def _repr_html_(self) -> str:
        return html_table("FitResult", self.summary())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = jsonable(asdict(self))
        return values


def jsonable(value: Any) -> Any:
    """The value, with NaN and infinity replaced by ``None``, since JSON has neither."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
