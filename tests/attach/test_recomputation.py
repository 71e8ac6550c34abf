"""Nodes recomputed by a plain copy of a model, on the whole graph and on their receptive field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, with_attributes
from gnnautoscale.attach import recomputation
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.calling import call_with_batch
from gnnautoscale.attach.inference import plan_of
from gnnautoscale.attach.recomputation import Recomputation, receptive_field, receptive_hops
from gnnautoscale.errors import InputError
from gnnautoscale.forward import Plan, evaluating
from gnnautoscale.graph import Graph
from support.layers import three_layers

C = CHANNELS
NODES = torch.tensor([0, 3, 150, 297])


def band(*, directed: bool, num_nodes: int = 300) -> Data:
    """Nodes on a ring with edges to others nearby, so that a receptive field is a small part of it."""
    generator = torch.Generator().manual_seed(0)
    source = torch.arange(num_nodes).repeat(3)
    target = (source + torch.randint(-3, 4, source.shape, generator=generator)) % num_nodes
    edges = torch.stack([source, target])
    return with_attributes(edges if directed else torch.cat([edges, edges.flip(0)], dim=1), num_nodes)


def planned(model: nn.Module, data: Data) -> tuple[nn.Module, Plan]:
    gas.autoscale(model, data)
    return model, plan_of(model, gas.HaloLoader(data, 3, partition="random", bidirectional=True))


def memory_of(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    """Let only so many bytes be free."""
    monkeypatch.setattr(recomputation, "_LITTLE", 0)
    monkeypatch.setattr(recomputation, "free_memory", lambda _: num_bytes)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing fit easily, so that every node is recomputed on its own."""
    memory_of(monkeypatch, 1e9)
    monkeypatch.setattr(recomputation, "_SHARE", 0.0)


# What layers know about edges besides their own: degrees of sources, degrees both ways, weights, several hops at once.
ON_EDGES = ("GCN weighted", "GAT edge_attr", "APPNP weighted", "Cheb", "PNA", "MF")
BOTH_WAYS = ("SAGE target_to_source", "DirGNN GCN")


@pytest.mark.parametrize(
    ("name", "directed"),
    [*((name, True) for name in (*ON_EDGES, *BOTH_WAYS)), ("GCN weighted", False), ("DirGNN GCN", False)],
)
def test_receptive_fields_give_the_same_rows(monkeypatch: pytest.MonkeyPatch, name: str, directed: bool) -> None:
    data = band(directed=directed)
    model, plan = planned(three_layers(name), data)
    whole = Recomputation(model, Graph.of(data), NODES, plan)
    expected = whole.run(evaluating, call_with_batch)
    one_by_one(monkeypatch)
    parts = Recomputation(model, Graph.of(data), NODES, plan)
    sizes: list[int] = []

    def counting(model: nn.Module, batch: Data) -> Any:
        sizes.append(batch.num_nodes)
        return call_with_batch(model, batch)

    found = parts.run(evaluating, counting)
    assert len(sizes) == NODES.numel()
    assert max(sizes) < data.num_nodes / 2
    assert whole.how == "the whole graph"
    assert parts.how == f"their receptive field of {receptive_hops(plan)} hops"
    assert found.layers.keys() == expected.layers.keys()
    for got, want in zip(found.outputs, expected.outputs, strict=True):
        assert_same(got, want)
    for call in found.layers:
        if call.startswith("layers.2"):  # rows of the layers before are right only where the last one needs them
            assert_same(found.layers[call], expected.layers[call])
    assert {call: text.split()[0] for call, text in expected.described.items()} == {
        call: text.split()[0] for call, text in found.described.items()
    }


