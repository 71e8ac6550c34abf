"""The weights of modules, apart from those of layers that are still lazy, because no run has needed them so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnautoscale.errors import InputError


def weights_of(*modules: nn.Module) -> list[nn.Parameter]:
    """The weights of modules, each once.

    Those beside a lazy one, such as the bias of a layer, have not been drawn either: they hold whatever was in memory.

    Example:
        >>> len(weights_of(nn.ModuleList([nn.Linear(2, 3), nn.LazyLinear(3)])))
        2
    """
    found: dict[int, nn.Parameter] = {}
    for module in nn.ModuleList(modules).modules():
        own = list(module.parameters(recurse=False))
        if not any(map(is_lazy, own)):
            found |= {id(weight): weight for weight in own}
    return list(found.values())


def check_weights(model: nn.Module) -> None:
    """Refuse a model with weights or buffers that have no values, or that autograd does not know."""
    rule, values = "the weights of a model must have values", [*model.parameters(), *model.buffers()]
    if any(value.is_meta for value in values):
        fix = "Load its weights, or use to_empty() and initialize them."
        raise InputError(rule, got="some on the device meta", fix=fix)
    if any(not is_lazy(value) and value.is_inference() for value in values):
        fix = "Build the model outside of that mode."
        raise InputError(f"{rule} that can be trained", got="some made in torch.inference_mode()", fix=fix)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a module by name, for :func:`load_state`."""
    return {name: value for name, value in module.state_dict().items() if not is_lazy(value)}


def load_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module what :func:`state_of` found; what is lazy in both stays so.

    Example:
        >>> module = nn.Linear(2, 3)
        >>> load_state(module, state_of(nn.Linear(2, 3)))
    """
    lazy = {name: value for name, value in module.state_dict().items() if is_lazy(value)}
    module.load_state_dict({**lazy, **state})
