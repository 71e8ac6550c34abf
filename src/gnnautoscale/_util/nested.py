"""Tensors, and all that is none, in nested tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")

# Values without tensors; checked first, since most values are of these types.
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})


def map_tensors(function: Callable[[Tensor], Tensor], value: T) -> T:
    """Apply a function to every tensor in nested tuples, lists and dictionaries, in a fixed order."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Tensor):
        return cast(T, function(value))
    if type(value) is tuple:
        return cast(T, tuple([map_tensors(function, item) for item in cast(tuple[Any, ...], value)]))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast(T, type(value)(*[map_tensors(function, item) for item in value]))
    if isinstance(value, (tuple, list)):
        return cast(T, type(value)([map_tensors(function, item) for item in value]))
    if isinstance(value, dict):
        return cast(T, {name: map_tensors(function, item) for name, item in value.items()})
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries, in the order of :func:`map_tensors`."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return
    for item in value:
        if type(item) in _PLAIN_TYPES:
            continue
        if isinstance(item, Tensor):  # here already, since calls take most of the time
            found.append(item)
        else:
            _collect(item, found)


def map_others(function: Callable[[Any], Any], value: T) -> T:
    """Apply a function to everything but tensors in nested tuples, lists and dictionaries, in a fixed order."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast(T, type(value)(*[map_others(function, item) for item in value]))
    if isinstance(value, (tuple, list)):
        return cast(T, type(value)([map_others(function, item) for item in value]))
    if isinstance(value, dict):
        return cast(T, {name: map_others(function, item) for name, item in value.items()})
    return cast(T, function(value))


def others_in(value: Any) -> list[Any]:
    """Everything but tensors in nested tuples, lists and dictionaries, in the order of :func:`map_others`."""
    if isinstance(value, Tensor):
        return []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [other for item in value if not isinstance(item, Tensor) for other in others_in(item)]
