"""One graph for everybody who asks for it: shared as long as its tensors are the same, made anew otherwise."""

from __future__ import annotations

import gc

import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.graph import graph as module
from gnnautoscale.graph.graph import Graph
from gnnautoscale.graph.hashing import fingerprint


def test_a_loader_and_a_model_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(*tensors: torch.Tensor | None, **settings: str | int | float) -> str:
        hashed.append(1)
        return fingerprint(*tensors, **settings)

    monkeypatch.setattr(module, "fingerprint", counted)
    data = undirected_graph()
    first, second = gas.HaloLoader(data, 3), gas.HaloLoader(data, 4)
    model = gas.autoscale(GCN(data.num_features, 4, 2, 3), data)
    assert first.graph is second.graph is Graph.of(data)
    assert attached(model).memory_of(first.graph) is attached(model).memory
    gas.infer(model, first)
    assert hashed == [1]


def test_other_tensors_make_another_graph() -> None:
    data = undirected_graph()
    known = Graph.of(data)
    data.x = data.x.clone()
    replaced = Graph.of(data)
    assert replaced is not known
    assert replaced.key == known.key
    data.x[0] += 1.0
    written = Graph.of(data)
    assert written is not replaced
    assert written.key != replaced.key
    data.extra = torch.zeros(data.num_nodes)
    assert Graph.of(data) is not written


def test_graphs_go_with_their_data() -> None:
    gc.collect()
    before = len(module._KNOWN)
    data = undirected_graph()
    Graph.of(data)
    assert len(module._KNOWN) == before + 1
    del data
    gc.collect()
    assert len(module._KNOWN) == before


@pytest.mark.parametrize(
    ("edges", "symmetric"),
    [([[0, 1], [1, 0]], True), ([[0, 1, 1], [1, 0, 2]], False), ([[0, 0, 1], [1, 1, 0]], False), ([[2], [2]], True)],
)
def test_symmetry(edges: list[list[int]], symmetric: bool) -> None:
    assert Graph(Data(edge_index=torch.tensor(edges), num_nodes=3)).is_symmetric == symmetric
