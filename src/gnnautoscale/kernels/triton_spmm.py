"""Sums, maxima and minima over neighbours as Triton kernels; the functions mirror ``plain_spmm``.

One program of one warp computes a few columns of one row: it gathers many edges' values at once, to have many loads
in flight, reads meanwhile which rows come next, and adds up in a fixed order. Programs of one row are next to each
other, so that they share its edges in the cache.

Sums and means of long rows come in pieces: a program for each piece writes a partial sum, and a second kernel adds
these up. Maxima and minima take long rows as they are.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gnnautoscale.kernels import long_rows
from gnnautoscale.kernels.long_rows import Pieces
from gnnautoscale.kernels.triton_launch import Kernels, compiled, divided, launch, power_of_two

# Measured on an H200 with 5 to 360 edges per row, widths of 47 to 600, and single rows of up to 20,000 edges.
COLUMNS = 128  # of one program, at most
UNROLL = 8  # edges that a program gathers at once, at least
EXTREME_UNROLL = 4
VALUES = 512  # narrow rows: that many values at once
MOST_UNROLL = 64
WARPS = 1


def _sum(  # type: ignore[no-untyped-def]
    ptr,
    col,
    weight,
    degrees,
    x,
    out,
    piece_begin,
    piece_end,
    partial,
    num_rows,
    num_pieces,
    longest,
    width,
    mean: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
):
    num_blocks = tl.cdiv(width, columns)
    item = tl.program_id(0) // num_blocks
    column = (tl.program_id(0) % num_blocks) * columns + tl.arange(0, columns)
    inside = column < width
    # Pieces come before rows, since most of them take longer.
    row = item - num_pieces
    if row < 0:
        begin = tl.load(piece_begin + item)
        # Pieces of rows beyond the last that is wanted become empty.
        end = tl.minimum(tl.load(piece_end + item), tl.load(ptr + num_rows))
    else:
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
    # A long row is left to its pieces.
    mine = end - begin <= longest
    end = tl.where(mine, end, begin)
    total = tl.zeros((columns,), dtype=tl.float32)
    first = begin + tl.arange(0, unroll)
    following = tl.load(col + first, mask=first < end, other=0)
    for start in range(begin, end, unroll):
        edge = start + tl.arange(0, unroll)
        valid = edge < end
        source = following
        following = tl.load(col + edge + unroll, mask=edge + unroll < end, other=0)
        place = source.to(tl.int64) * width
        value = tl.load(x + place[:, None] + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        value = value.to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + edge, mask=valid, other=0.0).to(tl.float32)[:, None]
        if degrees is not None:
            degree = tl.load(degrees + source + 1, mask=valid, other=1) - tl.load(degrees + source, mask=valid, other=0)
            value *= (1.0 / tl.maximum(degree, 1).to(tl.float32))[:, None]
        total += tl.sum(value, axis=0)
    if row < 0:
        tl.store(partial + item.to(tl.int64) * width + column, total, mask=inside)
    else:
        if mean:
            total = total / tl.maximum(end - begin, 1).to(tl.float32)
        place = row.to(tl.int64) * width + column
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside & mine)


def _add_pieces(  # type: ignore[no-untyped-def]
    long_row,
    first_piece,
    piece_begin,
    piece_end,
    partial,
    out,
    num_rows,
    width,
    mean: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
):
    num_blocks = tl.cdiv(width, columns)
    item = tl.program_id(0) // num_blocks
    column = (tl.program_id(0) % num_blocks) * columns + tl.arange(0, columns)
    inside = column < width
    row = tl.load(long_row + item)
    begin = tl.load(first_piece + item)
    end = tl.load(first_piece + item + 1)
    total = tl.zeros((columns,), dtype=tl.float32)
    for start in range(begin, end, unroll):
        piece = start + tl.arange(0, unroll)
        place = piece.to(tl.int64) * width
        mask = (piece < end)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial + place[:, None] + column[None, :], mask=mask, other=0.0), axis=0)
    if mean:
        total = total / (tl.load(piece_end + end - 1) - tl.load(piece_begin + begin)).to(tl.float32)
    # Only rows that are wanted: the others stay 0.
    place = row.to(tl.int64) * width + column
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside & (row < num_rows))


def _extreme(  # type: ignore[no-untyped-def]
    ptr,
    col,
    weight,
    x,
    out,
    ties,
    width,
    largest: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
):
    num_blocks = tl.cdiv(width, columns)
    row = tl.program_id(0) // num_blocks
    column = (tl.program_id(0) % num_blocks) * columns + tl.arange(0, columns)
    inside = column < width
    begin = tl.load(ptr + row)
    end = tl.load(ptr + row + 1)
    # A minimum is the maximum of the negated values.
    sign = 1.0 if largest else -1.0
    best = tl.full((columns,), float("-inf"), dtype=tl.float32)
    count = tl.zeros((columns,), dtype=tl.int32)
    broken = tl.zeros((columns,), dtype=tl.int32)
    first = begin + tl.arange(0, unroll)
    following = tl.load(col + first, mask=first < end, other=0)
    for start in range(begin, end, unroll):
        edge = start + tl.arange(0, unroll)
        valid = edge < end
        place = following.to(tl.int64) * width
        following = tl.load(col + edge + unroll, mask=edge + unroll < end, other=0)
        mask = valid[:, None] & inside[None, :]
        value = tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + edge, mask=valid, other=0.0).to(tl.float32)[:, None]
            value = value.to(x.dtype.element_ty).to(tl.float32)  # rounded, so that the gradient finds ties again
        value = tl.where(mask, value * sign, float("-inf"))
        here = tl.max(value, axis=0)
        # A comparison drops a value that is not a number; the result must show it.
        broken += tl.sum((value != value).to(tl.int32), axis=0)
        if ties is not None:
            reached = tl.sum((mask & (value == here[None, :])).to(tl.int32), axis=0)
            count = tl.where(best >= here, count, 0) + tl.where(here >= best, reached, 0)
        best = tl.maximum(best, here)
    best = tl.where(broken > 0, float("nan"), best * sign)
    best = tl.where(end > begin, best, 0.0)
    place = row.to(tl.int64) * width + column
    tl.store(out + place, best.to(out.dtype.element_ty), mask=inside)
    if ties is not None:
        tl.store(ties + place, count, mask=inside)


def _extreme_gradient(  # type: ignore[no-untyped-def]
    ptr,
    col,
    weight,
    x,
    out,
    share,
    grad,
    width,
    columns: tl.constexpr,
    unroll: tl.constexpr,
):
    num_blocks = tl.cdiv(width, columns)
    row = tl.program_id(0) // num_blocks
    column = (tl.program_id(0) % num_blocks) * columns + tl.arange(0, columns)
    inside = column < width
    begin = tl.load(ptr + row)
    end = tl.load(ptr + row + 1)
    own = row.to(tl.int64) * width + column
    value = tl.load(x + own, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((columns,), dtype=tl.float32)
    first = begin + tl.arange(0, unroll)
    following = tl.load(col + first, mask=first < end, other=0)
    for start in range(begin, end, unroll):
        edge = start + tl.arange(0, unroll)
        valid = edge < end
        place = following.to(tl.int64) * width
        following = tl.load(col + edge + unroll, mask=edge + unroll < end, other=0)
        mask = valid[:, None] & inside[None, :]
        place = place[:, None] + column[None, :]
        extreme = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
        passed = tl.load(share + place, mask=mask, other=0.0)
        if weight is None:
            message = value
        else:
            factor = tl.load(weight + edge, mask=valid, other=0.0).to(tl.float32)[:, None]
            message = (value * factor).to(x.dtype.element_ty).to(tl.float32)
            passed = passed * factor
        total += tl.sum(tl.where(mask & (message == extreme), passed, 0.0), axis=0)
    tl.store(grad + own, total.to(grad.dtype.element_ty), mask=inside)


_EDGES = ["ptr", "col", "weight"]
_PIECES = ["piece_begin", "piece_end"]
_sum_kernels = compiled(
    _sum,
    counts=["num_rows", "num_pieces", "longest"],
    indices=[*_EDGES, "degrees", *_PIECES],
    rows=["x", "out", "partial"],
)
_add_kernels = compiled(
    _add_pieces, counts=["num_rows"], indices=["long_row", "first_piece", *_PIECES], rows=["partial", "out"]
)
_extreme_kernels = compiled(_extreme, counts=[], indices=_EDGES, rows=["x", "out", "ties"])
_gradient_kernels = compiled(_extreme_gradient, counts=[], indices=_EDGES, rows=["x", "out", "share", "grad"])

# Where, and for which type, width and mean, the kernel that adds pieces up is loaded.
_loaded: set[tuple[torch.device, torch.dtype, int, bool]] = set()


def sum_neighbours(
    ptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    x: Tensor,
    *,
    mean: bool = False,
    degrees: Tensor | None = None,
    num_rows: int | None = None,
    pieces: Pieces | None = None,
) -> Tensor:
    """See :func:`gnnautoscale.kernels.plain_spmm.sum_neighbours`."""
    x = x.contiguous()
    wanted, width = ptr.numel() - 1, x.size(1)
    out = x.new_empty(wanted, width) if num_rows in (None, wanted) else x.new_zeros(num_rows, width)
    if not wanted or not width:
        return out
    longest = col.numel() if pieces is None else long_rows.LONG
    cut, partial = _room(pieces, x)
    num_long, num_pieces = cut.long_row.numel(), cut.piece_begin.numel()
    rows = (ptr, col, weight, degrees, x, out, cut.piece_begin, cut.piece_end, partial)
    _launch(_sum_kernels, UNROLL, wanted + num_pieces, out, *rows, wanted, num_pieces, longest, width, mean)
    # The first time even for no rows: that loads the kernel. The first batch with long rows may be in a CUDA graph,
    # where nothing can be loaded.
    use = x.device, x.dtype, width, mean
    if num_long or use not in _loaded:
        _launch(_add_kernels, UNROLL, num_long, out, *cut, partial, out, wanted, width, mean)
        _loaded.add(use)
    return out


def _room(pieces: Pieces | None, x: Tensor) -> tuple[Pieces, Tensor]:
    """The pieces of long rows and room for their sums; both are empty if there are none."""
    if pieces is None:
        return _no_room(x.device)
    return pieces, x.new_empty(pieces.piece_begin.numel(), x.size(1), dtype=torch.float32)


@cache
def _no_room(device: torch.device) -> tuple[Pieces, Tensor]:
    """Not ``None``, for which Triton would compile the kernel once more."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    return Pieces(none, none, none, none), torch.empty(0, dtype=torch.float32, device=device)


