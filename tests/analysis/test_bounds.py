"""The paper's bounds: constants, formulas, measured errors below them, and what the paper's statements lack."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn.conv.gcn_conv import gcn_norm  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, history_rows, odd_graph, spread_norms, undirected_graph, whole
from gnnautoscale.analysis.bounds import (
    LayerBounds,
    LayerConstants,
    MessageEdges,
    compare_bounds,
    error_by_sweep,
    lemma1,
    measure,
    theorem1,
    theorem1_by_node,
)
from gnnautoscale.analysis.lipschitz import lipschitz_constant
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.models import build_model

C = CHANNELS
Aggregation = Literal["sum", "mean", "max"]
AGGREGATIONS: tuple[Aggregation, ...] = ("sum", "mean", "max")


def printed_sum(message: float, update: float, degree: float, *, staleness: list[float]) -> float:
    """The sum that the paper gives for Theorem 1, which is no bound from three layers on."""
    return sum(stale * (message * update * degree) ** power for power, stale in enumerate(reversed(staleness), 1))


def plain(data: Data) -> Data:
    """The graph without attributes of edges, in double precision."""
    return Data(x=data.x.double(), edge_index=data.edge_index, y=data.y)


class KnownConv(pyg.MessagePassing):  # type: ignore[misc]
    """ReLU(W (h_v + aggregated M h_w)), or without h_v: constants are the norms of M and W."""

    def __init__(self, width: int, aggregation: Aggregation, *, own: bool) -> None:
        super().__init__(aggr=aggregation)
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.own = own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gathered = self.propagate(edge_index, x=self.before(x))
        out: Tensor = self.after(gathered + x if self.own else gathered).relu()
        return out

    def constants(self) -> LayerConstants:
        width = self.before.out_features
        aggregation: Any = self.aggr
        k1, k2 = lipschitz_constant(self.before), lipschitz_constant(self.after)
        return LayerConstants(k1, k2, aggregation, own=float(self.own), width=width)


class Chain(nn.Module):
    """Layers one after another, with nothing between them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def overwrite(model: nn.Module, loader: gas.HaloLoader, rows: dict[str, Tensor]) -> None:
    """Put rows, in the order of the nodes, into histories."""
    gas.refresh(model, loader)
    for slot, history in attached(model).memory.histories.items():
        history.push(rows[slot], loader.row_order.row_of.long())


def disturb_weights(model: nn.Module, size: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn_like(weight))


def assert_bounded(found: list[LayerBounds]) -> None:
    for layer in found:
        error = layer.measured.closeness
        room = 1e-9 * (1.0 + float(error.max()))
        assert bool((error <= layer.lemma + room).all())
        assert bool((error <= layer.by_node + room).all())
        assert bool((layer.by_node <= layer.theorem + room).all())


# Formulas ############################################################################################################


def test_closed_form_of_the_recursion() -> None:
    k1, k2, degree, staleness = 0.7, 1.3, 5.0, [0.2, 0.5, 0.1, 0.4]
    expected = sum(
        stale * k1 * k2 * degree * (k2 * (1 + k1 * degree)) ** (3 - place) for place, stale in enumerate(staleness)
    )
    found = theorem1([LayerConstants(k1, k2)] * 5, [degree] * 5, staleness=staleness)
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(expected)


def test_printed_sum_is_the_recursion_without_own_rows() -> None:
    staleness = [0.2, 0.5, 0.1]
    found = theorem1([LayerConstants(0.7, 1.3, own=0.0)] * 4, [3.0] * 4, staleness=staleness)
    assert found[-1] == pytest.approx(printed_sum(0.7, 1.3, 3.0, staleness=staleness))


def test_factors_of_weighted_edges() -> None:
    edges = MessageEdges(torch.tensor([[0, 1, 2], [3, 3, 0]]), 4, torch.tensor([3.0, -4.0, 0.5]))
    assert edges.factor(LayerConstants(1.0, 1.0, "sum")).tolist() == [0.5, 0.0, 0.0, 7.0]
    assert edges.factor(LayerConstants(1.0, 1.0, "mean")).tolist() == [0.5, 0.0, 0.0, 3.5]
    assert edges.factor(LayerConstants(1.0, 1.0, "max")).tolist() == [0.5, 0.0, 0.0, 5.0]
    assert edges.factor(LayerConstants(1.0, 1.0, "max", width=1)).tolist() == [0.5, 0.0, 0.0, 4.0]


