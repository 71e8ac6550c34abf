"""What a training step on parts of large graphs keeps for its backward pass, for graphs of growing size.

Batches have the same number of nodes whatever the size of the graphs; full batch has all of them. It counts the bytes
of all tensors that autograd saves in a step, each memory once, the largest of some steps:

    python benchmarks/graph_memory.py --sizes 50000 100000 200000
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data import generate

WIDTH, PART, GRAPHS, STEPS = 16, 6_250, 4, 4


class Saved:
    """Counts what autograd saves."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def __call__(self, value: Tensor) -> Tensor:
        """Note a tensor that is saved."""
        storage = value.untyped_storage()
        self.memory[storage.data_ptr()] = storage.nbytes()
        self._kept.append(value)  # so that no memory is used again
        return value


def bytes_of_step(num_nodes: int, *, whole: bool) -> tuple[int, int, int]:
    """Own nodes, halo nodes and saved bytes of a step, the largest of a few."""
    torch.manual_seed(0)
    data = generate.echoes(GRAPHS, num_nodes=num_nodes)
    parts = 1 if whole else GRAPHS * num_nodes // PART
    loader = gas.GraphLoader(data, parts, batch_size=min(parts, 8), shuffle=True, readout="mean", keep=False)
    model = gas.autoscale(GraphSAGE(2, WIDTH, num_layers=3), data)
    head, found = nn.Linear(WIDTH, 2), []
    for _, batch in zip(range(STEPS), loader, strict=False):
        saved = Saved()
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda value: value):
            pooled = loader.pool(batch, model(batch.x, batch.edge_index))
            loss = F.cross_entropy(head(pooled), batch.y)
        torch.autograd.backward(loss)
        found.append((batch.batch_size, batch.num_nodes - batch.batch_size, sum(saved.memory.values())))
    return max(found[1:] or found, key=lambda each: each[2])


def main() -> None:
    """Print a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 100_000, 200_000])
    for num_nodes in parser.parse_args().sizes:
        for whole in (False, True):
            own, halo, count = bytes_of_step(num_nodes, whole=whole)
            name = "full batch" if whole else "GAS"
            print(f"{num_nodes:,} nodes, {name}: {own:,} own, {halo:,} halo, {count / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
