"""Numbers of a batch's rows against sets and plain indexing, by plain torch and by Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.kernels import Count, OwnRows, RowNumbers, expand_targets, halo, locate_and_count, locate_own
from gnnautoscale.kernels.halo import regroup
from support import kernels as support

device, interpreter = support.device, support.interpreter

ROWS = 3000
RUNS = {
    "one piece": [(40, 0, 500)],
    "several": [(2000, 0, 300), (10, 300, 1), (700, 301, 200), (2999, 501, 1)],
    "all rows": [(0, 0, ROWS)],
    "no rows": [],
}
own_rows = pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)


def drawn(*shape: int, below: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


# Own rows ############################################################################################################


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        ([], []),
        ([7], [(7, 0, 1)]),
        ([3, 4, 5], [(3, 0, 3)]),
        ([5, 4], [(5, 0, 1), (4, 1, 1)]),
        ([8, 9, 2, 3, 10], [(8, 0, 2), (2, 2, 2), (10, 4, 1)]),
    ],
)
def test_own_rows_one_by_one_and_in_pieces(index: list[int], runs: list[tuple[int, int, int]]) -> None:
    own = OwnRows.of(torch.tensor(index, dtype=torch.int32))
    assert (own.runs, own.size) == (runs, len(index))
    for rows in (own, OwnRows(runs)):
        assert rows.index.dtype == torch.int64
        assert rows.index.tolist() == rows.on(torch.device("cpu")).tolist() == index
        assert rows.runs_on(torch.device("cpu")).tolist() == [list(run) for run in runs]
        assert rows.runs_on(torch.device("cpu")).shape == (len(runs), 3)


def test_few_pieces() -> None:
    scattered = OwnRows.of(torch.arange(0, 2 * halo.MOST_RUNS, 2))
    assert scattered.is_in_few_pieces
    assert not OwnRows.of(torch.arange(0, 2 * halo.MOST_RUNS + 2, 2)).is_in_few_pieces


def test_a_number_of_the_device() -> None:
    assert int(Count(torch.tensor(4))) == int(Count(torch.tensor([4]))) == 4
    assert int(Count(torch.tensor(0, dtype=torch.int32))) == 0


# Halos ###############################################################################################################


@own_rows
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("num_edges", [0, 1, 5000])
def test_halos(device: str, num_edges: int, also: bool, runs: list[tuple[int, int, int]]) -> None:
    """A search finds all other rows that edges come from, once each, and may be repeated."""
    own, numbers = OwnRows(runs), RowNumbers(ROWS)
    for seed in range(2):
        source = drawn(num_edges, seed=seed)
        more = drawn(40, seed=seed + 9) if also else None
        search = numbers.find(source.int().to(device), own, None if more is None else more.int().to(device))
        found = search.result()
        assert search.result() is found
        wanted = set(source.tolist()) | set([] if more is None else more.tolist())
        assert found.rows.tolist() == sorted(wanted - set(own.index.tolist()))
        assert (found.rows.dtype, found.source.dtype) == (torch.int64, torch.int32)
        assert torch.equal(torch.cat([own.index, found.rows.cpu()])[found.source.cpu()], source)
        if found.by_source is not None:
            order, sources = found.by_source
            assert torch.equal(sources, found.source[order])
            assert torch.equal(order, found.source.argsort(stable=True))


def test_only_triton_knows_the_order_of_sources(
    device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, own = drawn(50).int().to(device), OwnRows([(5, 0, 3)])
    fast = request.node.callspec.params["device"] == "triton"
    assert (RowNumbers(ROWS).find(source, own).result().by_source is not None) == fast
    assert RowNumbers(ROWS).find(source, own, source[:2]).result().by_source is None
    found = RowNumbers(ROWS).find(source, own).result()
    monkeypatch.setattr(halo, "MOST_RUNS", 0)
    again = RowNumbers(ROWS).find(source, own).result()
    assert again.by_source is None
    assert torch.equal(again.rows, found.rows)
    assert torch.equal(again.source, found.source)


@support.NEEDS_TRITON
@pytest.mark.parametrize("device", support.IMPLEMENTATIONS[1:2], indirect=True)
def test_tables_too_large_for_keys_of_32_bits(device: str) -> None:
    source = torch.tensor([2**31 - 2, 3, 2**31 - 2, 2**31 - 5], dtype=torch.int32, device=device)
    found = RowNumbers(2**31 - 1).find(source, OwnRows([(0, 0, 9)])).result()
    assert found.rows.tolist() == [2**31 - 5, 2**31 - 2]
    assert found.source.tolist() == [10, 3, 10, 9]


@own_rows
@pytest.mark.parametrize("num_halo", [0, 1, 400])
def test_rows_are_located(device: str, num_halo: int, runs: list[tuple[int, int, int]]) -> None:
    own, numbers = OwnRows(runs), RowNumbers(ROWS)
    others = torch.tensor(sorted(set(range(ROWS)) - set(own.index.tolist())), dtype=torch.long)
    there = others[torch.randperm(others.numel())[:num_halo]].sort().values
    place = torch.full((ROWS,), -1)
    place[torch.cat([own.index, there])] = torch.arange(own.size + there.numel())
    for rows in (drawn(2500).int(), torch.tensor([0, ROWS - 1]).int(), torch.empty(0, dtype=torch.int32)):
        found, missing = locate_and_count(numbers, rows.to(device), own, there.to(device))
        expected = place[rows.long()]
        assert found.dtype == torch.int32
        assert found.tolist() == expected.tolist()
        assert missing is not None
        assert int(missing) == int((expected < 0).sum())
        assert torch.equal(numbers.locate(rows, own, there), found.cpu())


@own_rows
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_own_rows_are_located(device: str, count: int, runs: list[tuple[int, int, int]]) -> None:
    own, rows = OwnRows(runs), drawn(count)
    assert torch.equal(own.on(torch.device(device)).cpu(), own.index)
    where = torch.full((count,), 77, dtype=torch.int32, device=device)
    locate_own(rows.to(device), own, where)
    place = {row: number for number, row in enumerate(own.index.tolist())}
    assert where.tolist() == [place.get(row, -1) for row in rows.tolist()]
    with pytest.raises(InputError, match="one place per row"):
        locate_own(rows, own, torch.empty(count + 1, dtype=torch.int32))


def test_searches_during_inference_leave_usable_arrays() -> None:
    numbers, source = RowNumbers(8), torch.tensor([5, 7], dtype=torch.int32)
    with torch.inference_mode():
        found = numbers.find(source, OwnRows([(4, 0, 2)])).result()
        located = numbers.locate(source, OwnRows([(4, 0, 2)]), found.rows)
    assert not any(tensor.is_inference() for tensor in (found.rows, found.source, located))
    assert numbers.find(source, OwnRows([])).result().rows.tolist() == [5, 7]


# Edges ###############################################################################################################


def random_ptr(*, rows: int, most: int) -> Tensor:
    """First edges of rows, of which some have none, and some many."""
    degrees = drawn(rows, below=most) * (drawn(rows, below=3, seed=1) > 0)
    return torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)]).int()


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (1, 3000), (300, 7), (40, 600)])
def test_targets_of_edges(device: str, rows: int, most: int) -> None:
    ptr = random_ptr(rows=rows, most=most)
    expected = [row for row in range(rows) for _ in range(int(ptr[row]), int(ptr[row + 1]))]
    target = expand_targets(ptr.to(device), len(expected))
    assert target.dtype == torch.int64
    assert target.tolist() == expected
    both = torch.zeros(2, len(expected), dtype=torch.long, device=device)
    assert expand_targets(ptr.to(device), len(expected), out=both[1]).data_ptr() == both[1].data_ptr()
    assert both[1].tolist() == expected


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "most"), [(1, 1), (300, 7), (40, 600)])
def test_edges_in_another_order(device: str, rows: int, most: int, weighted: bool) -> None:
    ptr = random_ptr(rows=rows, most=most)
    target = torch.repeat_interleave(ptr.diff())
    order = torch.randperm(target.numel())
    weight = torch.rand(target.numel()) if weighted else None
    found, values = regroup(ptr.to(device), order.to(device), None if weight is None else weight.to(device))
    assert found.dtype == torch.int32
    assert found.tolist() == target[order].tolist()
    assert (values is None) == (weight is None)
    if values is not None and weight is not None:
        assert torch.equal(values.cpu(), weight[order])
