"""Training batches on the compute device, each packed into one buffer and copied ahead.

On a GPU a batch consists of what the model reads (features, and the recorded edges in the form its layers use) and
what the loss needs. All of it lies in one buffer, so that it moves in one copy. Buffers stay on the GPU if all of
them fit; otherwise the next batch's buffer is copied while a step runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.attach import attached
from gnnautoscale.forward import BatchEdges, EdgeRecord
from gnnautoscale.graph import BatchInfo, BatchTensor, ReadyBatch, tagged_copies, without_tensors
from gnnautoscale.kernels import Adjacency
from gnnautoscale.tasks import Task
from gnnautoscale.transfer import BatchRows

Placement = Literal["auto", "device", "host"]

# Every tensor in a buffer starts at a multiple of this.
_ALIGNMENT = 256
# The share of the GPU's free memory that batches may take.
_SHARE = 0.5
# More room than needed by this factor, since the next batch may be a little larger.
_SLACK = 1.1


@dataclass(eq=False)
class Item:
    """A training batch on the compute device.

    The loss takes ``rows`` of the model's output, ``[num_rows]``, or all if ``None``, and their ``targets``,
    ``[num_targets, ...]``. ``version`` is the feed's when the batch was placed, or ``None`` if it is not packed.
    """

    batch: Data
    rows: Tensor | None
    targets: Tensor
    version: int | None = None

    @property
    def info(self) -> BatchInfo:
        """Where the batch lies in its graph."""
        info: BatchInfo = self.batch.edge_index.info
        return info


def plain_item(batch: Data, task: Task, device: torch.device) -> Item:
    """Move a batch without packing it; the task selects what to train on."""
    rows, targets = task.targets(batch)
    return Item(batch.to(str(device)), None if rows is None else rows.to(device), targets.to(device))


@dataclass(eq=False)
class _Package:
    """A batch in one buffer, on the GPU or in pinned host memory.

    ``bare`` is the batch without tensors, and ``layout`` has the type, shape and first byte of each tensor. ``item`` is
    the batch with its tensors in the buffer itself, or ``None`` if they are copied for each step.
    """

    info: BatchInfo
    bare: Data
    places: BatchRows
    layout: dict[Any, tuple[torch.dtype, torch.Size, int]]
    buffer: Tensor
    item: Item | None = None

    @staticmethod
    def of(batch: Data, places: BatchRows, tensors: Mapping[Any, Tensor], device: torch.device) -> _Package:
        """Pack tensors of a batch one behind the other, on a device."""
        layout, end = {}, 0
        for name, tensor in tensors.items():
            layout[name] = tensor.dtype, tensor.shape, end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(end, dtype=torch.uint8, device=device)
        package = _Package(batch.edge_index.info, without_tensors(batch), places, layout, buffer)
        for name, view in package.views(package.buffer).items():
            view.copy_(tensors[name])
        return package

    def views(self, buffer: Tensor) -> dict[Any, Tensor]:
        """The tensors in a buffer."""
        return {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape, start) in self.layout.items()
        }

    def displace(self) -> None:
        """Forget the batch's tensors, whose buffer is used again."""
        self.info.displace()
        self.places.displace()


