"""What every graph of a data set promises."""

from typing import Any

import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset

MASKS = ["train_mask", "val_mask", "test_mask"]


def assert_plain(dataset: Dataset) -> None:
    """What `Dataset` and the module promise of every graph."""
    assert dataset.inductive == (dataset.val is not dataset.train)
    assert dataset.inductive == (dataset.test is not dataset.val)
    for data in (dataset.train, dataset.val, dataset.test):
        assert type(data) is Data
        extra = {"graph_id", "edge_attr", "edge_weight", "edge_type"}
        assert set(data.keys()) - extra == {"x", "edge_index", "y", *MASKS}
        assert all(value.is_contiguous() for value in data.to_dict().values())
        assert data.x.dtype == torch.float32
        assert data.x.size(1) == dataset.num_features
        assert data.y.dtype == (torch.float32 if data.y.dim() == 2 else torch.int64)
        assert all(data[name].dtype == torch.bool for name in MASKS)
    dataset.check()
    assert bool(dataset.train.train_mask.any())
    assert bool(dataset.val.val_mask.any())
    assert bool(dataset.test.test_mask.any())


def counts(data: Data) -> list[int]:
    return [int(data[name].sum()) for name in MASKS]


def one_graph(num_nodes: int = 6, **changes: Any) -> Data:
    values = {
        "x": torch.arange(2.0 * num_nodes).view(num_nodes, 2),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "y": torch.arange(num_nodes) % 2,
        "train_mask": torch.arange(num_nodes) < 2,
        "val_mask": torch.arange(num_nodes) == 2,
        "test_mask": torch.arange(num_nodes) > 2,
    }
    return Data(**{**values, **changes})
