"""Triton kernels that find and number the rows of a batch; :mod:`gnnautoscale.kernels.halo` defines the results."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from gnnautoscale.kernels.triton_launch import ceil_div, compile_variants, launch

BLOCK = 1024
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _moved(value, runs, num_runs, origin: tl.constexpr, goal: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where contiguous pieces are moved to, or -1 outside of them; ``runs`` has two places and the length of each."""
    found = tl.full(value.shape, -1, dtype=tl.int64)
    for run in range(num_runs):
        place = value - tl.load(runs + 3 * run + origin)
        inside = (place >= 0) & (place < tl.load(runs + 3 * run + 2))
        found = tl.where(inside, place + tl.load(runs + 3 * run + goal), found)
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _own_number(row, runs, num_runs):  # type: ignore[no-untyped-def]
    """The number of each row among a batch's own, or -1; ``runs`` has the start, number and length of each piece."""
    return _moved(row, runs, num_runs, 0, 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _position(value, table, length, steps: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of entries of an ascending table that are at most the value."""
    low = tl.zeros(value.shape, dtype=tl.int32)
    high = tl.zeros(value.shape, dtype=tl.int32) + length
    for _ in range(steps):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(table + middle, mask=low < high, other=0).to(tl.int64) <= value)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


def _keys(row, runs, key, count, num_runs, size, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    value = tl.load(row + place, mask=wanted, other=0).to(tl.int64)
    number = _own_number(value, runs, num_runs)
    tl.store(key + place, tl.where(number >= 0, number, value + size).to(key.dtype.element_ty), mask=wanted)


def _firsts(key, first, count, size, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    value = tl.load(key + place, mask=wanted, other=0).to(tl.int64)
    before = tl.load(key + place - 1, mask=wanted & (place > 0), other=-1).to(tl.int64)
    tl.store(first + place, ((value != before) & (value >= size)).to(tl.int32), mask=wanted)


def _number(  # type: ignore[no-untyped-def]
    key, order, first, rank, numbered, source, rows, count, num_edges, size, width, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    value = tl.load(key + place, mask=wanted, other=0).to(tl.int64)
    position = tl.load(rank + place, mask=wanted, other=0).to(tl.int64)
    number = tl.where(value < size, value, size - 1 + position)
    tl.store(numbered + place, number.to(tl.int32), mask=wanted)
    edge = tl.load(order + place, mask=wanted, other=0)
    own = wanted & (edge < num_edges)
    tl.store(source + edge, number.to(tl.int32), mask=own)
    new = wanted & (tl.load(first + place, mask=wanted, other=0) > 0)
    tl.store(rows + position - 1, value - size, mask=new)


def _locate(  # type: ignore[no-untyped-def]
    row, runs, halo, number, missing, count, num_runs, num_halo, size, width, steps: tl.constexpr, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    value = tl.load(row + place, mask=wanted, other=0).to(tl.int64)
    own = _own_number(value, runs, num_runs)
    position = _position(value, halo, num_halo, steps) - 1
    there = (position >= 0) & wanted
    found = tl.load(halo + tl.maximum(position, 0), mask=there, other=-1) == value
    result = tl.where(own >= 0, own, tl.where(there & found, position + size, -1))
    tl.store(number + place, result.to(tl.int32), mask=wanted)
    if missing is not None:
        tl.atomic_add(missing, tl.sum((wanted & (result < 0)).to(tl.int32)))


def _locate_own(row, runs, number, count, num_runs, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    value = tl.load(row + place, mask=wanted, other=0).to(tl.int64)
    tl.store(number + place, _own_number(value, runs, num_runs).to(tl.int32), mask=wanted)


def _own_rows(runs, row, count, num_runs, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(row + place, _moved(place, runs, num_runs, 1, 0), mask=place < count)


def _targets(ptr, target, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(ptr + row)
    end = tl.load(ptr + row + 1)
    for start in range(begin, end, block):
        edge = start + tl.arange(0, block)
        tl.store(target + edge, row, mask=edge < end)


def _regroup(  # type: ignore[no-untyped-def]
    ptr, order, weight, target, regrouped, count, num_targets, width, steps: tl.constexpr, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wanted = place < count
    edge = tl.load(order + place, mask=wanted, other=0)
    tl.store(target + place, _position(edge, ptr + 1, num_targets, steps), mask=wanted)
    if weight is not None:
        tl.store(regrouped + place, tl.load(weight + edge, mask=wanted), mask=wanted)


_keys_kernels = compile_variants(_keys, counts=["count", "num_runs", "size"], indices=["row", "runs", "key"], rows=[])
_firsts_kernels = compile_variants(_firsts, counts=["count", "size"], indices=["key", "first"], rows=[])
_number_kernels = compile_variants(
    _number,
    counts=["count", "num_edges", "size"],
    indices=["key", "order", "first", "rank", "numbered", "source", "rows"],
    rows=[],
)
_locate_kernels = compile_variants(
    _locate,
    counts=["count", "num_runs", "num_halo", "size"],
    indices=["row", "runs", "halo", "number", "missing"],
    rows=[],
)
_locate_own_kernels = compile_variants(
    _locate_own, counts=["count", "num_runs"], indices=["row", "runs", "number"], rows=[]
)
_own_rows_kernels = compile_variants(_own_rows, counts=["count", "num_runs"], indices=["runs", "row"], rows=[])
_targets_kernels = compile_variants(_targets, counts=[], indices=["ptr", "target"], rows=[])
_regroup_kernels = compile_variants(
    _regroup,
    counts=["count", "num_targets"],
    indices=["ptr", "order", "weight", "target", "regrouped"],
    rows=[],
)


def _steps(length: int) -> int:
    """Enough halvings for a table of this length; few different numbers, since each compiles another kernel."""
    return 20 if length < 1 << 19 else 32


def find_halo(
    wanted: Tensor, num_edges: int, runs: Tensor, size: int, key_dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Number the rows that edges, and perhaps other rows behind them, come from.

    Args:
        wanted: Rows of a table, ``[count]``.
        num_edges: How many of them, from the first, are sources of edges.
        runs: Start, first number and length of each piece of the batch's own rows, ``[num_runs, 3]``, int64.
        size: Number of the batch's own rows.
        key_dtype: A type that holds ``size`` plus any row.

    Returns:
        Room for the halo's rows, of which the first are taken, ``[count]``; the number of each edge's source; positions
        by source and numbers in that order; and how many halo rows there are, ``[]``.
    """
    count, device = wanted.numel(), wanted.device
    key = torch.empty(count, dtype=key_dtype, device=device)
    programs = ceil_div(count, BLOCK)
    _run(_keys_kernels, programs, key, wanted, runs, key, count, runs.size(0), size, 1, BLOCK)
    key, order = key.sort(stable=True)
    first = torch.empty(count, dtype=torch.int32, device=device)
    _run(_firsts_kernels, programs, first, key, first, count, size, 1, BLOCK)
    rank = first.cumsum(0, dtype=torch.int32)
    numbered, rows = torch.empty_like(rank), torch.empty(count, dtype=torch.long, device=device)
    source = torch.empty(num_edges, dtype=torch.int32, device=device)
    tensors = (key, order, first, rank, numbered, source, rows)
    _run(_number_kernels, programs, numbered, *tensors, count, num_edges, size, 1, BLOCK)
    return rows, source, (order, numbered), rank[-1]


def locate(rows: Tensor, runs: Tensor, size: int, halo: Tensor, missing: Tensor | None) -> Tensor:
    """The number of each row, or -1, ``[count]``, int32; ``missing`` receives how many have none, ``[1]``."""
    number = torch.empty(rows.numel(), dtype=torch.int32, device=rows.device)
    counts = (rows.numel(), runs.size(0), halo.numel(), size, 1)
    tensors = (rows, runs, halo, number, missing)
    _run(_locate_kernels, ceil_div(rows.numel(), BLOCK), number, *tensors, *counts, _steps(halo.numel()), BLOCK)
    return number


def locate_own(rows: Tensor, runs: Tensor, number: Tensor) -> None:
    """Write the number of each row among a batch's own, or -1, ``[count]``, int32."""
    count = rows.numel()
    _run(_locate_own_kernels, ceil_div(count, BLOCK), number, rows, runs, number, count, runs.size(0), 1, BLOCK)


def own_rows(runs: Tensor, size: int) -> Tensor:
    """A batch's own rows one by one, ``[size]``, int64."""
    rows = torch.empty(size, dtype=torch.long, device=runs.device)
    _run(_own_rows_kernels, ceil_div(size, BLOCK), rows, runs, rows, size, runs.size(0), 1, BLOCK)
    return rows


def expand_targets(ptr: Tensor, target: Tensor) -> None:
    """Write the row of each edge, ``[num_edges]``, given the first edge of each row, ``[num_rows + 1]``."""
    _run(_targets_kernels, ptr.numel() - 1, target, ptr, target, 1, 128)


def regroup(ptr: Tensor, order: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The row of each edge and its weight in another order of the edges, ``[num_edges]``."""
    target = torch.empty(order.numel(), dtype=torch.int32, device=order.device)
    regrouped = None if weight is None else torch.empty_like(weight)
    arguments = (ptr, order, weight, target, regrouped, order.numel(), ptr.numel() - 1, 1, _steps(ptr.numel()), BLOCK)
    _run(_regroup_kernels, ceil_div(order.numel(), BLOCK), target, *arguments)
    return target, regrouped


def _run(kernels: object, programs: int, result: Tensor, *arguments: object) -> None:
    launch(kernels, programs, result.unsqueeze(1), *arguments, warps=WARPS)  # type: ignore[arg-type]
