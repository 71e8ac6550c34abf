"""Batch norm over a batch and its halo, and models whose batch norm keeps no running averages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import scatter  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, EDGE_CHANNELS, assert_same, undirected_graph, whole, with_attributes
from gnnautoscale.forward.norms import (
    normalize_by_own_rows,
    normalize_untracked,
    uses_own_statistics,
)
from gnnautoscale.models import GIN

C = CHANNELS


def graph(num_nodes: int = 40, num_edges: int = 90) -> Data:
    """A graph without weights of edges."""
    data = undirected_graph(num_nodes, num_edges)
    return Data(x=data.x, edge_index=data.edge_index)


def bare_norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(C, track_running_stats=False)


def scaled_by(rows: Tensor, x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    """The norm's formula with the statistics of some rows."""
    return (x - rows.mean(0)) / (rows.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias


# One norm ############################################################################################################


def test_who_takes_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    assert uses_own_statistics(norm)
    assert not uses_own_statistics(norm.eval())
    assert uses_own_statistics(nn.BatchNorm1d(3, track_running_stats=False).eval())


@pytest.mark.parametrize("batch_size", [2, 5, 7])
def test_all_rows_are_normalized_by_the_first_ones(batch_size: int) -> None:
    norm, x = bare_norm(), torch.randn(7, C)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    assert_same(normalize_by_own_rows(norm, norm, x, batch_size), scaled_by(x[:batch_size], x, norm))


def test_statistics_over_further_dimensions() -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(6, 2, 3)
    own = x[:4].transpose(1, 2).reshape(-1, 2)
    expected = (x - own.mean(0)[:, None]) / (own.var(0, correction=0) + norm.eps).sqrt()[:, None]
    assert_same(normalize_by_own_rows(norm, norm, x, 4), expected)


def test_averages_stay_as_they_are_without_tracking() -> None:
    norm, x = nn.BatchNorm1d(C, momentum=1.0), torch.randn(6, C)
    assert_same(normalize_untracked(norm, x), scaled_by(x, x, norm))
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


# Models without running averages #####################################################################################


class Before(nn.Module):
    """A norm right before the first layer, so that the halo's rows go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = bare_norm(), pyg.SimpleConv(aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(x), edge_index)
        return out


class Between(nn.Module):
    """A norm between two layers, PyTorch's own or PyG's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = pyg.SAGEConv(C, C), norm, pyg.GCNConv(C, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "before": Before,
    "between": lambda: Between(bare_norm()),
    "PyG's": lambda: Between(pyg.BatchNorm(C, track_running_stats=False)),
    "in layers": lambda: GIN(C, 3, hidden=8, layers=3, track_running_stats=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_nodes_at_once_are_exact(name: str) -> None:
    data, model = graph(), MODELS[name]()
    expected = whole(model, data)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 1)
    assert_same(gas.infer(model, loader), expected)


@pytest.mark.parametrize("name", MODELS)
def test_training_on_all_nodes_at_once_is_full_batch(name: str) -> None:
    data, model = graph(), MODELS[name]().train()
    expected = model(data.x, data.edge_index)
    gas.autoscale(model, data)
    assert_same(model(next(iter(gas.HaloLoader(data, 1)))), expected)


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_is_normalized_by_its_own_rows(training: bool) -> None:
    data, model = graph(24, 40), Before()
    gas.autoscale(model, data).train(training)
    for batch in gas.HaloLoader(data, 4, partition="random"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out = model(batch)
        assert bool(said) == (not training)
        rows = scaled_by(batch.x[: batch.batch_size], data.x, model.norm)
        expected = scatter(rows[data.edge_index[0]], data.edge_index[1], 0, data.num_nodes, "sum")
        assert_same(out, expected[batch.n_id[: batch.batch_size]])


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_in_batches_says_what_it_depends_on(name: str) -> None:
    data = graph()
    model, loader = gas.autoscale(MODELS[name](), data), gas.HaloLoader(data, 4, partition="random")
    gas.refresh(model, gas.HaloLoader(data, 1))
    said = "statistics of each batch, so outputs depend on the partition"
    with pytest.warns(UserWarning, match=said):
        gas.predict(model, loader, torch.arange(5))
    with pytest.warns(UserWarning, match=said):
        gas.infer(model, loader)
    if name == "in layers":
        with pytest.warns(UserWarning, match=said):
            gas.refresh(model, loader)
    else:
        gas.refresh(model, loader)  # no norm comes before the last history


def test_histories_become_exact_but_for_the_statistics() -> None:
    """Norms that see rows of which each batch has the same kinds give the same at once and in batches."""
    data = graph(32, 64)
    data.x = data.x[:1].repeat(32, 1) * torch.tensor([1.0, -1.0]).repeat(16)[:, None]
    model = gas.autoscale(Before(), data).eval()
    loader = gas.HaloLoader(data, partition=torch.arange(32) // 8)
    exact = gas.infer(model, gas.HaloLoader(data, 1))
    with pytest.warns(UserWarning, match="depend on the partition"):
        assert_same(gas.infer(model, loader), exact)


def test_fit_takes_them() -> None:
    data = graph()
    data.y = torch.randint(3, (40,))
    data.train_mask = data.val_mask = torch.arange(40) < 30
    data.test_mask = ~data.train_mask
    model = GIN(C, 3, hidden=8, layers=2, track_running_stats=False)
    result = gas.fit(model, data, num_parts=4, epochs=3, evaluate_parts=1, refresh_every="epoch")
    assert result.epochs[-1].loss < result.epochs[0].loss
    with pytest.warns(UserWarning, match="evaluate_parts=1"):
        gas.fit(GIN(C, 3, hidden=8, layers=2, track_running_stats=False), data, num_parts=4, epochs=1)


def test_batch_norm_takes_statistics_from_the_batch_only() -> None:
    """In a batch, running statistics move towards the batch's own rows; the halo is normalized by them too."""
    data = undirected_graph(24, 40)
    norm = nn.BatchNorm1d(C, momentum=1.0)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = norm, pyg.SimpleConv(aggr="sum")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.conv(self.norm(x), edge_index)
            return out

    model = gas.autoscale(Normed(), data)
    for batch in gas.HaloLoader(data, 4, partition="random"):
        model.train()
        out = model(batch)
        inside = batch.x[: batch.batch_size]
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert_same(norm.running_mean, inside.mean(0))
        assert_same(norm.running_var, inside.var(0))
        normed = (data.x - inside.mean(0)) / (inside.var(0, correction=0) + norm.eps).sqrt()
        expected = scatter(normed[data.edge_index[0]], data.edge_index[1], 0, data.num_nodes, "sum")
        assert_same(out, expected[batch.n_id[: batch.batch_size]])
    assert int(norm.num_batches_tracked) == 4  # type: ignore[arg-type]


class Grouped(nn.Module):
    """Normalizes rows that have another dimension, as multi-head models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(2, momentum=1.0), pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.conv(self.norm(x.view(-1, 2, C // 2)).flatten(1), edge_index)


def test_batch_norm_of_rows_with_more_dimensions_leaves_the_halo_out() -> None:
    data = undirected_graph()
    model = gas.autoscale(Grouped(), data).train()
    batch = next(iter(gas.HaloLoader(data, 4, partition="random")))
    model(batch)
    inside = batch.x[: batch.batch_size].view(-1, 2, C // 2)
    assert model.norm.running_mean is not None
    assert_same(model.norm.running_mean, inside.mean(dim=(0, 2)))


class NormedEdges(nn.Module):
    """Normalizes edge features before it makes weights of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weigh = nn.BatchNorm1d(EDGE_CHANNELS, momentum=1.0), nn.Linear(EDGE_CHANNELS, 1)
        self.conv = pyg.GraphConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
        return self.conv(x, edge_index, self.weigh(self.norm(edge_attr)).squeeze(-1))


@pytest.mark.parametrize(
    "edges",
    [
        [(3, 0), (0, 1), (1, 2), (0, 2), (2, 3)],  # 4 edges into nodes 0 to 2, as many as batch and halo have rows
        [(3, 0), (0, 1), (1, 2), (0, 2), (1, 0), (2, 3)],
    ],
    ids=["as many edges as rows", "more edges"],
)
def test_batch_norm_of_edges_takes_all_edges(edges: list[tuple[int, int]]) -> None:
    data = with_attributes(torch.tensor(edges).t().contiguous(), 4)
    model = gas.autoscale(NormedEdges(), data).train()
    batch = next(iter(gas.HaloLoader(data, partition=torch.tensor([0, 0, 0, 1]))))
    model(batch)
    assert model.norm.running_mean is not None
    assert_same(model.norm.running_mean, batch.edge_attr.mean(dim=0).as_subclass(Tensor))
