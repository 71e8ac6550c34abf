"""Devices by name, and what the current one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from gnnautoscale._util.options import shown
from gnnautoscale.errors import InputError

_as_if_captured = ContextVar("_as_if_captured", default=False)


@contextmanager
def as_if_captured() -> Iterator[None]:
    """Within, :func:`is_capturing` is true: work is done, and leaves the same things to the host as when captured."""
    token = _as_if_captured.set(True)
    try:
        yield
    finally:
        _as_if_captured.reset(token)


def is_capturing() -> bool:
    """Whether a GPU notes the work that it is given now, for a CUDA graph, instead of doing it."""
    if _as_if_captured.get():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def usable_device(device: torch.device | str) -> torch.device:
    """The device of a name; refused if nothing can be computed there."""
    try:
        made = torch.device(device)
        torch.zeros(1, device=made).tolist()
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        rule = "device must be one that PyTorch can use here"
        raise InputError(rule, got=f"{shown(device)} ({reason})", fix="Use 'cpu'.") from None
    return made
