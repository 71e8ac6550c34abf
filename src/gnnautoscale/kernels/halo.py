"""Numbers the rows of a batch: its own ones first, then its halo, which is found here.

The halo of a batch are all rows that its edges come from, apart from its own; they are numbered in ascending order.

On a GPU this takes one sort of the edges, which also groups them by source. The host need not wait for the number of
halo rows until it asks for the result, and no memory grows with the table. On a CPU two arrays with an entry per row of
the table are faster, and are used again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: Contiguous pieces of rows: for each the first row in a table, its first row in the batch, and its length.
Runs = Sequence[tuple[int, int, int]]

# With more pieces, rows are handled one by one.
MOST_RUNS = 64


class OwnRows:
    """The rows of a table that are a batch's own, as contiguous pieces.

    Example:
        >>> own = OwnRows.of(torch.tensor([4, 5, 1]))
        >>> own.runs, own.size, OwnRows([(4, 0, 2)]).index
        ([(4, 0, 2), (1, 2, 1)], 3, tensor([4, 5]))
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.size = sum(length for _, _, length in runs)

    @staticmethod
    def of(index: Tensor) -> OwnRows:
        """Own rows given one by one, ``[size]``, in host memory."""
        breaks = (index[1:] != index[:-1] + 1).nonzero().squeeze(1) + 1
        firsts = torch.cat([breaks.new_zeros(min(index.numel(), 1)), breaks])
        lengths = torch.diff(firsts, append=firsts.new_tensor([index.numel()]))
        own = OwnRows(list(zip(index[firsts].tolist(), firsts.tolist(), lengths.tolist(), strict=True)))
        own.index = index.long()
        return own

    @cached_property
    def index(self) -> Tensor:
        """The rows one by one, ``[size]``, int64, in host memory."""
        pieces = [torch.arange(start, start + length) for start, _, length in self.runs]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long)

    @property
    def is_in_few_pieces(self) -> bool:
        """Whether handling the pieces is faster than handling each row."""
        return len(self.runs) <= MOST_RUNS

    def on(self, device: torch.device) -> Tensor:
        """The index on a device; for few pieces nothing is copied there."""
        if device.type == "cpu" or not self.is_in_few_pieces:
            return self.index.to(device)
        pieces = [torch.arange(start, start + length, device=device) for start, _, length in self.runs]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


@dataclass(eq=False)
class Halo:
    """The halo of a batch, and its edges between rows of the batch.

    Attributes:
        rows: The halo's rows in the table, ascending, ``[num_halo]``, int64.
        source: The row of the batch that each edge comes from, ``[num_edges]``, int32.
        by_source: The positions of the edges grouped by source, and these sources, ``[num_edges]`` each; ``None`` if
            that is not known.
    """

    rows: Tensor
    source: Tensor
    by_source: tuple[Tensor, Tensor] | None = None


class Count:
    """A number that a GPU computes and the host may need later; ``int`` waits for it.

    Example:
        >>> int(Count(torch.tensor(3)))
        3
    """

    def __init__(self, value: Tensor) -> None:
        self._value, self._arrived = value, None
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def __int__(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._value)


@dataclass(eq=False)
class HaloSearch:
    """A search for a halo, which may still run on a GPU."""

    _found: Halo
    # The number of halo rows, unless all rows are.
    _count: Count | None = None

    def result(self) -> Halo:
        """What was found; waits for the number of halo rows."""
        if self._count is not None:
            self._found.rows, self._count = self._found.rows[: int(self._count)], None
        return self._found


