"""How much a module can amplify a change of its input: Lipschitz constants, and norms of Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import Linear as PyGLinear  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.errors import InputError


@checked()
def lipschitz_constant(module: nn.Module) -> float:
    r"""A constant :math:`k` with :math:`\| f(x) - f(y) \| \leq k \| x - y \|` for all rows, in evaluation mode.

    It is the smallest one for a single module. For a sequence it is the product, which may not be the smallest.

    Args:
        module: A linear layer, ReLU, tanh, dropout, batch norm, or a sequence of these.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> _ = linear.weight.data.copy_(torch.tensor([[0.0, 3.0], [2.0, 0.0]]))
        >>> round(lipschitz_constant(nn.Sequential(linear, nn.ReLU(), linear)), 6)
        9.0
    """
    if isinstance(module, nn.Sequential):
        return math.prod(lipschitz_constant(part) for part in module)
    if isinstance(module, (nn.Linear, PyGLinear)):
        return float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))
    if isinstance(module, (nn.Identity, nn.ReLU, nn.Tanh)) or (isinstance(module, nn.Dropout) and not module.training):
        return 1.0
    if isinstance(module, _BatchNorm) and module.running_var is not None and not module.training:
        weight = torch.ones(()) if module.weight is None else module.weight.detach()
        return float((weight.double().abs() * (module.running_var.double() + module.eps).rsqrt()).max())
    raise InputError(
        "the module must be linear, ReLU, tanh, dropout or batch norm in evaluation mode, or a sequence of these",
        got=f"{type(module).__name__} in {'training' if module.training else 'evaluation'} mode",
        fix="Call eval(), or estimate the constant at some inputs with jacobian_norm(module, x).",
    )


@checked(iterations={"least": 1})
def jacobian_norm(function: Callable[[Tensor], Tensor], x: Tensor, *, iterations: int = 200) -> Tensor:
    r"""The largest singular value of a function's Jacobian at each row, ``[num_rows]``, by power iteration.

    It computes only products :math:`u^\top J`, and :math:`J v` as the gradient of one. The iteration converges from
    below, and only for these inputs: the largest value is a lower bound of every Lipschitz constant.

    Args:
        function: Maps each row by itself, such as a module in evaluation mode.
        x: Inputs, ``[num_rows, width]``.
        iterations: The most iterations; it stops when no value grows any more.

    Example:
        >>> jacobian_norm(lambda x: x * torch.tensor([1.0, -2.0]), torch.zeros(1, 2))
        tensor([2.])
    """
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        out = function(x)
        if x.dim() != 2 or out.dim() != 2 or out.size(0) != x.size(0):
            got = f"{tuple(x.shape)} to {tuple(out.shape)}"
            raise InputError("jacobian_norm needs a function of rows to rows", got=got, fix="Flatten each row.")
        out = out + 0.0 * x.sum(dim=1, keepdim=True)  # so that a constant function has a gradient, too
        u = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, x, u, create_graph=True)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    norm = x.new_zeros(x.size(0))
    for _ in range(iterations):
        v = nn.functional.normalize(v, dim=1)
        (pushed,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
        before, norm = norm, torch.maximum(norm, torch.linalg.vector_norm(pushed, dim=1))
        if bool((norm <= before * (1 + 1e-9)).all()):
            break
        (v,) = torch.autograd.grad(out, x, pushed, retain_graph=True)
    return norm
