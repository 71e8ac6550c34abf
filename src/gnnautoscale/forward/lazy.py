"""Edges on which layers compute without a row per edge, as far as that is possible.

A layer on lazy edges runs its own code. Where it gathers the rows at one end of its edges, it gets a tensor that only
knows which rows are meant (:class:`LazyTensor`). Torch hands every function of such a tensor to this module, which
answers with a :class:`Term` if that is enough, with a kernel where values per edge and head result or where messages
are added up, and otherwise calculates the rows of all edges, after which everything takes its usual course. So what
attention layers do runs in few kernels, and what this module does not know is right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale._util import map_tensors
from gnnautoscale.forward import terms
from gnnautoscale.forward.terms import Padded, Result, Rows, Term
from gnnautoscale.kernels import Adjacency, Side, max_at_targets, rows_at_edges, sum_at_nodes

Function = Callable[..., Any]


@dataclass(eq=False)
class _Edges:
    """The edges of a layer.

    ``short`` results have one row per target; others as many as the layer asks for, which are 0 beyond the targets.
    """

    adjacency: Adjacency
    target_row: int
    short: bool


class LazyEdges(Tensor):
    """An ``edge_index``, ``[2, num_edges]``, or one of its rows, that knows its adjacency."""

    edges: _Edges
    #: Which end of the edges this is, in a row; ``None`` for both.
    side: Side | None

    @staticmethod
    def of(edge_index: Tensor, adjacency: Adjacency, target_row: int, *, short: bool = False) -> LazyEdges:
        """Make edges, grouped by target, lazy.

        If ``short``, sums over neighbours have a row per target only, instead of the number that a layer asks for.
        """
        return LazyEdges._tag(edge_index, _Edges(adjacency, target_row, short), None)

    @staticmethod
    def _tag(value: Tensor, edges: _Edges, side: Side | None) -> LazyEdges:
        tagged = value.as_subclass(LazyEdges)
        tagged.edges, tagged.side = edges, side
        return tagged

    @property
    def plain(self) -> Tensor:
        """The same values without the edges."""
        return self.as_subclass(Tensor)

    def row(self, place: int) -> LazyEdges:
        """One row of both."""
        side: Side = "target" if place % 2 == self.edges.target_row else "source"
        return self._tag(self.plain[place], self.edges, side)

    def spread(self, shape: torch.Size) -> LazyEdges:
        """A row of ``[num_edges]``, repeated along further dimensions."""
        found = self.plain.view(-1, *(1 for _ in shape[1:])) if self.dim() == 1 else self.plain
        return self._tag(found.expand(shape), self.edges, self.side)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


class LazyTensor(Tensor):
    """A tensor that is a term until its values are needed."""

    #: ``None`` once there are values.
    term: Term | None
    _made: Tensor

    @staticmethod
    def of(term: Term) -> LazyTensor:
        """A term in the form of a tensor."""
        needs_grad = torch.is_grad_enabled() and any(rows.requires_grad for rows in term.rows)
        lazy = Tensor._make_wrapper_subclass(
            LazyTensor, term.size, dtype=term.dtype, device=term.rows[0].device, requires_grad=needs_grad
        )
        lazy.term = term
        return lazy

    @property
    def made(self) -> Tensor:
        """The values; from now on, the tensor consists of these."""
        if self.term is not None:
            self._made, self.term = self.term.dense(), None
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Without values there is no gradient either, so this must not go on.
        raise RuntimeError(f"{func} was called past torch's functions, with a tensor that has no values yet")


# Calls of functions ##################################################################################################


def _run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function in the best way that its arguments allow."""
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    handler = _HANDLERS.get(func)
    if handler is not None:
        try:
            found = handler(*args, **kwargs)
        except TypeError:  # arguments that a handler does not know
            found = None
        if found is not None:
            return LazyTensor.of(found) if isinstance(found, Term) else found
    return func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs))


def _plain(value: Tensor) -> Tensor:
    if isinstance(value, LazyTensor):
        return value.made
    return value.plain if isinstance(value, LazyEdges) else value


