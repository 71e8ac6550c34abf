"""Keeps histories on disk and in eight bits, and compares results and sizes.

On disk, training computes the same bits as in memory. In eight bits rows are rounded and take about a quarter.
"""

import tempfile
from typing import Literal

import torch

import gnnautoscale as gas
from gnnautoscale.data.generate import communities
from gnnautoscale.models import GCN

data = communities(600, degree=8, num_features=16, num_classes=4)


def train(storage: Literal["device", "disk"], history_dtype: Literal["same", "int8"] = "same") -> gas.FitResult:
    """Trains a 3-layer GCN with histories of 256 values for each node and layer."""
    torch.manual_seed(0)
    model = GCN(data.num_features, 4, hidden=256, layers=3)
    with tempfile.TemporaryDirectory() as folder:
        return gas.fit(
            model,
            data,
            num_parts=6,
            epochs=6,
            storage=storage,
            history_dtype=history_dtype,
            history_dir=folder if storage == "disk" else None,
        )


memory, disk, rounded = train("device"), train("disk"), train("disk", "int8")
same = [epoch.loss for epoch in memory.epochs] == [epoch.loss for epoch in disk.epochs]
print(f"losses on disk are the same: {same}")
print(f"size in memory: {memory.history_bytes} bytes")
print(f"size on disk: {disk.history_bytes} bytes")
print(f"size on disk as int8: {rounded.history_bytes} bytes")
print(f"test accuracy in float32: {disk.scores['test']:.1f} %")
print(f"test accuracy in int8: {rounded.scores['test']:.1f} %")
