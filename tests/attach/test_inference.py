"""Exact inference layer by layer, and predictions from histories."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Counted, Stack, assert_same, call_whole, history_rows, odd_graph, undirected_graph, whole
from gnnautoscale.attach import inference as module
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError, StaleHistoryWarning
from gnnautoscale.graph import loader as loader_module
from gnnautoscale.graph.partitioning import partition
from gnnautoscale.history import Storage
from gnnautoscale.history.device import DeviceHistory
from support.layers import three_layers

C = CHANNELS


def counted(num_layers: int) -> tuple[Stack, list[Counted]]:
    layers = [Counted() for _ in range(num_layers)]
    return Stack(list(layers)), layers


def forget(layers: list[Counted]) -> None:
    for layer in layers:
        layer.calls = layer.num_edges = 0


def scaled(num_layers: int = 3, num_parts: int = 5) -> tuple[nn.Module, Data, gas.HaloLoader, Tensor]:
    data = undirected_graph()
    model = pyg.GraphSAGE(C, 6, num_layers=num_layers, out_channels=4, dropout=0.5)
    expected = whole(model, data)
    return gas.autoscale(model, data), data, gas.HaloLoader(data, num_parts, partition="random"), expected


# infer ###############################################################################################################


@pytest.mark.parametrize(("num_layers", "shuffle"), [(1, False), (4, True)])
def test_each_layer_is_computed_once_per_node(num_layers: int, shuffle: bool) -> None:
    data = undirected_graph()
    model, layers = counted(num_layers)
    expected = whole(model, data)
    loader = gas.HaloLoader(data, 6, partition="random", batch_size=2, shuffle=shuffle)
    gas.autoscale(model, data)
    model(next(iter(loader)))  # the first call finds out how the model is run
    forget(layers)
    assert_same(gas.infer(model, loader), expected)
    assert [layer.calls for layer in layers] == [len(loader)] * num_layers
    assert [layer.num_edges for layer in layers] == [data.num_edges] * num_layers


def test_modes_and_training_are_left_as_they_were() -> None:
    model, _, loader, expected = scaled()
    model.train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    frozen.eval()
    out = gas.infer(model, loader)
    assert_same(out, expected)
    assert not out.requires_grad
    assert model.training
    assert not frozen.training


def test_random_state_is_left_alone() -> None:
    model, _, loader, _ = scaled()
    model.train()
    before = torch.get_rng_state()
    gas.infer(model, loader)
    gas.predict(model, loader, torch.tensor([0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_come_in_the_order_of_the_data() -> None:
    """A model that returns the number of each node: any other order would show."""
    data = undirected_graph()
    data.x = torch.arange(40.0).unsqueeze(1)

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SimpleConv()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = x + 0.0 * self.conv(x, edge_index)
            return out

    model = gas.autoscale(Number(), data)
    out = gas.infer(model, gas.HaloLoader(data, 7, partition="random", batch_size=2, shuffle=True))
    assert torch.equal(out, data.x)


class Several(nn.Module):
    """Returns more than one tensor, with different shapes and types."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = pyg.GCNConv(C, 6), pyg.GATConv(6, 3, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        hidden = self.first(x, edge_index)
        out = self.second(hidden.relu(), edge_index)
        cube = out.view(-1, 2, 3)
        if self.kind == "tuple":
            return hidden, cube
        if self.kind == "dict":
            return {"hidden": hidden, "nested": [cube, out.double()]}
        return [hidden, (cube, out[:, 0])]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in flat(item)]


@pytest.mark.parametrize(("kind", "num_parts"), [("tuple", 1), ("dict", 5), ("list", 5)])
def test_several_outputs(kind: str, num_parts: int) -> None:
    data = odd_graph()
    model = Several(kind)
    expected = whole(model, data)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, num_parts, partition="random")
    out = gas.infer(model, loader)
    assert type(out) is type(expected)
    for got, want in zip(flat(out), flat(expected), strict=True):
        assert got.dtype == want.dtype
        assert_same(got, want)
    gas.refresh(model, loader)
    nodes = torch.tensor([3, 1, 3])
    predicted = gas.predict(model, loader, nodes)
    assert type(predicted) is type(expected)
    for got, want in zip(flat(predicted), flat(expected), strict=True):
        assert_same(got, want[nodes])


