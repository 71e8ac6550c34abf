import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import datasets
from gnnautoscale.data.datasets import Dataset, from_file, load, names
from gnnautoscale.errors import InputError
from support.plain_data import assert_plain, counts, one_graph

ROOT = os.environ.get("GNNAUTOSCALE_DATA")
real_data = pytest.mark.skipif(ROOT is None, reason="GNNAUTOSCALE_DATA is not set")
NAMES = (
    "cora citeseer pubmed coauthor-cs coauthor-physics amazon-computers amazon-photo wiki-cs cluster pattern reddit "
    "ppi flickr yelp ogbn-arxiv ogbn-products communities districts echoes"
)


def test_names() -> None:
    assert names() == tuple(NAMES.split())


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"one of cora, .*, but got corra. Did you mean 'cora'\?"):
        load("corra")
    with pytest.raises(InputError, match="name its file"):
        load("zzzzzz")


def test_unknown_option() -> None:
    with pytest.raises(InputError, match="cora has no options, but got graphs"):
        load("cora", graphs=3)
    with pytest.raises(InputError, match="cora has no options, but got title"):
        load("cora", title="PubMed")
    with pytest.raises(InputError, match=r"but got graph\. Choose from graphs"):
        load("cluster", graph=3)
    with pytest.raises(InputError, match="split must be an integer of at least 0, but got -1"):
        load("cora", split=-1)


def own_file(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "mine.npz", edge_index=[[0, 1], [1, 2]], x=np.ones((10, 2)), **arrays)
    return tmp_path / "mine.npz"


def test_from_file(tmp_path: Path) -> None:
    split = [0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    dataset = from_file(own_file(tmp_path, y=np.arange(10) % 3, split=split), undirected=True, max_features=1)
    assert_plain(dataset)
    assert (dataset.name, dataset.num_features, dataset.num_classes, dataset.inductive) == ("mine", 1, 3, False)
    assert dataset.train.num_edges == 4
    assert counts(dataset.train) == [2, 1, 7]


def test_from_file_draws_a_split(tmp_path: Path) -> None:
    path = own_file(tmp_path, y=np.ones((10, 4)), edge_weight=[1.0, 2.0])
    first, again, other = (from_file(path, split=split) for split in (0, 0, 1))
    assert_plain(first)
    assert first.num_classes == 4
    assert first.train.edge_weight.tolist() == [1, 2]
    assert counts(first.train) == [6, 2, 2]
    assert torch.equal(first.train.test_mask, again.train.test_mask)
    assert not torch.equal(first.train.test_mask, other.train.test_mask)


def test_graphs_of_a_data_set_must_match(tmp_path: Path) -> None:
    narrow, wide = (one_graph(x=torch.ones(6, width)) for width in (1, 2))
    Dataset("same", narrow, narrow, narrow.clone()).check()
    with pytest.raises(InputError, match="must have 1 features, but got 2 in the test graph"):
        Dataset("other", narrow, narrow, wide).check()


@pytest.mark.data
@real_data
def test_wordnet() -> None:
    path = Path(str(ROOT)) / "WordNet3" / "raw" / "wordnet3.npz"
    dataset = datasets.from_file(path, undirected=True, max_features=1000)
    assert (dataset.name, dataset.num_features, dataset.num_classes) == ("wordnet3", 1000, 45)
    assert sum(counts(dataset.train)) == 117_659


@pytest.mark.parametrize("ratio", [(1, 2), (0, 1, 1), (1, -1, 1), (float("nan"), 1, 1), ("a", 1, 1)])
def test_shares_of_a_split_that_cannot_be_are_refused(ratio: Any) -> None:
    with pytest.raises(InputError, match="split_ratio must be three numbers"):
        datasets.split_at_random(Data(num_nodes=5), ratio=ratio)


def test_shares_may_be_fractions() -> None:
    for ratio in ((70, 20, 10), (0.7, 0.2, 0.1)):
        data = Data(num_nodes=10)
        datasets.split_at_random(data, ratio=ratio)
        assert [int(data[name].sum()) for name in ("train_mask", "val_mask", "test_mask")] == [7, 2, 1]


def test_shares_belong_to_files_without_a_split(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"edge_index": np.array([[0], [1]]), "x": np.ones((4, 1)), "y": np.array([0, 1, 0, 1])}
    np.savez(tmp_path / "a.npz", **arrays)
    dataset = datasets.from_file(tmp_path / "a.npz", split_ratio=(1, 1, 2))
    assert [int(dataset.train[name].sum()) for name in ("train_mask", "val_mask", "test_mask")] == [1, 1, 2]
    assert dataset.note.startswith("a.npz has no split: 1 nodes were drawn")
    np.savez(tmp_path / "b.npz", **arrays, split=np.array([0, 1, 2, 2]))
    assert datasets.from_file(tmp_path / "b.npz").note == ""
    with pytest.raises(InputError, match="split_ratio belongs to files of nodes without a split"):
        datasets.from_file(tmp_path / "b.npz", split_ratio=(1, 1, 2))
