import gzip
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric import datasets as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data, InMemoryDataset  # type: ignore[import-untyped]

from gnnautoscale.data.datasets import load
from gnnautoscale.errors import InputError
from support.plain_data import assert_plain, counts, one_graph

ROOT = os.environ.get("GNNAUTOSCALE_DATA")
real_data = pytest.mark.skipif(ROOT is None, reason="GNNAUTOSCALE_DATA is not set")


def test_echoes_are_sets_of_graphs() -> None:
    dataset = load("echoes", graphs=3, nodes=400)
    assert [graph.graph_y.numel() for graph, _ in dataset.graphs()] == [3, 3, 6]
    assert dataset.train.num_nodes == 1200
    assert not torch.equal(dataset.train.x, dataset.val.x)


@pytest.mark.parametrize(("name", "graphs"), [("CLUSTER", [20, 2, 2]), ("Pattern", [20, 4, 4])])
def test_generated(name: str, graphs: list[int]) -> None:
    dataset = load(name, graphs=20)
    assert_plain(dataset)
    assert dataset.name == name.lower()
    assert dataset.inductive
    assert [splits for _, splits in dataset.graphs()] == [("train",), ("val",), ("test",)]
    parts = [dataset.train, dataset.val, dataset.test]
    assert [int(data.graph_id.max()) + 1 for data in parts] == graphs
    assert [counts(data)[i] for i, data in enumerate(parts)] == [data.num_nodes for data in parts]
    assert all(sum(counts(data)) == data.num_nodes for data in parts)
    assert not torch.equal(dataset.val.y[:50], dataset.test.y[:50])
    again, other = load(name, graphs=20), load(name, graphs=20, seed=1)
    assert torch.equal(again.train.edge_index, dataset.train.edge_index)
    assert not torch.equal(other.train.y[:50], dataset.train.y[:50])


def test_generated_small_and_bad() -> None:
    assert int(load("pattern", graphs=1).val.graph_id.max()) == 0
    with pytest.raises(InputError, match="graphs must be an integer"):
        load("cluster", graphs=0)


def test_communities() -> None:
    dataset = load("communities", nodes=400, degree=6, features=5, classes=4, homophily=0.9)
    assert_plain(dataset)
    assert not dataset.inductive
    assert [splits for _, splits in dataset.graphs()] == [("train", "val", "test")]
    assert (dataset.train.num_nodes, dataset.num_features, dataset.num_classes) == (400, 5, 4)
    assert counts(dataset.train) == [200, 100, 100]


@pytest.mark.parametrize("name", ["cora", "amazon-photo", "coauthor-cs", "wiki-cs", "reddit", "ppi", "flickr", "yelp"])
def test_no_files_and_no_network(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch_geometric.io.fs.cp", refuse)
    with pytest.raises(InputError, match=rf"must lie in {tmp_path}/\w+.* but got OSError: no network. Put"):
        load(name, tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    raw = tmp_path / "Amazon" / "Photo" / "raw"
    raw.mkdir(parents=True)
    for content in (b"", b"no archive"):
        (raw / "amazon_electronics_photo.npz").write_bytes(content)
        with pytest.raises(InputError, match=rf"must lie in {raw.parent} or be available"):
            load("amazon-photo", tmp_path)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, *graphs: Data) -> None:
    """Make a data set class of PyG give these graphs, without files."""
    monkeypatch.setattr(pyg, name, lambda *args, **kwargs: [graph.clone() for graph in graphs])


def test_rows_are_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 0.0]])
    stand_in(monkeypatch, "Planetoid", one_graph(3, x=x, test_mask=torch.ones(3, dtype=torch.bool)))
    dataset = load("CiteSeer")
    assert_plain(dataset)
    assert dataset.train.x.tolist() == [[0.25, 0.75], [0, 0], [1, 0]]


def test_few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.tensor([0] * 60 + [1] * 200)[torch.randperm(260, generator=torch.Generator().manual_seed(0))]
    stand_in(monkeypatch, "Amazon", Data(x=torch.ones(260, 1), edge_index=torch.tensor([[0], [1]]), y=y))
    first, again, other = (load("amazon-photo", split=split) for split in (0, 0, 1))
    assert_plain(first)
    data = first.train
    assert data.y[data.train_mask].bincount().tolist() == [20, 20]
    assert data.y[data.val_mask].bincount().tolist() == [30, 30]
    assert data.y[data.test_mask].bincount().tolist() == [10, 150]
    assert torch.equal(data.train_mask, again.train.train_mask)
    assert not torch.equal(data.train_mask, other.train.train_mask)


