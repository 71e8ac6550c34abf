"""The precision of kept rows: a floating-point type, or eight bits with a scale for each row."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gnnautoscale.errors import InputError

# Types with a scale for each row, and their largest value.
_SCALED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# A row begins with its scale and fills whole words of this many bytes, so that a GPU reads large words.
_WORD = 16
_SCALE_BYTES = 4


class Codec(ABC):
    """Turns rows of ``width`` values, kept in ``dtype``, into the raw rows that a medium keeps, and back."""

    width: int
    dtype: torch.dtype
    raw_dtype: torch.dtype
    raw_width: int

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Rows as raw rows: ``[count, width]`` to ``[count, raw_width]``."""

    @abstractmethod
    def decode(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """Raw rows as rows, ``[count, width]``; those that were never written are zero."""


class Cast(Codec):
    """Rows in a floating-point type."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width = self.raw_width = width
        self.dtype = self.raw_dtype = dtype

    def encode(self, rows: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        return rows.to(self.dtype)

    def decode(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """See :meth:`Codec.decode`."""
        return raw.to(dtype)


class Scaled(Codec):
    """Rows of eight-bit values with a scale for each row, which maps its largest value to the type's largest.

    A row with a value that is not finite comes back as NaN.

    Example:
        >>> codec = Scaled(2, torch.int8)
        >>> codec.decode(codec.encode(torch.tensor([[1.0, -127.0]])), torch.float32)
        tensor([[   1., -127.]])
    """

    raw_dtype = torch.uint8

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self.raw_width = -(-(_SCALE_BYTES + width) // _WORD) * _WORD

    def encode(self, rows: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        rows = rows.float()
        scale = rows.abs().amax(1, keepdim=True) / _SCALED[self.dtype]
        # A subnormal scale is too coarse: values would not fit. A row that is not finite becomes all NaN, since in
        # eight bits its values would look like any others.
        scale = torch.where(scale.isfinite(), scale.clamp(min=torch.finfo(torch.float32).tiny), torch.nan)
        values = rows / scale
        raw = torch.zeros(rows.size(0), self.raw_width, dtype=torch.uint8, device=rows.device)
        raw.view(torch.float32)[:, :1] = scale
        self._values(raw).copy_(values.round_() if self.dtype == torch.int8 else values)
        return raw

    def decode(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """See :meth:`Codec.decode`."""
        return self._values(raw).float().mul_(raw.view(torch.float32)[:, :1]).to(dtype)

    def _values(self, raw: Tensor) -> Tensor:
        return raw.view(self.dtype)[:, _SCALE_BYTES : _SCALE_BYTES + self.width]


def codec_for(dtype: torch.dtype, width: int) -> Codec:
    """The codec that keeps rows in a floating-point type, or in int8 or float8_e4m3fn with a scale for each row."""
    if dtype in _SCALED:
        return Scaled(width, dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        rule = "a history keeps floating-point rows, or eight bits with a scale for each row"
        fix = "Use a floating-point dtype such as torch.float32, or torch.int8 or torch.float8_e4m3fn."
        raise InputError(rule, got=f"{dtype}", fix=fix)
    return Cast(width, dtype)