class Feed:
    """Gives training steps of an autoscaled model their batches.

    The task selects what to train on. Packed batches live where ``placement`` says; with ``"auto"`` on the device if
    all of an epoch's ``num_batches`` fit. ``fixed`` batches come back every epoch.
    """

    def __init__(
        self, model: nn.Module, task: Task, *, placement: Placement = "auto", fixed: bool = False, num_batches: int = 1
    ) -> None:
        self.task = task
        self.device = device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        self.fixed = fixed
        self._scaler = attached(model)
        self._placement = placement
        self._num_batches = num_batches
        self._packages: dict[BatchInfo, _Package] = {}
        self._forgotten = False
        #: Whether batches stay on the GPU; ``None`` before the first one is packed.
        self.resident: bool | None = None
        #: Changes when batches that are copied for each step move to another address.
        self.version = 0
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._back = self._front = torch.empty(0, dtype=torch.uint8, device=device)

    def items(
        self, batches: Iterable[ReadyBatch], then: Callable[[], ReadyBatch | None] | None = None
    ) -> Iterator[Item]:
        """The batches of an epoch on the compute device; each is valid until the next is asked for.

        ``then`` gives the first batch of the next epoch, if it is known at the end of this one.
        """
        batches = iter(batches)
        # On a GPU the first is not packed: what the model does with edges is known only once it has run.
        unpacked = None if self.device.type != "cuda" else int(not self._scaler.memory.records or self._forgotten)
        self._forgotten = False
        yield from (plain_item(batch, self.task, self.device) for batch in tagged_copies(islice(batches, unpacked)))
        following = self._next(batches)
        while following is not None:
            package, item = following, self._arrive(following)
            following = self._next(batches)
            upcoming = following if following is not None or then is None else then()
            try:
                with package.info.followed_by(None if upcoming is None else upcoming.info):
                    yield item
            finally:
                if not self.resident:
                    package.displace()

    def clear(self) -> None:
        """Free the packed batches."""
        for package in self._packages.values():
            package.displace()
        self._packages.clear()

    def forget(self) -> None:
        """Free the packed batches, because the model may use its edges in another way now."""
        self.clear()
        self._forgotten = True

    def _next(self, batches: Iterator[ReadyBatch]) -> _Package | None:
        """Pack the next batch and start to copy it, while a GPU goes on with earlier steps."""
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self._copies):
            package = self._packages.get(batch.info) or self._package(batch.tagged_copy())
        if package.item is None:
            self._make_room(package.buffer.numel())
            self._copies.wait_stream(self._main)  # the batch before this one has left the room
            with torch.cuda.stream(self._copies):
                self._back[: package.buffer.numel()].copy_(package.buffer, non_blocking=True)
        return package

    def _arrive(self, package: _Package) -> Item:
        if package.item is not None:
            return package.item
        size = package.buffer.numel()
        self._main.wait_stream(self._copies)
        # Always to the same address, where captured steps read it.
        self._front[:size].copy_(self._back[:size])
        return self._item(package, package.views(self._front))

    def _make_room(self, size: int) -> None:
        if size > self._back.numel():
            torch.cuda.synchronize(self.device)
            rooms = (torch.empty(int(_SLACK * size), dtype=torch.uint8, device=self.device) for _ in range(2))
            self._back, new_front = rooms
            new_front[: self._front.numel()].copy_(self._front)
            self._front = new_front
            self._back.record_stream(self._copies)
            self.version += 1

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    # Packing #########################################################################################################

    def _package(self, batch: Data) -> _Package:
        info: BatchInfo = batch.edge_index.info
        places = self._scaler.memory.rows_of(info)
        package = _Package.of(batch, places, self._tensors(batch, info), self.device)
        if self.resident is None:
            self.resident = self.fixed and self._should_stay(package.buffer.numel() * self._num_batches)
        if self.resident:
            package.item = self._item(package, package.views(package.buffer))
        else:
            host = torch.empty_like(package.buffer, device="cpu", pin_memory=True)
            host.copy_(package.buffer, non_blocking=True)
            package.buffer = host
        self._copies.synchronize()
        if self.fixed:
            self._packages[info] = package
            for event in self._events:
                info.forget(event)  # the package has its own copy
        return package

    def _should_stay(self, num_bytes: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        return self._placement == "device" or (self._placement == "auto" and num_bytes <= _SHARE * free)

    def _tensors(self, batch: Data, info: BatchInfo) -> dict[Any, Tensor]:
        """Everything that a training step reads, by name."""
        rows, targets = self.task.targets(batch)
        places = self._scaler.memory.rows_of(info).index
        tensors: dict[Any, Tensor] = {"n_id": info.n_id, "places": places, "targets": targets}
        if rows is not None:
            tensors["rows"] = rows
        for name in self._scaler.attributes(batch):
            value = batch[name]
            if isinstance(value, BatchTensor):
                value = value.emptied().plain if self._scaler.ignores_edges and value.is_own_edges else value.plain
            if isinstance(value, Tensor) and name != "n_id":
                tensors["batch", name] = value
        for event, (weights, plain) in self._events.items():
            part = event.for_batch(info, "a layer").to(self.device)
            if plain:
                tensors[event, "edge_index"] = part.edges
                tensors.update({(event, "constant", name): value for name, value in part.constants.items()})
            for weight in weights:
                adjacency = part.adjacency(weight, event.edges.target_row, info)
                named = adjacency.tensors(edge_values=plain and weight is None)
                tensors.update({(event, "fused", weight, name): value for name, value in named.items()})
        return tensors

    def _item(self, package: _Package, views: dict[Any, Tensor]) -> Item:
        """The batch made of the tensors in a buffer; its rows and recorded edges are placed for sessions."""
        info, batch = package.info, copy.copy(package.bare)
        for name, value in {**views, ("batch", "n_id"): views["n_id"]}.items():
            if name[0] == "batch":
                tagged = name[1] in ("edge_index", "n_id", *info.graph.edge_attributes)
                batch[name[1]] = BatchTensor.tag(value, info, name[1]) if tagged else value
        package.places.place(views["places"])
        for event, (weights, plain) in self._events.items():
            edge_index, constants = None, {}
            if plain:
                edge_index = views[event, "edge_index"]
                constants = {name: views[event, "constant", name] for name in event.constants}
            adjacencies = {}
            for weight in weights:
                tensors = {name[3]: value for name, value in views.items() if name[:3] == (event, "fused", weight)}
                adjacencies[weight] = Adjacency.of(tensors, info.num_rows)
            info.place(event, BatchEdges(edge_index, constants, adjacencies))
        return Item(batch, views.get("rows"), views["targets"], self.version)

    @property
    def _events(self) -> dict[EdgeRecord, tuple[frozenset[str | None], bool]]:
        """For each event the weights that layers fuse it with, and whether some layer needs its plain edges.

        Lazy edges need both.
        """
        found: dict[EdgeRecord, tuple[frozenset[str | None], bool]] = {}
        for name, events in self._scaler.memory.records.items():
            call = self._scaler.calls[name]
            for position, event in enumerate(events):
                weights, plain = found.get(event, (frozenset[str | None](), False))
                # Dropout draws from plain edges.
                if call.fuses(position, event.constants) and not self._scaler.edge_dropout:
                    found[event] = weights | {call.weight(position)}, plain
                else:
                    lazy: frozenset[str | None] = frozenset({None} if "lazy" in call.shortcuts else ())
                    found[event] = weights | lazy, True
        return found