def test_wiki_cs(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.eye(6, dtype=torch.bool)[:, :3]
    graph = one_graph(train_mask=columns, val_mask=columns.roll(3, 0), stopping_mask=columns)
    stand_in(monkeypatch, "WikiCS", graph)
    dataset = load("wiki-cs", split=2)
    assert_plain(dataset)
    assert dataset.train.train_mask.nonzero().tolist() == [[2]]
    assert dataset.val.val_mask.nonzero().tolist() == [[5]]
    with pytest.raises(InputError, match="wiki-cs has 3 splits, but got split 3"):
        load("wiki-cs", split=3)


@pytest.mark.parametrize("name", ["Reddit", "Yelp", "Flickr"])
def test_own_splits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x = torch.tensor([[0.0, 5], [4, 5], [6, 7], [0, 0], [0, 0], [0, 0]])
    y = torch.ones(6, 3, dtype=torch.long) if name == "Yelp" else torch.arange(6)
    stand_in(monkeypatch, name, one_graph(x=x.clone(), y=y))
    dataset = load(name)
    assert_plain(dataset)
    assert dataset.train.y.dim() == (2 if name == "Yelp" else 1)
    assert dataset.num_classes == (3 if name == "Yelp" else 6)
    scaled = [[-1, 0], [1, 0], [2, 2]]  # training nodes have mean (2, 5) and deviation (2, 0)
    assert dataset.train.x[:3].tolist() == (x[:3].tolist() if name == "Flickr" else scaled)


def test_ppi(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph(num_nodes: int) -> Data:
        return Data(x=torch.ones(num_nodes, 2), edge_index=torch.tensor([[0], [1]]), y=torch.ones(num_nodes, 4))

    sizes = {"train": [3, 2], "val": [4], "test": [5]}
    monkeypatch.setattr(pyg, "PPI", lambda root, split: [graph(size) for size in sizes[split]])
    dataset = load("ppi")
    assert_plain(dataset)
    assert dataset.inductive
    assert dataset.train.y.dim() == 2
    assert dataset.num_classes == 4
    assert dataset.train.graph_id.tolist() == [0, 0, 0, 1, 1]
    assert dataset.train.edge_index.tolist() == [[0, 3], [1, 4]]
    assert [counts(data) for data in (dataset.train, dataset.val, dataset.test)] == [[5, 0, 0], [0, 4, 0], [0, 0, 5]]


def test_ppi_reads_its_raw_files(tmp_path: Path) -> None:
    raw = tmp_path / "PPI" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        np.save(raw / f"{part}_feats.npy", np.ones((4, 2)))
        np.save(raw / f"{part}_labels.npy", np.ones((4, 3)))
        np.save(raw / f"{part}_graph_id.npy", np.array([1, 1, 2, 2]))
        links = [{"source": 0, "target": 1}, {"source": 3, "target": 2}]
        graph = {"directed": True, "multigraph": False, "graph": {}, "nodes": [{"id": i} for i in range(4)]}
        (raw / f"{part}_graph.json").write_text(json.dumps({**graph, "links": links}))
    dataset = load("ppi", tmp_path)
    assert_plain(dataset)
    assert dataset.test.edge_index.tolist() == [[0, 3], [1, 2]]


class _FakeOgb(InMemoryDataset):  # type: ignore[misc]
    """Saves and opens a tiny graph the way `ogb.nodeproppred.PygNodePropPredDataset` does."""

    def __init__(self, name: str, root: str) -> None:
        self.name = name
        super().__init__(str(Path(root) / name.replace("-", "_")))
        self._data, self.slices = torch.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> str:
        return "geometric_data_processed.pt"

    def process(self) -> None:
        data = Data(
            x=torch.ones(4, 2),
            edge_index=torch.tensor([[0, 1], [1, 2]]),
            y=torch.tensor([[0], [1], [2], [0]]),
            node_year=torch.ones(4, 1),
        )
        torch.save(self.collate([data]), self.processed_paths[0])

    def get_idx_split(self) -> dict[str, torch.Tensor]:
        return {"train": torch.tensor([1, 0]), "valid": torch.tensor([2]), "test": torch.tensor([3])}


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products"])
def test_ogbn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset = _FakeOgb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    dataset = load(name, tmp_path)
    assert_plain(dataset)
    assert (tmp_path / "ogb" / name.replace("-", "_")).is_dir()
    assert dataset.train.y.tolist() == [0, 1, 2, 0]
    assert counts(dataset.train) == [2, 1, 1]
    both = [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert dataset.train.edge_index.tolist() == (both if name == "ogbn-arxiv" else [[0, 1], [1, 2]])


def test_ogbn_with_the_real_package(tmp_path: Path) -> None:
    pytest.importorskip("ogb", reason="the package ogb is not installed")
    folder = tmp_path / "ogb" / "ogbn_arxiv"
    tables = {
        "raw/edge": "0,1\n1,2\n",
        "raw/node-feat": "0.5,1.0\n1.5,0.0\n0.0,2.5\n",
        "raw/node_year": "2000\n2001\n2002\n",
        "raw/node-label": "0\n1\n1\n",
        "raw/num-node-list": "3\n",
        "raw/num-edge-list": "2\n",
        "split/time/train": "0\n",
        "split/time/valid": "1\n",
        "split/time/test": "2\n",
    }
    for name, content in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content.encode()))
    (folder / "RELEASE_v1.txt").touch()
    dataset = load("ogbn-arxiv", tmp_path)
    assert_plain(dataset)
    assert dataset.train.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(InputError, match="pip install ogb"):
        load("ogbn-arxiv", tmp_path)

    def needs_scipy(*args: Any) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(pyg, "Amazon", needs_scipy)
    with pytest.raises(InputError, match="Run: pip install scipy"):
        load("amazon-photo", tmp_path)


@pytest.mark.data
@real_data
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "sizes"),
    [
        ("cora", 2708, 10_556, 1433, 7, [140, 500, 1000]),
        ("citeseer", 3327, 9104, 3703, 6, [120, 500, 1000]),
        ("pubmed", 19_717, 88_648, 500, 3, [60, 500, 1000]),
    ],
)
def test_planetoid(name: str, nodes: int, edges: int, features: int, classes: int, sizes: list[int]) -> None:
    dataset = load(name, str(ROOT))
    assert_plain(dataset)
    data = dataset.train
    assert [data.num_nodes, data.num_edges] == [nodes, edges]
    assert [dataset.num_features, dataset.num_classes] == [features, classes]
    assert counts(data) == sizes
    total = data.x.sum(dim=1)
    filled = data.x.abs().amax(dim=1) > 0
    assert torch.allclose(total[filled], torch.ones(()))
    assert bool((total[~filled] == 0).all())
    assert int((~filled).sum()) == (15 if name == "citeseer" else 0)
    assert data.is_undirected()


