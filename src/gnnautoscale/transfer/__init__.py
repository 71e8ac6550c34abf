"""How rows move between a step and its histories.

Directly, on CUDA streams beside the step, or in a thread that works the disk. It knows rows by their positions, and
neither graphs nor models.
"""

import torch

from gnnautoscale.kernels import use_triton
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.direct import Direct
from gnnautoscale.transfer.streams import Ahead
from gnnautoscale.transfer.thread import Threaded
from gnnautoscale.transfer.times import Times, times_for

__all__ = ["Direct", "Threaded", "Times", "Transfer", "times_for", "transfer_for"]


def transfer_for(device: torch.device, *, host: bool) -> Transfer:
    """The fastest way to move rows between a device and histories in host memory or on the device itself."""
    return Ahead(device) if host and use_triton(torch.empty(0, device=device)) else Direct(device)
