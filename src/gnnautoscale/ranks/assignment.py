"""Assigns parts to ranks: little is shared between ranks, and each has about the same amount of work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.graph import partition

# Edges that are looked at together.
_CHUNK = 1 << 24
# How much more than the mean of all ranks one of them may have to do.
_SLACK = 0.05


def assign(edge_index: Tensor, labels: Tensor, size: int, train_mask: Tensor | None = None, *, seed: int = 0) -> Tensor:
    """The rank of each part, ``[num_parts]``.

    The graph of parts is partitioned: an edge between two parts weighs as much as there are edges between them. A part
    weighs by its share of nodes, of edges and of training nodes alike.

    Args:
        edge_index: The edges, ``[2, num_edges]``; they may be in a memory-mapped file.
        labels: The part of each node, ``[num_nodes]``.
        size: The number of ranks.
        train_mask: Which nodes are trained on, ``[num_nodes]``.
        seed: Makes the outcome reproducible.

    Example:
        >>> edges = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 3, 2, 2]])  # two pairs, and one edge between them
        >>> ranks = assign(edges, torch.arange(4), 2)
        >>> bool(ranks[0] == ranks[1] != ranks[2]), bool(ranks[2] == ranks[3])
        (True, True)
    """
    num_parts = int(labels.max()) + 1
    if size > num_parts:
        fix = f"Cut the graph into {size} parts or more; several for each rank are better."
        raise InputError("each rank needs a part of its own", got=f"{num_parts} parts for {size} ranks", fix=fix)
    found = [_counted(labels[edge_index[:, part]], num_parts) for part in edge_chunks(edge_index)]
    pairs, place = torch.unique(torch.cat([pairs for pairs, _ in found]), return_inverse=True)
    count = torch.zeros(pairs.numel(), dtype=torch.double)
    count.index_add_(0, place, torch.cat([counts for _, counts in found]).double())
    source, target = pairs // num_parts, pairs % num_parts
    edges_into = torch.zeros(num_parts, dtype=torch.double).index_add_(0, target, count)
    amounts = [torch.bincount(labels, minlength=num_parts), edges_into]
    if train_mask is not None:
        amounts.append(torch.bincount(labels[train_mask], minlength=num_parts))
    work = torch.stack([amount / amount.sum().clamp(min=1) for amount in amounts]).sum(0)
    across = source != target
    between = torch.stack([source, target])[:, across]
    ranks = partition(between, num_parts, size, edge_weight=count[across], node_weight=work, seed=seed)
    return _evened(ranks, between, count[across], work, size)


def _evened(ranks: Tensor, between: Tensor, count: Tensor, work: Tensor, size: int) -> Tensor:
    """Move parts away from the rank with most work while that helps, those first whose edges lose least.

    METIS leaves graphs of few nodes far from balanced.
    """
    parts, ends = torch.arange(work.numel()), torch.cat([between, between.flip(0)], dim=1)
    count = torch.cat([count, count])
    for _ in range(4 * work.numel()):
        load = torch.zeros(size, dtype=torch.double).index_add_(0, ranks, work)
        most = int(load.argmax())
        if load[most] <= (1 + _SLACK) * load.mean():
            break
        here = parts[ranks == most]
        edges = torch.zeros(work.numel() * size, dtype=torch.double)
        edges = edges.index_add_(0, ends[0] * size + ranks[ends[1]], count).view(-1, size)
        lost = edges[here, most].unsqueeze(1) - edges[here]
        better = load + work[here].unsqueeze(1) < load[most]
        better[:, most] = False
        if here.numel() == 1 or not bool(better.any()):
            break
        best = int(torch.where(better, lost, torch.inf).argmin())
        ranks[here[best // size]] = best % size
    return ranks


def edge_chunks(edge_index: Tensor) -> Iterator[slice]:
    """Slices that cover all edges; what is computed of one of them takes little memory."""
    return (slice(first, first + _CHUNK) for first in range(0, max(edge_index.size(1), 1), _CHUNK))


def _counted(parts: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Pairs of parts that edges, ``[2, num_edges]`` as parts, connect, each as one number, and how many there are."""
    pairs, counts = torch.unique(parts[0] * num_parts + parts[1], return_counts=True)
    return pairs, counts
