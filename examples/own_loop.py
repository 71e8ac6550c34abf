"""Keeps your own training loop: swap the loader and wrap the model.

Batches look like those of PyG's NeighborLoader, but contain all nodes of their parts: mask the loss.
"""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import gnnautoscale as gas
from gnnautoscale.data.generate import communities

torch.manual_seed(0)
data = communities(600, degree=8, num_features=16, num_classes=4)
loader = gas.HaloLoader(data, num_parts=12, batch_size=3, shuffle=True)
model = gas.autoscale(GraphSAGE(data.num_features, 32, num_layers=3, out_channels=4, dropout=0.2), data)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

losses = []
for _ in range(20):
    model.train()
    total = 0.0
    for batch in loader:
        out = model(batch.x, batch.edge_index)  # one row for each of the batch's own nodes
        mask = batch.train_mask[: batch.batch_size]
        if not mask.any():
            continue  # no labels here, but the histories are up to date
        loss = F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() / len(loader)
    losses.append(total)

logits = gas.infer(model, loader)  # exact, for all nodes, in the order of the data
correct = (logits.argmax(dim=1) == data.y)[data.test_mask]
print(f"first loss: {losses[0]:.3f}")
print(f"last loss: {losses[-1]:.3f}")
print(f"test accuracy: {100 * correct.float().mean():.1f} %")
