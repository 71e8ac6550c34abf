"""Answers a question about whole graphs from node outputs that GAS has learned.

Each of many small graphs has two blocks; together they form one large graph. A GraphSAGE learns which block a node
belongs to. Then the exact outputs of all nodes are averaged over each graph, and a linear layer predicts which block is
larger. Parts are random, so a graph is spread over several batches. Both steps learn from the training graphs only.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphSAGE, global_mean_pool
from torch_geometric.utils import stochastic_blockmodel_graph

import gnnautoscale as gas

torch.manual_seed(0)
GRAPHS, NODES = 80, 30
larger = torch.randint(2, (GRAPHS,))  # the answer for each graph
train = torch.arange(GRAPHS) < 50


def draw(kind: int) -> Data:
    """A graph with blocks of 20 and 10 nodes, whose features hardly tell the blocks apart."""
    sizes = [10, 20] if kind else [20, 10]
    edge_index = stochastic_blockmodel_graph(sizes, [[0.4, 0.05], [0.05, 0.4]])
    block = torch.repeat_interleave(torch.tensor(sizes))
    return Data(x=torch.randn(NODES, 4) + block.unsqueeze(1), edge_index=edge_index, y=block)


data = Batch.from_data_list([draw(kind) for kind in larger.tolist()])
graph_of = data.batch
data = Data(x=data.x, edge_index=data.edge_index, y=data.y, train_mask=train[graph_of])

loader = gas.HaloLoader(data, num_parts=8, partition="random", shuffle=True)
model = gas.autoscale(GraphSAGE(4, 16, num_layers=2, out_channels=2), data)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    model.train()
    for batch in loader:
        out = model(batch.x, batch.edge_index)
        mask = batch.train_mask[: batch.batch_size]
        if not mask.any():
            continue  # no labels here, but the histories are up to date
        optimizer.zero_grad()
        F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask]).backward()
        optimizer.step()

nodes = gas.infer(model, loader).softmax(dim=1)  # exact, one row per node
graphs = global_mean_pool(nodes, graph_of)  # one row per graph
head = nn.Linear(2, 2)
optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    F.cross_entropy(head(graphs[train]), larger[train]).backward()
    optimizer.step()
right_nodes = (nodes.argmax(dim=1) == data.y)[~data.train_mask].float().mean()
right_graphs = (head(graphs[~train]).argmax(dim=1) == larger[~train]).float().mean()
print(f"graphs: {len(graphs)}")
print(f"nodes of test graphs right: {100 * right_nodes:.1f} %")
print(f"test graphs right: {100 * right_graphs:.1f} %")
