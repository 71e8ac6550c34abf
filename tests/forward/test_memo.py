"""Functions of edges are called once where nobody looks at what they return, and always where somebody does."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import add_self_loops, degree  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Stack, assert_same, undirected_graph, whole
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward.memo import with_memory

CALLS: deque[str] = deque()  # no list, which would count as a part of the model
SCALE = 1.0
COUNT = 0


def with_loops(edge_index: Tensor, num_nodes: int, note: Any = None) -> Tensor:
    """Edges with self-loops; with the edges of a batch left out, as many as the batch has nodes."""
    CALLS.append("with_loops")
    looped: Tensor = add_self_loops(edge_index, num_nodes=num_nodes)[0]
    return looped


def weights(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> Tensor:
    CALLS.append("weights")
    target = edge_index[1]
    found: Tensor = 1 / degree(target, num_nodes, dtype).clamp(min=1)[target]
    return found


def with_count(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, int]:
    CALLS.append("with_count")
    return with_loops(edge_index, num_nodes), num_nodes


def ones(edge_index: Tensor, num_nodes: int) -> Tensor:
    CALLS.append("ones")
    return torch.ones(num_nodes, 1)


class Layer(MessagePassing):  # type: ignore[misc]
    """A mean over neighbours and the node itself."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(CHANNELS, CHANNELS)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return x_j * edge_weight.view(-1, 1)

    def weighted(self, x: Tensor, edges: Tensor, weight: Tensor, **more: Any) -> Tensor:
        out: Tensor = self.propagate(edges, x=self.lin(x), edge_weight=weight, **more)
        return out


class Hands(Layer):
    """Hands everything on."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = with_loops(edge_index, x.size(0))
        return SCALE * self.weighted(x, edges, weights(edges, x.size(0), x.dtype))


class Unpacks(Layer):
    """As PyG's ClusterGCNConv does."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = with_loops(edge_index, x.size(0))
        _, target = edges
        inverse = 1 / degree(target, x.size(0), x.dtype).clamp(min=1)
        return self.weighted(x, edges, inverse[target])


class Counts(Layer):
    """Asks for the number of edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = with_loops(edge_index, x.size(0))
        return self.weighted(x, edges, weights(edges, x.size(0), x.dtype) * torch.ones(edges.size(1)))


class Writes(Layer):
    """Changes a result in place."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = with_loops(edge_index, x.size(0))
        weight = weights(edges, x.size(0), x.dtype)
        weight.mul_(0.5)
        return self.weighted(x, edges, weight)


class ReturnsNumbers(Layer):
    """Gets a number along with the edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, count = with_count(edge_index, x.size(0))
        return self.weighted(x, edges, weights(edges, count, x.dtype))


class UsesNodes(Layer):
    """Propagates a result that belongs to nodes, so that no record replaces it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        one = ones(edge_index, x.size(0))
        edges = with_loops(edge_index, x.size(0))
        return self.weighted(x, edges, weights(edges, x.size(0), x.dtype), one=one)

    def message(self, x_j: Tensor, edge_weight: Tensor, one_j: Tensor) -> Tensor:  # type: ignore[override]
        return x_j * edge_weight.view(-1, 1) * one_j


class GivesItself(Layer):
    """A function that gets the layer could do anything with it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = with_loops(edge_index, x.size(0), note=self)
        return self.weighted(x, edges, weights(edges, x.size(0), x.dtype))


class WritesGlobals(Layer):
    """Has a variable outside."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return self.weighted(x, edge_index, weights(edge_index, x.size(0), x.dtype))


def run(kind: type[Layer], *, layers: int = 2) -> tuple[Stack, list[str]]:
    """Check that a model is exact in batches of very different sizes; returns what a further epoch calls."""
    data = undirected_graph()
    model = Stack([kind() for _ in range(layers)])
    expected = whole(model, data)
    gas.autoscale(model, data)
    # The second part is the smallest, and with its halo smaller than all of the first.
    loader = gas.HaloLoader(data, partition=(torch.arange(40) >= 30).long() + (torch.arange(40) >= 32).long())
    sizes = [batch.num_nodes for batch in loader]
    assert sizes[1] < min(sizes[0], sizes[2])
    for _ in range(2):
        CALLS.clear()
        assert_same(gas.infer(model, loader), expected)
    return model, list(CALLS)


def remember(model: Stack) -> list[bool | None]:
    plan = attached(model).plan
    assert plan is not None
    assert plan.ignores_edges
    return [call.remembers for call in plan.calls.values()]


def test_results_that_are_handed_on_are_computed_once() -> None:
    model, calls = run(Hands)
    assert remember(model) == [True, True]
    assert calls == []


@pytest.mark.parametrize("kind", [Unpacks, Counts, Writes, ReturnsNumbers, UsesNodes])
def test_a_layer_that_looks_at_a_result_remembers_none(kind: type[Layer]) -> None:
    model, calls = run(kind)
    assert remember(model) == [False, False]
    assert calls


def test_functions_that_may_do_more_are_always_called() -> None:
    _, calls = run(GivesItself)
    assert "with_loops" in calls


def test_forward_passes_that_cannot_be_copied_stay_as_they_are() -> None:
    for forward in (WritesGlobals().forward, torch.relu):
        assert with_memory(forward, lambda: None) is forward


def test_other_values_of_global_names_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = run(Hands, layers=1)
    assert remember(model) == [True]
    loader = gas.HaloLoader(undirected_graph(), 3)
    before = gas.infer(model, loader)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert_same(gas.infer(model, loader), 3 * before)


def test_other_types_are_computed_anew() -> None:
    """Training and evaluation of one model may run in different types."""
    model, _ = run(Hands, layers=1)
    data = undirected_graph()
    loader = gas.HaloLoader(data, 3)
    exact = gas.infer(model, loader)
    call = next(iter(attached(model).plan.calls.values()))  # type: ignore[union-attr]
    kept = dict(call.remembered)
    assert {key[0] for key in kept} == {"with_loops", "weights"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(gas.infer(model, loader).float(), exact, 3e-2)
    assert_same(gas.infer(model, loader), exact)
    assert {name: call.remembered[name] for name in kept} == kept


def test_a_changed_number_is_tried_again() -> None:
    class Sometimes(Layer):
        looks = 0

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            edges = with_loops(edge_index, x.size(0))
            weight = weights(edges, x.size(0), x.dtype)
            return self.weighted(x, edges, weight if self.looks < 1 else weight * torch.ones(edges.size(1)))

    model, _ = run(Sometimes, layers=1)
    assert remember(model) == [True]
    data = undirected_graph()
    expected = gas.infer(model, gas.HaloLoader(data, 3))
    next(model.layers.children()).looks = 1  # type: ignore[assignment]
    assert_same(gas.infer(model, gas.HaloLoader(data, 4)), expected)
    assert remember(model) == [False]
