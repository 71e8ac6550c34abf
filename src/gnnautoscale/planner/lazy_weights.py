"""Gives lazy weights, which a model's first run draws, the shapes and values that it would give them."""

from __future__ import annotations

from inspect import BoundArguments
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from gnnautoscale._util import map_tensors, undisturbed
from gnnautoscale.forward import Hooks, Plan, copy_model
from gnnautoscale.graph import BatchInfo, TypedInfo, untagged
from gnnautoscale.planner.rehearsal import Observation
from gnnautoscale.planner.trial_graph import TrialGraph, setups_for
from gnnautoscale.planner.typed_trial_graph import SIZES, TypedTrialGraph


def initialize_lazy_weights(
    model: nn.Module, info: BatchInfo | TypedInfo, arguments: BoundArguments, device: torch.device, *, explicit: bool
) -> None:
    """Draw the lazy weights of a model without hooks from the user's own random state, as the first run would.

    A copy runs on a small graph, as :func:`~gnnautoscale.planner.make_plan` makes them.
    """
    copied = copy_model(model)
    with torch.autocast(device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
        if isinstance(info, TypedInfo):
            with undisturbed(device):
                typed = TypedTrialGraph(info, arguments, device, SIZES[0], None)
            args, kwargs = map_tensors(untagged, typed.arguments(typed.whole))
            copied(*args, **kwargs)
        else:
            with undisturbed(device):
                trial = TrialGraph(info, arguments, device, setups_for(info.graph)[0], None)
            batch = next(iter(trial.whole))
            hooks = Hooks(copied, lambda *args, **kwargs: hooks.run(None, (args, kwargs)))
            hooks.run(Observation(trial, batch, Plan(explicit=explicit)).session, trial.arguments(batch))
            hooks.remove()
    initialize_like(model, copied)


def initialize_like(model: nn.Module, copied: nn.Module) -> None:
    """Give a model's lazy weights the shapes and values that a copy of it got when it ran."""
    for module, other in zip(model.modules(), copied.modules(), strict=True):
        weights = dict(module.named_parameters(recurse=False))
        if not any(map(is_lazy, weights.values())):
            continue
        for name, weight in weights.items():
            made = other._parameters[name]
            if made is None or is_lazy(made):
                continue  # nothing used it
            if is_lazy(weight):
                cast(UninitializedParameter, weight).materialize(made.shape, made.device, made.dtype)
            weight.data.copy_(made.data)
        hooks = module._forward_pre_hooks
        for key in [key for key in hooks if key not in other._forward_pre_hooks]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        for name in [name for name in vars(module) if name not in vars(other)]:
            del vars(module)[name]
        sizes = {name: value for name, value in vars(other).items() if isinstance(value, (int, str, float))}
        vars(module).update(sizes)
        module.__class__ = type(other)
