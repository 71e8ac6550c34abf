"""Lipschitz constants that are known, and norms of Jacobians by power iteration."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from conftest import spread_norms
from gnnautoscale.analysis.lipschitz import jacobian_norm, lipschitz_constant
from gnnautoscale.errors import InputError


def test_constants_that_are_known() -> None:
    linear = nn.Linear(5, 3)
    norm = float(torch.linalg.svdvals(linear.weight.detach().double())[0])
    assert lipschitz_constant(linear) == pytest.approx(norm)
    of_pyg = pyg.Linear(5, 3)
    assert lipschitz_constant(of_pyg) == pytest.approx(float(torch.linalg.svdvals(of_pyg.weight.detach().double())[0]))
    batch_norm = nn.BatchNorm1d(3).eval()
    spread_norms(batch_norm)
    variance = batch_norm.running_var
    assert variance is not None
    scale = float((batch_norm.weight.detach() / (variance + batch_norm.eps).sqrt()).abs().max())
    assert lipschitz_constant(batch_norm) == pytest.approx(scale)
    assert lipschitz_constant(nn.BatchNorm1d(3, affine=False, eps=0.0).eval()) == 1.0
    sequence = nn.Sequential(linear, batch_norm, nn.ReLU(), nn.Dropout(0.5).eval(), nn.Identity(), nn.Tanh())
    assert lipschitz_constant(sequence) == pytest.approx(norm * scale)


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.5), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval(), nn.Softmax(1)]
)
def test_constants_that_are_not_known_are_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match=type(module).__name__):
        lipschitz_constant(nn.Sequential(nn.ReLU(), module))


@pytest.mark.parametrize(("width_in", "width_out"), [(6, 4), (4, 6), (1, 5), (5, 1)])
def test_power_iteration_agrees_with_singular_values(width_in: int, width_out: int) -> None:
    linear = nn.Linear(width_in, width_out).double()
    found = jacobian_norm(linear, torch.randn(3, width_in, dtype=torch.double))
    torch.testing.assert_close(
        found, torch.full((3,), lipschitz_constant(linear), dtype=torch.double), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Softmax(1)])
def test_power_iteration_agrees_with_jacobians(activation: nn.Module) -> None:
    mlp = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), activation, nn.Linear(8, 4)).double().eval()
    spread_norms(mlp)
    x = torch.randn(6, 5, dtype=torch.double)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda row: mlp(row.unsqueeze(0)).squeeze(0)))(x)
    expected = torch.linalg.matrix_norm(jacobians.detach(), 2)
    found = jacobian_norm(mlp, x, iterations=2000)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert all(weight.grad is None for weight in mlp.parameters())


def test_jacobian_of_a_constant_is_zero() -> None:
    bias = torch.ones(1, requires_grad=True)
    assert torch.equal(jacobian_norm(lambda x: bias.expand(x.size(0), 1), torch.ones(2, 3)), torch.zeros(2))
    with pytest.raises(InputError, match="rows"):
        jacobian_norm(lambda x: x.sum(), torch.ones(2, 3))
