"""Layers on heterogeneous graphs get no edges where recorded ones replace what they make of them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.utils import degree  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale._util import tensors_in
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward import TypedPlan
from gnnautoscale.planner.typed_trial_graph import _edges
from support.typed import MODELS, WIDTH, Stacked, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
CITES, EXTENDS = ("paper", "cites", "paper"), ("paper", "extends", "paper")


def planned(model: nn.Module, loader: gas.HaloLoader) -> TypedPlan:
    """The plan of an autoscaled model, once histories are exact."""
    gas.autoscale(model, loader.data)
    gas.refresh(model, loader)
    model(next(iter(loader)))
    plan = attached(model).plan
    assert isinstance(plan, TypedPlan)
    return plan


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("GCN", "torch_geometric.nn.conv.gcn_conv", "gcn_norm"),
        ("weighted", "torch_geometric.nn.conv.gcn_conv", "gcn_norm"),
        ("SGC", "torch_geometric.nn.conv.sg_conv", "gcn_norm"),
        ("GAT with loops", "torch_geometric.nn.conv.gat_conv", "add_self_loops"),
    ],
)
def test_nothing_is_computed_that_recorded_edges_replace(
    name: str, module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, counts = typed_graph(4), list[int]()
    computed = getattr(sys.modules[module], function)

    def counting(edge_index: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(edge_index.size(1))
        return computed(edge_index, *args, **kwargs)

    model, loader = MODELS[name]().double().eval(), gas.HaloLoader(data, 4, partition="random")
    planned(model, loader)
    monkeypatch.setattr(sys.modules[module], function, counting)
    for batch in loader:
        model(batch)
    assert counts == []
    gas.detach(model)
    names = inspect.signature(model.forward).parameters
    model(*(getattr(data, name) for name in names))
    assert max(counts) == 60  # those of a whole relation


class Looking(pyg.GCNConv):  # type: ignore[misc]
    """A layer that also looks at its edges itself."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = super().forward(x, edge_index)
        degrees: Tensor = degree(edge_index[1], out.size(0))
        return out + degrees.view(-1, 1)


def test_a_layer_that_looks_at_its_edges_keeps_them() -> None:
    torch.manual_seed(0)
    kinds = {CITES: Looking, EXTENDS: pyg.GCNConv}
    model = Stacked(lambda kind: kinds.get(kind, pyg.SAGEConv)(WIDTH, WIDTH)).double().eval()
    data = typed_graph(3)
    want = model(data.x_dict, data.edge_index_dict).detach()
    loader = gas.HaloLoader(data, 4, partition="random")
    plan = planned(model, loader)
    assert {name.split(".")[-1] for name in plan.emptied} == {"<paper___extends___paper>"}
    for batch in loader:
        (got,) = tensors_in(model(batch))
        nodes = batch["paper"].n_id[: batch["paper"].batch_size]
        assert torch.allclose(got, want[nodes], rtol=1e-10, atol=1e-10)


def test_no_node_of_a_trial_graph_has_two_self_loops() -> None:
    """Layers keep one of them, on a GPU any."""
    found = []
    for seed in range(20):
        edges = _edges(11, 11, set(), torch.Generator().manual_seed(seed))
        loops = edges[1, edges[0] == edges[1]].tolist()
        assert len(loops) == len(set(loops))
        found += loops
    assert found
