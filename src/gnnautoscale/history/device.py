"""Histories in the compute device's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale.history.base import History
from gnnautoscale.kernels import Runs, gather_rows


class DeviceHistory(History):
    """Rows in the compute device's own memory."""

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device) -> None:
        super().__init__(num_nodes, width, dtype)
        self.raw = torch.zeros(num_nodes, self.codec.raw_width, dtype=self.codec.raw_dtype, device=device)

    def serves(self, device: torch.device) -> bool:
        """See :meth:`History.serves`."""
        return self.raw.device.type == device.type

    def read(self, index: Tensor, out: Tensor, *, skip: Tensor | None = None) -> None:
        """See :meth:`History.read`."""
        if skip is None:
            torch.index_select(self.raw, 0, index.to(self.raw.device), out=out)
        else:
            gather_rows(self.raw, index.to(self.raw.device), out, skip=skip)

    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """See :meth:`History.write`."""
        if not self._in_runs(raw, runs):
            self.raw.index_copy_(0, where.to(self.raw.device), raw.to(self.raw.device))
