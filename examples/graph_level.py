"""Answers a question about whole graphs: first in batches of whole graphs, then of parts of them.

Each graph has two blocks, and the question is which one is larger. A GraphSAGE gives rows of nodes, which are averaged
over each graph, and a linear layer answers. With as many parts as graphs, a batch is some whole graphs, as in PyG's
DataLoader. With more, graphs are cut: a batch has parts of them, with their halo, and pools the other parts as they
were last known. Predictions are exact in both cases.
"""

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, global_mean_pool
from torch_geometric.utils import stochastic_blockmodel_graph

import gnnautoscale as gas
from gnnautoscale.tasks import GraphPrediction

torch.manual_seed(0)


def draw(kind: int) -> Data:
    """A graph with blocks of 20 and 10 nodes, whose features tell the blocks apart, with noise."""
    sizes = [10, 20] if kind else [20, 10]
    edge_index = stochastic_blockmodel_graph(sizes, [[0.4, 0.05], [0.05, 0.4]])
    block = torch.repeat_interleave(torch.tensor(sizes))
    return Data(x=torch.randn(30, 4) + 2 * block.unsqueeze(1), edge_index=edge_index, y=torch.tensor([kind]))


graphs = [draw(number % 2) for number in range(120)]
data = gas.Dataset.of_graphs((graphs[:60], graphs[60:80], graphs[80:]))
for what, num_parts in (("whole graphs", 60), ("parts of graphs", 180)):
    head = nn.Linear(8, 2)
    model, task = GraphSAGE(4, 16, num_layers=2, out_channels=8), GraphPrediction("mean", head, width=8)
    result = gas.fit(model, data, task=task, num_parts=num_parts, batch_size=num_parts // 6, epochs=30)
    print(f"test graphs right, batches of {what}: {result.scores['test']:.1f} %")

    loader = gas.HaloLoader(data.test, num_parts=8, partition="random")
    scores = task.predict(gas.infer(model, loader), data.test)  # one row for each graph
    with torch.no_grad():
        plain = gas.detach(model).eval()(data.test.x, data.test.edge_index)
        wanted = head(global_mean_pool(plain, data.test.graph_id))
    print(f"largest difference from plain PyG, {what}: {float((scores - wanted).abs().max()):.1e}")
