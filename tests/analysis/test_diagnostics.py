"""Errors of histories and gradients, and constants of layers, against plain computations."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, models  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Stack, history_rows, undirected_graph
from gnnautoscale.analysis import diagnostics
from gnnautoscale.analysis.bounds import measure
from gnnautoscale.analysis.diagnostics import diagnose
from gnnautoscale.analysis.lipschitz import lipschitz_constant
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.models import APPNP, GAT, GCN, GIN, GraphSAGE
from support.trained import gin, trained

ALL = diagnostics.DIAGNOSTICS


@pytest.fixture
def graph() -> Data:
    """A connected undirected graph of 40 nodes with features, labels and training nodes only."""
    full = undirected_graph()
    return Data(x=full.x, edge_index=full.edge_index, y=full.y, train_mask=full.train_mask)


# Staleness ###########################################################################################################


def test_means_are_over_rows_that_are_pulled(graph: Data) -> None:
    model = gin()
    loader = trained(model, graph)
    halo = torch.unique(torch.cat([batch.edge_index.info.halo for batch in loader.in_order()]))
    assert 0 < halo.numel() < graph.num_nodes
    layers = diagnose(model, loader)["staleness"]["layers"]
    measured = measure(model, loader)
    assert [layer["layer"] for layer in layers] == ["convs.0", "convs.1", "output"]
    for layer, errors in zip(layers[:-1], measured, strict=False):
        for name, values in (("staleness", errors.staleness[halo]), ("history", errors.history[halo])):
            assert layer[name]["mean"] == pytest.approx(float(values.mean()))
            assert layer[name]["max"] == pytest.approx(float(values.max()))
            assert layer[name]["relative"] == pytest.approx(float(values.mean() / errors.norm[halo].mean()))
        assert layer["closeness"]["mean"] == pytest.approx(float(errors.closeness.mean()))
        assert layer["by_age"] == []
    assert layers[0]["staleness"]["mean"] > 1e-3
    assert layers[-1]["staleness"] is None
    assert layers[-1]["history"] is None
    assert layers[-1]["closeness"]["max"] > 1e-3


def test_norms_are_those_of_exact_rows(graph: Data) -> None:
    model = gin()
    loader = trained(model, graph)
    errors = measure(model, loader)
    gas.detach(model)
    with torch.no_grad():
        expected = model.eval()(graph.x, graph.edge_index)
    torch.testing.assert_close(errors[-1].norm, expected.double().norm(dim=1), rtol=1e-4, atol=1e-5)


def test_rows_are_grouped_by_age(graph: Data) -> None:
    model = gin()
    loader = trained(model, graph)
    ages = torch.arange(graph.num_nodes) % 4 - 1  # every fourth was never written
    pulled = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for batch in loader.in_order():
        pulled[batch.edge_index.info.halo] = True
    groups = diagnose(model, loader, ages=ages)["staleness"]["layers"][0]["by_age"]
    stale = measure(model, loader)[0].staleness
    assert [group["age"] for group in groups] == [0, 1, 2]
    for group in groups:
        rows = pulled & (ages == group["age"])
        assert group["rows"] == int(rows.sum())
        assert group["staleness"] == pytest.approx(float(stale[rows].mean()))


def test_ages_are_put_together_if_they_are_many() -> None:
    ages = torch.arange(1000)
    groups = diagnostics._by_age(ages, ages.double())
    assert len(groups) <= 64
    assert sum(group["rows"] for group in groups) == 1000
    assert all(abs(group["age"] - group["staleness"]) <= 0.5 for group in groups)
    assert [group["age"] for group in groups] == sorted(group["age"] for group in groups)


def test_nothing_is_stale_right_after_a_refresh(graph: Data) -> None:
    model = gin()
    loader = trained(model, graph)
    gas.refresh(model, loader)
    layers = diagnose(model, loader)["staleness"]["layers"]
    assert max(layer["closeness"]["max"] for layer in layers) < 1e-4
    assert max(layer["staleness"]["max"] for layer in layers[:-1]) < 1e-4


def test_a_batch_of_all_nodes_has_nothing_to_pull(graph: Data) -> None:
    model = gas.autoscale(gin(), graph)
    layers = diagnose(model, HaloLoader(graph, num_parts=1))["staleness"]["layers"]
    assert all(layer["staleness"] is None for layer in layers)
    assert layers[-1]["closeness"]["max"] < 1e-5


# Bounds ##############################################################################################################

KNOWN: dict[str, Any] = {
    "gcn": lambda: GCN(CHANNELS, 4, hidden=8, layers=3, dropout=0.0),
    "gcn with linear layers and batch norm": lambda: GCN(
        CHANNELS, 4, hidden=8, layers=3, dropout=0.0, linear=True, batch_norm=True
    ),
    "gin": lambda: gin(),
    "gin with batch norm": lambda: gin(batch_norm=True),
    "sage": lambda: GraphSAGE(CHANNELS, 4, hidden=8, layers=3, dropout=0.0),
    "PyG's gcn": lambda: models.GCN(CHANNELS, 8, 3, 4),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_bound_holds_where_constants_are_known(name: str, graph: Data) -> None:
    model = KNOWN[name]()
    layers = diagnose(model, trained(model, graph, lr=0.005))["staleness"]["layers"]
    assert layers[0]["bound"] == 0.0
    for layer in layers[1:]:
        assert 0.0 < layer["closeness"]["max"] <= layer["bound"]
    # It is not far from what is there: the factors are those of this model.
    assert layers[1]["bound"] < 1000 * layers[1]["closeness"]["max"]


def test_the_bound_of_two_layers_by_hand(graph: Data) -> None:
    model = GCN(CHANNELS, 4, hidden=8, layers=2, dropout=0.0)
    loader = trained(model, graph)
    stale = measure(model, loader)[0].staleness
    (event,) = attached(model).memory.records["convs.1"]
    source, target = event.edges.edge_index
    batch_of = loader.labels // loader.batch_size
    crossing = batch_of[source] != batch_of[target]
    arriving = stale[source] * event.constants["edge_weight"].double() * crossing
    summed = torch.zeros(graph.num_nodes, dtype=torch.double).index_add(0, target, arriving)
    expected = lipschitz_constant(model.convs[1].get_submodule("lin")) * float(summed.max())
    assert diagnose(model, loader)["staleness"]["layers"][1]["bound"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        lambda: GAT(CHANNELS, 4, hidden=4, heads=2),
        lambda: gin(residual=True),
        lambda: GCN(CHANNELS, 4, layers=3, residual=True, hidden=CHANNELS),
        lambda: APPNP(CHANNELS, 4, layers=3),
        lambda: models.GCN(CHANNELS, 8, 3, 4, jk="cat"),
        lambda: models.GCN(CHANNELS, 8, 3, 4, act="elu"),
        lambda: Stack([GCNConv(CHANNELS, 8), GCNConv(8, 4)]),
    ],
)
def test_there_is_no_bound_for_other_models(model: Any, graph: Data) -> None:
    model = model()
    layers = diagnose(model, trained(model, graph))["staleness"]["layers"]
    assert len(layers) > 1
    assert all(layer["bound"] is None for layer in layers)


# Lipschitz constants #################################################################################################


def jacobian_norm_of(layer: nn.Module, x: Tensor, edge_index: Tensor) -> float:
    """The norm of a layer's Jacobian on the whole graph, written out."""
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, edge_index), x)  # type: ignore[no-untyped-call]
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


