"""R-GCN by its name: layers of PyG, learned rows, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.models import RGCN, build_model


def typed_graph(features: int = 3) -> Data:
    """Nodes on a ring whose edges have one of three types, both ways."""
    ring = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
    kind = torch.arange(12) % 3
    x = torch.ones(12, 1) if features == 1 else torch.randn(12, features, generator=torch.Generator().manual_seed(0))
    return Data(x=x, edge_index=torch.cat([ring, ring.flip(0)], dim=1), edge_type=torch.cat([kind, kind]))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("features", [4, 1])
def test_layers_are_those_of_pyg(features: int, blocks: int) -> None:
    data = typed_graph(features)
    torch.manual_seed(0)
    model = build_model("rgcn", data, 2, hidden=8, blocks=blocks).eval()
    assert isinstance(model, RGCN)
    x = data.x if model.rows is None else model.rows.weight
    assert (model.rows is None) == (features > 1)
    first, second = model.convs
    wanted = second(first(x, data.edge_index, data.edge_type).relu(), data.edge_index, data.edge_type)
    out = model(data.x, data.edge_index, data.edge_type, torch.arange(12))
    torch.testing.assert_close(out, wanted)
    inferred = gas.infer(gas.autoscale(model, data), gas.HaloLoader(data, 3))
    torch.testing.assert_close(inferred, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_it_trains() -> None:
    data = typed_graph(1)
    data.y = torch.arange(12) % 2
    data.train_mask = data.val_mask = torch.arange(12) < 10
    data.test_mask = ~data.train_mask
    torch.manual_seed(0)
    model = build_model("rgcn", data, 2, hidden=8, dropout=0.1)
    result = gas.fit(model, data, num_parts=3, epochs=30, lr=0.05, evaluate_every=30)
    assert result.epochs[-1].loss < 0.5 * result.epochs[0].loss


def test_relations_of_all_splits_are_known() -> None:
    data = typed_graph()
    data.num_relations = 7
    assert build_model("rgcn", data, 2, hidden=8).convs[0].num_relations == 7  # type: ignore[union-attr, index]


def test_what_does_not_fit_is_refused() -> None:
    data = typed_graph()
    with pytest.raises(gas.InputError, match="blocks must divide the widths"):
        build_model("rgcn", data, 3, hidden=8, blocks=2)
    model = build_model("rgcn", data, 2, hidden=8)
    with pytest.raises(gas.InputError, match="RGCN does not use edge weights"):
        model(data.x, data.edge_index, data.edge_type, torch.arange(12), torch.ones(24))
    del data.edge_type
    with pytest.raises(gas.InputError, match="the model 'rgcn' needs edges with types"):
        build_model("rgcn", data, 2)
