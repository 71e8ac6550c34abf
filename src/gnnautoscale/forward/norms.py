"""Batch norm over a batch and its halo: statistics are those of the batch's own rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def takes_statistics(norm: _BatchNorm) -> bool:
    """Whether the norm takes statistics of what it is given: in training, or always if it keeps no running averages.

    Example:
        >>> takes_statistics(torch.nn.BatchNorm1d(8).eval())
        False
        >>> takes_statistics(torch.nn.BatchNorm1d(8, track_running_stats=False).eval())
        True
    """
    return norm.training or norm.running_mean is None


def by_own_rows(norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor, batch_size: int) -> Tensor:
    """Normalize all rows by the statistics of the first ones, the batch's own.

    Args:
        norm: The norm.
        run: Its forward pass, or what stands for it.
        x: Rows of batch and halo, ``[num_rows, channels, ...]``.
        batch_size: Number of the batch's rows.

    Returns:
        The normalized rows, in the same shape.
    """
    inside, halo = x[:batch_size], x[batch_size:]
    normalized = run(inside)
    if not halo.size(0):
        return normalized
    with torch.no_grad():
        single = inside.to(torch.promote_types(inside.dtype, torch.float32))
        variance, mean = torch.var_mean(single, dim=[0, *range(2, x.dim())], correction=0)
    outside = F.batch_norm(halo, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)
    return torch.cat([normalized, outside])


def without_tracking(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Normalize by the rows' own statistics, and leave running averages as they are."""
    return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def by_constants(norm: _BatchNorm, x: Tensor) -> Tensor:
    """What the norm would do with mean 0 and variance 1: scale and shift, each row by itself."""
    zeros = torch.zeros(x.size(1), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return F.batch_norm(x, zeros, zeros + 1.0, norm.weight, norm.bias, False, 0.0, norm.eps)


def warn_of_batch_statistics() -> None:
    """Say that outputs in evaluation depend on how the graph is cut."""
    warnings.warn(
        "The model has a batch norm without running averages (track_running_stats=False). In evaluation it takes the "
        "statistics of each batch, so outputs depend on how the graph is cut. Evaluate the whole graph at once "
        "(one part, evaluate_parts=1) if it fits, or let the norm keep running averages.",
        stacklevel=2,
    )
