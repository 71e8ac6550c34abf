"""Many graphs as one: joined, split, read from files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, InMemoryDataset  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset, folds, join_graphs
from gnnautoscale.data.datasets import from_file
from gnnautoscale.errors import InputError


def graph(number: int, nodes: int = 3) -> Data:
    x = torch.full((nodes, 2), float(number))
    edge_index = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
    weight = torch.full((nodes - 1,), float(number))
    return Data(x=x, edge_index=edge_index, edge_weight=weight, y=torch.tensor([number % 2]), smiles="C", row=[1, 2])


class Molecules(InMemoryDataset):  # type: ignore[misc]
    """A data set of PyG's kind."""

    def __init__(self) -> None:
        super().__init__(None)
        self.data, self.slices = self.collate([graph(number) for number in range(4)])


@pytest.mark.parametrize(
    "given",
    [
        [graph(0), graph(1), graph(2), graph(3)],
        Batch.from_data_list([graph(number) for number in range(4)]),
        Molecules(),
        join_graphs([graph(number) for number in range(4)]),
    ],
    ids=["list", "batch", "PyG", "joined"],
)
def test_join(given: Any) -> None:
    joined = join_graphs(given)
    assert sorted(joined.keys()) == ["edge_index", "edge_weight", "graph_id", "graph_y", "x"]
    assert joined.graph_id.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert joined.graph_y.tolist() == [0, 1, 0, 1]
    assert joined.edge_index.tolist() == [[0, 1, 3, 4, 6, 7, 9, 10], [1, 2, 4, 5, 7, 8, 10, 11]]


def test_split() -> None:
    graphs = [graph(number, nodes=2 + number) for number in range(4)]
    dataset = Dataset.of_graphs(graphs, split=torch.tensor([2, 0, 1, 0]))
    assert dataset.train.x[:, 0].tolist() == [1.0] * 3 + [3.0] * 5
    assert dataset.train.edge_index.tolist() == [[0, 1, 3, 4, 5, 6], [1, 2, 4, 5, 6, 7]]
    assert dataset.train.edge_weight.tolist() == [1.0] * 2 + [3.0] * 4
    assert dataset.train.graph_id.tolist() == [0] * 3 + [1] * 5
    assert (dataset.val.graph_y.tolist(), dataset.test.graph_y.tolist()) == ([0], [0])
    assert dataset.test.num_nodes == 2


def test_splits_by_folds_are_disjoint_and_change_with_the_seed() -> None:
    graphs = [graph(number) for number in range(40)]
    tests = [Dataset.of_graphs(graphs, seed=seed).test.x[::3, 0].int().tolist() for seed in range(10)]
    assert sorted(number for fold in tests for number in fold) == list(range(40))
    following = Dataset.of_graphs(graphs, seed=3).val.x[::3, 0].int().tolist()
    assert following == tests[4]


def test_folds_have_the_same_share_of_each_class() -> None:
    y = torch.arange(200) % 4
    fold = folds(y, 10)
    assert bool((torch.bincount(fold * 4 + y) == 5).all())
    assert not torch.equal(fold, folds(y, 10, seed=1))
    assert torch.bincount(folds(torch.rand(30), 3)).tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "graphs are a list"),
        ("graphs", "graphs are a list"),
        (Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 0).long()), "need graph_id"),
        (Data(x=torch.ones(2, 1), graph_id=torch.tensor([0, 2]), y=torch.ones(3)), "graph_id must number the graphs"),
        (Data(x=torch.ones(2, 1), graph_id=torch.tensor([0.0, 1.0]), y=torch.ones(2)), "graph_id must number"),
        ([Data(x=torch.ones(2, 1)), Data(x=torch.ones(2, 1))], "y must have one row for each of the 2 graphs"),
        ([Data(x=torch.ones(2, 1), y=torch.ones(3))] * 2, "y must have one row for each of the 2 graphs"),
        (
            Data(
                x=torch.ones(2, 1),
                graph_id=torch.tensor([0, 1]),
                y=torch.ones(2),
                edge_index=torch.tensor([[0], [1]]),
            ),
            "edges stay inside their graph",
        ),
    ],
)
def test_bad_graphs_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        join_graphs(given)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (torch.tensor([0, 1, 2]), r"split must be int64, \[4\]"),
        (torch.tensor([0, 1, 2, 7]), r"split must be int64, \[4\]"),
        (torch.tensor([0, 0, 2, 2]), "validation needs at least one graph"),
    ],
)
def test_bad_splits_are_refused(split: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset.of_graphs([graph(number) for number in range(4)], split=split)


def arrays(**changes: Any) -> dict[str, Any]:
    given = {"ptr": [0, 2, 5, 6], "node_tag": [0, 2, 1, 1, 0, 0], "edge_index": [[0, 2, 3], [1, 3, 4]], "y": [1, 0, 1]}
    return {**given, "split": [0, 1, 2], **changes}


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "graphs.npz"
    np.savez(path, **{name: value for name, value in arrays(**changes).items() if value is not None})
    return path


def test_an_archive_of_graphs(tmp_path: Path) -> None:
    dataset = from_file(saved(tmp_path), undirected=True)
    assert dataset.name == "graphs"
    assert dataset.train.x.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert dataset.train.edge_index.tolist() == [[0, 1], [1, 0]]
    assert (dataset.val.graph_y.tolist(), dataset.val.num_nodes) == ([0], 3)
    again = from_file(saved(tmp_path, ptr=None, graph_id=[0, 0, 1, 1, 1, 2], split=None, graph_split=[0, 1, 2]))
    assert torch.equal(again.test.graph_y, dataset.test.graph_y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ptr": [0, 2, 2, 6]}, "ptr must be"),
        ({"ptr": [1, 2, 4, 6]}, "ptr must be"),
        ({"node_tag": [0, -1, 1, 1, 0, 0]}, "node_tag stands for x"),
        ({"node_tag": [0.5, 1, 1, 1, 0, 0]}, "node_tag must be integers"),
        ({"x": np.ones((6, 1))}, "node_tag stands for x"),
        ({"split": [0, 1, 5]}, "graph_split must be 0"),
        ({"ptr": [0, 2, 5, 7]}, "graph_id"),
    ],
)
def test_bad_archives_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_file(saved(tmp_path, **changes))


def test_tables_with_a_column_of_graphs(tmp_path: Path) -> None:
    nodes, edges = tmp_path / "nodes.csv", tmp_path / "edges.csv"
    nodes.write_text("id,graph,a,y,split\nu,b,1,1,train\nv,b,2,1,train\nw,c,3,0,val\nz,a,4,1,test\n")
    edges.write_text("source,target\nu,v\n")
    dataset = from_file(nodes, edges=edges)
    assert dataset.train.x.tolist() == [[1.0], [2.0]]
    assert (dataset.train.graph_y.tolist(), dataset.val.graph_y.tolist()) == ([1], [0])
    assert dataset.train.num_edges == 1
    nodes.write_text("id,graph,a,y,split\nu,b,1,1,train\nv,b,2,0,train\nw,c,3,0,val\nz,a,4,1,test\n")
    with pytest.raises(InputError, match="all nodes of a graph must have the same y"):
        from_file(nodes, edges=edges)
