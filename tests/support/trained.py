"""Models that were trained for some steps, so that their histories are stale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.models import GIN


def trained(model: nn.Module, data: Data, *, steps: int = 12, lr: float = 0.05, **options: Any) -> HaloLoader:
    """Train a model for some steps in batches of two parts; its histories are stale afterwards."""
    torch.manual_seed(3)
    gas.autoscale(model, data, **options)
    loader = HaloLoader(data, num_parts=6, batch_size=2, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    done = 0
    while done < steps:
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch.y[: batch.batch_size]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
    return loader


def gin(**options: Any) -> GIN:
    return GIN(CHANNELS, 4, **{"hidden": 16, "layers": 3, "batch_norm": False, "residual": False, **options})
