"""Heterogeneous graphs from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp  # type: ignore[import-untyped]
import torch

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
        ({"num_nodes": [2]}, "an integer for each"),
        ({"node_types": ["a", "a"]}, "distinct"),
        ({"x_author": np.eye(3)}, r"x_author must be numbers, \[2, features\]"),
        ({"x_paper_data": None}, "x_paper_data"),
        ({"x_paper_indices": [9] * SPARSE.nnz}, "sparse features of 'paper'"),
        ({"y_paper": [0, 1]}, "y_paper must have a row"),
        ({"split_paper": [0, 1, 7]}, "split_paper must be"),
        ({"edges_author__writes__book": [[0], [0]]}, "types of nodes A and B"),
        ({"edges_author__writes__paper": [0, 1]}, r"\[2, num_edges\]"),
        ({"colour": [1]}, "colour"),
    ],
)
def test_bad_files_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_typed_graph(written(tmp_path, **changes))


def test_they_are_no_plain_graphs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold a plain graph, but got a heterogeneous one.*read_typed_graph"):
        from_file(written(tmp_path))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    for path in (tmp_path / "text.npz", tmp_path / "none.npz", tmp_path):
        with pytest.raises(InputError, match="readable"):
            read_typed_graph(path)
