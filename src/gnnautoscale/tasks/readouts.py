"""Readouts: from the rows of a graph's nodes to one row, part by part.

A part of a graph is pooled by itself; what that gives is a *partial result*, one row with the number of nodes in its
first column, and zeros if there are none. Partial results are merged, in any order, and finished to the pooled row. All
of it can be differentiated, and some parts may be constants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError

#: Names of readouts.
ReadoutName = Literal["sum", "mean", "max", "min", "softmax", "attention"]


class Readout(nn.Module, ABC):
    """Pools the nodes of graphs that may come in parts."""

    def partial(self, rows: Tensor, place: Tensor, count: int) -> Tensor:
        """Pool rows ``[num_rows, width]`` by their place ``[num_rows]`` into partial results ``[count, columns]``."""
        nodes = _sums(torch.ones_like(rows[:, :1]), place, count)
        return torch.cat([nodes, *self._pool(rows, place, count)], dim=1)

    def merge(self, parts: Tensor) -> Tensor:
        """Merge partial results ``[num_graphs, num_parts, columns]`` to ``[num_graphs, columns]``."""
        nodes = parts[..., :1]
        return torch.cat([nodes.sum(dim=1), *self._merge(nodes > 0, parts[..., 1:])], dim=1)

    def finish(self, merged: Tensor, nodes: Tensor) -> Tensor:
        """The pooled row of each graph, given how many nodes it has, ``[num_graphs]``; not all need to be there."""
        return self._finish(merged[:, 1:], merged[:, :1], nodes.unsqueeze(1).to(merged.dtype))

    @abstractmethod
    def place(self, parts: Tensor) -> Tensor:
        """Where partial results ``[count, columns]`` are, whatever their number of nodes, ``[count, n]``."""

    @abstractmethod
    def moved(self, parts: Tensor, by: Tensor) -> Tensor:
        """Partial results ``[count, columns]`` whose :meth:`place` has changed ``by`` something, ``[count, n]``."""

    @abstractmethod
    def _pool(self, rows: Tensor, place: Tensor, count: int) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _merge(self, there: Tensor, parts: Tensor) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _finish(self, merged: Tensor, known: Tensor, nodes: Tensor) -> Tensor: ...


class _Sum(Readout):
    """The sum, extrapolated to nodes that no part has told about yet; or the mean of those that are known."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self._mean = mean

    def place(self, parts: Tensor) -> Tensor:
        """The mean row."""
        return parts[:, 1:] / parts[:, :1].clamp(min=1)

    def moved(self, parts: Tensor, by: Tensor) -> Tensor:
        """See :meth:`Readout.moved`."""
        return torch.cat([parts[:, :1], parts[:, 1:] + parts[:, :1] * by], dim=1)

    def _pool(self, rows: Tensor, place: Tensor, count: int) -> tuple[Tensor, ...]:
        return (_sums(rows, place, count),)

    def _merge(self, there: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        return (parts.sum(dim=1),)

    def _finish(self, merged: Tensor, known: Tensor, nodes: Tensor) -> Tensor:
        known = known.clamp(min=1)
        return merged / known if self._mean else merged * (nodes / known)


class _Extreme(Readout):
    """The largest or smallest value of each column; all rows that have it share the gradient evenly.

    A partial result is the value and how many rows have it.
    """

    def __init__(self, *, largest: bool) -> None:
        super().__init__()
        self._sign = 1.0 if largest else -1.0

    def place(self, parts: Tensor) -> Tensor:
        """The value."""
        return parts[:, 1:].chunk(2, dim=1)[0]

    def moved(self, parts: Tensor, by: Tensor) -> Tensor:
        """See :meth:`Readout.moved`."""
        values, rows = parts[:, 1:].chunk(2, dim=1)
        return torch.cat([parts[:, :1], values + by, rows], dim=1)

    def _pool(self, rows: Tensor, place: Tensor, count: int) -> tuple[Tensor, ...]:
        rows = rows * self._sign
        index = place.unsqueeze(1).expand_as(rows)
        best = rows.new_full((count, rows.size(1)), -torch.inf).scatter_reduce(0, index, rows, "amax")
        sharing = _sums((rows == best[place]).to(rows.dtype).detach(), place, count)
        return torch.where(sharing > 0, best, 0.0), sharing

    def _merge(self, there: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        values, rows = parts.chunk(2, dim=-1)
        best = values.detach().masked_fill(~there, -torch.inf).amax(dim=1, keepdim=True)
        sharing = torch.where(there & (values == best), rows, 0.0).detach()
        total = sharing.sum(dim=1)
        mean = (sharing * values).sum(dim=1) / total.clamp(min=1)
        best = torch.where(total > 0, best.squeeze(1), 0.0)
        return best + (mean - mean.detach()), total

    def _finish(self, merged: Tensor, known: Tensor, nodes: Tensor) -> Tensor:
        return merged.chunk(2, dim=1)[0] * self._sign


class _Weighted(Readout):
    """Means weighted by the softmax of gates over a graph.

    A partial result is, for each gate, the largest one and the sum of weights relative to it, and the weighted sum of
    rows. ``aggregation`` is PyG's.
    """

    def __init__(self, aggregation: Any) -> None:
        super().__init__()
        self.aggregation = aggregation
        self._gates = 0

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gates ``[num_rows, 1 or width]`` and the rows to sum, ``[num_rows, width]``."""
        given = self.aggregation
        if isinstance(given, aggr.SoftmaxAggregation):
            gates = rows * given.t
            return gates.detach() if given.semi_grad and not given.learn else gates, rows
        gate, change = given.gate_mlp or given.gate_nn, given.mlp or given.nn
        return gate(rows), rows if change is None else change(rows)

    def place(self, parts: Tensor) -> Tensor:
        """The logarithm of the sum of weights, and the weighted mean."""
        tops, weights, sums = torch.split(parts[:, 1:], self._columns(parts), dim=1)
        some = torch.where(weights > 0, weights, 1.0)
        return torch.cat([tops + some.log(), sums / some], dim=1)

    def moved(self, parts: Tensor, by: Tensor) -> Tensor:
        """See :meth:`Readout.moved`."""
        tops, weights, sums = torch.split(parts[:, 1:], self._columns(parts), dim=1)
        gates, rows = by[:, : self._gates], by[:, self._gates :]
        return torch.cat([parts[:, :1], tops + gates, weights, sums + weights * rows], dim=1)

    def _columns(self, parts: Tensor) -> list[int]:
        return [self._gates, self._gates, parts.size(-1) - 1 - 2 * self._gates]

    def _pool(self, rows: Tensor, place: Tensor, count: int) -> tuple[Tensor, ...]:
        gates, rows = self._rows(rows)
        self._gates = gates.size(1)
        index, fixed = place.unsqueeze(1).expand_as(gates), gates.detach()
        top = fixed.new_zeros(count, self._gates).scatter_reduce(0, index, fixed, "amax", include_self=False)
        weights = (gates - top[place]).exp()
        return top, _sums(weights, place, count), _sums(weights * rows, place, count)

    def _merge(self, there: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        sizes = [self._gates, self._gates, parts.size(-1) - 2 * self._gates]
        tops, weights, sums = torch.split(parts, sizes, dim=-1)
        tops = tops.detach().masked_fill(~there, -torch.inf)
        top = tops.amax(dim=1)
        top = torch.where(top > -torch.inf, top, 0.0)
        scale = (tops - top.unsqueeze(1)).exp()
        return top, (scale * weights).sum(dim=1), (scale * sums).sum(dim=1)

    def _finish(self, merged: Tensor, known: Tensor, nodes: Tensor) -> Tensor:
        sizes = [self._gates, self._gates, merged.size(1) - 2 * self._gates]
        _, weights, sums = torch.split(merged, sizes, dim=1)
        return sums / torch.where(weights > 0, weights, 1.0)


def make_readout(given: object, width: int) -> Readout:
    """The readout of a name, or of one of PyG's aggregations, for rows of some width.

    Example:
        >>> make_readout("median", 8)
        Traceback (most recent call last):
        ...
        gnnautoscale.errors.InputError: a readout is sum, mean, max, min, softmax or attention, or one of PyG's ...
    """
    if isinstance(given, Readout):
        return given
    named = {
        "sum": aggr.SumAggregation,
        "mean": aggr.MeanAggregation,
        "max": aggr.MaxAggregation,
        "min": aggr.MinAggregation,
        "softmax": aggr.SoftmaxAggregation,
    }
    if isinstance(given, str) and given in named:
        given = named[given]()
    elif given == "attention":
        given = aggr.AttentionalAggregation(nn.Linear(width, 1))
    made: dict[Any, Callable[[], Readout]] = {
        aggr.SumAggregation: lambda: _Sum(mean=False),
        aggr.MeanAggregation: lambda: _Sum(mean=True),
        aggr.MaxAggregation: lambda: _Extreme(largest=True),
        aggr.MinAggregation: lambda: _Extreme(largest=False),
        aggr.SoftmaxAggregation: lambda: _Weighted(given),
        aggr.AttentionalAggregation: lambda: _Weighted(_by_rows(given)),
    }
    if type(given) not in made:
        raise InputError(
            "a readout is sum, mean, max, min, softmax or attention, or one of PyG's aggregations of these kinds, "
            "which can be merged from parts of a graph",
            got=repr(given) if isinstance(given, str) else f"a {type(given).__name__}",
            fix="Choose one of these, and put what follows into the head.",
        )
    return made[type(given)]()


def _by_rows(given: Any) -> Any:
    """Refuse attention whose networks mix the nodes of a graph."""
    for mlp in (given.gate_mlp, given.mlp):
        if mlp is not None and mlp.supports_norm_batch:
            fix = "Use norm=None, 'batch_norm' or 'layer_norm' of nodes."
            raise InputError("networks of attention take each node by itself", got=f"{mlp}", fix=fix)
    return given


def _sums(rows: Tensor, place: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, rows.size(1)).index_add(0, place, rows)
