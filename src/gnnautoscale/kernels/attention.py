"""Functions of the edges of an adjacency whose results, or weights, are values per edge and head.

Attention layers are made of them: rows of nodes go in, values per edge and head come out and weight a sum over
neighbours. None of them needs memory for a row per edge, and all have gradients. The edges' own order is that of
:class:`Adjacency`, grouped by target.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.kernels import plain_attention
from gnnautoscale.kernels.available import use_triton
from gnnautoscale.kernels.rows import narrow_rows
from gnnautoscale.kernels.spmm import TRITON_DTYPES, Adjacency, spmm_backend

Side = Literal["source", "target"]

# Bytes of a narrow row.
_NARROW = 64


def weighted_sum(adjacency: Adjacency, weight: Tensor, x: Tensor) -> Tensor:
    r"""Sum the rows of each target's neighbours, each head weighted by its own value per edge.

    .. math:: \mathbf{y}_{t,h} = \sum_{e: s \to t} w_{e,h} \, \mathbf{x}_{s,h}

    Args:
        adjacency: The edges; its own weights are not used.
        weight: A weight per edge and head, ``[num_edges, heads]``.
        x: A row per source and head, ``[num_sources, heads, width]``.

    Returns:
        A row per target and head, ``[num_targets, heads, width]``.

    Example:
        >>> target, source = torch.tensor([0, 0, 2]), torch.tensor([3, 1, 3])
        >>> adjacency = Adjacency.build(target, source, num_targets=3, num_sources=4)
        >>> x = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)
        >>> weighted_sum(adjacency, torch.tensor([[1.0], [10.0], [2.0]]), x).flatten().tolist()
        [28.0, 0.0, 16.0]
    """
    _check("x", x, adjacency.num_sources)
    if weight.shape != (adjacency.num_edges, x.size(1)) or weight.dtype != x.dtype:
        rule = f"weight must have shape [{adjacency.num_edges}, {x.size(1)}] and the type of x"
        got = f"{weight.dtype} of shape {tuple(weight.shape)} for {x.dtype}"
        raise InputError(rule, got=got, fix="Pass one weight per edge and head.")
    out: Tensor = _WeightedSum.apply(weight, x, adjacency, False)  # type: ignore[no-untyped-call]
    return out


def edge_dots(adjacency: Adjacency, targets: Tensor, sources: Tensor) -> Tensor:
    r"""The scalar product of the rows at both ends of each edge, for each head.

    .. math:: y_{e,h} = \langle \mathbf{a}_{t,h}, \mathbf{b}_{s,h} \rangle, \quad e: s \to t

    Args:
        adjacency: The edges.
        targets: A row per target and head, ``[num_targets, heads, width]``.
        sources: A row per source and head, ``[num_sources, heads, width]``.

    Returns:
        A value per edge and head, ``[num_edges, heads]``.

    Example:
        >>> adjacency = Adjacency.build(torch.tensor([0, 1]), torch.tensor([1, 0]), num_targets=2, num_sources=2)
        >>> x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> edge_dots(adjacency, x, x).tolist()
        [[11.0], [11.0]]
    """
    _check_ends(adjacency, targets, sources)
    out: Tensor = _EdgeDots.apply(targets, sources, adjacency)  # type: ignore[no-untyped-call]
    return out


def additive_scores(
    adjacency: Adjacency, targets: Tensor, sources: Tensor, factor: Tensor, slope: float = 0.2
) -> Tensor:
    r"""The scores of additive attention, a value per edge and head.

    .. math:: y_{e,h} = \sum_c f_{h,c} \, \mathrm{LeakyReLU}(a_{t,h,c} + b_{s,h,c}), \quad e: s \to t

    Args:
        adjacency: The edges.
        targets: A row per target and head, ``[num_targets, heads, width]``.
        sources: A row per source and head, ``[num_sources, heads, width]``.
        factor: A factor per head and column, ``[heads, width]``.
        slope: The slope of the activation below 0; 0 for ReLU, 1 for none.

    Returns:
        A value per edge and head, ``[num_edges, heads]``.

    Example:
        >>> adjacency = Adjacency.build(torch.tensor([0, 1]), torch.tensor([1, 0]), num_targets=2, num_sources=2)
        >>> a, b = torch.tensor([[[1.0, -2.0]], [[3.0, 4.0]]]), torch.zeros(2, 1, 2)
        >>> additive_scores(adjacency, a, b, torch.tensor([[1.0, 2.0]]), slope=0.5).tolist()
        [[-1.0], [11.0]]
    """
    _check_ends(adjacency, targets, sources)
    if factor.shape != targets.shape[1:]:
        rule, got = f"factor must have shape {list(targets.shape[1:])}", f"shape {tuple(factor.shape)}"
        raise InputError(rule, got=got, fix="Pass one factor per head and column.")
    out: Tensor = _AdditiveScores.apply(targets, sources, factor, adjacency, slope)  # type: ignore[no-untyped-call]
    return out


def rows_at_edges(adjacency: Adjacency, x: Tensor, side: Side) -> Tensor:
    """The row of each edge's source or target, ``[num_edges, ...]``, with a gradient that adds up in a fixed order.

    Args:
        adjacency: The edges.
        x: A row per source, or per target, ``[number, ...]``.
        side: Which end of an edge to take the row of.

    Example:
        >>> adjacency = Adjacency.build(torch.tensor([0, 0, 2]), torch.tensor([3, 1, 3]), 3, 4)
        >>> rows_at_edges(adjacency, torch.tensor([1.0, 2.0, 4.0, 8.0]), "source").tolist()
        [8.0, 2.0, 8.0]
    """
    out: Tensor = _RowsAtEdges.apply(x, adjacency, side)  # type: ignore[no-untyped-call]
    return out


def sum_at_nodes(adjacency: Adjacency, values: Tensor, side: Side = "target") -> Tensor:
    """Sum the values of the edges into each target, or out of each source.

    Args:
        adjacency: The edges.
        values: A value or row per edge, ``[num_edges, ...]``.
        side: Which end of an edge to sum at.

    Returns:
        A value or row per node of this side, ``[number, ...]``.

    Example:
        >>> adjacency = Adjacency.build(torch.tensor([0, 0, 2]), torch.tensor([3, 1, 3]), 3, 4)
        >>> sum_at_nodes(adjacency, torch.tensor([1.0, 2.0, 4.0])).tolist()
        [3.0, 0.0, 4.0]
    """
    out: Tensor = _SumAtNodes.apply(values, adjacency, side)  # type: ignore[no-untyped-call]
    return out


def max_at_targets(adjacency: Adjacency, values: Tensor) -> Tensor:
    """The largest of the values of the edges into each target, a constant to autograd; 0 for targets without edges.

    Args:
        adjacency: The edges.
        values: A value or row per edge, ``[num_edges, ...]``.

    Returns:
        A value or row per target, ``[num_targets, ...]``.

    Example:
        >>> adjacency = Adjacency.build(torch.tensor([0, 0, 2]), torch.tensor([3, 1, 3]), 3, 4)
        >>> max_at_targets(adjacency, torch.tensor([1.0, 2.0, -4.0])).tolist()
        [2.0, 0.0, -4.0]
    """
    flat = _matrix(values.detach())
    edges = (adjacency.ptr, _each_edge(adjacency), None)
    out: Tensor = spmm_backend(flat).extreme_neighbours(*edges, flat, largest=True, count=False)[0]
    return out.view(out.size(0), *values.shape[1:])


class _WeightedSum(torch.autograd.Function):
    """Weighted sums at targets, or, transposed, at sources."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, adjacency: Adjacency, transposed: bool) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.options = adjacency, transposed
        out: Tensor = _backend(x).weighted_sum(adjacency, weight, x, transposed=transposed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (weight, x), (adjacency, transposed) = ctx.saved_tensors, ctx.options
        of_weight = of_x = None
        if ctx.needs_input_grad[0]:
            ends = (x, grad) if transposed else (grad, x)
            of_weight = _EdgeDots.apply(*ends, adjacency)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            of_x = _WeightedSum.apply(weight, grad, adjacency, not transposed)  # type: ignore[no-untyped-call]
        return of_weight, of_x, None, None


class _EdgeDots(torch.autograd.Function):
    """Scalar products of targets and sources."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, sources: Tensor, adjacency: Adjacency) -> Tensor:
        ctx.save_for_backward(targets, sources)
        ctx.adjacency = adjacency
        out: Tensor = _backend(targets).edge_dots(adjacency, targets, sources)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        targets, sources = ctx.saved_tensors
        of_targets = of_sources = None
        if ctx.needs_input_grad[0]:
            of_targets = _WeightedSum.apply(grad, sources, ctx.adjacency, False)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            of_sources = _WeightedSum.apply(grad, targets, ctx.adjacency, True)  # type: ignore[no-untyped-call]
        return of_targets, of_sources, None


class _AdditiveScores(torch.autograd.Function):
    """Scores of additive attention."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, sources: Tensor, factor: Tensor, adjacency: Adjacency, slope: float
    ) -> Tensor:
        ctx.save_for_backward(targets, sources, factor)
        ctx.options = adjacency, slope
        out: Tensor = _backend(targets).additive_scores(adjacency, targets, sources, factor, slope)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (targets, sources, factor), (adjacency, slope) = ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled():
            # A second derivative is needed: with a row per edge, since autograd can differentiate that.
            at_edges = rows_at_edges(adjacency, targets, "target") + rows_at_edges(adjacency, sources, "source")
            scores = (F.leaky_relu(at_edges, slope) * factor).sum(-1)
            needed = [given for given in (targets, sources, factor) if given.requires_grad]
            found = iter(torch.autograd.grad(scores, needed, grad, create_graph=True))
            of_targets, of_sources, of_factor = (next(found) if needed else None for needed in ctx.needs_input_grad[:3])
            return of_targets, of_sources, of_factor, None, None
        return (*_backend(grad).additive_gradients(adjacency, targets, sources, factor, slope, grad), None, None)


