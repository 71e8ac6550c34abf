"""Checks the arguments of public functions by the types that their signatures declare."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch

from gnnautoscale._util.memory import lacks_memory
from gnnautoscale._util.options import Option, check_path, shown
from gnnautoscale.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
_VALUES = (bool, int, float, str)
_Check = Callable[[Any], Any]


def checked(**facts: Mapping[str, Any]) -> Callable[[F], F]:
    """Refuse arguments of other types than a function's signature declares, and values out of bounds.

    Numbers, switches, words and their lists are checked and converted as options are (:class:`Option`), so that NumPy's
    numbers become plain ones. Of a class, an instance is needed; anything may stand for ``Any``.

    Args:
        facts: By the name of an argument, further attributes of its :class:`Option`, such as ``least``, and
            the ``fix`` of its error.

    Example:
        >>> @checked(count={"least": 1})
        ... def repeated(word: str, count: int = 1) -> str:
        ...     return word * count
        >>> repeated("ab", 2)
        'abab'
        >>> repeated("ab", 1.5)
        Traceback (most recent call last):
        ...
        gnnautoscale.errors.InputError: count must be an integer of at least 1, but got 1.5. Change this argument of ...
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @functools.cache
        def checks() -> dict[str, _Check]:
            hints = get_type_hints(function)
            return {
                each: _check_of(each, hints[each], f"Change this argument of {name}.", **facts.get(each, {}))
                for each, parameter in signature.parameters.items()
                if each in hints and hints[each] is not Any and parameter.kind is not parameter.VAR_KEYWORD
            }

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            for each, check in checks().items():
                if signature.parameters[each].kind is inspect.Parameter.VAR_POSITIONAL:
                    bound.arguments[each] = tuple(check(value) for value in bound.arguments.get(each, ()))
                elif each in bound.arguments:
                    bound.arguments[each] = check(bound.arguments[each])
            try:
                return function(*bound.args, **bound.kwargs)
            except RuntimeError as error:
                if not lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise MemoryError(f"there is not enough memory ({str(error).splitlines()[0]})") from error

        return cast(F, call)

    return decorate


def check_argument(name: str, value: Any, kind: Any, fix: str, **facts: Any) -> Any:
    """Check one value as an argument of a declared type; see :func:`checked`."""
    return _check_of(name, kind, fix, **facts)(value)


def _check_of(name: str, hint: Any, otherwise: str, *, fix: str = "", **facts: Any) -> _Check:
    """What checks a value of an argument, and returns it converted."""
    fix = fix or otherwise
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = tuple(kind for kind in kinds if kind in _VALUES or get_origin(kind) in (Literal, tuple, Sequence))
    paths = Path in kinds
    classes = tuple(_class_of(kind) for kind in kinds if kind not in plain)
    option = Option(name, Union[plain], **facts) if plain else None  # noqa: UP007 - made of a tuple
    counts = [len(get_args(kind)[0]) for kind in kinds if _takes_arguments(kind)]
    words = ", or ".join(
        ([option.rule] if option is not None else []) + [_in_words(kind) for kind in classes if kind is not Path]
    )

    def check(value: Any) -> Any:
        if isinstance(value, classes):
            for count in counts if inspect.isroutine(value) else ():
                _check_count(name, value, count, fix)
            if paths and isinstance(value, os.PathLike):
                check_path(name, value)
            return value
        if option is None:
            raise InputError(f"{name} must be {words}", got=shown(value), fix=fix)
        try:
            found = option.check(value, fix=fix)
        except InputError:
            if len(classes) == 0:
                raise
            raise InputError(f"{name} must be {words}", got=shown(value), fix=fix) from None
        if paths:
            check_path(name, found)
        return found

    return check


def _takes_arguments(kind: Any) -> bool:
    """Whether a type is that of a function whose arguments are known."""
    return get_origin(kind) is Callable and isinstance(get_args(kind)[0], list)


def _check_count(name: str, function: Any, count: int, fix: str) -> None:
    """Refuse a function that cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        got = shown(function)
        rule = f"{name} must be a function of {count} {'argument' if count == 1 else 'arguments'}"
        raise InputError(rule, got=got, fix=fix) from None
    except ValueError:  # of some built-in functions nothing is known
        return


def _class_of(kind: Any) -> type[Any]:
    """The class whose instances a declared type has."""
    if isinstance(kind, TypeVar):
        kind = kind.__bound__
    found = get_origin(kind) or kind
    return found if isinstance(found, type) else object


def _in_words(kind: type[Any]) -> str:
    if kind is types.NoneType:
        return "None"
    if kind is Callable:  # type: ignore[comparison-overlap]
        return "a function"
    return f"{'an' if kind.__qualname__[0] in 'AEIOU' else 'a'} {kind.__qualname__}"
