"""Predicts links with an edge-level loss on the embeddings of a batch's nodes.

The edges between a batch's own nodes are its positive examples, random pairs of its nodes the negative ones. Parts keep
most edges inside, and parts form new batches every epoch, so different pairs meet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gnnautoscale as gas
from gnnautoscale.data.generate import communities

torch.manual_seed(0)
whole = communities(600, degree=10, num_features=16, num_classes=4)

# A tenth of the links is hidden from the model, in both directions, to test on.
link = whole.edge_index[:, whole.edge_index[0] < whole.edge_index[1]]
hidden = torch.rand(link.size(1)) < 0.1
seen, asked = link[:, ~hidden], link[:, hidden]
data = Data(x=whole.x, edge_index=torch.cat([seen, seen.flip(0)], dim=1))


def scores(rows: Tensor, pairs: Tensor) -> Tensor:
    """Scores of pairs: the inner products of their embeddings, ``[num_pairs]``."""
    return (rows[pairs[0]] * rows[pairs[1]]).sum(dim=1)


def auc(rows: Tensor) -> float:
    """How often a hidden link scores higher than a random pair."""
    random_pairs = torch.randint(whole.num_nodes, asked.shape, generator=torch.Generator().manual_seed(0))
    return float((scores(rows, asked).unsqueeze(1) > scores(rows, random_pairs).unsqueeze(0)).float().mean())


loader = gas.HaloLoader(data, num_parts=12, batch_size=4, shuffle=True)
model = gas.autoscale(GraphSAGE(data.num_features, 32, num_layers=2, out_channels=16), data)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
untrained = auc(gas.infer(model, loader))
for _ in range(20):
    model.train()
    for batch in loader:
        rows = model(batch.x, batch.edge_index)  # the batch's own nodes
        inside = batch.edge_index.as_subclass(Tensor)
        inside = inside[:, inside[0] < batch.batch_size]
        pairs = torch.cat([inside, torch.randint(batch.batch_size, inside.shape)], dim=1)
        linked = torch.arange(pairs.size(1)) < inside.size(1)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(scores(rows, pairs), linked.float()).backward()
        optimizer.step()

print(f"hidden links: {asked.size(1)}")
print(f"AUC untrained: {untrained:.3f}")
print(f"AUC trained: {auc(gas.infer(model, loader)):.3f}")
