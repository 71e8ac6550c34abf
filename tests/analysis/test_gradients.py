"""The gradient of training steps against that of full batch, plain and compensated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Stack, directed_ring, history_rows, undirected_graph
from gnnautoscale.analysis.diagnostics import diagnose
from gnnautoscale.analysis.gradients import _owner
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.models import GCN, GraphSAGE
from gnnautoscale.tasks import NodeClassification
from support.trained import gin, trained


@pytest.fixture
def graph() -> Data:
    """A connected undirected graph of 40 nodes with features, labels and training nodes only."""
    full = undirected_graph()
    return Data(x=full.x, edge_index=full.edge_index, y=full.y, train_mask=full.train_mask)


def full_gradient(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """The gradient in full batch, of a model that is not attached, in evaluation mode."""
    model.eval()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_gradients_through_exact_histories_lack_what_flows_through_the_halo(graph: Data) -> None:
    model = gin(layers=2)
    loader = trained(model, graph)
    gas.refresh(model, loader)
    found = diagnose(model, loader, ["gradients"])["gradients"]
    by_name = {layer["layer"]: layer for layer in found["layers"]}
    assert list(by_name) == ["convs.0", "convs.1", "first", "last"]
    # The second layer's inputs are exact, and no gradient of its weights comes from elsewhere.
    for name in ("convs.1", "last"):
        assert by_name[name]["relative_error"] < 1e-4, name
        assert by_name[name]["cosine"] == pytest.approx(1.0)
    assert by_name["convs.0"]["relative_error"] > 1e-2
    assert 0.5 < found["cosine"] < 1.0


def test_gradients_by_hand(graph: Data) -> None:
    """Batch by batch, the other batches' first layer is a constant as the history has it."""
    model = GCN(CHANNELS, 4, hidden=8, layers=2, dropout=0.0)
    loader = trained(model, graph)
    found = diagnose(model, loader, ["gradients"])["gradients"]
    kept = history_rows(model)["convs.0"]
    gas.detach(model)
    exact = full_gradient(model, graph)
    batch_of = loader.labels // loader.batch_size
    ours = {name: torch.zeros_like(value) for name, value in exact.items()}
    weights = list(model.parameters())
    for batch in range(len(loader)):
        inside = (batch_of == batch).unsqueeze(1)
        first = torch.where(inside, model.convs[0](graph.x, graph.edge_index), kept)
        out = model.convs[1](first.relu(), graph.edge_index)
        rows = graph.train_mask & inside.squeeze(1)
        loss = F.cross_entropy(out[rows], graph.y[rows], reduction="sum") / graph.train_mask.sum()
        for name, piece in zip(ours, torch.autograd.grad(loss, weights), strict=True):
            ours[name] += piece
    a, b = (torch.cat([value.flatten() for value in each.values()]) for each in (ours, exact))
    assert found["relative_error"] == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-3)
    assert found["cosine"] == pytest.approx(float(F.cosine_similarity(a, b, dim=0)), rel=1e-4)
    assert found["norm_ratio"] == pytest.approx(float(a.norm() / b.norm()), rel=1e-4)
    assert found["relative_error"] > 1e-2
    for layer in found["layers"]:
        a, b = (
            torch.cat([value.flatten() for name, value in each.items() if name.startswith(f"{layer['layer']}.")])
            for each in (ours, exact)
        )
        assert layer["cosine"] == pytest.approx(float(F.cosine_similarity(a, b, dim=0)), rel=1e-4)
        assert layer["norm_ratio"] == pytest.approx(float(a.norm() / b.norm()), rel=1e-4)


def test_gradients_of_one_batch_are_exact(graph: Data) -> None:
    model = gas.autoscale(gin(), graph)
    found = diagnose(model, HaloLoader(graph, num_parts=1), ["gradients"])["gradients"]
    for each in (found, found["compensated"]):
        assert each["relative_error"] < 1e-5
        assert each["cosine"] == pytest.approx(1.0)
        assert each["norm_ratio"] == pytest.approx(1.0)


