"""Rows by index: out of a history, into a history, and two sources merged into one.

All three write into a tensor that is there already, and on a GPU they neither allocate nor wait, so that they can
run in a CUDA graph. Autograd does not see them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.kernels.available import use_triton

# Few programs saturate the bus to host memory and leave the rest of the GPU to compute.
PROGRAMS = 8


@torch.no_grad()
def gather_rows(
    source: Tensor, index: Tensor, out: Tensor, *, skip: Tensor | None = None, programs: int = PROGRAMS
) -> None:
    """Read rows: ``out[i] = source[index[i]]`` wherever ``skip[i] < 0``; other rows of ``out`` stay as they are.

    Args:
        source: ``[num_rows, width]``, on the device of ``out`` or in host memory: pinned, if ``out`` is on a GPU.
        index: The rows to read, ``[count]``, int64 or int32, on the device of ``out``.
        out: Where they go, ``[count, width]``; values are converted to its type.
        skip: Rows not to read have a value of 0 or more here, ``[count]``, int32, on the device of ``out``. ``None``
            reads all.
        programs: How many programs share the work on a GPU.

    Example:
        >>> out = torch.zeros(2, 2)
        >>> gather_rows(torch.arange(6.0).view(3, 2), torch.tensor([2, 0]), out)
        >>> out
        tensor([[4., 5.],
                [0., 1.]])
    """
    _check_rows(out, source)
    _check_index(out, index, skip)
    if use_triton(out):
        from gnnautoscale.kernels.triton_rows import gather_rows as on_gpu

        on_gpu(source, index, out, skip, programs)
    else:
        plain_gather_rows(source, index, out, skip)


@torch.no_grad()
def scatter_rows(rows: Tensor, index: Tensor, target: Tensor, *, programs: int = PROGRAMS) -> None:
    """Write rows: ``target[index[i]] = rows[i]``.

    Args:
        rows: ``[count, width]``.
        index: The rows to write, ``[count]``, int64 or int32, distinct, on the device of ``rows``.
        target: Where they go, ``[num_rows, width]``, on the device of ``rows`` or in host memory: pinned, if ``rows``
            are on a GPU; values are converted to its type.
        programs: How many programs share the work on a GPU.

    Example:
        >>> target = torch.zeros(3, 2)
        >>> scatter_rows(torch.ones(1, 2), torch.tensor([1]), target)
        >>> target.tolist()
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    _check_rows(rows, target)
    _check_index(rows, index)
    if use_triton(rows):
        from gnnautoscale.kernels.triton_rows import scatter_rows as on_gpu

        on_gpu(rows, index, target, programs)
    else:
        plain_scatter_rows(rows, index, target)


@torch.no_grad()
def merge_rows(staged: Tensor, recent: Tensor, where: Tensor, out: Tensor) -> None:
    """Take rows from two places: ``out[i] = recent[where[i]] if where[i] >= 0 else staged[i]``.

    Args:
        staged: ``[count, width]``.
        recent: ``[num_recent, width]``.
        where: The row of ``recent`` to take, or -1 for that of ``staged``, ``[count]``, int64 or int32.
        out: Where they go, ``[count, width]``; values are converted to its type. All are on one device.

    Example:
        >>> out = torch.empty(3, 1)
        >>> merge_rows(torch.zeros(3, 1), torch.tensor([[1.0], [2.0]]), torch.tensor([-1, 1, 0]), out)
        >>> out.tolist()
        [[0.0], [2.0], [1.0]]
    """
    _check_rows(out, staged)
    _check_rows(out, recent)
    _check_index(out, where)
    _check_index(staged, where)
    if use_triton(out):
        from gnnautoscale.kernels.triton_rows import merge_rows as on_gpu

        on_gpu(staged, recent, where, out)
    else:
        plain_merge_rows(staged, recent, where, out)


def plain_gather_rows(source: Tensor, index: Tensor, out: Tensor, skip: Tensor | None) -> None:
    """What :func:`gather_rows` computes, in plain torch."""
    if skip is None:
        out.copy_(source.index_select(0, index.to(source.device)))
        return
    read = (skip < 0).nonzero().squeeze(1)
    rows = source.index_select(0, index[read].to(source.device))
    out.index_copy_(0, read, rows.to(out))


def plain_scatter_rows(rows: Tensor, index: Tensor, target: Tensor) -> None:
    """What :func:`scatter_rows` computes, in plain torch."""
    target.index_copy_(0, index.to(target.device, torch.int64), rows.to(target))


def plain_merge_rows(staged: Tensor, recent: Tensor, where: Tensor, out: Tensor) -> None:
    """What :func:`merge_rows` computes, in plain torch."""
    fresh = (where >= 0).nonzero().squeeze(1)
    out.copy_(staged)
    out.index_copy_(0, fresh, recent.index_select(0, where[fresh]).to(out.dtype))


def _check_rows(one: Tensor, other: Tensor) -> None:
    if one.dim() != 2 or other.dim() != 2 or one.size(1) != other.size(1):
        raise InputError(
            "rows have the same width where they come from and where they go",
            got=f"shapes {tuple(other.shape)} and {tuple(one.shape)}",
            fix="Pass tensors of shape [number of rows, width].",
        )
    if not (one.is_contiguous() and other.is_contiguous()):
        raise InputError(
            "rows lie one behind the other in memory",
            got=f"strides {other.stride()} and {one.stride()}",
            fix="Call .contiguous() on what is read, and write to a tensor that was allocated whole.",
        )


def _check_index(rows: Tensor, *indices: Tensor | None) -> None:
    for index in indices:
        if index is not None and (index.dim() != 1 or index.numel() != rows.size(0)):
            raise InputError(
                f"there is one index for each of {rows.size(0)} rows",
                got=f"indices of shape {tuple(index.shape)}",
                fix="Pass a tensor of shape [count].",
            )
