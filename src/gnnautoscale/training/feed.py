"""Training batches on the compute device, with what the loss needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.graph import BatchInfo, ReadyBatch, hand_over, tagged_copies
from gnnautoscale.tasks import Task


@dataclass(eq=False)
class Item:
    """A training batch on the compute device.

    The loss takes ``rows`` of the model's output, ``[num_rows]``, or all if ``None``, and their ``targets``,
    ``[num_targets, ...]``.
    """

    batch: Data
    rows: Tensor | None
    targets: Tensor

    @property
    def info(self) -> BatchInfo:
        """Where the batch lies in its graph."""
        info: BatchInfo = self.batch.edge_index.info
        return info


def plain_item(batch: Data, task: Task, device: torch.device) -> Item:
    """Move a batch; the task selects what to train on."""
    rows, targets = task.targets(batch)
    return Item(batch.to(str(device)), None if rows is None else rows.to(device), targets.to(device))


class Feed:
    """Gives training steps their batches; the task selects what to train on."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        # What was selected in batches that come back.
        self._selected: dict[Hashable, tuple[Tensor | None, Tensor]] = {}

    def items(
        self, batches: Iterable[ReadyBatch], then: Callable[[], ReadyBatch | None] | None = None
    ) -> Iterator[Item]:
        """The batches of an epoch on the compute device.

        ``then`` gives the first batch of the next epoch, if it is known at the end of this one.
        """
        for batch in tagged_copies(iter(batches), then):
            if batch.edge_index.info.device.type == "cuda":
                yield Item(batch, *self._select(batch))
            else:
                yield plain_item(batch, self.task, self.device)

    def clear(self) -> None:
        """Forget what was selected."""
        self._selected.clear()

    def _select(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select what to train on, beside the steps before, since the host waits for it."""
        info: BatchInfo = batch.edge_index.info
        known = self._selected.get(info.key) if info.recurring else None
        if known is not None:
            return known
        stream = _selection_stream(info.device)
        if info.ready is not None:
            stream.wait_event(info.ready)
        else:
            stream.wait_stream(torch.cuda.current_stream(info.device))
        with torch.cuda.stream(stream):
            rows, targets = self.task.targets(batch)
            selected = stream.record_event()
        hand_over([targets] if rows is None else [rows, targets], selected)
        if info.recurring:
            self._selected[info.key] = rows, targets
        return rows, targets


@cache
def _selection_stream(device: torch.device) -> torch.cuda.Stream:
    # It precedes training, since the host waits for it.
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call]
    return stream