def test_own_way_to_call_the_model() -> None:
    data = undirected_graph()
    model = pyg.GCN(C, 6, num_layers=3, out_channels=4).eval()
    expected = model(data.x, data.edge_index).detach()
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4)

    def call(model: nn.Module, batch: Data) -> Any:
        return model(batch.x, batch.edge_index)

    assert_same(gas.infer(model, loader, call=call), expected)
    assert_same(gas.predict(model, loader, torch.tensor([5]), call=call), expected[5:6])


@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_call_that_runs_the_model_twice_is_refused(num_parts: int) -> None:
    """A history holds the rows of one of the runs, which the other would read."""
    data = undirected_graph()
    model = gas.autoscale(pyg.GraphSAGE(C, 6, num_layers=3, out_channels=4), data)
    loader = gas.HaloLoader(data, num_parts)

    def call(model: nn.Module, batch: Data) -> Any:
        return model(batch.x, batch.edge_index) + model(2 * batch.x, batch.edge_index)

    with pytest.raises(InputError, match=r"call must run the model once.*but got 2 forward passes for one batch"):
        gas.infer(model, loader, call=call)


def test_another_call_is_computed_anew() -> None:
    data = undirected_graph()
    model = pyg.GraphSAGE(C, 6, num_layers=3, out_channels=4).eval()
    expected = model(data.x * 2, data.edge_index).detach()
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4, partition="random")
    gas.infer(model, loader)
    assert_same(gas.infer(model, loader, call=lambda model, batch: model(batch.x * 2, batch.edge_index)), expected)


def test_other_features_on_the_same_edges_are_computed_anew() -> None:
    """A second snapshot of a graph may differ in nothing but features."""
    data = undirected_graph()
    other = data.clone()
    other.x = data.x * 2 + 1
    model = pyg.GraphSAGE(C, 6, num_layers=3, out_channels=4)
    expected = whole(model, other)
    gas.autoscale(model, data)
    gas.infer(model, gas.HaloLoader(data, 4, partition="random"))
    assert_same(gas.infer(model, gas.HaloLoader(other, 4, partition="random")), expected)


@pytest.mark.parametrize("num_parts", [1, 6])
def test_second_graph(num_parts: int) -> None:
    model, _, loader, expected = scaled()
    other = odd_graph(5)
    gas.refresh(model, loader)
    kept = history_rows(model)
    second = gas.HaloLoader(other, num_parts, partition="random")
    for _ in range(2):
        out = gas.infer(model, second)
        now = history_rows(model)
        assert now.keys() == kept.keys()
        assert all(torch.equal(now[name], rows) for name, rows in kept.items())
        with torch.no_grad():
            assert_same(gas.predict(model, loader, torch.arange(40)), expected)
        assert out.shape == (other.num_nodes, 4)
    gas.detach(model)
    assert_same(out, whole(model, other))


def test_second_graph_before_the_first() -> None:
    model, _, loader, expected = scaled()
    other = undirected_graph(60, 150, seed=3)
    out = gas.infer(model, gas.HaloLoader(other, 5))
    assert_same(gas.infer(model, loader), expected)
    gas.detach(model)
    assert_same(out, whole(model, other))


def test_plain_model_is_refused() -> None:
    for function in (gas.infer, gas.refresh):
        with pytest.raises(InputError, match="must be autoscaled, but got GCN"):
            function(pyg.GCN(C, 4, 2), gas.HaloLoader(undirected_graph(), 3))


def test_refresh_is_for_the_training_graph() -> None:
    model, _, _, _ = scaled()
    with pytest.raises(InputError, match=r"takes batches of its training graph, which has 40 nodes.*33 nodes"):
        gas.refresh(model, gas.HaloLoader(odd_graph(), 3))


# One batch ###########################################################################################################


