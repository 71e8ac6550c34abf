"""Rows by index: out of a history, into a history, and two sources merged into one.

All three write into a tensor that is there already, and on a GPU they neither allocate nor wait, so that they can
run in a CUDA graph. Autograd does not see them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.kernels.available import use_triton

# Few programs saturate the bus to host memory and leave the rest of the GPU to compute. Little to move is moved by
# fewer still, since then there is time. They come in pairs, as a GPU's processors do.
FEWEST_PROGRAMS, MOST_PROGRAMS = 6, 16
BYTES_PER_PAIR = 16 * 2**20


@torch.no_grad()
def gather_rows(
    source: Tensor, index: Tensor, out: Tensor, *, skip: Tensor | None = None, programs: int | None = None
) -> None:
    """Read rows: ``out[i] = source[index[i]]`` wherever ``skip[i] < 0``; other rows of ``out`` stay as they are.

    Args:
        source: ``[num_rows, width]``, on the device of ``out`` or in host memory: pinned, if ``out`` is on a GPU.
        index: The rows to read, ``[count]``, int64 or int32, on the device of ``out``.
        out: Where they go, ``[count, width]``; values are converted to its type.
        skip: Rows not to read have a value of 0 or more here, ``[count]``, int32, on the device of ``out``. ``None``
            reads all.
        programs: How many programs share the work on a GPU; by default as few as move it in time.

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

        on_gpu(source, index, out, skip, programs or _programs(out.nbytes))
    else:
        plain_gather_rows(source, index, out, skip)