@pytest.mark.parametrize("name", ["gcn", "gin", "sage", "gat"])
def test_whole_layers_have_the_norm_of_their_jacobian(name: str, graph: Data) -> None:
    def layer(width_in: int, width_out: int) -> nn.Module:
        mlp = nn.Sequential(nn.Linear(width_in, 8), nn.Tanh(), nn.Linear(8, width_out))
        kinds = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATConv}
        made: nn.Module = GINConv(mlp) if name == "gin" else kinds[name](width_in, width_out)
        return made

    model = Stack([layer(CHANNELS, 6), layer(6, 4)])
    loader = trained(model, graph)
    first, second = diagnose(model, loader, ["lipschitz"])["lipschitz"]["layers"]
    gas.detach(model)
    model.eval()
    x, edges = graph.x, graph.edge_index
    after = torch.tanh(model.layers[0](x, edges)).detach()
    assert first["layer"] == "layers.0"
    assert first["whole"] == pytest.approx(jacobian_norm_of(model.layers[0], x, edges), rel=0.02)
    assert second["whole"] == pytest.approx(jacobian_norm_of(model.layers[1], after, edges), rel=0.02)


def test_update_and_messages_apart(graph: Data) -> None:
    mlp = nn.Sequential(nn.Linear(CHANNELS, 6), nn.Tanh(), nn.Linear(6, 6))
    model = Stack([GINConv(mlp), GCNConv(6, 5), GATConv(5, 4)])
    loader = trained(model, graph)
    first, second, third = diagnose(model, loader, ["lipschitz"])["lipschitz"]["layers"]
    gas.detach(model)
    summed = graph.x.index_add(0, graph.edge_index[1], graph.x[graph.edge_index[0]])
    jacobians = torch.stack([torch.autograd.functional.jacobian(mlp, row) for row in summed])  # type: ignore[no-untyped-call]
    expected = torch.linalg.matrix_norm(jacobians, 2).max()
    assert first["message"] == second["message"] == 1.0
    assert first["update"] == pytest.approx(float(expected), rel=0.02)
    weight = model.layers[1].get_parameter("lin.weight").detach()
    assert second["update"] == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-4)
    assert third["message"] is None
    assert third["update"] is None


