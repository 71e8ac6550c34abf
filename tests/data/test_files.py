import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.data.datasets import from_file
from gnnautoscale.data.files import read_graph, read_named_graph
from gnnautoscale.errors import InputError

ROOT = os.environ.get("GNNAUTOSCALE_DATA")


def small() -> dict[str, Any]:
    """Three nodes, the edges 0 -> 1 and 1 -> 2."""
    return {
        "edge_index": np.array([[0, 1], [1, 2]]),
        "x": np.array([[1, 0, 2], [0, 1, 0], [0, 0, 3]], dtype=np.float64),
        "y": np.array([0, 1, 1]),
    }


def saved(tmp_path: Path, **changes: Any) -> Path:
    """The small graph with changes as .npz; None removes a key."""
    arrays = {name: value for name, value in {**small(), **changes}.items() if value is not None}
    np.savez(tmp_path / "graph.npz", **arrays)
    return tmp_path / "graph.npz"


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_npz(tmp_path: Path) -> None:
    data = read_graph(saved(tmp_path, split=np.array([0, 1, 2]), edge_weight=[0.5, 2.0], edge_type=[3, 4]))
    assert data.x.tolist() == [[1, 0, 2], [0, 1, 0], [0, 0, 3]]
    assert data.x.dtype == data.edge_weight.dtype == torch.float32
    assert data.edge_index.tolist() == [[0, 1], [1, 2]]
    assert data.y.tolist() == [0, 1, 1]
    assert data.train_mask.tolist() == [True, False, False]
    assert data.test_mask.tolist() == [False, False, True]
    assert data.edge_weight.tolist() == [0.5, 2.0]
    assert data.edge_type.tolist() == [3, 4]


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    data = read_graph(saved(tmp_path, colour=np.array([{}], dtype=object)))
    assert sorted(data.keys()) == ["edge_index", "x", "y"]
    both = as_data()
    both.colour = torch.ones(3)
    assert both.is_node_attr("colour")  # which the graph remembers, also in a file
    torch.save(both, tmp_path / "graph.pt")
    assert sorted(read_graph(tmp_path / "graph.pt").keys()) == ["edge_index", "x", "y"]


def test_npz_masks_and_several_labels(tmp_path: Path) -> None:
    masks = {"train_mask": [1, 0, 0], "val_mask": [False, True, False], "test_mask": [0, 0, 1]}
    data = read_graph(saved(tmp_path, y=np.array([[1, 0], [0, 1], [1, 1]]), **masks))
    assert data.y.tolist() == [[1, 0], [0, 1], [1, 1]]
    assert data.y.dtype == torch.float32
    assert data.train_mask.tolist() == [True, False, False]


@pytest.mark.parametrize(("values", "expected"), [(None, 1.0), ([1.0, 2.0, 4.0, 3.0], None)])
def test_npz_sparse(tmp_path: Path, values: list[float] | None, expected: float | None) -> None:
    sparse = {"x_indptr": [0, 2, 3, 4], "x_indices": [0, 2, 1, 2], "x_shape": [3, 3], "x": None, "x_data": values}
    dense = torch.tensor([[1.0, 0, 2], [0, 4, 0], [0, 0, 3]])
    data = read_graph(saved(tmp_path, **sparse))
    assert torch.equal(data.x, dense if expected is None else (dense > 0).float())
    cut = read_graph(saved(tmp_path, **sparse), max_features=2)
    assert torch.equal(cut.x, data.x[:, :2])


def test_max_features(tmp_path: Path) -> None:
    assert read_graph(saved(tmp_path), max_features=2).x.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert read_graph(saved(tmp_path), max_features=9).x.size(1) == 3
    with pytest.raises(InputError, match="max_features must be an integer of at least 1"):
        read_graph(saved(tmp_path), max_features=0)


