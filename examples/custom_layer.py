"""Scales a layer of your own: any `MessagePassing` works and is checked on its first call.

The layer weighs messages by how similar two nodes are, and needs no change for histories. A model that histories cannot
make right is refused with the reason, as the second one here.
"""

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import gnnautoscale as gas
from gnnautoscale.data.generate import communities


class SimilarityConv(MessagePassing):
    """Sums the neighbours' rows, each weighted by its cosine similarity to the node's own."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="sum")
        self.linear = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Rows of all nodes, ``[num_nodes, out_channels]``."""
        out: Tensor = self.linear(x + self.propagate(edge_index, x=x))
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        """One message for each edge, ``[num_edges, in_channels]``."""
        return torch.cosine_similarity(x_i, x_j, dim=1).unsqueeze(1) * x_j


class Net(nn.Module):
    """Two such layers. With `centered` it subtracts the mean over all nodes, which no batch knows."""

    def __init__(self, centered: bool = False) -> None:
        super().__init__()
        self.first, self.second = SimilarityConv(16, 32), SimilarityConv(32, 4)
        self.centered = centered

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores of all nodes, ``[num_nodes, 4]``."""
        x = self.first(x, edge_index).relu()
        out: Tensor = self.second(x - x.mean(dim=0) if self.centered else x, edge_index)
        return out


torch.manual_seed(0)
data = communities(300, degree=6, num_features=16, num_classes=4)
loader = gas.HaloLoader(data, num_parts=6)
model = gas.autoscale(Net(), data)
in_batches = gas.infer(model, loader)
model = gas.detach(model)
with torch.no_grad():
    full_batch = model(data.x, data.edge_index)
print(f"largest relative error: {float((in_batches - full_batch).abs().max() / full_batch.abs().max()):.1e}")

try:
    gas.infer(gas.autoscale(Net(centered=True), data), loader)
except gas.UnsupportedModelError as error:
    print(f"refused: {error}")
