"""Heterogeneous graphs from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp  # type: ignore[import-untyped]
import torch

from gnnautoscale.data import TypedDataset, open_file
from gnnautoscale.data.datasets import from_file
from gnnautoscale.data.hetero_files import read_typed_graph
from gnnautoscale.errors import InputError
from gnnautoscale.graph import TypedGraph

SPARSE = sp.random(3, 5, density=0.5, format="csr", random_state=0)
ARRAYS: dict[str, Any] = {
    "node_types": ["author", "paper"],
    "num_nodes": [2, 3],
    "x_author": np.eye(2),
    "x_paper_indptr": SPARSE.indptr,
    "x_paper_indices": SPARSE.indices,
    "x_paper_data": SPARSE.data,
    "x_paper_shape": SPARSE.shape,
    "y_paper": [0, 1, 0],
    "split_paper": [0, 1, 3],
    "edges_author__writes__paper": [[0, 1], [2, 0]],
}


def written(folder: Path, **changes: Any) -> Path:
    arrays = {name: value for name, value in {**ARRAYS, **changes}.items() if value is not None}
    np.savez(folder / "graph.npz", **arrays)
    return folder / "graph.npz"


def test_types_features_targets_and_edges_are_read(tmp_path: Path) -> None:
    graph = read_typed_graph(written(tmp_path))
    assert (graph["author"].num_nodes, graph["paper"].num_nodes) == (2, 3)
    assert torch.equal(graph["author"].x, torch.eye(2))
    assert np.allclose(graph["paper"].x, SPARSE.toarray())
    assert graph["paper"].y.tolist() == [0, 1, 0]
    masks = [graph["paper"][f"{split}_mask"].tolist() for split in ("train", "val", "test")]
    assert masks == [[True, False, False], [False, True, False], [False, False, False]]
    assert graph.edge_types == [("author", "writes", "paper")]
    assert TypedGraph.of(graph).num_nodes == 5
    both = read_typed_graph(written(tmp_path), undirected=True)
    assert both["paper", "rev_writes", "author"].edge_index.tolist() == [[2, 0], [0, 1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_types": None}, "array node_types"),
        ({"num_nodes": [2]}, "a count for each"),
        ({"num_nodes": [2, -3]}, "a count for each"),
        ({"y_paper": ["crime", "0", "1"]}, "y_paper must be words or numbers, not both"),
        ({"node_types": ["a", "a"]}, "distinct"),
        ({"x_author": np.eye(3)}, r"x_author must be numbers, \[2, features\]"),
        ({"x_paper_shape": None}, "x_paper_shape"),
        ({"x_paper": np.ones((3, 5))}, "x_paper as well"),
        ({"x_paper_indices": [9] * SPARSE.nnz}, "sparse x_paper must be"),
        ({"y_paper": [0, 1]}, "y_paper must have a row"),
        ({"split_paper": [0, 1, 7]}, "split_paper must be"),
        ({"split_paper": ["train", "val", "later"]}, r"or train, val, test and none, but got .*: 'later'"),
        ({"train_mask_paper": [True, False, False]}, "either split or all three masks"),
        ({"edges_author__writes__book": [[0], [0]]}, "types of nodes A and B"),
        ({"edges_author__writes__paper": [0, 1]}, r"\[2, num_edges\]"),
        ({"edge_weight_author__writes__paper": [1.0]}, "a row for each of 2 edges"),
        ({"x_book": np.eye(2)}, "x_book"),
        ({"num_node": [1]}, "num_node"),
        ({"edges_author__writes__paper": None}, "must have a type of edges"),
    ],
)
def test_bad_files_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_typed_graph(written(tmp_path, **changes))


def test_what_is_sensible_is_taken(tmp_path: Path) -> None:
    words = {"split_paper": ["train", "val", "none"], "x_paper_data": None, "title": ["of the graph"]}
    weight = {"edge_weight_author__writes__paper": [0.5, 2.0], "edge_attr_author__writes__paper": np.ones((2, 3))}
    graph = read_typed_graph(written(tmp_path, **words, **weight), undirected=True, max_features=4)
    assert graph["paper"].train_mask.tolist() == [True, False, False]
    assert graph["paper"].x.unique().tolist() == [0.0, 1.0]
    assert graph["paper"].x.size(1) == 4
    assert graph["paper", "rev_writes", "author"].edge_weight.tolist() == [0.5, 2.0]
    assert graph["author", "writes", "paper"].edge_attr.shape == (2, 3)
    masks = {f"{name}_mask_paper": [name == "train", name == "val", False] for name in ("train", "val", "test")}
    graph = read_typed_graph(written(tmp_path, split_paper=None, **masks))
    assert graph["paper"].val_mask.tolist() == [False, True, False]
    both = {"edges_paper__rev_writes__author": [[2, 0], [0, 1]]}
    with pytest.raises(InputError, match=r"has .'paper', 'rev_writes', 'author'. already"):
        read_typed_graph(written(tmp_path, **both), undirected=True)


TABLES = {
    "nodes_author.csv": "id\nann\nbob\n",
    "nodes_paper.csv": "id,year,label,split\n7,1.5,0,train\n8,2.5,1,val\n9,3.5,,none\n",
    "edges_author__writes__paper.csv": "source,target,weight,order\nann,9,1.0,1\nbob,7,0.5,2\n",
}


def folder(path: Path, **changes: str | None) -> Path:
    for name, text in {**TABLES, **changes}.items():
        if text is not None:
            (path / name).write_text(text)
    return path


def test_a_folder_of_tables_is_read(tmp_path: Path) -> None:
    graph = read_typed_graph(folder(tmp_path), undirected=True)
    assert graph["author"].num_nodes == 2
    assert "x" not in graph["author"]
    assert graph["paper"].x.tolist() == [[1.5], [2.5], [3.5]]
    assert graph["paper"].y.tolist() == [0, 1, -1]
    assert graph["paper"].train_mask.tolist() == [True, False, False]
    writes = graph["author", "writes", "paper"]
    assert writes.edge_index.tolist() == [[0, 1], [2, 0]]
    assert (writes.edge_weight.tolist(), writes.edge_attr.tolist()) == ([1.0, 0.5], [[1.0], [2.0]])
    assert graph["paper", "rev_writes", "author"].edge_index.tolist() == [[2, 0], [0, 1]]
    dataset = open_file(tmp_path)
    assert isinstance(dataset, TypedDataset)
    assert dataset.target == "paper"


def test_a_folder_of_one_type_says_how_to_read_it(tmp_path: Path) -> None:
    for name in ("nodes.csv", "edges.csv"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"For one type of nodes, read .*nodes.csv with edges= or --edges .*edges.csv"):
        read_typed_graph(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_paper.csv": None}, "types of nodes A and B, but got author"),
        ({"edges_author__writes__paper.csv": None}, "must have a type of edges"),
        ({"edges_author__writes__paper.csv": "source,target\nann,5\n"}, "edges must name ids of nodes_paper"),
        ({"edges_author__writes__paper.csv": "from,b\n0,1\n"}, "must have the column target"),
        ({"papers.csv": "id\n1\n"}, "but got papers"),
        ({"nodes_author.csv": "id\nann\nann\n"}, "ids of nodes_author must be distinct"),
        ({"nodes_paper.csv": "id,y,label\n7,1,1\n"}, "at most one column for y"),
    ],
)
def test_bad_folders_are_refused(changes: dict[str, str | None], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_typed_graph(folder(tmp_path, **changes))


def test_a_saved_graph_is_read_without_running_code(tmp_path: Path) -> None:
    graph = read_typed_graph(written(tmp_path))
    graph["author"].x = graph["author"].x.double()
    graph["author"].names = ["ann", "bob"]
    torch.save(graph, tmp_path / "graph.pt")
    again = read_typed_graph(tmp_path / "graph.pt", max_features=1)
    assert (again.node_types, again.edge_types) == (graph.node_types, graph.edge_types)
    assert torch.equal(again["author"].x, torch.tensor([[1.0], [0.0]]))
    assert torch.equal(again["paper"].train_mask, graph["paper"].train_mask)
    graph["author"].names = Path("ann")  # an object that runs code when it is opened
    torch.save(graph, tmp_path / "graph.pt")
    with pytest.raises(InputError, match="must open without running code"):
        read_typed_graph(tmp_path / "graph.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "graph.pt")
    with pytest.raises(InputError, match="must hold a PyG HeteroData"):
        read_typed_graph(tmp_path / "graph.pt")


def test_files_of_both_kinds_are_opened(tmp_path: Path) -> None:
    dataset = open_file(written(tmp_path, split_paper=None), split=1)
    assert isinstance(dataset, TypedDataset)
    assert int(dataset.train.train_mask.sum()) == 2
    torch.save(dataset.graph, tmp_path / "typed.pt")
    assert isinstance(open_file(tmp_path / "typed.pt", target="paper"), TypedDataset)
    np.savez(tmp_path / "plain.npz", edge_index=[[0], [1]], x=np.eye(2), y=[0, 1])
    assert not isinstance(open_file(tmp_path / "plain.npz"), TypedDataset)
    with pytest.raises(InputError, match="a type of nodes of a heterogeneous graph"):
        open_file(tmp_path / "plain.npz", target="paper")
    with pytest.raises(InputError, match=r"comes in one file or folder, but got features_file"):
        open_file(tmp_path / "typed.pt", features_file="x.npy")


def test_they_are_no_plain_graphs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold a plain graph, but got a heterogeneous one.*open_file"):
        from_file(written(tmp_path))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    for path in (tmp_path / "text.npz", tmp_path / "none.npz", tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=r"readable|tables"):
            read_typed_graph(path)
