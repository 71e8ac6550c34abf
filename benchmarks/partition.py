"""Time ``partition`` against a bare METIS call on prepared arrays, on a graph with communities.

Run with ``python benchmarks/partition.py [num_nodes] [num_edges]``; the number of edges counts both directions.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import pymetis
import torch
from torch import Tensor

from gnnautoscale.graph.partitioning import connectivity, partition

NUM_PARTS = 100
COMMUNITY = 1000  # nodes in each
INSIDE = 0.8  # share of edges that stay in their community


def community_graph(num_nodes: int, num_edges: int) -> Tensor:
    """Return a symmetric graph, sorted and without duplicates; node numbers are independent of communities."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(num_nodes, (num_edges // 2,), generator=generator)
    anywhere = torch.randint(num_nodes, source.shape, generator=generator)
    near = (source - source % COMMUNITY + anywhere % COMMUNITY).clamp(max=num_nodes - 1)
    target = torch.where(torch.rand(source.shape, generator=generator) < INSIDE, near, anywhere)
    source, target = torch.randperm(num_nodes, generator=generator)[torch.stack([source, target])]
    source, target = source[source != target], target[source != target]
    pairs = torch.cat([source * num_nodes + target, target * num_nodes + source]).sort().values
    pairs = torch.unique_consecutive(pairs)
    return torch.stack([pairs // num_nodes, pairs % num_nodes])


def timed(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main(num_nodes: int = 500_000, num_edges: int = 10_000_000) -> None:
    """Print METIS's own time, and for several forms of the same graph our time and the ratio."""
    edges = community_graph(num_nodes, num_edges)
    print(f"{num_nodes:,} nodes, {edges.size(1):,} directed edges, {NUM_PARTS} parts")

    dtype = pymetis.zero_copy_dtype()
    starts = torch.searchsorted(edges[0].contiguous(), torch.arange(num_nodes + 1)).numpy().astype(dtype)
    graph = pymetis.CSRAdjacency(starts, edges[1].numpy().astype(dtype))

    def bare_call() -> Tensor:
        part = pymetis.part_graph(NUM_PARTS, graph, options=pymetis.Options(seed=0), warn_on_copies=True)
        return torch.from_numpy(np.asarray(part.vertex_part))

    shuffle = torch.randperm(edges.size(1), generator=torch.Generator().manual_seed(1))
    shuffled = edges[:, shuffle]
    one_way = edges[:, edges[0] < edges[1]]
    equal, weight = torch.ones(edges.size(1)), torch.rand(edges.size(1), generator=torch.Generator().manual_seed(2))
    calls: dict[str, Callable[[], Tensor]] = {
        "bare METIS": bare_call,
        "sorted": lambda: partition(edges, num_nodes, NUM_PARTS),
        "shuffled": lambda: partition(shuffled, num_nodes, NUM_PARTS),
        "one direction": lambda: partition(one_way, num_nodes, NUM_PARTS),
        "equal weights": lambda: partition(shuffled, num_nodes, NUM_PARTS, edge_weight=equal),
        "weighted": lambda: partition(shuffled, num_nodes, NUM_PARTS, edge_weight=weight),
    }
    # In rounds, so that a slow spell of the machine affects all calls alike.
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(3)]
    best = {name: min(times[name][0] for times in rounds) for name in calls}
    bare = rounds[0]["bare METIS"][1]
    for name, seconds in best.items():
        same = "same" if torch.equal(rounds[0][name][1], bare) else "other"
        print(f"{name:>14}: {seconds:6.2f} s, {seconds / best['bare METIS']:.2f} x bare, {same} parts")
    seconds, ratio = timed(lambda: connectivity(edges, bare))
    print(f"{'connectivity':>14}: {seconds:6.2f} s, mean {ratio.mean():.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
