"""Writes down what a training run is, what each epoch took and moved, and now and then how far histories are off."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gnnautoscale._util import available_memory, reason_of, versions, weights_of
from gnnautoscale.analysis import Diagnostic, diagnose
from gnnautoscale.attach import Verification, attached, verify
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader
from gnnautoscale.ranks import current
from gnnautoscale.runs import Epoch, FitResult, RunFolder
from gnnautoscale.tasks import Task
from gnnautoscale.training.loggers import Logger, numbers_of
from gnnautoscale.training.strategies import Strategy

# With every="auto": the share of the training time that measuring errors may take, the share of the free memory, and
# the bytes needed for each value in histories.
_SHARE, _MEMORY_SHARE, _BYTES_PER_VALUE = 0.02, 0.5, 48
# The most groups of parts whose pulls are told apart, and the most parts whose sizes are listed.
_MOST_GROUPS, _MOST_BATCHES = 48, 512


class Journal:
    """Follows a training run, writes its folder, if it has one, and tells loggers.

    ``loader`` is ``None`` in modes without a halo. ``what`` to measure comes on top of what each epoch takes and moves,
    and ``every`` says when: "auto", "never", or a number of epochs. ``target`` is the type of nodes with targets, in a
    heterogeneous graph. Of several ranks the first one has the folder, and all take part in what is ``measured``
    because there is one.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        strategy: Strategy,
        model: nn.Module,
        loader: HaloLoader | None,
        task: Task,
        *,
        measured: bool,
        what: Sequence[Diagnostic],
        every: str | int,
        target: str | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self._folder, self._strategy, self._model, self._loader = folder, strategy, model, loader
        self._task, self._every, self._target, self._loggers = task, str(every), target, loggers
        self._result: FitResult | None = None
        # One batch of all nodes pulls nothing that could be stale.
        self._measured = measured
        stale = loader is not None and not loader.is_whole
        able = measured and loader is not None
        self._what = [name for name in what if name != "staleness" or stale] if able else []
        self._spent = self._last_cost = 0.0
        self._probed: int | None = None

    def is_due(self, epoch: int, *, last: bool, trained: float) -> bool:
        """Whether to measure errors after an epoch; ``trained`` is the training time so far, in seconds."""
        if not self._what or self._every == "never" or self._probed == epoch:
            return False
        if self._every != "auto":
            return last or epoch % int(self._every) == 0
        affordable = self._spent + self._last_cost <= _SHARE * trained
        fits = (self._probed is None or last or affordable) and self._fits()
        return fits if self._loader is None else all(self._loader.everyone(fits))

    def probe(self, epoch: int) -> None:
        """Measure errors with weights and histories as they are now."""
        if self._loader is None:
            return
        ages = None if self._strategy.flow is None else self._strategy.flow.ages()
        try:
            found = diagnose(self._model, self._loader, self._what, ages=ages, task=self._task, target=self._target)
        except (RuntimeError, MemoryError) as error:  # such as a lack of memory: no reason to end a run of days
            if current().size > 1:
                raise  # the other ranks would wait for this one
            warnings.warn(f"errors of histories are not measured any more, since that failed: {error}", stacklevel=2)
            self._what = []
            return
        self._last_cost = sum(values["seconds"] for values in found.values())
        self._spent, self._probed = self._spent + self._last_cost, epoch
        for kind, values in found.items():
            self._write({"kind": kind, "epoch": epoch, "step": self._strategy.steps, **values})

    def epoch(self, epoch: Epoch, memory: int | None = None) -> None:
        """Write down an epoch that has just ended."""
        record = {**epoch_record(epoch), "steps": self._strategy.steps, "memory": memory}
        if self._measured:
            measured = self._strategy.measured()
            times = measured.pop("time")
            times["compute"] = max(epoch.seconds - sum(times.values()), 0.0)
            record |= {"time": times, **measured}
        self._write(record)

    def finish(self, result: FitResult) -> None:
        """Write down what the run gave."""
        if self._folder is not None:
            elsewhere = ("epochs", "verification")
            found = {name: value for name, value in result.to_dict().items() if name not in elsewhere}
            self._keep_going(partial(self._folder.finish, found))

    def succeeded(self, result: FitResult) -> None:
        """Say that training has ended as it should, before this journal is closed."""
        self._result = result

    def verify(self) -> Verification | None:
        """Check the trained model and write down the outcome; ``None`` if that fails."""
        if self._loader is None:
            return None
        try:
            found = verify(self._model, self._loader)
        except Exception as error:  # the user's own code runs outside training here: no reason to lose a run of days
            warnings.warn(f"the model could not be verified: {error}", stacklevel=2)
            return None
        if self._folder is not None:
            self._keep_going(partial(self._folder.verified, {"summary": str(found), **asdict(found)}))
        return found

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.close()
        for logger in self._loggers:
            self._tell(logger, partial(logger.end, self._result))

    def _write(self, record: dict[str, Any]) -> None:
        if self._folder is not None:
            self._keep_going(partial(self._folder.append, record))
        if self._loggers:
            numbers = numbers_of(record)
            for logger in self._loggers:
                self._tell(logger, partial(logger.log, numbers, record["epoch"]))

    def _keep_going(self, write: Callable[[], None]) -> None:
        """Write something; a full disk is no reason to end a run of days, but nothing more is written then."""
        try:
            write()
        except (InputError, OSError) as error:
            warnings.warn(f"nothing more is written about this run, since that failed: {error}", stacklevel=3)
            self._folder = None

    def _tell(self, logger: Logger, say: Callable[[], None]) -> None:
        """Tell a logger something; a server that fails is no reason to lose a run, but the logger hears no more."""
        try:
            say()
        except Exception as error:  # of any package
            failed = f"{type(logger).__name__} gets no more numbers, since it failed: {reason_of(error)}"
            warnings.warn(failed, stacklevel=3)
            self._loggers = [each for each in self._loggers if each is not logger]

    def _fits(self) -> bool:
        """Whether there is room for rows of all histories side by side, more than once."""
        histories = attached(self._model).memory.histories.values()
        values = sum(history.num_nodes * history.width for history in histories)
        free = available_memory()
        return free is None or values * _BYTES_PER_VALUE <= _MEMORY_SHARE * free


