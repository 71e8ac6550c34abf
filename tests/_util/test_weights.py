"""Weights of modules, some of which nothing has used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from gnnautoscale._util import load_state, state_of, weights_of


def model() -> Any:
    shared = nn.Linear(2, 2)
    return nn.ModuleList([nn.Linear(3, 2), pyg.Linear(-1, 4), shared, shared, nn.LazyLinear(2)])


def test_weights_are_those_with_values_once_and_in_order() -> None:
    made = model()
    assert [id(weight) for weight in weights_of(made)] == [id(weight) for weight in weights_of(made[0], made[2])]
    assert [tuple(weight.shape) for weight in weights_of(made)] == [(2, 3), (2,), (2, 2), (2,)]


def test_what_is_lazy_in_both_stays_so() -> None:
    one, other = model(), model()
    one[4](torch.zeros(1, 3))
    state = state_of(one)
    load_state(other, state)
    assert is_lazy(other[1].weight)
    assert torch.equal(other[4].weight, one[4].weight)
    assert torch.equal(other[0].weight, one[0].weight)
    del state["0.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.* "0.bias"'):
        load_state(other, state)
