"""What a layer computes for each edge, as far as it need not be computed for each edge.

A term stands for a tensor with one row per edge. It holds rows of nodes instead and knows how to get at the result:
what is the same for all edges of a node is computed for the node, and a few kernels do the rest. Operations return a
new term, a tensor if the result is small, or ``None`` where only a row per edge will do: see :meth:`Term.dense`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Union

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.kernels import (
    Adjacency,
    Side,
    additive_scores,
    edge_dots,
    rows_at_edges,
    spmm,
    weighted_sum,
)

Result = Union["Term", Tensor, None]
#: A function of rows that treats each row, or each value, by itself.
RowFunction = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Term(ABC):
    """A value of shape ``[num_edges, ...]``."""

    adjacency: Adjacency

    @property
    @abstractmethod
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that the value is computed from."""

    @property
    @abstractmethod
    def row_shape(self) -> torch.Size:
        """The shape of a row."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The value itself, with its gradient."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the value."""
        dtype = self.rows[0].dtype
        for rows in self.rows[1:]:
            dtype = torch.promote_types(dtype, rows.dtype)
        return dtype

    @property
    def size(self) -> torch.Size:
        """The shape of the value."""
        return torch.Size((self.adjacency.num_edges, *self.row_shape))

    def mapped(self, function: RowFunction) -> Result:
        """Apply a function to each row."""
        return None

    def scaled(self, function: RowFunction) -> Result:
        """Multiply with something that is the same for all edges, as the function does with rows."""
        return None

    def shifted(self, function: RowFunction) -> Result:
        """Add something that is the same for all edges, as the function does with rows."""
        return None

    def activated(self, slope: float) -> Result:
        """Apply a leaky ReLU."""
        return None

    def weighted(self, weight: Tensor) -> Result:
        """Multiply with a value per edge and head, ``[num_edges, ..., 1]``."""
        return None

    def summed(self) -> Result:
        """Sum over the last dimension."""
        return None

    def reshaped(self, shape: torch.Size) -> Result:
        """Give rows another shape."""
        return None

    def aggregated(self) -> Tensor | None:
        """Sum the edges of each target, ``[num_targets, ...]``."""
        return None


@dataclass(eq=False)
class Rows(Term):
    """The rows of sources, or of targets."""

    x: Tensor
    side: Side

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See :attr:`Term.rows`."""
        return (self.x,)

    @property
    def row_shape(self) -> torch.Size:
        """See :attr:`Term.row_shape`."""
        return self.x.shape[1:]

    def dense(self) -> Tensor:
        """See :meth:`Term.dense`."""
        return rows_at_edges(self.adjacency, self.x, self.side)

    def mapped(self, function: RowFunction) -> Result:
        """See :meth:`Term.mapped`."""
        return replace(self, x=function(self.x))

    scaled = shifted = mapped

    def activated(self, slope: float) -> Result:
        """See :meth:`Term.activated`."""
        return self.mapped(lambda x: F.leaky_relu(x, slope))

    def weighted(self, weight: Tensor) -> Result:
        """See :meth:`Term.weighted`."""
        if self.side == "target" or self.x.dim() < 2:
            return None
        x = _by_head(self.x)
        weight = weight.expand(-1, *self.row_shape[:-1], 1).reshape(weight.size(0), x.size(1))
        return Weighted(self.adjacency, weight, x, self.row_shape)

    def summed(self) -> Result:
        """See :meth:`Term.summed`."""
        return self.mapped(lambda x: x.sum(-1)) if self.x.dim() > 1 else None

    def reshaped(self, shape: torch.Size) -> Result:
        """See :meth:`Term.reshaped`."""
        return self.mapped(lambda x: x.reshape(x.size(0), *shape))

    def aggregated(self) -> Tensor | None:
        """See :meth:`Term.aggregated`."""
        if self.side == "target":
            return None
        flat = self.x.reshape(self.x.size(0), math.prod(self.row_shape))
        return spmm(self.adjacency, flat).view(-1, *self.row_shape)


@dataclass(eq=False)
class _Pair(Term):
    """A value of the rows at both ends, ``[number, ..., width]`` of the same shape."""

    targets: Tensor
    sources: Tensor

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See :attr:`Term.rows`."""
        return self.targets, self.sources

    @property
    def row_shape(self) -> torch.Size:
        """See :attr:`Term.row_shape`."""
        return self.sources.shape[1:]

    def _dense_ends(self) -> tuple[Tensor, Tensor]:
        ends: tuple[tuple[Tensor, Side], ...] = (self.targets, "target"), (self.sources, "source")
        targets, sources = (rows_at_edges(self.adjacency, rows, side) for rows, side in ends)
        return targets, sources

    def _by_head(self) -> tuple[Tensor, Tensor] | None:
        """Both ends as kernels take them; ``None`` if rows are single values."""
        if self.sources.dim() < 2:
            return None
        return _by_head(self.targets.to(self.dtype)), _by_head(self.sources.to(self.dtype))

    def _per_edge(self, values: Tensor) -> Tensor:
        """Give values per edge and head, ``[num_edges, heads]``, the shape that a sum over the last dimension has."""
        # Autocast sums in single precision.
        values = values.float() if values.is_cuda and torch.is_autocast_enabled("cuda") else values
        return values.view(-1, *self.row_shape[:-1])


