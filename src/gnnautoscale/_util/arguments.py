"""Checks the arguments of public functions by the types that their signatures declare."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gnnautoscale._util.memory import lacks_memory
from gnnautoscale._util.options import Option, check_path, shown
from gnnautoscale._util.reasons import did_you_mean
from gnnautoscale.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
_VALUES = (bool, int, float, str)
_LISTS = (Sequence, Collection, Iterable)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_Check = Callable[[Any], Any]


def checked(**facts: Mapping[str, Any]) -> Callable[[F], F]:
    """Refuse arguments of other types than a function's signature declares, and values out of bounds.

    Numbers, switches, words and their lists are checked and converted as options are (:class:`Option`), so that NumPy's
    numbers become plain ones. Of a class, an instance is needed, and so for the items of lists and the values of
    dictionaries; anything may stand for ``Any``. Tensors must be dense and have values. A class may be decorated
    instead of its ``__init__``, as that of a dataclass is nowhere to be seen.

    Args:
        facts: By the name of an argument, further attributes of its :class:`Option`, such as ``least``; the ``fix`` of
            its error; and of a tensor the number of its dimensions, ``dims``, and whether it holds ``integers``.

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
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
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
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                known = [each for each in signature.parameters if each != "self"]
                rule = f"{name} takes the arguments {', '.join(known)}"
                unknown = next((each for each in kwargs if each not in signature.parameters), "")
                fix = did_you_mean(unknown, known, "Pass what it needs, by name if in doubt.")
                raise InputError(rule, got=f"another call ({error})", fix=fix) from None
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


def _check_of(
    name: str,
    hint: Any,
    otherwise: str,
    *,
    fix: str = "",
    dims: int | None = None,
    integers: bool = False,
    **facts: Any,
) -> _Check:
    """What checks a value of an argument, and returns it converted."""
    fix = fix or otherwise
    kinds = _kinds_of(hint)
    plain = tuple(kind for kind in kinds if _is_plain(kind))
    paths = Path in kinds
    classes = tuple(_class_of(kind) for kind in kinds if kind not in plain)
    rows = tuple(kind for kind in classes if kind not in _LISTS)  # text and tensors are no lists
    items = [_items_of(name, kind, fix) for kind in kinds if kind not in plain]
    option = Option(name, Union[plain], **facts) if plain else None  # noqa: UP007 - made of a tuple
    counts = [len(get_args(kind)[0]) for kind in kinds if _takes_arguments(kind)]
    words = ", or ".join(
        ([option.rule] if option is not None else []) + [_in_words(kind) for kind in classes if kind is not Path]
    )

    def check(value: Any) -> Any:
        if isinstance(value, rows if isinstance(value, (str, bytes, Tensor)) else classes):
            for check_items in items:
                check_items(value)
            if isinstance(value, Tensor):
                _check_tensor(name, value, fix, dims, integers=integers)
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


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a declared type."""
    if isinstance(hint, TypeVar):
        return hint.__constraints__ or (hint,)
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_plain(kind: Any) -> bool:
    """Whether an option may have this type."""
    if get_origin(kind) in (tuple, Sequence):
        item = get_args(kind)[0]
        return item in _VALUES or get_origin(item) is Literal
    return kind in _VALUES or get_origin(kind) is Literal


def _items_of(name: str, kind: Any, fix: str) -> Callable[[Any], None]:
    """What checks the items of a list, or the values of a dictionary, of a declared type."""
    origin, inner = get_origin(kind), get_args(kind)
    within = inner[-1] if origin in (list, *_LISTS, dict, Mapping) else Any
    if within is Any:
        return lambda value: None
    check = functools.cache(lambda: _check_of(f"each of {name}", within, fix))  # nested types, when they are needed

    def check_items(value: Any) -> None:
        if isinstance(value, (list, tuple, set, frozenset, Mapping)):
            for item in value.values() if isinstance(value, Mapping) else value:
                check()(item)

    return check_items


def _check_tensor(name: str, value: Tensor, fix: str, dims: int | None, *, integers: bool) -> None:
    """Refuse a tensor that is not dense or has no values, other numbers of dimensions, and other than integers."""
    dense = value.layout == torch.strided and not value.is_meta
    if dense and dims in (None, value.dim()) and (not integers or value.dtype in _INTEGERS):
        return
    of = " of integers" if integers else ""
    having = "" if dims is None else f" with {dims} dimension{'s' * (dims != 1)}"
    got = f"{value.dtype} of shape {tuple(value.shape)}{'' if dense else ', sparse or without values'}"
    raise InputError(f"{name} must be a dense tensor{of}{having}", got=got, fix=fix)


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
        kind = kind.__bound__ or object
    found = get_origin(kind) or kind
    return found if isinstance(found, type) else object


def _in_words(kind: type[Any]) -> str:
    if kind is types.NoneType:
        return "None"
    if kind is Callable:  # type: ignore[comparison-overlap]
        return "a function"
    if kind in _LISTS:
        return "a list"
    return f"{'an' if kind.__qualname__[0] in 'AEIOU' else 'a'} {kind.__qualname__}"