def test_bad_constants_are_refused() -> None:
    with pytest.raises(InputError, match="message must be a number of at least 0"):
        LayerConstants(-1.0, 1.0)
    with pytest.raises(InputError, match="update must be a number of at least 0"):
        LayerConstants(1.0, math.nan)
    with pytest.raises(InputError, match="one of sum"):
        LayerConstants(1.0, 1.0, "median")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="staleness for 2"):
        theorem1([LayerConstants(1.0, 1.0)] * 3, [1.0] * 3, staleness=[1.0])
    with pytest.raises(InputError, match="staleness for 4"):
        theorem1_by_node([LayerConstants(1.0, 1.0)] * 3, MessageEdges(torch.zeros(2, 0).long(), 2), [torch.ones(2)] * 3)


# The bounds hold #####################################################################################################


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("own", "seed"), [(False, 2), (True, 5)])
def test_no_error_is_above_its_bounds(aggregation: Aggregation, own: bool, seed: int) -> None:
    torch.manual_seed(seed)
    data = plain(odd_graph(seed) if seed % 2 else undirected_graph(30, 50, seed))
    convs = [KnownConv(C, aggregation, own=own) for _ in range(2 + seed % 3)]
    model = gas.autoscale(Chain(*convs).double(), data)
    loader = gas.HaloLoader(data, 6, partition="random", batch_size=1 + seed % 2)
    edges = MessageEdges(data.edge_index, data.num_nodes)

    def check() -> None:
        assert_bounded(compare_bounds(model, loader, [conv.constants() for conv in convs], edges))

    check()  # histories were never written
    gas.refresh(model, loader)
    for size in (0.01, 0.1, 1.0):
        disturb_weights(model, size)
        check()
    for size in (1e-3, 1.0, 100.0):
        overwrite(
            model, loader, {slot: rows + size * torch.randn_like(rows) for slot, rows in history_rows(model).items()}
        )
        check()


@pytest.mark.parametrize("seed", range(2))
def test_bounds_of_gcn(seed: int) -> None:
    """The node itself is one of its neighbours; messages are normalized by degrees."""
    torch.manual_seed(seed)
    data = plain(undirected_graph(30, 50, seed))
    model = gas.autoscale(pyg.GCN(C, 6, num_layers=3, out_channels=4).double(), data)
    loader = gas.HaloLoader(data, 5, partition="random")
    edges = MessageEdges(*_gcn_edges(data))
    gas.refresh(model, loader)
    disturb_weights(model, 0.3)
    layers = [LayerConstants(lipschitz_constant(conv.lin), 1.0, own=0.0) for conv in model.convs]
    found = compare_bounds(model, loader, layers, edges)
    assert_bounded(found)
    assert float(found[-1].measured.closeness.max()) > 0.01


def _gcn_edges(data: Data) -> tuple[Tensor, int, Tensor]:
    edge_index, weight = gcn_norm(data.edge_index, None, data.num_nodes, dtype=torch.double)
    return edge_index, data.num_nodes, weight


# The bounds are attained #############################################################################################


def complete(num_nodes: int) -> Data:
    index = torch.arange(num_nodes)
    pairs = torch.cartesian_prod(index, index).t()
    return Data(x=torch.ones(num_nodes, 1).double(), edge_index=pairs[:, pairs[0] != pairs[1]])


def test_equality_and_what_the_printed_sum_lacks() -> None:
    """Every node is a batch, sums itself and its 3 neighbours, and all histories are too large by the same."""
    data = complete(4)
    model = gas.autoscale(Chain(*[pyg.SimpleConv(aggr="sum", combine_root="sum") for _ in range(3)]), data)
    loader = gas.HaloLoader(data, partition=torch.arange(4))
    # Exact rows are 4 and 16. Batches compute 16 + 3 * 0.5 from the first history, to which the second adds 0.25.
    overwrite(model, loader, {"layers.0": torch.full((4, 1), 4.5), "layers.1": torch.full((4, 1), 17.75)})
    layers, edges = [LayerConstants(1.0, 1.0)] * 3, MessageEdges(data.edge_index, 4)
    found = compare_bounds(model, loader, layers, edges)
    assert [layer.measured.staleness.tolist() for layer in found] == [[0.5] * 4, [0.25] * 4, [0.0] * 4]
    for layer, error in zip(found, [0.0, 1.5, 1.5 + 3 * 1.75], strict=True):
        assert layer.measured.closeness.tolist() == [error] * 4
        assert layer.lemma.tolist() == layer.by_node.tolist() == [error] * 4
        assert layer.theorem == error
    printed = printed_sum(1.0, 1.0, 3.0, staleness=[0.5, 0.25])
    assert printed == 5.25
    assert found[-1].theorem == 6.75 > printed  # the missing term is 0.5 * 3: own rows are off, too


