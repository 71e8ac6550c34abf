"""Batches at fixed addresses on a GPU, where captured steps read them.

A package has everything that a step reads of a batch: attributes, the recorded edges in the form that layers use, and
where its rows lie in histories. All of it lies in one buffer. Packages stay on the GPU if all of them fit; otherwise
each batch is written over the one before it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.attach import Autoscaler, info_of
from gnnautoscale.forward import BatchEdges, EdgeRecord, TypedMemory
from gnnautoscale.graph import (
    BatchInfo,
    BatchTensor,
    ReadyBatch,
    TypedBatch,
    TypedInfo,
    UnreadRows,
    hand_over,
    untagged,
    without_tensors,
)
from gnnautoscale.kernels import Adjacency

Placement = Literal["auto", "device", "host"]

# Every tensor in a buffer starts at a multiple of this.
_ALIGNMENT = 256
# The share of the GPU's free memory that packages may take.
_SHARE = 0.5
# More room than needed by this factor, since the next batch may be a little larger.
_SLACK = 1.1


@dataclass(eq=False)
class Place:
    """Where the tensors of a batch lie in a buffer.

    Attributes:
        views: All tensors in the buffer.
    """

    views: dict[Any, Tensor]


@dataclass(eq=False)
class Package(Place):
    """A batch whose tensors lie in one buffer.

    Attributes:
        info: Where the batch lies in its graph.
        batch: The batch, with tensors in the buffer.
        extras: Further tensors by name, in the buffer too.
    """

    info: BatchInfo
    batch: Data
    extras: dict[str, Tensor]

    def holds(self, info: BatchInfo) -> bool:
        """Whether it is the package of this very batch, not of one that was assembled before it."""
        return self.info is info


class Contents:
    """What a package of a batch of an autoscaled model consists of."""

    def __init__(self, scaler: Autoscaler, device: torch.device) -> None:
        self._scaler, self._device = scaler, device

    def displace(self, info: BatchInfo) -> None:
        """Let steps on a batch read its own tensors again, because its package's may change."""
        info.displace()
        self._scaler.memory.rows_of(info).displace()

    def tensors(
        self, batch: Data, info: BatchInfo, extras: dict[str, Tensor], attributes: Iterable[str] | None
    ) -> dict[Any, Tensor]:
        """Everything that a step reads, by name."""
        scaler = self._scaler
        tensors: dict[Any, Tensor] = {"rows": scaler.memory.rows_of(info).on(self._device)}
        tensors |= {("extra", name): value for name, value in extras.items()}
        for name in batch.keys() if attributes is None else {"n_id": None, **dict.fromkeys(attributes)}:
            value = batch[name]
            if isinstance(value, BatchTensor):
                if attributes is not None and scaler.ignores_edges and value.is_own_edges:
                    continue
                value = value.plain
            if isinstance(value, Tensor) and not isinstance(value, UnreadRows):
                tensors["batch", name] = value
        return tensors | self._edges(info, scaler.memory.records)

    def _edges(self, info: BatchInfo, records: Mapping[str, list[EdgeRecord]]) -> dict[Any, Tensor]:
        """The recorded edges of layer calls, in the form that each needs."""
        tensors: dict[Any, Tensor] = {}
        for record, (weights, plain) in self._uses(records).items():
            edges = record.for_batch(info, "a layer").to(self._device)
            if info.edges_ready is not None:
                hand_over(edges.tensors(), info.edges_ready)
            if plain:
                tensors[record, "edge_index"] = edges.edges
                tensors |= {(record, "constant", name): value for name, value in edges.constants.items()}
            for weight in weights:
                named = edges.adjacency(weight).tensors(edge_values=plain and weight is None)
                tensors |= {(record, "fused", weight, name): value for name, value in named.items()}
        return tensors

    def package(self, batch: Data, info: BatchInfo, views: dict[Any, Tensor]) -> Package:
        """The batch made of tensors in a buffer."""
        packed = copy.copy(without_tensors(batch))
        extras: dict[str, Tensor] = {}
        for name, value in views.items():
            if name[0] == "batch":
                tagged = name[1] in ("edge_index", "n_id", *info.graph.edge_attributes)
                packed[name[1]] = BatchTensor.tag(value, info, name[1]) if tagged else value
            elif name[0] == "extra":
                extras[name[1]] = value
        for name in ("edge_index", *info.graph.edge_attributes):
            if name not in packed and name in batch:  # nobody uses it
                packed[name] = BatchTensor.tag(batch[name].emptied().plain, info, name)
        return Package(views, info, packed, extras)

    def place(self, package: Package) -> None:
        """Let steps on the package's batch read its tensors."""
        info, memory = package.info, self._scaler.memory
        memory.rows_of(info).place(package.views["rows"])
        self._place_edges(info, memory.records, package.views)

    def _place_edges(self, info: BatchInfo, records: Mapping[str, list[EdgeRecord]], views: dict[Any, Tensor]) -> None:
        for record, (weights, plain) in self._uses(records).items():
            edge_index, constants = None, {}
            if plain:
                edge_index = views[record, "edge_index"]
                constants = {name: views[record, "constant", name] for name in record.constants}
            adjacencies = {}
            for weight in weights:
                named = {name[3]: value for name, value in views.items() if name[:3] == (record, "fused", weight)}
                adjacencies[weight] = Adjacency.of(named, record.form(info).num_sources)
            edges = BatchEdges(constants, record.form(info), edge_index=edge_index, adjacencies=adjacencies)
            info.place(record, edges)

    def prepared_edges(self, info: Any) -> Iterator[Tensor]:
        """The tensors of a batch's recorded edges that there are so far."""
        for record in self._uses(self._scaler.memory.records):
            yield from record.for_batch(info, "a layer").tensors()

    def shrink(self, package: Package) -> None:
        """Let go of what a batch has in memory besides its package."""
        package.info.shrink(package.views["rows"])

    def ready(self, batch: Data, package: Package | None = None) -> ReadyBatch:
        """A batch, or its package, for the loader to yield whenever it comes back."""
        if package is None:
            return ReadyBatch(batch, info_of(batch))
        lacks = {name for name, value in batch if isinstance(value, Tensor) and ("batch", name) not in package.views}
        return ReadyBatch(package.batch, package.info, lacks)

    def _uses(self, of_calls: Mapping[str, list[EdgeRecord]]) -> dict[EdgeRecord, tuple[frozenset[str | None], bool]]:
        """For each record the weights that layers fuse it with, and whether some layer needs its plain edges.

        Lazy edges need both.
        """
        found: dict[EdgeRecord, tuple[frozenset[str | None], bool]] = {}
        scaler = self._scaler
        for name, records in of_calls.items():
            call = scaler.calls[name]
            for position, made in enumerate(records):
                record = made.used_by(call)
                weights, plain = found.get(record, (frozenset[str | None](), False))
                # Dropout draws from plain edges.
                if call.fuses(position, record.constants) and not (scaler.edge_dropout or record.plain):
                    found[record] = weights | {call.weight(position)}, plain
                else:
                    lazy: frozenset[str | None] = frozenset({None} if "lazy" in call.shortcuts else ())
                    found[record] = weights | lazy, True
        return found


