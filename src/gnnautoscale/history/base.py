"""The contract of every medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.history.precision import codec_for
from gnnautoscale.kernels import Runs

# With more pieces, writing rows one by one is faster.
_MOST_RUNS = 64


class History(ABC):
    """The last known rows of all nodes at one slot.

    Rows are zero until they are pushed. A pull sees all earlier pushes, on the same stream of a GPU. Rows may be kept
    in another precision than they are pushed in; a pull converts them back. A medium keeps and moves *raw* rows, and
    leaves the precision to :attr:`codec`.

    Args:
        num_nodes: Number of rows.
        width: Number of values in a row.
        dtype: The type that rows are kept in.

    Attributes:
        codec: Turns rows into raw ones and back.
        raw: All raw rows in their place, ``[num_nodes, raw_width]``, to be saved or replaced as a whole.
    """

    raw: Tensor

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype) -> None:
        self.num_nodes, self.width, self.dtype = num_nodes, width, dtype
        self.codec = codec_for(dtype, width)

    def pull(self, index: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Read the rows of an index, ``[count]``: ``[count, width]``, on the given device and in the given type."""
        # Converted where they arrive, so that narrow rows travel narrow.
        raw = torch.empty(index.numel(), self.codec.raw_width, dtype=self.codec.raw_dtype, device=device)
        self.read(index, raw)
        return self.codec.decode(raw, dtype)

    def push(self, rows: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """Write rows.

        Args:
            rows: New rows, ``[count, width]``, on any device.
            where: The rows they replace, ``[count]``, distinct.
            runs: The same as contiguous pieces.
        """
        if rows.dim() != 2 or rows.size(1) != self.width or rows.size(0) != where.numel():
            rule = f"this history takes {where.numel()} rows of width {self.width}"
            fix = "A layer's width may not change once its history exists; autoscale the model again if it did."
            raise InputError(rule, got=f"a tensor of shape {tuple(rows.shape)}", fix=fix)
        # Likewise converted where they come from.
        self.write(self.codec.encode(rows.detach()), where, runs)

    @abstractmethod
    def read(self, index: Tensor, out: Tensor, *, skip: Tensor | None = None) -> None:
        """Read raw rows into a tensor.

        Args:
            index: The rows to read, ``[count]``.
            out: Receives them, ``[count, raw_width]``.
            skip: Rows with a value of at least 0 here are not read, ``[count]``, int32.
        """

    def read_together(
        self, others: Sequence[History], index: Tensor, outs: Sequence[Tensor], *, skip: Tensor | None = None
    ) -> None:
        """Read the same rows of this history and of others of the same kind; see :meth:`read`.

        ``outs`` receive the raw rows of this history and then of each of the others.
        """
        for history, out in zip((self, *others), outs, strict=True):
            history.read(index, out, skip=skip)

    @abstractmethod
    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """Write raw rows, ``[count, raw_width]``; see :meth:`push`."""

    def serves(self, device: torch.device) -> bool:
        """Whether steps on a device can read and write its rows."""
        return True

    @property
    def num_bytes(self) -> int:
        """Size of all rows."""
        return self.num_nodes * self.codec.raw_width * self.codec.raw_dtype.itemsize

    def _in_runs(self, raw: Tensor, runs: Runs | None) -> bool:
        """Write raw rows piece by piece if they are given as few pieces; returns whether they were."""
        if runs is None or len(runs) > _MOST_RUNS:
            return False
        for start, first, count in runs:
            self._write_run(start, raw[first : first + count])
        return True

    def _write_run(self, start: int, raw: Tensor) -> None:
        """Write raw rows to consecutive places."""
        self.raw[start : start + raw.size(0)].copy_(raw, non_blocking=True)
