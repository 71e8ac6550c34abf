"""Which edges layers run on: other and changed ones, edge dropout, and fused edges under PyG's own switches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import add_self_loops  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, EDGE_CHANNELS, Counted, Stack, assert_same, odd_graph, undirected_graph, whole
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import edges as edges_module
from gnnautoscale.forward.record import keep_edges

C = CHANNELS


def gcn() -> Any:
    return pyg.GCN(C, 6, num_layers=3, out_channels=4)


def first_batch(data: Data, num_parts: int = 4) -> Data:
    return next(iter(gas.HaloLoader(data, num_parts)))


# Calls that differ from one another ##################################################################################


def test_every_call_runs_on_what_it_is_given() -> None:
    """What was recorded for one edge attribute, or for none, does not stand in for another."""
    data = undirected_graph(dtype=torch.float64)
    data.edge_other = data.edge_weight.flip(0) * 3
    model = gcn().double().eval()
    names = ["edge_weight", None, "edge_other", "edge_weight"]

    def call(name: str | None) -> Callable[[nn.Module, Data], Any]:
        return lambda model, batch: model(batch.x, batch.edge_index, edge_weight=None if name is None else batch[name])

    expected = {name: call(name)(model, data).detach() for name in names}
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4, partition="random")
    for name in names:
        assert_same(gas.infer(model, loader, call=call(name)), expected[name], 1e-10)


def test_changed_edges_are_refused_later_too() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn(), data)
    batch = first_batch(data)
    model(batch)
    batch.edge_weight.mul_(2.0)
    with pytest.raises(UnsupportedModelError, match=r"GCNConv \('convs\.0'\) needs the batch's own edge weights"):
        model(batch)


# Edge dropout ########################################################################################################


def test_edge_dropout_leaves_out_its_share_in_training_only() -> None:
    data = undirected_graph(200, 2000)
    layer = Counted()
    model = gas.autoscale(Stack([layer]), data, edge_dropout=0.7)
    loader = gas.HaloLoader(data, 4)
    model.eval()
    model(next(iter(loader)))
    layer.num_edges = 0
    for batch in loader:
        model(batch)
    assert layer.num_edges == data.num_edges
    model.train()
    layer.num_edges = 0
    for batch in loader:
        model(batch)
    assert layer.num_edges / data.num_edges == pytest.approx(0.3, abs=0.04)
    model.train(False)
    assert_same(gas.infer(model, loader), gas.infer(model, gas.HaloLoader(data, 1)))


def test_edge_dropout_keeps_self_loops_and_weights_with_their_edges() -> None:
    """With weights that name their edge, the sum over the kept edges shows which were kept."""
    num_nodes = 12
    pairs = torch.cartesian_prod(torch.arange(num_nodes), torch.arange(num_nodes)).t()
    data = Data(x=torch.eye(num_nodes), edge_index=pairs, edge_weight=torch.arange(1.0, pairs.size(1) + 1))
    model = gas.autoscale(Stack([pyg.SimpleConv()], ("edge_weight",)), data, edge_dropout=0.6).train()
    out = model(next(iter(gas.HaloLoader(data, 1)))).t()  # [source, target]: the weight of each kept edge
    full = data.edge_weight.view(num_nodes, num_nodes)
    kept = out != 0
    assert bool(kept.diagonal().all())
    assert torch.equal(out[kept], full[kept])
    assert int((~kept).sum()) > 0
    again = model(next(iter(gas.HaloLoader(data, 1)))).t()
    assert not torch.equal(again, out)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.GATConv(C, C, edge_dim=EDGE_CHANNELS, add_self_loops=False),
        lambda: pyg.GATv2Conv(C, C, edge_dim=EDGE_CHANNELS, add_self_loops=False),
        lambda: pyg.TransformerConv(C, C, edge_dim=EDGE_CHANNELS),
    ],
    ids=["GAT", "GATv2", "Transformer"],
)
def test_edge_dropout_keeps_edge_features_with_their_edges(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer gives what it gives on a graph that has only the kept edges, each with its own features."""
    data = odd_graph()
    features = torch.rand(data.num_nodes, data.num_nodes, EDGE_CHANNELS)  # those of an edge, by its ends
    data.edge_attr = features[data.edge_index[0], data.edge_index[1]]
    model = Stack([make()], ("edge_attr",))
    plain = copy.deepcopy(model)
    kept: list[Tensor] = []

    def keep(edge_index: Tensor, dropout: float, *, has_loops: bool) -> Tensor:
        positions = keep_edges(edge_index, dropout, has_loops=has_loops)
        kept.append(edge_index[:, positions])
        return positions

    monkeypatch.setattr(edges_module, "keep_edges", keep)
    gas.autoscale(model, data, edge_dropout=0.5).train()
    for batch in gas.HaloLoader(data, 3):
        out = model(batch)
        nodes = batch.edge_index.info.n_id
        source, target = nodes[kept[-1]]
        assert source.numel() < batch.edge_index.size(1)
        expected = plain(data.x, torch.stack([source, target]), edge_attr=features[source, target])
        assert_same(out, expected[nodes[: batch.batch_size]])
    assert len(kept) == 3


def test_edge_dropout_works_on_derived_edges() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SimpleConv(aggr="sum")

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.conv(x, add_self_loops(edge_index, num_nodes=x.size(0))[0])

    data = undirected_graph(100, 2000)
    data.x = torch.ones(100, 1)
    model = gas.autoscale(Looped(), data, edge_dropout=0.8).train()
    counts = torch.cat([model(batch) for batch in gas.HaloLoader(data, 4)])
    assert float(counts.min()) >= 1.0  # self-loops stay
    assert float(counts.sum() - 100) / data.num_edges == pytest.approx(0.2, abs=0.04)


def test_edge_dropout_works_with_learned_weights() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weigh, self.conv = nn.Linear(EDGE_CHANNELS, 1), pyg.GraphConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
            return self.conv(x, edge_index, self.weigh(edge_attr).squeeze(-1))

    data = odd_graph()
    model = gas.autoscale(Learned(), data, edge_dropout=0.5).train()
    for batch in gas.HaloLoader(data, 3):
        model(batch).square().sum().backward()
    assert model.weigh.weight.grad is not None
    assert bool((model.weigh.weight.grad != 0).all())


# Hooks and switches of PyG ###########################################################################################


def double_messages(_: Any, __: Any, out: Tensor) -> Tensor:
    return 2 * out


@pytest.mark.parametrize("late", [False, True])
def test_message_hooks_are_called(late: bool) -> None:
    data = undirected_graph(dtype=torch.float64)
    plain, model = (pyg.SAGEConv(C, C).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    plain.register_message_forward_hook(double_messages)
    expected = whole(plain, data)
    if not late:
        model.register_message_forward_hook(double_messages)
    gas.autoscale(model, data)
    if late:
        gas.infer(model, gas.HaloLoader(data, 4, partition="random"))
        model.register_message_forward_hook(double_messages)
    assert_same(gas.infer(model, gas.HaloLoader(data, 4, partition="random")), expected, 1e-10)


def test_fusing_may_be_switched_off_later() -> None:
    data = undirected_graph(dtype=torch.float64)
    for layer in (pyg.SAGEConv(C, C), pyg.GCNConv(C, C)):
        model = Stack([layer]).double()
        expected = whole(model, data)
        gas.autoscale(model, data)
        gas.infer(model, gas.HaloLoader(data, 4, partition="random"))
        layer.fuse = False
        assert_same(gas.infer(model, gas.HaloLoader(data, 4, partition="random")), expected, 1e-10)
