"""Splits rows with very many edges into segments that are summed in parallel.

A program adds the edges of a row one after another, so without this all others would wait for the longest row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale._util import for_later

LONG_ROW = 512  # a row with more edges than this is split into segments of at most this many


class RowSegments(NamedTuple):
    """The long rows of edges in CSR form, and their segments; all tensors are int32.

    Attributes:
        long_row: The long rows, ``[num_long]``, ascending.
        first_segment: First segment of each long row, ``[num_long + 1]``.
        segment_begin: First edge of each segment, ``[num_segments]``.
        segment_end: One past the last edge of each segment, ``[num_segments]``.
    """

    long_row: Tensor
    first_segment: Tensor
    segment_begin: Tensor
    segment_end: Tensor

    @staticmethod
    def of(tensors: dict[str, Tensor], suffix: str = "") -> RowSegments | None:
        """The segments among named tensors, the reverse of :meth:`named`; ``None`` if there are none."""
        if "long_row" + suffix not in tensors:
            return None
        return RowSegments(*(tensors[name + suffix] for name in RowSegments._fields))

    def named(self, suffix: str = "") -> dict[str, Tensor]:
        """The tensors by name, each name with a suffix."""
        return {name + suffix: tensor for name, tensor in zip(self._fields, self, strict=True)}


@for_later
def split_long_rows(ptr: Tensor, longest: int) -> RowSegments | None:
    """Split each row of more than ``LONG_ROW`` edges into segments; ``None`` if no row is long.

    ``ptr`` is the first edge of each row, ``[num_rows + 1]``, and no row has more than ``longest`` edges. On a GPU this
    waits for the device if there are long rows.

    Example:
        >>> segments = split_long_rows(torch.tensor([0, 5, 1205, 1210]), 1200)
        >>> segments.long_row.tolist(), segments.first_segment.tolist()
        ([1], [0, 3])
        >>> segments.segment_begin.tolist(), segments.segment_end.tolist()
        ([5, 517, 1029], [517, 1029, 1205])
    """
    if longest <= LONG_ROW:
        return None
    degree = ptr.diff()
    row = (degree > LONG_ROW).nonzero().squeeze(1)
    if not row.numel():
        return None
    # In 64 bits, since an end may exceed 32 bits before it is clipped.
    num_segments = (degree[row].long() + LONG_ROW - 1) // LONG_ROW
    first = F.pad(num_segments.cumsum(0), (1, 0))
    place = torch.repeat_interleave(num_segments)  # of each segment's row among the long rows
    number = torch.arange(place.numel(), device=ptr.device) - first[place]
    begin = ptr[row].long()[place] + number * LONG_ROW
    end = torch.minimum(begin + LONG_ROW, ptr[row + 1][place].long())
    return RowSegments(*(tensor.to(torch.int32) for tensor in (row, first, begin, end)))
