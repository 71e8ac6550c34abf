"""R-GCN for the classes of nodes without features, as in the experiment on AIFB."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import FastRGCNConv, MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import one_hot, scatter  # type: ignore[import-untyped]


class EntityConv(MessagePassing):  # type: ignore[misc]
    r"""R-GCN's first layer for nodes without features: :math:`h_v = u_v + \sum_r \textrm{mean}_{w \to_r v} t_{r,w}`.

    A one-hot row times the weight of a relation is a trained row for each node and relation.

    Args:
        num_nodes: Number of nodes of the whole graph.
        num_relations: Number of relations.
        width: Width of rows.
    """

    def __init__(self, num_nodes: int, num_relations: int, width: int) -> None:
        super().__init__(aggr="sum")
        self.num_nodes, self.num_relations = num_nodes, num_relations
        self.rows, self.own = nn.Embedding(num_nodes * num_relations, width), nn.Embedding(num_nodes, width)
        self.bias = nn.Parameter(torch.zeros(width))
        bound = (6 / (num_nodes + width)) ** 0.5  # that of a weight whose input is one-hot
        for table in (self.rows, self.own):
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(self, n_id: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Rows of nodes with the numbers ``n_id``, ``[num_nodes, width]``."""
        found: Tensor = self.propagate(edge_index, n_id=n_id.unsqueeze(1), edge_type=edge_type)
        own: Tensor = self.own(n_id) + self.bias
        return found + own

    def message(self, n_id_j: Tensor, edge_type: Tensor) -> Tensor:
        """The row of the source and the relation."""
        rows: Tensor = self.rows(edge_type * self.num_nodes + n_id_j.squeeze(1))
        return rows

    def aggregate(
        self, inputs: Tensor, index: Tensor, edge_type: Tensor, ptr: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        """The sum over relations of the means over sources."""
        each = one_hot(edge_type, self.num_relations, dtype=inputs.dtype)
        count = scatter(each, index, dim=0, dim_size=dim_size)[index].gather(1, edge_type.unsqueeze(1))
        total: Tensor = scatter(inputs / count, index, dim=0, dim_size=dim_size)
        return total


class EntityRGCN(nn.Module):
    """R-GCN with two layers for the classes of nodes without features (Schlichtkrull et al., 2018).

    Args:
        num_nodes: Number of nodes.
        num_relations: Number of relations, reverses included.
        width: Number of outputs.
        hidden: Width of the hidden layer.
    """

    def __init__(self, num_nodes: int, num_relations: int, width: int, *, hidden: int) -> None:
        super().__init__()
        self.first = EntityConv(num_nodes, num_relations, hidden)
        self.second = FastRGCNConv(hidden, width, num_relations)

    @staticmethod
    def of(data: Data, width: int, *, hidden: int) -> EntityRGCN:
        """The model for the nodes and relations of a graph."""
        return EntityRGCN(data.num_nodes, int(data.edge_type.max()) + 1, width, hidden=hidden)

    def forward(self, n_id: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Outputs of nodes with the numbers ``n_id``, ``[num_nodes, width]``."""
        n_id = n_id + 0  # values to look up, no attribute of the batch
        out: Tensor = self.second(self.first(n_id, edge_index, edge_type).relu(), edge_index, edge_type)
        return out
