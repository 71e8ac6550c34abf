"""What is found out about a graph, and what is refused before it can do harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from conftest import undirected_graph
from gnnautoscale.errors import InputError
from gnnautoscale.graph.graph import Graph

#  0 -> 1, 2 -> 1, 1 -> 0, 3 -> 3, 0 -> 1 again; node 4 is isolated
EDGES = torch.tensor([[0, 2, 1, 3, 0], [1, 1, 0, 3, 1]])


def test_locate() -> None:
    graph = Graph(Data(edge_index=EDGES, num_nodes=5))
    n_id = torch.tensor([3, 0])
    assert graph.locate(n_id, torch.tensor([[0, 1], [3, 3]])).tolist() == [[1, -1], [0, 0]]
    assert graph.locate(torch.tensor([1]), torch.tensor([3, 1])).tolist() == [-1, 0]


def test_edge_attributes_are_found() -> None:
    data = undirected_graph()
    data.note = "text"
    data.scale = torch.tensor(3.0)
    # In the order of the data, which PyG's keys() does not keep.
    graph = Graph(data)
    assert list(graph.edge_attributes) == [name for name, _ in data if name in graph.edge_attributes]
    assert set(graph.edge_attributes) == {"edge_weight", "edge_attr", "edge_type"}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update({"edge_index": data.edge_index.flip(1)}),
        lambda data: data.update({"edge_weight": data.edge_weight + 1}),
        lambda data: data.update({"edge_extra": data.edge_weight}),
        lambda data: data.update({"x": torch.randn(data.num_nodes + 1, 2), "y": None, "train_mask": None}),
    ],
    ids=["edges", "weights", "attribute", "nodes"],
)
def test_key_tells_graphs_apart(change: Callable[[Data], Any]) -> None:
    data = undirected_graph()
    assert Graph(data).key == Graph(undirected_graph()).key
    changed = data.clone()
    change(changed)
    assert Graph(changed).key != Graph(data).key


def bad(**values: Any) -> Data:
    given: dict[str, Any] = {"x": torch.ones(4, 2), "edge_index": torch.tensor([[0, 1], [1, 3]])}
    return Data(**{**given, **values})


def filled(shape: tuple[int, ...], value: float, at: tuple[int, ...]) -> Tensor:
    tensor = torch.ones(shape)
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(num_nodes=0), "at least one node"),
        (Data(x=torch.empty(0, 3), edge_index=torch.empty(2, 0, dtype=torch.long)), "at least one node"),
        (bad(edge_index=None), "no edge_index"),
        (bad(edge_index=torch.tensor([0, 1])), r"shape \(2,\)"),
        (bad(edge_index=torch.zeros(3, 2, dtype=torch.long)), r"shape \(3, 2\)"),
        (bad(edge_index=torch.tensor([[0, 1], [1, 3]], dtype=torch.int32)), "int64, but got torch.int32"),
        (bad(edge_index=torch.tensor([[0.0], [1.0]])), "int64, but got torch.float32"),
        (bad(edge_index=torch.tensor([[0, 4], [1, 3]])), "from 0 to 3, but got values from 0 to 4"),
        (bad(edge_index=torch.tensor([[0, -1], [1, 3]])), "from 0 to 3, but got values from -1 to 3"),
        (bad(num_nodes=4, x=torch.ones(3, 2)), r"x must have one row for each of the 4 nodes.*\(3, 2\)"),
        (bad(y=torch.ones(3)), r"y must have one row for each of the 4 nodes.*\(3,\)"),
        (bad(y=torch.tensor(1)), r"y must have one row.*\(\)"),
        (bad(val_mask=torch.ones(5, dtype=torch.bool)), r"val_mask must have one row"),
        (bad(x=filled((4, 2), float("nan"), (2, 1))), "x must be finite.*in 1 rows, the first in row 2"),
        (bad(x=filled((4, 2), float("inf"), (0, 1))), "x must be finite.*the first in row 0"),
        (bad(edge_weight=filled((2,), float("-inf"), (1,))), "edge_weight must be finite.*the first in row 1"),
        (bad(edge_attr=filled((2, 3), float("nan"), (1, 2))), "edge_attr must be finite"),
        (bad(x=torch.ones(4, 2, requires_grad=True)), "x must be data, not a parameter"),
        (bad(edge_weight=torch.ones(2, requires_grad=True)), "edge_weight must be data"),
        (bad(edge_index_2=torch.tensor([[0], [1]])), r"one set of edges.*also edge_index_2.*edge_type.*RGCNConv"),
        (bad(knn_edge_index=torch.tensor([[0, 1], [1, 2]])), "one set of edges.*also knn_edge_index"),
        (bad(edge_index_near=[[0], [1]]), "one set of edges.*also edge_index_near"),
        (bad(adj_t=torch.eye(4).to_sparse()), "one set of edges.*also adj_t"),
        (bad(adj=torch.eye(4).to_sparse()), "one set of edges.*also adj"),
    ],
)
def test_bad_graphs_are_refused(data: Data, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Graph(data)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_rows_are_refused(layout: str) -> None:
    kind = getattr(torch, f"sparse_{layout}")
    for name, rows in (("x", 4), ("y", 4), ("words", 4), ("edge_attr", 2), ("edge_words", 2)):
        message = rf"{name} must be a dense tensor, but got torch.sparse_{layout}. Use data.{name} = .*to_dense"
        with pytest.raises(InputError, match=message):
            Graph(bad(**{name: torch.ones(rows, 9).to_sparse(layout=kind)}))


def test_unusual_graphs_are_accepted() -> None:
    graph = Graph(bad(x=torch.tensor([1, 2, 3, 4]), y=filled((4,), float("nan"), (1,)), edge_index=EDGES[:, :3]))
    assert graph.num_nodes == 4
    assert Graph(Data(edge_index=EDGES, num_nodes=7)).num_nodes == 7
    assert Graph(bad(x=torch.ones(4, 2, dtype=torch.float16))).edge_attributes == {}
    assert Graph(bad(edge_label_index=torch.tensor([[0], [3]]), other=torch.eye(3).to_sparse())).num_nodes == 4
    assert Graph(bad(adj=torch.eye(4))).features.keys() == {"x", "adj"}
