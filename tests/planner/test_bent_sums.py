"""Which layers get their histories at the sums of their messages."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import Stack, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward import Compensation
from support.layers import three_layers


class Squared(pyg.MessagePassing):  # type: ignore[misc]
    """Squares the sum of its messages, or only the node's own row."""

    def __init__(self, *, own: bool) -> None:
        super().__init__(aggr="add")
        self._own = own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        summed: Tensor = self.propagate(edge_index, x=x)
        return 0.1 * (summed + x.square() if self._own else summed.square())


def inner(model: nn.Module, compensate: Compensation = "gradient") -> set[str]:
    """The calls with histories inside of them."""
    data = undirected_graph()
    gas.autoscale(model, data, compensate=compensate)
    model(next(iter(gas.HaloLoader(data, 4))))
    plan = attached(model).plan
    assert plan is not None
    return set(plan.inner)


@pytest.mark.parametrize("name", ["GIN", "GINE"])
def test_a_layer_that_bends_its_sum_has_its_history_there(name: str) -> None:
    assert inner(three_layers(name)) == {"layers.1", "layers.2"}  # the first one's halo depends on no history


@pytest.mark.parametrize("name", ["GCN", "SAGE mean", "GCN2", "Graph", "RGCN"])
def test_a_layer_that_is_linear_in_its_messages_has_it_at_its_output(name: str) -> None:
    assert inner(three_layers(name)) == set()


def test_only_what_becomes_of_the_sum_counts() -> None:
    assert inner(Stack([Squared(own=True) for _ in range(3)])) == set()
    assert inner(Stack([Squared(own=False) for _ in range(3)])) == {"layers.1", "layers.2"}


def test_nobody_looks_for_sums_without_need() -> None:
    assert inner(three_layers("GIN"), "none") == set()
    assert inner(three_layers("GIN"), "momentum") == set()
