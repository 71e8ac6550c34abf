"""What the library says when it is used in a way that cannot be right."""

from functools import partial
from typing import Any


class InputError(ValueError):
    """Bad input: the rule that was broken, what was received, and what to do about it.

    Args:
        rule: What has to hold, as a clause without a full stop.
        got: What was received instead.
        fix: What the user can do, as a sentence.

    Example:
        >>> raise InputError("num_parts must be at least 1", got="0", fix="Pass the number of parts to cut into.")
        Traceback (most recent call last):
        ...
        gnnautoscale.errors.InputError: num_parts must be at least 1, but got 0. Pass the number of parts to cut into.
    """

    def __init__(self, rule: str, *, got: str, fix: str) -> None:
        super().__init__(f"{rule}, but got {got}. {fix}")
        self._parts = {"rule": rule, "got": got, "fix": fix}

    def __reduce__(self) -> Any:
        # To other processes, whole.
        return partial(type(self), **self._parts), ()


class UnsupportedModelError(InputError):
    """A model, or a layer in it, that histories cannot make right; the message names it and says why."""


class StaleHistoryWarning(UserWarning):
    """The histories were written with other weights than the model has now."""