def test_undirected(tmp_path: Path) -> None:
    edges = np.array([[0, 1, 2, 0, 0], [1, 0, 2, 1, 2]])  # both ways, a self-loop, a duplicate, one way
    path = saved(tmp_path, edge_index=edges, edge_weight=[1.0, 2, 3, 4, 5])
    data = read_graph(path, undirected=True)
    assert data.edge_index.tolist() == [[0, 0, 1, 2, 2], [1, 2, 0, 0, 2]]
    assert data.edge_weight.tolist() == [1, 5, 2, 5, 3]
    assert read_graph(path).edge_index.tolist() == edges.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": None}, "needs edge_index"),
        ({"x": None}, "needs x"),
        ({"edge_weights": [1, 2]}, "is read for edge_index, x, y, .* but got edge_weights"),
        ({"edge_index": [[0.0], [1.0]]}, "edge_index must be integers, but got type float64"),
        ({"edge_index": [[0], [3]]}, "must hold indices from 0 to 2, but got values from 0 to 3"),
        ({"edge_index": [[0], [-1]]}, "must hold indices from 0 to 2, but got values from -1 to 0"),
        ({"edge_index": [[0, 1, 2]]}, r"edge_index must be a tensor of shape \[2, num_edges\]"),
        ({"edge_index": [0, 1]}, r"edge_index must be a tensor of shape \[2, num_edges\]"),
        ({"x": np.ones(3)}, r"x must be floating, \[nodes, features\]"),
        ({"x": [["a"], ["b"], ["c"]]}, "x must be numbers"),
        ({"x": [[1.0], [np.nan], [np.inf]]}, "x must be finite, .* in 2 rows, the first in row 1"),
        ({"x": [[1.0], [1e300], [0.0]]}, "x must be finite"),
        ({"x": np.ones((0, 1)), "y": np.ones(0, dtype=int), "edge_index": np.ones((2, 0), dtype=int)}, "one node"),
        ({"y": [0, 1]}, "y must have one row for each of the 3 nodes"),
        ({"y": 1}, "y must have one row for each of the 3 nodes"),
        ({"y": ["a", "b", "3"]}, "y must be words or numbers, not both, but got 'a' beside '3'"),
        ({"split": [0, 1, 4]}, r"split must be 0 \(training\).* but got 4"),
        ({"split": [0, 1]}, "train_mask must have one row for each of the 3 nodes"),
        ({"train_mask": [1, 0, 0]}, "either split or all three masks"),
        ({"train_mask": [5, 0, 0], "val_mask": [0, 0, 0], "test_mask": [0, 0, 0]}, "train_mask must be True or False"),
        ({"edge_weight": [1.0]}, "edge_weight must have one row for each of the 2 edges"),
        ({"edge_attr": [[1.0], [np.inf]]}, "edge_attr must be finite"),
        ({"edge_type": [0.5, 1]}, "edge_type must be integers"),
        ({"x_indptr": [0, 1, 1, 1]}, "sparse x is"),
        ({"x_data": [1.0]}, "sparse x is"),
        ({"x": None, "x_indptr": [0, 1, 1, 2], "x_indices": [0, 9], "x_shape": [3, 3]}, "compressed sparse row"),
        ({"x": None, "x_indptr": [0, 2, 1, 2], "x_indices": [0, 1], "x_shape": [3, 3]}, "compressed sparse row"),
        ({"x": None, "x_indptr": [0, 2], "x_indices": [0, 1], "x_shape": [3, 3]}, "compressed sparse row"),
        ({"x": np.array([[{}], [1], [2]], dtype=object)}, "readable .npz file.*allow_pickle=False"),
    ],
)
@pytest.mark.parametrize("undirected", [False, True])
def test_npz_refusals(tmp_path: Path, changes: dict[str, Any], message: str, undirected: bool) -> None:
    with pytest.raises(InputError, match=message):
        from_file(undirected=undirected, path=saved(tmp_path, **changes))


@pytest.mark.parametrize("kind", ["npz", "pt", "parquet", "csv"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "noise"])
def test_damaged(tmp_path: Path, kind: str, damage: str) -> None:
    path = tmp_path / f"graph.{kind}"
    if damage == "truncated":
        content = saved(tmp_path).read_bytes()
        if kind == "pt":
            torch.save(Data(x=torch.ones(50, 50)), path)
            content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    elif damage != "missing":
        path.write_bytes(b"" if damage == "empty" else bytes(range(256)))
    edges = text(tmp_path / "edges.csv", "source,target\n0,1\n") if kind in ("csv", "parquet") else None
    with pytest.raises(InputError, match=f"graph.{kind} must"):
        read_graph(path, edges=edges)


