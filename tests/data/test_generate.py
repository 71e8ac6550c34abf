from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import homophily  # type: ignore[import-untyped]

from gnnautoscale.data.generate import ARC, NEARBY, STREET, cluster, communities, districts, echoes, pattern
from gnnautoscale.errors import InputError

SMALLEST, LARGEST = 5, 34


def assert_simple(data: Data) -> None:
    (row, col), n = data.edge_index, data.num_nodes
    assert bool((row != col).all())
    forward, backward = (row * n + col).sort().values, (col * n + row).sort().values
    assert torch.equal(forward, backward)
    assert bool((forward.diff() > 0).all())


def per_graph(values: Tensor, graph_id: Tensor) -> Tensor:
    return torch.zeros(int(graph_id.max()) + 1).index_add_(0, graph_id, values.float())


def assert_joined(data: Data, num_graphs: int) -> None:
    assert_simple(data)
    assert data.graph_id.unique().tolist() == list(range(num_graphs))
    assert bool((data.graph_id.diff() >= 0).all())
    row, col = data.edge_index
    assert torch.equal(data.graph_id[row], data.graph_id[col])
    assert torch.equal(data.x.sum(dim=1), torch.ones(data.num_nodes))
    assert data.x.dtype == torch.float32
    assert data.y.dtype == data.graph_id.dtype == torch.int64


def test_cluster_marks_one_node_of_each_block() -> None:
    data = cluster(20)
    assert_joined(data, 20)
    marker = data.x.argmax(dim=1)
    assert bool((data.y[marker > 0] + 1 == marker[marker > 0]).all())
    counts = torch.zeros(20, 7).index_put_((data.graph_id, marker), torch.ones(()), accumulate=True)
    assert bool((counts[:, 1:] == 1).all())
    sizes = torch.zeros(20, 6).index_put_((data.graph_id, data.y), torch.ones(()), accumulate=True)
    assert sizes.min() >= SMALLEST
    assert sizes.max() <= LARGEST
    assert bool((data.y.diff() < 0).any())  # permuted


def test_cluster_follows_the_recipe() -> None:
    data = cluster(1000, seed=1)
    assert data.num_nodes / 1000 == pytest.approx(117, rel=0.02)
    assert data.num_edges / 1000 == pytest.approx(4300, rel=0.04)
    row, col = data.edge_index
    same = data.y[row] == data.y[col]
    sizes = torch.zeros(1000, 6).index_put_((data.graph_id, data.y), torch.ones(()), accumulate=True)
    inside = (sizes * (sizes - 1)).sum()
    across = (sizes.sum(dim=1) ** 2).sum() - (sizes**2).sum()
    assert float(same.sum() / inside) == pytest.approx(0.55, abs=0.005)
    assert float((~same).sum() / across) == pytest.approx(0.25, abs=0.005)


def test_pattern_follows_the_recipe() -> None:
    data = pattern(1000, seed=1)
    assert_joined(data, 1000)
    assert data.num_nodes / 1000 == pytest.approx(118, rel=0.02)
    assert data.num_edges / 1000 == pytest.approx(6000, rel=0.04)
    row, col = data.edge_index
    planted = per_graph(data.y, data.graph_id)
    base = per_graph(1 - data.y, data.graph_id)
    assert planted.min() >= SMALLEST
    assert planted.max() <= LARGEST
    between = ((data.y[row] == 1) & (data.y[col] == 0)).sum()
    assert float(between / (planted * base).sum()) == pytest.approx(0.5, abs=0.005)
    assert data.x[data.y == 0].mean(dim=0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)


def planted_shapes(data: Data) -> set[tuple[int, ...]]:
    """Per graph: size, features and edges of its pattern, as far as they do not depend on node order."""
    row, col = data.edge_index
    inner = (data.y[row] == 1) & (data.y[col] == 1)
    edges = per_graph(inner, data.graph_id[row])
    features = [per_graph(data.x[:, i] * data.y, data.graph_id) for i in range(3)]
    return {tuple(shape) for shape in torch.stack([edges, *features], dim=1).long().tolist()}


def test_patterns_depend_on_their_own_seed_only() -> None:
    shapes = planted_shapes(pattern(200, seed=1))
    assert len(shapes) <= 100
    assert planted_shapes(pattern(100, seed=2)) == shapes
    assert planted_shapes(pattern(100, seed=1, pattern_seed=1)) != shapes


def test_communities_are_what_was_asked_for() -> None:
    data = communities(6000, degree=12, num_features=8, num_classes=5, homophily=0.9)
    assert_simple(data)
    assert data.x.shape == (6000, 8)
    assert data.x.dtype == torch.float32
    assert data.num_edges / 6000 == pytest.approx(12, rel=0.03)
    assert data.y.bincount().tolist() == [1200] * 5
    assert homophily(data.edge_index, data.y) == pytest.approx(0.9 + 0.1 / 5, abs=0.01)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(dim=1).tolist() == [3000, 1500, 1500]
    assert bool((masks.sum(dim=0) == 1).all())