def test_refreshing_a_batch_writes_its_rows_alone() -> None:
    model, _, loader, _ = scaled(num_layers=2)
    model.train()
    batch = loader.batch_of([1])
    own = torch.zeros(40, dtype=torch.bool).index_fill(0, batch.n_id[: batch.batch_size].long(), True)
    state = torch.get_rng_state()
    gas.refresh(model, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    (rows,) = history_rows(model).values()
    assert not bool(rows[~own].any())
    gas.refresh(model, loader)
    (exact,) = history_rows(model).values()
    assert_same(rows[own], exact[own])


def test_batch_by_batch_histories_become_exact() -> None:
    model, _, loader, _ = scaled(num_layers=3)
    for _ in range(2):  # as many as histories on top of each other
        for batch in loader:
            gas.refresh(model, batch)
    found = history_rows(model)
    gas.refresh(model, loader)
    for slot, rows in history_rows(model).items():
        assert_same(found[slot], rows)


def test_a_batch_of_all_nodes_is_written_too() -> None:
    model, data, loader, expected = scaled()
    gas.refresh(model, next(iter(gas.HaloLoader(data, 1))))
    with pytest.warns(gas.StaleHistoryWarning):  # one batch after the other, no weights wrote all rows for certain
        out = gas.predict(model, loader, torch.arange(40))
    assert_same(out, expected)


def test_a_loss_refreshes_gradients_of_compensated_steps() -> None:
    data, model = undirected_graph(), pyg.GraphSAGE(C, 6, num_layers=3, out_channels=4)
    loader = gas.HaloLoader(data, 4)
    gas.autoscale(model, data, compensate="gradient")
    memory, batch = attached(model).memory, loader.batch_of([0])
    gas.refresh(model, batch)
    assert not memory.last_gradients
    gas.refresh(model, batch, loss=lambda out: out.square().sum())
    kept = {slot: history.raw.clone() for slot, history in memory.last_gradients.items()}
    assert kept
    assert all(weight.grad is None for weight in model.parameters())
    model.eval()(batch).square().sum().backward()
    for slot, history in memory.last_gradients.items():
        torch.testing.assert_close(history.raw, kept[slot])
        assert bool(history.raw.any())


def test_a_loss_belongs_to_a_batch() -> None:
    model, data, loader, _ = scaled()
    for graph in (data, loader):
        with pytest.raises(InputError, match="loss belongs to a batch"):
            gas.refresh(model, graph, loss=lambda out: out.sum())


# Without a loader ####################################################################################################


def test_a_graph_is_enough() -> None:
    model, data, _, expected = scaled()
    assert_same(gas.infer(model, data), expected)
    nodes = torch.tensor([5, 3, 5])
    assert_same(gas.predict(model, data, nodes), expected[nodes])
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    gas.refresh(model, data)
    out = gas.predict(model, data, nodes)
    other = odd_graph(3)
    elsewhere = gas.infer(model, other)
    gas.detach(model)
    assert_same(out, whole(model, data)[nodes])
    assert_same(elsewhere, whole(model, other))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of more than ten nodes are cut."""
    monkeypatch.setattr(module, "_PART_NODES", 10)


@pytest.mark.usefixtures("small_parts")
def test_a_large_graph_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, _, expected = scaled()
    cuts: list[int] = []

    def cut(*args: Any, **options: Any) -> Tensor:
        cuts.append(args[2])
        return partition(*args, **options)

    monkeypatch.setattr(loader_module, "cut", cut)
    for _ in range(2):
        assert_same(gas.infer(model, data), expected)
        assert_same(gas.predict(model, data, torch.tensor([7])), expected[7:8])
    gas.refresh(model, data)
    assert cuts == [4]
    gas.infer(model, odd_graph())
    assert cuts == [4, 4]  # 33 nodes
    # Another number of edges is no reason to cut again, another number of nodes is.
    data.edge_index = data.edge_index[:, 1:]
    data.edge_weight, data.edge_attr, data.edge_type = (
        value[1:] for value in (data.edge_weight, data.edge_attr, data.edge_type)
    )
    out = gas.infer(model, data)
    assert cuts == [4, 4]
    data.update(undirected_graph(51).to_dict())
    grown = gas.infer(model, data)
    assert cuts == [4, 4, 6]
    assert out.size(0) == 40
    gas.detach(model)
    assert_same(grown, whole(model, data))


@pytest.mark.usefixtures("small_parts")
def test_layers_against_the_edges_of_a_graph_without_a_loader() -> None:
    data = odd_graph()
    model = Stack([pyg.DirGNNConv(pyg.SAGEConv(C, C)), pyg.DirGNNConv(pyg.SAGEConv(C, C))])
    expected = whole(model, data)
    gas.autoscale(model, data)
    assert_same(gas.infer(model, data), expected)


def test_many_edges_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, _, _ = scaled()
    monkeypatch.setattr(module, "_PART_EDGES", data.num_edges // 3 + 1)
    assert len(module.loader_for(model, data)) == 3
    monkeypatch.setattr(module, "_PART_EDGES", 1)
    assert len(module.loader_for(model, undirected_graph(seed=1))) == 40


def test_loaders_that_were_made_go_with_the_model() -> None:
    gc.collect()
    before = len(module._LOADERS)
    model, data, _, _ = scaled()
    graphs = [data, *(odd_graph(seed) for seed in range(4))]
    for graph in graphs:
        gas.infer(model, graph)
    (kept,) = [loaders for scaler, loaders in module._LOADERS.items() if scaler is attached(model)]
    assert [loader.data for loader in kept] == graphs[1:]
    del model, kept
    gc.collect()
    assert len(module._LOADERS) == before


@pytest.mark.parametrize("graph", [None, torch.eye(3), "cora", [undirected_graph()]])
def test_anything_else_is_refused(graph: Any) -> None:
    model, _, _, _ = scaled()
    uses = (gas.infer, gas.refresh, lambda model, graph: gas.predict(model, graph, torch.tensor([0])))
    for use in uses:
        with pytest.raises(InputError, match="loader must be a HaloLoader, or a Data, or a HeteroData, but got "):
            use(model, graph)


# predict #############################################################################################################


@pytest.mark.parametrize("renew", [gas.refresh, gas.infer])
@pytest.mark.parametrize("num_parts", [1, 5])
def test_predictions_are_rows_of_infer(renew: Callable[..., Any], num_parts: int) -> None:
    model, _, loader, expected = scaled(num_parts=num_parts)
    renew(model, loader)
    model.train()
    for nodes in ([7], [5, 3, 5, 39, 0], list(range(39, -1, -1)), []):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = gas.predict(model, loader, torch.tensor(nodes, dtype=torch.long))
        assert out.shape == (len(nodes), 4)
        assert_same(out, expected[nodes])
        assert model.training


def test_one_layer_needs_no_histories() -> None:
    """With one layer there is nothing that could be stale."""
    model, _, loader, expected = scaled(num_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(gas.predict(model, loader, torch.tensor([4, 2])), expected[[4, 2]])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
        lambda model: model.convs[0].lin.weight.data.mul_(2),
        lambda model: model.convs[0].lin.weight.data.copy_(model.convs[0].lin.weight.data.flip(0)),
        lambda model: model.load_state_dict({key: value + 0.1 for key, value in model.state_dict().items()}),
        lambda model: next(model.buffers()).add_(1.0),
    ],
    ids=["step", "scaled", "exchanged", "loaded", "buffer"],
)
def test_stale_histories_are_noticed(change: Callable[[nn.Module], Any]) -> None:
    data = undirected_graph()
    model = gas.autoscale(pyg.GCN(C, 6, num_layers=3, out_channels=4, norm="batch_norm"), data)
    loader = gas.HaloLoader(data, 4)
    gas.refresh(model, loader)
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    change(model)
    with pytest.warns(StaleHistoryWarning, match=r"approximate. Call gas.refresh"):
        gas.predict(model, loader, torch.tensor([1]))
    gas.refresh(model, loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = gas.predict(model, loader, torch.arange(40))
    gas.detach(model)
    assert_same(out, whole(model, data))


def test_histories_of_training_are_stale() -> None:
    model, _, loader, _ = scaled()
    gas.refresh(model, loader)
    model.train()
    model(next(iter(loader)))  # dropout has written rows that evaluation would not
    with pytest.warns(StaleHistoryWarning):
        gas.predict(model, loader, torch.tensor([1]))


def test_empty_histories_are_refused() -> None:
    model, _, loader, _ = scaled()
    with pytest.raises(InputError, match=r"needs histories with rows, but got empty histories.*gas.refresh"):
        gas.predict(model, loader, torch.tensor([1]))


def test_bad_nodes_are_refused() -> None:
    model, _, loader, _ = scaled()
    gas.refresh(model, loader)
    wrong = (torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.tensor([True]))
    for nodes in ([1, 2], torch.tensor(1), *wrong):
        with pytest.raises(InputError, match="nodes must be a"):
            gas.predict(model, loader, nodes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from 0 to 39, but got values from 0 to 40"):
        gas.predict(model, loader, torch.tensor([0, 40]))
    with pytest.raises(InputError, match="from 0 to 39, but got values from -1 to -1"):
        gas.predict(model, loader, torch.tensor([-1]))


def test_predicting_on_another_graph_is_refused() -> None:
    model, _, loader, _ = scaled()
    gas.refresh(model, loader)
    with pytest.raises(InputError, match="takes batches of its training graph"):
        gas.predict(model, gas.HaloLoader(odd_graph(), 3), torch.tensor([1]))


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every pull."""
    seen: list[int] = []
    original = DeviceHistory.pull

    def pull(self: DeviceHistory, index: Tensor, **options: Any) -> Tensor:
        seen.append(index.numel())
        return original(self, index, **options)

    monkeypatch.setattr(DeviceHistory, "pull", pull)
    return seen


@pytest.mark.parametrize("num_layers", [2, 6])
def test_prediction_costs_the_same_at_any_depth(num_layers: int, rows_read: list[int]) -> None:
    data = undirected_graph()
    model, layers = counted(num_layers)
    expected = whole(model, data)
    loader = gas.HaloLoader(data, 4)
    gas.autoscale(model, data)
    gas.refresh(model, loader)
    forget(layers)
    rows_read.clear()
    nodes = torch.tensor([3, 17])
    assert_same(gas.predict(model, loader, nodes), expected[nodes])
    batch = loader.batch_for(nodes)
    assert rows_read == [batch.num_nodes]
    assert [layer.calls for layer in layers] == [0] * (num_layers - 1) + [1]
    assert layers[-1].num_edges == batch.num_edges


def test_sweeps_read_each_row_of_a_batch_once_per_level(rows_read: list[int]) -> None:
    data = undirected_graph()
    model, _ = counted(3)
    loader = gas.HaloLoader(data, 4)
    gas.autoscale(model, data)
    gas.infer(model, loader)
    sizes = [batch.num_nodes for batch in loader]
    assert rows_read == sizes * 2  # layers 2 and 3 read the layer before them


def test_plain_calls_agree_with_predictions_afterwards() -> None:
    model, data, loader, expected = scaled()
    gas.refresh(model, loader)
    model.eval()
    with torch.no_grad():
        for batch in loader:
            assert_same(model(batch), expected[batch.n_id[: batch.batch_size]])
    gas.detach(model)
    assert_same(call_whole(model, data), expected)


# Changed data ########################################################################################################


def loss_of(model: nn.Module, loader: gas.HaloLoader) -> float:
    """Takes a step on every batch; returns the sum of the losses."""
    model.train()
    total = 0.0
    for batch in loader:
        out = model(batch)
        loss = nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


@pytest.mark.parametrize(
    ("change", "num_parts", "keep"),
    [
        (lambda data: data.update({"x": data.x * 2 + 1}), 5, True),
        (lambda data: data.x.mul_(3), 5, True),
        (lambda data: data.x.mul_(3), 1, False),
        (lambda data: data.update({"edge_weight": data.edge_weight.flip(0)}), 5, True),
        (lambda data: data.edge_weight.mul_(2), 5, True),
        (lambda data: data.edge_index.copy_(data.edge_index.roll(1, 1)), 5, True),
    ],
    ids=["new x", "written x", "written x, one part", "new weights", "written weights", "written edges"],
)
def test_changed_inputs_are_seen_by_infer_and_refused_in_training(
    change: Callable[[Data], Any], num_parts: int, keep: bool
) -> None:
    data = undirected_graph()
    plain = Stack([pyg.GraphConv(C, 6), pyg.GraphConv(6, 6), pyg.GraphConv(6, 4)], ("edge_weight",)).eval()
    model = gas.autoscale(copy.deepcopy(plain), data)
    loader = gas.HaloLoader(data, num_parts, partition="random", keep=keep)
    loss_of(model, loader)
    gas.infer(model, loader)
    change(data)
    assert_same(gas.infer(model, loader), whole(plain, data))
    training_and_predicting = (
        lambda: loss_of(model, loader),
        lambda: gas.refresh(model, loader),
        lambda: gas.predict(model, loader, torch.tensor([1])),
    )
    for use in training_and_predicting:
        with pytest.raises(InputError, match=r"takes batches of its training graph.*different features.*autoscale it"):
            use()
    # As the message says.
    gas.autoscale(gas.detach(model), data)
    loss_of(model, loader)
    assert_same(gas.infer(model, loader), whole(plain, data))


def test_changed_labels_are_taken_over() -> None:
    model, data, loader, expected = scaled()
    gas.refresh(model, loader)
    rows = history_rows(model)
    data.y = (data.y + 1) % 4
    data.train_mask.logical_not_()
    assert_same(gas.predict(model, loader, torch.arange(40)), expected)
    model.eval()
    for batch in loader:
        model(batch)
        assert torch.equal(batch.y, data.y[batch.n_id])
        assert torch.equal(batch.train_mask, data.train_mask[batch.n_id])
    assert all(torch.equal(now, rows[slot]) for slot, now in history_rows(model).items())


def test_a_batch_of_data_that_were_written_to_is_refused() -> None:
    model, data, loader, _ = scaled()
    batch = next(iter(loader))
    data.y.zero_()
    model(batch)  # does not read labels
    data.edge_weight.mul_(2)
    with pytest.raises(InputError, match="must not be written to while its batches are in use, but got edge_weight"):
        model(batch)
    data.x = data.x + 1
    with pytest.raises(InputError, match="but got edge_weight"):
        model(batch)
    gas.infer(model, loader)


# On a GPU ############################################################################################################


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"device": "cuda"}, {"batch_size": 2, "shuffle": True, "device": "cuda"}, {"keep": False}, {"batch_size": 6}],
    ids=str,
)
@pytest.mark.parametrize("storage", ["host", "device"])
@pytest.mark.parametrize("name", ["GCN weighted", "GAT edge_attr", "APPNP", "RGCN", "SAGE max", "GCN target_to_source"])
def test_a_gpu_infers_what_a_cpu_does(name: str, storage: Storage, options: dict[str, Any]) -> None:
    """Also right after a step, after other weights, and with histories that it must leave alone."""
    data = odd_graph()
    here = three_layers(name).eval()
    there = gas.autoscale(copy.deepcopy(here).cuda(), data, storage=storage)
    gas.autoscale(here, data)
    loader = gas.HaloLoader(data, 6, partition="random", bidirectional=True, **options)
    plain = gas.HaloLoader(data, 6, partition="random", bidirectional=True)
    for _ in range(2):
        expected = gas.infer(here, plain)
        out = gas.infer(there, loader)
        assert out.device.type == "cpu"
        assert_same(out, expected, 1e-4)
        rows = history_rows(there)
        assert rows.keys() == history_rows(here).keys()
        for slot, kept in history_rows(here).items():
            assert_same(rows[slot], kept, 1e-4)
        nodes = torch.tensor([3, 0, 3])
        assert_same(gas.predict(there, loader, nodes).cpu(), expected[nodes], 1e-4)
        with torch.no_grad():
            for model in (here, there):
                for weight in model.parameters():
                    weight.mul_(1.1)
        before = history_rows(there)
        assert_same(gas.infer(there, loader, update_histories=False), gas.infer(here, plain), 1e-4)
        assert all(torch.equal(before[slot], kept) for slot, kept in history_rows(there).items())
        for batch in loader:
            there(batch.to("cuda"))


@pytest.mark.gpu
def test_a_gpu_writes_all_outputs_in_the_order_of_the_data() -> None:
    data = undirected_graph(400, 900)
    data.x = torch.arange(400.0).unsqueeze(1).expand(-1, C).contiguous()
    model = Several("dict").eval()
    expected = whole(model, data)
    gas.autoscale(model.cuda(), data, storage="host")
    for num_parts in (1, 30):
        out = gas.infer(model, gas.HaloLoader(data, num_parts, partition="random"))
        for got, want in zip(flat(out), flat(expected), strict=True):
            assert got.dtype == want.dtype
            assert_same(got, want, 1e-4)
