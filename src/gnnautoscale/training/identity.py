"""What makes two runs the same besides their options and weights: how the model, the task and the data were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gnnautoscale.data import Dataset
from gnnautoscale.tasks import Task

# Attributes that every module has, or that a pass changes.
_PASSING = ("training", "dump_patches", "call_super_init")


def identity_of(model: nn.Module, task: Task, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Describe a run before its first step, by plain values.

    ``"model"`` has the class of every module, and its public attributes that are numbers, switches, words, functions or
    lists of these: dropout rates, aggregations, numbers of layers. ``"task"`` has the same of the task, and ``"data"``
    the options that the data set was made with, as far as it knows them.

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
        described |= {f"{name}.{key}".lstrip("."): value for key, value in _plain_attributes(module).items()}
    return {
        "model": described,
        "task": {"": type(task).__name__, **_plain_attributes(task)},
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


def _plain_attributes(owner: object) -> dict[str, Any]:
    found = {}
    for name, value in vars(owner).items():
        if not name.startswith("_") and name not in _PASSING and _is_plain(value):
            found[name] = _plain(value)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    named = callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__qualname__")
    return value is None or named or isinstance(value, (bool, int, float, str, torch.dtype))


def _plain(value: Any) -> Any:
    """A value as a checkpoint can hold it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        # Plain values only: a checkpoint holds no classes of their own.
        kinds = (bool, int, float, str)
        return next((kind(value) for kind in kinds if isinstance(value, kind)), None)
    return getattr(value, "__qualname__", None) or str(value)
