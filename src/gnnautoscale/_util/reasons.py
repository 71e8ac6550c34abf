"""Says why something failed, and what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def reason_of(error: BaseException) -> str:
    """Why something failed: the first line of the message; of the system's errors, without their number and the path.

    Example:
        >>> reason_of(FileNotFoundError(2, "No such file or directory", "graph.npz"))
        'no such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A sentence with the known name closest to one that is not known; ``otherwise`` if none is close.

    Example:
        >>> did_you_mean("sgd", ["adam", "sgd2"], "Choose one of these.")
        "Did you mean 'sgd2'?"
    """
    small = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), small, n=1)
    return f"Did you mean '{small[close[0]]}'?" if close else otherwise
