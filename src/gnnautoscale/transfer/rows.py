"""Where a batch's rows lie in histories."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import torch
from torch import Tensor

from gnnautoscale._util import copy_staged
from gnnautoscale.kernels import OwnRows, Runs, locate_own


class BatchRows:
    """The rows of a batch and its halo, which are the same in every history of a graph.

    Args:
        index: The batch's own rows, then the halo's, ``[num_rows]``, int64, in host memory or on the compute device.
        batch_size: Number of the batch's own rows.
        own: The batch's own rows, if they are known as contiguous pieces.
        key: What tells the batch from others, and is the same whenever it comes back; ``None`` if it does not.
        ready: When a GPU has found the index; ``None`` if it is there.

    Example:
        >>> rows = BatchRows(torch.tensor([4, 5, 1, 7]), batch_size=3)
        >>> rows.num_halo, rows.runs
        (1, [(4, 0, 2), (1, 2, 1)])
    """

    def __init__(
        self,
        index: Tensor,
        batch_size: int,
        own: OwnRows | None = None,
        key: Hashable | None = None,
        ready: torch.cuda.Event | None = None,
    ) -> None:
        self.index, self.batch_size, self.key, self.ready = index, batch_size, key, ready
        self._given = own
        self._placed: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of batch and halo together."""
        return self.index.numel()

    @property
    def num_halo(self) -> int:
        """Number of the halo's rows."""
        return self.num_rows - self.batch_size

    @cached_property
    def own(self) -> OwnRows:
        """The batch's own rows."""
        return OwnRows.of(self.on_host[: self.batch_size]) if self._given is None else self._given

    @property
    def runs(self) -> Runs:
        """The batch's own rows as contiguous pieces: first row in a history, first row in the batch, length."""
        return self.own.runs

    @cached_property
    def on_host(self) -> Tensor:
        """The index in host memory; if a GPU has it, the host waits."""
        if self.ready is not None:
            self.ready.synchronize()  # this thread's stream knows nothing of the one that finds it
        return self.index.cpu()

    def on(self, device: torch.device) -> Tensor:
        """The index on a device: where it was placed, or a copy that waits for no work of that device."""
        if self._placed is not None and self._placed.device == device:
            return self._placed
        if self.index.device == device:
            return self.index
        return copy_staged(self.on_host, device)

    def place(self, index: Tensor) -> None:
        """Use this copy of the index, ``[num_rows]``, on its device until :meth:`displace`."""
        self._placed = index

    def displace(self) -> None:
        """Forget the placed copy, whose memory may change from now on."""
        self._placed = None

    def locate(self, index: Tensor, where: Tensor) -> None:
        """Find rows of a history, ``[count]``, among the batch's own.

        ``where`` receives the position of each in the batch, or -1, ``[count]``, int32, on the same device.
        """
        locate_own(index, self.own, where)