def _term(value: Any) -> Term | None:
    return value.term if isinstance(value, LazyTensor) else None


def _is_constant(value: Any, term: Term) -> bool:
    """Whether something is the same for all edges."""
    if isinstance(value, (int, float)):
        return True
    if not isinstance(value, Tensor) or isinstance(value, (LazyTensor, LazyEdges)):
        return False
    dims = len(term.size)
    return value.dim() < dims or (value.dim() == dims and value.size(0) == 1)


def _weights(value: Any, term: Term) -> bool:
    """Whether something is a value per edge and head."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, LazyEdges)
        and value.is_floating_point()
        and 1 < value.dim() == len(term.size)
        and value.size(0) == term.size[0]
        and value.size(-1) == 1
        and all(size in (1, whole) for size, whole in zip(value.shape[1:], term.row_shape, strict=True))
    )


def _multiply(a: Any, b: Any) -> Result:
    one, other = _term(a), _term(b)
    if one is not None and other is not None:
        return terms.multiply(one, other)
    term, value = (one, b) if one is not None else (other, a)
    if term is None:
        return None
    if _is_constant(value, term):
        return term.scaled(lambda x: x * value)
    return term.weighted(_plain(value)) if _weights(value, term) else None


def _divide(a: Any, b: Any) -> Result:
    term = _term(a)
    return term.scaled(lambda x: x / b) if term is not None and _is_constant(b, term) else None


def _add(a: Any, b: Any) -> Result:
    one, other = _term(a), _term(b)
    if one is not None and other is not None:
        return terms.add(one, other)
    term, value = (one, b) if one is not None else (other, a)
    return term.shifted(lambda x: x + value) if term is not None and _is_constant(value, term) else None


def _subtract(a: Any, b: Any) -> Result:
    one, other = _term(a), _term(b)
    if one is not None and other is None:
        return one.shifted(lambda x: x - b) if _is_constant(b, one) else None
    if other is None or not (one is not None or _is_constant(a, other)):
        return None
    negative = other.mapped(torch.neg)
    return _add(a, LazyTensor.of(negative)) if isinstance(negative, Term) else None


def _subtract_from(b: Any, a: Any) -> Result:
    return _subtract(a, b)


def _relu(a: Any, inplace: bool = False) -> Result:
    return _leaky_relu(a, 0.0, inplace)


def _leaky_relu(a: Any, negative_slope: float = 0.01, inplace: bool = False) -> Result:
    term = _term(a)
    return None if term is None or inplace else term.activated(negative_slope)


def _sum(a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    term = _term(a)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if term is None or type(dim) is not int or dim not in (-1, len(term.size) - 1) or len(term.size) == 1:
        return None
    found = term.summed()
    found = LazyTensor.of(found) if isinstance(found, Term) else found
    return found.unsqueeze(-1) if keepdim and found is not None else found


def _linear(a: Any, weight: Tensor, bias: Tensor | None = None) -> Result:
    term = _term(a)
    return None if not isinstance(term, Rows) else term.mapped(lambda x: F.linear(x, weight, bias))


def _row_by_row(func: Function) -> Function:
    """A function that treats each value by itself."""

    def run(a: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Result:
        term = _term(a)
        return None if term is None or inplace else term.mapped(lambda x: func(x, *args, **kwargs))

    return run


def _view(a: Any, *shape: Any) -> Any:
    wanted = _size(shape)
    if isinstance(a, LazyEdges):
        return _index_view(a, a.plain.reshape(wanted))
    term = _term(a)
    if term is None:
        return None
    found = torch.empty(term.size, device="meta").view(wanted).shape
    kept = len(found) > 0 and found[0] == term.size[0] and found[1:].numel() == term.row_shape.numel()
    return term.reshaped(found[1:]) if kept else None


def _size(shape: tuple[Any, ...]) -> torch.Size:
    """A shape that is given in one argument or in several."""
    return torch.Size(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


def _unsqueeze(a: Any, dim: int) -> Any:
    if isinstance(a, LazyEdges):
        return _index_view(a, a.plain.unsqueeze(dim))
    term = _term(a)
    if term is None or dim in (0, -1 - len(term.size)):
        return None
    return term.reshaped(torch.empty(term.size, device="meta").unsqueeze(dim).shape[1:])


def _new(func: Function) -> Function:
    """A function that makes a tensor of the same type and on the same device as another."""

    def run(a: Any, *args: Any, **kwargs: Any) -> Any:
        term = _term(a)
        if term is None:
            return None
        like = torch.empty(0, dtype=term.dtype, device=term.rows[0].device)
        wanted = _size(args) if func is Tensor.new_zeros and not kwargs else torch.Size()
        if not wanted:
            return func(like, *args, **kwargs)
        # Zeros that take no memory: what edges hold is about to be added to them.
        return Padded(term.adjacency, like.new_empty(0, *wanted[1:]), wanted[0])

    return run


# Edges ###############################################################################################################


def _index_view(index: LazyEdges, view: Tensor) -> Tensor | None:
    """A row of indices in another shape; it still tells the end of each edge if this comes first."""
    edges_first = index.side is not None and view.size(0) == view.numel() == index.edges.adjacency.num_edges
    return LazyEdges._tag(view, index.edges, index.side) if edges_first else None


def _expand_as(a: Any, other: Tensor) -> Any:
    return _expand(a, other.shape)


def _expand(a: Any, *shape: Any) -> Any:
    if not isinstance(a, LazyEdges) or a.side is None:
        return None
    wanted = _size(shape)
    num_edges = a.edges.adjacency.num_edges
    if len(wanted) != a.dim() or a.numel() != num_edges or wanted[0] not in (-1, num_edges) or num_edges == 1:
        return None
    return a.spread(wanted)


def _get(a: Any, place: Any) -> Any:
    if isinstance(a, LazyEdges):
        return a.row(place) if a.side is None and type(place) is int and -2 <= place < 2 else None
    return _gather(a, 0, place)


def _unbind(a: Any, dim: int = 0) -> Any:
    return (a.row(0), a.row(1)) if isinstance(a, LazyEdges) and a.side is None and dim == 0 else None


def _iterate(a: Any) -> Any:
    rows = _unbind(a)
    return None if rows is None else iter(rows)


def _gather(a: Any, dim: int, index: Any) -> Any:
    """The rows at one end of the edges."""
    if not isinstance(index, LazyEdges) or index.side is None or index.dim() != 1 or isinstance(a, LazyEdges):
        return None
    x = _plain(a)
    if dim not in (0, -x.dim()) or not x.is_floating_point() or x.device != index.plain.device:
        return None
    adjacency = index.edges.adjacency
    if index.side == "target" and x.size(0) >= adjacency.num_targets:
        x = x if x.size(0) == adjacency.num_targets else x[: adjacency.num_targets]
    elif index.side == "target" or x.size(0) != adjacency.num_sources:
        return None
    return rows_at_edges(adjacency, x, index.side) if x.dim() == 1 else Rows(adjacency, x, index.side)


def _collect_into(base: Any, dim: int, index: Any, source: Any) -> Any:
    """Add what edges hold to the rows of their targets, in place."""
    found = _collected(base, dim, index, source)
    if found is None:
        return None
    if not _is_zero(base):
        return _plain(base).add_(found.dense())
    base.term = found
    return found.x if index.edges.short else base.made


def _collect(base: Any, dim: int, index: Any, source: Any) -> Any:
    """Add what edges hold to the rows of their targets."""
    found = _collected(base, dim, index, source)
    if found is None:
        return None
    if not _is_zero(base):
        return _plain(base) + found.dense()
    return found.x if index.edges.short else found.dense()


def _collected(base: Any, dim: int, index: Any, source: Any) -> Padded | None:
    """The sum of what the edges of each target hold, with as many rows as are wanted."""
    if not _is_at_targets(base, dim, index, source):
        return None
    adjacency, term = index.edges.adjacency, _term(source)
    found = None if term is None else term.aggregated()
    found = sum_at_nodes(adjacency, _plain(source)) if found is None else found
    return Padded(adjacency, found, base.size(0))


def _is_zero(base: Any) -> bool:
    """Whether a tensor was made to collect something, and nothing was written to it."""
    term = _term(base)
    return isinstance(term, Padded) and not term.x.size(0)


def _reduce_into(base: Any, dim: int, index: Any, source: Any, reduce: str = "", *, include_self: bool = True) -> Any:
    """The largest value that the edges of each target hold, in place, where that needs no gradient."""
    if reduce != "amax" or include_self or not _is_at_targets(base, dim, index, source) or source.requires_grad:
        return None
    values, adjacency = _plain(base), index.edges.adjacency
    found = max_at_targets(adjacency, _plain(source))
    own = values[: found.size(0)]
    has_edges = (adjacency.ptr.diff() > 0).view(-1, *(1 for _ in found.shape[1:]))
    own.copy_(torch.where(has_edges, found, own))
    return values


def _is_at_targets(base: Any, dim: int, index: Any, source: Any) -> bool:
    """Whether the values of edges go to their targets."""
    if not isinstance(index, LazyEdges) or index.side != "target" or isinstance(source, LazyEdges):
        return False
    num_edges, num_targets = index.edges.adjacency.num_edges, index.edges.adjacency.num_targets
    return (
        isinstance(base, Tensor)
        and isinstance(source, Tensor)
        and source.is_floating_point()
        and base.dtype == source.dtype
        and dim in (0, -source.dim())
        and index.shape in (source.shape, source.shape[:1])
        and source.size(0) == num_edges
        and base.shape[1:] == source.shape[1:]
        and base.size(0) >= num_targets
    )


def _of_tensors(*names: str) -> list[Function]:
    """The functions of these names, as methods and as functions."""
    owners = [(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)]
    return [getattr(owner, name) for owner, name in owners]


_METADATA: frozenset[Function] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")),
        *(
            getattr(Tensor, name).__get__
            for name in ("is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta")
        ),
        *_of_tensors("size", "dim", "numel", "is_floating_point", "is_complex", "__len__"),
    }
)
_ELEMENTWISE = _of_tensors("neg", "abs", "exp", "square", "tanh", "sigmoid", "detach")
_ACTIVATIONS: tuple[Function, ...] = (F.elu, F.gelu, F.silu, F.softplus)
_HANDLERS: dict[Function, Function] = {
    **dict.fromkeys(_of_tensors("mul", "multiply", "__mul__", "__rmul__"), _multiply),
    **dict.fromkeys(_of_tensors("div", "divide", "true_divide", "__truediv__"), _divide),
    **dict.fromkeys(_of_tensors("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(_of_tensors("sub", "subtract", "__sub__"), _subtract),
    **dict.fromkeys(_of_tensors("rsub", "__rsub__"), _subtract_from),
    **dict.fromkeys([*_of_tensors("relu"), F.relu], _relu),
    F.leaky_relu: _leaky_relu,
    **{func: _row_by_row(func) for func in (*_ELEMENTWISE, *_ACTIVATIONS)},
    F.linear: _linear,
    **dict.fromkeys(_of_tensors("sum"), _sum),
    **dict.fromkeys([Tensor.view, *_of_tensors("reshape")], _view),
    **dict.fromkeys(_of_tensors("unsqueeze"), _unsqueeze),
    **{func: _new(func) for func in (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full)},
    **dict.fromkeys(_of_tensors("unbind"), _unbind),
    Tensor.__iter__: _iterate,
    Tensor.expand: _expand,
    Tensor.expand_as: _expand_as,
    Tensor.__getitem__: _get,
    **dict.fromkeys(_of_tensors("index_select"), _gather),
    Tensor.scatter_add_: _collect_into,
    Tensor.index_add_: _collect_into,
    **dict.fromkeys(_of_tensors("scatter_add", "index_add"), _collect),
    Tensor.scatter_reduce_: _reduce_into,
}
