"""Graphs that grow: parts of new nodes, rows that stay, and rows that are recomputed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import add_self_loops  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import (
    CHANNELS,
    EDGE_CHANNELS,
    Stack,
    assert_same,
    history_rows,
    odd_graph,
    spread_norms,
    undirected_graph,
    whole,
    with_attributes,
)
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.growth import grown_parts
from gnnautoscale.attach.inference import infer_from_histories
from gnnautoscale.errors import InputError, StaleHistoryWarning, UnsupportedModelError
from gnnautoscale.forward.exchange import HistoryStore
from gnnautoscale.forward.session import Session
from gnnautoscale.models import build_model
from support.layers import ALL_LAYERS, INITIAL_LAYERS, LAYERS, TWO_WAY_LAYERS, alike, stacked, three_layers

C = CHANNELS


def plus(data: Data, num_new: int = 0, pairs: Sequence[tuple[int, int]] | Tensor = (), *, both: bool = False) -> Data:
    """The graph with more nodes and edges; everything is a tensor of its own."""
    edges = torch.as_tensor(pairs, dtype=torch.long).reshape(-1, 2).t()
    edges = torch.cat([edges, edges.flip(0)], dim=1) if both else edges
    added = with_attributes(edges, max(num_new, 1), seed=data.num_nodes)
    grown = Data(num_nodes=data.num_nodes + num_new)
    for name, value in data:
        if name == "edge_index":
            grown[name] = torch.cat([value, edges], dim=1)
        elif name != "num_nodes":
            more = added[name.replace("val_mask", "train_mask").replace("test_mask", "train_mask")]
            more = more if data.is_edge_attr(name) else more[:num_new]
            grown[name] = torch.cat([value, more.to(value.dtype)])
    return grown


def some_growth(data: Data, seed: int = 0, *, both: bool = False) -> Data:
    """Six more nodes, one of them without edges, with edges to old nodes and among each other, in any order."""
    generator = torch.Generator().manual_seed(seed)
    n = data.num_nodes
    to_old = torch.stack(
        [torch.randint(n, n + 5, (4,), generator=generator), torch.randint(n, (4,), generator=generator)]
    )
    from_old = torch.stack(
        [torch.randint(n, (3,), generator=generator), torch.randint(n, n + 5, (3,), generator=generator)]
    )
    between = torch.tensor([[n, n + 1], [n + 1, n + 2]])
    old = torch.randint(n, (2, 2), generator=generator)
    grown = plus(data, 6, torch.cat([to_old, from_old, between, old], dim=1).t(), both=both)
    order = torch.randperm(grown.edge_index.size(1), generator=generator)
    for name in ("edge_index", "edge_weight", "edge_attr", "edge_type"):
        if name in grown:
            grown[name] = grown[name][..., order] if name == "edge_index" else grown[name][order]
    return grown


def path(num_nodes: int = 100) -> Data:
    """Node after node, both ways."""
    nodes = torch.arange(num_nodes - 1)
    edges = torch.stack([nodes, nodes + 1])
    return with_attributes(torch.cat([edges, edges.flip(0)], dim=1), num_nodes)


def ring(num_nodes: int = 100) -> Data:
    """Node after node, one way, and round."""
    nodes = torch.arange(num_nodes)
    return with_attributes(torch.stack([nodes, (nodes + 1) % num_nodes]), num_nodes)


def check_exact(model: nn.Module, plain: nn.Module, loader: gas.HaloLoader) -> None:
    """Histories hold what the whole graph gives, and the model knows."""
    expected = whole(plain, loader.data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(gas.predict(model, loader, torch.arange(loader.data.num_nodes)), expected)
    assert_same(infer_from_histories(model, loader), expected)


def refreshed(
    model: nn.Module, data: Data, num_parts: int = 5, **options: Any
) -> tuple[nn.Module, nn.Module, gas.HaloLoader]:
    """The autoscaled model with exact histories, a plain copy of it, and a loader."""
    plain = copy.deepcopy(model)
    loader = gas.HaloLoader(data, num_parts, partition="random", **options)
    gas.autoscale(model, data)
    gas.refresh(model, loader)
    return model, plain, loader


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The nodes whose rows sweeps write, by slot."""
    seen: dict[str, list[int]] = {}
    original = HistoryStore.write

    def write(self: HistoryStore, session: Session, slot: str, rows: Tensor) -> None:
        seen.setdefault(slot, []).extend(session.info.nodes.tolist())
        original(self, session, slot, rows)

    monkeypatch.setattr(HistoryStore, "write", write)
    return seen


