"""Batches that are ready to be used, and how a loader hands them out."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.graph.assemble import write_counts
from gnnautoscale.graph.batch import BatchInfo, BatchTensor, hand_over
from gnnautoscale.graph.edges import index_dtype
from gnnautoscale.graph.unread import UnreadRows

# How many batches a GPU may have to work on before the host waits.
_MOST_IN_USE = 1


class ReadyBatch:
    """A built batch, which the loader may yield many times; it may lack some attributes of the graph."""

    def __init__(self, batch: Data, info: BatchInfo, lacks: Collection[str] = ()) -> None:
        self._batch, self._lacks = batch, frozenset(lacks)
        self.info = info
        self._write_counts = write_counts(batch)

    def has(self, names: Collection[str] | None) -> bool:
        """Whether it has these attributes, ``None`` for all of the graph's."""
        return not self._lacks if names is None else self._lacks.isdisjoint(names)

    def is_on(self, device: torch.device) -> bool:
        """Whether its tensors are on a device."""
        return self.info.device.type == device.type

    def _arrive(self) -> None:
        """Let the current stream of a GPU use what another one has assembled."""
        info = self.info
        if info.ready is not None:
            tensors = [info.found.rows, info.rows, *(info.found.by_source or ())]
            tensors += [info.found.source] if "source" in vars(info.found) else []
            values = (value for _, value in self._batch if not isinstance(value, UnreadRows))
            tensors += [value for value in values if isinstance(value, Tensor) and value.is_cuda]
            hand_over(tensors, info.ready)

    def intact(self) -> bool:
        """Whether its tensors are unchanged."""
        return self._write_counts == write_counts(self._batch)

    def tagged_copy(self) -> Data:
        """A copy for the user to move and change; it shares the tensors, and edges and nodes carry a tag."""
        self._arrive()
        batch = copy.copy(self._batch)
        for name in ("edge_index", "n_id", *(name for name in self.info.graph.edge_attributes if name in batch)):
            batch[name] = BatchTensor.tag(batch[name], self.info, name)
        return batch


def tagged_copies(batches: Iterator[ReadyBatch], then: Callable[[], ReadyBatch | None] | None = None) -> Iterator[Data]:
    """Tagged copies of the batches; while the user has one, its info names the next.

    ``then`` gives the batch that follows the last one, if it is known at that time.
    """
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        upcoming = following if following is not None or then is None else then()
        with batch.info.followed_by(None if upcoming is None else upcoming.info):
            yield batch.tagged_copy()
        batch = following


def in_turn(batches: Iterator[ReadyBatch], device: torch.device) -> Iterator[ReadyBatch]:
    """Batches for a GPU that the host does not get far ahead of, or there would be memory for all on their way."""
    used: deque[torch.cuda.Event] = deque()
    for batch in batches:
        yield batch
        if batch.info.ready is None:  # it is kept anyway
            continue
        used.append(torch.cuda.current_stream(device.index).record_event())
        if len(used) > _MOST_IN_USE:
            used.popleft().synchronize()


def in_pinned_memory(rows: Tensor, num_rows: int) -> Tensor:
    """A copy of rows below a number, which a GPU makes and can read again."""
    there = torch.empty(rows.shape, dtype=index_dtype(num_rows), pin_memory=True)
    return there.copy_(rows, non_blocking=True)
