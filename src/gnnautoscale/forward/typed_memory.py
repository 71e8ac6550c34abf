"""What is kept about a heterogeneous graph: histories by type of nodes, and records of layer calls by type of edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.forward.memory import GraphMemory, send_last_gradients
from gnnautoscale.forward.plan import LayerCall, TypedPlan
from gnnautoscale.forward.record import Arguments, EdgePreparer, EdgeRecord, OwnEdges, Recorder, prepare_edges
from gnnautoscale.graph import BatchInfo, EdgeType, TypedGraph, TypedInfo
from gnnautoscale.history import Folder, History, RowSums, Storage
from gnnautoscale.transfer import BatchRows, Sharing, Times, Transfer


class TypedRecorder(EdgePreparer):
    """Records the layer calls of a model over edges of one type; see :class:`Recorder`."""

    def __init__(self, graph: TypedGraph) -> None:
        super().__init__()
        self._recorders = {kind: Recorder(relation) for kind, relation in graph.relations.items() if kind[0] == kind[2]}
        self._as_they_are: dict[EdgeType, EdgeRecord] = {}
        self._with_attributes: dict[EdgeType, EdgeRecord] = {}
        #: The records of each call by type of edges, as of its last use.
        self.records: dict[EdgeType, dict[str, list[EdgeRecord]]] = {}

    def of_call(
        self, info: BatchInfo, kind: EdgeType, call: str, layer: MessagePassing, known: LayerCall, arguments: Arguments
    ) -> list[EdgeRecord]:
        """The records of a layer call on edges of a type; between nodes of different types these are as they are."""
        if kind not in self._recorders:
            record = self._as_they_are.setdefault(kind, OwnEdges(info.table, {}))
            found = [record] * len(known.edge_names)
        else:
            found = self._recorders[kind].of_call(call, layer, known, arguments)
        self.records.setdefault(kind, {})[call] = found
        return found

    def of_all_rows(self, info: BatchInfo, kind: EdgeType, call: str) -> EdgeRecord:
        """The edges of a type and their attributes into batch and halo, for a layer call that gets these instead."""
        if kind not in self._with_attributes:
            edge = info.table.edge.long()
            values = {name: value[edge] for name, value in info.graph.edge_attributes.items()}
            self._with_attributes[kind] = EdgeRecord(info.table, values, plain=True)
        record = self._with_attributes[kind]
        self.records.setdefault(kind, {})[call] = [record]
        return record.closed

    def _prepare(self, info: Any, calls: Mapping[str, LayerCall], gradients: bool) -> None:
        for kind, records in self.records.items():
            prepare_edges(records, info.edges[kind], calls, gradients)


class TypedTransfer:
    """The transfers of all types of nodes, for a caller that begins and completes steps; see :class:`Transfer`."""

    def __init__(self, transfers: Mapping[str, Transfer]) -> None:
        #: By type.
        self.kinds = transfers

    @property
    def skips_shared(self) -> bool:
        """Whether the step that has begun found the rows that it shares with the step before on the device."""
        return all(transfer.skips_shared for transfer in self.kinds.values())

    @property
    def version(self) -> int:
        """Changes when rows move to another address on the device."""
        return sum(transfer.version for transfer in self.kinds.values())

    def look_ahead(self) -> None:
        """See :meth:`Transfer.look_ahead`."""
        for transfer in self.kinds.values():
            transfer.look_ahead()

    def join(self) -> None:
        """See :meth:`Transfer.join`."""
        for transfer in self.kinds.values():
            transfer.join()

    def complete(self) -> None:
        """See :meth:`Transfer.complete`."""
        for transfer in self.kinds.values():
            transfer.complete()

    def measure(self, times: Times) -> None:
        """See :meth:`Transfer.measure`."""
        for transfer in self.kinds.values():
            transfer.measure(times)


class TypedMemory:
    """The histories of each type of nodes, and the records of layer calls by type of edges; see :class:`GraphMemory`.

    Attributes:
        kinds: The histories of each type of nodes.
        recorder: Records layer calls.
    """

    def __init__(
        self,
        graph: TypedGraph,
        storage: Storage,
        dtype: torch.dtype | None,
        folder: Folder | str | Path | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self.storage, self.dtype, self.num_nodes, self._counts = storage, dtype, graph.num_nodes, graph.counts
        if isinstance(folder, (str, Path)) and storage in ("disk", "auto"):
            folder = Folder(Path(folder))
        self.kinds = {
            kind: GraphMemory(None, max(count, 1), storage, dtype, folder, overlap=overlap, kind=kind)
            for kind, count in graph.counts.items()
        }
        self.recorder = TypedRecorder(graph)
        self._overlap = overlap

    # Rows and how they move ##########################################################################################

    def transfer(self, device: torch.device) -> TypedTransfer:
        """See :meth:`GraphMemory.transfer`."""
        return TypedTransfer({kind: memory.transfer(device) for kind, memory in self.kinds.items()})

    def begin(self, info: TypedInfo, transfer: TypedTransfer) -> None:
        """See :meth:`GraphMemory.begin`."""
        for kind, memory in self.kinds.items():
            memory.begin(info.nodes[kind], transfer.kinds[kind])

    def rows_at(self, slot: str, plan: TypedPlan, info: TypedInfo) -> BatchRows:
        """See :meth:`GraphMemory.rows_at`."""
        kind = plan.kinds[slot]
        return self.kinds[kind].rows_of(info.nodes[kind])

    def prepare_edges(self, info: TypedInfo | None, calls: Mapping[str, LayerCall], *, gradients: bool) -> None:
        """See :meth:`GraphMemory.prepare_edges`."""
        if info is not None and info.ready is not None:
            self.recorder.prepare_from_now_on(info, calls, gradients)

    @property
    def sharing(self) -> Sharing | None:
        """See :class:`GraphMemory`; that of all types."""
        return next(iter(self.kinds.values())).sharing

    @sharing.setter
    def sharing(self, sharing: Sharing | None) -> None:
        for memory in self.kinds.values():
            memory.sharing = sharing

    def share(self, slots: Iterable[str]) -> None:
        """See :meth:`GraphMemory.share`; the rows of all types are exchanged together."""
        if self.sharing is not None:
            self.settle()
            slots = sorted(slots)
            kinds = ((kind, memory.histories) for kind, memory in self.kinds.items())
            self.sharing.share({kind: [known[slot] for slot in slots if slot in known] for kind, known in kinds})

    def aside(self, info: TypedInfo) -> AbstractContextManager[None]:
        """See :meth:`GraphMemory.aside`."""
        if self.sharing is None:
            return nullcontext()
        return self.sharing.aside({kind: memory.rows_of(info.nodes[kind]) for kind, memory in self.kinds.items()})

    def send_gradients(self) -> None:
        """See :meth:`GraphMemory.send_gradients`; those of all types travel together."""
        if self.sharing is not None:
            send_last_gradients(self.sharing, self.kinds)

    def settle(self) -> None:
        """See :meth:`GraphMemory.settle`."""
        for memory in self.kinds.values():
            memory.settle()

    def release(self) -> None:
        """See :meth:`GraphMemory.release`."""
        self.recorder.records.clear()  # or loaders would go on preparing edges
        for memory in self.kinds.values():
            memory.release()

    def mark_changed(self) -> None:
        """See :meth:`GraphMemory.mark_changed`."""
        for memory in self.kinds.values():
            memory.mark_changed()

    def mark_written_by(self, checksum: list[float]) -> None:
        """See :meth:`GraphMemory.mark_written_by`."""
        for memory in self.kinds.values():
            memory.mark_written_by(checksum)

    def is_written_by(self, checksum: list[float]) -> bool:
        """See :meth:`GraphMemory.is_written_by`."""
        return all(memory.is_written_by(checksum) for memory in self.kinds.values() if memory.histories)

    # Where histories live ############################################################################################

    @property
    def histories(self) -> dict[str, History]:
        """All histories, by slot."""
        return {slot: history for memory in self.kinds.values() for slot, history in memory.histories.items()}

    @property
    def totals(self) -> dict[str, torch.Tensor]:
        """See :class:`GraphMemory`, of all types."""
        return {slot: total for memory in self.kinds.values() for slot, total in memory.totals.items()}

    @property
    def last_gradients(self) -> dict[str, History]:
        """See :class:`GraphMemory`, of all types."""
        return {slot: known for memory in self.kinds.values() for slot, known in memory.last_gradients.items()}

    @property
    def gradients(self) -> dict[str, RowSums]:
        """See :class:`GraphMemory`, of all types."""
        return {slot: sums for memory in self.kinds.values() for slot, sums in memory.gradients.items()}

    @property
    def medium(self) -> Any:
        """Where histories live, once that is decided."""
        return next(iter(self.kinds.values())).medium

    @property
    def why(self) -> str:
        """Why they live there, in words."""
        return next(iter(self.kinds.values())).why

    @property
    def folder(self) -> Folder | None:
        """The folder of histories on disk."""
        return next(iter(self.kinds.values())).folder

    @property
    def records_by_kind(self) -> dict[str, dict[str, list[EdgeRecord]]]:
        """See :attr:`GraphMemory.records_by_kind`; edges between nodes of different types are as they are."""
        found: dict[str, dict[str, list[EdgeRecord]]] = {}
        for (source, _, target), records in self.recorder.records.items():
            if source == target:
                found.setdefault(target, {}).update(records)
        return found

    def gradient(self, slot: str, plan: TypedPlan, device: torch.device) -> RowSums:
        """See :meth:`GraphMemory.gradient`."""
        return self.kinds[plan.kinds[slot]].gradient(slot, plan, device)

    def reserve_another_set(self) -> None:
        """See :meth:`GraphMemory.reserve_another_set`."""
        for memory in self.kinds.values():
            memory.reserve_another_set()

    def grown(self, info: TypedInfo, device: torch.device) -> TypedMemory:
        """See :meth:`GraphMemory.grown`."""
        made = TypedMemory(info.graph, self.medium or self.storage, self.dtype, self.folder, overlap=self._overlap)
        made.kinds = {kind: memory.grown(info.nodes[kind], device) for kind, memory in self.kinds.items()}
        return made

    def apart(self, graph: TypedGraph, device: torch.device) -> TypedMemory:
        """See :meth:`GraphMemory.apart`."""
        made = TypedMemory(graph, self.medium or self.storage, self.dtype, self.folder, overlap=False)
        if graph.counts == self._counts:
            made.recorder, made.sharing = self.recorder, self.sharing
        return made
