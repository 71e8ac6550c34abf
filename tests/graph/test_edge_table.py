"""Edges grouped by target in the order of rows, and what is cut out of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnautoscale.graph.edges import EdgeCut, EdgeTable, RowOrder
from gnnautoscale.kernels import OwnRows

#  0 -> 1, 2 -> 1, 1 -> 0, 3 -> 3, 0 -> 1 again; node 4 is isolated
EDGES = torch.tensor([[0, 2, 1, 3, 0], [1, 1, 0, 3, 1]])
NODES = torch.tensor([3, 1, 4, 0, 2])
CPU = torch.device("cpu")


def random_edges(num_nodes: int, num_edges: int) -> Tensor:
    return torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(num_edges))


# Orders ##############################################################################################################


def test_an_order_goes_both_ways() -> None:
    order = RowOrder(NODES)
    assert not order.is_plain
    assert order.nodes.dtype == order.row_of.dtype == torch.int32
    assert order.row_of.tolist() == [3, 1, 4, 0, 2]
    assert order.rows(torch.tensor([[2, 0], [3, 3]])).tolist() == [[4, 3], [0, 0]]
    nodes = order.nodes_at(torch.tensor([4, 0]))
    assert (nodes.tolist(), nodes.dtype) == ([2, 3], torch.int64)


def test_the_order_of_the_nodes_themselves_copies_nothing() -> None:
    order, some = RowOrder(torch.arange(4)), torch.tensor([2, 1])
    assert order.is_plain
    assert order.rows(some) is order.nodes_at(some) is some


# Tables ##############################################################################################################


@pytest.mark.parametrize("target_row", [0, 1])
@pytest.mark.parametrize("nodes", [NODES, torch.arange(5)])
def test_tables_are_grouped_by_target_and_stable(nodes: Tensor, target_row: int) -> None:
    order = RowOrder(nodes)
    table = EdgeTable(EDGES, order, target_row)
    rows = order.row_of[EDGES]
    expected = rows[target_row].argsort(stable=True)
    assert torch.equal(table.edge, expected.to(torch.int32))
    assert torch.equal(table.source, rows[1 - target_row][expected])
    assert table.ptr.tolist() == [int((rows[target_row] < row).sum()) for row in range(6)]
    assert torch.equal(table.edge_index, EDGES[:, expected])


def test_sorted_edges_stay_in_place() -> None:
    table = EdgeTable(EDGES[:, [2, 0, 1, 4, 3]], RowOrder(torch.arange(5)))
    assert table.edge.tolist() == [0, 1, 2, 3, 4]


def test_tables_with_the_same_edges() -> None:
    order = RowOrder(NODES)
    table = EdgeTable(EDGES, order)
    assert table.has_same_edges(EdgeTable(EDGES.clone(), order))
    # The edges into node 1 are 0 -> 1, 2 -> 1, 0 -> 1: only the first and last may change places.
    assert table.has_same_edges(EdgeTable(EDGES[:, [4, 1, 3, 2, 0]], order))
    for other in (EDGES[:, [1, 0, 2, 3, 4]], EDGES[:, :4], torch.cat([EDGES[:, :4], EDGES[:, :1] * 0], dim=1)):
        assert not table.has_same_edges(EdgeTable(other, order))
    assert not table.has_same_edges(EdgeTable(EDGES.flip(0), order, target_row=0))


def test_edges_into_rows_keep_the_order_of_rows_and_edges() -> None:
    target, source, edge = EdgeTable(EDGES, RowOrder(torch.arange(5))).into(torch.tensor([3, 4, 1]))
    assert target.tolist() == [0, 2, 2, 2]
    assert source.tolist() == [3, 0, 2, 0]
    assert edge.tolist() == [3, 0, 1, 4]


def test_no_rows_and_no_edges() -> None:
    empty = torch.empty(0, dtype=torch.long)
    for edges, rows in ((EDGES, empty), (torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 4]))):
        assert all(not part.numel() for part in EdgeTable(edges, RowOrder(NODES)).into(rows))


# Cuts ################################################################################################################


@pytest.mark.parametrize("nodes", [torch.arange(12), torch.arange(12).flip(0)])
def test_self_loops_are_added_without_a_sort(nodes: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, loops = random_edges(12, 60), torch.arange(12).repeat(2, 1)
    table, more = EdgeTable(edges, RowOrder(nodes)), torch.cat([edges, loops], dim=1)
    expected = EdgeTable(more, RowOrder(nodes))
    monkeypatch.setattr(Tensor, "sort", None)
    made = table.with_loops(more)
    assert made is not None
    for name in ("ptr", "source", "edge"):
        got, want = getattr(made, name), getattr(expected, name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    for other in (edges, edges.flip(1), torch.cat([loops, edges], dim=1), torch.cat([edges[:, 1:], loops], dim=1)):
        assert table.with_loops(other) is None
    assert expected.with_loops(more) is None


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2], [6, 7, 8, 2, 3, 11], [11, 10, 0], list(range(12))])
def test_cuts_have_the_edges_into_rows(rows: list[int], pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are made of contiguous pieces or edge by edge."""
    monkeypatch.setattr("gnnautoscale.kernels.halo.MOST_RUNS", 64 if pieces else -1)
    table = EdgeTable(random_edges(12, 40), RowOrder(torch.arange(12).flip(0)))
    own = OwnRows.of(torch.tensor(rows, dtype=torch.long))
    assert own.is_in_few_pieces is pieces
    cut = table.cut(own)
    wanted = [edge for row in rows for edge in range(int(table.ptr[row]), int(table.ptr[row + 1]))]
    counts = [int(table.ptr[row + 1] - table.ptr[row]) for row in rows]
    assert (cut.count, cut.longest) == (len(wanted), max(counts, default=0))
    ptr = cut.on(CPU).ptr
    assert (ptr.tolist(), ptr.dtype) == ([sum(counts[:place]) for place in range(len(rows) + 1)], torch.int32)
    assert cut.on(CPU).target.tolist() == [place for place, count in enumerate(counts) for _ in range(count)]
    for values in (table.source, table.edge, torch.rand(40, 3)):
        assert torch.equal(cut.on(CPU).take(values), values[wanted])


def test_one_piece_is_a_view() -> None:
    table = EdgeTable(random_edges(12, 40), RowOrder(torch.arange(12)))
    taken = table.cut(OwnRows([(3, 0, 4)])).on(CPU).take(table.source)
    assert taken.data_ptr() == table.source[int(table.ptr[3]) :].data_ptr()


def test_pieces_need_not_be_in_the_order_of_the_table() -> None:
    table = EdgeTable(EDGES, RowOrder(torch.arange(5)))
    cut = EdgeCut(table.ptr.numpy(), OwnRows([(3, 0, 2), (0, 2, 2)]))
    assert cut.on(CPU).take(table.edge).tolist() == [3, 2, 0, 1, 4]
    assert cut.on(CPU).ptr.tolist() == [0, 1, 1, 2, 5]
