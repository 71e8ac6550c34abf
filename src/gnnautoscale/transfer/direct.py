"""Moves rows when asked, in the order of the calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnautoscale.graph import BatchInfo, RowOrder
from gnnautoscale.history import History
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.times import Times

_UNTIMED = Times()


class Direct(Transfer):
    """Reads and writes when asked, in the order of the calls.

    Args:
        device: The compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, info: BatchInfo, order: RowOrder, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        self._info, self._rows = info, order.rows(info)
        self._index = info.placed.get(order, self._rows.index)

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        if self._index.device != rows.device:
            self._index = self._rows.on(rows.device)
        size = self._current.batch_size
        times = _UNTIMED if rows.is_cuda else self.times  # a captured step cannot be timed from inside
        if push:
            with times.during("push"):
                history.push(rows.detach(), self._index[:size], self._rows.runs)
        if not self._current.num_halo:
            return rows
        with times.during("pull"):
            return torch.cat([rows, history.pull(self._index[size:], device=rows.device, dtype=rows.dtype)])

    def end(self) -> None:
        """See :meth:`Transfer.end`."""

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