# Exactness ###########################################################################################################


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gcn", odd_graph),
        ("gin", undirected_graph),
        ("appnp", odd_graph),
        ("gcnii", undirected_graph),
        ("pna-jk", odd_graph),
    ],
)
def test_models_are_exact(name: str, make: Callable[[], Data]) -> None:
    data = make()
    keep = ["x", "edge_index", *(["edge_weight"] if name in ("gcn", "appnp", "gcnii") else [])]
    data = Data(**{key: data[key] for key in keep})
    options = {"layers": 3} if name == "appnp" else {"layers": 3, "hidden": 8}
    model = build_model(name, data, 4, **options)
    spread_norms(model)
    model, plain, loader = refreshed(model, data)
    loader = gas.grow(model, loader, some_growth(data, both=make is undirected_graph))
    check_exact(model, plain, loader)


# Several aggregations, edge attributes, relations, several propagations, layers inside layers and both directions.
KINDS = alike(
    ["GCN weighted", "GAT edge_attr", "PNA edge_attr", "GIN", "FastRGCN", "TAG weighted", "ARMA", "GCN2", "DirGNN GCN"]
)


@pytest.mark.parametrize("group", KINDS, ids=" + ".join)
def test_layers_are_exact(group: list[str]) -> None:
    data = odd_graph()
    model, plain, loader = refreshed(stacked(group), data, 4, bidirectional=group[0] in TWO_WAY_LAYERS)
    loader = gas.grow(model, loader, some_growth(data))
    check_exact(model, plain, loader)


READY: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg.GCN(C, 6, num_layers=3, out_channels=4, norm="batch_norm"),
    "GraphSAGE": lambda: pyg.GraphSAGE(C, 6, num_layers=3, out_channels=4, jk="cat"),
    "GAT": lambda: pyg.GAT(C, 6, num_layers=3, out_channels=4, heads=2),
    "GIN": lambda: pyg.GIN(C, 6, num_layers=4, out_channels=4),
}


@pytest.mark.parametrize(
    ("name", "num_parts", "storage"),
    [("GCN", 1, "device"), ("GraphSAGE", 5, "host"), ("GAT", 1, "host"), ("GIN", 5, "device")],
)
def test_several_growths(name: str, num_parts: int, storage: Literal["device", "host"]) -> None:
    data = undirected_graph()
    model = READY[name]()
    plain = copy.deepcopy(model)
    loader = gas.HaloLoader(data, num_parts, batch_size=min(2, num_parts), shuffle=True)
    gas.autoscale(model, data, storage=storage)
    gas.refresh(model, loader)
    for seed in range(3):
        loader = gas.grow(model, loader, some_growth(loader.data, seed))
        check_exact(model, plain, loader)
    assert loader.data.num_nodes == 58
    assert attached(model).memory.storage == storage


