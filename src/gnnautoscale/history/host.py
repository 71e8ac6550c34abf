"""Histories in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnautoscale._util import pinned_zeros
from gnnautoscale.history.base import History
from gnnautoscale.kernels import Runs, gather_rows, gather_tables, scatter_rows, use_triton


class HostHistory(History):
    """Rows in host memory, page-locked for a GPU, which reads and writes them over the bus itself."""

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device) -> None:
        super().__init__(num_nodes, width, dtype)
        self._device = device
        shape = num_nodes, self.codec.raw_width
        if device.type == "cuda":
            self.raw, self._pinned = pinned_zeros(shape, self.codec.raw_dtype)
        else:
            self.raw = torch.zeros(shape, dtype=self.codec.raw_dtype)

    def serves(self, device: torch.device) -> bool:
        """See :meth:`History.serves`; a GPU needs page-locked memory."""
        return device.type != "cuda" or self._device.type == "cuda"

    def read(self, index: Tensor, out: Tensor, *, skip: Tensor | None = None) -> None:
        """See :meth:`History.read`."""
        if use_triton(out) or not out.is_cuda:
            self._finish_writing(out)
            gather_rows(self.raw, index.to(out.device), out, skip=skip)
        else:
            torch.cuda.current_stream(out.device).synchronize()
            out.copy_(self.raw.index_select(0, index.cpu()))

    def read_together(
        self, others: Sequence[History], index: Tensor, outs: Sequence[Tensor], *, skip: Tensor | None = None
    ) -> None:
        """See :meth:`History.read_together`; one kernel on a GPU."""
        tables = [self.raw, *(other.raw for other in others if isinstance(other, HostHistory))]
        alike = len({(table.shape, table.dtype) for table in tables}) == 1 and len(tables) == len(outs)
        if use_triton(outs[0]) and alike:
            gather_tables(tables, index.to(outs[0].device), outs, skip=skip)
        else:
            super().read_together(others, index, outs, skip=skip)

    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """See :meth:`History.write`."""
        self._finish_writing(raw)
        # The GPU's copy engine moves pieces. A kernel that writes rows over the bus would hold up other kernels.
        if self._in_runs(raw, runs):
            return
        if use_triton(raw) or not raw.is_cuda:
            scatter_rows(raw, where.to(raw.device), self.raw)
        else:
            self.raw.index_copy_(0, where.cpu(), raw.cpu())

    def _finish_writing(self, rows: Tensor) -> None:
        """Wait for the GPU, which may be writing, before the host itself touches rows."""
        if self._device.type == "cuda" and not rows.is_cuda:
            torch.cuda.synchronize(self._device)
