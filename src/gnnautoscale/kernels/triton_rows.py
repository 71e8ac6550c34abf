"""Triton kernels that gather, scatter and merge rows; :mod:`gnnautoscale.kernels.rows` defines the results.

A GPU reads and writes pinned host memory over the bus, so one kernel serves both kinds of memory. A few programs that
loop over the rows keep the bus busy and leave the rest of the GPU to other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gnnautoscale.kernels.triton_launch import VECTOR, ceil_div, compile_variants, launch, next_power_of_two

BYTES = 32 * 1024  # that a program keeps in flight over the bus
MERGE_BYTES = 8 * 1024
WARPS = 8
MERGE_WARPS = 4
MOST_COLUMNS = 1024
MOST_ROWS = 128
BLOCK = 1024  # indices per program
MOST_ADDRESSES = 64
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read(source, index, skip, out, out_type, count, width, rows_each: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(tl.program_id(0) * rows_each, count, tl.num_programs(0) * rows_each):
        row = start + tl.arange(0, rows_each)
        wanted = row < count
        if skip is not None:
            wanted = wanted & (tl.load(skip + row, mask=wanted, other=0) < 0)
        origin = tl.load(index + row, mask=wanted, other=0).to(tl.int64) * width
        goal = row.to(tl.int64) * width
        for first in range(0, width, columns):
            column = first + tl.arange(0, columns)
            mask = wanted[:, None] & (column < width)[None, :]
            value = tl.load(source + origin[:, None] + column[None, :], mask=mask).to(out_type)
            # For the next step, so it should not evict from the cache what this step uses.
            tl.store(out + goal[:, None] + column[None, :], value, mask=mask, cache_modifier=".cs")


def _gather(source, index, skip, out, count, width, rows_each: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    _read(source, index, skip, out, out.dtype.element_ty, count, width, rows_each, columns)


def _gather_tables(  # type: ignore[no-untyped-def]
    sources, index, skip, outs, count, num_tables, width, source_type: tl.constexpr, out_type: tl.constexpr,
    aligned: tl.constexpr, rows_each: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    for table in range(num_tables):
        source = tl.load(sources + table).to(tl.pointer_type(source_type))
        out = tl.load(outs + table).to(tl.pointer_type(out_type))
        if aligned:  # the compiler cannot know this of an address it loads
            source = tl.multiple_of(source, 16)
            out = tl.multiple_of(out, 16)
        _read(source, index, skip, out, out_type, count, width, rows_each, columns)


def _scatter(rows, index, target, count, width, rows_each: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(tl.program_id(0) * rows_each, count, tl.num_programs(0) * rows_each):
        row = start + tl.arange(0, rows_each)
        wanted = row < count
        origin = row.to(tl.int64) * width
        goal = tl.load(index + row, mask=wanted, other=0).to(tl.int64) * width
        for first in range(0, width, columns):
            column = first + tl.arange(0, columns)
            mask = wanted[:, None] & (column < width)[None, :]
            value = tl.load(rows + origin[:, None] + column[None, :], mask=mask)
            tl.store(target + goal[:, None] + column[None, :], value.to(target.dtype.element_ty), mask=mask)


def _accumulate(  # type: ignore[no-untyped-def]
    rows, index, sums, rounds, number, count, width, rows_each: tl.constexpr, columns: tl.constexpr
):
    for start in range(tl.program_id(0) * rows_each, count, tl.num_programs(0) * rows_each):
        row = start + tl.arange(0, rows_each)
        wanted = row < count
        place = tl.load(index + row, mask=wanted, other=0).to(tl.int64)
        known = wanted & (tl.load(rounds + place, mask=wanted, other=0) == number)
        tl.debug_barrier()  # several threads look at a round, and all of them before one writes it
        for first in range(0, width, columns):
            column = first + tl.arange(0, columns)
            inside = (column < width)[None, :]
            goal = sums + place[:, None] * width + column[None, :]
            value = tl.load(rows + row.to(tl.int64)[:, None] * width + column[None, :], mask=wanted[:, None] & inside)
            before = tl.load(goal, mask=known[:, None] & inside, other=0.0).to(value.dtype)
            tl.store(goal, (before + value).to(sums.dtype.element_ty), mask=wanted[:, None] & inside)
        tl.store(rounds + place, tl.zeros_like(row) + number, mask=wanted)


def _gather_sums(  # type: ignore[no-untyped-def]
    sums, index, rounds, number, out, count, width, rows_each: tl.constexpr, columns: tl.constexpr
):
    for start in range(tl.program_id(0) * rows_each, count, tl.num_programs(0) * rows_each):
        row = start + tl.arange(0, rows_each)
        wanted = row < count
        place = tl.load(index + row, mask=wanted, other=0).to(tl.int64)
        known = wanted & (tl.load(rounds + place, mask=wanted, other=0) == number)
        for first in range(0, width, columns):
            column = first + tl.arange(0, columns)
            inside = (column < width)[None, :]
            value = tl.load(
                sums + place[:, None] * width + column[None, :], mask=known[:, None] & inside, other=0.0
            ).to(out.dtype.element_ty)
            tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], value, mask=wanted[:, None] & inside)


def _merge(  # type: ignore[no-untyped-def]
    rows, staged, recent, where, side, out, count, batch_size, room, width,
    rows_each: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_each + tl.arange(0, rows_each)
    wanted = row < count
    own = row < batch_size
    place = tl.load(side).to(tl.int64) * room + tl.maximum(row - batch_size, 0)
    choice = tl.load(where + place, mask=wanted & (row >= batch_size), other=-1).to(tl.int64)
    fresh = choice >= 0
    goal = row.to(tl.int64) * width
    kept = place * width
    origin = tl.maximum(choice, 0) * width  # a tl.where here breaks Triton 3.6's compiler for narrow rows
    for first in range(0, width, columns):
        column = first + tl.arange(0, columns)
        mask = wanted[:, None] & (column < width)[None, :]
        # Each row is read from one source only.
        mine = tl.load(rows + goal[:, None] + column[None, :], mask=mask & own[:, None])
        new = tl.load(recent + origin[:, None] + column[None, :], mask=mask & fresh[:, None])
        old = tl.load(staged + kept[:, None] + column[None, :], mask=mask & (~fresh & ~own)[:, None])
        halo = tl.where(fresh[:, None], new.to(out.dtype.element_ty), old.to(out.dtype.element_ty))
        value = tl.where(own[:, None], mine.to(out.dtype.element_ty), halo)
        tl.store(out + goal[:, None] + column[None, :], value, mask=mask)


def _pieces(source, pieces, out, count, num_pieces, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = place // width
    origin = place - row * width
    for piece in range(num_pieces):
        first = tl.load(pieces + 3 * piece + 1)
        inside = (row >= first) & (row < first + tl.load(pieces + 3 * piece + 2))
        origin = tl.where(inside, origin + (tl.load(pieces + 3 * piece) + row - first) * width, origin)
    wanted = place < count
    tl.store(out + place, tl.load(source + origin, mask=wanted), mask=wanted)


def _narrow(source, index, out, count, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    row = place // width
    origin = tl.load(index + row, mask=wanted, other=0).to(tl.int64) * width + place - row * width
    tl.store(out + place, tl.load(source + origin, mask=wanted), mask=wanted)


_gather_kernels = compile_variants(_gather, counts=["count"], indices=["index", "skip"], rows=["source", "out"])
_gather_tables_kernels = compile_variants(
    _gather_tables, counts=["count", "num_tables"], indices=["sources", "index", "skip", "outs"], rows=[]
)
_scatter_kernels = compile_variants(_scatter, counts=["count"], indices=["index"], rows=["rows", "target"])
_accumulate_kernels = compile_variants(
    _accumulate, counts=["count", "number"], indices=["index", "rounds"], rows=["rows", "sums"]
)
_gather_sums_kernels = compile_variants(
    _gather_sums, counts=["count", "number"], indices=["index", "rounds"], rows=["sums", "out"]
)
_merge_kernels = compile_variants(
    _merge, counts=["count", "batch_size", "room"], indices=["where", "side"], rows=["rows", "staged", "recent", "out"]
)
_pieces_kernels = compile_variants(
    _pieces, counts=["count", "num_pieces"], indices=["source", "pieces", "out"], rows=[]
)
_narrow_kernels = compile_variants(_narrow, counts=["count"], indices=["source", "index", "out"], rows=[])


def gather_rows(source: Tensor, index: Tensor, out: Tensor, skip: Tensor | None, programs: int) -> None:
    """See :func:`gnnautoscale.kernels.gather_rows`."""
    count, width = out.shape
    block = _block(width, source.element_size(), BYTES)
    programs = min(programs, ceil_div(count, block[0]))
    launch(_gather_kernels, programs, out, source, index, skip, out, count, width, *block, warps=WARPS)


def gather_tables(
    sources: Sequence[Tensor], index: Tensor, outs: Sequence[Tensor], skip: Tensor | None, programs: int
) -> None:
    """See :func:`gnnautoscale.kernels.gather_tables`."""
    count, width = outs[0].shape
    block = _block(width, sources[0].element_size(), BYTES)
    programs = min(programs, ceil_div(count, block[0]))
    aligned = width % VECTOR == 0 and all(table.data_ptr() % VECTOR == 0 for table in (*sources, *outs))
    tables = (_addresses(sources, outs[0].device), index, skip, _addresses(outs, outs[0].device), count, len(outs))
    types = (_TYPES[sources[0].dtype], _TYPES[outs[0].dtype], aligned)
    launch(_gather_tables_kernels, programs, outs[0], *tables, width, *types, *block, warps=WARPS)


def _addresses(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    """The tables' addresses on the device; kept, since every step reads the same tables."""
    key = device, *(table.data_ptr() for table in tables)
    if key not in _known_addresses:
        while len(_known_addresses) >= MOST_ADDRESSES:
            _known_addresses.pop(next(iter(_known_addresses)))
        _known_addresses[key] = torch.tensor(key[1:], dtype=torch.int64).to(device)
    return _known_addresses[key]