class _RowsAtEdges(torch.autograd.Function):
    """Rows of sources or targets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, side: Side) -> Tensor:
        ctx.options = adjacency, side
        index = adjacency.target if side == "target" else adjacency.col
        return narrow_rows(x, index) if x[:1].nbytes <= _NARROW else x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumAtNodes.apply(grad, *ctx.options), None, None  # type: ignore[no-untyped-call]


class _SumAtNodes(torch.autograd.Function):
    """Sums of what edges hold, at sources or targets."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, adjacency: Adjacency, side: Side) -> Tensor:
        ctx.options = adjacency, side
        flat = _matrix(values)
        if side == "target":
            ptr, order, segments = adjacency.ptr, _each_edge(adjacency), adjacency.segments
        else:
            ptr, order, segments = adjacency.transposed[0], adjacency.order_t, adjacency.segments_t
        out: Tensor = spmm_backend(flat).sum_neighbours(ptr, order, None, flat, segments=segments)
        return out.view(out.size(0), *values.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _RowsAtEdges.apply(grad, *ctx.options), None, None  # type: ignore[no-untyped-call]


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(values.size(0), math.prod(values.shape[1:]))


def _each_edge(adjacency: Adjacency) -> Tensor:
    return torch.arange(adjacency.num_edges, dtype=torch.int32, device=adjacency.ptr.device)


def _check(name: str, x: Tensor, number: int) -> None:
    if x.dim() != 3 or x.size(0) != number or not x.is_floating_point():
        rule = f"{name} must hold floating-point values of shape [{number}, heads, width]"
        raise InputError(rule, got=f"{x.dtype} of shape {tuple(x.shape)}", fix="Pass one row per node and head.")


def _check_ends(adjacency: Adjacency, targets: Tensor, sources: Tensor) -> None:
    _check("targets", targets, adjacency.num_targets)
    _check("sources", sources, adjacency.num_sources)
    if targets.shape[1:] != sources.shape[1:] or targets.dtype != sources.dtype:
        got = f"{targets.dtype} of shape {tuple(targets.shape)} and {sources.dtype} of shape {tuple(sources.shape)}"
        rule = "targets and sources must have the same heads, width and type"
        raise InputError(rule, got=got, fix="Give both ends rows of the same kind.")


def _backend(x: Tensor) -> ModuleType:
    """The module that computes; both have the same functions."""
    if use_triton(x) and x.dtype in TRITON_DTYPES:
        from gnnautoscale.kernels import triton_attention

        return triton_attention
    return plain_attention
