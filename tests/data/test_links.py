"""Edges held back to be predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError

# A path, one edge of each kind: one that only passes messages, and one of each split.
PATH = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
NUMBERS = torch.tensor([-1, 0, 1, 2])


def graph(edges: Tensor, **attributes: Any) -> Dataset:
    return Dataset.of(Data(x=torch.ones(int(edges.max()) + 1, 1), edge_index=edges, **attributes))


def both_ways(edges: Tensor) -> Tensor:
    return torch.cat([edges, edges.flip(0)], dim=1)


def many_edges(count: int = 4000, nodes: int = 300) -> Tensor:
    edges = torch.randint(nodes, (2, count), generator=torch.Generator().manual_seed(0))
    found: Tensor = torch.unique(edges[:, edges[0] < edges[1]], dim=1)
    return found


def triples(data: Data) -> set[tuple[int, ...]]:
    """Edges to predict, with their types."""
    return set(map(tuple, torch.cat([data.edge_label_index, data.edge_label_type.unsqueeze(0)]).t().tolist()))


def pairs(edges: Tensor) -> set[tuple[int, ...]]:
    return set(map(tuple, edges.sort(dim=0).values.t().tolist()))


def test_numbers_say_which_edges_are_held_back() -> None:
    dataset = graph(both_ways(PATH), edge_split=NUMBERS.repeat(2)).split_links()
    graphs = dataset.train, dataset.val, dataset.test
    assert [each.num_edges for each in graphs] == [2, 4, 6]
    assert [each.edge_label_index.tolist() for each in graphs] == [[[1], [2]], [[2], [3]], [[3], [4]]]
    again = graph(both_ways(PATH), edge_split=NUMBERS.repeat(2)).split_links(disjoint=0.0).train
    assert (again.num_edges, again.edge_label_index.tolist()) == (4, [[1], [2]])


@pytest.mark.parametrize("symmetric", [False, True])
def test_where_no_edge_only_passes_messages_a_share_of_the_training_edges_does(symmetric: bool) -> None:
    edges = many_edges()
    split = torch.arange(edges.size(1)) % 3
    given = graph(both_ways(edges), edge_split=split.repeat(2)) if symmetric else graph(edges, edge_split=split)
    dataset = given.split_links(seed=1, disjoint=0.3)
    train, trained = dataset.train, int((split == 0).sum())
    assert 0.25 * trained < train.edge_label_index.size(1) < 0.35 * trained
    assert not pairs(train.edge_label_index) & pairs(train.edge_index)
    assert pairs(train.edge_label_index) | pairs(train.edge_index) == pairs(edges[:, split == 0])
    assert pairs(dataset.val.edge_index) == pairs(edges[:, split == 0])
    other = given.split_links(seed=2, disjoint=0.3).train
    assert pairs(other.edge_label_index) != pairs(train.edge_label_index)


def test_types_are_predicted_and_messages_go_backwards_as_relations_of_their_own() -> None:
    dataset = graph(PATH, edge_split=NUMBERS, edge_type=torch.tensor([0, 2, 1, 2])).split_links(typed=True)
    assert dataset.train.edge_index.tolist() == [[0, 1], [1, 0]]
    assert dataset.train.edge_type.tolist() == [0, 3]
    assert [triples(each) for each in (dataset.train, dataset.val, dataset.test)] == [
        {(1, 2, 2)},
        {(2, 3, 1)},
        {(3, 4, 2)},
    ]
    assert dataset.test.edge_index.tolist() == [[0, 1, 2, 1, 2, 3], [1, 2, 3, 0, 1, 2]]
    assert dataset.test.edge_type.tolist() == [0, 2, 1, 3, 5, 4]


def test_types_without_numbers_are_split_at_random_and_all_edges_of_a_pair_together() -> None:
    edges = many_edges().repeat(1, 2)
    kinds = torch.arange(2).repeat_interleave(edges.size(1) // 2)
    dataset = graph(edges, edge_type=kinds).split_links(typed=True, disjoint=0.0)
    found = {name: pairs(getattr(dataset, name).edge_label_index) for name in ("train", "val", "test")}
    assert not found["train"] & found["val"] | found["train"] & found["test"] | found["val"] & found["test"]
    shares = [len(found[name]) / len(pairs(edges)) for name in ("train", "val", "test")]
    assert shares == pytest.approx([0.85, 0.05, 0.1], abs=0.02)
    assert dataset.test.edge_label_index.size(1) == 2 * len(found["test"])


def test_types_do_not_matter_unless_they_are_to_be_predicted() -> None:
    edges = many_edges()
    dataset = graph(edges, edge_type=torch.zeros(edges.size(1), dtype=torch.long)).split_links()
    assert "edge_type" not in dataset.train
    assert "edge_label_type" not in dataset.train


@pytest.mark.parametrize(
    ("attributes", "options", "message"),
    [
        ({"edge_split": torch.tensor([0])}, {}, r"edge_split must be \[4\]"),
        ({}, {"typed": True}, "relations are predicted where edges have types"),
        (
            {"edge_split": NUMBERS, "edge_type": torch.tensor([4, 0, 0, 0])},
            {"typed": True},
            "relations that only pass messages have smaller numbers.* got relation 4",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(attributes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        graph(PATH, **attributes).split_links(**options)


def test_a_graph_without_edges_to_hold_back_is_refused() -> None:
    with pytest.raises(InputError, match="links to predict need edges to hold back"):
        Dataset.of(Data(x=torch.ones(5, 1), edge_index=PATH[:, :0])).split_links()


def test_several_graphs_are_not_split() -> None:
    first, second = (Data(x=torch.ones(5, 1), edge_index=PATH) for _ in range(2))
    with pytest.raises(InputError, match="links are split in one graph, but got several graphs"):
        Dataset("two", first, second, second).split_links()
