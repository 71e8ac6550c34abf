"""Runs a model without chance, so that runs on different numbers of rows can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class _Expected(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces each random number by one constant: the expected value, or one near it where that would hide noise."""

    def __init__(self, level: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._level = level

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _UNIFORM:
            low, high = (_argument(args, kwargs, 1, "from", 0.0), _argument(args, kwargs, 2, "to", 1.0))
            ends = (low, high) if func.overloadpacket is _aten.uniform_ else (0.0, 1.0)
            return _empty(func, args, kwargs).fill_(ends[0] + self._level * (ends[1] - ends[0]))
        constant = _CONSTANTS.get(func.overloadpacket)
        return func(*args, **kwargs) if constant is None else constant(func, args, kwargs)


def _empty(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The result of a random function without its numbers."""
    name = func._schema.name
    if name.endswith("_"):
        given: Tensor = args[0]
        return given
    options = {key: option for key, option in kwargs.items() if key not in ("generator", "names")}
    return torch.empty_like(args[0], **options) if name.endswith("_like") else torch.empty(args[0], **options)


def _filled(value: Callable[[Any, Any], float]) -> Callable[[Any, Any, Any], Tensor]:
    return lambda func, args, kwargs: _empty(func, args, kwargs).fill_(value(args, kwargs))


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Probabilities instead of draws, so that dropout is the identity; true where only true or false are possible."""
    given = kwargs.get("p", args[1] if len(args) > 1 else None)
    in_place = func._schema.name.endswith("_")
    probability = given if given is not None else 0.5 if in_place else args[0].clone()
    result: Tensor = args[0] if in_place else torch.empty_like(args[0])
    if not result.is_floating_point():
        return result.fill_(1)
    return result.copy_(probability) if isinstance(probability, Tensor) else result.fill_(probability)


def _dropout(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


def _backwards(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A permutation that mixes rows."""
    options = {key: option for key, option in kwargs.items() if key != "generator"}
    return torch.arange(args[0] - 1, -1, -1, **options)


def _drawn_normal(func: Any, args: Any, kwargs: Any) -> Tensor:
    mean, std = (*args[:2], 1.0)[:2]
    options = {key: option for key, option in kwargs.items() if key != "generator"}
    value: Tensor = torch.zeros(args[2] if len(args) > 2 else (), **options) + mean + 0.3 * std
    return value


def _argument(args: Any, kwargs: Any, place: int, name: str, default: float) -> float:
    value = kwargs.get(name, args[place] if len(args) > place else default)
    return default if isinstance(value, Tensor) else value


def _normal(args: Any, kwargs: Any) -> float:
    # Not the mean, because noise that is zero would hide what it is multiplied with.
    return _argument(args, kwargs, 1, "mean", 0.0) + 0.3 * _argument(args, kwargs, 2, "std", 1.0)


_UNIFORM = frozenset({_aten.uniform_, _aten.rand, _aten.rand_like})
_CONSTANTS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _aten.native_dropout: _dropout,
    _aten.bernoulli: _bernoulli,
    _aten.bernoulli_: _bernoulli,
    _aten.normal: _drawn_normal,
    _aten.normal_: _filled(_normal),
    _aten.randn: _filled(lambda args, kwargs: 0.3),
    _aten.randn_like: _filled(lambda args, kwargs: 0.3),
    _aten.exponential_: _filled(lambda args, kwargs: 1.0 / _argument(args, kwargs, 1, "lambd", 1.0)),
    _aten.randperm: _backwards,
}


@contextmanager
def expected_randomness(level: float = 0.5) -> Iterator[None]:
    """Let everything random give its expected value: dropout is the identity, noise a constant.

    ``level`` is what uniform random numbers between 0 and 1 are: a model that compares them with a probability takes
    another branch with another level.

    Example:
        >>> with expected_randomness():
        ...     torch.nn.functional.dropout(torch.tensor([1.0, 2.0]), 0.6)
        tensor([1., 2.])
    """
    with _Expected(level):
        yield