def test_kinds_and_pairs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in .npz, .pt, .csv, .parquet, but got graph.txt"):
        read_graph("graph.txt")
    with pytest.raises(InputError, match=r"a table of nodes .* comes with a table of edges"):
        read_graph("nodes.csv")
    with pytest.raises(InputError, match=r"a table of nodes .* comes with a table of edges"):
        read_graph(saved(tmp_path), edges="edges.csv")
    with pytest.raises(InputError, match=r"a table of nodes .* comes with a table of edges"):
        read_graph("nodes.csv", edges="edges.npz")
    array = tmp_path / "array.npz"
    with array.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(InputError, match=r"readable .npz file"):
        read_graph(array)


def as_data() -> Data:
    return Data(**{name: torch.from_numpy(value) for name, value in small().items()})


def test_pt(tmp_path: Path) -> None:
    data = as_data()
    data.num_nodes = 3
    data.train_mask = data.val_mask = data.test_mask = torch.tensor([True, True, False])
    torch.save(data, tmp_path / "graph.pt")
    loaded = read_graph(tmp_path / "graph.pt", undirected=True, max_features=2)
    assert loaded.x.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert loaded.x.dtype == torch.float32
    assert loaded.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]


class Trap:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_pt_never_runs_code(tmp_path: Path) -> None:
    data = as_data()
    data.x = Trap(tmp_path / "sprung")
    torch.save(data, tmp_path / "graph.pt")
    with pytest.raises(InputError, match=r"must open without running code, but got a pickled \S*open"):
        read_graph(tmp_path / "graph.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": torch.ones(2)}, "must hold a PyG Data, but got a dict"),
        ([as_data()], "must hold a PyG Data, but got a list"),
        (torch.nn.Linear(2, 2), "must open without running code"),
        (Data(x=torch.ones(2, 1), train_masks=torch.ones(2)), "but got train_masks"),
        (Data(x=[1, 2]), "x must be a dense tensor, but got a list"),
        (Data(x=torch.ones(2, 1), y=torch.tensor([0, 1])), "needs edge_index"),
    ],
)
def test_pt_refusals(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "graph.pt")
    with pytest.raises(InputError, match=message):
        read_graph(tmp_path / "graph.pt")