def test_neighbours_tell_the_class_better_than_features() -> None:
    data = communities(4000, degree=20, num_features=32, num_classes=10)
    row, col = data.edge_index
    around = data.x.clone().index_add_(0, col, data.x[row]) / (1 + col.bincount(minlength=4000))[:, None]

    def accuracy(x: Tensor) -> float:
        centre = torch.stack([x[data.y == i].mean(dim=0) for i in range(10)])
        return float((torch.cdist(x, centre).argmin(dim=1) == data.y).float().mean())

    assert 0.2 < accuracy(data.x) < 0.95
    assert accuracy(around) > 0.98


def test_communities_cut_well() -> None:
    pymetis = pytest.importorskip("pymetis")
    data = communities(2000, degree=10, num_features=1, num_classes=2, homophily=1.0)
    row, col = data.edge_index[:, data.edge_index[0].argsort(stable=True)].numpy()
    starts = np.concatenate([[0], np.bincount(row, minlength=2000).cumsum()])
    cut, _ = pymetis.part_graph(8, pymetis.CSRAdjacency(starts, col))
    assert 2 * cut / data.num_edges < 0.35  # 0.875 for random parts


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: cluster(3, seed=seed),
        lambda seed: pattern(3, seed=seed),
        lambda seed: communities(200, degree=4, num_features=2, num_classes=2, seed=seed),
        lambda seed: districts(200, seed=seed),
    ],
)
def test_seeds(draw: Callable[[int], Data]) -> None:
    state = torch.get_rng_state()
    first = draw(1).to_dict()
    torch.manual_seed(7)
    again, other = draw(1).to_dict(), draw(2).to_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["edge_index"], other["edge_index"])
    torch.set_rng_state(state)


def test_refusals() -> None:
    with pytest.raises(InputError, match="num_graphs must be an integer, at least 1, but got 0"):
        cluster(0)
    with pytest.raises(InputError, match="num_graphs"):
        pattern(-1)
    with pytest.raises(InputError, match="homophily must be a number of at least 0 and of at most 1"):
        communities(100, degree=3, num_features=1, num_classes=2, homophily=1.5)
    with pytest.raises(InputError, match="degree must"):
        communities(100, degree=float("nan"), num_features=1, num_classes=2)
    with pytest.raises(InputError, match="room for different neighbours"):
        communities(100, degree=60, num_features=1, num_classes=10)
    with pytest.raises(InputError, match="num_nodes"):
        communities(5, degree=1, num_features=1, num_classes=2)


def test_echoes_follow_the_recipe() -> None:
    nodes = 4000
    data = echoes(4, num_nodes=nodes, seed=1)
    assert_simple(data)
    assert torch.equal(data.graph_id, torch.arange(4).repeat_interleave(nodes))
    assert data.graph_y.tolist() == [0, 1, 0, 1]
    means = data.x[:, 0].view(4, -1, ARC).mean(dim=2)
    sign = means.repeat_interleave(ARC, dim=1).flatten() > 0  # right for nearly all arcs
    assert per_graph(sign, data.graph_id).div(nodes).sub(0.5).abs().max() < 0.01
    row, col = data.edge_index
    assert torch.equal(data.graph_id[row], data.graph_id[col])
    apart = torch.minimum((row - col) % nodes, (col - row) % nodes)
    same, kind = (sign[row] == sign[col]).double(), data.graph_y[data.graph_id[row]]
    for number, agree in enumerate((0.35, 0.65)):
        far, near = ((kind == number) & each for each in (apart > NEARBY, (apart > 2) & (apart <= NEARBY)))
        assert float(same[far].mean()) == pytest.approx(agree, abs=0.03)
        # Of those nearby, a few are in the same arc, and some are long edges.
        assert float(same[near].mean()) == pytest.approx(1 - agree, abs=0.06)
        assert int(far.sum()) > 3 * nodes


def test_echoes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="num_nodes must be an integer, at least 400"):
        echoes(2, num_nodes=100)
    with pytest.raises(InputError, match="num_graphs"):
        echoes(0)


def test_districts_follow_the_recipe() -> None:
    nodes, classes = 20_000, 8
    data = districts(nodes, num_features=4, num_classes=classes, seed=1)
    assert_simple(data)
    assert data.y.bincount().tolist() == [nodes // classes] * classes
    assert data.num_edges / nodes == pytest.approx(8, abs=0.4)  # some pairs are drawn twice
    difference = (data.y[data.edge_index[0]] - data.y[data.edge_index[1]]) % classes
    share = difference.bincount(minlength=classes) / data.num_edges
    # 3 of 8 edges join equals; of the other 5, nearly half are one class apart, without those drawn twice.
    assert float(share[0]) == pytest.approx((3 + 2.5 / classes) / 8, abs=0.03)
    assert float(share[1] + share[-1]) == pytest.approx(0.33, abs=0.03)
    assert share[2:-1].tolist() == pytest.approx([2.6 / classes / 8] * (classes - 3), abs=0.02)
    with pytest.raises(InputError, match=f"num_nodes must be an integer, at least {4 * 8 * STREET + classes}"):
        districts(100)
