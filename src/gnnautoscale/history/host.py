"""Histories in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale.history.base import History


class HostHistory(History):
    """Rows in host memory, page-locked when a GPU computes, so that its copies need no extra buffer."""

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        super().__init__(num_nodes, width, dtype)
        self._rows = torch.zeros(num_nodes, width, dtype=dtype, pin_memory=pinned)

    def pull(self, index: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """See :meth:`History.pull`."""
        # Converted on the device, so that narrow rows cross the bus narrow.
        return self._rows.index_select(0, index).to(device).to(dtype)

    def push(self, rows: Tensor, where: Tensor) -> None:
        """See :meth:`History.push`."""
        self._check_rows(rows, where)
        self._rows.index_copy_(0, where, rows.detach().to(self.dtype).cpu())

    @property
    def num_bytes(self) -> int:
        """See :attr:`History.num_bytes`."""
        return self._rows.nbytes
