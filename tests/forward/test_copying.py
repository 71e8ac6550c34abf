"""Copies of models: what they share with the original, and what of it they leave alone."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from conftest import CHANNELS, undirected_graph
from gnnautoscale.forward.copying import copy_model

C = CHANNELS


class Holder(nn.Module):
    """A linear map, and whatever else it is given."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(x)
        return out


def test_a_copy_is_equal_and_independent() -> None:
    model: Any = Holder(options={"sizes": [1, 2]}, table=torch.zeros(2)).eval()
    model.lin.train()
    copied: Any = copy_model(model)
    assert [module.training for module in copied.modules()] == [False, True]
    assert torch.equal(copied.lin.weight, model.lin.weight)
    assert copied.options == {"sizes": [1, 2]}
    copied.options["sizes"].append(3)
    copied.table.add_(1)
    with torch.no_grad():
        copied.lin.weight.zero_()
    assert model.options == {"sizes": [1, 2]}
    assert not model.table.any()
    assert model.lin.weight.all()


def test_large_weights_share_their_memory_if_wanted() -> None:
    model: Any = Holder().requires_grad_(False)
    model.register_buffer("mean", torch.zeros(4))
    copied: Any = copy_model(model, share_above=3)
    copied.requires_grad_(True)
    copied.mean.add_(1)
    with torch.no_grad():
        copied.lin.weight.zero_()
        copied.lin.bias.zero_()  # has two entries
    assert not model.lin.weight.any()
    assert model.lin.bias.all()
    assert not model.lin.weight.requires_grad
    assert not model.mean.any()


def test_a_module_that_is_used_twice_is_copied_once() -> None:
    model = Holder()
    model.again = model.lin
    copied: Any = copy_model(model)
    assert copied.again is copied.lin
    assert copied.lin is not model.lin


def test_what_cannot_be_copied_is_shared() -> None:
    lock, rows = threading.Lock(), [1, 2]
    model = Holder(lock=lock, rows=rows, inner=Holder(lock=lock))
    copied: Any = copy_model(model)
    assert copied.lock is lock
    assert copied.inner.lock is lock
    assert copied.rows == rows
    assert copied.rows is not rows
    assert copied.inner is not model.inner
    assert copied.lin.weight is not model.lin.weight


def test_rows_that_autograd_tracks_are_copied_without_their_past() -> None:
    model: Any = Holder()
    model.kept = model(torch.ones(1, 2))
    model.losses = [model.kept.sum()]
    copied: Any = copy_model(model)
    assert copied.kept.grad_fn is None
    assert torch.equal(copied.kept, model.kept)
    assert torch.equal(copied.losses[0], model.losses[0])
    copied.kept.zero_()
    assert model.kept.all()
    assert model.kept.grad_fn is not None


def test_functions_use_the_copy() -> None:
    """A function that a model holds may use the model itself, its parts, its methods, and containers."""
    model: Any = Holder()
    counts, method = {"calls": 0}, model.lin.forward

    def run(x: Tensor, *, times: int = 1) -> Any:
        counts["calls"] += times
        return method(x) + model.lin.bias + model.options["shift"]

    model.options, model.run = {"shift": 0.0}, run
    copied: Any = copy_model(model)
    before = model.run(torch.ones(1, 2)).detach()
    with torch.no_grad():
        copied.lin.weight.zero_()
        copied.lin.bias.zero_()
    copied.options["shift"] = 5.0
    assert copied.run(torch.ones(1, 2), times=7).tolist() == [[5.0, 5.0]]
    assert counts == {"calls": 1}
    assert torch.equal(model.run(torch.ones(1, 2)), before)


def test_functions_share_what_is_no_state() -> None:
    """Modules of Python, functions and numbers are what they were."""
    factor, activation = 2.0, torch.tanh
    model: Any = Holder(run=lambda x: factor * activation(x))
    copied: Any = copy_model(model)
    assert copied.run(torch.zeros(1)) == 0.0
    assert [cell.cell_contents for cell in copied.run.__closure__] == [torch.tanh, 2.0]


def test_the_state_of_python_s_random_numbers_stays() -> None:
    random.seed(4)
    expected = random.Random(4).random()
    copy_model(Holder())
    assert random.random() == expected


def test_the_next_sequential_runs_its_own_code() -> None:
    """PyG compiles each one, and looks code up by a name that it draws at random."""
    data = undirected_graph()

    def sequential(num_layers: int) -> Any:
        layers = [(pyg.SAGEConv(C, C), "x, edge_index -> x") for _ in range(num_layers)]
        return pyg.Sequential("x, edge_index", layers)

    model = sequential(1)
    random.seed(16001)  # a seed of its own, since every name can be drawn only once
    copied, other = copy_model(model), sequential(2)
    hidden = other[0](data.x, data.edge_index)
    assert torch.equal(other(data.x, data.edge_index), other[1](hidden, data.edge_index))
    assert torch.equal(copied(data.x, data.edge_index), model(data.x, data.edge_index))
