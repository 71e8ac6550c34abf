"""Rows by index: read from a table, written to a table, and merged from several sources.

All functions write into an existing tensor. On a GPU they neither allocate nor wait, so they can run in a CUDA graph.
Autograd does not track them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gnnautoscale._util import untracked
from gnnautoscale.errors import InputError
from gnnautoscale.kernels.available import use_triton

# A few programs saturate the bus to host memory and leave the rest of the GPU free to compute. Small transfers get
# fewer still, since there is time. Programs come in pairs, like the processors of a GPU.
FEWEST_PROGRAMS, MOST_PROGRAMS = 6, 16
BYTES_PER_PAIR = 16 * 2**20
# What is added to is read first, which takes time without moving much.
ADDING_PROGRAMS = 4 * MOST_PROGRAMS


@untracked
def gather_rows(
    source: Tensor, index: Tensor, out: Tensor, *, skip: Tensor | None = None, programs: int | None = None
) -> None:
    """Read rows: ``out[i] = source[index[i]]`` wherever ``skip[i] < 0``; other rows of ``out`` stay as they are.

    Args:
        source: ``[num_rows, width]``, on the device of ``out`` or in host memory, which must be pinned for a GPU.
        index: The rows to read, ``[count]``, int64 or int32, on the device of ``out``.
        out: The result, ``[count, width]``; values are converted to its type.
        skip: ``[count]``, int32, on the device of ``out``; ``None`` reads all rows.
        programs: Number of programs that share the work on a GPU; by default as few as keep up with a training step.

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
        _triton().gather_rows(source, index, out, skip, programs or _programs(out.nbytes))
    elif skip is None:
        out.copy_(source.index_select(0, index.to(source.device)))
    else:
        read = (skip < 0).nonzero().squeeze(1)
        out.index_copy_(0, read, source.index_select(0, index[read].to(source.device)).to(out))


class WordTable:
    """A table of any shape and type, ``[num_rows, ...]``, whose rows a GPU gathers over the bus.

    In host memory it must be pinned and contiguous for that. Rows are moved as they are, in words if they consist of
    whole words, so that few kernels are compiled.

    Example:
        >>> WordTable(torch.tensor([True, False, True])).gather(torch.tensor([1, 2]))
        tensor([False,  True])
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table
        size = table.nbytes // max(table.size(0), 1)
        self._word = torch.int32 if size % 4 == 0 else torch.uint8
        self._source = self._words(table) if table.numel() else None

    def gather(self, index: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of an index, ``[count]``, on its device: ``[count, ...]``; written into ``out`` if it is given."""
        table = self._table
        if out is None:
            out = torch.empty((index.numel(), *table.shape[1:]), dtype=table.dtype, device=index.device)
        if self._source is None or table.is_cuda or not use_triton(index):
            return out.copy_(table[index.to(table.device)])
        if index.numel():
            _triton().gather_rows(self._source, index, self._words(out), None, MOST_PROGRAMS)
        return out

    def copy_pieces(self, pieces: Tensor, count: int) -> Tensor:
        """Contiguous pieces of rows one behind the other, ``[count, ...]``, on the GPU of ``pieces``.

        These are the first row of each piece, its first row in the result, and its length, ``[num_pieces, 3]``, int64.
        """
        out = torch.empty((count, *self._table.shape[1:]), dtype=self._table.dtype, device=pieces.device)
        if count and self._source is not None:
            _triton().copy_pieces(self._source, pieces, self._words(out))
        return out

    def _words(self, table: Tensor) -> Tensor:
        flat = table.view(table.size(0), -1)
        return flat if flat.dtype == self._word else flat.view(torch.uint8).view(self._word)


@untracked
def narrow_rows(source: Tensor, index: Tensor) -> Tensor:
    """Rows of a few values each, ``source[index]``, ``[count, ...]``.

    On a GPU PyTorch's own way takes twenty times as long.

    Example:
        >>> narrow_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 1, 0])).tolist()
        [[3, 4], [3, 4], [1, 2]]
    """
    if not use_triton(source):
        return source.index_select(0, index)
    source = source.contiguous()
    out = torch.empty((index.numel(), *source.shape[1:]), dtype=source.dtype, device=source.device)
    if out.numel():
        _triton().gather_narrow_rows(source, index, out.view(out.size(0), -1))
    return out


