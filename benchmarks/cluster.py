"""What costs GAS accuracy on CLUSTER: stale histories, or gradients that stop at the batch's border.

The paper's 4-layer GIN trains on batches of whole graphs, which have no halo; on one or two METIS parts per graph; and
on random parts. Then it trains on these parts with all histories recomputed before every step, so that nothing is
stale and only gradients are cut off.

    python benchmarks/cluster.py --graphs 500
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from scipy.sparse.csgraph import connected_components
from torch_geometric.utils import to_scipy_sparse_matrix

import gnnautoscale as gas
from gnnautoscale.models import GIN

PARTS = {"METIS": ("metis", 1), "METIS, halves": ("metis", 2), "random": ("random", 1)}
WAYS = ("whole graphs", *(f"{parts}{stale}" for parts in PARTS for stale in ("", ", nothing stale")))


def train(data: gas.Dataset, way: str, args: argparse.Namespace) -> dict[str, float]:
    """Train in one way; returns the exact training loss, training accuracy and test accuracy."""
    graph = data.train
    torch.manual_seed(args.seed)
    model = GIN(data.num_features, data.num_classes, hidden=args.width, layers=4, track_running_stats=args.averages)
    name = way.removesuffix(", nothing stale")
    if name == "whole graphs":
        _, component = connected_components(to_scipy_sparse_matrix(graph.edge_index, num_nodes=graph.num_nodes))
        parts = torch.from_numpy(component).long()
    else:
        method, per_graph = PARTS[name]
        parts = gas.HaloLoader(graph, per_graph * args.graphs, partition=method, cache_dir=args.cache_dir).labels
    size = (int(parts.max()) + 1) // args.batches
    loader = gas.HaloLoader(graph, partition=parts, batch_size=size, shuffle=True, seed=args.seed)
    at_once = gas.HaloLoader(graph, 1, partition="random")
    gas.autoscale(model, graph)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    for _ in range(args.epochs):
        gas.refresh(model, at_once)
        for batch in loader:
            if way.endswith("nothing stale"):
                gas.refresh(model, at_once)
            model.train()
            optimizer.zero_grad()
            mask = batch.train_mask[: batch.batch_size]
            F.cross_entropy(model(batch)[mask], batch.y[: batch.batch_size][mask]).backward()
            optimizer.step()
    gas.detach(model).eval()
    with torch.no_grad():
        out = model(graph.x, graph.edge_index)[graph.train_mask]
        test = model(data.test.x, data.test.edge_index)[data.test.test_mask].argmax(dim=1)
    y = graph.y[graph.train_mask]
    return {
        "training loss": float(F.cross_entropy(out, y)),
        "training accuracy": 100 * float((out.argmax(dim=1) == y).float().mean()),
        "test accuracy": 100 * float((test == data.test.y[data.test.test_mask]).float().mean()),
    }


def main() -> None:
    """Print a line of JSON for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batches", type=int, default=20, help="batches per epoch")
    parser.add_argument("--averages", action="store_true", help="keep running averages of batch norm for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-dir")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    data = gas.load("cluster", graphs=args.graphs)
    for way in args.ways:
        print(json.dumps({"way": way, **train(data, way, args), **vars(args)}), flush=True)


if __name__ == "__main__":
    main()
