"""Where a batch's rows lie in histories."""

from __future__ import annotations

import pytest
import torch

from gnnautoscale.transfer import BatchRows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("own", "runs"),
    [
        ([], []),
        ([3], [(3, 0, 1)]),
        ([4, 5, 6], [(4, 0, 3)]),
        ([6, 5, 4], [(6, 0, 1), (5, 1, 1), (4, 2, 1)]),
        ([8, 9, 2, 3, 4, 0], [(8, 0, 2), (2, 2, 3), (0, 5, 1)]),
    ],
)
@pytest.mark.parametrize("num_halo", [0, 2])
def test_own_rows_are_contiguous_pieces(own: list[int], runs: list[tuple[int, int, int]], num_halo: int) -> None:
    rows = BatchRows(torch.tensor([*own, 7, 1][: len(own) + num_halo], dtype=torch.long), len(own))
    assert (rows.num_rows, rows.num_halo, rows.runs) == (len(own) + num_halo, num_halo, runs)


@pytest.mark.parametrize(
    ("own", "expected"),
    [([4, 5, 6, 7], [-1, 1, 3, -1]), ([2, 3, 8, 9], [0, -1, -1, 3]), ([7, 2], [1, -1, 0, -1]), ([], [-1, -1, -1, -1])],
)
def test_rows_are_found_among_a_batch_s_own(own: list[int], expected: list[int]) -> None:
    where = torch.empty(4, dtype=torch.int32)
    rows = BatchRows(torch.tensor([*own, 5, 9], dtype=torch.long), len(own))  # the halo does not count
    rows.locate(torch.tensor([2, 5, 7, 9]), where)
    assert where.tolist() == expected


def test_a_placed_index_is_used_on_its_device_until_it_is_displaced() -> None:
    rows = BatchRows(torch.tensor([0, 1]), 1)
    assert rows.on(CPU) is rows.index
    placed = rows.index.clone()
    rows.place(placed)
    assert rows.on(CPU) is placed
    rows.place(placed.to("meta"))  # on another device
    assert rows.on(CPU) is rows.index
    rows.place(placed)
    rows.displace()
    assert rows.on(CPU) is rows.index