class RowNumbers:
    """Numbers rows of a table with ``num_rows`` rows.

    Example:
        >>> source = torch.tensor([5, 7, 4, 2], dtype=torch.int32)
        >>> halo = RowNumbers(8).find(source, OwnRows([(4, 0, 2)])).result()
        >>> halo.rows.tolist(), halo.source.tolist()
        ([2, 7], [1, 3, 0, 2])
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    @cached_property
    def _numbers(self) -> Tensor:
        return torch.full((self.num_rows,), -1, dtype=torch.int32)

    @cached_property
    def _flags(self) -> Tensor:
        return torch.zeros(self.num_rows, dtype=torch.bool)

    @torch.inference_mode(False)  # the arrays are kept
    def find(self, source: Tensor, own: OwnRows, also: Tensor | None = None) -> HaloSearch:
        """Start to find the halo of a batch.

        ``source`` is the row that each edge comes from, ``[num_edges]``, on the device that does the work; ``also``
        are further rows for the halo, unless they are the batch's own, ``[count]``.
        """
        wanted = source if also is None else torch.cat([source, also])
        if source.is_cuda:
            return _find_by_sorting(wanted, source.numel(), own, self.num_rows)
        self._number(own.index, 0)
        outside = wanted[self._numbers.index_select(0, wanted) < 0].long()
        self._flags[outside] = True
        rows = self._flags.nonzero().squeeze(1)
        self._flags[rows] = False
        self._number(rows, own.size)
        halo = Halo(rows, self._numbers.index_select(0, source))
        self._numbers[own.index] = self._numbers[rows] = -1
        return HaloSearch(halo)

    @torch.inference_mode(False)
    def locate(self, rows: Tensor, own: OwnRows, halo: Tensor) -> Tensor:
        """The number of each row, ``[count]``, in a batch with this halo, or -1; ``[count]``, int32.

        Example:
            >>> RowNumbers(8).locate(torch.tensor([4, 7, 3]), OwnRows([(4, 0, 2)]), torch.tensor([2, 7])).tolist()
            [0, 3, -1]
        """
        if rows.is_cuda:
            inside = _own_numbers(rows, own)
            if not halo.numel():
                return inside
            place = torch.searchsorted(halo, rows.to(halo.dtype)).clamp_(max=halo.numel() - 1)
            found = torch.where(halo[place] == rows, place + own.size, -1).to(torch.int32)
            return torch.where(inside >= 0, inside, found)
        self._number(own.index, 0)
        self._number(halo, own.size)
        found = self._numbers.index_select(0, rows)
        self._numbers[own.index] = self._numbers[halo] = -1
        return found

    def _number(self, rows: Tensor, first: int) -> None:
        self._numbers[rows] = torch.arange(first, first + rows.numel(), dtype=torch.int32)


def _own_numbers(rows: Tensor, own: OwnRows) -> Tensor:
    """The number of each row among a batch's own, or -1; ``[count]``, int32, on a GPU."""
    if len(own.runs) == 1:
        start, first, length = own.runs[0]
        place = rows - start
        return torch.where((place >= 0) & (place < length), place + first, -1).to(torch.int32)
    if not own.runs:
        return torch.full_like(rows, -1, dtype=torch.int32)
    runs = torch.tensor(sorted(own.runs), dtype=rows.dtype).pin_memory()
    starts, firsts, lengths = runs.to(rows.device, non_blocking=True).t().contiguous()
    run = torch.searchsorted(starts, rows, right=True).sub_(1).clamp_(min=0)
    place = rows - starts[run]
    return torch.where((place >= 0) & (place < lengths[run]), place + firsts[run], -1).to(torch.int32)


def _find_by_sorting(wanted: Tensor, num_edges: int, own: OwnRows, num_rows: int) -> HaloSearch:
    count, size, device = wanted.numel(), own.size, wanted.device
    if not count:
        none = torch.empty(0, dtype=torch.int32, device=device)
        return HaloSearch(Halo(none.long(), none, (none.long(), none)))
    # Own rows by their numbers, then all others by their rows: the order of the batch's rows.
    wanted = wanted.to(torch.int32 if num_rows + size < 2**31 else torch.int64)
    number = _own_numbers(wanted, own)
    key, order = torch.where(number >= 0, number.to(wanted.dtype), wanted + size).sort(stable=True)
    first = torch.ones(count, dtype=torch.bool, device=device)
    torch.ne(key[1:], key[:-1], out=first[1:])
    outside = key >= size
    first &= outside
    rank = first.cumsum(0, dtype=torch.int32)
    numbered = torch.where(outside, rank + (size - 1), key).to(torch.int32)
    # As many places as there could be halo rows, and one for everything that is none.
    rows = torch.empty(count + 1, dtype=torch.long, device=device)
    rows.scatter_(0, torch.where(first, rank - 1, count).long(), key.long() - size)
    source = torch.empty_like(numbered).scatter_(0, order, numbered)
    by_source = (order, numbered) if num_edges == count else None
    return HaloSearch(Halo(rows, source[:num_edges], by_source), Count(rank[-1]))
