"""Trains an unchanged PyG model with `gas.fit`, in batches with histories and in full batch.

The model is PyG's own GAT, which knows nothing about histories.
"""

from typing import Literal

import torch
from torch_geometric.nn import GAT

import gnnautoscale as gas
from gnnautoscale.data.generate import communities

data = communities(600, degree=8, num_features=16, num_classes=4)


def train(mode: Literal["gas", "full"]) -> gas.FitResult:
    """Trains the same model with the same data, seed and number of epochs in either mode."""
    torch.manual_seed(0)
    model = GAT(data.num_features, 32, num_layers=2, out_channels=4, heads=4)
    return gas.fit(model, data, mode=mode, num_parts=12, batch_size=3, epochs=30, lr=0.01)


in_batches, full_batch = train("gas"), train("full")
print(f"halo nodes per batch node: {in_batches.connectivity:.2f}")
print(f"steps with histories: {in_batches.steps}")
print(f"test accuracy with histories: {in_batches.scores['test']:.1f} %")
print(f"test accuracy in full batch: {full_batch.scores['test']:.1f} %")