@torch.no_grad()
def gather_tables(
    sources: Sequence[Tensor],
    index: Tensor,
    outs: Sequence[Tensor],
    *,
    skip: Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Read the same rows of several tables, as :func:`gather_rows` does for each; on a GPU all in one go.

    Args:
        sources: One or more tables of one shape and type, each ``[num_rows, width]``.
        index: The rows to read, ``[count]``.
        outs: Where each table's rows go, each ``[count, width]``, of one type.
        skip: Rows not to read have a value of 0 or more here, ``[count]``, int32.
        programs: How many programs share the work on a GPU; by default as few as move it in time.

    Example:
        >>> outs = [torch.zeros(1, 2), torch.zeros(1, 2)]
        >>> gather_tables([torch.ones(3, 2), torch.full((3, 2), 5.0)], torch.tensor([2]), outs)
        >>> outs[1].tolist()
        [[5.0, 5.0]]
    """
    kinds = {(source.shape, source.dtype, out.dtype) for source, out in zip(sources, outs, strict=True)}
    if len(kinds) != 1:
        raise InputError(
            "tables that are read together have one shape and type", got=f"{len(kinds)} kinds", fix="Read them apart."
        )
    for source, out in zip(sources, outs, strict=True):
        _check_rows(out, source)
        _check_index(out, index, skip)
    if use_triton(outs[0]):
        from gnnautoscale.kernels.triton_rows import gather_tables as on_gpu

        on_gpu(sources, index, outs, skip, programs or _programs(sum(out.nbytes for out in outs)))
    else:
        for source, out in zip(sources, outs, strict=True):
            plain_gather_rows(source, index, out, skip)


@torch.no_grad()
def scatter_rows(rows: Tensor, index: Tensor, target: Tensor, *, programs: int | None = None) -> None:
    """Write rows: ``target[index[i]] = rows[i]``.

    Args:
        rows: ``[count, width]``.
        index: The rows to write, ``[count]``, int64 or int32, distinct, on the device of ``rows``.
        target: Where they go, ``[num_rows, width]``, on the device of ``rows`` or in host memory: pinned, if ``rows``
            are on a GPU; values are converted to its type.
        programs: How many programs share the work on a GPU; by default as few as move it in time.

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

        on_gpu(rows, index, target, programs or _programs(rows.nbytes))
    else:
        plain_scatter_rows(rows, index, target)


@torch.no_grad()
def merge_rows(rows: Tensor, staged: Tensor, recent: Tensor, where: Tensor, side: Tensor, out: Tensor) -> None:
    """Put a batch's rows and its halo's one behind the other, the halo's from two places.

    ``out[i] = rows[i]`` for the batch, and for the halo ``out[len(rows) + j] = recent[where[side, j]]`` if
    ``where[side, j] >= 0``, else ``staged[side, j]``.

    Args:
        rows: The batch's rows, ``[batch_size, width]``.
        staged: Two tables of rows, ``[2, room, width]``.
        recent: Rows that are newer than staged ones, ``[num_recent, width]``.
        where: For each table the row of ``recent`` to take, or -1 for the staged one, ``[2, room]``, int32.
        side: Which of the two tables counts, ``[1]``, int32; it is read when the work is done.
        out: Where they go, ``[num_rows, width]``; values are converted to its type. All are on one device.

    Example:
        >>> staged, where = torch.zeros(2, 2, 1), torch.tensor([[-1, -1], [-1, 0]], dtype=torch.int32)
        >>> out, side = torch.empty(3, 1), torch.tensor([1], dtype=torch.int32)
        >>> merge_rows(torch.full((1, 1), 5.0), staged, torch.full((1, 1), 7.0), where, side, out)
        >>> out.tolist()
        [[5.0], [0.0], [7.0]]
    """
    for other in (rows, recent, staged.flatten(0, 1)):
        _check_rows(out, other)
    num_halo = out.size(0) - rows.size(0)
    if staged.size(0) != 2 or where.shape != staged.shape[:2] or not 0 <= num_halo <= where.size(1):
        raise InputError(
            "there are two tables of staged rows, both with room for the halo's, and where to find newer ones",
            got=f"staged of shape {tuple(staged.shape)} and where of shape {tuple(where.shape)} for {num_halo} rows",
            fix="Pass tensors of shape [2, room, width] and [2, room].",
        )
    if use_triton(out):
        from gnnautoscale.kernels.triton_rows import merge_rows as on_gpu

        on_gpu(rows, staged, recent, where, side, out)
    else:
        plain_merge_rows(rows, staged, recent, where, side, out)


@torch.no_grad()
def locate_rows(index: Tensor, start: int, first: int, length: int, where: Tensor) -> None:
    """Find rows in a piece of a table: ``where[i] = index[i] - start + first`` inside of the piece, else -1.

    Args:
        index: Rows of the table, ``[count]``, int64.
        start: First row of the piece.
        first: The number that its first row has elsewhere.
        length: Number of rows of the piece.
        where: Where the numbers go, ``[count]``, int32, on the same device.

    Example:
        >>> where = torch.empty(3, dtype=torch.int32)
        >>> locate_rows(torch.tensor([4, 9, 6]), 5, 0, 3, where)
        >>> where.tolist()
        [-1, -1, 1]
    """
    if where.shape != index.shape:
        raise InputError(
            "there is one place for each index",
            got=f"shapes {tuple(index.shape)} and {tuple(where.shape)}",
            fix="Pass two tensors of shape [count].",
        )
    if use_triton(where):
        from gnnautoscale.kernels.triton_rows import locate_rows as on_gpu

        on_gpu(index, start, first, length, where)
    else:
        place = index - start
        where.copy_(torch.where((place >= 0) & (place < length), place + first, -1))


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


def plain_merge_rows(rows: Tensor, staged: Tensor, recent: Tensor, where: Tensor, side: Tensor, out: Tensor) -> None:
    """What :func:`merge_rows` computes, in plain torch."""
    halo = out[rows.size(0) :]
    choice = where[int(side), : halo.size(0)]
    fresh = (choice >= 0).nonzero().squeeze(1)
    out[: rows.size(0)].copy_(rows)
    halo.copy_(staged[int(side), : halo.size(0)])
    halo.index_copy_(0, fresh, recent.index_select(0, choice[fresh]).to(out.dtype))


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


def _programs(num_bytes: int) -> int:
    """How many programs move so much over the bus beside a training step, by default."""
    return max(FEWEST_PROGRAMS, min(2 * -(-num_bytes // BYTES_PER_PAIR), MOST_PROGRAMS))
