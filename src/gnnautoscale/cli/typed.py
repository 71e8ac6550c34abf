"""What the command line says about heterogeneous graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.cli.schema import Files, chosen, file_of
from gnnautoscale.data import is_typed_file, read_typed_graph
from gnnautoscale.graph import TypedGraph, connectivity_by_type


def graph_without_targets(options: dict[str, Any]) -> HeteroData | None:
    """The heterogeneous graph that the options name, if no type of it has targets, so that it is no data set."""
    file, of_file = file_of(options), chosen(Files, options)
    if file is None or not is_typed_file(file) or of_file.keys() - {"undirected", "max_features"}:
        return None
    graph = read_typed_graph(file, **of_file)
    return None if any("y" in store for store in graph.node_stores) else graph


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


def facts_of_parts(graph: TypedGraph, labels: Tensor) -> dict[str, Any]:
    """How nodes of each type are spread over parts, and the halo that edges of each type bring."""
    facts: dict[str, Any] = {}
    count = int(labels.max()) + 1
    for kind, first in graph.first.items():
        sizes = torch.bincount(labels[first : first + graph.counts[kind]], minlength=count)
        facts |= {f"fewest {kind} nodes": int(sizes.min()), f"most {kind} nodes": int(sizes.max())}
    for kind, ratio in connectivity_by_type(graph, labels).items():
        facts[f"halo per {kind[2]} node by {' '.join(kind)}"] = ratio
    return facts
