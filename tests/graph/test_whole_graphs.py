"""Parts of many graphs: whole graphs, or pieces of large ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.graph import partition_graphs

NONE = torch.empty(2, 0, dtype=torch.long)


def pieces(graph_id: Tensor, labels: Tensor) -> Tensor:
    """Number of parts that each graph is in."""
    pairs = torch.unique(torch.stack([graph_id, labels]), dim=1)
    return torch.bincount(pairs[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_parts", [1, 2, 7, 39, 40, 41, 100, 500])
def test_parts_are_whole_graphs_or_pieces_of_one(num_parts: int, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = torch.randint(1, 30, (40,))
    sizes[7] = 900
    graph_id = torch.arange(40).repeat_interleave(sizes)[torch.randperm(int(sizes.sum()))]
    labels = partition_graphs(NONE, graph_id, num_parts, method="random", seed=seed)
    counts = torch.bincount(labels)
    assert counts.numel() == num_parts
    assert bool((counts > 0).all())
    split = pieces(graph_id, labels) > 1
    # No part has pieces of two graphs.
    inside = torch.unique(torch.stack([labels[split[graph_id]], graph_id[split[graph_id]]]), dim=1)[0]
    assert torch.unique(inside).numel() == inside.numel()
    if num_parts <= 40:
        mean = graph_id.numel() / num_parts
        assert split.tolist() == [number == 7 and 2 * mean < 900 and num_parts < 40 for number in range(40)]
    else:
        assert bool((sizes[split] > graph_id.numel() / num_parts).all())
        assert split[7]


def test_groups_have_about_as_many_nodes() -> None:
    sizes = torch.arange(1, 101)
    labels = partition_graphs(NONE, torch.arange(100).repeat_interleave(sizes), 10)
    counts = torch.bincount(labels)
    assert int(counts.min()) >= 0.95 * 505
    assert int(counts.max()) <= 1.05 * 505


def test_a_larger_batch_cuts_fewer_graphs() -> None:
    sizes = torch.tensor([50, *[5] * 50])
    graph_id = torch.arange(51).repeat_interleave(sizes)
    cut = [pieces(graph_id, partition_graphs(NONE, graph_id, 30, batch_size=size))[0] for size in (1, 4)]
    assert cut[0] > 1
    assert cut[1] == 1


def test_large_graphs_are_cut_along_their_edges() -> None:
    ring = torch.arange(100)
    edges = torch.stack([ring, (ring + 1) % 100])
    both = torch.cat([edges, edges + 100], dim=1)
    labels = partition_graphs(both, torch.arange(2).repeat_interleave(100), 8)
    crossing = labels[both[0]] != labels[both[1]]
    assert int(crossing.sum()) == 8  # four pieces of each ring


@pytest.mark.parametrize("num_parts", [0, 7])
def test_impossible_numbers_are_refused(num_parts: int) -> None:
    with pytest.raises(InputError, match="num_parts must be between 1"):
        partition_graphs(NONE, torch.arange(6), num_parts)
