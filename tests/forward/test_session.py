"""Passes that differ from the plan: calls that are missing, or that nobody expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Stack, assert_same, undirected_graph, whole
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import UnsupportedModelError

C = CHANNELS


def graph() -> tuple[Data, gas.HaloLoader, int]:
    """A graph in two parts, and the number of rows of the second batch, which no trial graph has."""
    data = undirected_graph(60, 30)
    loader = gas.HaloLoader(data, partition=(torch.arange(60) >= 25).long())
    first, second = loader
    assert first.num_nodes != second.num_nodes
    return data, loader, int(second.num_nodes)


class Odd(nn.Module):
    """Does something else in batches of a certain size: a layer less, or one more."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (pyg.SAGEConv(C, C) for _ in range(3))
        self.size, self.how = size, how

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        odd = x.size(0) == self.size
        x = self.first(x, edge_index).tanh()
        if self.how != "less" or not odd:
            x = self.second(x, edge_index).tanh()
        if self.how == "more" and odd:
            x = self.second(x, edge_index)
        return self.third(x, edge_index)


class OddLayer(MessagePassing):  # type: ignore[misc]
    """Propagates once or twice, depending on the size of the batch."""

    def __init__(self, usual: int, odd: int) -> None:
        super().__init__(aggr="mean")
        self.lin, self.usual, self.odd = nn.Linear(C, C), usual, odd
        self.size = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(x)
        for _ in range(self.odd if x.size(0) == self.size else self.usual):
            out = out + self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def odd_layers(size: int, usual: int, odd: int) -> Stack:
    layers = [OddLayer(usual, odd) for _ in range(2)]
    for layer in layers:
        layer.size = size
    return Stack(list(layers))


def model_of(name: str, size: int) -> nn.Module:
    if name in ("less", "more"):
        return Odd(size, name)
    return odd_layers(size, 2, 1) if name == "less propagations" else odd_layers(size, 1, 2)


MESSAGES = {
    "less": r"calls the same layers in every forward pass, but got a pass without 'second'.*Call every layer",
    "more": r"SAGEConv \('second#2'\) must be called the same way every time",
    "less propagations": r"OddLayer \('layers\.0'\) must propagate equally often.*but got 1 times instead of 2",
    "more propagations": r"OddLayer \('layers\.0'\) must propagate equally often.*but got more propagations",
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_pass_that_differs_from_the_plan_is_refused(name: str, training: bool) -> None:
    data, loader, size = graph()
    model = gas.autoscale(model_of(name, size), data).train(training)
    first, second = loader
    model(first)
    with pytest.raises(UnsupportedModelError, match=MESSAGES[name]):
        model(second)
    assert attached(model).session is None
    assert model(first).size(0) == first.batch_size


@pytest.mark.parametrize("name", MESSAGES)
def test_inference_refuses_it_too(name: str) -> None:
    data, loader, size = graph()
    model = gas.autoscale(model_of(name, size), data)
    with pytest.raises(UnsupportedModelError, match=MESSAGES[name].split(",")[0]):
        gas.infer(model, loader)


def test_no_batch_is_odd_where_all_have_other_sizes() -> None:
    data, loader, size = graph()
    for name in MESSAGES:
        model = model_of(name, size + 1)
        expected = whole(model, data)
        assert_same(gas.infer(gas.autoscale(model, data), loader), expected)