def extreme_neighbours(
    ptr: Tensor, col: Tensor, weight: Tensor | None, x: Tensor, *, largest: bool, count: bool
) -> tuple[Tensor, Tensor | None]:
    """See :func:`gnnautoscale.kernels.plain_spmm.extreme_neighbours`."""
    x = x.contiguous()
    out = x.new_empty(ptr.numel() - 1, x.size(1))
    ties = torch.empty_like(out, dtype=torch.int32) if count else None
    _launch(_extreme_kernels, EXTREME_UNROLL, out.size(0), out, ptr, col, weight, x, out, ties, x.size(1), largest)
    return out, ties


def extreme_gradient(
    ptr_t: Tensor, col_t: Tensor, weight_t: Tensor | None, x: Tensor, out: Tensor, share: Tensor
) -> Tensor:
    """See :func:`gnnautoscale.kernels.plain_spmm.extreme_gradient`."""
    x = x.contiguous()
    grad = torch.empty_like(x)
    rows = (x, out.contiguous(), share.contiguous(), grad)
    _launch(_gradient_kernels, EXTREME_UNROLL, grad.size(0), grad, ptr_t, col_t, weight_t, *rows, x.size(1))
    return grad


def _launch(kernels: Kernels, unroll: int, count: int, result: Tensor, *arguments: Tensor | int | bool | None) -> None:
    """Run a kernel with one program for each block of columns of each row or piece.

    Args:
        kernels: The two variants of the kernel.
        unroll: How many edges a program takes at once, at least.
        count: Number of rows and pieces.
        result: ``[num_rows, width]``.
        arguments: What the kernel takes before the size of its block.
    """
    width = result.size(1)
    columns = min(power_of_two(width), COLUMNS)
    if width > columns and divided(width, columns // 2) % 2:
        columns //= 2  # half of the last program's columns would be outside
    unroll = max(unroll, min(VALUES // columns, MOST_UNROLL))
    launch(kernels, count * divided(width, columns), result, *arguments, columns, unroll, warps=WARPS)
