"""What ranks cannot do is refused by name, and so are ranks that differ, before training."""

from __future__ import annotations

from torch import nn

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.ranks import current, form_of
from gnnautoscale.tasks import GraphPrediction, LinkPrediction, Task
from gnnautoscale.training.options import OPTIONS, FitOptions

# What may differ between ranks.
_PLACES = ("device", "run_dir", "checkpoint_dir", "resume", "history_dir", "cache_dir", "num_workers", "tensorboard")


def check_ranked(dataset: Dataset, task: Task, model: nn.Module, options: FitOptions) -> None:
    """Refuse what ranks cannot do, and ranks that were started with different options or models."""
    if options.mode not in ("gas", "history", "exact"):
        rule, fix = "ranks train with mode 'gas', 'history' or 'exact'", "Train in one process."
        raise InputError(rule, got=repr(options.mode), fix=fix)
    if options.exact_after < options.epochs and isinstance(task, (LinkPrediction, GraphPrediction)):
        fix = "Leave them out, or train in one process."
        raise InputError("exact steps of ranks are for tasks of nodes", got=f"a {type(task).__name__}", fix=fix)
    if dataset.targets and options.compensate == "momentum":
        fix = "Use compensate='gradient', or leave it out."
        raise InputError("ranks compensate by gradients there", got="compensate='momentum'", fix=fix)
    if dataset.targets and options.sync_norms and (options.lipschitz or options.compensate != "none"):
        fix = "Leave one of them out."
        raise InputError("sync_norms needs plain steps", got="it with a penalty or compensation", fix=fix)
    able = {"staleness", "gradients"} if task.knows_rows_only else {"staleness"}
    if set(options.diagnose) - able:
        fix = "Leave the others out, or train in one process."
        raise InputError(f"ranks diagnose {' and '.join(sorted(able))}", got=f"diagnose={options.diagnose}", fix=fix)
    given = {name: getattr(options, name) for name in OPTIONS if name not in _PLACES}
    about = type(task).__name__, task.metric, repr(task.module)
    current().agree({**given, "model": form_of(model), "task": about})


def check_from_files(task: object) -> None:
    """Refuse a task whose targets shards in files do not have."""
    if task in ("link", "graph") or (isinstance(task, Task) and not task.knows_rows_only):
        name = task if isinstance(task, str) else type(task).__name__
        fix = "Pass the whole graph on each rank, which keeps its share of it."
        raise InputError("folders of shards serve the library's tasks of nodes", got=f"the task {name}", fix=fix)
