"""Devices by name, and what the current one does."""

from __future__ import annotations

import torch

from gnnautoscale._util.options import shown
from gnnautoscale.errors import InputError


def is_capturing() -> bool:
    """Whether a GPU notes the work that it is given now, for a CUDA graph, instead of doing it."""
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
