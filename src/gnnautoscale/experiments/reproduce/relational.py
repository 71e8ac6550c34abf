"""The relational model of the experiment on links of a knowledge graph."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import RGCNConv  # type: ignore[import-untyped]


class RGCN(nn.Module):
    """R-GCN over a learned row of each node (Schlichtkrull et al., 2018), with weights of relations in blocks.

    Args:
        num_nodes: Number of nodes.
        num_relations: Number of relations, reverses included.
        width: Width of rows, layers and output; ``blocks`` divides it.
        layers: Number of layers.
        blocks: Number of blocks of each relation's weights.
        dropout: Probability of dropout after each layer but the last.
    """

    def __init__(
        self, num_nodes: int, num_relations: int, width: int, *, layers: int, blocks: int, dropout: float
    ) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_nodes, width)
        nn.init.xavier_uniform_(self.rows.weight)
        self.convs = nn.ModuleList(RGCNConv(width, width, num_relations, num_blocks=blocks) for _ in range(layers))
        self.dropout = dropout

    @staticmethod
    def of(data: Data, width: int, *, layers: int, blocks: int, dropout: float) -> RGCN:
        """The model for the nodes and relations of a graph."""
        relations = int(data.edge_type.max()) + 1
        return RGCN(data.num_nodes, relations, width, layers=layers, blocks=blocks, dropout=dropout)

    def forward(self, n_id: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Rows of all nodes ``n_id``, ``[num_nodes, width]``."""
        x: Tensor = self.rows(n_id)
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index, edge_type).relu(), self.dropout, self.training)
        out: Tensor = self.convs[-1](x, edge_index, edge_type)
        return out