class TypedContents(Contents):
    """What a package of a batch of several types consists of; it has all attributes."""

    def displace(self, info: TypedInfo) -> None:  # type: ignore[override]
        """See :meth:`Contents.displace`."""
        for kind, of in info.nodes.items():
            self._scaler.memory.kinds[kind].rows_of(of).displace()
        for of in info.edges.values():
            of.displace()

    def tensors(
        self, batch: HeteroData, info: Any, extras: dict[str, Tensor], attributes: Iterable[str] | None
    ) -> dict[Any, Tensor]:
        """See :meth:`Contents.tensors`."""
        memory = self._scaler.memory
        tensors: dict[Any, Tensor] = {
            ("rows", kind): memory.kinds[kind].rows_of(of).on(self._device) for kind, of in info.nodes.items()
        }
        tensors |= {("extra", name): value for name, value in extras.items()}
        for kind, store in (*batch.node_items(), *batch.edge_items()):
            for name, value in store.items():
                if isinstance(value, Tensor):
                    tensors["batch", kind, name] = untagged(value)
        for kind, records in memory.recorder.records.items():
            tensors |= self._edges(info.edges[kind], records)
        return tensors

    def package(self, batch: HeteroData, info: Any, views: dict[Any, Tensor]) -> Package:
        """See :meth:`Contents.package`."""
        packed, extras = copy.copy(batch), dict[str, Tensor]()
        for name, value in views.items():
            if name[0] == "extra":
                extras[name[1]] = value
            elif name[0] == "batch":
                _, kind, attribute = name
                of = info.nodes[kind] if isinstance(kind, str) else info.edges[kind]
                tagged = isinstance(batch[kind][attribute], BatchTensor)
                packed[kind][attribute] = BatchTensor.tag(value, of, attribute) if tagged else value
        return Package(views, info, packed, extras)

    def place(self, package: Package) -> None:
        """See :meth:`Contents.place`."""
        info, memory = cast(Any, package.info), self._scaler.memory
        for kind, of in info.nodes.items():
            memory.kinds[kind].rows_of(of).place(package.views["rows", kind])
        for kind, records in memory.recorder.records.items():
            self._place_edges(info.edges[kind], records, package.views)

    def prepared_edges(self, info: Any) -> Iterator[Tensor]:
        """See :meth:`Contents.prepared_edges`."""
        for kind, records in self._scaler.memory.recorder.records.items():
            for record in self._uses(records):
                yield from record.for_batch(info.edges[kind], "a layer").tensors()

    def shrink(self, package: Package) -> None:
        """See :meth:`Contents.shrink`."""
        cast(Any, package.info).shrink({kind: package.views["rows", kind] for kind in self._scaler.memory.kinds})

    def ready(self, batch: HeteroData, package: Package | None = None) -> ReadyBatch:
        """See :meth:`Contents.ready`."""
        return TypedBatch(batch if package is None else package.batch, info_of(batch))