@dataclass(eq=False)
class Product(_Pair):
    """The rows of targets times the rows of sources."""

    def dense(self) -> Tensor:
        """See :meth:`Term.dense`."""
        targets, sources = self._dense_ends()
        return targets * sources

    def scaled(self, function: RowFunction) -> Result:
        """See :meth:`Term.scaled`."""
        found = function(self.sources)
        return replace(self, sources=found) if found.shape == self.sources.shape else None

    def summed(self) -> Result:
        """See :meth:`Term.summed`."""
        ends = self._by_head()
        return None if ends is None else self._per_edge(edge_dots(self.adjacency, *ends))


@dataclass(eq=False)
class Sum(_Pair):
    """``factor * leaky_relu(targets + sources, slope)``; a slope of 1 is no activation."""

    slope: float = 1.0
    #: Of the shape of a row; ``None`` is 1.
    factor: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See :attr:`Term.rows`."""
        return (self.targets, self.sources) if self.factor is None else (self.targets, self.sources, self.factor)

    def dense(self) -> Tensor:
        """See :meth:`Term.dense`."""
        targets, sources = self._dense_ends()
        out = targets + sources if self.slope == 1 else F.leaky_relu(targets + sources, self.slope)
        return out if self.factor is None else out * self.factor

    @property
    def _is_bare(self) -> bool:
        return self.slope == 1 and self.factor is None

    def shifted(self, function: RowFunction) -> Result:
        """See :meth:`Term.shifted`."""
        found = function(self.sources) if self._is_bare else None
        return replace(self, sources=found) if found is not None and found.shape == self.sources.shape else None

    def scaled(self, function: RowFunction) -> Result:
        """See :meth:`Term.scaled`."""
        before = self.sources.new_ones(1, *self.row_shape) if self.factor is None else self.factor.unsqueeze(0)
        factor = function(before)
        return replace(self, factor=factor.squeeze(0)) if factor.shape == before.shape else None

    def activated(self, slope: float) -> Result:
        """See :meth:`Term.activated`."""
        return replace(self, slope=slope) if self._is_bare else None

    def plus(self, other: Rows) -> Result:
        """Add the rows of one end."""
        if not self._is_bare or other.row_shape != self.row_shape:
            return None
        if other.side == "target":
            return replace(self, targets=self.targets + other.x)
        return replace(self, sources=self.sources + other.x)

    def summed(self) -> Result:
        """See :meth:`Term.summed`."""
        ends = self._by_head()
        if ends is None:
            return None
        factor = self.sources.new_ones(self.row_shape) if self.factor is None else self.factor
        factor = factor.to(self.dtype).reshape(-1, self.row_shape[-1])
        return self._per_edge(additive_scores(self.adjacency, *ends, factor, self.slope))


@dataclass(eq=False)
class Weighted(Term):
    """The rows ``x`` of sources, ``[num_sources, heads, width]``, times a ``weight``, ``[num_edges, heads]``.

    ``shape`` is that of a row.
    """

    weight: Tensor
    x: Tensor
    shape: torch.Size

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See :attr:`Term.rows`."""
        return self.weight, self.x

    @property
    def row_shape(self) -> torch.Size:
        """See :attr:`Term.row_shape`."""
        return self.shape

    def dense(self) -> Tensor:
        """See :meth:`Term.dense`."""
        messages = self.weight.unsqueeze(-1) * rows_at_edges(self.adjacency, self.x, "source")
        return messages.view(self.size)

    def scaled(self, function: RowFunction) -> Result:
        """See :meth:`Term.scaled`."""
        found = function(self.x.reshape(-1, *self.shape))
        return replace(self, x=found.reshape(self.x.shape)) if found.shape[1:] == self.shape else None

    def weighted(self, weight: Tensor) -> Result:
        """See :meth:`Term.weighted`."""
        if math.prod(weight.shape[1:]) != 1 and (*weight.shape[1:-1], *self.x.shape[2:]) != self.shape:
            return None
        return replace(self, weight=self.weight * weight.flatten(1))

    def reshaped(self, shape: torch.Size) -> Result:
        """See :meth:`Term.reshaped`."""
        return replace(self, shape=shape)

    def aggregated(self) -> Tensor | None:
        """See :meth:`Term.aggregated`."""
        out = weighted_sum(self.adjacency, self.weight.to(self.dtype), self.x.to(self.dtype))
        return out.view(-1, *self.shape)


