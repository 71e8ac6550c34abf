"""Functions of values per edge and head in plain torch; they define what the Triton kernels compute.

A row holds ``width`` values for each of its heads. No function allocates a row per edge: where edges need their rows,
they are taken a few thousand at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.kernels.plain_spmm import csr_matrix, sum_neighbours
from gnnautoscale.kernels.spmm import Adjacency

# Values that are gathered at once: they fit into the cache of a core, and keep a GPU busy.
_CPU_VALUES, _GPU_VALUES = 2**17, 2**24


def weighted_sum(adjacency: Adjacency, weight: Tensor, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Sum the sources of each target, each head with its own weight per edge, ``[num_targets, heads, width]``.

    ``weight`` is ``[num_edges, heads]``, ``x`` is ``[num_sources, heads, width]``. If ``transposed``, sources and
    targets change places; the weights keep theirs.
    """
    ptr, col = adjacency.ptr, adjacency.col
    if transposed:
        ptr, col, _ = adjacency.transposed
        weight = weight.index_select(0, adjacency.order_t)
    heads = zip(weight.unbind(1), x.unbind(1), strict=True)
    return torch.stack([sum_neighbours(ptr, col, *of_head) for of_head in heads], 1)


def edge_dots(adjacency: Adjacency, a: Tensor, b: Tensor) -> Tensor:
    """The scalar product of the rows at both ends of each edge, for each head, ``[num_edges, heads]``.

    ``a`` holds the rows of the targets, ``[num_targets, heads, width]``, and ``b`` those of the sources.
    """
    shape, dtype = (adjacency.num_targets, adjacency.num_sources), _wide(a.dtype)
    # Torch refuses matrices with more edges than pairs of nodes here.
    if not a.is_cuda and adjacency.num_edges <= shape[0] * shape[1]:
        out = torch.zeros(a.size(1), adjacency.num_edges, dtype=dtype)
        with torch.autocast("cpu", enabled=False):
            for found, rows, others in zip(out, a.to(dtype).unbind(1), b.to(dtype).unbind(1), strict=True):
                matrix = csr_matrix(adjacency.ptr, adjacency.col, found, shape)
                torch.sparse.sampled_addmm(matrix, rows, others.t(), beta=0.0, out=matrix)
        return out.t().to(a.dtype)
    out = a.new_empty(adjacency.num_edges, a.size(1))
    for rows, others, some in _ends(adjacency, a, b):
        out[some] = (rows * others).sum(-1).to(out.dtype)
    return out


def additive_scores(adjacency: Adjacency, a: Tensor, b: Tensor, factor: Tensor, slope: float) -> Tensor:
    """The sum over ``factor * leaky_relu(a + b, slope)`` for the ends of each edge and each head.

    ``a`` and ``b`` as in :func:`edge_dots`; ``factor`` is ``[heads, width]``. Returns ``[num_edges, heads]``.
    """
    out, factor = a.new_empty(adjacency.num_edges, a.size(1)), factor.to(_wide(a.dtype))
    for rows, others, some in _ends(adjacency, a, b):
        out[some] = (F.leaky_relu(rows.add_(others), slope) * factor).sum(-1).to(out.dtype)
    return out


def additive_gradients(
    adjacency: Adjacency, a: Tensor, b: Tensor, factor: Tensor, slope: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``a``, ``b`` and ``factor`` in :func:`additive_scores`; ``grad`` is ``[num_edges, heads]``."""
    wide = _wide(a.dtype)
    of_a, of_b, of_factor = (torch.zeros_like(rows, dtype=wide) for rows in (a, b, factor))
    for rows, others, some in _ends(adjacency, a, b):
        z = rows.add_(others)
        passed = (z > 0).to(wide).mul_(1 - slope).add_(slope).mul_(grad[some].to(wide).unsqueeze(-1))
        # As matrices and with int64, since torch adds these much faster.
        of_a.flatten(1).index_add_(0, adjacency.target[some].long(), passed.flatten(1))
        of_b.flatten(1).index_add_(0, adjacency.col[some].long(), passed.flatten(1))
        of_factor += (passed * z).sum(0)
    factor = factor.to(wide)
    return (of_a * factor).to(a.dtype), (of_b * factor).to(b.dtype), of_factor.to(factor.dtype)


def _ends(adjacency: Adjacency, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """The rows of the targets and of the sources of some edges at a time, in at least float32, and which edges."""
    size = max((_GPU_VALUES if a.is_cuda else _CPU_VALUES) // max(a[:1].numel(), 1), 1)
    for first in range(0, adjacency.num_edges, size):
        some = slice(first, first + size)
        targets, sources = a.index_select(0, adjacency.target[some]), b.index_select(0, adjacency.col[some])
        yield targets.to(_wide(a.dtype)), sources.to(_wide(a.dtype)), some


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
