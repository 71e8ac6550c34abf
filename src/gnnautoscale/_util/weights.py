"""The weights of modules, apart from lazy ones that no run has needed so far: these have neither shape nor values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def weights_of(*modules: nn.Module) -> list[nn.Parameter]:
    """The weights of modules, each once.

    Example:
        >>> len(weights_of(nn.ModuleList([nn.Linear(2, 3), nn.LazyLinear(3)])))
        2
    """
    return [weight for weight in nn.ModuleList(modules).parameters() if not is_lazy(weight)]


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
