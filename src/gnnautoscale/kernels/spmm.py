"""Sums, means, maxima and minima over neighbours, as one sparse-dense product with a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse  # type: ignore[import-untyped]
import torch
from torch import Tensor

from gnnautoscale._util import for_later
from gnnautoscale.errors import InputError
from gnnautoscale.kernels import plain_spmm
from gnnautoscale.kernels.available import use_triton
from gnnautoscale.kernels.halo import Count, expand_targets, regroup
from gnnautoscale.kernels.long_rows import LONG_ROW, RowSegments, split_long_rows

REDUCES = ("sum", "mean", "max", "min")
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Adjacency:
    """Edges grouped by target, and also by source once a gradient needs it.

    Attributes:
        ptr: First edge of each target, ``[num_targets + 1]``, int32.
        col: Source of each edge, ``[num_edges]``, int32.
        weight: The factor of each edge, ``[num_edges]``, or ``None`` for 1.
        num_sources: Number of source rows.
        by_source: The positions of the edges grouped by source, and these sources, ``[num_edges]`` each, if known.
        longest: The largest number of edges into a target, if known.

    Example:
        >>> target, source = torch.tensor([0, 0, 2]), torch.tensor([3, 1, 3])
        >>> adjacency = Adjacency.build(target, source, num_targets=3, num_sources=4)
        >>> adjacency.ptr.tolist(), adjacency.col.tolist()
        ([0, 2, 2, 3], [3, 1, 3])
        >>> ptr_t, col_t, _ = adjacency.transposed
        >>> ptr_t.tolist(), col_t.tolist()
        ([0, 0, 1, 1, 3], [0, 0, 2])
    """

    ptr: Tensor
    col: Tensor
    weight: Tensor | None
    num_sources: int
    by_source: tuple[Tensor, Tensor] | None = None
    longest: int | None = None

    @classmethod
    def build(
        cls, target: Tensor, source: Tensor, num_targets: int, num_sources: int, weight: Tensor | None = None
    ) -> Adjacency:
        """Group edges by target: ascending targets, sources and factors, ``[num_edges]`` each."""
        for name, value in (("source", source), ("weight", weight)):
            if value is not None and value.shape != target.shape:
                rule = "target, source and weight must have one value per edge"
                got = f"{name} of shape {tuple(value.shape)} for target of shape {tuple(target.shape)}"
                raise InputError(rule, got=got, fix="Pass tensors of shape [num_edges].")
        # Wrong indices would read out of bounds. On a GPU, a check would have to wait for the device.
        if not target.is_cuda and target.numel():
            if bool((target[1:] < target[:-1]).any()):
                raise InputError("target must be ascending", got="another order", fix="Sort the edges by target.")
            for name, value, size in (("target", target, num_targets), ("source", source, num_sources)):
                low, high = (int(bound) for bound in value.aminmax())
                if low < 0 or high >= size:
                    rule, got = f"{name} must be between 0 and {size - 1}", f"values from {low} to {high}"
                    raise InputError(rule, got=got, fix=f"Check num_{name}s and the edges.")
        ptr: Tensor = torch._convert_indices_from_coo_to_csr(target, num_targets, out_int32=True)
        return cls(ptr, source.to(torch.int32), weight, num_sources)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], num_sources: int) -> Adjacency:
        """Rebuild an adjacency from :meth:`tensors`, on any device.

        Those of the transpose and of single edges may be missing; if those of the segments are, no row is split.
        """
        adjacency = cls(tensors["ptr"], tensors["col"], tensors.get("weight"), num_sources)
        adjacency.segments = RowSegments.of(tensors)
        if "order_t" in tensors:
            adjacency.order_t, adjacency.target = tensors["order_t"], tensors["target"]
        if "ptr_t" in tensors:
            adjacency.transposed = (tensors["ptr_t"], tensors["col_t"], tensors.get("weight_t"))
            adjacency.segments_t = RowSegments.of(tensors, "_t")
        return adjacency

    def tensors(self, *, edge_values: bool = False) -> dict[str, Tensor]:
        """All tensors by name, with the transpose and, if there are weights or long rows, theirs.

        With ``edge_values`` also those that functions of values per edge need.
        """
        found: dict[str, Tensor] = {"order_t": self.order_t, "target": self.target} if edge_values else {}
        directions = (("", (self.ptr, self.col, self.weight), self.segments), ("_t", self.transposed, self.segments_t))
        for suffix, edges, segments in directions:
            named = zip(("ptr", "col", "weight"), edges, strict=True)
            found |= {name + suffix: tensor for name, tensor in named if tensor is not None}
            found |= {} if segments is None else segments.named(suffix)
        return found

    @property
    def num_targets(self) -> int:
        """Number of target rows."""
        return self.ptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.col.numel()

    @cached_property
    @for_later
    def transposed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same edges grouped by source.

        First edge of each source, ``[num_sources + 1]``; target of each edge and its weight, ``[num_edges]`` each.
        """
        if not self.col.is_cuda:
            return self._transposed_by_counting()
        if self.by_source is None:
            source, order = self.col.sort(stable=True)
            self.by_source = order, source
        order, source = self.by_source
        ptr: Tensor = torch._convert_indices_from_coo_to_csr(source, self.num_sources, out_int32=True)
        return ptr, *regroup(self.ptr, order, self.weight)

    def _transposed_by_counting(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The transpose on a CPU, where SciPy's conversion takes a tenth of the time of a sort."""
        places = np.arange(self.num_edges, dtype=np.int32)
        shape = (self.num_targets, self.num_sources)
        matrix = scipy.sparse.csr_array((places, self.col.numpy(), self.ptr.numpy()), shape=shape).tocsc()
        self.order_t = torch.from_numpy(matrix.data)
        weight = None if self.weight is None else self.weight.index_select(0, self.order_t)
        return torch.from_numpy(matrix.indptr), torch.from_numpy(matrix.indices), weight

    @cached_property
    @for_later
    def order_t(self) -> Tensor:
        """The edges grouped by source: the position of each among those grouped by target, ``[num_edges]``, int32."""
        _ = self.transposed
        # A CPU has set it by now.
        return vars(self)["order_t"] if self.by_source is None else self.by_source[0].to(torch.int32)

    @cached_property
    @for_later
    def target(self) -> Tensor:
        """Target of each edge, ``[num_edges]``, int32."""
        return expand_targets(self.ptr, self.num_edges).to(torch.int32)

    def prepare(self, *, gradients: bool) -> None:
        """Start what a GPU would have to be waited for later; with ``gradients`` also the transpose."""
        if self.ptr.is_cuda:
            _ = (self.transposed, self._longest_t) if gradients else None

    @cached_property
    def _longest_t(self) -> Count:
        if self.num_edges <= LONG_ROW:  # then no row is long
            return Count(torch.tensor(self.num_edges))
        return Count(self.transposed[0].diff().amax())

    @cached_property
    def segments(self) -> RowSegments | None:
        """The segments of targets with very many edges; ``None`` if there are none."""
        if self.longest is None:
            self.longest = int(self.ptr.diff().amax()) if self.num_targets else 0
        return split_long_rows(self.ptr, self.longest)

    @cached_property
    def segments_t(self) -> RowSegments | None:
        """The segments of sources with very many edges; ``None`` if there are none."""
        return split_long_rows(self.transposed[0], int(self._longest_t))

    def tensors_so_far(self) -> Iterator[Tensor]:
        """All tensors that are there already."""
        yield from (self.ptr, self.col, *(self.by_source or ()))
        for tensor in (self.weight, *vars(self).get("transposed", ())):
            if tensor is not None:
                yield tensor


def spmm(adjacency: Adjacency, x: Tensor, reduce: str = "sum", *, grad_rows: int | None = None) -> Tensor:
    r"""Aggregate the rows of each target's neighbours.

    .. math:: \mathbf{y}_t = \bigoplus_{s \to t} w_{st} \, \mathbf{x}_s

    Sums are computed in at least single precision, and always in the same order. Targets without edges get 0. All
    edges that reach a maximum or minimum share its gradient evenly, as in :func:`torch.scatter_reduce` and PyG. Call
    :meth:`Adjacency.tensors` once before this runs in a CUDA graph: it prepares the transpose and the long rows.

    Args:
        adjacency: The edges, with constant weights.
        x: A row per source, ``[num_sources, width]``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        grad_rows: Number of rows of ``x``, from the first, that need a gradient; for sums and means the others get 0.

    Returns:
        A row per target, ``[num_targets, width]``, in the type of ``x``.

    Example:
        >>> target, source = torch.tensor([0, 0, 2]), torch.tensor([3, 1, 3])
        >>> adjacency = Adjacency.build(target, source, num_targets=3, num_sources=4)
        >>> spmm(adjacency, torch.tensor([[1.0], [2.0], [4.0], [8.0]])).tolist()
        [[10.0], [0.0], [8.0]]
    """
    if reduce not in REDUCES:
        raise InputError(f"reduce must be one of {', '.join(REDUCES)}", got=repr(reduce), fix="Pass one of these.")
    if x.dim() != 2 or x.size(0) != adjacency.num_sources or not x.is_floating_point():
        rule = f"x must hold floating-point values of shape [{adjacency.num_sources}, width]"
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        raise InputError(rule, got=got, fix="Pass one row per source of the adjacency.")
    if adjacency.weight is not None and adjacency.weight.requires_grad:
        fix = "Apply learned weights to the messages outside spmm, or detach the weights."
        raise InputError("the weights of an adjacency must be constants", got="weights that need a gradient", fix=fix)
    out: Tensor
    if reduce in ("max", "min"):
        out = _Extreme.apply(x, adjacency, reduce == "max")  # type: ignore[no-untyped-call]
    else:
        out = _Sum.apply(x, adjacency, reduce == "mean", grad_rows)  # type: ignore[no-untyped-call]
    return out


class _Sum(torch.autograd.Function):
    """Sums or means over neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, mean: bool, grad_rows: int | None) -> Tensor:
        ctx.options = adjacency, mean, grad_rows
        edges = (adjacency.ptr, adjacency.col, adjacency.weight)
        out: Tensor = spmm_backend(x).sum_neighbours(*edges, x, mean=mean, segments=adjacency.segments)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _SumTransposed.apply(grad, *ctx.options), None, None, None  # type: ignore[no-untyped-call]


class _SumTransposed(torch.autograd.Function):
    """The gradient of :class:`_Sum`: a sum over the reversed edges."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, adjacency: Adjacency, mean: bool, grad_rows: int | None) -> Tensor:
        ctx.options = adjacency, mean, grad_rows
        ptr, col, weight = adjacency.transposed
        options: dict[str, Any] = {"degrees": adjacency.ptr if mean else None, "segments": adjacency.segments_t}
        if grad_rows is not None:
            ptr, options["num_rows"] = ptr[: grad_rows + 1], adjacency.num_sources
        out: Tensor = spmm_backend(grad).sum_neighbours(ptr, col, weight, grad, **options)
        return out

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor, None, None, None]:
        adjacency, mean, grad_rows = ctx.options
        if grad_rows is not None:  # the other rows are constant 0
            again = torch.cat([again[:grad_rows], torch.zeros_like(again[grad_rows:])])
        return _Sum.apply(again, adjacency, mean, None), None, None, None  # type: ignore[no-untyped-call]


class _Extreme(torch.autograd.Function):
    """Maxima or minima over neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, largest: bool) -> Tensor:
        ctx.adjacency = adjacency
        edges = (adjacency.ptr, adjacency.col, adjacency.weight)
        count = ctx.needs_input_grad[0]
        out: Tensor
        out, ties = spmm_backend(x).extreme_neighbours(*edges, x, largest=largest, count=count)
        if count:
            ctx.save_for_backward(x, out, ties)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, out, ties = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        # scatter_reduce, which PyG uses, starts from zeros and counts these as one more tie if the result is 0.
        share = grad.to(wide) / (ties + (out == 0))
        # Plain torch if a second derivative is needed, since autograd can differentiate it.
        backend = plain_spmm if torch.is_grad_enabled() else spmm_backend(grad)
        edges = ctx.adjacency.transposed
        return backend.extreme_gradient(*edges, x.detach(), out.detach(), share), None, None


def spmm_backend(x: Tensor) -> ModuleType:
    """The module that computes; both have the same functions."""
    if use_triton(x) and x.dtype in TRITON_DTYPES:
        from gnnautoscale.kernels import triton_spmm

        return triton_spmm
    return plain_spmm