# What is left alone ##################################################################################################


def state_of(model: nn.Module) -> list[Any]:
    rng = [random.getstate(), torch.get_rng_state().clone()]
    weights = [value.clone() for value in model.state_dict().values()]
    grads = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
    modes = [module.training for module in model.modules()]
    calls = [(name, call.draws) for name, call in attached(model).calls.items()]
    memory = attached(model).memory
    return [rng, weights, grads, modes, calls, history_rows(model), memory._written_by]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    return bool(a == b)


@pytest.mark.parametrize(
    ("model", "storage"),
    [
        (lambda: GCN(CHANNELS, 4, layers=3, hidden=8), "device"),
        (lambda: GIN(CHANNELS, 4, layers=3, hidden=8, dropout=0.3), "host"),
        (lambda: GAT(CHANNELS, 4, hidden=4, heads=2, dropout=0.5), "disk"),
        (lambda: APPNP(CHANNELS, 4, layers=3), "host"),
    ],
)
def test_nothing_is_changed(model: Any, storage: Any, graph: Data, tmp_path: Path) -> None:
    model = model()
    loader = trained(model, graph, storage=storage, history_dir=tmp_path if storage == "disk" else None)
    attached(model).memory.settle()
    before = state_of(model)
    found = diagnose(model, loader, ALL)
    assert same(before, state_of(model))
    assert found.keys() == set(ALL)
    assert same(drop_times(found), drop_times(diagnose(model, loader, ALL)))


def drop_times(found: dict[str, dict[str, Any]]) -> list[Any]:
    return [{name: value for name, value in values.items() if name != "seconds"} for values in found.values()]


def test_a_model_that_never_ran(graph: Data) -> None:
    model = gas.autoscale(gin(), graph)
    found = diagnose(model, HaloLoader(graph, num_parts=4), ALL)
    assert attached(model).memory.histories == {}
    layer = found["staleness"]["layers"][0]
    assert layer["history"]["mean"] > 0  # the rows count as zero
    assert layer["history"]["relative"] == pytest.approx(1.0)
    assert found["gradients"]["relative_error"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_histories_in_few_bits(dtype: torch.dtype, graph: Data) -> None:
    model = gin()
    loader = trained(model, graph, dtype=dtype)
    gas.refresh(model, loader)
    found = diagnose(model, loader, ALL)
    assert 1e-4 < found["staleness"]["layers"][0]["staleness"]["mean"] < 0.5
    assert found["gradients"]["cosine"] > 0.5


def test_the_paper_s_interface(graph: Data) -> None:
    class Net(gas.ScalableGNN):
        def __init__(self) -> None:
            super().__init__(graph.num_nodes, 8, 2)
            self.convs = nn.ModuleList([GCNConv(CHANNELS, 8), GCNConv(8, 4)])

        def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Tensor:
            x = self.push_and_pull(self.histories[0], self.convs[0](x, edge_index).relu(), n_id)
            out: Tensor = self.convs[1](x, edge_index)
            return out

    model = Net()
    loader = HaloLoader(graph, num_parts=4)
    for batch in loader:
        model(batch.x, batch.edge_index, batch.n_id)
    before = history_rows(model)
    found = diagnose(model, loader, ALL)
    assert same(before, history_rows(model))
    assert found["staleness"]["layers"][0]["bound"] is None
    assert len(found["lipschitz"]["layers"]) == 2


def test_what_cannot_be_measured_is_refused(graph: Data) -> None:
    model = gas.autoscale(gin(), graph)
    wrong: list[Any] = ["stale", ["stale"], [1]]
    for what in wrong:
        with pytest.raises(InputError, match="some of staleness, gradients, lipschitz"):
            diagnose(model, HaloLoader(graph, num_parts=2), what)


def test_a_plain_model_is_refused(graph: Data) -> None:
    with pytest.raises(InputError, match="autoscaled"):
        diagnose(gin(), HaloLoader(graph, num_parts=2))
