"""Triton kernels for sums, maxima and minima over neighbours; the functions mirror ``plain_spmm``.

One program of one warp computes a few columns of one row. It gathers the values of many edges at once, to keep many
loads in flight, prefetches the next column indices, and adds in a fixed order. The programs of a row run next to each
other, so that they share its edges in the cache.

Sums and means split long rows into segments: one program per segment writes a partial sum, and a second kernel adds
these up. Maxima and minima do not split them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gnnautoscale.kernels import long_rows
from gnnautoscale.kernels.long_rows import RowSegments
from gnnautoscale.kernels.triton_launch import Kernels, ceil_div, compile_variants, launch, next_power_of_two

# Measured on an H200 with 5 to 360 edges per row, widths of 47 to 600, and single rows of up to 20,000 edges.
COLUMNS = 128  # per program, at most
UNROLL = 8  # edges per gather, at least
EXTREME_UNROLL = 4
VALUES = 512  # per gather of narrow rows
MOST_UNROLL = 64
WARPS = 1


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _own_columns(width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row or segment of a program, its columns, and which of these exist."""
    num_blocks = tl.cdiv(width, columns)
    column = (tl.program_id(0) % num_blocks) * columns + tl.arange(0, columns)
    return tl.program_id(0) // num_blocks, column, column < width


def _sum(  # type: ignore[no-untyped-def]
    ptr, col, weight, degrees, x, out, segment_begin, segment_end, partial, num_rows, num_segments, longest, width,
    mean: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    item, column, inside = _own_columns(width, columns)
    # Segments come before rows, since most of them take longer.
    row = item - num_segments
    if row < 0:
        begin = tl.load(segment_begin + item)
        # Segments of rows beyond num_rows become empty.
        end = tl.minimum(tl.load(segment_end + item), tl.load(ptr + num_rows))
    else:
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
    # Long rows are left to their segments.
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


def _add_segments(  # type: ignore[no-untyped-def]
    long_row, first_segment, segment_begin, segment_end, partial, out, num_rows, width,
    mean: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    item, column, inside = _own_columns(width, columns)
    row = tl.load(long_row + item)
    begin = tl.load(first_segment + item)
    end = tl.load(first_segment + item + 1)
    total = tl.zeros((columns,), dtype=tl.float32)
    for start in range(begin, end, unroll):
        segment = start + tl.arange(0, unroll)
        place = segment.to(tl.int64) * width
        mask = (segment < end)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial + place[:, None] + column[None, :], mask=mask, other=0.0), axis=0)
    if mean:
        total = total / (tl.load(segment_end + end - 1) - tl.load(segment_begin + begin)).to(tl.float32)
    # Rows beyond num_rows stay 0.
    place = row.to(tl.int64) * width + column
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside & (row < num_rows))


def _extreme(  # type: ignore[no-untyped-def]
    ptr, col, weight, x, out, ties, width, largest: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr
):
    row, column, inside = _own_columns(width, columns)
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
            value = value.to(x.dtype.element_ty).to(tl.float32)  # rounded, so that the gradient finds the same ties
        value = tl.where(mask, value * sign, float("-inf"))
        here = tl.max(value, axis=0)
        # tl.max may drop NaN, but the result must show it.
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
    ptr, col, weight, x, out, share, grad, width, columns: tl.constexpr, unroll: tl.constexpr
):
    row, column, inside = _own_columns(width, columns)
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
_SEGMENTS = ["segment_begin", "segment_end"]
_sum_kernels = compile_variants(
    _sum,
    counts=["num_rows", "num_segments", "longest"],
    indices=[*_EDGES, "degrees", *_SEGMENTS],
    rows=["x", "out", "partial"],
)
_add_kernels = compile_variants(
    _add_segments, counts=["num_rows"], indices=["long_row", "first_segment", *_SEGMENTS], rows=["partial", "out"]
)
_extreme_kernels = compile_variants(_extreme, counts=[], indices=_EDGES, rows=["x", "out", "ties"])
_gradient_kernels = compile_variants(_extreme_gradient, counts=[], indices=_EDGES, rows=["x", "out", "share", "grad"])

# Device, type, width and mean for which the kernel that adds segments is loaded.
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
    segments: RowSegments | None = None,
) -> Tensor:
    """See :func:`gnnautoscale.kernels.plain_spmm.sum_neighbours`."""
    x = x.contiguous()
    wanted, width = ptr.numel() - 1, x.size(1)
    out = x.new_empty(wanted, width) if num_rows in (None, wanted) else x.new_zeros(num_rows, width)
    if not wanted or not width:
        return out
    longest = col.numel() if segments is None else long_rows.LONG_ROW
    cut, partial = segment_room(segments, x)
    num_segments = cut.segment_begin.numel()
    rows = (ptr, col, weight, degrees, x, out, cut.segment_begin, cut.segment_end, partial)
    _launch(_sum_kernels, UNROLL, wanted + num_segments, out, *rows, wanted, num_segments, longest, width, mean)
    add_segments(cut, partial, out, wanted, mean=mean)
    return out


def segment_room(segments: RowSegments | None, x: Tensor) -> tuple[RowSegments, Tensor]:
    """The segments and room for their sums, ``[num_segments, width]``; both empty if no row is long."""
    if segments is None:
        return _no_room(x.device)
    return segments, x.new_empty(segments.segment_begin.numel(), x.size(1), dtype=torch.float32)


@cache
def _no_room(device: torch.device) -> tuple[RowSegments, Tensor]:
    """Empty tensors rather than ``None``, for which Triton would compile the kernel again."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    return RowSegments(none, none, none, none), torch.empty(0, dtype=torch.float32, device=device)


def add_segments(segments: RowSegments, partial: Tensor, out: Tensor, num_rows: int, *, mean: bool = False) -> None:
    """Write the sum, or mean, of the segments of each long row among the first ``num_rows`` to ``out``.

    ``partial`` holds their sums, ``[num_segments, width]``; ``out`` has shape ``[at least num_rows, width]``.
    """
    num_long = segments.long_row.numel()
    # Launch it the first time even without long rows, to load the kernel: the first batch that has some may come in a
    # CUDA graph, which cannot load kernels.
    use = out.device, out.dtype, out.size(1), mean
    if num_long or use not in _loaded:
        _launch(_add_kernels, UNROLL, num_long, out, *segments, partial, out, num_rows, out.size(1), mean)
        _loaded.add(use)


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
    """Run a kernel with one program per block of columns of each of ``count`` rows and segments.

    ``arguments`` are those before ``columns`` and ``unroll``; a program gathers at least ``unroll`` edges at once.
    """
    width = result.size(1)
    columns = min(next_power_of_two(width), COLUMNS)
    if width > columns and ceil_div(width, columns // 2) % 2:
        columns //= 2  # otherwise the last program would waste half of its columns
    unroll = max(unroll, min(VALUES // columns, MOST_UNROLL))
    launch(kernels, count * ceil_div(width, columns), result, *arguments, columns, unroll, warps=WARPS)
