"""Cuts batches out of a graph: their nodes with the halo, their edges, and the rows of all attributes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.graph.graph import Graph

# The parts of a batch.
Group: TypeAlias = tuple[int, ...]


class Pieces(NamedTuple):
    """A batch before it is wrapped: what workers hand over."""

    n_id: Tensor
    batch_size: int
    e_id: Tensor
    attributes: dict[str, Any]


class Assembly(Dataset[Pieces]):
    """Cuts batches out of a graph; runs in the main process or in workers."""

    def __init__(self, data: Data, graph: Graph, members: list[Tensor], bidirectional: bool) -> None:
        self.data = data
        self.graph = graph
        self.members = members
        self.bidirectional = bidirectional
        # Grouped here, once, so that workers do not each do it again.
        _ = graph.incoming, graph.outgoing if bidirectional else None

    def __len__(self) -> int:
        return len(self.members)

    def nodes(self, parts: Group) -> Tensor:
        """The nodes of some parts, part by part, ``[num_nodes_in_parts]``."""
        return torch.cat([self.members[part] for part in parts])

    # Batches are kept for later, so they must be ordinary tensors even if the first use is inference only.
    @torch.inference_mode(False)
    def __getitem__(self, parts: Any) -> Pieces:
        nodes = self.nodes(parts)
        target, source, e_id = self.graph.incoming.into(nodes)
        neighbours = source
        if self.bidirectional:
            neighbours = torch.cat([source, self.graph.outgoing.into(nodes)[1]])
        outside = neighbours[self.graph.locate(nodes, neighbours) < 0]
        n_id = torch.cat([nodes, torch.unique(outside)])
        edge_index = torch.stack([self.graph.locate(n_id, source), target])
        return Pieces(n_id, nodes.numel(), e_id, cut_attributes(self.data, n_id, e_id, edge_index))


def cut_attributes(data: Data, n_id: Tensor, e_id: Tensor, edge_index: Tensor) -> dict[str, Any]:
    """The attributes of a piece of a graph: rows of its nodes and edges, and everything else as it is.

    Args:
        data: The whole graph.
        n_id: The piece's nodes, ``[num_rows]``.
        e_id: The piece's edges, ``[num_edges]``.
        edge_index: These edges as positions in ``n_id``, ``[2, num_edges]``.
    """
    attributes: dict[str, Any] = {}
    for name, value in data:
        if name == "edge_index":
            attributes[name] = edge_index
        elif isinstance(value, Tensor) and data.is_node_attr(name):
            attributes[name] = _rows(data, name, value, n_id)
        elif isinstance(value, Tensor) and data.is_edge_attr(name):
            attributes[name] = _rows(data, name, value, e_id)
        elif name != "num_nodes":
            attributes[name] = value
    return attributes


def _rows(data: Data, name: str, value: Tensor, index: Tensor) -> Tensor:
    return value.index_select(data.__cat_dim__(name, value), index.to(value.device))


def hand_over(pieces: Any) -> Any:
    """What a worker prepared, as it is: nothing is collated."""
    return pieces
