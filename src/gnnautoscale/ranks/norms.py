"""Batch norm with the statistics of all ranks' batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gnnautoscale.forward import Session
from gnnautoscale.ranks.world import World


class RankNorms:
    """Normalizes rows by mean and variance over the own rows of all ranks' batches, in training.

    It takes the place of a batch norm's forward pass in a :class:`~gnnautoscale.forward.Session`.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(
        self, session: Session, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Normalize rows of batch and halo, ``[num_rows, channels, ...]``, or of the batch alone."""
        own = session.info.batch_size
        of_nodes = name in session.plan.node_norms and not session.is_aggregating
        if not norm.training or not of_nodes or x.size(0) not in (own, session.info.num_rows):
            return session.by_own_statistics(name, norm, run, x)
        mean, variance, count = self._statistics(x[:own])
        if count < 2 and norm.running_mean is not None:  # of a rare type of nodes
            return session.by_own_statistics(name, norm, run, x)
        if not session.repeating:
            _update(norm, mean.detach(), variance.detach(), count)
        inside = _normalized(norm, x[:own], mean, variance)
        if x.size(0) == own:
            return inside
        return torch.cat([inside, _normalized(norm, x[own:], mean.detach(), variance.detach())])

    def _statistics(self, rows: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean and variance of each channel over all ranks, ``[channels]``, and the number of values."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        over = [0, *range(2, rows.dim())]
        here = rows.new_tensor([rows.numel() / max(rows.size(1), 1)])
        sums = torch.cat([rows.sum(over), here])
        sums = _Sum.apply(self._world, sums)  # type: ignore[no-untyped-call]
        count = float(sums[-1].detach())
        mean = sums[:-1] / max(count, 1.0)
        apart = (rows - _like(mean, rows)).square().sum(over)
        variance = _Sum.apply(self._world, apart) / max(count, 1.0)  # type: ignore[no-untyped-call]
        return mean, variance, count


class _Sum(torch.autograd.Function):
    """Adds up a tensor over all ranks, and on the way back its gradients."""

    @staticmethod
    def forward(ctx: Any, world: World, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        ctx.world = world
        return _summed(world, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradients of all ranks' losses."""
        return None, _summed(ctx.world, gradient)


def _summed(world: World, value: Tensor) -> Tensor:
    there = value.detach().to(world.wire, copy=True).contiguous()
    return world.sum(there).wait().to(value.device)


def _like(channels: Tensor, rows: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (rows.dim() - 2))


def _normalized(norm: _BatchNorm, rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    out = (rows - _like(mean, rows)) * _like((variance + norm.eps).rsqrt(), rows)
    if norm.affine:
        out = out * _like(norm.weight, rows) + _like(norm.bias, rows)
    return out.to(rows.dtype)


@torch.no_grad()
def _update(norm: _BatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """Update running averages as the norm itself does."""
    if norm.running_mean is None or norm.running_var is None or not norm.track_running_stats:
        return
    share = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        share = 1.0 / float(norm.num_batches_tracked) if share is None else share
    unbiased = variance * (count / max(count - 1.0, 1.0))
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), float(share or 0.0))
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), float(share or 0.0))
