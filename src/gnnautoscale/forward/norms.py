"""Batch norm over a batch and its halo, with the statistics of the batch's own rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def uses_own_statistics(norm: _BatchNorm) -> bool:
    """Whether the norm takes statistics of its input: in training, and always if it keeps no running averages."""
    return norm.training or norm.running_mean is None


def normalize_by_own_rows(norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor, batch_size: int) -> Tensor:
    """Normalize the rows of batch and halo, ``[num_rows, channels, ...]``, by the statistics of the batch's rows.

    The batch's rows are normalized by ``run``, usually the norm's forward pass.
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


def normalize_untracked(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Normalize by the rows' own statistics without updating running averages."""
    return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def warn_of_batch_statistics() -> None:
    """Warn that outputs in evaluation depend on the partition."""
    warnings.warn(
        "The model has a batch norm without running averages (track_running_stats=False). In evaluation it uses the "
        "statistics of each batch, so outputs depend on the partition. Evaluate the whole graph at once (one part, "
        "evaluate_parts=1) if it fits, or let the norm keep running averages.",
        stacklevel=2,
    )
