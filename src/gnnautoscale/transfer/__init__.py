"""Moves rows between a training step and its histories.

Directly, on CUDA streams beside the step, or in a thread that works the disk. It knows rows by their positions in a
history, and neither graphs nor models.
"""

import torch

from gnnautoscale._util import for_later
from gnnautoscale.history import Medium
from gnnautoscale.kernels import use_triton
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.direct import DirectTransfer
from gnnautoscale.transfer.rows import BatchRows
from gnnautoscale.transfer.sharing import Sharing
from gnnautoscale.transfer.streams import StreamTransfer
from gnnautoscale.transfer.thread import ThreadTransfer
from gnnautoscale.transfer.times import Times, times_for

__all__ = ["BatchRows", "DirectTransfer", "Sharing", "Times", "Transfer", "open_transfer", "times_for"]


@for_later
def open_transfer(
    medium: Medium | None, device: torch.device, *, overlap: bool = True, first_late: int | None = None
) -> Transfer:
    """The fastest transfer between a device and histories, whose medium is ``None`` if that is not decided yet.

    ``overlap`` lets rows move while a step computes, but for those from ``first_late`` on, which other processes write
    between steps.
    """
    if overlap and medium == "disk":
        return ThreadTransfer(device, first_late)
    if overlap and medium == "host" and use_triton(torch.empty(0, device=device)):
        return StreamTransfer(device, first_late)
    return DirectTransfer()