def test_printed_sum_has_the_wrong_degree() -> None:
    """Node 0 has one neighbour; that one has four, whose errors arrive at node 0 all the same."""
    data = Data(x=torch.ones(6, 1).double(), edge_index=torch.tensor([[1, 2, 3, 4, 5], [0, 1, 1, 1, 1]]))
    model = gas.autoscale(Chain(*[pyg.SimpleConv(aggr="sum") for _ in range(3)]), data)
    loader = gas.HaloLoader(data, partition=torch.arange(6))
    gas.refresh(model, loader)
    rows = history_rows(model)
    # The first history is off by 1 where node 1 reads it; the second is what batches compute from that.
    rows["layers.0"][2:] += 1.0
    rows["layers.1"][1] += 4.0
    overwrite(model, loader, rows)
    found = compare_bounds(model, loader, [LayerConstants(1.0, 1.0, own=0.0)] * 3, MessageEdges(data.edge_index, 6))
    assert [float(layer.measured.staleness.max()) for layer in found] == [1.0, 0.0, 0.0]
    assert float(found[-1].measured.closeness[0]) == float(found[-1].by_node[0]) == 4.0
    assert printed_sum(1.0, 1.0, degree=1.0, staleness=[1.0, 0.0]) == 1.0
    assert found[-1].theorem == printed_sum(1.0, 1.0, degree=4.0, staleness=[1.0, 0.0]) == 16.0


def test_max_of_rows_is_not_nonexpansive() -> None:
    """Two neighbours, each off by 1 in another value: their maximum is off by the root of 2, not by 1 as printed."""
    data = Data(x=torch.zeros(3, 2).double(), edge_index=torch.tensor([[1, 2], [0, 0]]))
    model = gas.autoscale(Chain(*[pyg.SimpleConv(aggr="max") for _ in range(2)]), data)
    loader = gas.HaloLoader(data, partition=torch.arange(3))
    overwrite(model, loader, {"layers.0": torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])})
    (_, found) = compare_bounds(
        model, loader, [LayerConstants(1.0, 1.0, "max", own=0.0, width=2)] * 2, MessageEdges(data.edge_index, 3)
    )
    error = float(found.measured.closeness[0])
    assert error == pytest.approx(math.sqrt(2.0))
    assert float(found.lemma[0]) == found.theorem == float(found.by_node[0]) == error
    as_printed = lemma1(LayerConstants(1.0, 1.0), 1.0, closeness=0.0, staleness=1.0)
    assert error > as_printed


def test_printed_bound_on_gradients_does_not_hold() -> None:
    """h = theta m and the loss h, which is 1-Lipschitz: gradients differ by 1 and outputs by 0.1."""
    theta = torch.tensor(0.1, requires_grad=True)
    exact, stale = torch.tensor(2.0), torch.tensor(3.0)
    gradients = [torch.autograd.grad(theta * m, theta)[0] for m in (exact, stale)]
    assert float(gradients[1] - gradients[0]) == 1.0 > float((theta * stale - theta * exact).detach())


def test_gradients_at_the_outputs_are_bounded() -> None:
    """The gradient of cross entropy is 1/2-Lipschitz, so that of outputs is off by half their error at most."""
    labels = torch.randint(5, (200,))
    exact = 3 * torch.randn(200, 5, dtype=torch.double)
    computed = exact + torch.randn_like(exact) * torch.logspace(-3, 1, 200, dtype=torch.double).unsqueeze(1)

    def gradient(out: Tensor) -> Tensor:
        out = out.clone().requires_grad_()
        return torch.autograd.grad(nn.functional.cross_entropy(out, labels, reduction="sum"), out)[0]

    difference = (gradient(computed) - gradient(exact)).norm(dim=1)
    assert bool((difference <= 0.5 * (computed - exact).norm(dim=1) + 1e-12).all())


# What is measured ####################################################################################################


def test_measured_errors_are_those_of_rows() -> None:
    data = plain(undirected_graph())
    model = pyg.GCN(C, 6, num_layers=2, out_channels=4).double()
    expected, first = whole(model, data), model.convs[0](data.x, data.edge_index).detach()
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, shuffle=True)
    overwrite(model, loader, {"convs.0": first + 0.1})
    kept = history_rows(model)
    hidden, output = measure(model, loader)
    assert [hidden.name, output.name] == ["convs.0", "output"]
    assert float(hidden.closeness.max()) < 1e-12
    torch.testing.assert_close(hidden.history, torch.full((40,), 0.1 * math.sqrt(6.0)).double())
    torch.testing.assert_close(hidden.staleness, hidden.history)
    assert torch.equal(output.history, output.closeness)
    assert not output.staleness.any()
    with torch.no_grad():
        model.eval()
        for batch in loader.in_order():
            nodes = batch.n_id[: batch.batch_size]
            error = (model(batch) - expected[nodes]).norm(dim=1)
            torch.testing.assert_close(error, output.closeness[nodes])
            overwrite(model, loader, kept)  # so that each batch sees the same