def epoch_record(epoch: Epoch) -> dict[str, Any]:
    """The record of an epoch, without measurements of its steps."""
    values = asdict(epoch)
    return {"kind": "epoch", "epoch": values.pop("number"), **values}


# What a run is #######################################################################################################


def describe_run(
    options: dict[str, Any], dataset: Dataset, task: Task, model: nn.Module, loader: HaloLoader | None
) -> dict[str, Any]:
    """What a run is, as plain values; ``loader`` cuts the training graph into parts, if the mode has a halo."""
    graph = dataset.passing()
    built: dict[str, Any] = getattr(model, "built_from", {})
    return {
        "title": title_of(options, dataset, model),
        "options": {**options, **built},
        "data": {
            "name": dataset.name,
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "features": dataset.num_features,
            **task.describe(dataset),
        },
        "score": {"metric": task.metric, "higher_is_better": task.higher_is_better, "percent": task.percent},
        "model": {"name": type(model).__name__, "parameters": sum(weight.numel() for weight in weights_of(model))},
        "versions": versions(),
        "machine": describe_machine(options["device"]),
        "parts": None if loader is None else _parts_of(loader),
    }


def title_of(options: Mapping[str, Any], dataset: Dataset, model: nn.Module) -> str:
    """A run in a few words."""
    name = getattr(model, "built_from", {}).get("model", type(model).__name__.lower())
    return f"{dataset.name} {name} {options['mode']} seed {options['seed']}"


def describe_machine(device: str, threads: int | None = None) -> str:
    """The GPU's name, or the CPU's architecture and number of threads, by default PyTorch's in this process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    threads = torch.get_num_threads() if threads is None else threads
    return f"CPU ({platform.machine()}, {threads} {'thread' if threads == 1 else 'threads'})"


def _parts_of(loader: HaloLoader) -> dict[str, Any]:
    """See :func:`describe_parts`, of all processes that share the graph."""
    edges, labels, is_own = loader.graph.edge_index, loader.parts, loader.is_own
    count = 1 + max(loader.everyone(int(labels[is_own].max())))
    counts = _count_parts(edges[:, is_own[edges[1]]], labels, count, labels[is_own])
    return _described([torch.stack(values).sum(0) for values in zip(*loader.everyone(counts), strict=True)])


def describe_parts(edge_index: Tensor, labels: Tensor) -> dict[str, Any]:
    """How large parts are, and which of them pull from which, as if each were a batch of its own.

    ``edge_index`` is ``[2, num_edges]``, and ``labels`` the part of each node, ``[num_nodes]``. ``halo`` in the result
    has the rows that a group of parts pulls from another, per node.
    """
    return _described(_count_parts(edge_index, labels, int(labels.max()) + 1, labels))


def _count_parts(edge_index: Tensor, labels: Tensor, count: int, own_labels: Tensor) -> list[Tensor]:
    """Numbers of so many parts that processes add up: nodes, halo nodes, edges inside and across, and pulled rows."""
    sizes, num_nodes = torch.bincount(own_labels, minlength=count), labels.numel()
    source, part = edge_index[0], labels[edge_index[1]]
    crossing = labels[source] != part
    inside, outside = (torch.bincount(part[which], minlength=count) for which in (~crossing, crossing))
    pairs = torch.unique(part[crossing] * num_nodes + source[crossing])  # each node once for each part that pulls it
    pulling, owning = pairs // num_nodes, labels[pairs % num_nodes]
    groups = min(count, _MOST_GROUPS)
    group = torch.arange(count) * groups // count
    matrix = torch.bincount(group[pulling] * groups + group[owning], minlength=groups**2).view(groups, groups)
    return [sizes, torch.bincount(pulling, minlength=count), inside, outside, matrix]


def _described(counts: list[Tensor]) -> dict[str, Any]:
    sizes, halo, inside, outside, matrix = counts
    count, groups = sizes.numel(), matrix.size(0)
    group = torch.arange(count) * groups // count
    group_sizes = torch.zeros(groups, dtype=torch.double).index_add(0, group, sizes.double())
    shown = torch.arange(min(count, _MOST_BATCHES)) * count // min(count, _MOST_BATCHES)
    columns = {
        "nodes": sizes,
        "halo": halo,
        "edges_inside": inside,
        "edges_crossing": outside,
    }
    return {
        "count": count,
        "sizes": sizes.tolist(),
        "groups": groups,
        "halo": (matrix.double() / group_sizes.clamp(min=1).unsqueeze(1)).tolist(),
        "batches": {name: values[shown].tolist() for name, values in columns.items()},
    }
