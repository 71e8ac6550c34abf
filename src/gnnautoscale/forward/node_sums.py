"""Sums and means over all nodes of a type, as HAN's attention between relations takes them.

A batch knows its own rows only. So a history keeps what is added up, and beside it there is the sum of all of its rows,
in which those of the batch replace what they were before. With fixed weights it becomes exact, as histories do, and the
gradient flows through the batch's own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MEANS = (torch.mean, Tensor.mean)
_SUMS = (torch.sum, Tensor.sum)


class NodeSums(TorchFunctionMode):
    """Hands sums and means along one dimension to a session, which knows whether nodes lie along it.

    ``total`` gets the values and the dimension; it returns their sum over all nodes and how many these are, or ``None``
    if it is another sum.
    """

    def __init__(self, total: Callable[[Tensor, int], tuple[Tensor, int] | None]) -> None:
        super().__init__()
        self._total = total

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _MEANS or func in _SUMS:
            found = self._found(func in _MEANS, *args, **named)
            if found is not None:
                return found
        return func(*args, **named)

    def _found(
        self, averages: bool, value: Any = None, dim: Any = None, keepdim: bool = False, **others: Any
    ) -> Tensor | None:
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            (dim,) = dim
        if others or not isinstance(value, Tensor) or not isinstance(dim, int) or not value.is_floating_point():
            return None
        dim %= max(value.dim(), 1)
        found = self._total(value, dim)
        if found is None:
            return None
        total, count = found
        total = (total / max(count, 1) if averages else total).to(value.dtype)
        return total.unsqueeze(dim) if keepdim else total
