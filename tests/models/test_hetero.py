"""Models of heterogeneous graphs: what they compute, and that histories keep them exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.errors import InputError
from gnnautoscale.models import TYPED_MODELS, build_model
from support.typed import typed_graph


def graph() -> HeteroData:
    """Nobody cites a venue, and terms have no features."""
    data = typed_graph(2).apply(lambda x: x.float() if x.is_floating_point() else x)
    data["term"].num_nodes = data["term"].num_nodes
    del data["term"].x
    return data


def at_once(model: Any, data: HeteroData) -> Any:
    numbers = {kind: torch.arange(store.num_nodes) for kind, store in data.node_items()}
    with torch.no_grad():
        return model.eval()(data.edge_index_dict, numbers, data.x_dict)


@pytest.mark.parametrize("name", TYPED_MODELS)
def test_histories_keep_them_exact(name: str) -> None:
    torch.manual_seed(0)
    data, model = graph(), build_model(name, graph(), 3, ["paper", "author"], hidden=8, layers=3)
    wanted = at_once(model, data)
    assert {kind: tuple(rows.shape) for kind, rows in wanted.items()} == {"paper": (40, 3), "author": (30, 3)}
    gas.autoscale(model, data)
    found = gas.infer(model, gas.HaloLoader(data, num_parts=5))
    assert all(torch.allclose(found[kind], wanted[kind], atol=1e-5) for kind in wanted)
    assert {**vars(model)["built_from"]} == {"model": name, "hidden": 8, "layers": 3}


def test_a_type_without_incoming_edges_keeps_its_rows_and_one_without_features_has_a_table() -> None:
    torch.manual_seed(0)
    data, model = graph(), build_model("rgcn", graph(), 2, ["venue"], hidden=4, dropout=0.0)
    assert [kind for kind in data.node_types if kind in model.rows] == ["term"]  # type: ignore[operator]
    out: Tensor = at_once(model, data)
    first: Any = model.first["venue"]  # type: ignore[index]
    last: Any = model.last["venue"]  # type: ignore[index]
    assert torch.allclose(out, last(first(data["venue"].x).relu()))


def test_r_gcn_is_its_formula() -> None:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0]])
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [0, 0]])
    data["b", "to", "a"].edge_index = torch.tensor([[0], [1]])
    layer: Any = build_model("rgcn", data, 1, ["b"], hidden=1, layers=1).convs[0]  # type: ignore[index]
    for weight in layer.parameters():
        torch.nn.init.constant_(weight, 2.0)
    found = layer(data.x_dict, data.edge_index_dict)
    assert found["b"].tolist() == [[2 * 2 + 2 + 2 * 2.0]]  # own row, bias, mean of neighbours
    assert found["a"].tolist() == [[2 * 1 + 2 + 0.0], [2 * 3 + 2 + 2 * 2.0]]


@pytest.mark.parametrize("name", TYPED_MODELS)
def test_one_type_of_edges_is_enough(name: str) -> None:
    torch.manual_seed(0)
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(12, 3), torch.randn(5, 2)
    data["a", "to", "a"].edge_index = torch.randint(12, (2, 30))
    model = build_model(name, data, 3, ["a"], hidden=8, layers=2)
    wanted = at_once(model, data)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, num_parts=3, partition="random")
    assert torch.allclose(gas.infer(model, loader), wanted, atol=1e-5)
    assert gas.verify(model, loader).exact


def test_what_does_not_fit_is_refused() -> None:
    dotted = HeteroData()
    dotted["a.b"].x = torch.ones(2, 1)
    dotted["a.b", "to", "a.b"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(InputError, match=r"names modules can have, but got .*a\.b"):
        build_model("hgt", dotted, 3, ["a.b"])
    with pytest.raises(InputError, match=r"models of a heterogeneous graph are .*, rgcn, but got 'gcn'"):
        build_model("gcn", graph(), 3, ["paper"])
    with pytest.raises(InputError, match="multiple of heads"):
        build_model("hgt", graph(), 3, ["paper"], hidden=6)
    data = graph()
    data["venue"].x = data["venue"].x.long()
    with pytest.raises(InputError, match="x of 'venue' must be floating"):
        build_model("hgt", data, 3, ["paper"])
