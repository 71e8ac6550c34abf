"""Makes batches of groups of parts, in host memory or on a GPU, and keeps those that come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.graph.assemble import Assembly, BatchBuilder, build_each
from gnnautoscale.graph.batch import BatchInfo, assembly_stream
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.graph import Graph
from gnnautoscale.graph.ready import ReadyBatch, in_pinned_memory, in_turn
from gnnautoscale.graph.typed_batch import TypedBatch, TypedBuilder, TypedInfo
from gnnautoscale.graph.typed_graph import TypedGraph
from gnnautoscale.kernels import Halo

_HOST = torch.device("cpu")
# How many batches a GPU searches for their halo ahead of the one that gets its rows.
_AHEAD = 1


class BatchSource:
    """Makes the batches of a graph as it is at one time; after a change another source takes over.

    So an epoch that is under way goes on with the tensors that it began with.

    Args:
        builder: Builds a batch, a ``BatchBuilder`` or a ``TypedBuilder``.
        recurring: How many different batches come back.
        worker_seeds: Seeds the processes that build batches in host memory.
    """

    def __init__(self, builder: Any, recurring: int, worker_seeds: torch.Generator) -> None:
        self.builder, self._recurring, self._worker_seeds = builder, recurring, worker_seeds
        self._kept: dict[PartGroup, ReadyBatch] = {}
        # The halos of batches that come back, for a GPU.
        self._halos: dict[PartGroup, Tensor] = {}
        self._identity = object()

    def of(self, graph: Graph | TypedGraph) -> BatchSource:
        """The source of the same batches after the graph has changed."""
        return BatchSource(self.builder.of(graph), self._recurring, self._worker_seeds)

    def kept(self, group: PartGroup) -> ReadyBatch | None:
        """The batch of some parts, if it is kept."""
        return self._kept.get(group)

    def around(self, nodes: Any) -> ReadyBatch:
        """The batch of some nodes, ``[batch_size]``, or of those of each type, in host memory."""
        return self._checked(*self.builder.start(self.builder.rows_of(nodes), _HOST).finish())

    def batches(
        self,
        groups: list[PartGroup],
        device: torch.device,
        *,
        keep: bool,
        num_workers: int = 0,
        only: Collection[str] | None = None,
        kept_with: Collection[str] | None = None,
        unread: bool = False,
    ) -> Iterator[ReadyBatch]:
        """The batches of groups of parts on a device, one after the other; those that come back are to be kept.

        In host memory ``num_workers`` processes build them. On a GPU they can have ``only`` some of the attributes, and
        rows of nodes that are ``unread`` until they are used; a kept batch must have those of ``kept_with``, by default
        all.
        """
        if device.type == "cuda":
            return in_turn(self._assembled(groups, device, keep, only, kept_with, unread), device)
        if isinstance(self.builder, TypedBuilder):
            return self._typed(groups, keep)
        return self._built(groups, keep, num_workers)

    def _typed(self, groups: list[PartGroup], keep: bool) -> Iterator[ReadyBatch]:
        """Batches of several types in host memory."""
        builder, kept = self.builder, self._kept
        for group in groups:
            ready = kept.get(group)
            if ready is None or not ready.is_on(_HOST) or not ready.intact():
                assembly = builder.start(builder.own_rows(group), _HOST, (self._identity, group) if keep else None)
                ready = self._checked(*assembly.finish())
            if keep:
                kept[group] = ready
            yield ready

    def _built(self, groups: list[PartGroup], keep: bool, num_workers: int) -> Iterator[ReadyBatch]:
        """Batches in host memory."""
        builder, kept = self.builder, self._kept
        # Decide now which batches to build: another iteration may add to those kept in the meantime.
        ready = {group: kept[group] for group in groups if group in kept and kept[group].is_on(_HOST)}
        missing = [group for group in groups if group not in ready]
        built = build_each(partial(_build, builder), missing, num_workers, self._worker_seeds)
        for group in groups:
            if group in ready and ready[group].intact():
                batch = ready[group]
            else:
                data, rows, source = next(built) if group not in ready else _build(builder, group)
                info = builder.info(builder.own_rows(group), Halo.of(rows, source))
                batch = self._checked(data, info)
            if keep:
                kept[group] = batch
            yield batch

    def _assembled(
        self,
        groups: list[PartGroup],
        device: torch.device,
        keep: bool,
        only: Collection[str] | None,
        kept_with: Collection[str] | None,
        unread: bool,
    ) -> Iterator[ReadyBatch]:
        """Batches on a GPU: one is being searched for its halo while the one before it gets its rows."""
        builder, kept, halos = self.builder, self._kept, self._halos
        stream = assembly_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # attributes may be on the GPU, and just computed
        searching: deque[tuple[PartGroup, ReadyBatch | Assembly]] = deque()

        def start(group: PartGroup) -> ReadyBatch | Assembly:
            ready = kept.get(group)
            if ready is not None and ready.is_on(device) and ready.has(kept_with) and ready.intact():
                return ready
            own, key = builder.own_rows(group), (self._identity, group) if keep else None
            known = group in halos
            found: Assembly = (
                builder.start_again(own, halos[group], device, key) if known else builder.start(own, device, key)
            )
            return found

        def finish() -> ReadyBatch:
            group, found = searching.popleft()
            if isinstance(found, ReadyBatch):
                return found
            batch, info = found.finish(only, unread=unread)
            if keep and group not in halos:
                halos[group] = in_pinned_memory(info.found.rows, builder.graph.num_nodes)
            info.ready = stream.record_event()
            if keep:
                info.keeper, info.recurring = partial(_keep, kept, group), self._recurring
            for preparer, how in info.table.preparations.items():
                preparer.prepare(info, *how)
            return self._checked(batch, info)

        waiting = iter(groups)
        while True:
            with torch.cuda.stream(stream):
                searching.extend((group, start(group)) for group in islice(waiting, _AHEAD + 1 - len(searching)))
                if not searching:
                    return
                ready = finish()
            yield ready

    def _checked(self, batch: Any, info: BatchInfo | TypedInfo) -> ReadyBatch:
        self.builder.graph.check_unwritten(labels=True)
        return TypedBatch(batch, info) if isinstance(info, TypedInfo) else ReadyBatch(batch, info)


def _keep(kept: dict[PartGroup, ReadyBatch], group: PartGroup, batch: ReadyBatch | None) -> None:
    if batch is None:
        kept.pop(group, None)
    else:
        kept[group] = batch


def _build(builder: BatchBuilder, parts: PartGroup) -> tuple[Data, Tensor, Tensor]:
    """A batch in host memory, and its halo: what a worker sends, since it must not send the graph."""
    batch, info = builder.start(builder.own_rows(parts), _HOST).finish()
    return batch, info.found.rows, info.found.source
