"""Where a model has its histories, and what is remembered about a graph.

A *slot* is a place in the model that has a history: the output of a layer, or of each propagation inside a layer
that propagates several times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gnnautoscale.batch import BatchInfo, RowOrder
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph
from gnnautoscale.history import (
    Folder,
    History,
    Medium,
    Storage,
    check_storage,
    choose_medium,
    codec_for,
    open_history,
)
from gnnautoscale.record import ArgumentKind, Event, Recorder
from gnnautoscale.threaded import Threaded
from gnnautoscale.transfer import Transfer, transfer_for

# Ways to do less work in a layer, from the most daring to the plainest:
# "pair":  it is called with (all rows, the batch's rows), PyG's convention for messages between two sets of nodes,
#          so that what follows its aggregation is computed for the batch only;
# "short": it aggregates into the batch's rows only;
# "fused": it aggregates in one go, without a row for every edge.
Shortcut = Literal["pair", "short", "fused"]
SHORTCUTS: tuple[Shortcut, ...] = get_args(Shortcut)

# How many rows are copied at once.
_MOST_COPIED = 1 << 18


@dataclass
class LayerCall:
    """What is known about one call of a layer in the model's forward pass.

    Attributes:
        kinds: What each tensor among the arguments is, in order.
        own: Which attribute of the batch each of these tensors is, or ``None``.
        edge_names: For each call of ``propagate`` or ``edge_updater``, the arguments that have one row per edge.
        num_propagations: How many of these calls are ``propagate``.
        possible_shortcuts: The shortcuts that could apply, before they are tried.
        shortcuts: What may be left out without changing the batch's rows; see :data:`Shortcut`.
        inward: The events, by position, whose rows depend on no weight since the slots they come from.
        nested: Whether the layer holds other message-passing layers.
        draws: Whether the layer draws random numbers in training; ``None`` as long as nobody looked.
    """

    kinds: list[ArgumentKind]
    own: list[str | None]
    edge_names: list[frozenset[str]] = field(default_factory=list)
    num_propagations: int = 0
    possible_shortcuts: frozenset[Shortcut] = frozenset()
    shortcuts: frozenset[Shortcut] = frozenset()
    inward: set[int] = field(default_factory=set)
    nested: bool = False
    draws: bool | None = None

    @property
    def has_edge_updater(self) -> bool:
        """Whether the layer computes edge-level values through ``edge_updater``."""
        return len(self.edge_names) > self.num_propagations

    def fuses(self, position: int, constants: Mapping[str, Tensor]) -> bool:
        """Whether a propagation aggregates in one go: all it needs besides rows is recorded, as one weight at most."""
        names = self.edge_names[position]
        recorded = all(name in constants and constants[name].dim() == 1 for name in names)
        return "fused" in self.shortcuts and len(names) <= 1 and recorded

    def weight(self, position: int) -> str | None:
        """The argument that weighs the edges of a fused propagation."""
        return next(iter(self.edge_names[position]), None)


@dataclass
class Plan:
    """How a model is run with histories; found out once, by ``gnnautoscale.plan``.

    Attributes:
        calls: The model's layer calls in the order they are made.
        inner: The calls that need a history at each of their propagations instead of at their output.
        explicit: Whether the model names its own slots, as the paper's interface does.
        needs: For each slot, and for ``OUTPUT``, the slots whose rows it is computed from.
        rows: For each slot a tensor of no rows that has the shape and type of its rows.
        skip_empty: Whether rows that nothing needs may be left out when histories are swept.
        node_norms: The batch norms that see one row per node.
        short_tail: Whether what follows the last layer runs on the batch's rows only.
        bare: Whether the model never looks at edges itself, so that only what was recorded is needed.
    """

    calls: dict[str, LayerCall] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    explicit: bool = False
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    skip_empty: bool = False
    node_norms: set[nn.Module] = field(default_factory=set)
    short_tail: bool = False
    bare: bool = False

    OUTPUT = "the model's output"

    @cached_property
    def live(self) -> frozenset[str]:
        """The slots that another slot is computed from; only these have a history."""
        # A layer whose output is a slot reads only what other slots need. Where the model names its own slots, layers
        # after the last one read histories too.
        readers = (slot for slot in self.needs if slot != self.OUTPUT or self.explicit)
        return frozenset().union(*(self.needs[slot] for slot in readers))

    @cached_property
    def levels(self) -> list[frozenset[str]]:
        """The live slots, grouped so that each group is computed from the groups before it."""
        depth: dict[str, int] = {}
        for slot, needed in self.needs.items():
            depth[slot] = max((depth[other] + 1 for other in needed), default=0)
        live = self.live
        groups = (frozenset(slot for slot in live if depth[slot] == level) for level in range(len(live)))
        return [group for group in groups if group]


class Memory:
    """What is remembered about one graph: a history for each slot, and what layers do with its edges.

    Args:
        graph: The graph, or ``None`` if only its size is known so far.
        num_nodes: Number of nodes.
        storage: Where histories live; ``"auto"`` decides once it is known how large they are.
        dtype: The type histories are kept in, or ``None`` for the type of the embeddings.
        folder: Where histories on disk are.

    Attributes:
        medium: Where histories live, once that is decided.
        why: Why they do, in words.
    """

    def __init__(
        self,
        graph: Graph | None,
        num_nodes: int,
        storage: Storage,
        dtype: torch.dtype | None,
        folder: Folder | str | Path | None = None,
    ) -> None:
        check_storage(storage, folder if not isinstance(folder, Folder) else folder.path)
        self.num_nodes = num_nodes
        self.storage = storage
        self.dtype = dtype
        self.folder = folder if isinstance(folder, Folder) else None
        if isinstance(folder, (str, Path)) and storage in ("disk", "auto"):
            self.folder = Folder(Path(folder))
        self.medium: Medium | None = None if storage == "auto" else storage
        self.why = "this was asked for"
        # How many sets of histories there are at a time: exact evaluation in batches takes a second one.
        self.sets = 1
        self._prepared = False
        self.histories: dict[str, History] = {}
        self.recorder = Recorder(graph) if graph is not None else None
        self.events: dict[str, list[Event]] = {}
        # Checksums of the weights that wrote all rows of all histories, or None if no single weights did.
        self.written_by: list[float] | None = None
        # Whether rows in host memory move while a step computes.
        self.overlap = True
        self._transfer: tuple[torch.device, Transfer] | None = None
        self._order: RowOrder | None = None

    def transfer(self, device: torch.device) -> Transfer:
        """How training steps on a device reach these histories."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._transfer is None or self._transfer[0] != device:
            self.settle()
            threaded = self.medium == "disk" and self.overlap
            host = self.medium == "host" and self.overlap
            self._transfer = device, Threaded(device) if threaded else transfer_for(device, host=host)
        return self._transfer[1]

    def prepare(self, plan: Plan, device: torch.device) -> None:
        """Decide where histories live, and check that there is room for all of them."""
        if self._prepared or self.medium in ("device", "host"):
            return  # where no room is, PyTorch says so
        rows = {slot: plan.rows[slot] for slot in plan.live}
        self._make_room(
            {slot: (math.prod(like.shape[1:]), self.dtype or like.dtype) for slot, like in rows.items()}, device
        )

    def reopen(
        self, kept: Mapping[str, tuple[int, torch.dtype]], device: torch.device, order: RowOrder | None = None
    ) -> None:
        """Create histories as they were before: of what width and type each slot's is, and the order of the rows."""
        self._make_room(kept, device)
        self._order = order or self._order
        for slot, (width, dtype) in kept.items():
            self._open(slot, width, dtype, device)

    def _make_room(self, kept: Mapping[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        self._prepared = True
        codecs = [codec_for(dtype, width) for width, dtype in kept.values()]
        needed = self.sets * sum(self.num_nodes * codec.raw_width * codec.raw_dtype.itemsize for codec in codecs)
        if self.medium is None:
            self.medium, self.why = choose_medium(needed, device, disk=self.folder is not None)
            self._transfer = None  # there was none that mattered
        if self.folder is not None and self.medium == "disk":
            self.folder.check_space(needed)
        elif self.folder is not None:
            self.folder.close()  # another run may have it

    def row_order(self, info: BatchInfo) -> RowOrder:
        """The order of the rows in all histories: that of the loader whose batch came first."""
        if self._order is None:
            self._order = info.order
        return self._order

    def settle(self) -> None:
        """Let what follows see all pushes of training steps; afterwards it may change histories itself."""
        if self._transfer is not None:
            self._transfer[1].settle()

    def release(self) -> None:
        """Let another run have the folder of histories on disk."""
        if self.folder is not None:
            self.folder.close()

    def apart(self) -> Memory:
        """A memory of the same graph with histories of its own; what is known about edges is shared."""
        memory = Memory(None, self.num_nodes, self.medium or self.storage, self.dtype, self.folder)
        memory.recorder, memory.events = self.recorder, self.events
        memory.overlap = False  # there are no steps to overlap with
        return memory

    def grown(self, info: BatchInfo, device: torch.device) -> Memory:
        """A memory of a graph that begins with the nodes of this one's: their rows are the same, others are zero.

        Args:
            info: A batch of that graph; rows are kept in the order of its loader.
            device: The compute device.
        """
        self.settle()
        memory = Memory(info.graph, info.graph.num_nodes, self.medium or self.storage, self.dtype, self.folder)
        memory.why, memory.written_by, memory.overlap = self.why, self.written_by, self.overlap
        if self.histories:
            memory.reopen({slot: (kept.width, kept.dtype) for slot, kept in self.histories.items()}, device)
            row_before, row_now = self.row_order(info).row_of, memory.row_order(info).row_of[: self.num_nodes]
        for slot, history in self.histories.items():
            # A type that holds whatever is kept, so that it comes back as it was.
            dtype = torch.float64 if history.dtype == torch.float64 else torch.float32
            for nodes in torch.split(row_now.argsort(), _MOST_COPIED):
                rows = history.pull(row_before[nodes], device=device, dtype=dtype)
                memory.histories[slot].push(rows, row_now[nodes])
        return memory

    def history(self, slot: str, rows: Tensor) -> History:
        """The slot's history, created on first use for rows like these, which are on the compute device."""
        if slot not in self.histories:
            self._open(slot, math.prod(rows.shape[1:]), self.dtype or rows.dtype, rows.device)
        return self.histories[slot]

    def _open(self, slot: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
        if self.medium is None:
            raise RuntimeError("where histories live is decided before there are any")
        path = self.folder.file(slot) if self.medium == "disk" and self.folder is not None else None
        try:
            self.histories[slot] = open_history(self.medium, self.num_nodes, width, dtype, device=device, path=path)
        except RuntimeError as error:  # what PyTorch raises for lack of memory, on a GPU as a kind of its own
            if "memory" not in str(error):
                raise
            raise InputError(
                f"{self.medium} memory must have room for all histories",
                got=f"{str(error).splitlines()[0]} for '{slot}', {self.num_nodes} rows of {width} {dtype} values",
                fix="Use storage='disk' (or 'host' if this was a GPU's memory), or a smaller history_dtype.",
            ) from error


def check_finite(slot: str, rows: Tensor, info: BatchInfo) -> None:
    """Refuse to keep rows that are not finite, since they would spoil those of other batches for good.

    On a GPU, where looking would make every step wait, the loss is looked at after each epoch instead.

    Args:
        slot: The slot that they are of.
        rows: The batch's rows, ``[batch_size, ...]``.
        info: The batch.
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
