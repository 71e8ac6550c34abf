"""The contract of everything that moves rows between a training step and its histories.

A step changes only its own batch's rows. All other rows that the next batch needs can be pulled while the step runs,
and the rows that both share are on the compute device already. So the next step sees exact rows and hardly waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from gnnautoscale.history import History
from gnnautoscale.transfer.rows import BatchRows
from gnnautoscale.transfer.times import Times


class Transfer(ABC):
    """Moves the rows of one step at a time.

    Each step makes these calls, in this order; :meth:`look_ahead` may come at any time between the first and the last:

    1. :meth:`begin`, once
    2. :meth:`exchange`, for each slot
    3. :meth:`end`, at the end of the forward pass
    4. :meth:`join`, before a capture ends or the batch's memory is used again
    5. :meth:`complete`, once the step was run

    A captured step makes calls 2 to 4 when it is captured, and the others whenever it is replayed. A step that fails
    leaves out the rest; the next one begins as usual.
    """

    #: Changes when rows move to another address on the device.
    version = 0
    #: Whether the step that has begun found the rows that it shares with the step before on the device.
    skips_shared = False
    #: Whether rows are pushed in :meth:`complete` only, and not in :meth:`end`.
    pushes_late = False
    #: Measures how long steps wait for rows.
    times = Times()
    _rows: BatchRows | None = None

    @abstractmethod
    def begin(self, rows: BatchRows, following: BatchRows | None, histories: Mapping[str, History]) -> None:
        """Start a step: its rows are on their way.

        ``following`` are those of the batch that is likely to follow, a hint; ``histories`` those that exist so far,
        by slot.
        """

    def look_ahead(self) -> None:
        """Start to pull rows for the batch that is likely to follow."""
        return

    @abstractmethod
    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """Push the batch's rows, ``[batch_size, width]``, and pull the halo's; without ``push``, only pull.

        Returns the batch's rows, then the halo's as all earlier steps left them, ``[num_rows, width]``. The halo's are
        constants to autograd.
        """

    def end(self) -> None:
        """Do the step's own work at the end of its forward pass; a captured step repeats it."""
        return

    def join(self) -> None:
        """Let the step's stream wait for its pushes."""
        return

    def complete(self) -> None:
        """Do the host's part after the step was run or replayed."""
        return

    def finish_pushes(self) -> None:
        """Let the step that has begun see the rows that earlier steps have pushed."""
        return

    def after_pushes(self) -> AbstractContextManager[None]:
        """A context for reading and writing rows after this step's pushes, and all that was asked for so far.

        The next step does not wait for it unless it is told to :meth:`join`.
        """
        return nullcontext()

    def settle(self) -> None:
        """Let everything that follows see all pushes, and forget what was pulled ahead."""
        return

    def close(self) -> None:
        """Finish all pushes and free threads; no step may begin afterwards."""
        return

    def measure(self, times: Times) -> None:
        """Measure how long steps wait for rows."""
        self.times = times

    @property
    def _current(self) -> BatchRows:
        if self._rows is None:
            raise RuntimeError("a step has to begin before its rows are exchanged")
        return self._rows
