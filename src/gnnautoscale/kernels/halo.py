"""Numbers the rows of a batch: its own ones first, then its halo, which is found here.

The halo of a batch are all rows that its edges come from, apart from its own; they are numbered in ascending order.

On a GPU this takes one sort of the edges, which also groups them by source. The host need not wait for the number of
halo rows until it asks for the result, and no memory grows with the table. On a CPU two arrays with an entry per row of
the table are faster, and are used again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gnnautoscale._util import arriving_numbers, copy_staged, for_later, untracked
from gnnautoscale.errors import InputError
from gnnautoscale.kernels.available import triton_is_installed, use_triton

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
        #: What others found out about these rows, for as long as they live.
        self.known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._runs_on: dict[torch.device, tuple[Tensor, torch.cuda.Event | None]] = {}

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

    def runs_on(self, device: torch.device) -> Tensor:
        """The pieces on a device, ``[num_runs, 3]``, int64; any stream of a GPU may use them."""
        if device not in self._runs_on:
            there = copy_staged(torch.tensor(self.runs, dtype=torch.long).view(-1, 3), device)
            self._runs_on[device] = there, torch.cuda.current_stream(device).record_event() if there.is_cuda else None
            return there
        there, arrived = self._runs_on[device]
        if arrived is not None and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(device)
            current.wait_event(arrived)
            there.record_stream(current)
        return there

    def on(self, device: torch.device) -> Tensor:
        """The index on a device; for few pieces no rows are copied there."""
        if device.type == "cpu" or not self.is_in_few_pieces:
            return self.index.to(device)
        if len(self.runs) == 1:
            start, _, length = self.runs[0]
            return torch.arange(start, start + length, device=device)
        if triton_is_installed():
            rows: Tensor = _triton().own_rows(self.runs_on(device), self.size)
            return rows
        return self.index.to(device)


@dataclass(eq=False)
class Halo:
    """The halo of a batch, and its edges between rows of the batch.

    Attributes:
        rows: The halo's rows in the table, ascending, ``[num_halo]``, int64.
        find_source: Finds the row of the batch that each edge comes from.
        by_source: The positions of the edges grouped by source, and these sources, ``[num_edges]`` each; ``None`` if
            that is not known.
    """

    rows: Tensor
    find_source: Callable[[], Tensor]
    by_source: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(rows: Tensor, source: Tensor, by_source: tuple[Tensor, Tensor] | None = None) -> Halo:
        """A halo whose sources are known."""
        halo = Halo(rows, lambda: source, by_source)
        halo.source = source
        return halo

    @cached_property
    def source(self) -> Tensor:
        """The row of the batch that each edge comes from, ``[num_edges]``, int32; found when it is first needed."""
        return self.find_source()


class Count:
    """A number that a GPU computes and the host may need later; ``int`` waits for it.

    Example:
        >>> int(Count(torch.tensor(3)))
        3
    """

    def __init__(self, value: Tensor) -> None:
        self._number, self._arrived = None if value.is_cuda else int(value), None
        if value.is_cuda:
            self._place = arriving_numbers().take()
            self._place.copy_(value.view(1), non_blocking=True)
            self._arrived = torch.cuda.current_stream(value.get_device()).record_event()

    def __int__(self) -> int:
        if self._number is None and self._arrived is not None:
            self._arrived.synchronize()
            self._number = int(self._place)
        return self._number or 0


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

    @for_later
    def find(self, source: Tensor, own: OwnRows, also: Tensor | None = None) -> HaloSearch:
        """Start to find the halo of a batch.

        ``source`` is the row that each edge comes from, ``[num_edges]``, on the device that does the work; ``also``
        are further rows for the halo, unless they are the batch's own, ``[count]``.
        """
        wanted = source if also is None else torch.cat([source, also])
        if use_triton(source) and own.is_in_few_pieces and wanted.numel():
            key_dtype = torch.int32 if self.num_rows + own.size < 2**31 else torch.int64
            runs = own.runs_on(source.device)
            found = _triton().find_halo(wanted, source.numel(), runs, own.size, key_dtype)
            rows, numbers, by_source, count = found
            return HaloSearch(Halo.of(rows, numbers, by_source if also is None else None), Count(count))
        if source.is_cuda:
            halo = self.find(source.cpu(), own, None if also is None else also.cpu()).result()
            return HaloSearch(Halo.of(halo.rows.to(source.device), halo.source.to(source.device)))
        self._number(own.index, 0)
        outside = wanted[self._numbers.index_select(0, wanted) < 0].long()
        self._flags[outside] = True
        rows = self._flags.nonzero().squeeze(1)
        self._flags[rows] = False
        self._number(rows, own.size)
        halo = Halo.of(rows, self._numbers.index_select(0, source))
        self._numbers[own.index] = self._numbers[rows] = -1
        return HaloSearch(halo)

    @for_later
    def locate(self, rows: Tensor, own: OwnRows, halo: Tensor) -> Tensor:
        """The number of each row, ``[count]``, in a batch with this halo, or -1; ``[count]``, int32.

        Example:
            >>> RowNumbers(8).locate(torch.tensor([4, 7, 3]), OwnRows([(4, 0, 2)]), torch.tensor([2, 7])).tolist()
            [0, 3, -1]
        """
        if rows.is_cuda:
            return self.locate(rows.cpu(), own, halo.cpu()).to(rows.device)
        self._number(own.index, 0)
        self._number(halo, own.size)
        found = self._numbers.index_select(0, rows)
        self._numbers[own.index] = self._numbers[halo] = -1
        return found

    def _number(self, rows: Tensor, first: int) -> None:
        self._numbers[rows] = torch.arange(first, first + rows.numel(), dtype=torch.int32)


def locate_and_count(
    numbers: RowNumbers, rows: Tensor, own: OwnRows, halo: Tensor, *, count: bool = True
) -> tuple[Tensor, Count | None]:
    """See :meth:`RowNumbers.locate`; can also count the rows that have no number. On a GPU ``halo`` is ascending."""
    if use_triton(rows) and own.is_in_few_pieces and rows.numel():
        missing = torch.zeros(1, dtype=torch.int32, device=rows.device) if count else None
        number = _triton().locate(rows, own.runs_on(rows.device), own.size, halo, missing)
        return number, None if missing is None else Count(missing)
    found = numbers.locate(rows, own, halo)
    return found, Count((found < 0).sum())


@untracked
def locate_own(rows: Tensor, own: OwnRows, where: Tensor) -> None:
    """Find rows of a table among a batch's own.

    Args:
        rows: Rows of a table, ``[count]``, int64.
        own: The batch's own rows.
        where: Receives the number of each in the batch, or -1, ``[count]``, int32, on the same device.

    Example:
        >>> where = torch.empty(3, dtype=torch.int32)
        >>> locate_own(torch.tensor([4, 9, 6]), OwnRows([(5, 0, 3)]), where)
        >>> where.tolist()
        [-1, -1, 1]
    """
    if where.shape != rows.shape:
        got = f"shapes {tuple(rows.shape)} and {tuple(where.shape)}"
        raise InputError("where must have one place per row", got=got, fix="Pass two tensors of shape [count].")
    if use_triton(where) and own.is_in_few_pieces:
        _triton().locate_own(rows, own.runs_on(where.device), where)
        return
    if len(own.runs) == 1:
        start, first, length = own.runs[0]
        place = rows - start
        where.copy_(torch.where((place >= 0) & (place < length), place + first, -1))
        return
    runs = torch.tensor(sorted(own.runs) or [(0, 0, 0)])
    starts, firsts, counts = copy_staged(runs, rows.device).t().contiguous()
    run = torch.searchsorted(starts, rows, right=True).sub_(1).clamp_(min=0)
    place = rows - starts[run]
    where.copy_(torch.where((place >= 0) & (place < counts[run]), place + firsts[run], -1))


def expand_targets(ptr: Tensor, count: int, *, out: Tensor | None = None) -> Tensor:
    """The row of each edge, ``[count]``, int64, given the first edge of each row, ``[num_rows + 1]``.

    Example:
        >>> expand_targets(torch.tensor([0, 2, 2, 3], dtype=torch.int32), 3)
        tensor([0, 0, 2])
    """
    target = torch.empty(count, dtype=torch.long, device=ptr.device) if out is None else out
    if use_triton(ptr):
        _triton().expand_targets(ptr, target)
    else:
        target.copy_(torch.repeat_interleave(ptr.diff(), output_size=count))
    return target


def regroup(ptr: Tensor, order: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The row of each edge, int32, and its weight in another order of the edges, ``[num_edges]`` each.

    ``ptr`` is the first edge of each row, ``[num_rows + 1]``, and ``order`` the positions of the edges.

    Example:
        >>> regroup(torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([2, 0, 1]), None)[0].tolist()
        [1, 0, 0]
    """
    if use_triton(order) and order.numel():
        regrouped: tuple[Tensor, Tensor | None] = _triton().regroup(ptr, order, weight)
        return regrouped
    target = expand_targets(ptr, order.numel()).to(torch.int32)
    return target[order], None if weight is None else weight[order]


def _triton() -> ModuleType:
    """The Triton kernels, imported on first use: Triton may not be installed."""
    from gnnautoscale.kernels import triton_halo

    return triton_halo
