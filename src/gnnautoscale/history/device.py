"""Histories in the compute device's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale.history.base import History, Runs
from gnnautoscale.kernels import gather_rows


class DeviceHistory(History):
    """Rows in the compute device's own memory.

    Args:
        num_nodes: Number of rows.
        width: Number of values in a row.
        dtype: The type that rows are kept in.
        device: The compute device.
    """

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device) -> None:
        super().__init__(num_nodes, width, dtype)
        self._rows = torch.zeros(num_nodes, self.codec.raw_width, dtype=self.codec.raw_dtype, device=device)

    def read(self, index: Tensor, out: Tensor, *, skip: Tensor | None = None) -> None:
        """See :meth:`History.read`."""
        if skip is None:
            torch.index_select(self._rows, 0, index.to(self._rows.device), out=out)
        else:
            gather_rows(self._rows, index.to(self._rows.device), out, skip=skip)

    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """See :meth:`History.write`."""
        if not self._in_runs(self._rows, raw, runs):
            self._rows.index_copy_(0, where.to(self._rows.device), raw.to(self._rows.device))

    @property
    def raw(self) -> Tensor:
        """See :attr:`History.raw`."""
        return self._rows

    @property
    def num_bytes(self) -> int:
        """See :attr:`History.num_bytes`."""
        return self._rows.nbytes
