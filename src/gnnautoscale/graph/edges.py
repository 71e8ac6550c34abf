"""The edges of a graph grouped by target, in the order of rows.

If rows are in part order, the edges into a part are one contiguous slice of this table, and so are their values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from gnnautoscale._util import Pinned, copy_staged_together
from gnnautoscale.kernels import OwnRows, RowNumbers, WordTable, expand_targets, triton_is_installed


class RowOrder:
    """The order in which tables keep the rows of a graph's nodes: part by part, so that parts are contiguous.

    Attributes:
        nodes: The node of each row, ``[num_nodes]``.
        row_of: The row of each node, ``[num_nodes]``.

    Example:
        >>> RowOrder(torch.tensor([2, 0, 1])).row_of
        tensor([1, 2, 0], dtype=torch.int32)
    """

    def __init__(self, nodes: Tensor) -> None:
        rows = torch.arange(nodes.numel(), dtype=index_dtype(nodes.numel()))
        self.nodes = nodes.to(rows.dtype)
        self.is_plain = torch.equal(self.nodes, rows)
        self.row_of = self.nodes
        if not self.is_plain:
            self.row_of = torch.empty_like(rows)
            self.row_of[nodes] = rows

        self._pinned: Pinned | None = None

    def rows(self, nodes: Tensor) -> Tensor:
        """The rows of some nodes, of the same shape, in host memory."""
        return nodes if self.is_plain else self.row_of[nodes]

    def nodes_at(self, rows: Tensor) -> Tensor:
        """The nodes at some rows, ``[count]``, int64 on any device."""
        if self.is_plain:
            return rows
        if not rows.is_cuda:
            return self.nodes[rows].long()
        if self._pinned is None:
            self._pinned = Pinned()
            pinned = self._pinned.pin(self.nodes)
            self._nodes = None if pinned is None else WordTable(pinned)
        if self._nodes is not None:
            return self._nodes.gather(rows).long()
        return self.nodes[rows.cpu()].long().to(rows.device)


class Preparer(Protocol):
    """Prepares something for a batch that a GPU assembles."""

    def prepare(self, info: Any, /, *how: Any) -> None:
        """Give the current stream of the GPU the work for a batch."""


class EdgeTable:
    """Edges grouped by target; those of a target keep their order.

    Attributes:
        ptr: First edge of each row, ``[num_rows + 1]``, int64.
        source: The row that each edge comes from, ``[num_edges]``.
        edge: The position of each edge in the ``edge_index`` that this was made from, ``[num_edges]``.

    Args:
        edge_index: The edges between nodes, ``[2, num_edges]``, in host memory.
        order: The order of rows.
        target_row: Which row of ``edge_index`` holds the targets.
        source_order: The order of the sources' rows, if these are nodes of another type than the targets.

    Example:
        >>> table = EdgeTable(torch.tensor([[0, 1, 2], [2, 0, 2]]), RowOrder(torch.tensor([2, 0, 1])))
        >>> table.ptr.tolist(), table.source.tolist(), table.edge.tolist()
        ([0, 2, 3, 3], [1, 0, 2], [0, 2, 1])
    """

    def __init__(
        self, edge_index: Tensor, order: RowOrder, target_row: int = 1, *, source_order: RowOrder | None = None
    ) -> None:
        self.target_row, self.order, self.source_order = target_row, order, source_order or order
        num_rows, num_edges = order.nodes.numel(), edge_index.size(1)
        rows = index_dtype(num_rows)
        target = order.rows(edge_index[target_row]).to(rows)
        edges = index_dtype(num_edges)
        if bool((target[1:] < target[:-1]).any()):
            # Stable, so that a batch matches what a layer computes edge by edge.
            target, place = target.sort(stable=True)
            self.edge = place.to(edges)
            del place
        else:
            self.edge = torch.arange(num_edges, dtype=edges)
        self.ptr: Tensor = torch._convert_indices_from_coo_to_csr(target, num_rows).long()
        del target
        sources = self.source_order.rows(edge_index[1 - target_row].index_select(0, self.edge))
        self.source = sources.to(index_dtype(self.source_order.nodes.numel()))
        self._edge_index: Callable[[], Tensor | None] | None = ref(edge_index)
        self._pinned: Pinned | None = None
        #: Who else prepares something for a batch of this table that a GPU assembles, and how.
        self.preparations: WeakKeyDictionary[Preparer, tuple[Any, ...]] = WeakKeyDictionary()

    def with_loops(self, edge_index: Tensor) -> EdgeTable | None:
        """The table of this one's edges with a self-loop of each node behind them, if ``edge_index`` is that.

        It takes no sort.
        """
        num_rows, own = self.order.nodes.numel(), None if self._edge_index is None else self._edge_index()
        num_edges, nodes = edge_index.size(1) - num_rows, torch.arange(num_rows)
        if own is None or self.target_row != 1 or num_edges != own.size(1) or self.source_order is not self.order:
            return None
        if not all(torch.equal(ends, nodes) for ends in edge_index[:, num_edges:]):
            return None
        if not torch.equal(edge_index[:, :num_edges], own):
            return None
        made = copy.copy(self)
        for name in ("_ptr", "longest"):
            vars(made).pop(name, None)
        made._pinned, made.preparations, made._edge_index = None, WeakKeyDictionary(), None
        made.ptr = self.ptr + torch.arange(num_rows + 1)
        is_loop = torch.zeros(num_edges + num_rows, dtype=torch.bool)
        is_loop[made.ptr[1:] - 1] = True
        rows = torch.arange(num_rows, dtype=self.source.dtype)
        loops = (num_edges + self.order.nodes_at(rows.long())).to(index_dtype(is_loop.numel()))
        made.source, made.edge = _mixed(is_loop, rows, self.source), _mixed(is_loop, loops, self.edge)
        return made

    def into(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every edge that points to one of the rows, grouped by row in the order of ``rows``.

        Returns for each edge the position of its target in ``rows``, its source's row, and its index in the
        ``edge_index``; each ``[num_edges_into_rows]``, int64.
        """
        cut = self.cut(OwnRows.of(rows)).on(rows.device)
        return cut.target, cut.take(self.source).long(), cut.take(self.edge).long()

    @property
    def edge_index(self) -> Tensor:
        """The edges between nodes, in the order of the table, ``[2, num_edges]``."""
        target = self.order.nodes_at(torch.repeat_interleave(self.ptr.diff()))
        ends = [self.source_order.nodes_at(self.source.long()), target]
        return torch.stack(ends if self.target_row == 1 else ends[::-1])

    def has_same_edges(self, other: EdgeTable) -> bool:
        """Whether another table of the same rows has the same edges in the same order."""
        same_shape = self.target_row == other.target_row and self.source.shape == other.source.shape
        return same_shape and torch.equal(self.ptr, other.ptr) and torch.equal(self.source, other.source)

    @cached_property
    def longest(self) -> int:
        """The largest number of edges into one row."""
        return int(self.ptr.diff().amax()) if self.ptr.numel() > 1 else 0

    @cached_property
    def numbers(self) -> RowNumbers:
        """Numbers the rows that edges come from."""
        return RowNumbers(self.source_order.nodes.numel())

    def cut(self, own: OwnRows) -> EdgeCut:
        """The edges into a batch's own rows."""
        known: EdgeCut | None = own.known.get(self)
        if known is None:
            known = own.known[self] = EdgeCut(self._ptr, own)
        return known

    def cut_at(self, rows: Tensor) -> tuple[EdgeCutOnDevice, int]:
        """The edges into any rows, ``[count]``, in the order and on the device of these; the most into one of them.

        The host waits for their number.

        Example:
            >>> table = EdgeTable(torch.tensor([[0, 1, 2], [2, 0, 2]]), RowOrder(torch.arange(3)))
            >>> cut, longest = table.cut_at(torch.tensor([2, 1, 0]))
            >>> cut.ptr.tolist(), cut.take(table.source).tolist(), longest
            ([0, 2, 2, 3], [0, 2, 1], 2)
        """
        if rows.is_cuda and self._pinned is not None:
            pinned = self._pinned.pin(self.ptr)
            self.ptr = self.ptr if pinned is None else pinned
        begin, end = (_taken(self.ptr, rows + after) for after in (0, 1))
        degree = end - begin
        ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        count, longest = torch.stack([ptr[-1], degree.amax() if rows.numel() else ptr[-1]]).tolist()
        within = torch.arange(count, device=rows.device)
        positions = torch.repeat_interleave(begin - ptr[:-1], degree, output_size=count) + within
        return EdgeCutOnDevice(rows.device, count, [], positions, ptr.to(index_dtype(count))), longest

    def pin(self) -> None:
        """Let a GPU read the table over the bus."""
        if self._pinned is None:
            self._pinned = owner = Pinned()
            self.source, self.edge = (
                table if pinned is None else pinned
                for table, pinned in ((table, owner.pin(table)) for table in (self.source, self.edge))
            )

    @cached_property
    def _ptr(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self.ptr.numpy()


class EdgeCut:
    """The edges of a table into some of its rows, in the order of these rows."""

    def __init__(self, ptr: np.ndarray[tuple[int], np.dtype[np.int64]], own: OwnRows) -> None:
        if own.is_in_few_pieces:
            self._pieces = [(int(ptr[start]), int(ptr[start + length])) for start, _, length in own.runs]
            self._positions = None
            local, end = np.zeros(own.size + 1, dtype=np.int64), 0
            for (start, first, length), (begin, stop) in zip(own.runs, self._pieces, strict=True):
                np.add(ptr[start + 1 : start + length + 1], end - begin, out=local[first + 1 : first + length + 1])
                end += stop - begin
        else:
            self._pieces = []
            rows = own.index.numpy()
            begin, count = ptr[rows], ptr[rows + 1] - ptr[rows]
            local = np.concatenate([[0], count.cumsum()])
            self._positions = torch.from_numpy(np.repeat(begin - local[:-1], count) + np.arange(local[-1]))
        #: Number of edges, and the largest number of edges into one row.
        self.count = int(local[-1])
        self.longest = int(np.diff(local).max(initial=0))
        self._local = torch.from_numpy(local.astype(np.int32) if self.count < 2**31 else local)

    def on(self, device: torch.device) -> EdgeCutOnDevice:
        """What it takes to have these edges on a device."""
        pieces = [(begin, end) for begin, end in self._pieces if end > begin]
        small = [self._local]
        if device.type == "cuda" and len(pieces) > 1:
            firsts = accumulate((end - begin for begin, end in pieces), initial=0)
            table = [(begin, first, end - begin) for (begin, end), first in zip(pieces, firsts, strict=False)]
            small.append(torch.tensor(table, dtype=torch.long))
        return EdgeCutOnDevice(device, self.count, pieces, self._positions, *copy_staged_together(small, device))


class EdgeCutOnDevice:
    """The edges of a cut on a device, for one batch.

    Attributes:
        ptr: First edge of each of the rows, ``[num_rows + 1]``, int32 if that suffices.
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        pieces: list[tuple[int, int]],
        positions: Tensor | None,
        ptr: Tensor,
        pieces_there: Tensor | None = None,
    ) -> None:
        self.ptr = ptr
        self._device, self._count = device, count
        self._pieces, self._positions, self._pieces_there = pieces, positions, pieces_there

    @property
    def target(self) -> Tensor:
        """The position of each edge's target among the rows, ``[count]``, int64."""
        return expand_targets(self.ptr, self._count)

    def take(self, values: Tensor) -> Tensor:
        """The values of these edges, ``[count, ...]``, out of a table with a row per edge.

        On a CPU it may be a view. On a GPU the host does not wait if the table is in pinned memory.
        """
        if self._positions is not None:
            return _taken(values, self._positions).to(self._device)
        pieces = [values[begin:end] for begin, end in self._pieces]
        if self._device.type == "cpu":
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else values[:0]
        if self._pieces_there is not None and values.is_pinned() and triton_is_installed():
            return WordTable(values).copy_pieces(self._pieces_there, self._count)
        out = torch.empty((self._count, *values.shape[1:]), dtype=values.dtype, device=self._device)
        place = 0
        for piece in pieces:
            out[place : place + piece.size(0)].copy_(piece, non_blocking=True)
            place += piece.size(0)
        return out


class FoundCut(EdgeCut):
    """The edges of a table into a batch's own rows, of which it is known on a device where those of each row begin."""

    def __init__(self, table: EdgeTable, own: OwnRows, ptr: Tensor, count: int) -> None:
        self._table, self._own, self._known = table, own, ptr
        self.count, self.longest = count, min(table.longest, count)

    def on(self, device: torch.device) -> EdgeCutOnDevice:
        """See :meth:`EdgeCut.on`."""
        if device != self._known.device:
            return self._table.cut(self._own).on(device)
        return _FoundOnDevice(self._known, self.count, lambda: self._table.cut(self._own).on(device))


class _FoundOnDevice(EdgeCutOnDevice):
    """The edges of a :class:`FoundCut`; where their values lie in a table is found out if somebody asks."""

    def __init__(self, ptr: Tensor, count: int, cut: Callable[[], EdgeCutOnDevice]) -> None:
        super().__init__(ptr.device, count, [], None, ptr)
        self._cut = cut

    def take(self, values: Tensor) -> Tensor:
        """See :meth:`EdgeCutOnDevice.take`."""
        return self._cut().take(values)


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Rows of a table in host memory, ``[count, ...]``, where the index is; a GPU reads pinned ones over the bus."""
    if index.is_cuda and values.is_pinned() and triton_is_installed():
        return WordTable(values).gather(index)
    return values[index.to(values.device)].to(index.device)


def _mixed(mask: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """One table, ``[count]``, of values where a mask is true, and of others elsewhere, both in their order."""
    out = values.new_empty(mask.numel())
    # NumPy takes a fifth of PyTorch's time for this.
    out.numpy()[mask.numpy()], out.numpy()[~mask.numpy()] = values.numpy(), others.numpy()
    return out


def index_dtype(count: int) -> torch.dtype:
    """The type for indices below a count."""
    return torch.int32 if count < 2**31 else torch.int64
