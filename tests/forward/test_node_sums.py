"""Sums over all nodes, told from others by whoever knows the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale.forward.node_sums import NodeSums


def summed(value: Tensor, dim: int) -> tuple[Tensor, int] | None:
    """The rows of three nodes, of which there are ten more that add up to 100."""
    return (value.sum(dim) + 100.0, 13) if value.size(dim) == 3 else None


def test_sums_and_means_along_nodes_are_those_of_all_nodes() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with NodeSums(summed):
        found = [rows.sum(0), torch.sum(rows, dim=0), rows.mean(dim=(0,)), rows.t().mean(-1, keepdim=True)]
    sums = torch.tensor([109.0, 112.0])
    assert torch.equal(found[0], sums)
    assert torch.equal(found[1], sums)
    assert torch.equal(found[2], sums / 13)
    assert torch.equal(found[3], (sums / 13).unsqueeze(1))


def test_other_sums_stay_as_they_are() -> None:
    rows = torch.arange(6.0).view(3, 2)
    with NodeSums(summed):
        assert rows.sum().item() == 15.0
        assert rows.sum(1).tolist() == [1.0, 5.0, 9.0]
        assert rows.mean((0, 1)).item() == 2.5
        assert rows.sum(0, dtype=torch.double).tolist() == [6.0, 9.0]
        assert rows.long().sum(0).tolist() == [6, 9]
