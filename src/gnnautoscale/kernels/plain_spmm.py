"""Sums, maxima and minima over neighbours in plain torch; they define what the Triton kernels compute.

All functions take edges in CSR form: row ``i`` has the edges from ``ptr[i]`` up to ``ptr[i + 1]``; ``ptr`` has shape
``[num_rows + 1]``. ``col`` is the neighbour of each edge, a row of ``x``, and ``weight`` its factor, ``[num_edges]``
each. ``x`` holds the neighbours' rows, ``[num_columns, width]``.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.kernels.long_rows import RowSegments


def sum_neighbours(
    ptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    x: Tensor,
    *,
    mean: bool = False,
    degrees: Tensor | None = None,
    num_rows: int | None = None,
    segments: RowSegments | None = None,
) -> Tensor:
    """Sum the neighbours of each row, ``[num_rows, width]`` in the type of ``x``.

    ``mean`` divides each sum by its number of edges. Its gradient passes ``degrees``, a ``ptr`` over the rows of ``x``,
    ``[num_columns + 1]``, to divide each of these by its number of edges before summing. With ``num_rows``, the result
    has rows beyond those of ``ptr``, which are 0, and further edges are ignored. Only the Triton kernel uses
    ``segments``, the long rows of ``ptr`` and perhaps further ones.
    """
    if num_rows is not None:
        end = int(ptr[-1])
        col, weight = col[:end], None if weight is None else weight[:end]
    wide = x.to(_wide(x.dtype))
    if degrees is not None:
        wide = wide / _degree(degrees, wide.dtype)
    if x.is_cuda:
        # cuSPARSE adds in no fixed order, and refuses more edges than pairs of nodes.
        out = _segment_sum(ptr, _weighted(weight, wide.index_select(0, col)))
    else:
        values = wide.new_ones(col.numel()) if weight is None else weight.to(wide.dtype)
        matrix = csr_matrix(ptr, col, values, (ptr.numel() - 1, x.size(0)))
        # Autocast would multiply in half precision.
        with torch.autocast(x.device.type, enabled=False):
            out = matrix @ wide
    if mean:
        out = out / _degree(ptr, out.dtype)
    if num_rows is not None:
        out = F.pad(out, (0, 0, 0, num_rows - out.size(0)))
    return out.to(x.dtype)


def extreme_neighbours(
    ptr: Tensor, col: Tensor, weight: Tensor | None, x: Tensor, *, largest: bool, count: bool
) -> tuple[Tensor, Tensor | None]:
    """The largest or else smallest value among the neighbours of each row, and how many edges reach it.

    Both have shape ``[num_rows, width]``; rows without edges are 0. Without ``count``, the second is ``None``.
    """
    messages = _messages(weight, x.index_select(0, col))
    if not count:
        found = torch.segment_reduce(messages, "max" if largest else "min", offsets=ptr, axis=0, unsafe=True)
        return torch.where(ptr.diff().unsqueeze(1) > 0, found, 0).to(x.dtype), None
    row = _rows(ptr, col)
    out = messages.new_zeros(ptr.numel() - 1, x.size(1))
    index = row.unsqueeze(1).expand_as(messages)
    out.scatter_reduce_(0, index, messages, "amax" if largest else "amin", include_self=False)
    hits = (messages == out.index_select(0, row)).to(torch.int32)
    ties = hits.new_zeros(out.shape).index_add_(0, row, hits)
    return out.to(x.dtype), ties


def extreme_gradient(
    ptr_t: Tensor, col_t: Tensor, weight_t: Tensor | None, x: Tensor, out: Tensor, share: Tensor
) -> Tensor:
    """The gradient of :func:`extreme_neighbours`: each edge that reached the extreme value passes on its share.

    The edges are grouped by row of ``x``: ``ptr_t`` has shape ``[num_columns + 1]``, ``col_t`` is a row of ``out``.
    ``share`` is the gradient of ``out`` over the number of edges that share it, ``[num_rows, width]``, at least
    float32. Returns the gradient of ``x``, ``[num_columns, width]``.
    """
    messages = _messages(weight_t, x.index_select(0, _rows(ptr_t, col_t)))
    passed = _weighted(weight_t, share.index_select(0, col_t))
    passed = torch.where(messages == out.index_select(0, col_t).to(messages.dtype), passed, 0)
    return _segment_sum(ptr_t, passed).to(x.dtype)


def csr_matrix(ptr: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix of edges in CSR form, without checks."""
    _silence_csr()
    return torch.sparse_csr_tensor(ptr, col, values, shape, check_invariants=False)


def _messages(weight: Tensor | None, gathered: Tensor) -> Tensor:
    """Weighted rows in at least float32, rounded to their own type first, so that the gradient finds the same ties."""
    wide = gathered.to(_wide(gathered.dtype))
    return _weighted(weight, wide).to(gathered.dtype).to(wide.dtype)


def _weighted(weight: Tensor | None, gathered: Tensor) -> Tensor:
    return gathered if weight is None else gathered * weight.to(gathered.dtype).unsqueeze(1)


def _segment_sum(ptr: Tensor, values: Tensor) -> Tensor:
    """Sums of consecutive rows, in a fixed order; on a GPU index_add_ has none."""
    return torch.segment_reduce(values, "sum", offsets=ptr, axis=0, unsafe=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _degree(ptr: Tensor, dtype: torch.dtype) -> Tensor:
    return ptr.diff().clamp(min=1).to(dtype).unsqueeze(1)


def _rows(ptr: Tensor, col: Tensor) -> Tensor:
    """The row of each edge, ``[num_edges]``."""
    rows: Tensor = torch._convert_indices_from_csr_to_coo(ptr, col)[0]
    return rows.to(torch.int64)


@cache
def _silence_csr() -> None:
    """Torch warns about the first CSR matrix of a process: make that one here, silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], torch.ones(0), (1, 1), check_invariants=False)
