"""Training batches on the compute device, with what the loss needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.attach import info_of
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
        info: BatchInfo = info_of(self.batch)
        return info


def as_it_is(batch: Data) -> Data:
    """A batch of a plain graph itself is what a task looks for targets in."""
    return batch


def plain_item(batch: Data, task: Task, device: torch.device, nodes: Callable[[Any], Data] = as_it_is) -> Item:
    """Move a batch; the task selects what to train on among its ``nodes``."""
    rows, targets = task.targets(nodes(batch))
    return Item(batch.to(str(device)), None if rows is None else rows.to(device), targets.to(device))


class Feed:
    """Gives training steps their batches; the task selects what to train on, among the ``nodes`` of a batch."""

    def __init__(self, task: Task, device: torch.device, nodes: Callable[[Any], Data] = as_it_is) -> None:
        self.task, self.device, self.nodes = task, device, nodes
        # What was selected in batches that come back.
        self._selected: dict[Hashable, tuple[Tensor | None, Tensor]] = {}

    def items(
        self, batches: Iterable[ReadyBatch], then: Callable[[], ReadyBatch | None] | None = None
    ) -> Iterator[Item]:
        """The batches of an epoch on the compute device.

        ``then`` gives the first batch of the next epoch, if it is known at the end of this one.
        """
        for batch in tagged_copies(iter(batches), then):
            if info_of(batch).device.type == "cuda":
                yield Item(batch, *self._select(batch))
            else:
                yield plain_item(batch, self.task, self.device, self.nodes)

    def clear(self) -> None:
        """Forget what was selected."""
        self._selected.clear()

    def _select(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select what to train on, beside the steps before, since the host waits for it."""
        info: BatchInfo = info_of(batch)
        known = self._selected.get(info.key) if info.recurring else None
        if known is not None:
            return known
        stream = _selection_stream(info.device)
        if info.ready is not None:
            stream.wait_event(info.ready)
        else:
            stream.wait_stream(torch.cuda.current_stream(info.device))
        with torch.cuda.stream(stream):
            rows, targets = self.task.targets(self.nodes(batch))
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
