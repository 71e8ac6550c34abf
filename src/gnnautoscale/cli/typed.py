"""What the command line says about heterogeneous graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]


def typed_facts(graph: HeteroData) -> dict[str, Any]:
    """Number of nodes and features of each type of nodes, and of edges of each type."""
    facts: dict[str, Any] = {"nodes": graph.num_nodes, "directed edges": graph.num_edges}
    for kind, store in graph.node_items():
        x = store.get("x")
        facts[f"{kind} nodes"] = store.num_nodes
        facts[f"{kind} features"] = int(x.size(1)) if isinstance(x, Tensor) else 0
    for kind, store in graph.edge_items():
        facts[" ".join(kind)] = store.edge_index.size(1)
    return facts
