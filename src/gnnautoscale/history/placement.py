"""Chooses the medium that histories fit into."""

from __future__ import annotations

from typing import Literal

import torch

from gnnautoscale._util import available_memory
from gnnautoscale.errors import InputError

Medium = Literal["device", "host", "disk"]
Storage = Literal["device", "host", "disk", "auto"]

# The share of free memory that histories may take; the rest is for the model, its batches and everything else.
_SHARE = 0.5


def choose_medium(num_bytes: int, device: torch.device, *, disk: bool) -> tuple[Medium, str]:
    """The fastest medium that has room for all histories, and the reason in words.

    ``disk`` says whether there is a folder for histories on disk.
    """
    needed = f"histories take {_amount(num_bytes)}"
    reasons = []
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if num_bytes <= _SHARE * free:
            return "device", f"{needed}, and {_amount(free)} of the GPU's memory are free"
        reasons.append(f"more than half of the GPU's free {_amount(free)}")
    medium: Medium = "host" if device.type == "cuda" else "device"
    available = available_memory()
    if available is None:
        return medium, ", ".join([needed, *reasons, "and this system does not say how much host memory is free"])
    if num_bytes <= _SHARE * available:
        return medium, ", ".join([needed, *reasons, f"and {_amount(available)} of host memory are free"])
    reasons.append(f"more than half of the free {_amount(available)} of host memory")
    if not disk:
        rule = "histories must fit into memory if there is no folder for them on disk"
        fix = "Pass history_dir, keep histories in a smaller type, or choose the storage yourself."
        raise InputError(rule, got=f"{_amount(num_bytes)}, {' and '.join(reasons)}", fix=fix)
    return "disk", ", ".join([needed, " and ".join(reasons)])


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