class Packer:
    """Packs batches of an autoscaled model.

    Packages live where ``placement`` says; ``"host"`` means that only one at a time is on the GPU, and ``"auto"`` lets
    all of them stay there if they fit.
    """

    def __init__(self, scaler: Autoscaler, device: torch.device, placement: Placement) -> None:
        contents = TypedContents if isinstance(scaler.memory, TypedMemory) else Contents
        self._contents, self._device, self._placement = contents(scaler, device), device, placement
        # Where only one batch at a time is on the GPU, all that is left of the others is their place.
        self._packages: dict[Hashable, Place] = {}
        self._kept: dict[Hashable, BatchInfo] = {}
        #: Whether packages stay on the GPU; ``None`` before the first one.
        self.resident: bool | None = None
        #: Changes when packages move to another address.
        self.version = 0
        self._front = torch.empty(0, dtype=torch.uint8, device=device)

    def clear(self) -> None:
        """Free all packages; the loader assembles their batches again."""
        for package in self._packages.values():
            if isinstance(package, Package):
                self._contents.displace(package.info)
                if package.info.keeper is not None:
                    package.info.keeper(None)
        for info in self._kept.values():
            if info.keeper is not None:
                info.keeper(None)
        self._packages.clear()
        self._kept.clear()

    def keep(self, batch: Data) -> None:
        """Let the loader yield a batch as it is whenever it comes back, if all such batches may stay on the GPU."""
        info = info_of(batch)
        if info.keeper is None or info.key in self._kept:
            return
        if self.resident is None:
            values = (value for store in batch.stores for value in store.values())
            tensors = [*self._contents.prepared_edges(info), *(value for value in values if isinstance(value, Tensor))]
            self.resident = self._should_stay(info.recurring * sum(tensor.nbytes for tensor in tensors))
        if self.resident:
            info.wait()
            self._kept[info.key] = info
            info.keeper(self._contents.ready(batch))

    def prepare(self, batch: Data) -> None:
        """Find all that steps on a batch read, some of which the host has to wait for, such as rows of many edges."""
        self._contents.tensors(batch, info_of(batch), {}, ())

    def release(self, package: Package) -> Place:
        """Let go of a batch that others are written over; returns where captured steps on it will look for it."""
        self._contents.displace(package.info)
        place = self._packages[package.info.key] = Place(package.views)
        return place

    def pack(self, batch: Data, extras: dict[str, Tensor], attributes: Iterable[str] | None) -> Package:
        """The package of a batch that comes back, with these values; steps on this batch read the package's tensors.

        Of the batch's attributes it has those that are named, by default all.
        """
        info = info_of(batch)
        known = self.fill(batch, extras, attributes)
        if not isinstance(known, Package) or not known.holds(info):
            # The batch was assembled anew since: the same places, but another object that sessions know.
            known = self._packages[info.key] = self._contents.package(batch, info, known.views)
        self._contents.place(known)
        return known

    def fill(self, batch: Data, extras: dict[str, Tensor], attributes: Iterable[str] | None) -> Place:
        """Write a batch that comes back to its place, where captured steps read it."""
        info = info_of(batch)
        known = self._packages.get(info.key)
        if self.resident and isinstance(known, Package) and known.holds(info):
            return known
        return self._filled(known, batch, info, extras, attributes)

    def _filled(
        self,
        known: Place | None,
        batch: Data,
        info: BatchInfo,
        extras: dict[str, Tensor],
        attributes: Iterable[str] | None,
    ) -> Place:
        tensors = self._contents.tensors(batch, info, extras, attributes)
        views = self._views(tensors, info) if known is None else known.views
        torch._foreach_copy_([views[name] for name in tensors], list(tensors.values()), non_blocking=True)
        if known is None:
            known = self._packages[info.key] = self._contents.package(batch, info, views)
        if self.resident and isinstance(known, Package) and info.keeper is not None:
            # From now on the loader yields the package itself.
            self._contents.shrink(known)
            info.keeper(self._contents.ready(batch, known))
        return known

    def _views(self, tensors: dict[Any, Tensor], info: BatchInfo) -> dict[Any, Tensor]:
        """Room for tensors in one buffer."""
        layout, size = layout_of(tensors)
        if self.resident is None:
            self.resident = self._should_stay(size * info.recurring)
        buffer = self._buffer(size)
        return {name: view_in(buffer, *place) for name, place in layout.items()}

    def _buffer(self, size: int) -> Tensor:
        if self.resident:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        if size > self._front.numel():
            torch.cuda.synchronize(self._device)
            self._front = torch.empty(int(_SLACK * size), dtype=torch.uint8, device=self._device)
            self._packages.clear()
            self.version += 1
        return self._front

    def _should_stay(self, num_bytes: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._placement == "device" or (self._placement == "auto" and num_bytes <= _SHARE * free)


def layout_of(tensors: dict[Any, Tensor]) -> tuple[dict[Any, tuple[torch.dtype, torch.Size, int]], int]:
    """The type, shape and first byte of each tensor in a buffer that has them one behind the other, and its size."""
    layout, end = {}, 0
    for name, tensor in tensors.items():
        layout[name] = tensor.dtype, tensor.shape, end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, end


def view_in(buffer: Tensor, dtype: torch.dtype, shape: torch.Size, start: int) -> Tensor:
    """The tensor of this type, shape and first byte in a buffer, ``[num_bytes]``, uint8."""
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
