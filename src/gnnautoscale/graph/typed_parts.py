"""What parts are to nodes of several kinds: whom to balance, and how large the halo of each type of edges is."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnautoscale._util import checked
from gnnautoscale.graph.graph import Graph
from gnnautoscale.graph.partitioning import check_labels, halo_sizes
from gnnautoscale.graph.typed_graph import EdgeType, TypedGraph


def groups_to_balance(graph: Graph | TypedGraph) -> Tensor:
    """The group of each node, ``[num_nodes]``: its type, and whether it is a training node.

    Example:
        >>> from torch_geometric.data import Data
        >>> edges, mask = torch.tensor([[0, 1], [1, 2]]), torch.tensor([True, False, True])
        >>> groups_to_balance(Graph.of(Data(edge_index=edges, train_mask=mask, num_nodes=3)))
        tensor([1, 0, 1])
    """
    if isinstance(graph, Graph):
        stores = [(graph.data, graph.num_nodes)]
    else:
        stores = [(graph.data[kind], count) for kind, count in graph.counts.items()]
    found = []
    for number, (store, count) in enumerate(stores):
        mask = store.get("train_mask")
        fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (count,)
        trained = mask.cpu().long() if fits and isinstance(mask, Tensor) else torch.zeros(count, dtype=torch.long)
        found.append(2 * number + trained)
    _, group = torch.unique(torch.cat(found), return_inverse=True)
    return torch.as_tensor(group)


@checked(labels={"dims": 1, "integers": True})
def connectivity_by_type(graph: TypedGraph, labels: Tensor) -> dict[EdgeType, float]:
    """Halo nodes that edges of each type bring into parts, per node of the type that they point to.

    A node counts once for each part it has edges of the type into. ``labels`` is the part of each node of the joined
    graph, ``[num_nodes]``.

    Example:
        >>> from torch_geometric.data import HeteroData
        >>> data = HeteroData()
        >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 4
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3]])
        >>> connectivity_by_type(TypedGraph.of(data), torch.tensor([0, 1, 0, 0, 0, 1]))
        {('author', 'writes', 'paper'): 0.25}
    """
    labels = check_labels(labels, graph.num_nodes)
    parts = {kind: labels[first : first + graph.counts[kind]] for kind, first in graph.first.items()}
    num_parts = int(labels.max()) + 1
    return {
        kind: float(halo_sizes(relation.edge_index, parts[kind[0]], parts[kind[2]], num_parts).sum())
        / max(graph.counts[kind[2]], 1)
        for kind, relation in graph.relations.items()
    }
