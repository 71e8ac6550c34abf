"""Converts arrays and columns of tables to the types of the library; anything else is refused with its name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnautoscale.errors import InputError

Array = npt.NDArray[Any]


def integers(name: str, column: Array) -> Array:
    """Convert to int64; anything but integers is refused."""
    try:
        if column.dtype.kind in "iuU":
            return column.astype(np.int64)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name} must be integers", got=_reason(error), fix="Number them from 0.") from error
    raise InputError(f"{name} must be integers", got=f"type {column.dtype}", fix="Save them as int64.")


def ids(column: Array) -> Array:
    """Convert ids to integers if all of them are, else leave them as text."""
    try:
        return integers("id, source and target", column)
    except InputError:
        if column.dtype.kind == "U":
            return column
        raise


def splits(name: str, column: Array) -> Array:
    """Convert splits to their numbers, if they are words."""
    if column.dtype.kind != "U":
        return integers(name, column)
    words = [column == word for word in ("train", "val", "test", "none", "")]
    try:
        return integers(name, np.select(words, ["0", "1", "2", "-1", "-1"], column))
    except InputError as error:
        rule, fix = f"{name} must be integers, or train, val, test and none", "Rename them."
        raise InputError(rule, got=_reason(error.__cause__ or error), fix=fix) from error


def floats(name: str, column: Array) -> Array:
    """Convert to float32; anything but numbers is refused."""
    need(column.dtype.kind in "fiub", f"{name} must be numbers", f"type {column.dtype}", "Convert or drop it.")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which the checks refuse
        return column.astype(np.float32, copy=False)


def numbers(name: str, column: Array) -> Array:
    """Convert targets: integers to int64, yes or no to bool, everything else to float32; several 0 and 1 as well.

    What is empty in a table is unknown: -1 beside integers and words, else NaN. Words are classes: see
    :func:`class_names`.
    """
    if column.dtype.kind == "U":
        words = class_names(name, column)
        if words:
            return np.where(_empty(column), -1, np.searchsorted(words, column)).astype(np.int64)
        try:
            return integers(name, np.where(_empty(column), "-1", column))
        except InputError:
            column = np.where(_empty(column), "nan", column).astype(np.float64)
    if column.dtype.kind == "b":
        return column
    labels = column.ndim > 1 and bool(np.isin(column, (0, 1)).all())
    return column.astype(np.int64) if column.dtype.kind in "iu" and not labels else floats(name, column)


def class_names(name: str, column: Array) -> tuple[str, ...]:
    """The classes of a column of words, in the order of the alphabet, which numbers them; none if it holds numbers.

    Example:
        >>> class_names("label", np.array(["dog", "cat", "", "dog"]))
        ('cat', 'dog')
    """
    if column.dtype.kind != "U":
        return ()
    known = np.unique(column[~_empty(column)])
    words = [word for word in known.tolist() if not _is_number(word)]
    if words and len(words) < known.size:
        number = next(word for word in known.tolist() if _is_number(word))
        rule, got = f"{name} must be words or numbers, not both", f"{words[0]!r} beside {number!r}"
        raise InputError(rule, got=got, fix="Correct the cells, or name all classes by words.")
    return tuple(words)


def _empty(column: Array) -> Array:
    return np.isin(np.char.lower(column), ("", "nan"))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _reason(error: BaseException) -> str:
    """What NumPy says, with words as they are in the file."""
    return re.sub(r"np\.str_\((.*)\)", r"\1", str(error))


def need(holds: bool, rule: str, got: str, fix: str) -> None:
    """Refuse input for which a rule does not hold."""
    if not holds:
        raise InputError(rule, got=got, fix=fix)
