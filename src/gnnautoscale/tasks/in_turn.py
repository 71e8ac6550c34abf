"""Sees to it that loops of several ranks pass the output of each batch on, where ranks tell each other about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError


class InTurn:
    """Yields batches, and refuses a loop that does not answer each of them once.

    Args:
        method: What a loop calls with the output of a batch, for messages.
        needed: Whether there are other ranks, which would wait.
    """

    def __init__(self, method: str, *, needed: bool) -> None:
        self._method, self._needed, self._open = method, needed, False

    def batches(self, batches: Iterable[Data]) -> Iterator[Data]:
        """The same batches, one after the other."""
        for batch in batches:
            self._open = True
            yield batch
            self._check(not self._open, "a batch without it")

    def answer(self) -> None:
        """The loop passes the output of the present batch on."""
        self._check(self._open, "a second call")
        self._open = False

    def _check(self, holds: bool, got: str) -> None:
        if self._needed and not holds:
            rule = f"on several ranks a loop calls {self._method} once with each batch, since ranks talk there"
            raise InputError(rule, got=got, fix="Call it on every rank, also where nothing is learned.")
