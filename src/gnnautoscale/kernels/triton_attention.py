"""Triton kernels for functions of values per edge and head; they mirror ``plain_attention``.

Sums run like those of ``triton_spmm``: a program of one warp computes one head of one row, adds its edges in a fixed
order, and long rows are split into segments. What is computed for each edge by itself is split evenly among programs,
whatever the rows' lengths. Sums are in single precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gnnautoscale.kernels import long_rows
from gnnautoscale.kernels.long_rows import RowSegments
from gnnautoscale.kernels.spmm import Adjacency
from gnnautoscale.kernels.triton_launch import Kernels, ceil_div, compile_variants, launch, next_power_of_two
from gnnautoscale.kernels.triton_spmm import add_segments, segment_room

COLUMNS = 128  # per program, at most
ROW_VALUES, EDGE_VALUES = 512, 1024  # per gather
LEAST_UNROLL, MOST_UNROLL = 4, 32  # edges per gather
WARPS = 1


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _own_head(heads: tl.constexpr, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row or segment of a program, its head, its columns in this head, and which of these exist."""
    num_blocks = tl.cdiv(width, columns)
    block = tl.program_id(0) % num_blocks
    rest = tl.program_id(0) // num_blocks
    column = block * columns + tl.arange(0, columns)
    return rest // heads, rest % heads, column, column < width


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _own_edges(item, ptr, segment_begin, segment_end, num_segments, longest):  # type: ignore[no-untyped-def]
    """The row of a program, negative for a segment; its first edge and the one past its last; whether it is not long.

    Segments come before rows, since most of them take longer. Long rows are left to their segments.
    """
    row = item - num_segments
    if row < 0:
        begin = tl.load(segment_begin + item)
        end = tl.load(segment_end + item)
    else:
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
    mine = end - begin <= longest
    return row, begin, tl.where(mine, end, begin), mine


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_sum(  # type: ignore[no-untyped-def]
    total, out, partial, item, row, mine, head, column, inside, heads: tl.constexpr, width
):
    """Write a row's sum to the result, or a segment's to ``partial``."""
    within = head * width + column
    if row < 0:
        tl.store(partial + item.to(tl.int64) * (heads * width) + within, total, mask=inside)
    else:
        place = row.to(tl.int64) * (heads * width) + within
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside & mine)


