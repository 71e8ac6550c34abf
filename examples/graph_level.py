"""Answers a question about whole graphs with node embeddings that GAS has learned.

Many small graphs, each of two blocks, lie side by side as one. A GraphSAGE learns in batches which block a node belongs
to; then the exact outputs of all nodes are averaged over each graph, and a linear layer on top of them says which block
of a graph is the larger one. Parts are cut across graphs: a graph need not be in one batch.
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
larger = torch.randint(2, (GRAPHS,))  # what to say about each graph


def draw(kind: int) -> Data:
    """A graph with a block of 20 and one of 10 nodes, whose features hardly tell which is which."""
    sizes = [10, 20] if kind else [20, 10]
    edge_index = stochastic_blockmodel_graph(sizes, [[0.4, 0.05], [0.05, 0.4]])
    block = torch.repeat_interleave(torch.tensor(sizes))
    return Data(x=torch.randn(NODES, 4) + block.unsqueeze(1), edge_index=edge_index, y=block)


data = Batch.from_data_list([draw(kind) for kind in larger.tolist()])
graph_of = data.batch
data = Data(x=data.x, edge_index=data.edge_index, y=data.y)

loader = gas.HaloLoader(data, parts="random", num_parts=8, shuffle=True)
model = gas.autoscale(GraphSAGE(4, 16, num_layers=2, out_channels=2), data)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x, batch.edge_index), batch.y[: batch.batch_size]).backward()
        optimizer.step()

nodes = gas.infer(model, loader).softmax(dim=1)  # exact, one row per node
graphs = global_mean_pool(nodes, graph_of)  # one row per graph
train = torch.arange(GRAPHS) < 50
head = nn.Linear(2, 2)
optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    F.cross_entropy(head(graphs[train]), larger[train]).backward()
    optimizer.step()
right = (head(graphs[~train]).argmax(dim=1) == larger[~train]).float().mean()
print(f"graphs: {len(graphs)}")
print(f"nodes right: {100 * (nodes.argmax(dim=1) == data.y).float().mean():.1f} %")
print(f"test graphs right: {100 * right:.1f} %")
