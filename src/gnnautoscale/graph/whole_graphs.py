"""Parts of many graphs that are joined in one: whole graphs, or pieces of a large one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gnnautoscale._util import checked
from gnnautoscale.errors import InputError
from gnnautoscale.graph.partitioning import Partitioner, partition

# A graph with more nodes than this many batches is cut, even where there are fewer parts than graphs.
_MOST_BATCHES = 2


@checked(edge_index={"dims": 2, "integers": True}, graph_id={"dims": 1, "integers": True}, batch_size={"least": 1})
def partition_graphs(
    edge_index: Tensor,
    graph_id: Tensor,
    num_parts: int,
    *,
    batch_size: int = 1,
    method: Partitioner = "metis",
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> Tensor:
    """Assign every node to a part, so that parts are groups of whole graphs, or pieces of one large graph.

    With as many parts as graphs, each graph is a part. With fewer, graphs are grouped, about evenly by their nodes, and
    only those are cut that have more nodes than two batches. With more, all are cut that have more nodes than a part.

    Args:
        edge_index: Edges inside graphs, ``[2, num_edges]``.
        graph_id: The graph of each node, ``[num_nodes]``, from 0, each with at least one node.
        num_parts: The number of parts.
        batch_size: The number of parts in a batch.
        method: How to cut large graphs; see :func:`gnnautoscale.graph.partition`.
        seed: Seed of the cuts, and of which graphs are grouped.
        cache_dir: A folder that keeps cuts between calls.

    Returns:
        The part of each node, ``[num_nodes]``; a few less than ``num_parts`` if there are not enough nodes for them.

    Example:
        >>> graph_id = torch.tensor([0, 0, 1, 1, 1, 2])
        >>> partition_graphs(torch.empty(2, 0, dtype=torch.long), graph_id, 3)
        tensor([0, 0, 1, 1, 1, 2])
        >>> partition_graphs(torch.empty(2, 0, dtype=torch.long), graph_id, 2)
        tensor([1, 1, 0, 0, 0, 1])
    """
    if graph_id.numel() and int(graph_id.min()) < 0:
        got, fix = f"{int(graph_id.min())}", "Renumber with graph_id.unique(return_inverse=True)[1]."
        raise InputError("graph_id must number graphs from 0", got=got, fix=fix)
    num_nodes, sizes = graph_id.numel(), torch.bincount(graph_id)
    if not 1 <= num_parts <= num_nodes:
        fix = f"Ask for 1 to {num_nodes} parts."
        raise InputError("num_parts must be between 1 and the number of nodes", got=str(num_parts), fix=fix)
    if num_parts == sizes.numel():
        return graph_id.clone()
    mean = num_nodes / num_parts
    large = sizes > (mean if num_parts > sizes.numel() else _MOST_BATCHES * batch_size * mean)
    small = (~large).nonzero().squeeze(1)
    count = 0
    labels = torch.empty_like(graph_id)
    if small.numel():
        count = max(1, min(small.numel(), round(int(sizes[small].sum()) / mean)))
        if not bool(large.any()):
            count = min(small.numel(), num_parts)
        groups = torch.zeros(sizes.numel(), dtype=torch.long)
        groups[small] = _even_groups(sizes[small], count, seed)
        labels = groups[graph_id]
    shares = _shares(sizes[large], num_parts - count)
    of_edges = graph_id[edge_index[0]]
    edges_of = torch.bincount(of_edges, minlength=sizes.numel()).tolist()
    by_graph = torch.split(graph_id.argsort(stable=True), sizes.tolist())
    edges_by_graph = torch.split(of_edges.argsort(stable=True), edges_of)
    places = torch.empty_like(graph_id)
    for graph, pieces in zip(large.nonzero().squeeze(1).tolist(), shares.tolist(), strict=True):
        nodes = by_graph[graph]
        places[nodes] = torch.arange(nodes.numel())
        edges = places[edge_index[:, edges_by_graph[graph]]]
        piece = partition(edges, nodes.numel(), pieces, method=method, seed=seed, cache_dir=cache_dir)
        labels[nodes] = count + piece
        count += pieces
    return labels


def _even_groups(sizes: Tensor, count: int, seed: int) -> Tensor:
    """Group graphs of some sizes, ``[num_graphs]``, into groups of about as many nodes; none is empty."""
    order = torch.randperm(sizes.numel(), generator=torch.Generator().manual_seed(seed))
    order = order[sizes[order].argsort(descending=True, stable=True)]
    # Dealt out from the largest on, forwards and backwards in turn.
    turn, place = torch.arange(sizes.numel()) // count, torch.arange(sizes.numel()) % count
    groups = torch.empty_like(order)
    groups[order] = torch.where(turn % 2 == 0, place, count - 1 - place)
    return groups


def _shares(sizes: Tensor, num_parts: int) -> Tensor:
    """How many parts each graph gets, at least 1 and at most its nodes, in proportion to its size, ``[num_graphs]``."""
    if not sizes.numel():
        return sizes
    wanted = sizes * (num_parts / int(sizes.sum()))
    shares = wanted.floor().long().clamp(min=1)
    left = num_parts - int(shares.sum())
    if left > 0:
        shares[(wanted - shares).argsort(descending=True, stable=True)[:left]] += 1
    return torch.minimum(shares, sizes)
