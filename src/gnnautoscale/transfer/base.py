"""How rows move between a training step and its histories: one after the other, or pulled ahead and pushed behind.

A step changes only its own batch's rows. All other rows that the next batch needs can therefore be pulled while the
step runs, and the rows that both share are on the GPU already: what the next step sees is exact, and hardly any of
the time is spent on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gnnautoscale.graph import BatchInfo, HistoryRows, RowOrder
from gnnautoscale.history import History
from gnnautoscale.transfer.times import Times


class Transfer(ABC):
    """Moves the rows of one step at a time.

    A step calls :meth:`begin`, then :meth:`exchange` for each slot, and :meth:`end` after its forward pass. In between
    it calls :meth:`look_ahead` once.
    """

    #: Changes when rows move to another address on the device.
    version = 0
    #: Measures how long steps wait for rows.
    times = Times()
    #: Whether the step that has begun did not pull rows that the one before it wrote, since they are at hand.
    skips_shared = False
    # The batch of the step that has begun, and the order of rows in its histories.
    _info: BatchInfo | None = None
    _order: RowOrder | None = None

    @abstractmethod
    def begin(self, info: BatchInfo, order: RowOrder, histories: Mapping[str, History]) -> None:
        """Start a step on a batch, with the histories that exist so far and the order of their rows."""

    def look_ahead(self) -> None:
        """Start to pull rows for the batch that is announced to follow."""
        return

    @abstractmethod
    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """Push the batch's rows and pull the halo's.

        Args:
            slot: The slot's name.
            history: Its history.
            rows: The batch's rows, ``[batch_size, width]``.
            push: Whether to push; if not, the halo's rows are pulled all the same.

        Returns:
            The batch's rows and the halo's as all earlier steps left them, ``[num_rows, width]``. The halo's are
            constants to autograd.
        """

    @abstractmethod
    def end(self) -> None:
        """Say that everything was pushed."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything that follows see all pushes, and forget what was pulled ahead."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The step inside of this context, which may be captured, has begun already; it ends with its pushes."""
        yield

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run a captured step that has begun."""
        graph.replay()

    @property
    def _current(self) -> BatchInfo:
        if self._info is None:
            raise RuntimeError("a step has to begin before its rows are exchanged")
        return self._info

    def _rows_of(self, info: BatchInfo) -> HistoryRows:
        if self._order is None:
            raise RuntimeError("a step has to begin before its rows are exchanged")
        return self._order.rows(info)
