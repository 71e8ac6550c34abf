"""The contract of whatever shares rows of histories with other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gnnautoscale.history import History
from gnnautoscale.transfer.base import Transfer


class Sharing(Protocol):
    """Keeps rows that other processes own up to date."""

    def around(self, transfer: Transfer, kind: str) -> Transfer:
        """A transfer that moves rows of a type as another one does, and also sends those of a step that others need."""

    def share(self, histories: Mapping[str, Sequence[History]]) -> None:
        """Send all rows that others need, and receive theirs, by type; every process must call it."""

    def close(self) -> None:
        """Leave the model as it was: nothing is shared any more."""
