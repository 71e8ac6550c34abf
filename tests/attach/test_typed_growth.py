"""``gas.grow`` on heterogeneous graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale._util import tensors_in
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from support.typed import GRAPH, MODELS, run, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


def grown_graph(old: HeteroData) -> HeteroData:
    """Two more authors, a paper and a venue, some edges, another feature and another weight."""
    new, generator = old.clone(), torch.Generator().manual_seed(9)
    for name, count in (("author", 2), ("paper", 1), ("venue", 1)):
        x = new[name].x
        new[name].x = torch.cat([x, torch.randn(count, x.size(1), generator=generator, dtype=x.dtype)])
    new["paper"].y = torch.cat([new["paper"].y, torch.tensor([0])])
    for kind, edges in {
        ("author", "writes", "paper"): [[30, 31, 2], [40, 3, 40]],
        ("paper", "written_by", "author"): [[40, 3], [30, 31]],
        ("venue", "publishes", "paper"): [[5], [40]],
        ("paper", "cites", "paper"): [[40], [0]],
    }.items():
        new[kind].edge_index = torch.cat([new[kind].edge_index, torch.tensor(edges)], dim=1)
        for name, value in old[kind].items():
            if name != "edge_index":
                added = torch.full((len(edges[0]), *value.shape[1:]), 0.7, dtype=value.dtype)
                new[kind][name] = torch.cat([value, added])
    new["term"].x = new["term"].x.clone()
    new["term"].x[4] += 1.0
    return new


def made(name: str, data: HeteroData) -> tuple[nn.Module, gas.HaloLoader]:
    torch.manual_seed(1)
    model = MODELS[name]().double().eval()
    if name == "looping":
        model.table = nn.Embedding(40, 8).double()  # with rows for authors to come
    run(model, data)  # models with all their weights have the plan of other tests
    gas.autoscale(model, data, storage="host")
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, shuffle=True)
    gas.refresh(model, loader)
    return model, loader


def rows_by_node(model: nn.Module, loader: gas.HaloLoader) -> dict[str, Tensor]:
    kinds = attached(model).memory.kinds
    return {
        slot: history.raw[loader.row_orders[kind].row_of.long()].clone()
        for kind, memory in kinds.items()
        for slot, history in memory.histories.items()
    }


@pytest.mark.parametrize(
    "name", ["SAGE sum", "SAGE max", "SAGE deep", "GCN", "GAT", "SGC", "HGT", "residual", "looping", "weighted"]
)
def test_exact_histories_stay_exact(name: str) -> None:
    old = typed_graph(3)
    model, loader = made(name, old)
    before = rows_by_node(model, loader)
    new = grown_graph(old)
    grown = gas.grow(model, loader, new)
    assert (grown.batch_size, grown.shuffle, grown.num_parts) == (2, True, 5)
    after = rows_by_node(model, grown)
    gas.refresh(model, grown)
    same, changed = 0, 0
    for slot, exact in rows_by_node(model, grown).items():
        assert torch.allclose(after[slot], exact, rtol=1e-10, atol=1e-12)
        known = before[slot].size(0)
        kept = (exact[:known] - before[slot]).abs().amax(1) <= 1e-12
        same, changed = same + int(kept.sum()), changed + int((~kept).sum())
    assert same > 0
    assert changed > 0
    nodes = {"paper": torch.tensor([40, 0]), "author": torch.tensor([31])}
    predicted, whole = (tensors_in(out) for out in (gas.predict(model, grown, nodes), gas.infer(model, grown)))
    kinds = attached(model).plan.output_kinds  # type: ignore[union-attr]
    for rows, out, kind in zip(predicted, whole, kinds, strict=True):
        assert torch.allclose(rows, out[nodes[kind]], rtol=1e-10, atol=1e-12)


def test_rows_out_of_reach_stay_the_same_bit_for_bit() -> None:
    old = typed_graph(3)
    model, loader = made("SAGE sum", old)
    before = rows_by_node(model, loader)
    new = old.clone()
    new["term"].x = torch.cat([old["term"].x, old["term"].x[:1]])
    after = rows_by_node(model, gas.grow(model, loader, new))
    assert [rows.size(0) - before[slot].size(0) for slot, rows in after.items()] == [0, 0, 1]
    for slot, rows in before.items():
        assert torch.equal(after[slot][: rows.size(0)], rows)


def remove(kind: Any, name: str) -> Callable[[HeteroData], Any]:
    def change(data: HeteroData) -> None:
        del data[kind][name]

    return change


def set_value(kind: Any, name: str, value: Any) -> Callable[[HeteroData], Any]:
    def change(data: HeteroData) -> None:
        data[kind][name] = value

    return change


def without_last_venue(data: HeteroData) -> None:
    edges = data["venue", "publishes", "paper"]
    kept = edges.edge_index[0] < 4
    for name, value in list(edges.items()):
        edges[name] = value[..., kept] if name == "edge_index" else value[kept]
    data["venue"].x = data["venue"].x[:4]


@cache
def to_refuse() -> tuple[nn.Module, gas.HaloLoader]:
    """A model that all refusals leave as it is."""
    return made("SAGE sum", typed_graph())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_last_venue, "5 old 'venue' nodes"),
        (set_value("venue", "x", GRAPH["venue"].x.float()), "x of 'venue' must still have rows"),
        (remove(("paper", "cites", "paper"), "edge_weight"), "must have the attributes of the old graph"),
        (
            set_value(
                ("paper", "extends", "paper"), "edge_index", GRAPH["paper", "extends", "paper"].edge_index[:, 1:]
            ),
            r"all edges \('paper', 'extends', 'paper'\)",
        ),
        (lambda data: data.__delitem__(("term", "in", "paper")), "the types of the old one"),
        (lambda data: Data(x=torch.eye(3)), "must be a HeteroData"),
    ],
)
def test_graphs_that_lack_something_are_refused(change: Callable[[HeteroData], Any], message: str) -> None:
    model, loader = to_refuse()
    before = rows_by_node(model, loader)
    new = typed_graph()
    new = change(new) or new
    with pytest.raises(InputError, match=message):
        gas.grow(model, loader, new)
    assert all(torch.equal(rows, before[slot]) for slot, rows in rows_by_node(model, loader).items())
