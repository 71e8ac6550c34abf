"""Lazy weights get what the first run would give them."""

import copy
from typing import Any

import torch
from torch import nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from conftest import CHANNELS
from gnnautoscale.planner.lazy_weights import initialize_like

C = CHANNELS


def test_lazy_weights_are_taken_over_and_nothing_else() -> None:
    def lazy() -> Any:
        return nn.Sequential(pyg.GCNConv(-1, 4), nn.LazyLinear(3), nn.LazyLinear(2))

    model, plain = lazy(), lazy()
    copied = copy.deepcopy(model)
    edges = torch.tensor([[0, 1], [1, 0]])
    hidden = copied[0](torch.ones(2, C), edges)
    copied[1](hidden)
    copied.calls = 5
    initialize_like(model, copied)
    assert torch.equal(model[0].lin.weight, copied[0].lin.weight)
    assert torch.equal(model[1].weight, copied[1].weight)
    assert type(model[1]) is nn.Linear
    assert type(model[2]) is nn.LazyLinear  # nothing used it
    assert not hasattr(model, "calls")
    plain[0](torch.ones(2, C), edges)
    plain[1](torch.ones(2, 4))
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(module).keys() == vars(other).keys()
        assert len(module._forward_pre_hooks) == len(other._forward_pre_hooks)
