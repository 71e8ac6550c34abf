"""Full-batch gradients one batch at a time, against plain PyG on the whole graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import assert_same, call_whole, odd_graph
from support.layers import ALL_LAYERS, TWO_WAY_LAYERS, three_layers


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def loss_of(out: Tensor) -> Tensor:
    """A loss that no sum over nodes gives: every node's depends on all others."""
    weight = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).view_as(out)
    return (out * weight).sum().tanh() + (out - out.mean(0)).square().mean()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def whole_graph(model: nn.Module, data: Data) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of a plain model on the whole graph; its norms move on."""
    model.zero_grad()
    out = call_whole(model, data)
    if out.requires_grad:
        backward(loss_of(out))
    return out.detach(), gradients_of(model)


def check_exact(model: nn.Module, data: Data, loader: gas.HaloLoader, tolerance: float, **options: Any) -> None:
    plain = copy.deepcopy(model)
    expected, wanted = whole_graph(plain, data)
    gas.autoscale(model, data, **options)
    model.zero_grad()
    out = gas.exact_forward(model, loader)
    if wanted:
        backward(loss_of(out))
    assert_same(out.detach(), expected, tolerance)
    got = gradients_of(model)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same(got[name], value, tolerance)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], value, rtol=1e-6, atol=1e-6)
    gradients = gas.attach.attached(model).memory.gradients
    assert all(not history.raw.any() for history in gradients.values())


@pytest.mark.parametrize("name", ALL_LAYERS)
def test_layer_has_the_gradients_of_the_whole_graph(name: str) -> None:
    data, both_ways = odd_graph(dtype=torch.float64), name in TWO_WAY_LAYERS
    model = three_layers(name).double().train()
    loader = gas.HaloLoader(data, 7, partition="random", batch_size=2, bidirectional=both_ways)
    check_exact(model, data, loader, 1e-10, storage="host")
