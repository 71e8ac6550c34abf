"""Rows of several widths in one message."""

from __future__ import annotations

import pytest
import torch

from gnnautoscale.ranks.parcel import packed, sizes, unpacked


@pytest.mark.parametrize(
    ("widths", "counts"),
    [([3], [[2, 0, 4]]), ([1, 4], [[2, 0, 1], [0, 0, 3]]), ([5, 2, 8], [[0, 0], [1, 2], [3, 0]])],
)
def test_what_is_unpacked_was_packed_rank_by_rank(widths: list[int], counts: list[list[int]]) -> None:
    tables = [torch.randint(256, (sum(each), width)).byte() for width, each in zip(widths, counts, strict=True)]
    message = packed(tables, counts)
    lengths = sizes(widths, counts)
    assert message.numel() == sum(lengths)
    for found, table in zip(unpacked(message, widths, counts), tables, strict=True):
        assert torch.equal(found, table)
    first = [table[: each[0]] for table, each in zip(tables, counts, strict=True)]
    assert torch.equal(message[: lengths[0]], torch.cat([rows.flatten() for rows in first]))
