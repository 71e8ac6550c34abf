"""The contract of every medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.history.precision import codec_for

# Contiguous pieces of rows: for each the first row in a history, its first row in a tensor, and its length.
Runs = Sequence[tuple[int, int, int]]

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
    """

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype) -> None:
        self.num_nodes = num_nodes
        self.width = width
        self.dtype = dtype
        self.codec = codec_for(dtype, width)

    def pull(self, index: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Read rows.

        Args:
            index: The rows to read, ``[count]``.
            device: The device of the result.
            dtype: The type of the result.

        Returns:
            The rows, ``[count, width]``.
        """
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
            raise InputError(
                f"this history takes {where.numel()} rows of width {self.width}",
                got=f"a tensor of shape {tuple(rows.shape)}",
                fix="A layer's width may not change once its history exists; autoscale the model again if it did.",
            )
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

        Args:
            others: Further histories.
            index: The rows to read, ``[count]``.
            outs: Receive the raw rows of this history and of each of the others, each ``[count, raw_width]``.
            skip: Rows with a value of at least 0 here are not read, ``[count]``, int32.
        """
        for history, out in zip((self, *others), outs, strict=True):
            history.read(index, out, skip=skip)

    @abstractmethod
    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """Write raw rows, ``[count, raw_width]``; see :meth:`push`."""

    @property
    @abstractmethod
    def raw(self) -> Tensor:
        """All raw rows in their place, ``[num_nodes, raw_width]``, to be saved or replaced as a whole."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of all rows."""

    @staticmethod
    def _few(runs: Runs | None) -> bool:
        """Whether rows are given as few pieces."""
        return runs is not None and len(runs) <= _MOST_RUNS

    @classmethod
    def _in_runs(cls, target: Tensor, rows: Tensor, runs: Runs | None) -> bool:
        """Write rows piece by piece if they are given as few pieces; returns whether they were."""
        if runs is None or not cls._few(runs):
            return False
        for start, first, count in runs:
            target[start : start + count].copy_(rows[first : first + count], non_blocking=True)
        return True
