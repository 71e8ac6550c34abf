"""Options: name, type, default, help text and check of each, declared once as a field of a dataclass."""

from __future__ import annotations

import numbers
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from gnnautoscale._util.reasons import did_you_mean
from gnnautoscale.errors import InputError

# Whatever computes with integers takes 64 bits.
_LARGEST = 2**63
# Weights are of 32 bits.
_LARGEST_FLOAT = torch.finfo(torch.float32).max
# The longest name that file systems take, and the longest path.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
# Longer values are cut in messages.
_SHOWN = 120
# A value of each type in words, and several.
_WORDS: dict[type, tuple[str, str]] = {
    bool: ("true or false", "switches"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "words"),
}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: Its name in Python and in configuration files; its flag has dashes instead of underscores.
        type: ``bool``, ``int``, ``float``, ``str``, a ``Literal``, a tuple or sequence of one of them, or a union.
        group: The dataclass that declares it.
        least: The smallest number allowed.
        most: The largest number allowed.
        above: Numbers must be larger than this.
        below: Numbers must be smaller than this.
        path: Whether it names a file or folder.
        may_change: Whether a run may resume with another value.
        needs_histories: Whether it must keep its default in modes without histories.
    """

    name: str
    type: Any
    default: Any = None
    help: str = ""
    group: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    path: bool = False
    may_change: bool = False
    needs_histories: bool = False

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The alternatives of its type, without ``None``."""
        union = get_origin(self.type) in (Union, types.UnionType)
        return tuple(kind for kind in (get_args(self.type) if union else (self.type,)) if kind is not types.NoneType)

    @property
    def rule(self) -> str:
        """What its value must be, in words, such as ``one of never, epoch, or an integer of at least 1``."""
        bounds = {"of at least": self.least, "of at most": self.most, "above": self.above, "below": self.below}
        within = " and".join(f" {words} {bound}" for words, bound in bounds.items() if bound is not None)
        return ", or ".join(_in_words(kind) + within * (kind in (int, float)) for kind in self.kinds)

    def check(self, given: Any, fix: str = "Change this option.") -> Any:
        """Convert a value to the option's type, or refuse it and say how to fix it."""
        if given is None and types.NoneType in get_args(self.type):
            return None
        value = given
        if len(self.kinds) > 1 and isinstance(given, str) and given.isascii() and given.isdecimal():
            value = int(given)  # a flag's number, where words are allowed too
        for kind in self.kinds:
            with suppress(TypeError, OverflowError):
                converted = _convert(kind, value)
                if kind is str and self.path:
                    check_path(self.name, converted)
                if self._within(converted):
                    return converted
        if isinstance(given, str):
            fix = did_you_mean(
                given, [word for kind in self.kinds if get_origin(kind) is Literal for word in get_args(kind)], fix
            )
        large = int in self.kinds and isinstance(value, int) and not -_LARGEST <= value < _LARGEST
        raise InputError(f"{self.name} must be {self.rule}{' in 64 bits' * large}", got=shown(given), fix=fix)

    def _within(self, value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(_has_room, value))
        return not isinstance(value, (int, float)) or isinstance(value, bool) or self._is_allowed(value)

    def _is_allowed(self, number: float) -> bool:
        return (
            _has_room(number)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


def option(default: Any, text: str, **facts: Any) -> Any:
    """A dataclass field that declares an option; ``facts`` are further attributes of :class:`Option`."""
    return field(default=default, metadata={"help": text, **facts})


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of dataclasses whose fields are options: values are checked and converted when an instance is made."""

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            object.__setattr__(self, name, declared.check(getattr(self, name)))


def options_of(group: type[Any]) -> Mapping[str, Option]:
    """The options of a dataclass, by name; a subclass that only changes a default inherits everything else."""
    hints, facts = get_type_hints(group), dict[str, Mapping[str, Any]]()
    for base in reversed(group.__mro__):
        if is_dataclass(base):
            facts |= {each.name: each.metadata for each in fields(base) if each.metadata}
    return {
        each.name: Option(each.name, hints[each.name], each.default, group=group.__name__, **facts[each.name])
        for each in fields(group)
        if each.name in facts
    }


def check_names(given: Iterable[str], known: Iterable[str], rule: str, otherwise: str = "Leave it out.") -> None:
    """Refuse names that are not known, and hint at the closest known one, else at what to do ``otherwise``."""
    known = list(known)
    for name in given:
        if name not in known:
            raise InputError(rule, got=repr(name), fix=did_you_mean(name, known, otherwise))


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse what no file system takes as the path of a file or folder."""
    text = os.fspath(path)
    problem = ""
    if not isinstance(text, str) or not text or "\0" in text:
        problem = shown(text)
    elif len(os.fsencode(text)) > _LONGEST_PATH or any(
        len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts
    ):
        problem = f"{len(text)} characters, {text[:20]!r} and so on"
    if problem:
        rule = f"{name} must be a path that the system can take, with names of at most {_LONGEST_NAME} bytes"
        raise InputError(rule, got=problem, fix="Choose another one.")


def shown(value: Any) -> str:
    """A value for an error, cut short."""
    if isinstance(value, (np.ndarray, Tensor)) and value.ndim:
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {value.dtype}"
    try:
        text = repr(value)
    except Exception:  # an object of the user's
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} and so on"


def _has_room(value: Any) -> bool:
    """Whether a number is finite, and not too large to compute with; anything else is no number."""
    if isinstance(value, float):
        return abs(value) <= _LARGEST_FLOAT
    return not isinstance(value, int) or -_LARGEST <= value < _LARGEST


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) in (tuple, Sequence):
        item = get_args(kind)[0]
        return _in_words(item).replace("one", "some") if get_origin(item) is Literal else f"a list of {_WORDS[item][1]}"
    return _WORDS[kind][0]


def _convert(kind: Any, value: Any) -> Any:
    """A value as a type, or a ``TypeError``; booleans are no numbers, and numbers of NumPy are plain ones."""
    value = value.item() if isinstance(value, np.generic) else value
    is_bool = isinstance(value, bool)
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
    elif get_origin(kind) in (tuple, Sequence):
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple(_convert(get_args(kind)[0], item) for item in value)
    elif kind is float:
        if isinstance(value, (numbers.Integral, float)) and not is_bool:
            return float(value)
    elif kind is str:
        if isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str):
            return os.fspath(value)
    elif isinstance(value, kind) and is_bool == (kind is bool):
        return value
    raise TypeError
