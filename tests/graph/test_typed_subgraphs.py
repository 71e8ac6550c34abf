"""Subgraphs of heterogeneous graphs, and the baselines' loaders on them."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.graph import ClusterLoader, SampleLoader, TypedGraph
from gnnautoscale.graph.typed_subgraphs import TypedSubgraphs
from support.typed import typed_graph


def check_rows(data: HeteroData, batch: HeteroData) -> None:
    """All attributes belong to the nodes and edges that the batch names."""
    for kind in data.node_types:
        assert torch.equal(batch[kind].x, data[kind].x[batch[kind].n_id])
        assert batch[kind].num_nodes == batch[kind].n_id.numel() == batch[kind].n_id.unique().numel()
    for kind in data.edge_types:
        source, target = batch[kind].edge_index
        ends = torch.stack([batch[kind[0]].n_id[source], batch[kind[2]].n_id[target]])
        assert torch.equal(ends, data[kind].edge_index[:, batch[kind].e_id])
    weight = data["paper", "cites", "paper"].edge_weight
    assert torch.equal(batch["paper", "cites", "paper"].edge_weight, weight[batch["paper", "cites", "paper"].e_id])


def test_joined_parts_have_the_edges_inside() -> None:
    data = typed_graph()
    loader = ClusterLoader(data, num_parts=5, batch_size=2)
    seen = dict.fromkeys(data.node_types, 0)
    for batch in loader:
        check_rows(data, batch)
        for kind in data.edge_types:
            inside = [torch.isin(data[kind].edge_index[i], batch[kind[2 * i]].n_id) for i in (0, 1)]
            assert batch[kind].e_id.sort().values.tolist() == (inside[0] & inside[1]).nonzero().squeeze(1).tolist()
        for kind in seen:
            seen[kind] += batch[kind].batch_size
            assert batch[kind].batch_size == batch[kind].num_nodes
    assert seen == {kind: store.num_nodes for kind, store in data.node_items()}


@pytest.mark.parametrize("fan_out", [[2, 2], [-1, 1], [3]])
def test_neighbours_are_sampled_for_each_type_of_edges(fan_out: list[int]) -> None:
    data = typed_graph(4)
    graph = TypedGraph.of(data)
    papers = torch.tensor([3, 17, 30])
    nodes = papers + graph.first["paper"]
    batch = TypedSubgraphs(data).sample(nodes, fan_out, torch.Generator().manual_seed(0))
    check_rows(data, batch)
    assert batch["paper"].batch_size == 3
    assert torch.equal(batch["paper"].n_id[:3], papers)
    assert {kind: batch[kind].batch_size for kind in data.node_types} == {
        "author": 0,
        "paper": 3,
        "term": 0,
        "venue": 0,
    }
    for kind in data.edge_types:
        if kind[2] != "paper":
            continue
        wanted = torch.bincount(data[kind].edge_index[1], minlength=40)[papers]
        wanted = wanted if fan_out[0] == -1 else wanted.clamp(max=fan_out[0])
        found = torch.bincount(batch[kind].edge_index[1], minlength=3)[:3]
        assert torch.equal(found, wanted)
    deep = ("paper", "written_by", "author")  # authors are reached in the first hop, so only a second one looks at them
    assert (batch[deep].edge_index.size(1) > 0) == (len(fan_out) > 1)


def test_sampled_batches_are_the_same_with_the_same_seed() -> None:
    data = typed_graph(5)
    nodes = torch.arange(40) + TypedGraph.of(data).first["paper"]
    one, two = (list(SampleLoader(data, nodes, [2, 2], 4, seed=3)) for _ in range(2))
    assert [batch["paper"].batch_size for batch in one] == [10] * 4
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(a[kind].n_id, b[kind].n_id) for kind in data.node_types)
        assert all(torch.equal(a[kind].e_id, b[kind].e_id) for kind in data.edge_types)
