"""Rows that are added up, in every medium and precision."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.history import Medium, RowSums, open_history

MEDIA: tuple[Medium, ...] = get_args(Medium)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
media = pytest.mark.parametrize("medium", MEDIA)


def sums_of(medium: Medium, dtype: torch.dtype, device: str, folder: Path, width: int = 2) -> RowSums:
    path = folder / "sums.rows"
    return RowSums(open_history(medium, 500, width, dtype, device=torch.device(device), path=path))


def read(sums: RowSums, *index: int, device: str) -> list[float]:
    rows: Tensor = sums.read(torch.tensor(index, device=device), dtype=torch.float32)
    assert rows.device.type == device
    return rows[:, 0].tolist()


@media
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_add_up_until_they_are_cleared(medium: Medium, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    sums = sums_of(medium, dtype, device, tmp_path)
    for rows, where in (([1.0, 2.0], [0, 3]), ([4.0, 8.0], [3, 4])):
        sums.add(torch.tensor(rows, device=device).repeat(2, 1).T.contiguous(), torch.tensor(where, device=device))
    assert read(sums, 3, 1, 4, 0, device=device) == [6.0, 0.0, 8.0, 1.0]
    sums.clear()
    assert read(sums, 3, 1, 4, device=device) == [0.0, 0.0, 0.0]
    sums.add(torch.full((1, 2), 16.0, device=device), torch.tensor([3], device=device))
    assert read(sums, 3, 4, device=device) == [16.0, 0.0]


@media
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [3, 48])
def test_many_rows_add_up(medium: Medium, device: str, width: int, tmp_path: Path) -> None:
    generator, expected = torch.Generator().manual_seed(0), torch.zeros(500, width)
    sums = sums_of(medium, torch.float32, device, tmp_path, width)
    for number in range(12):
        if number == 6:
            sums.clear()
            expected.zero_()
        where = torch.randperm(500, generator=generator)[: 40 * number]
        rows = torch.randint(9, (where.numel(), width), generator=generator).float()
        expected[where] += rows
        sums.add(rows.to(device), where.to(device))
    assert torch.equal(sums.read(torch.arange(500, device=device), dtype=torch.float32).cpu(), expected)


@media
def test_rows_with_a_scale_do_not_add_up(medium: Medium, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"added up in a floating-point type, but got torch\.int8"):
        sums_of(medium, torch.int8, "cpu", tmp_path)
