"""Cuts plain and heterogeneous graphs alike into shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.graph import Graph, TypedGraph
from gnnautoscale.ranks.shard import LAST, Layout, Shard, cut_shard
from gnnautoscale.ranks.typed_shard import TypedShard, cut_typed_shard

#: In the facts about a whole graph: how many nodes there are of each type, and the types of edges.
COUNTS, RELATIONS = "nodes of types", "types of edges"
#: And which type of nodes has targets, if the maker of the shards said so.
TARGET = "target"


def graph_of(data: Data | HeteroData) -> Any:
    """The checked graph of some data, of which all types are joined if it is heterogeneous."""
    return TypedGraph.of(data) if isinstance(data, HeteroData) else Graph.of(data)


def training_nodes(graph: Graph | TypedGraph) -> Tensor | None:
    """Which nodes are trained on, ``[num_nodes]``, of all types; ``None`` if the graph does not say.

    Example:
        >>> data = HeteroData()
        >>> data["author"].num_nodes = data["paper"].num_nodes = 2
        >>> data["paper"].train_mask = torch.tensor([True, False])
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0], [1]])
        >>> training_nodes(graph_of(data)).tolist()
        [False, False, True, False]
    """
    if isinstance(graph, Graph):
        mask: Tensor | None = graph.data.get("train_mask")
        return mask
    masks = {kind: rows["train_mask"].bool() for kind, rows in graph.rows.items() if "train_mask" in rows}
    none = {kind: torch.zeros(count, dtype=torch.bool) for kind, count in graph.counts.items()}
    return torch.cat([{**none, **masks}[kind] for kind in graph.counts]) if masks else None


def facts_of(graph: Graph | TypedGraph) -> dict[str, Any]:
    """Facts about a whole graph that its shards hand on."""
    facts = {"nodes": graph.num_nodes, "edges": graph.edge_index.size(1), "key": graph.key}
    if isinstance(graph, Graph):
        facts[LAST] = int(graph.edge_index.max()) if graph.edge_index.numel() else -1
    else:
        facts |= {COUNTS: graph.counts, RELATIONS: [list(relation) for relation in graph.relations]}
    return facts


def cut(
    graph: Graph | TypedGraph, layout: Layout, rank: int, *, bidirectional: bool, whole: dict[str, Any]
) -> Shard | TypedShard:
    """The share of a rank; see :func:`cut_shard` and :func:`cut_typed_shard`."""
    if isinstance(graph, Graph):
        return cut_shard(graph.data, layout, rank, bidirectional=bidirectional, whole=whole)
    return cut_typed_shard(graph, layout, rank, bidirectional=bidirectional, whole=whole)