def _weighted_sum(  # type: ignore[no-untyped-def]
    ptr, col, order, weight, x, out, segment_begin, segment_end, partial, num_segments, longest, width,
    heads: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    item, head, column, inside = _own_head(heads, width, columns)
    row, begin, end, mine = _own_edges(item, ptr, segment_begin, segment_end, num_segments, longest)
    total = tl.zeros((unroll, columns), dtype=tl.float32)
    first = begin + tl.arange(0, unroll)
    following = tl.load(col + first, mask=first < end, other=0)
    for start in range(begin, end, unroll):
        edge = start + tl.arange(0, unroll)
        valid = edge < end
        place = following.to(tl.int64) * (heads * width) + head * width
        following = tl.load(col + edge + unroll, mask=edge + unroll < end, other=0)
        where = edge if order is None else tl.load(order + edge, mask=valid, other=0)
        factor = tl.load(weight + where.to(tl.int64) * heads + head, mask=valid, other=0.0).to(tl.float32)
        value = tl.load(x + place[:, None] + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        total += value.to(tl.float32) * factor[:, None]
    _store_sum(tl.sum(total, axis=0), out, partial, item, row, mine, head, column, inside, heads, width)


def _dots(  # type: ignore[no-untyped-def]
    col, owner, a, b, out, num_edges, width, heads: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr
):
    head = tl.program_id(0) % heads
    edge = (tl.program_id(0) // heads) * unroll + tl.arange(0, unroll)
    valid = edge < num_edges
    of_a = tl.load(owner + edge, mask=valid, other=0).to(tl.int64) * (heads * width) + head * width
    of_b = tl.load(col + edge, mask=valid, other=0).to(tl.int64) * (heads * width) + head * width
    total = tl.zeros((unroll, columns), dtype=tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        mask = valid[:, None] & (column < width)[None, :]
        value = tl.load(a + of_a[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(b + of_b[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    dots = tl.sum(total, axis=1)
    tl.store(out + edge.to(tl.int64) * heads + head, dots.to(out.dtype.element_ty), mask=valid)


def _scores(  # type: ignore[no-untyped-def]
    col, owner, a, b, factor, out, num_edges, slope, width,
    heads: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    edge = (tl.program_id(0) // heads) * unroll + tl.arange(0, unroll)
    valid = edge < num_edges
    of_a = tl.load(owner + edge, mask=valid, other=0).to(tl.int64) * (heads * width) + head * width
    of_b = tl.load(col + edge, mask=valid, other=0).to(tl.int64) * (heads * width) + head * width
    total = tl.zeros((unroll, columns), dtype=tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        mask = valid[:, None] & (column < width)[None, :]
        z = tl.load(a + of_a[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        z += tl.load(b + of_b[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(factor + head * width + column, mask=column < width, other=0.0).to(tl.float32)
        total += tl.where(z > 0, z, z * slope) * scale[None, :]
    scores = tl.sum(total, axis=1)
    tl.store(out + edge.to(tl.int64) * heads + head, scores.to(out.dtype.element_ty), mask=valid)


def _score_gradient(  # type: ignore[no-untyped-def]
    ptr, col, order, owner, a, b, factor, grad, out, of_factor, segment_begin, segment_end, partial,
    num_segments, longest, slope, width, heads: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    item, head, column, inside = _own_head(heads, width, columns)
    row, begin, end, mine = _own_edges(item, ptr, segment_begin, segment_end, num_segments, longest)
    # The row that a segment belongs to is the owner of its edges.
    whose = row
    if row < 0:
        whose = tl.load(owner + (begin if order is None else tl.load(order + begin)))
    own = whose.to(tl.int64) * (heads * width) + head * width + column
    value = tl.load(a + own, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((unroll, columns), dtype=tl.float32)
    active = tl.zeros((unroll, columns), dtype=tl.float32)
    first = begin + tl.arange(0, unroll)
    following = tl.load(col + first, mask=first < end, other=0)
    for start in range(begin, end, unroll):
        edge = start + tl.arange(0, unroll)
        valid = edge < end
        place = following.to(tl.int64) * (heads * width) + head * width
        following = tl.load(col + edge + unroll, mask=edge + unroll < end, other=0)
        where = edge if order is None else tl.load(order + edge, mask=valid, other=0)
        share = tl.load(grad + where.to(tl.int64) * heads + head, mask=valid, other=0.0).to(tl.float32)[:, None]
        mask = valid[:, None] & inside[None, :]
        z = value + tl.load(b + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        passed = tl.where(z > 0, share, share * slope)
        total += passed
        if of_factor is not None:
            active += passed * z
    scale = tl.load(factor + head * width + column, mask=inside, other=0.0).to(tl.float32)
    _store_sum(tl.sum(total, axis=0) * scale, out, partial, item, row, mine, head, column, inside, heads, width)
    if of_factor is not None:
        place = item.to(tl.int64) * (heads * width) + head * width + column
        tl.store(of_factor + place, tl.sum(active, axis=0), mask=inside)


_EDGES = ["ptr", "col", "order", "weight"]
_SEGMENTS = ["segment_begin", "segment_end"]
_weighted_kernels = compile_variants(
    _weighted_sum, counts=["num_segments", "longest"], indices=[*_EDGES, *_SEGMENTS], rows=["x", "out", "partial"]
)
_dot_kernels = compile_variants(_dots, counts=["num_edges"], indices=["col", "owner", "out"], rows=["a", "b"])
_score_kernels = compile_variants(
    _scores, counts=["num_edges", "slope"], indices=["col", "owner", "factor", "out"], rows=["a", "b"]
)
_score_gradient_kernels = compile_variants(
    _score_gradient,
    counts=["num_segments", "longest", "slope"],
    indices=["ptr", "col", "order", "owner", "factor", "grad", *_SEGMENTS],
    rows=["a", "b", "out", "of_factor", "partial"],
)


def weighted_sum(adjacency: Adjacency, weight: Tensor, x: Tensor, *, transposed: bool = False) -> Tensor:
    """See :func:`gnnautoscale.kernels.plain_attention.weighted_sum`."""
    x, weight = x.contiguous(), weight.contiguous()
    edges = _edges_of(adjacency, transposed)
    num_rows, (_, heads, width) = edges.ptr.numel() - 1, x.shape
    out = x.new_empty(num_rows, heads, width)
    if out.numel():
        cut, partial = segment_room(edges.segments, x.flatten(1))
        given = (edges.ptr, edges.col, edges.order, weight, x, out, cut.segment_begin, cut.segment_end, partial)
        items = num_rows + cut.segment_begin.numel()
        _launch_rows(_weighted_kernels, items, x, *given, cut.segment_begin.numel(), edges.longest)
        add_segments(cut, partial, out.flatten(1), num_rows)
    return out


def edge_dots(adjacency: Adjacency, a: Tensor, b: Tensor) -> Tensor:
    """See :func:`gnnautoscale.kernels.plain_attention.edge_dots`."""
    a, b = a.contiguous(), b.contiguous()
    out = a.new_empty(adjacency.num_edges, a.size(1))
    _launch_edges(_dot_kernels, a, adjacency.col, adjacency.target, a, b, out, adjacency.num_edges)
    return out


def additive_scores(adjacency: Adjacency, a: Tensor, b: Tensor, factor: Tensor, slope: float) -> Tensor:
    """See :func:`gnnautoscale.kernels.plain_attention.additive_scores`."""
    a, b, factor = a.contiguous(), b.contiguous(), factor.contiguous()
    out = a.new_empty(adjacency.num_edges, a.size(1))
    given = (adjacency.col, adjacency.target, a, b, factor, out, adjacency.num_edges, float(slope))
    _launch_edges(_score_kernels, a, *given)
    return out


def additive_gradients(
    adjacency: Adjacency, a: Tensor, b: Tensor, factor: Tensor, slope: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`gnnautoscale.kernels.plain_attention.additive_gradients`."""
    a, b, factor, grad = a.contiguous(), b.contiguous(), factor.contiguous(), grad.contiguous()
    of_a, of_factor = torch.empty_like(a), torch.zeros_like(factor, dtype=torch.float32)
    of_b = torch.empty_like(b)
    for transposed, (own, others, out) in enumerate(((a, b, of_a), (b, a, of_b))):
        if not out.numel():
            continue
        edges = _edges_of(adjacency, bool(transposed))
        cut, partial = segment_room(edges.segments, own.flatten(1))
        num_segments = cut.segment_begin.numel()
        items = own.size(0) + num_segments
        parts = None if transposed else own.new_empty(items, *own.shape[1:], dtype=torch.float32)
        given = (edges.ptr, edges.col, edges.order, edges.owner, own, others, factor, grad, out, parts)
        numbers = (num_segments, edges.longest, float(slope))
        cuts = (cut.segment_begin, cut.segment_end, partial)
        _launch_rows(_score_gradient_kernels, items, own, *given, *cuts, *numbers)
        add_segments(cut, partial, out.flatten(1), own.size(0))
        of_factor = of_factor if parts is None else parts.sum(0)
    return of_a, of_b, of_factor.to(factor.dtype)


class _Edges(NamedTuple):
    """Edges in CSR form: where values per edge are, the row of each of these places, and the segments of long rows."""

    ptr: Tensor
    col: Tensor
    order: Tensor | None
    owner: Tensor
    segments: RowSegments | None
    longest: int


def _edges_of(adjacency: Adjacency, transposed: bool) -> _Edges:
    segments = adjacency.segments_t if transposed else adjacency.segments
    longest = adjacency.num_edges if segments is None else long_rows.LONG_ROW
    if transposed:
        ptr, col, _ = adjacency.transposed
        return _Edges(ptr, col, adjacency.order_t, adjacency.col, segments, longest)
    return _Edges(adjacency.ptr, adjacency.col, None, adjacency.target, segments, longest)


def _launch_rows(kernels: Kernels, items: int, x: Tensor, *arguments: Tensor | float | None) -> None:
    """Run a kernel with one program per head, and block of columns, of each row and segment."""
    _, heads, width = x.shape
    columns, unroll = _tile(width, ROW_VALUES)
    numbers = (width, heads, columns, unroll)
    launch(kernels, items * heads * ceil_div(width, columns), x.view(-1, width), *arguments, *numbers, warps=WARPS)


def _launch_edges(kernels: Kernels, x: Tensor, col: Tensor, *arguments: Tensor | float) -> None:
    """Run a kernel with one program per head of some edges."""
    _, heads, width = x.shape
    columns, unroll = _tile(width, EDGE_VALUES)
    numbers, programs = (width, heads, columns, unroll), ceil_div(col.numel(), unroll) * heads
    if programs:
        launch(kernels, programs, x.view(-1, width), col, *arguments, *numbers, warps=WARPS)


def _tile(width: int, values: int) -> tuple[int, int]:
    """Columns and edges that a program gathers at once."""
    columns = min(next_power_of_two(width), COLUMNS)
    return columns, min(max(values // columns, LEAST_UNROLL), MOST_UNROLL)
