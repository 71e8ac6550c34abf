"""Going back to an earlier random state."""

from __future__ import annotations

import torch

from gnnautoscale.random_state import RandomState

CPU = torch.device("cpu")


def test_the_same_numbers_come_again_and_then_new_ones() -> None:
    state = RandomState(CPU)
    first = torch.rand(3)
    with state.again():
        assert torch.equal(torch.rand(3), first)
    second = torch.rand(3)
    assert not torch.equal(second, first)
    torch.manual_seed(12)  # as before the test
    torch.rand(3)
    assert torch.equal(torch.rand(3), second)


def test_drawing_is_noticed() -> None:
    state = RandomState(CPU)
    torch.ones(3).sum()
    assert not state.has_moved
    torch.rand(1)
    assert state.has_moved
