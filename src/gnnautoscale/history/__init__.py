"""Where histories live.

One storage contract, one module for each medium, the precision of rows, and the choice between media. It knows rows by
their number, and nothing about graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch

from gnnautoscale._util import checked, for_later
from gnnautoscale.errors import InputError
from gnnautoscale.history.base import History
from gnnautoscale.history.device import DeviceHistory
from gnnautoscale.history.disk import DiskHistory, Folder
from gnnautoscale.history.host import HostHistory
from gnnautoscale.history.placement import Medium, Storage, choose_medium
from gnnautoscale.history.precision import Cast, Codec, codec_for
from gnnautoscale.history.sums import RowSums

__all__ = [
    "Cast",
    "Codec",
    "DiskHistory",
    "Folder",
    "History",
    "Medium",
    "RowSums",
    "Storage",
    "check_storage",
    "choose_medium",
    "codec_for",
    "open_history",
]


@checked(num_nodes={"least": 0}, width={"least": 0})
@for_later
def open_history(
    medium: Medium, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device, path: Path | None = None
) -> History:
    """Create an empty history in the given medium.

    ``"device"`` is the memory of the compute device, ``"host"`` host memory (page-locked for a GPU), and ``"disk"`` the
    file at ``path``, on Linux. For ``dtype`` see :func:`codec_for`.

    Example:
        >>> history = open_history("host", 3, 2, torch.float32, device=torch.device("cpu"))
        >>> history.push(torch.ones(1, 2), torch.tensor([2]))
        >>> history.pull(torch.tensor([2, 0]), device=torch.device("cpu"), dtype=torch.float32)
        tensor([[1., 1.],
                [0., 0.]])
    """
    if medium == "device":
        return DeviceHistory(num_nodes, width, dtype, device=device)
    if medium == "host":
        return HostHistory(num_nodes, width, dtype, device=device)
    if medium == "disk" and path is not None:
        return DiskHistory(num_nodes, width, dtype, path=path)
    rule = f"a history is opened in one of {', '.join(get_args(Medium))}, the last with a file"
    raise InputError(rule, got=f"{medium!r} and {path}", fix="Choose one of these.")


def check_storage(storage: str, folder: str | Path | None = None) -> None:
    """Refuse an unknown storage, and a disk without a folder on it."""
    if storage not in get_args(Storage):
        rule = f"storage must be one of {', '.join(get_args(Storage))}"
        raise InputError(rule, got=repr(storage), fix="Choose one of these.")
    if storage == "disk" and folder is None:
        got = "storage='disk' without history_dir"
        raise InputError("histories on disk need a folder", got=got, fix="Pass history_dir.")