def test_a_task_of_one_s_own(graph: Data) -> None:
    model = gin()
    loader = trained(model, graph)

    class OnlyFirst(NodeClassification):
        def loss(self, out: Tensor, targets: Tensor) -> Tensor:
            return out[:, 0].mean()

    found = diagnose(model, loader, ["gradients"], task=OnlyFirst(4))["gradients"]
    other = diagnose(model, loader, ["gradients"])["gradients"]
    assert found["cosine"] != other["cosine"]


def test_gradients_need_labels(graph: Data) -> None:
    del graph.y
    model = gas.autoscale(gin(), graph)
    with pytest.raises(InputError, match="y must hold the targets of nodes, but got none"):
        diagnose(model, HaloLoader(graph, num_parts=2), ["gradients"])


# Compensated steps ###################################################################################################

MODELS: dict[str, Any] = {
    "gcn": lambda: GCN(CHANNELS, 4, hidden=8, layers=3, dropout=0.0),
    "sage": lambda: GraphSAGE(CHANNELS, 4, hidden=8, layers=3),
    "gin": gin,
}


@pytest.mark.parametrize("attachment", ["none", "gradient"])
@pytest.mark.parametrize("name", MODELS)
def test_compensated_steps_agree_with_full_batch_if_histories_are_exact(
    name: str, attachment: Any, graph: Data
) -> None:
    model = MODELS[name]()
    loader = trained(model, graph, lr=0.01, compensate=attachment)
    gas.refresh(model, loader)
    found = diagnose(model, loader, "gradients")["gradients"]
    assert found["relative_error"] > 1e-2
    assert found["why_not"] is None
    assert found["sweeps"] >= 2
    for each in (found["compensated"], *found["compensated"]["layers"]):
        assert each["relative_error"] < 1e-3
        assert each["cosine"] == pytest.approx(1.0, abs=1e-5)
        assert each["norm_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert [layer["layer"] for layer in found["compensated"]["layers"]] == [layer["layer"] for layer in found["layers"]]


def test_compensated_steps_pull_the_rows_that_are_there(graph: Data) -> None:
    """Not fresh ones, so that the difference to plain steps comes from the border alone."""
    model = MODELS["gcn"]()
    loader = trained(model, graph)
    stale = diagnose(model, loader, "gradients")["gradients"]["compensated"]
    assert stale["relative_error"] > 0.02
    attached(model).memory.settle()
    for history in attached(model).memory.histories.values():
        history.raw.mul_(3.0)
    assert diagnose(model, loader, "gradients")["gradients"]["compensated"]["relative_error"] > stale["relative_error"]


def test_each_batch_is_computed_as_if_it_came_next(graph: Data) -> None:
    """So the order of batches makes no difference."""
    model = MODELS["gcn"]()
    loader = trained(model, graph)
    turned = HaloLoader(graph, partition=loader.labels.max() - loader.labels, batch_size=2)
    first, second = (diagnose(model, each, "gradients")["gradients"]["compensated"] for each in (loader, turned))
    assert first["relative_error"] == pytest.approx(second["relative_error"], rel=0.02)


def test_what_cannot_be_compensated_says_why() -> None:
    data = directed_ring()
    data.y, data.train_mask = torch.arange(data.num_nodes) % 4, torch.ones(data.num_nodes, dtype=torch.bool)
    model = gas.autoscale(Stack([pyg.SAGEConv(data.num_features, 4), pyg.SAGEConv(4, 4)]), data)
    found = diagnose(model, HaloLoader(data, 4), "gradients")["gradients"]
    assert found["compensated"] is None
    assert "bidirectional=True" in found["why_not"]
    assert found["sweeps"] == 0
    both = diagnose(model, HaloLoader(data, 4, bidirectional=True), "gradients")["gradients"]
    assert both["why_not"] is None
    assert both["cosine"] == pytest.approx(found["cosine"])


def test_weights_belong_to_the_layer_that_passes_messages() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.conv = pyg.GINConv(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
            self.block = nn.Sequential(nn.Linear(2, 2), pyg.GCNConv(2, 2))

    model = Model()
    owners = {name: _owner(model, name) for name in dict(model.named_parameters())}
    assert owners["scale"] == "scale"
    assert owners["conv.nn.1.weight"] == "conv"
    assert owners["block.0.weight"] == "block.0"
    assert owners["block.1.lin.weight"] == owners["block.1.bias"] == "block.1"
