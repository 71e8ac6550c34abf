"""Example graphs, and on each of them the classes of every method beside Weisfeiler-Lehman colours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.data import generate
from gnnautoscale.experiments.expressiveness import outputs
from gnnautoscale.experiments.expressiveness.colours import (
    Comparison,
    compare_classes,
    nearest_colours,
    row_classes,
    wl_colours,
)
from gnnautoscale.graph import ClusterLoader, HaloLoader, Partitioner, SampleLoader


@dataclass(frozen=True)
class Example:
    """A graph with one-hot colours as ``x`` [num_nodes, num_colours], and how to run a model on it.

    The model has as many layers as Weisfeiler-Lehman has rounds.
    """

    name: str
    data: Data
    layers: int
    num_parts: int
    fan_out: int = 1

    @property
    def colours(self) -> Tensor:
        """Weisfeiler-Lehman colours after one round per layer, ``[num_nodes]``."""
        start = row_classes(self.data.x)
        return wl_colours(self.data.edge_index, self.data.num_nodes, colours=start, rounds=self.layers)


def examples() -> list[Example]:
    """The graphs of ``gas expressiveness``, small ones first."""
    ring = torch.arange(24)
    marked = _graph(torch.stack([ring, ring.roll(-1)]), (ring == 0).long())
    cora = generate.communities(2708, degree=3.9, num_features=1, num_classes=7)
    cora = Data(x=one_hot(cora.y).double(), edge_index=cora.edge_index)
    return [
        Example("counterexample", counterexample(), layers=1, num_parts=2),
        Example("two stars", two_stars(), layers=1, num_parts=2),
        Example("hexagon and triangles", hexagon_and_triangles(), layers=3, num_parts=4),
        Example("ring, one node marked", marked, layers=4, num_parts=4),
        Example("random", random_graph(100, pairs=200, colours=3), layers=2, num_parts=4, fan_out=2),
        Example("as large as Cora", cora, layers=2, num_parts=10, fan_out=2),
    ]


def counterexample() -> Data:
    """A graph for the paper's Proposition: nodes 0 and 3 both have the neighbours 1 and 2, of two colours.

    After one round nodes 0 and 3 are alike. With one sampled neighbour each, they may differ.
    """
    return _graph(torch.tensor([[0, 0, 3, 3], [1, 2, 1, 2]]), torch.tensor([0, 1, 2, 0]))


def two_stars() -> Data:
    """The opposite: node 0 has neighbours of colours 1, 1, 2, and node 1 has neighbours of colours 1, 2, 2.

    After one round nodes 0 and 1 differ. With one sampled neighbour each, they may look alike.
    """
    edges = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 3, 4, 5, 6, 7]])
    return _graph(edges, torch.tensor([0, 0, 1, 1, 2, 1, 2, 2]))


def hexagon_and_triangles() -> Data:
    """A ring of 6 nodes and two rings of 3: Weisfeiler-Lehman never tells any of these nodes apart."""
    edges = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 0, 7, 8, 6, 10, 11, 9]]
    return _graph(torch.tensor(edges), torch.zeros(12, dtype=torch.long))


def random_graph(num_nodes: int, *, pairs: int, colours: int, seed: int = 0) -> Data:
    """At most ``pairs`` random undirected edges between nodes of random colours."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, pairs), generator=generator)
    edges = torch.unique(edges[:, edges[0] != edges[1]].sort(dim=0).values, dim=1)
    return _graph(edges, torch.randint(colours, (num_nodes,), generator=generator))


def _graph(edges: Tensor, colours: Tensor) -> Data:
    """An undirected graph with one-hot colours as features."""
    return Data(x=one_hot(colours).double(), edge_index=torch.cat([edges, edges.flip(0)], dim=1))


@checked(seed={"least": 0, "below": 2**32}, lr={"least": 0})
def survey(
    example: Example, seed: int, *, partition: Partitioner = "metis", rescale: bool = True, lr: float = 1e-3
) -> dict[str, Comparison]:
    """Compare the classes of a random model's outputs with Weisfeiler-Lehman colours, by method.

    Args:
        example: The graph.
        seed: Draws weights, parts and neighbours.
        partition: How to partition the graph.
        rescale: Whether the baselines' remaining edges stand for those they drop.
        lr: Learning rate of "GAS in training".

    Example:
        >>> found = survey(examples()[0], seed=0)
        >>> found["full batch"].same, found["GAS"].same
        (True, True)
    """
    data, layers, num_parts, colours = example.data, example.layers, example.num_parts, example.colours
    model = outputs.PowerfulGNN(data.num_features, layers, seed=seed)

    def halo_loader() -> HaloLoader:
        return HaloLoader(data, num_parts, partition=partition, shuffle=True, seed=seed)

    def classes(out: Tensor) -> Tensor:
        return row_classes(out, outputs.TOLERANCE)

    samples = SampleLoader(data, torch.arange(data.num_nodes), [example.fan_out] * layers, num_batches=4, seed=seed)
    clusters = ClusterLoader(data, num_parts, partition=partition, seed=seed)
    stale, exact = outputs.while_training(model, halo_loader(), lr=lr, seed=seed)
    found = {
        "full batch": classes(outputs.full_batch(model, data)),
        "GAS": classes(outputs.with_histories(model, halo_loader())),
        "GAS, a pass per layer": classes(outputs.with_histories(model, halo_loader(), passes=layers)),
        "GAS, first pass": classes(outputs.with_histories(model, halo_loader(), passes=1)),
        "GAS in training": nearest_colours(stale, exact, colours),
        "GraphSAGE": classes(outputs.on_subgraphs(model, data, samples, rescale=rescale)),
        "Cluster-GCN": classes(outputs.on_subgraphs(model, data, clusters, rescale=rescale)),
    }
    return {method: compare_classes(labels, colours) for method, labels in found.items()}
