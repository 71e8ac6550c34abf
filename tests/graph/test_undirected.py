"""The simple undirected graph: the same whatever the form of the edges, in pieces of any size."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gnnautoscale.graph import undirected as module
from gnnautoscale.graph.undirected import UndirectedGraph, is_symmetric, undirected

NODES = 40


@pytest.fixture(params=[2**22, 7])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many edges are looked at together."""
    monkeypatch.setattr(module, "_CHUNK", request.param)
    return int(request.param)


def edges_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(NODES, (2, count), generator=torch.Generator().manual_seed(seed))


def simple(edges: Tensor) -> Tensor:
    """The same pairs in both directions, sorted, without loops and duplicates, by brute force."""
    pairs = {(u, v) for u, v in edges.t().tolist() if u != v}
    return torch.tensor(sorted(pairs | {(v, u) for u, v in pairs})).t()


def lists(graph: UndirectedGraph) -> list[list[int]]:
    return [graph.neighbors[a:b].tolist() for a, b in pairwise(graph.starts.tolist())]


def expected(edges: Tensor) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(NODES)]
    for u, v in simple(edges).t().tolist():
        found[u].append(v)
    return found


@pytest.mark.parametrize(
    "form",
    [
        "directed",
        "sorted",
        "by target",
        "shuffled",
        "one way",
        "duplicates",
        "one duplicate",
        "loops",
        "one edge missing",
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_form_gives_the_same_graph(form: str, dtype: torch.dtype, piece: int) -> None:
    edges = edges_of(150)
    both = simple(edges)
    shuffle = torch.randperm(both.size(1), generator=torch.Generator().manual_seed(1))
    given = {
        "directed": edges,
        "sorted": both,
        "by target": both.flip(0),
        "shuffled": both[:, shuffle],
        "one way": both[:, both[0] < both[1]],
        "duplicates": torch.cat([both, both], dim=1),
        "one duplicate": torch.cat([both, both[:, -1:]], dim=1),
        "loops": torch.cat([torch.arange(NODES).expand(2, -1), both], dim=1),
        "one edge missing": both[:, 1:],
    }[form]
    graph = undirected(given.to(dtype), NODES)
    assert lists(graph) == expected(edges)
    assert graph.weight is None


def test_a_finished_graph_is_not_copied() -> None:
    edges = simple(edges_of(150))
    assert undirected(edges, NODES).neighbors.data_ptr() == edges[1].data_ptr()


def test_weights_between_two_nodes_add_up(piece: int) -> None:
    edges = edges_of(300)
    weight = torch.rand(300, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    graph = undirected(edges, NODES, weight)
    sums = torch.zeros(NODES, NODES, dtype=torch.float64)
    for u, v, value in zip(*edges.tolist(), (weight / weight.max()).tolist(), strict=True):
        sums[u, v] += value
        sums[v, u] += value
    assert lists(graph) == expected(edges)
    assert graph.weight is not None
    torch.testing.assert_close(graph.weight, sums[tuple(simple(edges))])


def test_equal_weights_and_weights_of_loops_are_none() -> None:
    assert undirected(simple(edges_of(50)), NODES, torch.full((simple(edges_of(50)).size(1),), 0.3)).weight is None
    loops = undirected(torch.tensor([[3, 5], [3, 5]]), NODES, torch.tensor([1.0, 2.0]))
    assert (loops.neighbors.numel(), loops.weight) == (0, None)
    assert loops.starts.tolist() == [0] * (NODES + 1)


def test_symmetry_in_pieces(piece: int) -> None:
    edges = simple(edges_of(150))
    shuffle = torch.randperm(edges.size(1), generator=torch.Generator().manual_seed(0))
    assert is_symmetric(edges, NODES)
    assert is_symmetric(edges.int()[:, shuffle], NODES)
    assert not is_symmetric(edges[:, 1:], NODES)
    assert not is_symmetric(torch.cat([edges, edges[:, :1]], dim=1), NODES)  # one direction twice
