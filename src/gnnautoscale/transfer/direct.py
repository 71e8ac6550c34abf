"""Moves rows when asked, in the order of the calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnautoscale.history import History
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.rows import BatchRows
from gnnautoscale.transfer.times import Times

_UNTIMED = Times()


class DirectTransfer(Transfer):
    """Reads and writes histories of any medium inside :meth:`exchange`; nothing overlaps."""

    _index: Tensor | None = None

    def begin(self, rows: BatchRows, following: BatchRows | None, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        self._rows, self._index = rows, None

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        batch = self._current
        if self._index is None:
            self._index = batch.on(rows.device)
        own, halo = self._index[: batch.batch_size], self._index[batch.batch_size :]
        times = _UNTIMED if rows.is_cuda else self.times  # a captured step cannot be timed from inside
        if push:
            with times.during("push"):
                history.push(rows.detach(), own, batch.runs)
        if not batch.num_halo:
            return rows
        with times.during("pull"):
            return torch.cat([rows, history.pull(halo, device=rows.device, dtype=rows.dtype)])
