"""What makes two runs the same besides their options and weights: how the model, the task and the data were made."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SimpleConv  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.graph import fingerprint
from gnnautoscale.tasks import Task
from gnnautoscale.training.options import OPTIONS

# Attributes that every module has, or that a pass changes. A MessagePassing of its own would be no harmless example:
# PyG would compile the class itself, and with it all layers that it cannot compile.
_PASSING = {"training", "dump_patches", "call_super_init", "built_from"}
_PASSING |= {name for each in (nn.Module(), SimpleConv()) for name in vars(each) if name.startswith("_")}
# Settings of the user's may have the names of options of a run that may change.
_FREE = {name for name, each in OPTIONS.items() if each.may_change}
# Their private attributes may differ from version to version.
_LIBRARIES = ("builtins", "torch", "torch_geometric", "gnnautoscale")
# Larger tensors are data or what a pass keeps, not settings.
_LARGEST = 4096


def identity_of(model: nn.Module, task: Task, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Describe a run before its first step, by plain values.

    ``"model"`` has the class of every module and its attributes that are numbers, switches, words, functions, small
    tensors, or collections of these: dropout rates, aggregations, numbers of layers. ``"task"`` has the same of the
    task, and ``"data"`` the options that the data set was made with, as far as it knows them. Code is not compared: a
    run that ended with an error may go on with what was mended.

    Example:
        >>> from torch_geometric.data import Data
        >>> from gnnautoscale.tasks import NodeClassification
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.25))
        >>> found = identity_of(model, NodeClassification(3), Dataset.of(Data()))["model"]
        >>> found["0"], found["1.p"]
        ('Linear', 0.25)
    """
    described: dict[str, Any] = {}
    for name, module in model.named_modules():
        described[name] = type(module).__name__
        described |= {f"{name}.{key}".lstrip("."): value for key, value in _settings(module).items()}
    saved = model.state_dict().keys()
    described |= _plain_items({name: value for name, value in model.named_buffers() if name not in saved})
    described |= {f"{name}.requires_grad": value.requires_grad for name, value in model.named_parameters()}
    return {
        "model": described,
        "task": {"": type(task).__name__, **_settings(task)},
        "data": {name: _plain(value) for name, value in dataset.made_from.items()},
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first thing in which two descriptions differ, in words; ``None`` if there is none."""
    for what in now:
        there, here = before.get(what), now[what]
        if not isinstance(there, Mapping):
            continue
        for name in [*here, *(name for name in there if name not in here)]:
            if there.get(name) != here.get(name):
                return f"{what}: {name or 'its class'} was {there.get(name)!r} and is {here.get(name)!r}"
    return None


def targets_of(task: Task, dataset: Dataset) -> list[Tensor | None]:
    """What a task reads from the graphs of a data set."""
    return [each for graph, _ in dataset.graphs() for each in task.identity(graph)]


def key_of(targets: Iterable[Tensor | None], graphs: Iterable[str]) -> str:
    """What a run has to resume with: the targets, and the graphs of all splits, by their keys."""
    return fingerprint(*targets, graph=" ".join(dict.fromkeys(graphs)))


def _settings(owner: object) -> dict[str, Any]:
    """The attributes of an object that are plain; private ones only of classes of the user's own."""
    private = type(owner).__module__.partition(".")[0] not in _LIBRARIES
    names = (name for name in vars(owner) if name not in _PASSING and (private or not name.startswith("_")))
    return _plain_items({name: vars(owner)[name] for name in names})


def _plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        with suppress(TypeError):
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A value as a checkpoint can hold it, or a ``TypeError`` if it is more than numbers, words and functions."""
    if value is None or isinstance(value, (bool, int, float, str)):
        # A checkpoint holds no classes of their own.
        kinds = (bool, int, float, str)
        return next((kind(value) for kind in kinds if isinstance(value, kind)), None)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return _plain_items({str(key): item for key, item in value.items() if key not in _FREE})
    if isinstance(value, (Namespace, SimpleNamespace)) or (is_dataclass(value) and not isinstance(value, type)):
        return _plain(vars(value))
    if isinstance(value, partial):
        return [_plain(value.func), *map(_plain, value.args), _plain(value.keywords)]
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(torch.from_numpy(np.asarray(value)))
    if type(value) is Tensor and value.layout is torch.strided and not value.is_meta and value.numel() <= _LARGEST:
        return value.tolist() if value.numel() == 1 else f"{list(value.shape)} {fingerprint(value)[:8]}"
    if isinstance(value, (torch.dtype, Enum)):
        return str(value)
    if callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    raise TypeError
