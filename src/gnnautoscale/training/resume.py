"""The state of a training run: to a checkpoint and back, and whether a checkpoint fits a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from gnnautoscale._util import random_states
from gnnautoscale.errors import InputError
from gnnautoscale.ranks import LostRankError, current
from gnnautoscale.runs import Epoch, FitResult
from gnnautoscale.tasks import Task
from gnnautoscale.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
)
from gnnautoscale.training.optimizer import LearningRate
from gnnautoscale.training.options import FitOptions
from gnnautoscale.training.strategies import Strategy

_SAME_DATA = "Use the data of the first run."


@dataclass
class RunState:
    """Everything that changes during a training run; ``batches`` counts those of all epochs.

    ``model`` also has what the task trains besides it.
    """

    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    rate: LearningRate
    strategy: Strategy
    result: FitResult
    device: torch.device
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    batches: int = 0

    def save(self, folder: Path) -> Path:
        """Write a checkpoint; returns its file."""
        if not all(bool(torch.isfinite(weight).all()) for weight in self.model.parameters()):
            raise FloatingPointError("the weights are not finite any more")
        self.result.steps = self.strategy.steps
        result = asdict(self.result)
        state = {
            "options": result.pop("options"),
            "result": result,
            "batches": self.batches,
            "model": dict(self.model.state_dict()),
            "best_weights": self.best_weights,
            "optimizer": self.optimizer.state_dict(),
            "rate": self.rate.state_dict(),
            "task": self.task.state_dict(),
        }
        return self.strategy.save(folder, self.batches, state, random_states(self.device))

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint that passed :func:`check_same_run`."""
        state, result = checkpoint.state, dict(checkpoint.state["result"])
        self.result.seconds.update(result.pop("seconds"))
        result["epochs"] = [Epoch(**epoch) for epoch in result["epochs"]]
        for name, value in result.items():
            setattr(self.result, name, value)
        self.batches = state["batches"]
        self.model.load_state_dict(state["model"])
        self.best_weights = {name: value.to(self.device) for name, value in state["best_weights"].items()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # captured steps read it in place
                group["lr"] = rate.copy_(group["lr"])
        self.rate.load_state_dict(state["rate"])
        self.task.load_state_dict(state.get("task", {}), self.device)
        self.strategy.restore(checkpoint, self.device)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint from its file, or the newest one in a folder."""
    found = load_latest(path) if path.is_dir() else load_checkpoint(path)
    if found is None:
        raise InputError("resume needs a checkpoint", got=f"{path}, which has none", fix="Start without resume.")
    return found


def check_fresh(folder: Path) -> None:
    """Refuse a folder for the checkpoints of a new run that cannot be written or already has checkpoints."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise InputError("a folder of checkpoints must be writable", got=str(folder), fix="Choose another one.")
    latest = latest_checkpoint(folder)
    if latest is not None:
        raise InputError(
            "a new run needs a folder without checkpoints",
            got=f"{folder}, which has {latest.name}",
            fix="Resume from it, choose another folder, or remove its checkpoints.",
        )


def labels_of(checkpoint: Checkpoint, num_nodes: int) -> Tensor | None:
    """The part of each node in the run of a checkpoint, ``[num_nodes]``; ``None`` if its shards were in files."""
    if "strategy" not in checkpoint.state:
        raise InputError(
            "a run resumes from a checkpoint of a run", got=str(checkpoint.path), fix="Choose another one."
        )
    labels: Tensor | None = checkpoint.state["strategy"]["labels"]
    if labels is not None and labels.size(0) != num_nodes:
        raise _other_run(checkpoint, f"graph: it had {labels.size(0)} nodes and has {num_nodes}", _SAME_DATA)
    return labels


def check_same_run(checkpoint: Checkpoint, options: FitOptions, key: str, model: nn.Module) -> None:
    """Refuse a checkpoint of another run: other options, another graph (its ``key`` differs), or another model."""
    state = checkpoint.state
    if state["strategy"]["graph"] != key:
        raise _other_run(checkpoint, "graph: its edges, features, labels or masks differ", _SAME_DATA)
    given, may_change = options.to_dict(), options.may_change()
    for name, value in state["options"].items():
        if name not in may_change and given.get(name) != value:
            what = f"option: {name} was {value!r} and is {given.get(name)!r}"
            raise _other_run(checkpoint, what, "Give the options of the first run.")
    if _shapes(state["model"]) != _shapes(model.state_dict()):
        what = "model: its weights have other names, shapes or types"
        raise _other_run(checkpoint, what, "Build the model as for the first run.")


def _other_run(checkpoint: Checkpoint, what: str, fix: str) -> InputError:
    return InputError(f"{checkpoint.path} must be of the same run", got=f"another {what}", fix=fix)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in weights.items()}


@contextmanager
def stop_requests(enabled: bool, *, together: bool = False) -> Iterator[threading.Event]:
    """An event that Ctrl-C sets if enabled, so that a run can end cleanly; a second Ctrl-C ends it at once.

    Of ranks that train ``together`` torchrun asks each to end once more, and by SIGTERM; so there is no second one. If
    it is not enabled, SIGTERM ends a rank with an error that says so. Outside the main thread, and for a signal that
    the process ignores (Ctrl-C in the background of a script), nothing changes.
    """
    wanted = threading.Event()

    def request(number: int, frame: FrameType | None) -> None:
        wanted.set()
        if not enabled:
            raise LostRankError(f"rank {current().rank} ends, since torchrun asked it to: another rank has failed")
        if not together:
            signal.signal(number, handlers[signal.Signals(number)])

    numbers = [signal.SIGINT] * enabled + [signal.SIGTERM] * together
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    # None stands for a handler outside Python, which could not be restored.
    found = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, request)
    try:
        yield wanted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
