"""Where histories live: one storage contract, one file per medium, and the choice between them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from gnnautoscale.errors import InputError
from gnnautoscale.history.base import History, Runs
from gnnautoscale.history.device import DeviceHistory
from gnnautoscale.history.host import HostHistory
from gnnautoscale.history.precision import Cast, Codec

__all__ = ["Cast", "Codec", "History", "Runs", "Storage", "check_storage", "open_history"]

Storage = Literal["device", "host"]


@torch.inference_mode(False)  # training goes on with what inference may have opened
def open_history(storage: Storage, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device) -> History:
    """Create an empty history in the given medium.

    Args:
        storage: ``"device"`` for the memory of the compute device, ``"host"`` for host memory (page-locked when
            the compute device is a GPU).
        num_nodes: Number of rows.
        width: Number of values in a row.
        dtype: The type that rows are kept in: a floating-point type, or int8 or float8_e4m3fn with a scale per row.
        device: The compute device.

    Example:
        >>> history = open_history("host", 3, 2, torch.float32, device=torch.device("cpu"))
        >>> history.push(torch.ones(1, 2), torch.tensor([2]))
        >>> history.pull(torch.tensor([2, 0]), device=torch.device("cpu"), dtype=torch.float32)
        tensor([[1., 1.],
                [0., 0.]])
    """
    check_storage(storage)
    if storage == "device":
        return DeviceHistory(num_nodes, width, dtype, device=device)
    return HostHistory(num_nodes, width, dtype, pinned=device.type == "cuda")


def check_storage(storage: str) -> None:
    """Refuse the name of a medium that there is not."""
    if storage not in get_args(Storage):
        raise InputError(
            f"storage must be one of {', '.join(get_args(Storage))}", got=repr(storage), fix="Choose one of these."
        )