@untracked
def gather_tables(
    sources: Sequence[Tensor], index: Tensor, outs: Sequence[Tensor], *, skip: Tensor | None = None
) -> None:
    """Read the same rows of several tables, like :func:`gather_rows` for each, but on a GPU in one launch.

    The tables have the same shape and type, and so have the results ``outs``, one per table.

    Example:
        >>> outs = [torch.zeros(1, 2), torch.zeros(1, 2)]
        >>> gather_tables([torch.ones(3, 2), torch.full((3, 2), 5.0)], torch.tensor([2]), outs)
        >>> outs[1].tolist()
        [[5.0, 5.0]]
    """
    kinds = {(source.shape, source.dtype, out.dtype) for source, out in zip(sources, outs, strict=True)}
    if len(kinds) != 1:
        raise InputError(
            "tables must have one shape and type", got=f"{len(kinds)} kinds", fix="Read different tables separately."
        )
    on_gpu = use_triton(outs[0])
    for source, out in zip(sources, outs, strict=True):
        if on_gpu:
            _check_rows(out, source)
            _check_index(out, index, skip)
        else:
            gather_rows(source, index, out, skip=skip)
    if on_gpu:
        _triton().gather_tables(sources, index, outs, skip, _programs(sum(out.nbytes for out in outs)))


