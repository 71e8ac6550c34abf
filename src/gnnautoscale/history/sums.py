"""Rows that are added up, in any medium."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale._util import Pinned
from gnnautoscale.errors import InputError
from gnnautoscale.history.base import History
from gnnautoscale.history.device import DeviceHistory
from gnnautoscale.history.disk import DiskHistory
from gnnautoscale.history.precision import Cast
from gnnautoscale.kernels import accumulate_rows, gather_sums, use_triton


class RowSums:
    """Sums of rows, one per node, kept in a history: zero until something is added.

    Each row has the number of the round in which it was last written, so a new round costs nothing: rows of earlier
    ones count as zero, and what is added to such a row replaces it unread.

    Args:
        history: Keeps the rows, in a floating-point type.

    Example:
        >>> from gnnautoscale.history import open_history
        >>> sums = RowSums(open_history("host", 3, 1, torch.float32, device=torch.device("cpu")))
        >>> for _ in range(2):
        ...     sums.add(torch.ones(1, 1), torch.tensor([2]))
        >>> sums.read(torch.tensor([2, 0]), dtype=torch.float32).tolist()
        [[2.0], [0.0]]
        >>> sums.clear()
        >>> sums.read(torch.tensor([2]), dtype=torch.float32).tolist()
        [[0.0]]
    """

    def __init__(self, history: History) -> None:
        if not isinstance(history.codec, Cast):
            raise InputError(
                "rows are added up in a floating-point type", got=f"{history.dtype}", fix="Use float32 or bfloat16."
            )
        self.history = history
        self._round = 1
        there = history.raw.device if isinstance(history, DeviceHistory) else torch.device("cpu")
        self._rounds = torch.zeros(history.num_nodes, dtype=torch.int32, device=there)
        if history.raw.is_pinned():
            self._pinned = Pinned()
            pinned = self._pinned.pin(self._rounds)
            self._rounds = self._rounds if pinned is None else pinned

    def clear(self) -> None:
        """Make all rows zero."""
        self._round += 1

    def add(self, rows: Tensor, where: Tensor) -> None:
        """Add to rows.

        Args:
            rows: What to add, ``[count, width]``, on the compute device.
            where: The rows to add to, ``[count]``, distinct, on the same device.
        """
        if self._is_direct(rows):
            accumulate_rows(rows, where, self.history.raw, self._rounds, self._round)
            return
        now = self.read(where, dtype=torch.promote_types(rows.dtype, self.history.dtype))
        self.history.push(now + rows, where)
        self._rounds[where.to(self._rounds.device)] = self._round

    def read(self, where: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Read rows, ``[count]``: ``[count, width]``, on the index's device, in a type; into ``out`` if given."""
        if out is None:
            out = torch.empty(where.numel(), self.history.width, dtype=dtype, device=where.device)
        if self._is_direct(out):
            gather_sums(self.history.raw, where, self._rounds, self._round, out)
            return out
        rows = self.history.pull(where, device=where.device, dtype=dtype)
        old = self._rounds[where.to(self._rounds.device)] != self._round
        return out.copy_(rows.masked_fill_(old.to(rows.device).unsqueeze(1), 0))

    def _is_direct(self, rows: Tensor) -> bool:
        """Whether a GPU reads and writes the rows itself."""
        return use_triton(rows) and not isinstance(self.history, DiskHistory)
