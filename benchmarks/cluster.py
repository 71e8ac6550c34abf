"""Tells apart what costs GAS accuracy on CLUSTER: stale histories, gradients that stop, or norms over a batch.

A 4-layer GIN is trained on batches of whole graphs, which have no halo, on METIS parts and on random parts; and on both
kinds of parts with all histories recomputed before every step, so that nothing is stale.

    python benchmarks/cluster.py --graphs 500 --norm layer --lr 0.01 --epochs 60 --batches 20
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch_geometric.nn import GINConv
from torch_geometric.utils import to_scipy_sparse_matrix

import gnnautoscale as gas

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
WAYS = ("whole graphs", "METIS", "METIS, nothing stale", "random", "random, nothing stale")
LAYERS, WIDTH = 4, 64


class Net(nn.Module):
    """GIN with residuals and a norm that can be chosen."""

    def __init__(self, in_channels: int, out_channels: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(in_channels, WIDTH), nn.Linear(WIDTH, out_channels)
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(LAYERS))
        self.convs = nn.ModuleList(
            GINConv(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), train_eps=True
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Outputs of all nodes."""
        x = self.first(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = (norm(conv(x, edge_index)) + x).relu()
        return self.last(x)


def train(data: gas.Dataset, way: str, args: argparse.Namespace) -> dict[str, float]:
    """Train in one way; gives the exact loss on training nodes and the accuracy on test nodes."""
    graph = data.train
    torch.manual_seed(args.seed)
    model = Net(data.num_features, data.num_classes, NORMS[args.norm])
    if way == "whole graphs":
        _, component = connected_components(to_scipy_sparse_matrix(graph.edge_index, num_nodes=graph.num_nodes))
        parts = torch.from_numpy(component).long()
    else:
        method = way.split(",")[0].lower()
        parts = gas.HaloLoader(graph, 2 * args.graphs, parts=method, cache_dir=args.cache_dir).labels
    size = (int(parts.max()) + 1) // args.batches
    loader = gas.HaloLoader(graph, parts=parts, batch_size=size, shuffle=True, seed=args.seed)
    at_once = gas.HaloLoader(graph, 1, parts="random")
    gas.autoscale(model, graph)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for _ in range(args.epochs):
        for batch in loader:
            if way.endswith("nothing stale"):
                gas.refresh(model, at_once)
            model.train()
            optimizer.zero_grad()
            mask = batch.train_mask[: batch.batch_size]
            F.cross_entropy(model(batch)[mask], batch.y[: batch.batch_size][mask]).backward()
            optimizer.step()
            rate.step()
    gas.detach(model).eval()
    with torch.no_grad():
        out = model(graph.x, graph.edge_index)[graph.train_mask]
        test = model(data.test.x, data.test.edge_index)[data.test.test_mask].argmax(dim=1)
    return {
        "training loss": float(F.cross_entropy(out, graph.y[graph.train_mask])),
        "test accuracy": 100 * float((test == data.test.y[data.test.test_mask]).float().mean()),
    }


def main() -> None:
    """Print a line of JSON for each way to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--norm", choices=NORMS, default="layer")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--batches", type=int, default=10, help="batches of an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-dir")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    data = gas.load("cluster", graphs=args.graphs)
    for way in args.ways:
        print(json.dumps({"way": way, **train(data, way, args), **vars(args)}), flush=True)


if __name__ == "__main__":
    main()
