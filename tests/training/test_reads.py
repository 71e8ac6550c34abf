"""How often features are read before the first training step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data.datasets import from_file
from gnnautoscale.models import GCN
from support.communities import CLASSES, FEATURES, community_graph

# They return a view, some rows, or something about a tensor.
VIEWS = {"detach", "cpu", "to", "contiguous", "reshape", "view", "size", "dim", "numel", "is_floating_point"}
VIEWS |= {"__get__", "__getitem__", "index_select", "is_inference"}


class Reads(TorchFunctionMode):
    """Counts the functions that read all features: tensors of their shape, or their bytes in a row."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._shapes = x.shape, (x.nbytes,)
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or repr(func)).split(".")
        with torch._C.DisableTorchFunction():
            whole = any(isinstance(value, Tensor) and value.shape in self._shapes for value in args)
        if whole and name[-1] not in VIEWS:
            self.found[name[-1]] += 1
        return func(*args, **(kwargs or {}))


class StepError(Exception):
    """The first step has begun."""


def reads_before_training(data: Data | gas.Dataset, x: Tensor, **options: Any) -> dict[str, int]:
    """What reads all features before the model is called for training."""
    model = GCN(FEATURES, CLASSES, hidden=4)

    def stop(module: nn.Module, _: Any) -> None:
        if module.training:
            raise StepError

    model.register_forward_pre_hook(stop)
    with Reads(x) as reads, pytest.raises(StepError):
        gas.fit(model, data, epochs=1, **options)
    return dict(reads.found)


# One pass looks for values that are not finite; the other makes the key that histories and checkpoints go by.
ONCE_EACH = {"aminmax": 1, "numpy": 1}


@pytest.mark.parametrize("options", [{}, {"evaluate_parts": 2}], ids=["plain", "other parts to evaluate"])
def test_features_are_read_once_to_check_and_once_to_hash(options: dict[str, Any]) -> None:
    data = community_graph()
    assert reads_before_training(data, data.x, num_parts=4, **options) == ONCE_EACH
    assert reads_before_training(data, data.x, num_parts=4, **options) == {}  # known by now


def test_mapped_features_are_read_no_more_often(tmp_path: Path) -> None:
    data = community_graph()
    np.save(tmp_path / "x.npy", data.x.numpy())
    np.savez(tmp_path / "graph.npz", edge_index=data.edge_index, y=data.y)
    with Reads(data.x) as reads:
        dataset = from_file(tmp_path / "graph.npz", features_file=tmp_path / "x.npy", undirected=True)
    reads.found.update(reads_before_training(dataset, data.x, num_parts=4, keep_batches=False))
    assert reads.found == ONCE_EACH
