"""Compares the outputs and gradients of two runs, up to rounding."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

# How many rows of the gradient of a very large weight are compared.
_MOST_ROWS = 4096


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """How far two runs may differ by rounding: relative to a column's largest value, and to the largest of all."""
    return {torch.float64: (1e-5, 1e-9), torch.float32: (1e-3, 2e-5)}.get(dtype, (5e-2, 5e-3))


def alike(got: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    """Whether two lists of tensors are equal up to rounding; a missing gradient counts as zeros."""
    if len(got) != len(wanted):
        return False
    sizes = [0.0 if value is None or not value.numel() else float(value.nan_to_num().abs().amax()) for value in wanted]
    for one, other, size in zip(got, wanted, sizes, strict=True):
        one = torch.zeros_like(other) if one is None and other is not None else one
        other = torch.zeros_like(one) if other is None and one is not None else other
        if one is None or other is None:
            continue
        # A gradient that cancels out, such as that of a bias before a norm, is only the rounding of larger ones.
        bound = tolerances(one.dtype)[0] * (size + 0.1 * max(sizes)) + 1e-9
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=bound, equal_nan=True):
            return False
    return True


def gradients(loss: Tensor, weights: list[nn.Parameter], most: int) -> list[Tensor | None]:
    """The gradients of some weights, of those with more than ``most`` entries the first rows; ``grad`` is restored."""
    # Not torch.autograd.grad, which reentrant checkpointing does not support.
    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        # Of a table with a row for each node, a trial uses the first rows.
        large = [weight.grad is not None and weight.numel() > most for weight in weights]
        pairs = zip(weights, large, strict=True)
        return [cast(Tensor, weight.grad)[:_MOST_ROWS].clone() if cut else weight.grad for weight, cut in pairs]
    finally:
        for weight, grad in zip(weights, kept, strict=True):
            weight.grad = grad