@dataclass(eq=False)
class Padded(Term):
    """Rows, ``[at most number, ...]``, followed by zeros up to some number; the only term without a row per edge."""

    x: Tensor
    number: int

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See :attr:`Term.rows`."""
        return (self.x,)

    @property
    def row_shape(self) -> torch.Size:
        """See :attr:`Term.row_shape`."""
        return self.x.shape[1:]

    @property
    def size(self) -> torch.Size:
        """See :attr:`Term.size`."""
        return torch.Size((self.number, *self.row_shape))

    def dense(self) -> Tensor:
        """See :meth:`Term.dense`."""
        missing = self.number - self.x.size(0)
        return F.pad(self.x, (0, 0) * (self.x.dim() - 1) + (0, missing)) if missing else self.x


def add(a: Term, b: Term) -> Result:
    """The sum of two terms."""
    if isinstance(a, Sum) and isinstance(b, Rows):
        return a.plus(b)
    if isinstance(b, Sum) and isinstance(a, Rows):
        return b.plus(a)
    return _combined(a, b, torch.add, Sum)


def multiply(a: Term, b: Term) -> Result:
    """The product of two terms."""
    return _combined(a, b, torch.mul, Product)


def _combined(
    a: Term, b: Term, function: Callable[[Tensor, Tensor], Tensor], kind: type[Sum] | type[Product]
) -> Result:
    """Combine two terms: at the nodes, if both are rows of the same end, or later."""
    if not isinstance(a, Rows) or not isinstance(b, Rows) or a.x.dim() != b.x.dim():
        return None
    if a.side == b.side:
        return replace(a, x=function(a.x, b.x))
    shape = torch.broadcast_shapes(a.row_shape, b.row_shape)  # type: ignore[no-untyped-call]
    targets, sources = (rows.x.expand(-1, *shape) for rows in ((a, b) if a.side == "target" else (b, a)))
    return kind(a.adjacency, targets, sources)


def _by_head(x: Tensor) -> Tensor:
    """Rows as kernels take them, ``[number, heads, width]``."""
    return x.reshape(x.size(0), math.prod(x.shape[1:-1]), x.size(-1))