def parquet(path: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="Parquet tables need pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    return path


def test_csv(tmp_path: Path) -> None:
    nodes = text(tmp_path / "n.csv", 'height,id,label,split,width\n1,"b, c",0,train,2\n3,a,1,test,4\n5,d, 1 ,val,6\n')
    edges = text(tmp_path / "e.csv", 'source,target,weight,age\na,"b, c",0.5,7\nd,a,2,8\n')
    data = read_graph(nodes, edges=edges)
    assert data.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.y.tolist() == [0, 1, 1]
    assert data.edge_index.tolist() == [[1, 2], [0, 1]]
    assert data.edge_weight.tolist() == [0.5, 2]
    assert data.edge_attr.tolist() == [[7], [8]]
    assert data.train_mask.tolist() == [True, False, False]
    assert data.val_mask.tolist() == [False, False, True]


def test_csv_without_ids_or_edges(tmp_path: Path) -> None:
    nodes = text(tmp_path / "n.csv", "y,a\n0,1\n1,2\n")
    assert read_graph(nodes, edges=text(tmp_path / "e.csv", "source,target\n1,0\n")).edge_index.tolist() == [[1], [0]]
    assert read_graph(nodes, edges=text(tmp_path / "e.csv", "source,target\n")).edge_index.shape == (2, 0)


def test_parquet(tmp_path: Path) -> None:
    nodes = parquet(tmp_path / "n.parquet", id=[7, 3, 5], y=[0, 1, 1], split=[0, 1, 2], a=[0.5, 1, 2], b=[True] * 3)
    edges = parquet(tmp_path / "e.parquet", source=[7, 3], target=[3, 5])
    data = read_graph(nodes, edges=edges)
    assert data.edge_index.tolist() == [[0, 1], [1, 2]]
    assert data.x.tolist() == [[0.5, 1], [1, 1], [2, 1]]
    assert data.test_mask.tolist() == [False, False, True]
    mixed = read_graph(nodes, edges=text(tmp_path / "e.csv", "source,target\n5,7\n"))
    assert mixed.edge_index.tolist() == [[2], [0]]
    named = parquet(tmp_path / "s.parquet", id=["u", "v"], label=[0, 1], a=[1, 2], split=["train", "val"])
    assert read_graph(named, edges=text(tmp_path / "e.csv", "source,target\nv,u\n")).edge_index.tolist() == [[1], [0]]


def test_empty_cells_are_unknown_targets_and_nodes_in_no_split(tmp_path: Path) -> None:
    edges = text(tmp_path / "e.csv", "source,target\n")
    for nodes in (
        text(tmp_path / "n.csv", "a,y,split\n1,2,train\n1,,\n1,nan,none\n"),
        parquet(tmp_path / "n.parquet", a=[1, 1, 1], y=[2, None, None], split=["train", None, "none"]),
    ):
        data = read_graph(nodes, edges=edges)
        assert (data.y.tolist(), data.y.dtype) == ([2, -1, -1], torch.int64)
        assert data.train_mask.tolist() == [True, False, False]
        assert not (data.val_mask | data.test_mask).any()
    for nodes in (
        text(tmp_path / "n.csv", "a,y\n1,2.5\n1,\n"),
        parquet(tmp_path / "n.parquet", a=[1, 1], y=[2.5, None]),
    ):
        y = read_graph(nodes, edges=edges).y
        assert (float(y[0]), bool(y[1].isnan())) == (2.5, True)


@pytest.mark.parametrize("none", [3, -1])
def test_nodes_in_no_split(tmp_path: Path, none: int) -> None:
    data = read_graph(saved(tmp_path, split=np.array([0, none, 2])))
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.tolist() == [[True, False, False], [False] * 3, [False, False, True]]


def test_splits_may_be_words(tmp_path: Path) -> None:
    data = read_graph(saved(tmp_path, split=np.array(["train", "none", "test"])))
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.tolist() == [[True, False, False], [False] * 3, [False, False, True]]


def test_a_column_of_classes_stays_classes(tmp_path: Path) -> None:
    """Not numbers, which would be regressed on without a word."""
    assert read_graph(saved(tmp_path, y=np.array([[0], [2], [1]]))).y.dtype == torch.long
    assert read_graph(saved(tmp_path, y=np.array([[0, 1], [1, 1], [1, 0]]))).y.dtype == torch.float


def test_edges_have_splits_as_well(tmp_path: Path) -> None:
    nodes = text(tmp_path / "n.csv", "a\n1\n1\n1\n1\n1\n")
    edges = text(tmp_path / "e.csv", "source,target,split\n0,1,none\n1,2,train\n2,3,val\n3,4,test\n")
    data = read_graph(nodes, edges=edges, undirected=True)
    assert "edge_attr" not in data
    assert sorted(zip(*data.edge_index.tolist(), data.edge_split.tolist(), strict=True))[:3] == [
        (0, 1, -1),
        (1, 0, -1),
        (1, 2, 0),
    ]
    with pytest.raises(InputError, match=r"edge_split must be 0 \(training\)"):
        read_graph(saved(tmp_path, edge_split=[0, 7]))


def test_a_knowledge_graph(tmp_path: Path) -> None:
    triples: dict[str, Any] = {"train": [[0, 0, 1], [1, 1, 2]], "valid": [[2, 0, 3]], "test": [[3, 1, 0]]}
    file = tmp_path / "kg.npz"
    np.savez(file, **triples, num_nodes=5)
    data = read_graph(file)
    assert (data.num_nodes, data.x.tolist()) == (5, [[1.0]] * 5)
    assert data.edge_index.tolist() == [[0, 1, 2, 3], [1, 2, 3, 0]]
    assert (data.edge_type.tolist(), data.edge_split.tolist()) == ([0, 1, 0, 1], [0, 0, 1, 2])
    np.savez(file, **{**triples, "test": [[0, 1]]}, num_nodes=5)
    with pytest.raises(InputError, match=r"triples must be \[n, 3\].* \[1, 2\]"):
        read_graph(file)
    np.savez(file, train=triples["train"], num_nodes=5)
    with pytest.raises(InputError, match="a knowledge graph is train, valid, test and num_nodes"):
        read_graph(file)


def test_yes_or_no_stays_bool(tmp_path: Path) -> None:
    assert read_graph(saved(tmp_path, y=np.array([True, False, True]))).y.dtype == torch.bool


def test_parquet_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = text(tmp_path / "e.csv", "source,target\n")
    with pytest.raises(InputError, match="a value in every cell, except of y, split, but got 1 without"):
        read_graph(parquet(tmp_path / "n.parquet", y=[0, 1], a=[1.0, None]), edges=edges)
    with pytest.raises(InputError, match="a must be numbers"):
        read_graph(parquet(tmp_path / "n.parquet", y=[0, 1], a=["u", "v"]), edges=edges)
    with pytest.raises(InputError, match="id, source and target must be integers"):
        read_graph(parquet(tmp_path / "n.parquet", id=[0.0, 1.0], y=[0, 1], a=[1, 2]), edges=edges)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        read_graph(tmp_path / "n.parquet", edges=edges)


def test_tables_may_use_other_names_words_and_separators(tmp_path: Path) -> None:
    nodes = text(tmp_path / "n.csv", "Node_ID;feature;Label\nann;1;dog\nbob;2;\ncyd;3;cat\n")
    edges = text(tmp_path / "e.csv", "src\tdst\nann\tbob\ncyd\tann\n")
    data, names = read_named_graph(nodes, edges=edges)
    assert data.edge_index.tolist() == [[0, 2], [1, 0]]
    assert (data.y.tolist(), names.classes) == ([1, -1, 0], ("cat", "dog"))
    assert names.nodes is not None
    assert (names.nodes.tolist(), data.x.flatten().tolist()) == (["ann", "bob", "cyd"], [1, 2, 3])
    table = parquet(tmp_path / "n.parquet", label=["dog", None, "cat"], feature=[1.0, 2.0, 3.0])
    ends = parquet(tmp_path / "e.parquet", **{"from": [0, 2], "to": [1, 0]})
    data, names = read_named_graph(table, edges=ends)
    assert (data.y.tolist(), names.classes, names.nodes) == ([1, -1, 0], ("cat", "dog"), None)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ("y,label,a\n0,0,1\n", "source,target\n", "at most one column for y, but got y and label"),
        ("y\n0\n", "source,target\n", "a table of nodes needs features"),
        ("y,a\n0,1\n", "from,b\n0,0\n", r"must have the column target \(or dst, .*but got the columns source, b"),
        ("y,a\n0,1\n", "dst,to\n0,0\n", "at most one column for target, but got dst and to"),
        ("y,a\n", "source,target\n", "at least one row"),
        ("y,a,a\n0,1,1\n", "source,target\n", "distinct column names"),
        ("y,a\n0,1\n0\n", "source,target\n", "requires 2 columns but 1 were found"),
        ("y,a\n0,1\n0,1,2\n", "source,target\n", "requires 2 columns but 3 were found"),
        ("y,a\n0,\n", "source,target\n", "column 'a' of .* must hold numbers, but got '' in row 1"),
        ("y,a\n0,red\n", "source,target\n", "column 'a' of .* must hold numbers, but got 'red' in row 1"),
        ("y,a\ncat,1\n2,1\n", "source,target\n", "y must be words or numbers, not both"),
        ("y,a,split\n0,1,later\n", "source,target\n", "split must be integers"),
        ("y,a\n0,nan\n", "source,target\n", "x must be finite"),
        ("id,y,a\n4,0,1\n4,0,1\n", "source,target\n", r"distinct, but got twice \[4\]"),
        ("id,y,a\n4,0,1\n5,0,1\n", "source,target\n4,5\n5,6\n4,7\n", r"2 unknown ids, the first \[6\]"),
        ("id,y,a\n4,0,1\n5,0,1\n", "source,target\n4,u\n", r"1 unknown ids, the first \['u'\]"),
    ],
)
def test_table_refusals(tmp_path: Path, nodes: str, edges: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_file(text(tmp_path / "n.csv", nodes), edges=text(tmp_path / "e.csv", edges))


def test_targets_keep_their_kind(tmp_path: Path) -> None:
    table = text(tmp_path / "e.csv", "source,target\n")
    for content, expected in (("0\n1\n", torch.int64), ("0.5\n1\n", torch.float32)):
        nodes = text(tmp_path / "n.csv", "a,y\n" + "".join(f"1,{line}\n" for line in content.split()))
        assert read_graph(nodes, edges=table).y.dtype == expected
    assert read_graph(saved(tmp_path, y=[0.5, 1, 2])).y.tolist() == [0.5, 1, 2]
    assert "y" not in read_graph(saved(tmp_path, y=None))
    assert "y" not in read_graph(text(tmp_path / "n.csv", "a\n1\n"), edges=table)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"x must be floating, \[nodes, features\], but got a NoneType"),
        (torch.ones(3, 2, dtype=torch.long), "x must be floating"),
        (torch.ones(3), "x must be floating"),
        (torch.ones(3, 2).to_sparse(), "x must be a dense tensor"),
        (torch.tensor([[0.0, 1], [2, 3], [float("nan"), 4]]), "x must be finite.* row 2"),
    ],
)
def test_features_that_no_model_takes_are_refused(value: Any, message: str) -> None:
    data = as_data()
    data.x = data.x.float()
    Dataset.of(data).check()
    data.x = value
    with pytest.raises(InputError, match=message):
        Dataset.of(data).check()