@untracked
def scatter_rows(rows: Tensor, index: Tensor, target: Tensor, *, programs: int | None = None) -> None:
    """Write rows: ``target[index[i]] = rows[i]``.

    Args:
        rows: ``[count, width]``.
        index: The rows to write, ``[count]``, int64 or int32, distinct, on the device of ``rows``.
        target: The table, ``[num_rows, width]``, on the device of ``rows`` or in host memory, which must be pinned for
            a GPU; values are converted to its type.
        programs: Number of programs that share the work on a GPU; by default as few as keep up with a training step.

    Example:
        >>> target = torch.zeros(3, 2)
        >>> scatter_rows(torch.ones(1, 2), torch.tensor([1]), target)
        >>> target.tolist()
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    _check_rows(rows, target)
    _check_index(rows, index)
    if use_triton(rows):
        _triton().scatter_rows(rows, index, target, programs or _programs(rows.nbytes))
    else:
        target.index_copy_(0, index.to(target.device, torch.int64), rows.to(target))


@untracked
def accumulate_rows(rows: Tensor, index: Tensor, sums: Tensor, rounds: Tensor, number: int) -> None:
    """Add to rows of this round: ``sums[index[i]] += rows[i]``; a row of an earlier round is replaced unread.

    Args:
        rows: ``[count, width]``.
        index: The rows to add to, ``[count]``, int64 or int32, distinct, on the device of ``rows``.
        sums: ``[num_rows, width]``, on the device of ``rows`` or in host memory, which must be pinned for a GPU.
        rounds: The round in which each row was last written, ``[num_rows]``, int32, where ``sums`` are.
        number: This round.

    Example:
        >>> sums, rounds = torch.full((3, 1), 7.0), torch.tensor([0, 1, 1], dtype=torch.int32)
        >>> accumulate_rows(torch.ones(2, 1), torch.tensor([0, 1]), sums, rounds, 1)
        >>> sums.tolist(), rounds.tolist()
        ([[1.0], [8.0], [7.0]], [1, 1, 1])
    """
    _check_rows(rows, sums)
    _check_index(rows, index)
    if use_triton(rows):
        _triton().accumulate_rows(rows, index, sums, rounds, number, ADDING_PROGRAMS)
        return
    where = index.to(sums.device, torch.int64)
    old = (rounds[where] != number).unsqueeze(1)
    kind = torch.promote_types(rows.dtype, sums.dtype)
    before = sums.index_select(0, where).to(kind).masked_fill_(old, 0)
    sums.index_copy_(0, where, (before + rows.to(sums.device, kind)).to(sums.dtype))
    rounds[where] = number


@untracked
def gather_sums(sums: Tensor, index: Tensor, rounds: Tensor, number: int, out: Tensor) -> None:
    """Read rows, ``out[i] = sums[index[i]]``; those of another round than this ``number`` are zero.

    See :func:`accumulate_rows`; ``out`` is ``[count, width]``, and values are converted to its type.

    Example:
        >>> out, rounds = torch.empty(2, 1), torch.tensor([0, 1], dtype=torch.int32)
        >>> gather_sums(torch.full((2, 1), 7.0), torch.tensor([0, 1]), rounds, 1, out)
        >>> out.tolist()
        [[0.0], [7.0]]
    """
    _check_rows(out, sums)
    _check_index(out, index)
    if use_triton(out):
        _triton().gather_sums(sums, index, rounds, number, out, MOST_PROGRAMS)
        return
    where = index.to(sums.device, torch.int64)
    old = (rounds[where] != number).unsqueeze(1)
    out.copy_(sums.index_select(0, where).masked_fill_(old, 0))


@untracked
def merge_rows(rows: Tensor, staged: Tensor, recent: Tensor, where: Tensor, side: Tensor, out: Tensor) -> None:
    """Concatenate a batch's own rows and its halo's rows, which come from two sources.

    ``out[i] = rows[i]`` for the batch, and for the halo ``out[len(rows) + j] = recent[where[side, j]]`` if
    ``where[side, j] >= 0``, else ``staged[side, j]``.

    Args:
        rows: The batch's rows, ``[batch_size, width]``.
        staged: Two tables of rows, ``[2, room, width]``.
        recent: Rows newer than the staged ones, ``[num_recent, width]``.
        where: For each table the row of ``recent`` to take, or -1 for the staged row, ``[2, room]``, int32.
        side: Which of the two tables to use, ``[1]``, int32, read on the device.
        out: The result, ``[num_rows, width]``; values are converted to its type. All tensors are on one device.

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
        got = f"staged of shape {tuple(staged.shape)} and where of shape {tuple(where.shape)} for {num_halo} rows"
        fix = "Pass tensors of shape [2, room, width] and [2, room]."
        raise InputError("staged and where must be two tables with room for the halo", got=got, fix=fix)
    if use_triton(out):
        _triton().merge_rows(rows, staged, recent, where, side, out)
        return
    halo = out[rows.size(0) :]
    choice = where.index_select(0, side)[0, :num_halo]
    fresh = (choice >= 0).nonzero().squeeze(1)
    out[: rows.size(0)].copy_(rows)
    halo.copy_(staged.index_select(0, side)[0, :num_halo])
    halo.index_copy_(0, fresh, recent.index_select(0, choice[fresh]).to(out.dtype))


def _triton() -> ModuleType:
    """The Triton kernels, imported on first use: Triton may not be installed."""
    from gnnautoscale.kernels import triton_rows

    return triton_rows


def _check_rows(one: Tensor, other: Tensor) -> None:
    if one.dim() != 2 or other.dim() != 2 or one.size(1) != other.size(1):
        got, fix = f"shapes {tuple(other.shape)} and {tuple(one.shape)}", "Pass tensors of shape [num_rows, width]."
        raise InputError("rows must have the same width in source and destination", got=got, fix=fix)
    if not (one.is_contiguous() and other.is_contiguous()):
        fix = "Call .contiguous() on the source, and write to a tensor that was allocated whole."
        got = f"strides {other.stride()} and {one.stride()}"
        raise InputError("rows must be contiguous in memory", got=got, fix=fix)


def _check_index(rows: Tensor, *indices: Tensor | None) -> None:
    for index in indices:
        if index is not None and (index.dim() != 1 or index.numel() != rows.size(0)):
            rule = f"there must be one index for each of {rows.size(0)} rows"
            raise InputError(rule, got=f"indices of shape {tuple(index.shape)}", fix="Pass a tensor of shape [count].")


def _programs(num_bytes: int) -> int:
    """The default number of programs that move this many bytes over the bus during a training step."""
    return max(FEWEST_PROGRAMS, min(2 * -(-num_bytes // BYTES_PER_PAIR), MOST_PROGRAMS))
