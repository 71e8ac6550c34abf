"""Partitions that are balanced by groups of nodes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnautoscale.data import generate
from gnnautoscale.errors import InputError
from gnnautoscale.graph import ClusterLoader, HaloLoader, connectivity_by_type, groups_to_balance, partition
from gnnautoscale.graph.balancing import balanced
from gnnautoscale.graph.undirected import undirected
from support.typed import typed_graph


def cells(groups: Tensor, labels: Tensor, num_parts: int) -> Tensor:
    size = (int(groups.max()) + 1) * num_parts
    return torch.bincount(groups * num_parts + labels, minlength=size).view(-1, num_parts)


def inside(edge_index: Tensor, labels: Tensor) -> float:
    return float((labels[edge_index[0]] == labels[edge_index[1]]).double().mean())


@pytest.mark.parametrize("seed", range(5))
def test_each_part_has_its_share_of_each_group(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, parts = int(torch.randint(60, 300, (), generator=generator)), 7
    edge_index = torch.randint(count, (2, 3 * count), generator=generator)
    groups = (torch.rand(count, generator=generator) * 2).square().long()  # a common and some rare ones
    labels = torch.randint(parts, (count,), generator=generator).square() % parts
    given = labels.clone()
    found = balanced(undirected(edge_index, count), labels, groups, parts)
    assert torch.equal(labels, given)
    table, mean = cells(groups, found, parts), torch.bincount(groups) / parts
    for row, middle in zip(table.tolist(), mean.tolist(), strict=True):
        assert max(row) <= max(math.ceil(middle), 1.05 * middle)
        assert min(row) >= min(math.floor(middle), 0.95 * middle)


def test_balance_cuts_few_edges_more_where_groups_do_not_matter() -> None:
    data = generate.communities(1200, degree=8.0, num_features=2, num_classes=12, homophily=0.9)
    groups = torch.arange(1200) % 3
    plain = partition(data.edge_index, 1200, 12)
    even = partition(data.edge_index, 1200, 12, groups=groups)
    assert cells(groups, even, 12).max() <= 35
    assert inside(data.edge_index, even) > 0.9 * inside(data.edge_index, plain)
    at_random = partition(data.edge_index, 1200, 12, method="random", groups=groups)
    assert {33, 34} == set(cells(groups, at_random, 12).flatten().tolist())
    assert inside(data.edge_index, even) > 3 * inside(data.edge_index, at_random)


def test_balanced_parts_are_kept(tmp_path: Path) -> None:
    edges, groups = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), torch.tensor([0, 0, 1, 1])
    even = partition(edges, 4, 2, groups=groups, cache_dir=tmp_path)
    assert cells(groups, even, 2).tolist() == [[1, 1], [1, 1]]
    assert torch.equal(partition(edges, 4, 2, groups=groups, cache_dir=tmp_path), even)
    assert not torch.equal(partition(edges, 4, 2, cache_dir=tmp_path), even)


@pytest.mark.parametrize("groups", [torch.tensor([0.0, 1.0]), torch.tensor([0, 1, 1]), torch.tensor([-1, 0])])
def test_groups_that_are_none_are_refused(groups: Tensor) -> None:
    with pytest.raises(InputError, match="groups must be integers from 0"):
        partition(torch.tensor([[0], [1]]), 2, 2, groups=groups)


def test_loaders_balance_types_and_training_nodes() -> None:
    data = typed_graph(1)
    data["paper"].train_mask = torch.arange(40) < 12
    loader = HaloLoader(data, num_parts=4, balance=True)
    groups = groups_to_balance(loader.graph)
    assert torch.bincount(groups).tolist() == [
        30,
        28,
        12,
        12,
        5,
    ]  # authors, other papers, training papers, terms, venues
    assert cells(groups, loader.labels, 4).tolist()[2] == [3, 3, 3, 3]
    assert all(batch["term"].batch_size in (2, 3, 4) for batch in loader)
    plain = generate.communities(60, degree=4.0, num_features=2, num_classes=3)
    parts = ClusterLoader(plain, 4, balance=True).parts
    trained = torch.bincount(parts.labels[plain.train_mask], minlength=4)
    assert int(trained.max()) <= math.ceil(1.05 * int(plain.train_mask.sum()) / 4)


def test_connectivity_by_type_counts_the_batches_halo() -> None:
    data = typed_graph(3)
    loader = HaloLoader(data, num_parts=5)
    found = connectivity_by_type(loader.graph, loader.labels)
    for kind in data.edge_types:
        halo = 0
        for batch in loader:
            source = batch[kind].edge_index[0].unique()
            halo += int((source >= batch[kind[0]].batch_size).sum())
        assert found[kind] == pytest.approx(halo / data[kind[2]].num_nodes)
