"""Compares GAS with neighbour sampling: edges and nodes of a step, and test accuracy.

Sampling drops edges, yet its neighbourhoods grow with each layer. A GAS batch has every edge into its nodes and one hop
of halo, at any depth.
"""

from typing import Literal

import torch

import gnnautoscale as gas
from gnnautoscale.data.generate import communities
from gnnautoscale.graph import SampleLoader
from gnnautoscale.models import GraphSAGE

LAYERS, FAN_OUT = 3, [4, 4, 4]
data = communities(1000, degree=12, num_features=16, num_classes=4)


def train(mode: Literal["gas", "sage"], fan_out: list[int] | None = None) -> float:
    """Trains the same model for as many epochs and batches in either mode; returns its test accuracy."""
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 4, hidden=32, layers=LAYERS)
    result = gas.fit(model, data, mode=mode, num_parts=20, batch_size=5, epochs=12, fan_out=fan_out)
    return result.scores["test"]


batch = next(iter(gas.HaloLoader(data, num_parts=20, batch_size=5)))
mine = batch.n_id[: batch.batch_size]
sample = next(iter(SampleLoader(data, mine, FAN_OUT, num_batches=1)))
edges_into_batch = int(torch.isin(data.edge_index[1], mine).sum())
sampled_into_batch = int((sample.edge_index[1] < sample.batch_size).sum())

print(f"edges into the batch: {edges_into_batch}")
print(f"of these used by GAS: {batch.num_edges}")
print(f"of these used by sampling: {sampled_into_batch}")
print(f"nodes in memory with GAS: {batch.num_nodes}")
print(f"nodes in memory with sampling: {sample.num_nodes}")
print(f"test accuracy with GAS: {train('gas'):.1f} %")
print(f"test accuracy with sampling: {train('sage', fan_out=FAN_OUT):.1f} %")
