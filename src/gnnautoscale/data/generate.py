"""Generated graphs: the two stochastic block model data sets of the paper, and large graphs for scale tests.

The same arguments always give the same graph: every function has its own ``numpy`` generator.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import coalesce  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.errors import InputError

_Ints = npt.NDArray[np.int64]
_Pattern = tuple[npt.NDArray[np.bool_], _Ints]  # adjacency [n, n] and features [n]

SMALLEST, LARGEST = 5, 34  # nodes of a block or a pattern
NUM_PATTERNS = 100
ARC = 10  # nodes of an arc
NEARBY = 100  # places between nodes that are near
_TRIES = 16  # to find a node of one of two signs
STREET = 5  # nodes next door in districts are at most this many times `degree` places away
REACH = 8  # ring neighbours are at most this many times `degree` places away


@checked(seed={"least": 0})
def cluster(num_graphs: int, *, seed: int = 0) -> Data:
    """CLUSTER: find the blocks of a graph, given one node of each.

    A graph has 6 blocks of 5 to 34 nodes. Two nodes are joined with probability 0.55 within a block and 0.25 across
    blocks. One node of each block has the block's number as its feature; all others have 0.

    Returns:
        ``num_graphs`` graphs side by side as one: ``x`` [N, 7] one-hot, ``edge_index`` [2, E] in both directions, ``y``
        [N] in 0..5, and ``graph_id`` [N], the small graph of each node.

    Example:
        >>> data = cluster(10)
        >>> data.x.size(1), int(data.y.max()), int(data.graph_id.max())
        (7, 5, 9)
    """
    _at_least("num_graphs", num_graphs, 1)
    rng = np.random.default_rng(seed)

    def draw() -> _Small:
        sizes = _sizes(rng, 6)
        block = np.repeat(np.arange(6), sizes)
        feature = np.zeros(block.size, dtype=np.int64)
        feature[np.cumsum(sizes) - sizes + rng.integers(0, sizes)] = np.arange(1, 7)
        order = rng.permutation(block.size)
        block, feature = block[order], feature[order]
        upper = np.triu(_blocks(rng, block, inside=0.55, across=0.25), 1)
        return _Small(upper | upper.T, feature, block)

    return _join([draw() for _ in range(num_graphs)], num_features=7)


@checked(seed={"least": 0}, pattern_seed={"least": 0})
def pattern(num_graphs: int, *, seed: int = 0, pattern_seed: int = 0) -> Data:
    """PATTERN: find the nodes of a planted pattern.

    There are 100 patterns, random graphs of 5 to 34 nodes (edge probability 0.5) with features in {0, 1, 2}; graph i
    holds pattern i mod 100. Around it are 5 blocks of 5 to 34 nodes with random features, joined with probability 0.5
    within a block and 0.35 across blocks. A pattern node and a block node are joined with probability 0.5. Training,
    validation and test graphs must share ``pattern_seed``, the seed of the patterns.

    Returns:
        ``num_graphs`` graphs side by side as one: ``x`` [N, 3] one-hot, ``edge_index`` [2, E] in both directions, ``y``
        [N] (1 on pattern nodes, else 0), and ``graph_id`` [N], the small graph of each node.

    Example:
        >>> data = pattern(10)
        >>> data.x.size(1), int(data.y.max())
        (3, 1)
    """
    _at_least("num_graphs", num_graphs, 1)
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng((pattern_seed, NUM_PATTERNS))  # independent of rng
    patterns = [(fixed.random((n, n)) < 0.5, fixed.integers(0, 3, n)) for n in _sizes(fixed, NUM_PATTERNS)]

    def draw(planted: _Pattern) -> _Small:
        inner, inner_feature = planted
        sizes = _sizes(rng, 5)
        block = np.repeat(np.arange(5), sizes)
        n, m = block.size, inner_feature.size
        adjacency = np.empty((n + m, n + m), dtype=np.bool_)
        adjacency[:n, :n] = _blocks(rng, block, inside=0.5, across=0.35)
        adjacency[:n, n:] = rng.random((n, m), dtype=np.float32) < 0.5
        adjacency[n:, n:] = inner
        upper = np.triu(adjacency, 1)
        feature = np.concatenate([rng.integers(0, 3, n), inner_feature])
        label = (np.arange(n + m) >= n).astype(np.int64)
        order = rng.permutation(n + m)
        return _Small((upper | upper.T)[order][:, order], feature[order], label[order])

    return _join([draw(patterns[i % NUM_PATTERNS]) for i in range(num_graphs)], num_features=3)


@checked(degree={"least": 0}, homophily={"least": 0, "most": 1}, seed={"least": 0})
def communities(
    num_nodes: int, *, degree: float, num_features: int, num_classes: int, homophily: float = 0.8, seed: int = 0
) -> Data:
    r"""A random graph of any size that partitions well, drawn in time and memory :math:`\mathcal{O}(N F + E)`.

    Each class has its nodes on a ring. A share ``homophily`` of the edges joins a node to one at most ``8 * degree``
    places further along its ring, so an arc of a ring makes a good part; the other edges join any two nodes. A node's
    feature is the centroid of its class plus noise: one node alone leaves the class uncertain, an average over
    neighbours does not. Nodes are numbered at random.

    Args:
        num_nodes: N.
        degree: Expected mean number of neighbours.
        num_features: F.
        num_classes: Number of classes; their sizes differ by at most one node.
        homophily: Share of edges drawn on a ring, between 0 and 1.
        seed: Seed of the graph.

    Returns:
        ``x`` [N, F] float32, ``edge_index`` [2, E] in both directions, without duplicates and self-loops, ``y`` [N],
        and ``train_mask``, ``val_mask``, ``test_mask`` [N] of 50, 25 and 25% of the nodes.

    Example:
        >>> data = communities(1000, degree=10, num_features=16, num_classes=4)
        >>> data.num_nodes, data.is_undirected(), data.has_self_loops(), round(data.num_edges / 1000)
        (1000, True, False, 10)
    """
    _at_least("num_features", num_features, 1)
    _at_least("num_classes", num_classes, 1)
    _at_least("num_nodes", num_nodes, 3 * num_classes)
    if not 0 <= homophily <= 1:
        raise InputError("homophily must lie between 0 and 1", got=str(homophily), fix="It is the share of ring edges.")
    if not 0 <= degree < num_nodes:
        fix = "It is the mean number of neighbours."
        raise InputError("degree must lie between 0 and num_nodes", got=str(degree), fix=fix)
    rng = np.random.default_rng(seed)
    class_of = np.arange(num_nodes) * num_classes // num_nodes  # by place: one class after the other
    sizes = np.bincount(class_of)
    reach = max(1, min(math.ceil(REACH * degree), (int(sizes.min()) - 1) // 2))
    edges = num_nodes * degree / 2
    near = _num_draws(homophily * edges, num_nodes * reach)
    far = _num_draws((1 - homophily) * edges, num_nodes * (num_nodes - 1) // 2)

    source = rng.integers(0, num_nodes, near + far)
    target = np.empty_like(source)
    ring, first = class_of[source[:near]], np.cumsum(sizes) - sizes
    step = rng.integers(1, reach + 1, near)
    target[:near] = first[ring] + (source[:near] - first[ring] + step) % sizes[ring]
    target[near:] = rng.integers(0, num_nodes, far)
    del ring, step
    key = _distinct(source, target, num_nodes)
    del source, target  # large
    return _on_places(rng, class_of, key, num_features, spread=3)


@checked(seed={"least": 0})
def districts(num_nodes: int, *, degree: int = 8, num_features: int = 32, num_classes: int = 8, seed: int = 0) -> Data:
    """DISTRICTS: people who differ from those next door and are like friends far away.

    The nodes lie on a ring. Five of eight edges of a node lead to nodes at most ``5 * degree`` places away: nearly half
    of these to one of the next or the previous class, the others to any. The other three of eight lead to nodes of its
    class, anywhere. So stretches of the ring make good parts, but the edges between parts say most about a class, and
    those inside say something else: who leaves edges out learns from a wrong picture. Features are the centroid of the
    class plus noise, the more the larger the degree. Nodes are numbered at random.

    Returns:
        ``x`` [N, F] float32, ``edge_index`` [2, E] in both directions, without duplicates and self-loops, ``y`` [N],
        and ``train_mask``, ``val_mask``, ``test_mask`` [N] of 50, 25 and 25% of the nodes.

    Example:
        >>> data = districts(1000)
        >>> data.num_nodes, data.is_undirected(), data.has_self_loops(), int(data.y.max())
        (1000, True, False, 7)
    """
    _at_least("num_features", num_features, 1)
    _at_least("num_classes", num_classes, 3)
    _at_least("degree", degree, 1)
    street = STREET * degree
    _at_least("num_nodes", num_nodes, 4 * street + num_classes)
    rng = np.random.default_rng(seed)
    class_at = rng.permutation(np.arange(num_nodes) % num_classes)
    pairs = num_nodes * degree // 2
    source = np.arange(pairs) % num_nodes
    near, far = np.split(source, [5 * pairs // 8])

    # One of the next class if a few tries find one; or anyone.
    wanted = (class_at[near] + 1) % num_classes
    neighbour = (near + rng.integers(1, street + 1, near.size)) % num_nodes
    seeking = np.flatnonzero(rng.random(near.size) < 0.5)
    for _ in range(_TRIES):
        seeking = seeking[class_at[neighbour[seeking]] != wanted[seeking]]
        neighbour[seeking] = (near[seeking] + rng.integers(1, street + 1, seeking.size)) % num_nodes

    by_class, sizes = np.argsort(class_at, kind="stable"), np.bincount(class_at)
    first = np.cumsum(sizes) - sizes
    friend = by_class[first[class_at[far]] + rng.integers(0, sizes[class_at[far]])]
    key = _distinct(source, np.concatenate([neighbour, friend]), num_nodes)
    del source, near, far, wanted, neighbour, seeking, friend  # large
    return _on_places(rng, class_at, key, num_features, spread=2 * (8 / degree) ** 0.25)


@checked(seed={"least": 0})
def echoes(num_graphs: int, *, num_nodes: int = 50_000, seed: int = 0) -> Data:
    """ECHOES: large graphs whose class is whether far-apart places agree.

    The nodes of a graph lie on a ring, in arcs of ten. Each arc has a sign, + or -, half of them each; a node's feature
    is the sign of its arc plus noise. Edges join a node to the next two on the ring, and to one anywhere on it. In the
    graphs of class 1, these long edges join equal signs in 65% of the cases, in the others in 35%. Half of the nodes
    have one more edge to a node at most 100 places away, and these are the other way round: fewer, but those that are
    left when a graph is cut into parts and edges between parts are dropped.

    Returns:
        ``num_graphs`` graphs side by side as one: ``x`` [N, 2], the second column being 1, ``edge_index`` [2, E] in
        both directions, ``graph_id`` [N], and ``graph_y`` [G].

    Example:
        >>> data = echoes(4, num_nodes=1000)
        >>> data.graph_y, data.num_nodes, data.is_undirected()
        (tensor([0, 1, 0, 1]), 4000, True)
    """
    _at_least("num_graphs", num_graphs, 1)
    _at_least("num_nodes", num_nodes, 4 * NEARBY)
    rng = np.random.default_rng(seed)
    ring = np.arange(num_nodes)
    along = np.concatenate([np.stack([ring, (ring + step) % num_nodes]) for step in (1, 2)], axis=1)
    edges, features = [], []
    for number in range(num_graphs):
        positive = np.repeat(rng.permutation(-(-num_nodes // ARC)) % 2 == 0, ARC)[:num_nodes]
        agree = 0.65 if number % 2 else 0.35
        far = _partners(rng, positive, ring, num_nodes, agree)
        near = _partners(rng, positive, rng.permutation(ring)[: num_nodes // 2], NEARBY, 1 - agree)
        edges.append(np.concatenate([along, far, near], axis=1) + number * num_nodes)
        noise = rng.standard_normal(num_nodes, dtype=np.float32)
        features.append(np.where(positive, np.float32(1), np.float32(-1)) + noise)
    one_way = torch.from_numpy(np.concatenate(edges, axis=1))
    x = torch.from_numpy(np.concatenate(features))
    return Data(
        x=torch.stack([x, torch.ones_like(x)], dim=1),
        edge_index=coalesce(torch.cat([one_way, one_way.flip(0)], dim=1)),
        graph_id=torch.arange(num_graphs).repeat_interleave(num_nodes),
        graph_y=torch.arange(num_graphs) % 2,
    )


def _distinct(source: _Ints, target: _Ints, num_places: int) -> _Ints:
    """One number for each pair of different places, ascending."""
    key = np.minimum(source, target) * num_places + np.maximum(source, target)
    key = key[source != target]
    key.sort()
    found: _Ints = key[np.diff(key, prepend=-1) > 0]
    return found


def _on_places(rng: np.random.Generator, class_at: _Ints, key: _Ints, num_features: int, *, spread: float) -> Data:
    """A graph from the class at each place and distinct pairs: nodes are numbered at random, features are noisy.

    ``spread`` is how far the centroids of classes lie apart, where noise has variance 1.
    """
    num_nodes, num_classes = class_at.size, int(class_at.max()) + 1
    node_at = rng.permutation(num_nodes)
    edge_index = np.empty((2, 2 * key.size), dtype=np.int64)
    edge_index[0, : key.size] = edge_index[1, key.size :] = node_at[key // num_nodes]
    edge_index[1, : key.size] = edge_index[0, key.size :] = node_at[key % num_nodes]

    y = np.empty(num_nodes, dtype=np.int64)
    y[node_at] = class_at
    centroid = rng.standard_normal((num_classes, num_features), dtype=np.float32) * spread / math.sqrt(num_features)
    x = rng.standard_normal((num_nodes, num_features), dtype=np.float32)
    x += centroid.astype(np.float32)[y]
    quarter = rng.permutation(num_nodes) * 4 // num_nodes
    masks = {"train_mask": quarter < 2, "val_mask": quarter == 2, "test_mask": quarter == 3}
    arrays = {"x": x, "edge_index": edge_index, "y": y, **masks}
    return Data(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _partners(
    rng: np.random.Generator, positive: npt.NDArray[np.bool_], nodes: _Ints, reach: int, agree: float
) -> _Ints:
    """Draw a partner for some nodes of a ring, at most ``reach`` places ahead, that agrees in its sign or not."""
    wanted = positive[nodes] == (rng.random(nodes.size) < agree)
    places = (nodes + rng.integers(1, reach, (_TRIES, nodes.size))) % positive.size
    first = np.argmax(positive[places] == wanted, axis=0)
    return np.stack([nodes, places[first, np.arange(nodes.size)]])


class _Small:
    """A small graph, kept compact until all are joined: adjacency [n, n] becomes edges."""

    def __init__(self, adjacency: npt.NDArray[np.bool_], feature: _Ints, label: _Ints) -> None:
        self.edges = np.stack(np.nonzero(adjacency)).astype(np.uint8)  # n is at most 6 * 34 = 204
        self.feature, self.label = feature, label


def _join(graphs: list[_Small], *, num_features: int) -> Data:
    """Put the graphs side by side as one, with one-hot features."""
    nodes = np.array([graph.label.size for graph in graphs])
    edges = np.array([graph.edges.shape[1] for graph in graphs])
    edge_index = np.concatenate([graph.edges for graph in graphs], axis=1).astype(np.int64)
    edge_index += np.repeat(np.cumsum(nodes) - nodes, edges)
    feature = torch.from_numpy(np.concatenate([graph.feature for graph in graphs]))
    return Data(
        x=torch.nn.functional.one_hot(feature, num_features).float(),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(np.concatenate([graph.label for graph in graphs])),
        graph_id=torch.from_numpy(np.repeat(np.arange(len(graphs)), nodes)),
    )


def _sizes(rng: np.random.Generator, count: int) -> _Ints:
    return rng.integers(SMALLEST, LARGEST + 1, count)


def _blocks(rng: np.random.Generator, block: _Ints, *, inside: float, across: float) -> npt.NDArray[np.bool_]:
    """Draw a directed block model [n, n]; its upper triangle is an undirected one."""
    chance = np.where(block[:, None] == block, np.float32(inside), np.float32(across))
    return rng.random(chance.shape, dtype=np.float32) < chance


def _num_draws(wanted: float, possible: int) -> int:
    """Number of draws, with repetition, that hit ``wanted`` different ones of ``possible`` pairs on average."""
    if wanted >= possible:
        raise InputError(
            "degree must leave room for different neighbours",
            got=f"a degree that needs {wanted:.0f} edges among {possible} pairs",
            fix="Ask for a smaller degree, more nodes or fewer classes.",
        )
    return round(-math.log1p(-wanted / possible) * possible)


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be an integer, at least {least}", got=repr(value), fix="Choose a larger one.")
