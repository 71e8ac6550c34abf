"""Generated graphs for benchmarks, whose parts all have the same size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader

# Random numbers that are drawn on top of twice as many as needed, so that enough of them are distinct.
_SPARE_DRAWS = 64


@dataclass(frozen=True)
class BenchGraph:
    """A generated graph whose batches all have the same size; the defaults are those of the paper's Figure 4.

    Nodes beyond the batches only serve as halo nodes. Each batch node has ``degree`` edges from random nodes of its
    batch, and each halo node has ``halo_degree`` edges into random nodes of the batch.
    """

    nodes: int = 1_000_000
    batch_nodes: int = 4000
    batches: int = 25
    degree: int = 60
    halo_degree: int = 60
    features: int = 256
    classes: int = 256

    def check(self, *ratios: float, **counts: int) -> None:
        """Refuse a graph that cannot have such halos, and counts below 1."""
        if min(*vars(self).values(), *counts.values()) < 1 or min(ratios) < 0:
            raise InputError("sizes must be at least 1, and ratios at least 0", got="less", fix="Increase it.")
        if self.batches * self.batch_nodes > self.nodes or (1 + max(ratios)) * self.batch_nodes > self.nodes:
            raise InputError(
                "the graph needs nodes for all batches and for the largest halo",
                got=f"{self.nodes:,} for {self.batches} batches of {self.batch_nodes:,} and a ratio of {max(ratios):g}",
                fix="Use more nodes, or fewer or smaller batches.",
            )

    @property
    def labels(self) -> Tensor:
        """The part of each node, ``[nodes]``; each part is a batch."""
        return torch.arange(self.nodes) // self.batch_nodes


#: As many nodes, edges and features as ogbn-products, in 150 parts.
PRODUCTS = BenchGraph(2_400_000, 16_000, 150, degree=39, halo_degree=6, features=100, classes=47)


def make_data(graph: BenchGraph, ratio: float, drawn_on: torch.device | str = "cpu") -> Data:
    """Generate a graph with ``ratio`` halo nodes per batch node, all of whose nodes have labels to train on.

    It is in host memory; its random numbers are ``drawn_on`` a device, part by part. A GPU draws others, and faster.
    """
    generator = torch.Generator(drawn_on).manual_seed(0)
    size, halo = graph.batch_nodes, int(ratio * graph.batch_nodes)
    num_inside, num_outside = size * graph.degree, halo * graph.halo_degree
    edge_index = torch.empty(2, graph.batches * (num_inside + num_outside), dtype=torch.long)
    for part, edges in enumerate(torch.split(edge_index, num_inside + num_outside, dim=1)):
        first = part * size
        nodes = torch.arange(first, first + size).repeat_interleave(graph.degree)
        outside = _distinct(graph.nodes - size, halo, generator)  # nodes of other parts
        outside = (outside + (outside >= first) * size).repeat_interleave(graph.halo_degree)
        # Another node of the part: most graphs have no self-loops.
        further = 1 + _random(max(size - 1, 1), num_inside, generator).cpu()
        edges[0, :num_inside] = first + (nodes - first + further) % size
        edges[0, num_inside:] = outside
        edges[1, :num_inside] = nodes
        edges[1, num_inside:] = first + _random(size, num_outside, generator)
    x = torch.empty(graph.nodes, graph.features)
    for rows in torch.split(x, size):
        rows.copy_(torch.randn(rows.shape, generator=generator, device=generator.device))
    return Data(
        x=x,
        edge_index=edge_index,
        y=_random(graph.classes, graph.nodes, generator).cpu(),
        train_mask=torch.ones(graph.nodes, dtype=torch.bool),
    )


def make_loader(graph: BenchGraph, ratio: float, device: torch.device | str = "cpu") -> HaloLoader:
    """Generate a graph with ``ratio`` halo nodes per batch node, and return its loader of one part per batch."""
    return HaloLoader(make_data(graph, ratio), partition=graph.labels, device=device)


def _distinct(limit: int, count: int, generator: torch.Generator) -> Tensor:
    """So many distinct numbers below a limit, in random order."""
    if 4 * count > limit:
        return torch.randperm(limit, generator=generator, device=generator.device)[:count]
    # A permutation of all numbers takes long if few are needed.
    found: Tensor = torch.unique(_random(limit, 2 * count + _SPARE_DRAWS, generator))
    return found[torch.randperm(found.numel(), generator=generator, device=generator.device)[:count]]


def _random(limit: int, count: int, generator: torch.Generator) -> Tensor:
    """So many numbers below a limit."""
    return torch.randint(limit, (count,), generator=generator, device=generator.device)
