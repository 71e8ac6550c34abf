"""What is kept about one graph: a history for each slot, and what layers do with its edges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import for_later
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward.plan import LayerCall, Plan
from gnnautoscale.forward.record import Arguments, EdgeRecord, Recorder
from gnnautoscale.graph import BatchInfo, Graph, RowOrder
from gnnautoscale.history import (
    Folder,
    History,
    Medium,
    RowSums,
    Storage,
    check_storage,
    choose_medium,
    codec_for,
    open_history,
)
from gnnautoscale.transfer import BatchRows, Sharing, Transfer, open_transfer

# The types that gradients are kept in if histories are.
_ADDED = (torch.float32, torch.float64, torch.bfloat16)
# How many rows are copied at once.
_MOST_COPIED = 1 << 18
# The share of a GPU's free memory that temporary histories may borrow.
_BORROWED = 0.25


class GraphMemory:
    """A history for each slot of a model on one graph, and the records of its layer calls.

    Histories have the type of the embeddings unless ``dtype`` is given; ``storage="auto"`` decides where they live once
    their size is known. If ``overlap``, rows in host memory and on disk move while a step computes. In a heterogeneous
    graph the rows are those of one ``kind`` of nodes.
    """

    def __init__(
        self,
        graph: Graph | None,
        num_nodes: int,
        storage: Storage,
        dtype: torch.dtype | None,
        folder: Folder | str | Path | None = None,
        *,
        overlap: bool = True,
        kind: str = "",
    ) -> None:
        check_storage(storage, folder if not isinstance(folder, Folder) else folder.path)
        self.num_nodes, self.storage, self.dtype, self.kind = num_nodes, storage, dtype, kind
        self.folder = folder if isinstance(folder, Folder) else None
        if isinstance(folder, (str, Path)) and storage in ("disk", "auto"):
            self.folder = Folder(Path(folder))
        #: Where histories live, once that is decided, and the reason in words.
        self.medium: Medium | None = None if storage == "auto" else storage
        self.why = "set by storage"
        self.histories: dict[str, History] = {}
        #: The sums of all rows of slots, ``[width]``, as far as they are known and somebody needs them.
        self.totals: dict[str, Tensor] = {}
        #: The gradients of the rows of slots, as the last exact pass has added them up.
        self.gradients: dict[str, RowSums] = {}
        #: For each slot the gradients of its rows, each as of the last step on its node's batch.
        self.last_gradients: dict[str, History] = {}
        self.recorder = Recorder(graph) if graph is not None else None
        #: Shares rows with other processes; ``None`` if there are none.
        self.sharing: Sharing | None = None
        self._overlap = overlap
        self._sets = 1
        self._prepared = False
        self._prepared_for: tuple[Plan, torch.device] | None = None
        # The checksum of the weights that wrote all rows of all histories, or None if no single weights did.
        self._written_by: list[float] | None = None
        self._transfer: tuple[torch.device, Transfer] | None = None
        self._order: RowOrder | None = None

    # Rows and how they move ##########################################################################################

    def row_order(self, info: BatchInfo) -> RowOrder:
        """The order of the rows in all histories: that of the loader whose batch came first."""
        if self._order is None:
            self._order = info.order
        return self._order

    @for_later
    def rows_of(self, info: BatchInfo) -> BatchRows:
        """Where a batch's rows lie in all histories."""
        order = self.row_order(info)
        if order is info.order:
            found = info.rows, info.batch_size, info.own, info.key
            return info.derive(order, lambda: BatchRows(*found, info.rows_ready))
        return info.derive(order, lambda: BatchRows(order.rows(info.n_id).long(), info.batch_size, key=info.key))

    def rows_at(self, slot: str, plan: Plan, info: BatchInfo) -> BatchRows:
        """Where a batch's rows lie in the history of a slot."""
        return self.rows_of(info)

    def transfer(self, device: torch.device) -> Transfer:
        """Moves rows between steps on a device and these histories."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._transfer is None or self._transfer[0] != device:
            self.settle()
            self._close_transfer()
            late = None if self.sharing is None else self.sharing.first_late(self.kind)
            opened = open_transfer(self.medium, device, overlap=self._overlap, first_late=late)
            self._transfer = device, opened if self.sharing is None else self.sharing.around(opened, self.kind)
        return self._transfer[1]

    def begin(self, info: BatchInfo, transfer: Transfer) -> None:
        """Begin a step on a batch, and say which batch is likely to follow."""
        following = None if info.upcoming is None else self.rows_of(info.upcoming)
        transfer.begin(self.rows_of(info), following, self.histories)

    def prepare_edges(self, info: BatchInfo | None, calls: Mapping[str, LayerCall], *, gradients: bool) -> None:
        """Let a GPU prepare the recorded edges of a batch that it has assembled, and of those to come.

        ``gradients`` says whether edges are needed for a backward pass, too.
        """
        if info is not None and info.ready is not None and self.recorder is not None:
            self.recorder.prepare_from_now_on(info, calls, gradients)

    def settle(self) -> None:
        """Let what follows see all pushes of training steps; afterwards it may change histories itself."""
        if self._transfer is not None:
            self._transfer[1].settle()

    def share(self, slots: Iterable[str]) -> None:
        """Give other processes the rows of slots that they need, and receive theirs, if there are any."""
        if self.sharing is not None:
            self.settle()
            self.sharing.share({self.kind: [self.histories[slot] for slot in sorted(slots)]})

    def aside(self, info: BatchInfo) -> AbstractContextManager[None]:
        """A pass on a batch that is no step of training; if there are other processes, each makes one."""
        return nullcontext() if self.sharing is None else self.sharing.aside({self.kind: self.rows_of(info)})

    def send_gradients(self) -> None:
        """Give other processes the gradients that were kept last, as far as they need them, and receive theirs."""
        if self.sharing is not None:
            send_last_gradients(self.sharing, {self.kind: self})

    def release(self) -> None:
        """Free the threads that move rows, and let another run have the folder of histories on disk."""
        self._close_transfer()
        if self.sharing is not None:
            self.sharing.close()
        self.recorder = None  # or loaders would go on preparing edges
        if self.folder is not None:
            self.folder.close()

    def _close_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer[1].close()
            self._transfer = None

    def mark_changed(self) -> None:
        """Note that some rows change, so that no single weights wrote all of them."""
        self._written_by = None

    def mark_written_by(self, checksum: list[float]) -> None:
        """Note that the weights with this checksum wrote all rows of all histories."""
        self._written_by = checksum

    def is_written_by(self, checksum: list[float]) -> bool:
        """Whether the weights with this checksum wrote all rows of all histories."""
        return self._written_by == checksum

    # Where histories live ############################################################################################

    def reserve_another_set(self) -> None:
        """Count histories once more when their medium is chosen: for evaluation in batches, or for gradients."""
        self._sets += 1

    def prepare(self, plan: Plan, device: torch.device) -> None:
        """Decide where histories live, check that there is room for all of them, and let them fit the plan."""
        if self._prepared_for is not None and self._prepared_for[0] is plan and self._prepared_for[1] == device:
            return
        self._prepared_for = plan, device
        wanted = {slot: self._form(plan.rows[slot]) for slot in plan.live}
        if not self._prepared and self.medium not in ("device", "host"):  # there, allocating fails if there is no room
            self._make_room(wanted, device)
        for slot, (width, dtype) in wanted.items():
            history = self.histories.get(slot)
            if history is None:
                continue
            if (history.width, history.dtype) != (width, dtype) or not history.serves(device):
                self._replace(slot, width, dtype, device)

    def reopen(
        self,
        kept: Mapping[str, tuple[int, torch.dtype]],
        device: torch.device,
        order: RowOrder | None = None,
        *,
        gradients: Mapping[str, tuple[int, torch.dtype]] | None = None,
    ) -> None:
        """Create histories as they were before: with a width and type for each slot, and the order of rows if known.

        Likewise the last known ``gradients`` of slots.
        """
        self._make_room(kept, device)
        self._order = order or self._order
        for slot, (width, dtype) in kept.items():
            self._open(slot, width, dtype, device)
        self.open_last_gradients(gradients or {}, device)

    @property
    def records(self) -> dict[str, list[EdgeRecord]]:
        """The records of each layer call, as of its last use."""
        return self.recorder.records if self.recorder is not None else {}

    @property
    def records_by_kind(self) -> dict[str, dict[str, list[EdgeRecord]]]:
        """The records of layer calls along edges between nodes of one type, by type."""
        return {self.kind: self.records}

    def record(
        self, graph: Graph, call: str, layer: MessagePassing, known: LayerCall, arguments: Arguments
    ) -> list[EdgeRecord]:
        """The records of a layer call, with its arguments in a batch."""
        self.recorder = self.recorder or Recorder(graph)
        return self.recorder.of_call(call, layer, known, arguments)

    def history(self, slot: str, plan: Plan, device: torch.device) -> History:
        """The slot's history, created on first use for a compute device."""
        if slot not in self.histories:
            self._open(slot, *self._form(plan.rows[slot]), device)
        return self.histories[slot]

    def total(self, slot: str, plan: Plan, device: torch.device) -> Tensor:
        """The sum of all rows of a slot, ``[width]``, in double precision."""
        if self.sharing is not None:
            raise UnsupportedModelError(
                "models that add up rows of all nodes train in one process",
                got=f"'{slot}', whose rows several processes have",
                fix="Train in one process.",
            )
        if slot not in self.totals:
            history = self.history(slot, plan, device)
            total = torch.zeros(history.width, dtype=torch.double, device=device)
            for rows in torch.split(torch.arange(self.num_nodes, device=device), _MOST_COPIED):
                total += history.pull(rows, device=device, dtype=plan.rows[slot].dtype).double().sum(0)
            self.totals[slot] = total
        return self.totals[slot]

    def replace_in_total(self, slot: str, plan: Plan, info: BatchInfo, rows: Tensor, device: torch.device) -> Tensor:
        """Let a batch's rows, ``[batch_size, width]``, count in a slot's total; returns the sum of all others."""
        if self.medium == "disk":
            self.settle()  # these rows may be on their way
        history, place = self.history(slot, plan, device), self.rows_of(info)
        total, codec = self.total(slot, plan, device), history.codec
        before = history.pull(place.on(device)[: place.batch_size], device=device, dtype=rows.dtype)
        others = total - before.double().sum(0)
        total.copy_(others + codec.decode(codec.encode(rows.detach()), rows.dtype).double().sum(0))
        return others

    def gradient(self, slot: str, plan: Plan, device: torch.device) -> RowSums:
        """The gradients of the slot's rows, created on first use: as the history is kept, but in types that add up."""
        history = self.histories[slot]
        if slot not in self.gradients:
            dtype = self.dtype if self.dtype in _ADDED else plan.rows[slot].dtype
            self.gradients[slot] = RowSums(self._opened(f"gradient of {slot}", history.width, dtype, device))
        return self.gradients[slot]

    def open_last_gradients(
        self, forms: Mapping[str, tuple[int, torch.dtype]], device: torch.device | None = None
    ) -> None:
        """Create last known gradients that are not there yet, with a width and type for each slot.

        By default they are for steps on the device of the last one.
        """
        device = device or (torch.device("cpu") if self._transfer is None else self._transfer[0])
        for slot in sorted(forms.keys() - self.last_gradients.keys()):
            self.last_gradients[slot] = self._opened(_of_gradients(slot), *forms[slot], device)

    def last_gradient(self, slot: str, plan: Plan, device: torch.device, *, with_rows: bool) -> History:
        """The last known gradients of the slot's rows, created on first use, and anew for rows of another width.

        They may have the rows that they belong to beside them.
        """
        width, dtype = self._form(plan.rows[slot])
        width *= 1 + with_rows
        known = self.last_gradients.get(slot)
        if known is None or known.width != width or not known.serves(device):
            dtype = dtype if dtype in _ADDED else plan.rows[slot].dtype
            self.last_gradients[slot] = self._opened(_of_gradients(slot), width, dtype, device)
        return self.last_gradients[slot]

    def _form(self, rows: Tensor) -> tuple[int, torch.dtype]:
        """Width and type of the history of such rows, ``[any, ...]``."""
        return math.prod(rows.shape[1:]), self.dtype or rows.dtype

    def _make_room(self, kept: Mapping[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        self._prepared = True
        codecs = [codec_for(dtype, width) for width, dtype in kept.values()]
        needed = self._sets * sum(self.num_nodes * codec.raw_width * codec.raw_dtype.itemsize for codec in codecs)
        if self.medium is None:
            self.medium, self.why = choose_medium(needed, device, disk=self.folder is not None)
            self._close_transfer()  # which was opened before the medium was known
        if self.folder is not None and self.medium == "disk":
            self.folder.check_space(needed)
        elif self.folder is not None:
            self.folder.close()  # another run may have it

    def _open(self, slot: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.totals.pop(slot, None)
        self.gradients.pop(slot, None)
        self.last_gradients.pop(slot, None)
        self.histories[slot] = self._opened(slot, width, dtype, device)

    def _opened(self, slot: str, width: int, dtype: torch.dtype, device: torch.device) -> History:
        if self.medium is None:
            raise RuntimeError("the medium has to be chosen before a history is opened")
        path = self.folder.file(slot) if self.medium == "disk" and self.folder is not None else None
        try:
            return open_history(self.medium, self.num_nodes, width, dtype, device=device, path=path)
        except RuntimeError as error:  # PyTorch's error for lack of memory, which has a class of its own on a GPU only
            if "memory" not in str(error):
                raise
            raise InputError(
                f"{self.medium} memory must have room for all histories",
                got=f"{str(error).splitlines()[0]} for '{slot}', {self.num_nodes} rows of {width} {dtype} values",
                fix="Use storage='disk' (or 'host' if this was a GPU's memory), or a smaller history_dtype.",
            ) from error

    def _replace(self, slot: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Give a slot a history of another width, which is empty, or of another type, with the same rows."""
        self.settle()
        self.mark_changed()
        old = self.histories.pop(slot)
        there = old.raw.device
        chunks = torch.split(torch.arange(self.num_nodes), _MOST_COPIED)
        kept = [old.pull(rows, device=there, dtype=dtype).cpu() for rows in chunks] if old.width == width else []
        self._open(slot, width, dtype, device)
        for rows, values in zip(chunks, kept, strict=False):
            self.histories[slot].push(values.to(device), rows)

    # Copies ##########################################################################################################

    def apart(self, graph: Graph, device: torch.device) -> GraphMemory:
        """A memory of the same graph with histories of its own; what is known about edges is shared.

        They are temporary, so a GPU that has plenty of free memory keeps them itself, which is faster.
        """
        self.recorder = self.recorder or Recorder(graph)
        medium, size = self.medium or self.storage, sum(history.num_bytes for history in self.histories.values())
        if device.type == "cuda" and self.histories and size <= _BORROWED * torch.cuda.mem_get_info(device)[0]:
            medium = "device"
        # No steps to overlap with.
        memory = GraphMemory(None, self.num_nodes, medium, self.dtype, self.folder, overlap=False)
        memory.recorder, memory.sharing = self.recorder, self.sharing
        return memory

    def grown(self, info: BatchInfo, device: torch.device) -> GraphMemory:
        """A memory of a batch's graph, whose first nodes are those of this one: their rows are copied, others are zero.

        Rows are kept in the order of the batch's loader.
        """
        self.settle()
        self._close_transfer()
        graph, storage = None if info.typed is not None else info.graph, self.medium or self.storage
        num_nodes = max(info.order.nodes.numel(), 1)  # of some type there may be none
        memory = GraphMemory(graph, num_nodes, storage, self.dtype, self.folder, overlap=self._overlap, kind=self.kind)
        memory.why, memory._written_by = self.why, self._written_by
        if self.histories:
            memory.reopen(_forms(self.histories), device, gradients=_forms(self.last_gradients))
            row_before = self.row_order(info).row_of.long()
            row_now = memory.row_order(info).row_of[: row_before.numel()].long()
        for before, now in ((self.histories, memory.histories), (self.last_gradients, memory.last_gradients)):
            for slot, history in before.items():
                # Wide enough for every type, so that rows come back as they were.
                dtype = torch.float64 if history.dtype == torch.float64 else torch.float32
                for nodes in torch.split(row_now.argsort(), _MOST_COPIED):
                    rows = history.pull(row_before[nodes], device=device, dtype=dtype)
                    now[slot].push(rows, row_now[nodes])
        return memory


def _forms(histories: Mapping[str, History]) -> dict[str, tuple[int, torch.dtype]]:
    """Width and type of each history."""
    return {slot: (history.width, history.dtype) for slot, history in histories.items()}


def send_last_gradients(sharing: Sharing, memories: Mapping[str, GraphMemory]) -> None:
    """Give other processes the gradients that were kept last, as far as they need them, and receive theirs, by type.

    A process whose steps had no backward pass yet has none; then they are zero.
    """
    forms = sharing.all_forms({kind: _forms(memory.last_gradients) for kind, memory in memories.items()})
    for kind, memory in memories.items():
        memory.open_last_gradients(forms[kind])
    kept = {kind: memory.last_gradients for kind, memory in memories.items()}
    sharing.send({kind: [known[slot] for slot in sorted(known)] for kind, known in kept.items()})


def _of_gradients(slot: str) -> str:
    return f"last gradient of {slot}"


def check_finite(slot: str, rows: Tensor, info: BatchInfo) -> None:
    """Refuse a batch's rows, ``[batch_size, ...]``, that are not finite: they would spoil those of other batches.

    On a GPU, where a look would make every step wait, the loss is checked after each epoch instead.
    """
    if rows.is_cuda or not rows.numel():
        return
    rows = rows.detach()
    if not bool(torch.isfinite(torch.stack(torch.aminmax(rows))).all()):
        bad = (~torch.isfinite(rows.flatten(1))).any(1).nonzero().squeeze(1)
        raise FloatingPointError(
            f"layer '{slot}' gives values that are not finite for {bad.numel()} of {rows.size(0)} nodes "
            f"(node {int(info.n_id[bad[0]])} among them)"
        )
