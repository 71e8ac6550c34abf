"""What ranks cannot do is refused by name, and so are ranks that differ, before training."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from gnnautoscale._util import state_of
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.ranks import current
from gnnautoscale.tasks import NodeTask, Task
from gnnautoscale.training.options import OPTIONS, FitOptions

# What may differ between ranks.
_PLACES = ("device", "run_dir", "checkpoint_dir", "resume", "history_dir", "cache_dir", "num_workers", "tensorboard")
# Options that ranks do not have, by name; each may keep the value that it has here.
_ALONE: dict[str, Any] = {
    "accumulate": 1,
    "exact_epochs": 0,
    "refresh": 0,
    "evaluate_parts": None,
    "verify": False,
}


def check_ranked(dataset: Dataset, task: Task, model: nn.Module, options: FitOptions, *, from_files: bool) -> None:
    """Refuse what ranks cannot do, and ranks that were started with different options or models."""
    if dataset.targets and not isinstance(task, NodeTask):
        rule, fix = "ranks predict something of nodes of a heterogeneous graph", "Train in one process."
        raise InputError(rule, got=f"a {type(task).__name__}", fix=fix)
    if dataset.inductive:
        got = "graphs of their own for validation and test"
        raise InputError("ranks share one plain graph", got=got, fix="Train in one process.")
    if not isinstance(task, NodeTask):
        fix = "Train in one process."
        raise InputError("ranks predict something of nodes", got=f"a {type(task).__name__}", fix=fix)
    if options.mode not in ("gas", "history"):
        rule, fix = "ranks train with mode 'gas' or 'history'", "Train in one process."
        raise InputError(rule, got=repr(options.mode), fix=fix)
    for name, only in _ALONE.items():
        if getattr(options, name) != only:
            rule = f"under ranks {name} must be {only!r}"
            raise InputError(rule, got=repr(getattr(options, name)), fix="Leave it out, or train in one process.")
    if options.compensate == "momentum":
        fix = "Use compensate='gradient', or leave it out."
        raise InputError("ranks compensate by gradients", got="compensate='momentum'", fix=fix)
    if options.sync_norms and (options.lipschitz or options.compensate != "none"):
        fix = "Leave one of them out."
        raise InputError("sync_norms needs plain steps", got="it with a penalty or compensation", fix=fix)
    if options.diagnose_every not in ("auto", "never"):
        fix = "Leave it out; ranks measure no staleness."
        raise InputError("diagnose_every is for one process", got=str(options.diagnose_every), fix=fix)
    if from_files and options.class_weight != "none":
        fix = "Leave it out, or pass the whole graph."
        raise InputError("class_weight needs all targets in one place", got="a folder of shards", fix=fix)
    weights = state_of(model)
    shapes = {name: None if is_lazy(value) else tuple(value.shape) for name, value in weights.items()}
    given = {name: getattr(options, name) for name in OPTIONS if name not in _PLACES}
    current().agree({**given, "model": (repr(model), shapes), "task": (type(task).__name__, task.metric)})
