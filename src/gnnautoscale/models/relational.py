"""A model of graphs whose edges have types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from gnnautoscale._util import checked, option
from gnnautoscale.errors import InputError
from gnnautoscale.models.stack import PaperModel


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class RGCN(PaperModel):
    r"""Relational GCN (Schlichtkrull et al., 2018), for edges with types.

    :math:`h_v = W_0 h_v + \sum_r \textrm{mean}_{w \in N_r(v)} W_r h_w` over relations :math:`r`.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        num_relations: Number of types of edges.
        num_nodes: Number of nodes, if each has a learned row of width ``hidden`` in place of features.
        {options}

    Example:
        >>> RGCN(8, 4, num_relations=3, hidden=16).convs[1]
        RGCNConv(16, 4, num_relations=3)
    """

    num_relations: int
    num_nodes: int | None = None
    dropout: float = 0.2
    blocks: int = option(
        1, "Number of blocks of each relation's weights; it divides the widths of all layers.", least=1
    )

    def _build(self) -> None:
        first = self.in_channels if self.num_nodes is None else self.hidden
        widths = [first, *[self.hidden] * (self.layers - 1), self.out_channels]
        if any(width % self.blocks for width in widths):
            got, fix = f"{self.blocks} blocks and widths {widths}", "Change one of them."
            raise InputError("blocks must divide the widths of all layers", got=got, fix=fix)
        self.rows = None if self.num_nodes is None else nn.Embedding(self.num_nodes, self.hidden)
        if self.rows is not None:
            nn.init.xavier_uniform_(self.rows.weight)
        blocks = None if self.blocks == 1 else self.blocks
        self.convs = nn.ModuleList(
            pyg.RGCNConv(widths[i], widths[i + 1], self.num_relations, num_blocks=blocks) for i in range(self.layers)
        )

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_type: Tensor, n_id: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Compute the output of every node.

        Args:
            x: Features, ``[num_nodes, in_channels]``.
            edge_index: Sources and targets, ``[2, num_edges]``.
            edge_type: Types, ``[num_edges]``.
            n_id: Which nodes they are, ``[num_nodes]``, for learned rows.
            edge_weight: Must be ``None``: there are no weights.

        Returns:
            ``[num_nodes, out_channels]``.
        """
        self._check_edge_weight(edge_weight)
        x = x if self.rows is None else self.rows(n_id)
        for conv in self.convs[:-1]:
            x = self._drop(conv(x, edge_index, edge_type).relu())
        out: Tensor = self.convs[-1](x, edge_index, edge_type)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """All message-passing layers."""
        return self.convs
