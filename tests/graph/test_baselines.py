"""Subgraphs and loaders of the baselines, against plain Python on tiny graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]
from torch_geometric.nn import GIN, GraphSAGE  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, odd_graph, undirected_graph, whole, with_attributes
from gnnautoscale.graph.baselines import ClusterLoader, SampleLoader
from gnnautoscale.graph.subgraphs import Subgraphs, draw_from_groups, whole_neighbourhood

GRAPHS = {"undirected": undirected_graph(), "odd": odd_graph()}
# 0 and 1 point to each other, both to 2; 2 to 3 and to itself; 3 to 4 twice.
SMALL = torch.tensor([[0, 1, 0, 1, 2, 2, 3, 3], [1, 0, 2, 2, 3, 2, 4, 4]])

each_graph = pytest.mark.parametrize("name", GRAPHS)


def pairs(edge_index: Tensor) -> list[tuple[int, int]]:
    return [(int(source), int(target)) for source, target in edge_index.t()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(first: Data, second: Data) -> bool:
    """Whether two subgraphs are the same, bit for bit."""
    if set(first.keys()) != set(second.keys()):
        return False
    values = [(first[name], second[name]) for name in first.keys()]  # noqa: SIM118
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in values)


def all_same(first: Sequence[Data], second: Sequence[Data]) -> bool:
    return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))


def check_subgraph(subgraph: Data, data: Data) -> None:
    """Rows and edges of a subgraph are those of the graph that it names; nothing is there twice."""
    assert subgraph.n_id.unique().numel() == subgraph.n_id.numel() == subgraph.num_nodes
    assert subgraph.e_id.unique().numel() == subgraph.e_id.numel() == subgraph.num_edges
    assert type(subgraph.edge_index) is Tensor
    for key in ("x", "y", "train_mask"):
        assert torch.equal(subgraph[key], data[key][subgraph.n_id])
    for key in ("edge_weight", "edge_attr", "edge_type"):
        assert torch.equal(subgraph[key], data[key][subgraph.e_id])
    assert torch.equal(subgraph.n_id[subgraph.edge_index], data.edge_index[:, subgraph.e_id])


# Joined parts ########################################################################################################


def test_which_edges_remain_among_nodes() -> None:
    found = Subgraphs(SMALL).induced(torch.tensor([2, 0, 4]))
    assert found.n_id.tolist() == [2, 0, 4]
    assert found.batch_size == found.num_nodes == 3
    # 0 -> 2 and the loop at 2; the edges over 1 and 3 are gone.
    assert found.e_id.tolist() == [2, 5]
    assert pairs(found.edge_index) == [(1, 0), (0, 0)]


@each_graph
def test_edges_among_nodes_are_all_edges_inside(name: str) -> None:
    data, nodes = GRAPHS[name], torch.randperm(GRAPHS[name].num_nodes, generator=generator())[:15]
    found = Subgraphs(data).induced(nodes)
    check_subgraph(found, data)
    assert torch.equal(found.n_id, nodes)
    inside = set(nodes.tolist())
    expected = [e for e, (source, target) in enumerate(pairs(data.edge_index)) if {source, target} <= inside]
    assert sorted(found.e_id.tolist()) == expected


def test_nodes_without_edges_make_a_subgraph() -> None:
    found = Subgraphs(SMALL).induced(torch.tensor([0, 4]))
    assert found.edge_index.shape == (2, 0)
    assert found.num_nodes == 2


def test_other_attributes_are_passed_on() -> None:
    data = undirected_graph()
    data.name = "some"
    assert Subgraphs(data).induced(torch.arange(3)).name == "some"
    assert "n_id" not in data


def test_cluster_batches_have_the_edges_inside_their_parts_joined() -> None:
    parts = torch.tensor([0, 0, 1, 1, 2])
    alone = list(ClusterLoader(Data(edge_index=SMALL, num_nodes=5), partition=parts))
    assert [sorted(batch.e_id.tolist()) for batch in alone] == [[0, 1], [4, 5], []]
    (joined, last) = ClusterLoader(Data(edge_index=SMALL, num_nodes=5), partition=parts, batch_size=2)
    # Joined, the edges between the two parts come back.
    assert sorted(joined.e_id.tolist()) == [0, 1, 2, 3, 4, 5]
    assert last.n_id.tolist() == [4]
    (everything,) = ClusterLoader(Data(edge_index=SMALL, num_nodes=5), partition=parts, batch_size=3)
    assert sorted(everything.e_id.tolist()) == list(range(8))


@each_graph
@pytest.mark.parametrize(("num_parts", "batch_size"), [(4, 1), (7, 2), (6, 6)])
def test_cluster_batches_are_those_of_gas_without_the_halo(name: str, num_parts: int, batch_size: int) -> None:
    data = GRAPHS[name]
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "seed": 3}
    cluster, halo = ClusterLoader(data, num_parts, **options), gas.HaloLoader(data, num_parts, **options)
    assert len(cluster) == len(halo)
    for _ in range(3):
        for batch, with_halo in zip(cluster, halo, strict=True):
            check_subgraph(batch, data)
            assert torch.equal(batch.n_id, with_halo.n_id[: with_halo.batch_size].as_subclass(Tensor))
            assert batch.batch_size == batch.num_nodes == with_halo.batch_size
            inside = set(batch.n_id.tolist())
            expected = [e for e, ends in enumerate(pairs(data.edge_index)) if set(ends) <= inside]
            assert sorted(batch.e_id.tolist()) == expected


def test_cluster_batches_are_reproducible_and_leave_the_global_state_alone() -> None:
    data, before = undirected_graph(), torch.get_rng_state()

    def epochs(seed: int) -> list[Data]:
        loader = ClusterLoader(data, 8, partition="random", batch_size=2, shuffle=True, seed=seed)
        return [*loader, *loader]

    assert all_same(epochs(1), epochs(1))
    assert not all_same(epochs(1), epochs(2))
    assert not all_same(epochs(1)[:4], epochs(1)[4:])
    assert torch.equal(before, torch.get_rng_state())


def test_workers_build_the_same_batches() -> None:
    one, two = (ClusterLoader(undirected_graph(), 4, batch_size=2, num_workers=n) for n in (0, 1))
    assert all_same(list(one), list(two))


def test_batches_that_come_back_are_kept_until_somebody_writes_into_them() -> None:
    loader = ClusterLoader(undirected_graph(), 4)
    first, second = list(loader), list(loader)
    assert all(a.x.data_ptr() == b.x.data_ptr() for a, b in zip(first, second, strict=True))
    assert all(a is not b for a, b in zip(first, second, strict=True))
    expected = first[0].x.clone()
    second[0].x.zero_()
    second[1].y = None
    third = list(loader)
    assert torch.equal(third[0].x, expected)
    assert third[1].y is not None
    assert third[1].x.data_ptr() == first[1].x.data_ptr()


def test_batches_that_are_drawn_anew_are_not_kept() -> None:
    loader = ClusterLoader(undirected_graph(), 8, batch_size=2, shuffle=True)
    for _ in range(3):
        list(loader)
    assert not loader._kept


def test_batches_made_in_inference_can_be_trained_on() -> None:
    loader = ClusterLoader(undirected_graph(), 4)
    with torch.inference_mode():
        list(loader)
    assert not any(batch.x.is_inference() for batch in loader)


# Sampled neighbours ##################################################################################################


def test_members_are_drawn_from_each_group() -> None:
    sizes = torch.tensor([0, 3, 1, 0, 5, 2])
    group = torch.arange(6).repeat_interleave(sizes)
    for count in (1, 2, 3, 9):
        drawn = draw_from_groups(group, count, generator())
        assert torch.equal(torch.bincount(group[drawn], minlength=6), sizes.clamp(max=count))
    assert draw_from_groups(group[:0], 3).shape == (0,)


def test_all_members_are_equally_likely_and_pairs_too() -> None:
    groups, size, count = 20_000, 5, 2
    group = torch.arange(groups).repeat_interleave(size)
    drawn = draw_from_groups(group, count, generator()).view(groups, size).double()
    # Standard deviations: 0.0035 and 0.0021.
    torch.testing.assert_close(drawn.mean(0), torch.full((size,), count / size).double(), rtol=0, atol=0.015)
    both = (drawn[:, :, None] * drawn[:, None, :]).mean(0)
    apart = ~torch.eye(size, dtype=torch.bool)
    torch.testing.assert_close(both[apart], torch.full((20,), 0.1).double(), rtol=0, atol=0.01)


def hops_by_hand(data: Data, nodes: list[int], hops: int) -> tuple[list[int], list[int]]:
    """All nodes at most so many hops away, and all edges into those that are nearer."""
    edges = pairs(data.edge_index)
    near: set[int] = set()
    seen = set(nodes)
    for _ in range(hops):
        near = set(seen)
        seen |= {source for source, target in edges if target in near}
    return sorted(seen), [e for e, (_, target) in enumerate(edges) if target in near]


@each_graph
@pytest.mark.parametrize("hops", [1, 2, 9])
def test_all_neighbours_are_those_of_plain_python(name: str, hops: int) -> None:
    data = GRAPHS[name]
    for nodes in ([4], [30, 0, 17, 5], [32, 31]):
        found = Subgraphs(data).sample(torch.tensor(nodes), [-1] * hops)
        check_subgraph(found, data)
        assert found.n_id[: found.batch_size].tolist() == nodes
        expected_nodes, expected_edges = hops_by_hand(data, nodes, hops)
        assert sorted(found.n_id.tolist()) == expected_nodes
        assert sorted(found.e_id.tolist()) == expected_edges


@each_graph
@pytest.mark.parametrize("fan_out", [[3, 2], [2, -1], [-1, 1, 2]], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_fan_outs_are_respected(name: str, fan_out: list[int], seed: int) -> None:
    data, nodes = GRAPHS[name], torch.tensor([7, 1, 28])
    found = Subgraphs(data).sample(nodes, fan_out, generator(seed))
    check_subgraph(found, data)  # so all edges are real ones, and none is there twice
    assert torch.equal(found.n_id[:3], nodes)
    # Hop by hop: the nodes met so far, each with as many edges into it as it may have.
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    source, target = data.edge_index[:, found.e_id]
    met, frontier = set(nodes.tolist()), set(nodes.tolist())
    for count in fan_out:
        for node in frontier:
            wanted = int(degree[node]) if count == -1 else min(count, int(degree[node]))
            assert int((target == node).sum()) == wanted
        frontier = {int(s) for s, t in zip(source, target, strict=True) if int(t) in frontier} - met
        met |= frontier
    assert set(found.n_id.tolist()) == met
    assert not frontier & set(target.tolist()), "the last hop has no edges into it"


@each_graph
def test_a_large_fan_out_takes_all(name: str) -> None:
    subgraphs, nodes = Subgraphs(GRAPHS[name]), torch.tensor([3, 9])
    assert same(subgraphs.sample(nodes, [99, 99]), subgraphs.sample(nodes, [-1, -1]))


def test_the_first_fan_out_is_that_of_the_nodes_asked_for() -> None:
    # A tree: 0 has the children 1, 2, 3, each of which has three of its own.
    tree = torch.tensor([list(range(1, 13)), [0, 0, 0, *[1] * 3, *[2] * 3, *[3] * 3]])
    found = Subgraphs(tree).sample(torch.tensor([0]), [1, 3])
    assert found.num_nodes == 1 + 1 + 3
    found = Subgraphs(tree).sample(torch.tensor([0]), [3, 1])
    assert found.num_nodes == 1 + 3 + 3


def test_samples_are_reproducible_whatever_the_global_state() -> None:
    subgraphs, nodes = Subgraphs(undirected_graph()), torch.arange(10)
    first = subgraphs.sample(nodes, [2, 2], generator(5))
    before = torch.get_rng_state()
    assert same(first, subgraphs.sample(nodes, [2, 2], generator(5)))
    assert torch.equal(before, torch.get_rng_state())
    assert not same(first, subgraphs.sample(nodes, [2, 2], generator(6)))


def test_every_node_is_a_seed_once_an_epoch() -> None:
    data = undirected_graph()
    nodes = data.train_mask.nonzero().squeeze(1)
    loader = SampleLoader(data, nodes, [2, 2], num_batches=4)
    assert len(loader) == 4
    epochs = [list(loader) for _ in range(2)]
    for epoch in epochs:
        seeds = [batch.n_id[: batch.batch_size] for batch in epoch]
        assert torch.equal(torch.cat(seeds).sort().values, nodes)
        assert {len(chunk) for chunk in seeds} <= {nodes.numel() // 4, nodes.numel() // 4 + 1}
        for batch in epoch:
            check_subgraph(batch, data)
    assert not all_same(*epochs)


def test_sampled_epochs_are_reproducible_and_leave_the_global_state_alone() -> None:
    data, before = undirected_graph(), torch.get_rng_state()

    def epochs(seed: int, num_workers: int = 0) -> list[Data]:
        loader = SampleLoader(data, torch.arange(40), [2, 1], 3, seed=seed, num_workers=num_workers)
        return [*loader, *loader]

    assert all_same(epochs(1), epochs(1))
    assert all_same(epochs(1), epochs(1, num_workers=1))
    assert not all_same(epochs(1), epochs(2))
    assert torch.equal(before, torch.get_rng_state())


def test_there_are_no_empty_batches() -> None:
    data = undirected_graph()
    loader = SampleLoader(data, torch.tensor([3, 5]), [1], num_batches=10)
    assert len(loader) == 2
    assert sorted(batch.batch_size for batch in loader) == [1, 1]
    assert list(SampleLoader(data, torch.empty(0, dtype=torch.long), [1], num_batches=10)) == []


# Whole neighbourhoods ################################################################################################


def test_a_whole_neighbourhood_by_hand() -> None:
    found = whole_neighbourhood(SMALL, torch.tensor([4]), hops=2)
    assert found.n_id.tolist() == [4, 3, 2]
    assert found.batch_size == 1
    assert found.e_id.tolist() == [6, 7, 4]
    assert pairs(found.edge_index) == [(1, 0), (1, 0), (2, 1)]


@each_graph
def test_a_graph_may_be_given_in_three_ways(name: str) -> None:
    data, nodes = GRAPHS[name], torch.tensor([8, 2])
    found = whole_neighbourhood(data, nodes, 2)
    check_subgraph(found, data)
    assert same(found, whole_neighbourhood(Subgraphs(data), nodes, 2))
    bare = whole_neighbourhood(data.edge_index, nodes, 2)
    assert torch.equal(bare.edge_index, found.edge_index)
    assert torch.equal(bare.n_id, found.n_id)


@each_graph
@pytest.mark.parametrize("model", [GraphSAGE, GIN])
def test_a_model_computes_the_same_on_a_whole_neighbourhood(name: str, model: Any) -> None:
    data, nodes = GRAPHS[name], torch.tensor([11, 0, 25])
    made = model(CHANNELS, 8, num_layers=3, out_channels=4)
    expected = whole(made, data)[nodes]
    torch.testing.assert_close(whole(made, whole_neighbourhood(data, nodes, hops=3))[:3], expected)
    assert not torch.allclose(whole(made, whole_neighbourhood(data, nodes, hops=1))[:3], expected)


# Refusals ############################################################################################################


@pytest.mark.parametrize("hops", [0, 1.5, True])
def test_wrong_hops_are_refused(hops: Any) -> None:
    with pytest.raises(gas.InputError, match="hops must be an integer of at least 1"):
        whole_neighbourhood(SMALL, torch.tensor([0]), hops)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (torch.tensor([0, 0]), "each node once"),
        (torch.tensor([5]), "indices from 0 to 4"),
        (torch.tensor([-1]), "indices from 0 to 4"),
        (torch.tensor([0.0]), "int64"),
        ([0], "must be a Tensor"),
    ],
)
def test_wrong_nodes_are_refused(nodes: Any, message: str) -> None:
    subgraphs = Subgraphs(SMALL)
    with pytest.raises(gas.InputError, match=message):
        subgraphs.induced(nodes)
    with pytest.raises(gas.InputError, match=message):
        subgraphs.sample(nodes, [2])
    with pytest.raises(gas.InputError, match=message):
        SampleLoader(Data(edge_index=SMALL, num_nodes=5), nodes, [2], 1)


@pytest.mark.parametrize("fan_out", [[], [0], [3, -2], [1.5], [True], "10", 10])
def test_wrong_fan_outs_are_refused(fan_out: Any) -> None:
    with pytest.raises(gas.InputError, match="fan_out must be a list of integers"):
        Subgraphs(SMALL).sample(torch.tensor([0]), fan_out)


@pytest.mark.parametrize("graph", [HeteroData(), None, [0, 1]])
def test_anything_but_a_graph_is_refused(graph: Any) -> None:
    with pytest.raises(gas.InputError, match=r"must be a Subgraphs, or a Data, or a Tensor"):
        whole_neighbourhood(graph, torch.tensor([0]), 1)


@pytest.mark.parametrize("edges", [torch.empty(2, 0, dtype=torch.long), torch.ones(3, 4).long(), torch.ones(2, 2)])
def test_wrong_edges_are_refused(edges: Tensor) -> None:
    with pytest.raises(gas.InputError, match=r"edge_index|at least one node"):
        Subgraphs(edges)


@pytest.mark.parametrize("options", [{"num_batches": 0}, {"num_batches": 1.5}, {"num_batches": 1, "num_workers": -1}])
def test_wrong_options_of_sample_loaders_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gas.InputError, match=r"num_[a-z]* must be an integer"):
        SampleLoader(undirected_graph(), torch.arange(3), [1], **options)


def test_cluster_loaders_refuse_what_halo_loaders_refuse() -> None:
    data = with_attributes(SMALL, 5)
    wrong: list[dict[str, Any]] = [{}, {"num_parts": 6}, {"num_parts": 2, "batch_size": 3}]
    for options in (*wrong, {"num_parts": 2, "num_workers": -1}):
        with pytest.raises(gas.InputError, match=r"part|num_workers"):
            ClusterLoader(data, **options)
