"""Rows of a layer that are exchanged once it is known what is added to them.

In a heterogeneous model several layers compute rows of one type of nodes, which the model then combines: it adds them
up, or takes their maximum. A history of each layer's rows would do, but one of the combined rows is enough. So a layer
returns *pending* rows. What combines pending rows of one type gives pending rows again; whatever else is done with them
exchanges them first. A model that adds rows up stacks them before, which takes as much memory as all of them once more:
here a stack is only noted, and its sum adds one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnautoscale._util import map_tensors, tensors_in

#: Exchanges rows of a type of nodes, which some layer calls have computed.
Exchange = Callable[[str, tuple[str, ...], Tensor], Tensor]

# What combines rows of the same nodes, value by value or side by side.
_COMBINING = {
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__,
    torch.sub, Tensor.sub, Tensor.__sub__,
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
    torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide,
    torch.maximum, Tensor.maximum, torch.minimum, Tensor.minimum,
}  # fmt: skip
# The same, written into the first operand.
_IN_PLACE = {
    Tensor.add_: torch.add, Tensor.__iadd__: torch.add, Tensor.mul_: torch.mul, Tensor.__imul__: torch.mul,
    Tensor.div_: torch.div, Tensor.__itruediv__: torch.div,
}  # fmt: skip
# What combines rows that are stacked.
_REDUCING = {
    torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.max, Tensor.max, torch.min, Tensor.min, torch.amax,
    Tensor.amax, torch.amin, Tensor.amin, torch.prod, Tensor.prod, torch.median, Tensor.median, torch.std, Tensor.std,
}  # fmt: skip
_ADDING = (torch.sum, Tensor.sum)
_AVERAGING = (torch.mean, Tensor.mean)
# Questions that do not look at values.
_NEUTRAL = {
    Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.numel,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "is_cuda", "is_sparse", "layout", "ndim", "requires_grad", "shape", "grad_fn")
    ),
}  # fmt: skip


class PendingRows(Tensor):
    """Rows of a type of nodes, ``[num_rows, ...]``, of which those of the halo are not there yet."""

    _exchange: Exchange
    kind: str
    #: The layer calls that they were computed in.
    calls: tuple[str, ...]
    # Pending rows that these are a stack of, ``[count, num_rows, ...]``, of which only the shape is there.
    _stacked: tuple[PendingRows, ...]
    # What they have become: exchanged rows, or others that something was added to.
    _became: Tensor | None

    @staticmethod
    def of(
        rows: Tensor, exchange: Exchange, kind: str, calls: tuple[str, ...], stacked: tuple[PendingRows, ...] = ()
    ) -> PendingRows:
        """Rows that are exchanged before they are used."""
        pending = rows.as_subclass(PendingRows)
        pending._exchange, pending.kind, pending.calls, pending._stacked = exchange, kind, calls, stacked
        pending._became = None
        return pending

    @property
    def plain(self) -> Tensor:
        """The rows as they were computed."""
        return torch.stack([rows.plain for rows in self._stacked]) if self._stacked else self.as_subclass(Tensor)

    def exchanged(self) -> Tensor:
        """The rows after their exchange, which happens once."""
        if isinstance(self._became, PendingRows):
            return self._became.exchanged()
        if self._became is None:
            if self._stacked:
                self._became = torch.stack([rows.exchanged() for rows in self._stacked])
            else:
                self._became = self._exchange(self.kind, self.calls, self.plain)
        return self._became

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NEUTRAL:
                return func(*args, **named)
            combined = _combined(func, args, named)
            if combined is not None:
                return combined
        return func(*map_tensors(exchanged, args), **map_tensors(exchanged, named))


def exchanged(value: Tensor) -> Tensor:
    """A tensor that is not pending."""
    return value.exchanged() if isinstance(value, PendingRows) else value


def _combined(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What pending rows are combined to, if that is all that a function does; else ``None``."""
    given = tensors_in((args, kwargs))
    pending = [value for value in given if isinstance(value, PendingRows) and value._became is None]
    if len(pending) < len(given) or len({rows.kind for rows in pending}) > 1:
        return None
    first = pending[0]
    if func in _REDUCING and first._stacked:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim != 0 or kwargs.get("keepdim"):
            return None
        calls = first.calls
        if func in (*_ADDING, *_AVERAGING) and len(args) + len(kwargs) == 2:
            total = _sum([rows.plain for rows in first._stacked])
            return _like(first, total / len(first._stacked) if func in _AVERAGING else total, calls)
        out = func(first.plain, *args[1:], **kwargs)
        # Of maximum and position, the former.
        return (_like(first, out[0], calls), *out[1:]) if isinstance(out, tuple) else _like(first, out, calls)
    if any(rows._stacked for rows in pending):
        return None
    calls = tuple(dict.fromkeys(call for rows in pending for call in rows.calls))
    plain_args, plain_kwargs = map_tensors(_plain, (args, kwargs))
    if func in _COMBINING or func in (torch.max, torch.min, Tensor.max, Tensor.min):
        if func not in _COMBINING and len(pending) != 2:
            return None
        return _like(first, func(*plain_args, **plain_kwargs), calls)
    if func in _IN_PLACE and isinstance(args[0], PendingRows):
        combine: Callable[..., Tensor] = _IN_PLACE[func]  # type: ignore[assignment]
        args[0]._became = made = _like(first, combine(*plain_args, **plain_kwargs), calls)
        return made
    if func in (torch.stack, torch.cat, torch.concat):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        dims = first.plain.dim() + (func is torch.stack)
        side_by_side = dim % dims != 0
        if not side_by_side and func is not torch.stack:
            return None
        if side_by_side:
            return _like(first, func(*plain_args, **plain_kwargs), calls)
        if len({(rows.shape, rows.dtype) for rows in pending}) > 1:
            return None
        like = next((rows.plain for rows in pending if rows.requires_grad), first.plain)
        return _like(first, like.expand(len(pending), *like.shape), calls, tuple(pending))
    return None


def _like(
    rows: PendingRows, made: Tensor, calls: tuple[str, ...], stacked: tuple[PendingRows, ...] = ()
) -> PendingRows:
    return PendingRows.of(made, rows._exchange, rows.kind, calls, stacked)


def _sum(rows: list[Tensor]) -> Tensor:
    """The sum of rows, which takes no more memory than one of them."""
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0]
    for each in rows[2:]:
        total = total.add_(each)
    return total


def _plain(value: Tensor) -> Tensor:
    return value.plain if isinstance(value, PendingRows) else value
