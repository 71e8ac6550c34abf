"""Edges of one type held back from a heterogeneous graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.data import TypedLinks
from gnnautoscale.errors import InputError
from gnnautoscale.tasks import LinkPrediction

WRITES, BACK = ("author", "writes", "paper"), ("paper", "by", "author")


def graph() -> HeteroData:
    """Authors and papers with some edges twice, and their reverse; papers cite papers both ways."""
    torch.manual_seed(0)
    data = HeteroData()
    data["author"].num_nodes, data["paper"].num_nodes = 20, 30
    edges = torch.stack([torch.randint(20, (150,)), torch.randint(30, (150,))])
    edges = torch.cat([edges, edges[:, :10]], dim=1)
    data[WRITES].edge_index, data[WRITES].edge_weight = edges, torch.arange(160.0)
    data[BACK].edge_index = edges.flip(0)
    cites = torch.randint(30, (2, 60))
    data["paper", "cites", "paper"].edge_index = torch.cat([cites, cites.flip(0)], dim=1)
    return data


def keys(edges: Tensor) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges.t()}


def test_edges_are_held_back_in_both_directions() -> None:
    data = graph()
    links = TypedLinks.split(data, WRITES)
    assert data[WRITES].edge_index.size(1) == 160  # the graph stays as it is
    every = keys(data[WRITES].edge_index)
    asked = [keys(each[WRITES].edge_label_index[:, each[WRITES].edge_label > 0]) for each in links.passed]
    assert [len(each) for each in asked[1:]] == [round(0.05 * len(every) - 0.5), round(0.1 * len(every) - 0.5)]
    assert len(asked[0] | asked[1] | asked[2]) == sum(map(len, asked))
    for number, passed in enumerate(links.passed):
        there = keys(passed[WRITES].edge_index)
        assert there <= every
        assert keys(passed[BACK].edge_index.flip(0)) == there
        assert not any(there & each for each in asked[number:])
        place = passed[WRITES].edge_weight.long()
        assert int(place.max()) < 150  # the first of copies
        assert torch.equal(data[WRITES].edge_index[:, place], passed[WRITES].edge_index)
    LinkPrediction(width=4).check_dataset(links)
    again = TypedLinks.split(data, "writes")
    assert torch.equal(again.test.edge_label_index, links.test.edge_label_index)
    other = TypedLinks.split(data, WRITES, seed=1)
    assert keys(other.test.edge_label_index) != keys(links.test.edge_label_index)


def test_edges_both_ways_are_one() -> None:
    links = TypedLinks.split(graph(), "cites")
    LinkPrediction(width=4).check_dataset(links)  # refuses those that pass messages backwards


def test_all_edges_do_both() -> None:
    links = TypedLinks.split(graph(), WRITES, disjoint=0.0)
    train = links.passed[0][WRITES]
    assert keys(train.edge_label_index) == keys(train.edge_index)


def test_what_cannot_be_split_is_refused() -> None:
    data = graph()
    with pytest.raises(InputError, match=r"no type. Name one of author,writes,paper, paper,by,author, paper,cites"):
        TypedLinks.split(data)
    with pytest.raises(InputError, match="'reads', which none is called"):
        TypedLinks.split(data, "reads")
    data["paper", "rev_writes", "author"].edge_index = data[BACK].edge_index
    with pytest.raises(InputError, match="at most one reverse"):
        TypedLinks.split(data, WRITES)
    few = HeteroData()
    few["a"].num_nodes = few["b"].num_nodes = 3
    few["a", "to", "b"].edge_index = torch.zeros(2, 0, dtype=torch.long)
    with pytest.raises(InputError, match="need edges to hold back"):
        TypedLinks.split(few)
