"""``gas.verify`` on heterogeneous graphs."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.attach import recomputation
from gnnautoscale.errors import InputError
from support.typed import GRAPH, MODELS, RELATIONS, WIDTH, run

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


FAULT = "FAULT_OF_TYPED_TEST_MODEL"


def attached(model: nn.Module) -> gas.HaloLoader:
    loader = gas.HaloLoader(GRAPH, 5, partition="random", batch_size=2)
    gas.autoscale(model.double(), GRAPH)
    return loader


@pytest.mark.parametrize("name", ["SAGE sum", "GCN", "HGT", "residual", "looping"])
def test_exact_models_are_exact(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    run(model, GRAPH)  # models with all their weights have the plan of other tests
    found = gas.verify(model, attached(model), nodes=20)
    assert (found.exact, found.nodes, found.how) == (True, 20, "the whole graph")
    assert found.inference < 1e-12
    assert found.training is not None
    assert found.training < 1e-12


def test_a_receptive_field_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS["SAGE sum"]()
    loader, nodes = attached(model), {"paper": torch.tensor([3, 1]), "term": torch.tensor([0])}
    whole = gas.verify(model, loader, nodes=nodes)
    monkeypatch.setattr(recomputation, "_LITTLE", 0)
    monkeypatch.setattr(recomputation, "free_memory", lambda _: 1e5)
    some = gas.verify(model, loader, nodes=nodes)
    assert (whole.how, some.how) == ("the whole graph", "their receptive field of 3 hops")
    assert whole.exact
    assert some.exact
    assert whole.nodes == some.nodes == 3


class Faulty(nn.Module):
    """Rows before its second layer can be made to depend on the batch, which nothing about the model shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in GRAPH.node_types})
        self.convs = nn.ModuleList(
            [pyg.HeteroConv({kind: pyg.SAGEConv(WIDTH, WIDTH) for kind in RELATIONS}) for _ in range(2)]
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Tensor:
        rows = {kind: self.first[kind](x) for kind, x in x_dict.items()}
        rows = {**rows, **self.convs[0](rows, edge_index_dict)}
        rows = {**rows, "paper": rows["paper"] - float(os.environ[FAULT]) * rows["paper"].mean()}
        out: Tensor = self.convs[1](rows, edge_index_dict)["paper"]
        return out


def test_a_fault_is_found_and_its_layer_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv(FAULT, "0")
    model = Faulty()
    loader = attached(model)
    assert gas.verify(model, loader).exact
    monkeypatch.setenv(FAULT, "1")
    found = gas.verify(model, loader)
    assert not found.exact
    assert math.isfinite(found.inference)
    assert found.layer == "SAGEConv ('convs.1.convs.<author___writes___paper>')"  # the first one that papers come into


def test_wrong_nodes_are_refused() -> None:
    model = MODELS["SAGE sum"]()
    loader = attached(model)
    for nodes in (torch.tensor([0]), {"book": torch.tensor([0])}, {"paper": torch.tensor([40])}, 0):
        with pytest.raises(InputError):
            gas.verify(model, loader, nodes=nodes)
