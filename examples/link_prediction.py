"""Predicts links in a loop of one's own, with scores of hidden links from exact embeddings.

A batch has all links that touch its nodes, also those whose other end is elsewhere. Pairs without a link are drawn in
it, with weights that make them stand for the whole graph.
"""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.transforms import RandomLinkSplit

import gnnautoscale as gas
from gnnautoscale.data.generate import communities
from gnnautoscale.tasks import Dot, LinkPrediction

torch.manual_seed(0)
whole = communities(600, degree=10, num_features=16, num_classes=4)

# Some links pass messages, others are trained on, and a tenth is hidden to test on: no link does two of these.
split = RandomLinkSplit(0.0, 0.1, is_undirected=True, disjoint_train_ratio=0.3, add_negative_train_samples=False)
train, _, test = split(Data(x=whole.x, edge_index=whole.edge_index))

decoder = Dot()
task = LinkPrediction(decoder)
loader = gas.LinkLoader(train, num_parts=12, batch_size=4, shuffle=True)
model = gas.autoscale(GraphSAGE(train.num_features, 32, num_layers=2, out_channels=16), train)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
untrained = task.score(gas.infer(model, test), test, "test")
for _ in range(20):
    model.train()
    for batch in loader:
        rows = loader.rows(batch, model(batch.x, batch.edge_index))  # own nodes, then other ends of pairs
        source, target = rows[batch.edge_label_index]
        optimizer.zero_grad()
        scores = decoder(source, target)
        F.binary_cross_entropy_with_logits(scores, batch.edge_label, batch.edge_label_weight).backward()
        optimizer.step()

rows = gas.infer(model, test)
print(f"hidden links: {int(test.edge_label.sum())}")
print(f"AUC untrained: {untrained / 100:.3f}")
print(f"AUC trained: {task.score(rows, test, 'test') / 100:.3f}")
print(f"most likely partners of node 0: {task.partners(rows, node=0, count=3)[0].tolist()}")
