"""Rows of a batch that a GPU reads over the bus only if something is computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnautoscale._util import map_tensors

#: Reads the rows of an index, ``[count]``, into a tensor, or into a new one for ``None``, and returns them.
ReadRows = Callable[[Tensor, Tensor | None], Tensor]

# Questions that need no rows.
_NEUTRAL = {
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_floating_point,
    Tensor.is_inference,
    Tensor.numel,
    Tensor.size,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("_version", "device", "dtype", "is_cuda", "is_sparse", "layout", "ndim", "requires_grad", "shape")
    ),
}


class UnreadRows(Tensor):
    """A node-level tensor of a batch, ``[num_rows, ...]``, whose rows are read on first use.

    A sweep over one level of a model computes one layer of it, and few of them need the features.
    """

    read_rows: ReadRows
    nodes: Tensor
    _rows: Tensor | None

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, nodes: Tensor, read_rows: ReadRows) -> UnreadRows:
        """The rows of nodes, ``[num_rows]``, on their device; together they have a shape and a type."""
        # Code that gets past __torch_function__, such as an extension in C++, must not take this for rows.
        nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        made = torch.full((), nothing, dtype=dtype, device=nodes.device).expand(shape).as_subclass(UnreadRows)
        made.nodes, made.read_rows, made._rows = nodes, read_rows, None
        return made

    @property
    def was_read(self) -> bool:
        """Whether something was computed from the rows."""
        return self._rows is not None

    @property
    def rows(self) -> Tensor:
        """The rows, as a plain tensor."""
        if self._rows is None:
            self._rows = self.read_rows(self.nodes, None)
        return self._rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NEUTRAL:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = map_tensors(_read, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _read(value: Tensor) -> Tensor:
    return value.rows if isinstance(value, UnreadRows) else value