@pytest.mark.data
@real_data
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes"),
    [
        ("amazon-computers", 13_752, 491_722, 767, 10),
        ("amazon-photo", 7650, 238_162, 745, 8),
        ("coauthor-cs", 18_333, 163_788, 6805, 15),
        ("coauthor-physics", 34_493, 495_924, 8415, 5),
    ],
)
def test_few_labels_of_real_data(name: str, nodes: int, edges: int, features: int, classes: int) -> None:
    dataset = load(name, str(ROOT), split=3)
    data = dataset.train
    assert [data.num_nodes, data.num_edges] == [nodes, edges]
    assert [dataset.num_features, dataset.num_classes] == [features, classes]
    assert data.y[data.train_mask].bincount().tolist() == [20] * classes
    assert data.y[data.val_mask].bincount().tolist() == [30] * classes
    assert counts(data) == [20 * classes, 30 * classes, nodes - 50 * classes]
    assert data.x.max() == 1  # not normalized


def test_a_download_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(root: str, name: str) -> None:
        (Path(root) / name / "raw").mkdir(parents=True)
        raise OSError("no network")

    monkeypatch.setattr("torch_geometric.datasets.Planetoid", offline)
    with pytest.raises(InputError, match="no network"):
        load("cora", tmp_path / "new" / "root")
    assert list(tmp_path.iterdir()) == []