def test_measuring_changes_nothing() -> None:
    data = plain(undirected_graph())
    model = gas.autoscale(build_model("gin", data, 4, hidden=6, layers=3, dropout=0.5).double(), data)
    loader = gas.HaloLoader(data, 5, partition="random", shuffle=True)
    for batch in loader:
        model(batch)
    kept, state, memory = history_rows(model), loader.state_dict(), attached(model).memory._written_by
    random, weights = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    measure(model, loader)
    error_by_sweep(model, loader, 2)
    assert model.training
    assert attached(model).memory._written_by == memory
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(loader.state_dict()["generator"], state["generator"])
    assert all(torch.equal(rows, kept[slot]) for slot, rows in history_rows(model).items())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_other_precision_leaves_the_error_of_rounding() -> None:
    data = plain(undirected_graph())
    model = gas.autoscale(pyg.GCN(C, 16, num_layers=2, out_channels=4).double(), data, dtype=torch.int8)
    loader = gas.HaloLoader(data, 5, partition="random")
    gas.refresh(model, loader)
    hidden, output = measure(model, loader)
    assert float(hidden.closeness.max()) < 1e-12
    assert 0 < float(hidden.staleness.max()) < 0.1
    errors = error_by_sweep(model, loader, 2)
    assert errors == pytest.approx([float(output.closeness.max())] * 2)


def test_one_part_is_exact() -> None:
    data = plain(undirected_graph())
    model = gas.autoscale(pyg.GCN(C, 6, num_layers=3, out_channels=4).double(), data)
    loader = gas.HaloLoader(data, 1)
    assert [float(layer.closeness.max()) < 1e-12 for layer in measure(model, loader)] == [True] * 3
    assert error_by_sweep(model, loader, 1)[0] < 1e-12


def test_rows_with_heads_and_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = pyg.GATConv(C, 3, heads=2), pyg.GCNConv(6, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
            out = self.second(self.first(x, edge_index).tanh(), edge_index)
            return out, out.view(-1, 2, 2)

    data = plain(odd_graph())
    model = gas.autoscale(Two().double(), data)
    hidden, output = measure(model, gas.HaloLoader(data, 6, partition="random"))
    assert float(hidden.closeness.max()) < 1e-12 < float(output.closeness.max())


def test_models_that_the_bounds_are_not_about_are_refused() -> None:
    data = plain(undirected_graph())
    loader, edges = gas.HaloLoader(data, 5, partition="random"), MessageEdges(data.edge_index, 40)
    model = gas.autoscale(build_model("gin", data, 4, hidden=6, layers=3, residual=True).double(), data)
    with pytest.raises(InputError, match="such as a residual"):
        compare_bounds(model, loader, [LayerConstants(1.0, 1.0)] * 3, edges)
    model = gas.autoscale(pyg.GCN(C, 6, num_layers=3).double(), data)
    with pytest.raises(InputError, match="2 layers"):
        compare_bounds(model, loader, [LayerConstants(1.0, 1.0)] * 2, edges)
    with pytest.raises(InputError, match="autoscaled"):
        measure(pyg.GCN(C, 6, num_layers=3), loader)


# Fixed weights #######################################################################################################


@pytest.mark.parametrize(
    ("name", "num_layers"), [("gcn", 1), ("gcn", 4), ("gin", 2), ("gat", 2), ("appnp", 4), ("gcnii", 4)]
)
def test_exact_after_as_many_sweeps_as_layers_and_not_before(name: str, num_layers: int) -> None:
    """With at least as many batches as layers, each next to all others, not one sweep can be saved."""
    data = plain(undirected_graph(60, 400))
    model = build_model(name, data, 4, hidden=16, layers=num_layers).double()
    spread_norms(model)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 6, partition="random")
    errors = error_by_sweep(model, loader, num_layers + 2)
    assert [error < 1e-9 for error in errors] == [False] * (num_layers - 1) + [True] * 3
    # The histories are exact one sweep earlier.
    model.eval()
    with torch.no_grad():
        for sweep in range(num_layers):
            assert (float(measure(model, loader)[-1].closeness.max()) < 1e-9) == (sweep >= num_layers - 1)
            for batch in loader.in_order():
                model(batch)


def test_sweeps_begin_with_the_histories_as_they_are() -> None:
    data = plain(undirected_graph())
    model = gas.autoscale(pyg.GCN(C, 6, num_layers=3, out_channels=4).double(), data)
    loader = gas.HaloLoader(data, 5, partition="random")
    gas.refresh(model, loader)
    assert max(error_by_sweep(model, loader, 2)) < 1e-12
    disturb_weights(model, 0.1)
    small = error_by_sweep(model, loader, 1)[0]
    overwrite(model, loader, {slot: 100 + rows for slot, rows in history_rows(model).items()})
    assert 1e-6 < small < error_by_sweep(model, loader, 1)[0]
    with pytest.raises(InputError, match="sweeps"):
        error_by_sweep(model, loader, 0)
