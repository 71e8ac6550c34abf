"""Shows when GAS equals full batch: with fixed weights, after a refresh.

During training, histories lag behind the weights, so outputs computed from them have a small error. `gas.refresh`
removes it, and so does `gas.infer`.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCN

import gnnautoscale as gas
from gnnautoscale.data.generate import communities

torch.manual_seed(0)
data = communities(400, degree=8, num_features=16, num_classes=4)
loader = gas.HaloLoader(data, num_parts=8, shuffle=True)
model = gas.autoscale(GCN(data.num_features, 32, num_layers=3, out_channels=4), data)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(10):
    for batch in loader:
        out = model(batch.x, batch.edge_index)
        mask = batch.train_mask[: batch.batch_size]
        if not mask.any():
            continue  # no labels here, but the histories are up to date
        optimizer.zero_grad()
        F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask]).backward()
        optimizer.step()

everyone = torch.arange(data.num_nodes)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", gas.StaleHistoryWarning)  # the staleness is the point here
    stale = gas.predict(model, loader, everyone)
gas.refresh(model, loader)
refreshed = gas.predict(model, loader, everyone)
inferred = gas.infer(model, loader)

model = gas.detach(model).eval()  # a plain PyG model again
with torch.no_grad():
    full_batch = model(data.x, data.edge_index)


def error(out: Tensor) -> float:
    """The largest difference from full batch, relative to its largest output."""
    return float((out - full_batch).abs().max() / full_batch.abs().max())


print(f"error from stale histories: {error(stale):.1e}")
print(f"error after a refresh: {error(refreshed):.1e}")
print(f"error of exact inference: {error(inferred):.1e}")