_known_addresses: dict[tuple[Any, ...], Tensor] = {}


def scatter_rows(rows: Tensor, index: Tensor, target: Tensor, programs: int) -> None:
    """See :func:`gnnautoscale.kernels.scatter_rows`."""
    count, width = rows.shape
    block = _block(width, target.element_size(), BYTES)
    programs = min(programs, ceil_div(count, block[0]))
    launch(_scatter_kernels, programs, rows, rows, index, target, count, width, *block, warps=WARPS)


def accumulate_rows(rows: Tensor, index: Tensor, sums: Tensor, rounds: Tensor, number: int, programs: int) -> None:
    """See :func:`gnnautoscale.kernels.accumulate_rows`."""
    count, width = rows.shape
    block = _block(width, sums.element_size(), BYTES)
    arguments = (rows, index, sums, rounds, number, count, width, *block)
    launch(_accumulate_kernels, min(programs, ceil_div(count, block[0])), rows, *arguments, warps=WARPS)


def gather_sums(sums: Tensor, index: Tensor, rounds: Tensor, number: int, out: Tensor, programs: int) -> None:
    """See :func:`gnnautoscale.kernels.gather_sums`."""
    count, width = out.shape
    block = _block(width, sums.element_size(), BYTES)
    arguments = (sums, index, rounds, number, out, count, width, *block)
    launch(_gather_sums_kernels, min(programs, ceil_div(count, block[0])), out, *arguments, warps=WARPS)


