"""The contract of whatever shares rows of histories with other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from gnnautoscale.history import History, RowSums
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.rows import BatchRows


class Sharing(Protocol):
    """Keeps rows that other processes own up to date."""

    @property
    def shared(self) -> object:
        """Stands for the graph whose rows are shared: the same object for all models on one loader."""

    def start(self) -> None:
        """Take note that a step's forward pass begins."""

    def answer(self) -> None:
        """Take part in backward passes of other processes, as before everything else that all of them do together."""

    def first_late(self, kind: str) -> int:
        """The first of those rows of a type that others write; all behind it are theirs, too."""

    def around(self, transfer: Transfer, kind: str) -> Transfer:
        """A transfer that moves rows of a type as another one does, and also sends those of a step that others need."""

    def aside(self, rows: Mapping[str, BatchRows]) -> AbstractContextManager[None]:
        """Every process makes a pass on a batch of its own that is no step; what it pushes is sent as that of a step.

        A batch must be of whole parts; ``rows`` are those of its nodes of each type.
        """

    def send(self, histories: Mapping[str, Sequence[History]]) -> None:
        """Send those of the rows that were pushed last which others need, by type; every process must call it."""

    def all_forms(self, forms: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Width and type of the histories that any process has, by type and slot; every process must call it."""

    def finish(self, out: Any) -> None:
        """Take note of the output of a step, whose backward pass may need all processes."""

    def share(self, histories: Mapping[str, Sequence[History]]) -> None:
        """Send all rows that others need, and receive theirs, by type; every process must call it."""

    def collect(self, sums: Mapping[str, Sequence[RowSums]]) -> None:
        """Add what was added here to rows of others to theirs, by type; every process must call it."""

    def add_up(self, *tensors: Tensor) -> list[Tensor]:
        """The sums of tensors, which have the same shapes everywhere, over all processes; each must call it."""

    def quietly(self) -> AbstractContextManager[None]:
        """Within, backward passes leave the gradients of weights to this process alone."""

    def follow(self, records: Callable[[], Mapping[str, Mapping[str, Sequence[Any]]]]) -> None:
        """Compare what layers make of edges with other processes whenever it changes.

        ``records`` are those of each call, by type of nodes.
        """

    def close(self) -> None:
        """Leave the model as it was: nothing is shared any more."""