def test_a_field_that_is_too_small_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could fail: with a hop less, the degrees of the outermost nodes are wrong."""
    data = band(directed=False)
    model, plan = planned(three_layers("GCN weighted"), data)
    expected = Recomputation(model, Graph.of(data), NODES, plan).run(evaluating, call_with_batch)
    one_by_one(monkeypatch)
    monkeypatch.setattr(recomputation, "receptive_hops", lambda plan: receptive_hops(plan) - 1)
    found = Recomputation(model, Graph.of(data), NODES, plan).run(evaluating, call_with_batch)
    with pytest.raises(AssertionError):
        assert_same(found.outputs[0], expected.outputs[0])


def test_verify_says_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    data = band(directed=True)
    model = gas.autoscale(pyg.GAT(C, 8, num_layers=2, out_channels=3, dropout=0.5), data)
    loader = gas.HaloLoader(data, 5)
    one_by_one(monkeypatch)
    found = gas.verify(model, loader, nodes=NODES)
    assert found.exact
    assert found.how == "their receptive field of 3 hops"
    assert "recomputed on their receptive field of 3 hops" in str(found)


def test_as_many_nodes_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = band(directed=False)
    model, plan = planned(pyg.GCN(C, 8, num_layers=2), data)
    graph, rows = Graph.of(data), 3 * 8  # two layers and the features, all 8 wide
    near = receptive_field(graph, NODES[:2], 3)
    needed = 4 * 4 * (8 * graph.incoming.into(near)[0].numel() + rows * near.numel())
    memory_of(monkeypatch, 2 * needed)  # half of it may be used
    groups = Recomputation(model, Graph.of(data), NODES, plan)._groups
    assert [group.tolist() for group in groups or []] == [[0, 3], [150], [297]]


def test_too_large_a_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = band(directed=False)
    model, plan = planned(pyg.GCN(C, 8, num_layers=2), data)
    memory_of(monkeypatch, 1000.0)
    with pytest.raises(InputError, match=r"room for the receptive field.*within 3 hops of node 0"):
        Recomputation(model, Graph.of(data), NODES, plan)


def test_lack_of_memory_is_not_the_call_s_fault() -> None:
    data = band(directed=False)
    model, plan = planned(pyg.GCN(C, 8, num_layers=2), data)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Recomputation(model, Graph.of(data), NODES, plan).run(evaluating, fail)


def test_small_graphs_always_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = band(directed=False)
    model, plan = planned(pyg.GCN(C, 8, num_layers=2), data)
    monkeypatch.setattr(recomputation, "free_memory", lambda _: 0.0)
    assert Recomputation(model, Graph.of(data), NODES, plan).how == "the whole graph"


@pytest.mark.parametrize(
    ("make", "hops"),
    [
        (lambda: pyg.GCN(C, 8, num_layers=3), 4),
        (lambda: pyg.GCN(C, 8, num_layers=3, jk="cat"), 4),
        (lambda: pyg.Sequential("x, edge_index", [(pyg.APPNP(K=5, alpha=0.1), "x, edge_index -> x")]), 6),
        (lambda: pyg.DirGNNConv(pyg.SAGEConv(C, C)), 2),  # two layers side by side
    ],
)
def test_hops_of_a_model(make: Callable[[], nn.Module], hops: int) -> None:
    assert receptive_hops(planned(make(), band(directed=False))[1]) == hops


def test_hops_of_a_model_that_names_its_own_slots() -> None:
    class Explicit(gas.ScalableGNN):
        def __init__(self) -> None:
            super().__init__(300, hidden_channels=C, num_layers=3)
            self.convs = nn.ModuleList(pyg.SAGEConv(C, C) for _ in range(3))

        def forward(self, x: Tensor, adj_t: Tensor, n_id: Tensor) -> Tensor:
            for conv, history in zip(self.convs, self.histories, strict=False):
                x = self.push_and_pull(history, conv(x, adj_t).relu(), n_id)
            out: Tensor = self.convs[-1](x, adj_t)
            return out

    model = Explicit()
    plan_of(model, gas.HaloLoader(band(directed=False), 3))
    assert receptive_hops(cast(Plan, attached(model).plan)) == 4


def test_fields_go_along_and_against_edges() -> None:
    path = Data(edge_index=torch.tensor([[0, 1, 2, 3, 5], [1, 2, 3, 4, 3]]), num_nodes=7)
    graph = Graph(path)
    assert receptive_field(graph, torch.tensor([3]), 1).tolist() == [3, 2, 4, 5]
    assert receptive_field(graph, torch.tensor([3]), 3).tolist() == [3, 2, 4, 5, 1, 0]
    assert receptive_field(graph, torch.tensor([6, 0]), 1).tolist() == [6, 0, 1]
    both = Graph(Data(edge_index=torch.cat([path.edge_index, path.edge_index.flip(0)], dim=1), num_nodes=7))
    assert receptive_field(both, torch.tensor([3]), 3).tolist() == [3, 2, 4, 5, 1, 0]


def test_a_model_that_writes_into_its_inputs_and_itself() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            assert isinstance(self.calls, Tensor)
            self.calls += 1
            out: Tensor = self.conv(x.clone().add_(self.calls - 1), edge_index)
            x.zero_()
            return out

    data = band(directed=False)
    before, module = data.x.clone(), Writing()
    gas.autoscale(module, data)
    plain = Recomputation(module, Graph.of(data), NODES, Plan())
    first, second = plain.run(evaluating, call_with_batch), plain.run(evaluating, call_with_batch)
    assert torch.equal(first.outputs[0], second.outputs[0]), "each run starts from the model's present state"
    assert torch.equal(data.x, before)
    assert module.calls == 0


def test_free_memory() -> None:
    assert 0 < recomputation.free_memory(torch.device("cpu")) <= math.inf