def merge_rows(rows: Tensor, staged: Tensor, recent: Tensor, where: Tensor, side: Tensor, out: Tensor) -> None:
    """See :func:`gnnautoscale.kernels.merge_rows`."""
    count, width = out.shape
    block = _block(width, out.element_size(), MERGE_BYTES)
    programs = ceil_div(count, block[0])
    arguments = (rows, staged, recent, where, side, out, count, rows.size(0), where.size(1), width)
    launch(_merge_kernels, programs, out, *arguments, *block, warps=MERGE_WARPS)


def copy_pieces(source: Tensor, pieces: Tensor, out: Tensor) -> None:
    """Copy contiguous pieces of rows one behind the other.

    ``source`` and ``out`` are rows of words, ``[num_rows, width]``; ``pieces`` has the first row of each piece, its
    first row in ``out`` and its length, ``[num_pieces, 3]``, int64, on the device.
    """
    width = out.size(1)
    arguments = (source, pieces, out, out.numel(), pieces.size(0), width, BLOCK)
    launch(_pieces_kernels, ceil_div(out.numel(), BLOCK), out, *arguments, warps=4)


def gather_narrow_rows(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Read rows of a few values each, ``out[i] = source[index[i]]``, all on one device."""
    arguments = (source, index, out, out.numel(), out.size(1), BLOCK)
    launch(_narrow_kernels, ceil_div(out.numel(), BLOCK), out, *arguments, warps=4)


def _block(width: int, item_bytes: int, num_bytes: int) -> tuple[int, int]:
    """How many rows and columns a program handles at once, both powers of two."""
    columns = min(next_power_of_two(width), MOST_COLUMNS)
    return max(1, min(MOST_ROWS, num_bytes // (columns * item_bytes))), columns