@pytest.mark.data
@pytest.mark.skipif(ROOT is None, reason="GNNAUTOSCALE_DATA is not set")
def test_wordnet() -> None:
    path = Path(str(ROOT)) / "WordNet3" / "raw" / "wordnet3.npz"
    data = read_graph(path, undirected=True, max_features=1000)
    assert data.x.shape == (117_659, 1000)
    assert bool(((data.x == 0) | (data.x == 1)).all())
    row, col = data.edge_index
    assert int((row != col).sum()) == 2 * 183_789
    assert data.is_undirected()
    assert int(data.y.max()) == 44


def test_features_may_lie_in_a_mapped_file_of_their_own(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "graph.npz", edge_index=[[0, 1], [1, 2]], y=[0, 1, 1])
    data = read_graph(tmp_path / "graph.npz", features_file=tmp_path / "x.npy")
    assert torch.equal(data.x, torch.from_numpy(x))
    with (tmp_path / "x.npy").open("r+b") as stream:  # what is mapped follows the file
        stream.seek(-4, 2)
        stream.write(np.float32(9.0).tobytes())
    assert data.x[2, 1] == 9.0
    data.x[0, 0] = 7.0
    assert np.load(tmp_path / "x.npy")[0, 0] == 0.0


def test_odd_files_of_features_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "both.npz", edge_index=[[0], [1]], y=[0, 1], x=np.eye(2))
    np.savez(tmp_path / "graph.npz", edge_index=[[0], [1]], y=[0, 1])
    np.save(tmp_path / "x.npy", np.eye(2))
    (tmp_path / "text.npy").write_text("no array")
    for graph, features, message in (
        ("both", "x", "x comes from one file"),
        ("graph", "x", "must hold float32, but got float64"),
        ("graph", "text", "a readable .npy file"),
        ("graph", "missing", "a readable .npy file"),
    ):
        with pytest.raises(InputError, match=message):
            read_graph(tmp_path / f"{graph}.npz", features_file=tmp_path / f"{features}.npy")
