"""What the user's own code computes, as plain values that another process can compare.

Classes and functions are described by their bytecode, without lines, comments and docstrings, and by the plain values
that it reads from its module and from the functions around it. The code of PyTorch, PyG and this library is left out:
another version of these is no other program.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

_LIBRARIES = ("builtins", "torch", "torch_geometric", "gnnautoscale")


def is_own(kind: Any) -> bool:
    """Whether a class or function is the user's.

    Example:
        >>> is_own(type("Net", (), {"__module__": "nets"})), is_own(int)
        (True, False)
    """
    return (getattr(kind, "__module__", None) or "builtins").partition(".")[0] not in _LIBRARIES


def code_of(kind: type | Callable[..., Any], plain: Callable[[Any], Any]) -> dict[str, Any]:
    """What the user's functions of a class, or a function, compute, and those that they call by name.

    Digests of the functions by their names, and the plain values that they, or the class, read. ``plain`` makes a plain
    value of one, or raises a ``TypeError`` if there is none.
    """
    found: dict[str, Any] = {}
    waiting: list[Any] = [*kind.__mro__] if isinstance(kind, type) else [kind]
    seen = set()
    while waiting:
        owner = waiting.pop()
        if owner in seen or not is_own(owner):
            continue
        seen.add(owner)
        name = owner.__qualname__.rpartition("<locals>.")[2]
        if isinstance(owner, FunctionType):
            found[f"{name}()"] = _digest(owner)
        for key, value in _read_by(owner) if isinstance(owner, FunctionType) else _held_by(owner):
            function = _unwrapped(value)
            if isinstance(function, (FunctionType, type)):
                waiting.append(function)
                continue
            with suppress(TypeError):
                found[f"{key} of {name}"] = plain(value)
    return found


def _held_by(kind: type) -> Iterator[tuple[str, Any]]:
    """Functions and other attributes of a class, without those that make and print its objects."""
    for name, value in vars(kind).items():
        if name == "__call__" or not name.startswith("__"):
            yield name, value


def _unwrapped(value: Any) -> Any:
    """The function behind a method, a property, or what decorators made of a function; else the value itself."""
    value = value.fget if isinstance(value, property) else value
    return inspect.unwrap(getattr(value, "__func__", value))


def _read_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads from its module, the functions around it and its defaults, by name."""
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    defaults: Mapping[str, Any] = function.__kwdefaults__ or {}
    yield "defaults", [*(function.__defaults__ or ()), *defaults.values()]


def _names_in(code: CodeType) -> set[str]:
    """The global names that code reads."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}.union(*inner)


def _digest(function: FunctionType) -> str:
    return hashlib.sha256(_form(function.__code__, function.__doc__).encode()).hexdigest()[:8]


def _form(code: CodeType, doc: str | None = None) -> str:
    """All that makes a difference in code, in words; sets have no order that another process has."""
    constants = []
    for index, each in enumerate(code.co_consts):
        if isinstance(each, CodeType):
            constants.append(_form(each))
        elif isinstance(each, frozenset):
            constants.append(repr(sorted(map(repr, each))))
        else:  # a docstring stands where a function without one has None
            constants.append(repr(None if index == 0 and each == doc else each))
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