@pytest.mark.parametrize("seed", range(3))
def test_any_growth_of_any_graph(seed: int) -> None:
    """Random graphs in random parts under different layers; features, weights and edge attributes change too."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes = int(torch.randint(20, 60, (1,), generator=generator))
    data = with_attributes(torch.randint(num_nodes, (2, num_nodes), generator=generator), num_nodes, seed=seed)
    names = ("GCN weighted", "Graph weighted", "APPNP weighted", "SAGE max", "GATv2 edge_attr")
    arguments = [LAYERS[name][1] for name in names]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(LAYERS[name][0]() for name in names)

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
            given = {"edge_weight": edge_weight, "edge_attr": edge_attr}
            for layer, wanted in zip(self.layers, arguments, strict=True):
                x = torch.tanh(layer(x, edge_index, **{name: given[name] for name in wanted}))
            return x

    model, plain, loader = refreshed(Mixed(), data, 4)
    grown = some_growth(data, seed)
    grown.x[torch.randint(num_nodes, (2,), generator=generator)] += 1.0
    grown.edge_weight[:1] += 1.0
    grown.edge_attr[1:2] += 1.0
    check_exact(model, plain, gas.grow(model, loader, grown))


class DerivesEdges(nn.Module):
    """Adds self-loops itself, so that nothing is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(pyg.GraphConv(C, C) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        edge_index, edge_weight = add_self_loops(edge_index, edge_weight, num_nodes=x.size(0))
        for layer in self.layers:
            x = torch.tanh(layer(x, edge_index, edge_weight))
        return x


def test_edges_that_the_model_derives() -> None:
    data = odd_graph()
    model, plain, loader = refreshed(DerivesEdges(), data)
    for grown in (data.clone(), some_growth(data)):  # first other weights, then nodes too
        grown.edge_weight[5] *= 3.0
        loader = gas.grow(model, loader, grown)
        assert not attached(model).memory.records
        check_exact(model, plain, loader)


class Explicit(gas.ScalableGNN):
    """Names its own histories, and reads edge attributes between its layers."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes, hidden_channels=C, num_layers=3)
        self.layers = nn.ModuleList(pyg.GCNConv(C, C) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, n_id: Tensor) -> Tensor:
        incoming = x.new_zeros(x.size(0)).index_add(0, edge_index[1], edge_attr[:, 0])
        for layer, history in zip(self.layers, self.histories, strict=False):
            x = torch.tanh(layer(x, edge_index) + incoming.unsqueeze(1))
            x = self.push_and_pull(history, x, n_id)
        out: Tensor = self.layers[-1](x, edge_index)
        return out


def test_models_that_name_their_histories() -> None:
    data = odd_graph()
    model = Explicit(data.num_nodes)
    plain = gas.detach(Explicit(data.num_nodes))
    plain.load_state_dict(model.state_dict())
    loader = gas.HaloLoader(data, 4, partition="random")
    gas.refresh(model, loader)
    for grown in (data.clone(), some_growth(data)):  # first other attributes, then nodes too
        grown.edge_attr[3] += 2.0
        loader = gas.grow(model, loader, grown)
        assert model.num_nodes == grown.num_nodes
        nodes = torch.arange(grown.num_nodes)
        expected = plain.eval()(grown.x, grown.edge_index, grown.edge_attr, nodes).detach()
        assert_same(gas.predict(model, loader, nodes), expected)


def test_own_way_to_call_the_model() -> None:
    data = undirected_graph()
    model = pyg.GCN(C, 6, num_layers=3, out_channels=4)
    plain = copy.deepcopy(model)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4)

    def call(model: nn.Module, batch: Data) -> Any:
        return model(batch.x * 2, batch.edge_index)

    gas.refresh(model, loader, call=call)
    grown = some_growth(data)
    loader = gas.grow(model, loader, grown, call=call)
    expected = plain.eval()(grown.x * 2, grown.edge_index).detach()
    assert_same(gas.predict(model, loader, torch.arange(grown.num_nodes), call=call), expected)


def test_histories_in_the_order_of_another_loader() -> None:
    data = undirected_graph()
    model, plain, _ = refreshed(READY["GCN"](), data)
    loader = gas.grow(model, gas.HaloLoader(data, 3, partition="random", seed=5), some_growth(data))
    check_exact(model, plain, loader)


def test_only_the_number_of_nodes_was_given() -> None:
    data = undirected_graph()
    model = READY["GCN"]()
    plain = copy.deepcopy(model)
    loader = gas.HaloLoader(data, 4)
    gas.autoscale(model, 40)
    gas.refresh(model, loader)
    check_exact(model, plain, gas.grow(model, loader, some_growth(data)))


def test_the_same_data_with_other_tensors() -> None:
    """Who keeps one Data and gives it longer tensors gets the same."""
    data = undirected_graph()
    grown = some_growth(data)
    model, plain, loader = refreshed(READY["GCN"](), data)
    for name, value in grown:
        data[name] = value
    check_exact(model, plain, gas.grow(model, loader, data))


# What is recomputed ##################################################################################################


def stack(name: str) -> Stack:
    """Four layers, so that three levels are kept."""
    make, arguments = ALL_LAYERS[name]
    return Stack([make() for _ in range(4)], arguments, initial=name in INITIAL_LAYERS)


# A node more, 100, beside node 50 of a path: which other nodes are reached at each level.
REACHED: dict[str, list[range]] = {
    "SAGE mean": [range(50, 51), range(49, 52), range(48, 53)],
    "GAT": [range(50, 51), range(49, 52), range(48, 53)],
    "GCN": [range(49, 52), range(48, 53), range(47, 54)],  # its weights depend on the degree of both ends
    "GCN2": [range(49, 52), range(48, 53), range(47, 54)],
}


@pytest.mark.parametrize("name", REACHED)
def test_only_what_is_reached_is_recomputed(name: str, pushed: dict[str, list[int]]) -> None:
    data = path()
    model, plain, loader = refreshed(stack(name), data, 10)
    before = history_rows(model)
    pushed.clear()
    grown = plus(data, 1, [(50, 100)], both=True)
    loader = gas.grow(model, loader, grown)
    expected = [sorted([*nodes, 100]) for nodes in REACHED[name]]
    assert [sorted(nodes) for nodes in pushed.values()] == expected
    after = history_rows(model)
    assert list(pushed) == list(after) == list(before)
    for slot, nodes in zip(pushed, expected, strict=True):
        outside = torch.tensor(sorted(set(range(100)) - set(nodes)))
        assert after[slot].shape == (101, C)
        assert torch.equal(after[slot][outside], before[slot][outside])
        assert not torch.equal(after[slot][nodes[:-1]], before[slot][nodes[:-1]])
    check_exact(model, plain, loader)


def test_propagations_in_a_layer(pushed: dict[str, list[int]]) -> None:
    data = path()
    model, plain, loader = refreshed(Stack([pyg.APPNP(K=4, alpha=0.1)]), data, 10)
    pushed.clear()
    loader = gas.grow(model, loader, plus(data, 1, [(50, 100)], both=True))
    assert [len(nodes) for nodes in pushed.values()] == [4, 6, 8]
    check_exact(model, plain, loader)


@pytest.mark.parametrize(
    ("name", "pair", "expected"),
    [
        ("SAGE mean", (100, 7), [{100, 7}, {100, 7, 8}, {100, 7, 8, 9}]),
        ("GCN", (100, 7), [{100, 7, 8}, {100, 7, 8, 9}, {100, 7, 8, 9, 10}]),
        ("GCN", (7, 100), [{100}, {100}, {100}]),
        ("SAGE target_to_source", (7, 100), [{100, 7}, {100, 7, 6}, {100, 7, 6, 5}]),
    ],
)
def test_directed_graph(
    name: str, pair: tuple[int, int], expected: list[set[int]], pushed: dict[str, list[int]]
) -> None:
    data = ring()
    model, plain, loader = refreshed(stack(name), data, 10, bidirectional=name in TWO_WAY_LAYERS)
    pushed.clear()
    loader = gas.grow(model, loader, plus(data, 1, [pair]))
    assert [set(nodes) for nodes in pushed.values()] == expected
    check_exact(model, plain, loader)


def test_changed_features(pushed: dict[str, list[int]]) -> None:
    data = path()
    model, plain, loader = refreshed(stack("SAGE mean"), data, 10)
    pushed.clear()
    grown = data.clone()
    grown.x[10] += 1.0
    grown.y = 3 - grown.y  # what is no input changes nothing
    grown.train_mask = ~grown.train_mask
    loader = gas.grow(model, loader, grown)
    assert [sorted(nodes) for nodes in pushed.values()] == [[*range(9, 12)], [*range(8, 13)], [*range(7, 14)]]
    check_exact(model, plain, loader)


@pytest.mark.parametrize(
    ("make", "argument", "expected"),
    [
        (lambda: pyg.GraphConv(C, C), "edge_weight", [{4}, {3, 4, 5}]),
        (lambda: pyg.GraphConv(C, C, flow="target_to_source"), "edge_weight", [{3}, {2, 3, 4}]),
        # Its weights are normalized by the degree of both ends, which is that of node 4 here.
        (lambda: pyg.GCNConv(C, C), "edge_weight", [{3, 4, 5}, {2, 3, 4, 5, 6}]),
        # Nothing is recorded of edge attributes that are multiplied with weights.
        (lambda: pyg.GATConv(C, C, edge_dim=EDGE_CHANNELS, add_self_loops=False), "edge_attr", [{4}, {3, 4, 5}]),
        (
            lambda: pyg.GATConv(C, C, edge_dim=EDGE_CHANNELS, add_self_loops=False, flow="target_to_source"),
            "edge_attr",
            [{3}, {2, 3, 4}],
        ),
        (lambda: pyg.GraphConv(C, C), "edge_type", [set(), set()]),
    ],
    ids=["weight", "reversed weight", "normalized", "attribute", "reversed attribute", "no input"],
)
def test_changed_edge_values(
    make: Callable[[], nn.Module], argument: str, expected: list[set[int]], pushed: dict[str, list[int]]
) -> None:
    data = path()
    layers = Stack([make() for _ in range(3)], (argument,) if argument != "edge_type" else ())
    model, plain, loader = refreshed(layers, data, 10)
    pushed.clear()
    grown = data.clone()
    place = ((grown.edge_index == torch.tensor([[3], [4]])).all(0)).nonzero().item()
    grown[argument][place] += 1
    loader = gas.grow(model, loader, grown)
    assert [set(nodes) for nodes in pushed.values()] == [nodes for nodes in expected if nodes]
    check_exact(model, plain, loader)


@pytest.mark.parametrize("order", ["same", "other"])
def test_nothing_new(order: str, pushed: dict[str, list[int]]) -> None:
    data = path(40)
    model, plain, loader = refreshed(stack("GCN"), data)
    before = history_rows(model)
    pushed.clear()
    grown = data.clone()
    if order == "other":
        grown.edge_index = data.edge_index.flip(1)
        for name in ("edge_weight", "edge_attr", "edge_type"):
            grown[name] = data[name].flip(0)
    loader = gas.grow(model, loader, grown)
    assert not pushed
    assert all(torch.equal(rows, before[slot]) for slot, rows in history_rows(model).items())
    check_exact(model, plain, loader)


def test_new_nodes_without_edges(pushed: dict[str, list[int]]) -> None:
    data = undirected_graph()
    model, plain, loader = refreshed(stack("GCN"), data)
    pushed.clear()
    loader = gas.grow(model, loader, plus(data, 3))
    assert [sorted(nodes) for nodes in pushed.values()] == [[40, 41, 42]] * 3
    check_exact(model, plain, loader)


def test_batches_are_as_large_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = HistoryStore.write

    def write(self: HistoryStore, session: Session, slot: str, rows: Tensor) -> None:
        sizes.append(session.info.batch_size)
        original(self, session, slot, rows)

    data = undirected_graph()
    model, plain, loader = refreshed(stack("GCN"), data, 8, batch_size=2)
    monkeypatch.setattr(HistoryStore, "write", write)
    grown = data.clone()
    grown.x += 1.0
    loader = gas.grow(model, loader, grown)
    assert sizes == [10] * 12  # four batches at each of three levels
    check_exact(model, plain, loader)


# Histories ###########################################################################################################


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [("device", torch.float16), ("host", torch.bfloat16), ("device", torch.float64), ("host", None)],
)
def test_kind_of_histories_stays(storage: Literal["device", "host"], dtype: torch.dtype | None) -> None:
    data = path()
    model = stack("SAGE mean")
    loader = gas.HaloLoader(data, 10)
    gas.autoscale(model, data, storage=storage, dtype=dtype)
    gas.refresh(model, loader)
    old = attached(model).memory
    before = history_rows(model)
    gas.grow(model, loader, plus(data, 1, [(99, 100)], both=True))
    new = attached(model).memory
    assert new is not old
    assert [type(history) for history in new.histories.values()] == [type(h) for h in old.histories.values()]
    assert {history.dtype for history in new.histories.values()} == {dtype or torch.float32}
    assert (new.storage, new.dtype) == (storage, dtype)
    for slot, rows in history_rows(model).items():
        assert torch.equal(rows[:97], before[slot][:97])


def test_stale_histories_stay_stale() -> None:
    data = path()
    model = stack("SAGE mean")
    loader = gas.HaloLoader(data, 10)
    gas.autoscale(model, data)
    train(model, loader)
    before = history_rows(model)
    loader = gas.grow(model, loader, plus(data, 1, [(99, 100)], both=True))
    assert attached(model).memory._written_by is None
    for slot, rows in history_rows(model).items():
        assert torch.equal(rows[:97], before[slot][:97])
    with pytest.warns(StaleHistoryWarning):
        gas.predict(model, loader, torch.tensor([100]))


def test_other_weights_are_noticed() -> None:
    data = path()
    model, _, loader = refreshed(stack("SAGE mean"), data)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    loader = gas.grow(model, loader, plus(data, 1, [(99, 100)], both=True))
    with pytest.warns(StaleHistoryWarning):
        gas.predict(model, loader, torch.tensor([0]))


def test_histories_that_there_are_not() -> None:
    data = undirected_graph()
    model = READY["GCN"]()
    plain = copy.deepcopy(model)
    loader = gas.HaloLoader(data, 4)
    gas.autoscale(model, data)
    loader = gas.grow(model, loader, some_growth(data))
    assert not attached(model).memory.histories
    with pytest.raises(InputError, match="empty histories"):
        gas.predict(model, loader, torch.tensor([1]))
    gas.refresh(model, loader)
    check_exact(model, plain, loader)


def test_one_layer_has_no_histories() -> None:
    data = undirected_graph()
    model, plain, loader = refreshed(Stack([pyg.GCNConv(C, C)]), data)
    check_exact(model, plain, gas.grow(model, loader, some_growth(data)))


def train(model: nn.Module, loader: gas.HaloLoader) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.y[: batch.batch_size])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on() -> None:
    data = undirected_graph()
    model = READY["GCN"]()
    loader = gas.HaloLoader(data, 6, batch_size=2, shuffle=True)
    gas.autoscale(model, data)
    train(model, loader)
    grown = some_growth(data)
    loader = gas.grow(model, loader, grown)
    losses = [sum(train(model, loader)) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    plain = copy.deepcopy(gas.detach(model))
    gas.autoscale(model, grown)
    assert_same(gas.infer(model, loader), whole(plain, grown))


def test_gradients_of_compensated_steps_stay() -> None:
    data = path()
    model = gas.autoscale(READY["GraphSAGE"](), data, compensate="gradient")
    loader = gas.HaloLoader(data, 4, batch_size=2, shuffle=True)
    train(model, loader)

    def gradients() -> dict[str, Tensor]:
        memory = attached(model).memory
        index = memory.row_order(next(iter(loader)).edge_index.info).row_of
        return {slot: history.raw[index.long()] for slot, history in memory.last_gradients.items()}

    before = gradients()
    loader = gas.grow(model, loader, plus(data, 1, [(99, 100)], both=True))
    after = gradients()
    assert before.keys() == after.keys() == {"convs.1", "convs.2"}
    for slot, rows in before.items():
        assert rows.any()
        assert torch.equal(after[slot][: rows.size(0)], rows)
        assert not after[slot][rows.size(0) :].any()
    train(model, loader)


def test_histories_of_fit() -> None:
    data = path()
    data.val_mask = data.test_mask = ~data.train_mask
    model = READY["GraphSAGE"]()
    gas.fit(model, data, num_parts=4, epochs=2)
    before = history_rows(model)
    loader = gas.HaloLoader(data, 4, batch_size=2, shuffle=True)
    loader = gas.grow(model, loader, plus(data, 1, [(99, 100)], both=True))
    after = history_rows(model)
    for slot in before:
        assert torch.equal(after[slot][:97], before[slot][:97])
        assert after[slot][100].any()
    train(model, loader)


def test_training_equals_that_of_a_model_attached_to_the_grown_graph() -> None:
    data = undirected_graph()
    model, plain, loader = refreshed(READY["GraphSAGE"](), data)
    loader = gas.grow(model, loader, some_growth(data))
    gas.autoscale(plain, loader.data)
    gas.refresh(plain, loader)
    for one, other in zip(train(model, loader), train(plain, loader), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_batches_of_the_old_graph_are_refused() -> None:
    data = undirected_graph()
    model, _, loader = refreshed(READY["GCN"](), data)
    gas.grow(model, loader, some_growth(data))
    with pytest.raises(InputError, match="takes batches of its training graph, which has 46 nodes"):
        model(next(iter(loader)))


# Parts ###############################################################################################################


def test_loader_keeps_its_settings() -> None:
    data = undirected_graph()
    model = gas.autoscale(READY["GCN"](), data)
    loader = gas.HaloLoader(data, 8, batch_size=3, shuffle=True, drawings=2, seed=7, num_workers=1, bidirectional=True)
    grown = gas.grow(model, loader, some_growth(data))
    for name in ("num_parts", "batch_size", "shuffle", "drawings", "seed", "num_workers", "bidirectional"):
        assert getattr(grown, name) == getattr(loader, name), name
    assert torch.equal(grown.labels[:40], loader.labels)


def test_parts_of_new_nodes() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    for pairs, expected in [
        ([(6, 0)], [0]),
        ([(0, 6)], [0]),
        ([(6, 0), (6, 2), (3, 6)], [1]),  # most neighbours
        ([(6, 0), (6, 2), (6, 4)], [0]),  # of equals the first
        ([(6, 4), (7, 6), (8, 7)], [2, 2, 0]),  # one after another, as long as there is room for four
        ([(7, 4), (6, 7)], [2, 2]),
        ([(6, 6)], [0]),  # alone
        ([(6, 7), (7, 8), (8, 6)], [0, 1, 2]),  # together, but nothing leads there
        ([(6, 0), (7, 0), (8, 0), (9, 0), (9, 1)], [0, 0, 1, 0]),  # room for three: those with most neighbours first
    ]:
        parts = grown_parts(labels, torch.tensor(pairs).t(), 6 + len(expected))
        assert parts.tolist() == [*labels.tolist(), *expected], pairs


def test_second_choice_when_the_first_part_is_full() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    pairs = [(7, 0), (7, 1), (7, 4)]  # parts take new nodes up to a size of four
    assert grown_parts(labels, torch.tensor(pairs).t(), 8).tolist()[7:] == [1]


def test_no_part_grows_far_beyond_the_mean() -> None:
    """All new nodes want to be where one hub is."""
    labels = torch.arange(100) // 10
    pairs = torch.stack([torch.zeros(60, dtype=torch.long), torch.arange(100, 160)])
    sizes = torch.bincount(grown_parts(labels, pairs, 160))
    assert sizes[0] == 20  # a quarter more than 16
    assert sizes[1:].tolist() == [16] * 5 + [15] * 4


def test_smallest_parts_are_filled_first() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    empty = torch.empty(2, 0, dtype=torch.long)
    assert grown_parts(labels, empty, 8).tolist()[7:] == [1]
    assert grown_parts(labels, empty, 10).tolist()[7:] == [1, 1, 2]
    assert torch.bincount(grown_parts(labels, empty, 20)).tolist() == [6, 7, 7]
    assert torch.equal(grown_parts(labels, empty, 7), labels)


# What is refused #####################################################################################################


def without(data: Data, name: str) -> Data:
    data = replaced(data, num_nodes=data.num_nodes)
    del data[name]
    return data


def replaced(data: Data, **values: Any) -> Data:
    data = data.clone()
    for name, value in values.items():
        data[name] = value
    return data


NO_GROWTH: list[tuple[Callable[[Data], Any], str]] = [
    (lambda data: data.x, "data must be a Data, or a HeteroData, but got a Tensor"),
    (lambda data: data.subgraph(torch.arange(39)), "begin with the 40 old nodes, in their order, but got 39 nodes"),
    (
        lambda data: replaced(data, x=data.x[:, :5]),
        r"x must still have rows of shape \(8,\) and type torch.float32, but got rows of shape \(5,\)",
    ),
    (lambda data: replaced(data, x=data.x.double()), r"but got rows of shape \(8,\) and type torch.float64"),
    (lambda data: without(data, "x"), r"node-level attributes of the old one \(x\), but got none"),
    (lambda data: replaced(data, pos=data.x), r"node-level attributes of the old one \(x\), but got pos, x"),
    (
        lambda data: without(data, "edge_weight"),
        r"edge-level attributes of the old one \(edge_attr, edge_type, edge_weight\), but got edge_attr, edge_type",
    ),
    (
        lambda data: replaced(data, edge_index=data.edge_index.clone().index_fill_(1, torch.tensor([0]), 7)),
        "all edges of the old one, but got 1 missing edges, one of them from",
    ),
    (
        lambda data: replaced(data, edge_index=torch.cat([data.edge_index[:, 1:], torch.tensor([[0], [0]])], 1)),
        "must have all edges of the old one",
    ),
    (lambda data: replaced(data, x=data.x / 0), "x must be finite"),
]


def test_what_is_no_growth_is_refused() -> None:
    data = undirected_graph()
    model, plain, loader = refreshed(READY["GCN"](), data)
    for make, message in NO_GROWTH:
        with pytest.raises(InputError, match=message):
            gas.grow(model, loader, make(data))
    check_exact(model, plain, loader)


def test_double_edges_are_counted() -> None:
    data = Data(x=torch.rand(3, C), edge_index=torch.tensor([[0, 0, 1], [1, 1, 2]]))
    model, _, loader = refreshed(READY["GCN"](), data, 3)
    with pytest.raises(InputError, match="1 missing edges, one of them from 0 to 1"):
        gas.grow(model, loader, replaced(data, edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]])))


def test_writing_into_the_old_graph_is_noticed() -> None:
    data = undirected_graph()
    model, _, loader = refreshed(READY["GCN"](), data)
    data.x[3] += 1.0
    with pytest.raises(InputError, match="tensors must be unchanged"):
        gas.grow(model, loader, data)


def test_plain_model_and_other_graphs_are_refused() -> None:
    data = undirected_graph()
    with pytest.raises(InputError, match="must be autoscaled"):
        gas.grow(READY["GCN"](), gas.HaloLoader(data, 4), data)
    model, _, _ = refreshed(READY["GCN"](), data)
    with pytest.raises(InputError, match="takes batches of its training graph"):
        gas.grow(model, gas.HaloLoader(odd_graph(), 4), data)


def test_a_failure_leaves_the_model_as_it_was() -> None:
    data = undirected_graph()
    model, plain, loader = refreshed(READY["GCN"](), data)
    before = history_rows(model)

    def call(model: nn.Module, batch: Data) -> Any:
        if batch.batch_size > 1:
            raise ZeroDivisionError
        return model(batch)

    with pytest.raises(ZeroDivisionError):
        gas.grow(model, loader, some_growth(data), call=call)
    assert all(torch.equal(rows, before[slot]) for slot, rows in history_rows(model).items())
    check_exact(model, plain, loader)


def test_models_that_need_symmetry_are_refused_where_it_is_lost() -> None:
    data = undirected_graph()
    model, plain, loader = refreshed(three_layers("DirGNN SAGE"), data)
    with pytest.raises(UnsupportedModelError, match="bidirectional=True"):
        gas.grow(model, loader, some_growth(data))
    check_exact(model, plain, loader)
    loader = gas.grow(model, loader, some_growth(data, both=True))
    check_exact(model, plain, loader)
