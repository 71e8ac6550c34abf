"""The state of a training run: to a checkpoint and back, and whether a checkpoint fits a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gnnautoscale._util import FolderLock, load_state, random_states, state_of, weights_of
from gnnautoscale.errors import InputError
from gnnautoscale.graph import check_labels
from gnnautoscale.ranks import LostRankError
from gnnautoscale.runs import Epoch, FitResult
from gnnautoscale.tasks import Task
from gnnautoscale.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
)
from gnnautoscale.training.identity import difference
from gnnautoscale.training.optimizer import LearningRate
from gnnautoscale.training.options import FitOptions
from gnnautoscale.training.strategies import Strategy

# The file whose lock keeps a folder for one run.
_LOCK = ".lock"
_SAME_DATA = "Use the data of the first run."
_SAME_MODEL = "Build model and task as for the first run."


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
    identity: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint; returns its file."""
        if not all(bool(torch.isfinite(weight).all()) for weight in weights_of(self.model)):
            raise FloatingPointError("the weights are not finite any more")
        self.result.steps = self.strategy.steps
        result = asdict(self.result)
        state = {
            "options": result.pop("options"),
            "identity": self.identity,
            "result": result,
            "batches": self.batches,
            "model": state_of(self.model),
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
        load_state(self.model, state["model"])
        self.best_weights = {name: value.to(self.device) for name, value in state["best_weights"].items()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # captured steps read it in place
                group["lr"] = rate.copy_(group["lr"])
        self.rate.load_state_dict(state["rate"])
        self.task.load_state_dict(state.get("task", {}), self.device)
        self.strategy.restore(checkpoint, self.device)


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Read a checkpoint from its file, or the newest one in a folder; ``None`` if the folder has none yet."""
    if path.suffix == ".pt" or os.path.isfile(path):  # which is no error where folders are locked
        return load_checkpoint(path)
    return load_latest(path)


@contextmanager
def as_written(checkpoint: Checkpoint) -> Iterator[None]:
    """Name a checkpoint whose state is not what a run writes: it is whole, but of another program or version."""
    try:
        yield
    except (InputError, LostRankError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            "a run resumes from the state that a run of this version wrote",
            got=f"{checkpoint.path} ({type(error).__name__}: {reason})",
            fix="Choose another checkpoint, or start again.",
        ) from error


@contextmanager
def only_writer(folder: Path | None) -> Iterator[None]:
    """Keep other runs from saving to a folder of checkpoints."""
    if folder is None:
        yield
        return
    lock = _locked(folder)
    try:
        if not lock.taken:
            got, fix = f"{folder}, which another run is using", "Wait for it to end, or choose another folder."
            raise InputError("a folder of checkpoints belongs to one run at a time", got=got, fix=fix)
        yield
    finally:
        lock.remove()
        with suppress(OSError):  # it stays if a checkpoint is in it
            folder.rmdir()


def _locked(folder: Path) -> FolderLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder / _LOCK)
    except OSError as error:
        rule, got = "a folder of checkpoints must be writable", f"{folder} ({error.strerror or error})"
        raise InputError(rule, got=got, fix="Choose another one.") from None


def check_fresh(folder: Path) -> None:
    """Refuse a folder for the checkpoints of a new run that already has checkpoints."""
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
    with as_written(checkpoint):
        kept = checkpoint.state["strategy"]["labels"]
        labels = None if kept is None else check_labels(kept, len(kept))
    if labels is not None and labels.size(0) != num_nodes:
        raise _other_run(checkpoint, f"graph: it had {labels.size(0)} nodes and has {num_nodes}", _SAME_DATA)
    return labels


def check_same_run(
    checkpoint: Checkpoint, options: FitOptions, key: str, model: nn.Module, identity: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of another run: other options, another graph (its ``key`` differs), or another model.

    ``identity`` is that of the run that is to resume. Checkpoints of earlier versions have none, and only their
    options, graphs and shapes of weights are compared.
    """
    state = checkpoint.state
    other = difference(state.get("identity") or {}, {"data": identity["data"]})
    if other is not None:
        raise _other_run(checkpoint, other, _SAME_DATA)
    if state["strategy"]["graph"] != key:
        raise _other_run(checkpoint, "graph: its edges, features, labels or masks differ", _SAME_DATA)
    given, may_change = options.to_dict(), options.may_change()
    for name, value in state["options"].items():
        if name not in may_change and given.get(name) != value:
            what = f"option: {name} was {value!r} and is {given.get(name)!r}"
            raise _other_run(checkpoint, what, "Give the options of the first run.")
    other = difference(state.get("identity") or {}, identity)
    other = other or difference({"weights": _shapes(state["model"])}, {"weights": _shapes(state_of(model))})
    if other is not None:
        raise _other_run(checkpoint, other, _SAME_MODEL)


def _other_run(checkpoint: Checkpoint, what: str, fix: str) -> InputError:
    return InputError(f"{checkpoint.path} must be of the same run", got=f"another {what}", fix=fix)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{list(value.shape)} {value.dtype}" for name, value in weights.items()}


@contextmanager
def stop_requests(enabled: bool, *, together: bool = False) -> Iterator[threading.Event]:
    """An event that Ctrl-C sets if enabled, so that a run can end cleanly; a second Ctrl-C ends it at once.

    Of ranks that train ``together`` torchrun asks each to end once more, and by SIGTERM; so there is no second one.
    Outside the main thread, and for a signal that the process ignores (Ctrl-C in the background of a script), nothing
    changes.
    """
    wanted = threading.Event()

    def request(number: int, frame: FrameType | None) -> None:
        wanted.set()
        if not together:
            signal.signal(number, handlers[signal.Signals(number)])

    numbers = [signal.SIGINT, *[signal.SIGTERM] * together] if enabled else []
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
