"""Captured sweeps: on a GPU each pass over a batch is a CUDA graph, and rows move beside it.

Batches wait in host memory as they were packed once. While a graph computes one batch, the next one and the rows that
it needs arrive over the bus, and the rows of the one before are on their way back. So there are two places on the GPU
for everything that a pass reads or writes, which batches take in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import Pinned, map_tensors, pinned_zeros
from gnnautoscale.attach import Autoscaler
from gnnautoscale.forward import Draws, RecordedDraws, RowStore, Session, Stage, as_matrix
from gnnautoscale.graph import BatchInfo, UnreadRows
from gnnautoscale.history import History, RowSums
from gnnautoscale.kernels import Halo, Runs, gather_rows
from gnnautoscale.replay import Contents, GraphPool, Package, layout_of, view_in

#: The type and shape of a tensor.
Form = tuple[torch.dtype, torch.Size]
#: What is read before a pass, by kind and name: rows of a slot, their gradient, an attribute, an input of the loss.
Inputs = dict[tuple[str, str], Form]
# Every CUDA graph takes some memory of the driver.
MOST_GRAPHS = 8192
# Packed batches share page-locked memory in pieces of at least this size.
_PIECE = 1 << 28
# How many batches ahead the inputs of a loss are prepared in host memory.
_AHEAD = 3


@dataclass
class _Staged:
    """A packed batch in host memory, how much of it a forward pass needs, and its attributes that are not packed."""

    package: Package
    buffer: Tensor
    forward_size: int
    runs: Runs
    unread: dict[str, UnreadRows]
    loss: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Pass:
    """A captured pass over a batch, with what it reads and writes on the GPU."""

    graph: torch.cuda.CUDAGraph
    draws: RecordedDraws
    batch: Data
    front: Tensor
    views: dict[Any, Tensor]
    inputs: dict[tuple[str, str], Tensor]
    index: Tensor
    outputs: dict[str, Tensor]
    result: list[Tensor]


class _Places:
    """The two places of some kind of data on a GPU, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def make(self, size: int) -> None:
        """Make room for so many bytes in each of them."""
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def bytes(self, number: int, size: int) -> Tensor:
        """The first bytes of a batch's place."""
        return self._buffers[number % 2][:size]

    def views(self, number: int, forms: Mapping[Any, Form]) -> dict[Any, Tensor]:
        """Tensors of some types and shapes in a batch's place."""
        layout, _ = _laid_out(forms)
        return {name: view_in(self._buffers[number % 2], *place) for name, place in layout.items()}


class PlacedRows(RowStore):
    """The rows that a captured pass reads and writes, at fixed places."""

    def __init__(self, inputs: Mapping[tuple[str, str], Tensor]) -> None:
        self._inputs = inputs
        #: The rows that the pass computed.
        self.written: dict[str, Tensor] = {}

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        return self._inputs["rows", slot][which]

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        self.written[slot] = rows


@dataclass
class Recipe:
    """How to capture the passes of a stage.

    Attributes:
        inputs: What is read before a pass over a batch, by the batch's number.
        outputs: The rows by slot, and then the tensors without a slot, that it computes.
        places: Where it draws random numbers.
        run: Runs it on a batch, with rows and inputs at their places; returns what it computes.
    """

    inputs: Callable[[int], Inputs]
    outputs: Callable[[int], tuple[dict[str, Form], list[Form]]]
    places: set[str]
    run: Callable[[Data, PlacedRows, Mapping[tuple[str, str], Tensor], Draws], tuple[dict[str, Tensor], list[Tensor]]]


class CapturedSweeps:
    """Packed batches of a loader, and graphs of the passes of all stages over them.

    ``key`` says what they hold for. If something cannot be captured, :attr:`why_not` says what.
    """

    def __init__(self, key: Hashable, device: torch.device) -> None:
        self.key, self._device = key, device
        self.why_not: str | None = None
        self._batches: list[_Staged] = []
        self._passes: dict[tuple[Stage, bool], list[_Pass]] = {}
        self._fronts, self._inputs, self._outputs = (_Places(device) for _ in range(3))
        self._graphs = GraphPool(device)
        # Copies of consecutive bytes run on an engine of their own, beside kernels that gather rows over the bus.
        streams = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._copying, self._reading, self._writing = streams
        self._owners: list[Pinned] = []
        self._piece = torch.empty(0, dtype=torch.uint8)

    @property
    def num_graphs(self) -> int:
        """Number of captured passes."""
        return sum(map(len, self._passes.values()))

    # Packing #########################################################################################################

    def pack(self, scaler: Autoscaler, batches: Iterable[Data], loss: Callable[[Data], dict[str, Tensor]]) -> None:
        """Pack all batches of a sweep, with the inputs of a ``loss`` that are the same in every step."""
        contents = Contents(scaler, self._device)
        for batch in batches:
            info = batch.edge_index.info
            info.wait()
            tensors = contents.tensors(batch, info, {}, batch.keys())
            # A forward pass needs no transpose, so that comes last.
            tensors = dict(sorted(tensors.items(), key=lambda each: _is_transposed(each[0])))
            needed = [name for name in tensors if not _is_transposed(name)]
            layout, size = layout_of(tensors)
            buffer = self._room(size)
            views = {name: view_in(buffer, *place) for name, place in layout.items()}
            nothing = torch.empty(0, dtype=torch.long, device=self._device)  # lets go of the batch's nodes
            unread = {
                name: UnreadRows.of(value.shape, value.dtype, nothing, value.read_rows)
                for name, value in batch
                if isinstance(value, UnreadRows)
            }
            inputs = {name: value.cpu().pin_memory() for name, value in loss(batch).items()}
            torch._foreach_copy_(list(views.values()), [tensors[name] for name in views], non_blocking=True)
            runs = scaler.memory.rows_of(info).runs
            package = contents.package(batch, _with_rows(info, views["rows"]), views)
            _, forward_size = layout_of({name: tensors[name] for name in needed})
            self._batches.append(_Staged(package, buffer, forward_size, runs, unread, inputs))
        torch.cuda.synchronize(self._device)

    def _room(self, size: int) -> Tensor:
        if self._piece.numel() < size:
            self._piece, owner = pinned_zeros((max(size, _PIECE),), torch.uint8)
            self._owners.append(owner)
        room, self._piece = self._piece[:size], self._piece[size:]
        return room

    def form_of_loss(self, number: int) -> Inputs:
        """The inputs of the loss that were packed with a batch."""
        return {("loss", name): (value.dtype, value.shape) for name, value in self._batches[number].loss.items()}

    def size_of(self, number: int) -> tuple[int, int]:
        """The number of a batch's own rows, and of all of them with the halo."""
        info = self._batches[number].package.info
        return info.batch_size, info.num_rows

    def attribute(self, number: int, name: str) -> Form:
        """An attribute of nodes that passes read."""
        value = self._batches[number].unread[name]
        return value.dtype, value.shape

    # Capturing #######################################################################################################

    def capture(self, scaler: Autoscaler, recipes: Mapping[tuple[Stage, bool], Recipe]) -> None:
        """Capture the passes of all stages, forward and (``True``) backward."""
        if len(recipes) * len(self._batches) > MOST_GRAPHS:
            self.why_not = f"{len(recipes)} sweeps over {len(self._batches)} batches are too many CUDA graphs"
            return
        numbers = range(len(self._batches))
        inputs = {key: [recipe.inputs(number) for number in numbers] for key, recipe in recipes.items()}
        outputs = {key: [self._forms(number, recipe) for number in numbers] for key, recipe in recipes.items()}
        self._fronts.make(max(staged.buffer.numel() for staged in self._batches))
        self._inputs.make(max(_laid_out(form)[1] for each in inputs.values() for form in each))
        self._outputs.make(max(_laid_out(form)[1] for each in outputs.values() for form in each))
        contents = Contents(scaler, self._device)
        for key, recipe in recipes.items():
            self._passes[key] = []
            for number in numbers:
                forms = inputs[key][number], outputs[key][number]
                self._passes[key] += self._captured(number, recipe, *forms, contents)
                if self.why_not is not None:
                    return

    def _forms(self, number: int, recipe: Recipe) -> dict[Any, Form]:
        """All that a pass writes, with the rows of the batch, which the next batch's could overwrite."""
        rows, others = recipe.outputs(number)
        index = self._batches[number].package.views["rows"]
        return {None: (index.dtype, index.shape), **rows, **dict(enumerate(others))}

    def _captured(
        self, number: int, recipe: Recipe, inputs: Inputs, outputs: dict[Any, Form], contents: Contents
    ) -> list[_Pass]:
        """The captured pass over a batch, if it can be captured."""
        staged = self._batches[number]
        front = self._fronts.bytes(number, staged.buffer.numel())
        layout, _ = layout_of(staged.package.views)
        views = {name: view_in(front, *place) for name, place in layout.items()}
        there, places = self._inputs.views(number, inputs), self._outputs.views(number, outputs)
        info = _with_rows(staged.package.info, views["rows"])
        package = contents.package(staged.package.batch, info, views)
        for name, value in staged.unread.items():
            read = partial(_placed, there.get(("attribute", name)), name)
            package.batch[name] = UnreadRows.of(value.shape, value.dtype, views["batch", "n_id"], read)
        contents.place(package)
        draws = RecordedDraws(None, recipe.places, self._device)

        def whole_pass() -> list[Any]:
            rows, others = recipe.run(package.batch, PlacedRows(there), there, draws)
            written: dict[Any, Tensor] = {None: views["rows"], **rows}
            written |= enumerate(others)
            for name, value in written.items():
                places[name].copy_(value)
            return list(written)

        graph, written, self.why_not = self._graphs.record(whole_pass, draws.generators.values())
        contents.displace(info)
        if self.why_not is not None:
            return []
        result = [places[name] for name in written if isinstance(name, int)]
        rows = {name: places[name] for name in written if isinstance(name, str)}
        return [_Pass(graph, draws, package.batch, front, views, there, places[None], rows, result)]

    # Replaying #######################################################################################################

    def run(
        self,
        stage: Stage,
        *,
        backward: bool,
        seed: int | None,
        histories: Mapping[str, History],
        gradients: Mapping[str, RowSums],
        loss: Callable[[Data], dict[str, Tensor]] | None = None,
        use: Callable[[Data, list[Tensor]], None] | None = None,
    ) -> None:
        """Replay the passes of a stage over all batches, and write what they compute: rows, or their gradients.

        The inputs of a ``loss`` of this step go to the passes, and ``use`` gets each batch with the output.
        """
        computing = torch.cuda.current_stream(self._device)
        for stream in (self._copying, self._reading, self._writing):
            stream.wait_stream(computing)
        computed: list[torch.cuda.Event] = []
        written: list[torch.cuda.Event] = []
        with ThreadPoolExecutor(1, "loss") as thread:
            ahead: deque[Future[dict[str, Tensor]]] = deque()
            waiting = iter(self._batches if loss is not None else ())
            for number, (staged, known) in enumerate(zip(self._batches, self._passes[stage, backward], strict=True)):
                arriving = staged.loss
                if loss is not None:
                    following = islice(waiting, _AHEAD - len(ahead))
                    ahead.extend(thread.submit(_pinned, loss, each.package.batch) for each in following)
                    arriving = ahead.popleft().result()
                if number >= 2:
                    # What uses an output may read of the batch, too.
                    for stream in (self._copying, self._reading):
                        stream.wait_event((computed if use is None else written)[number - 2])
                    computing.wait_event(written[number - 2])
                self._read(staged, known, arriving, histories, gradients, backward=backward)
                for stream in (self._copying, self._reading):
                    computing.wait_stream(stream)
                known.draws.seed(seed, number)
                known.graph.replay()
                computed.append(computing.record_event())
                self._writing.wait_event(computed[-1])
                with torch.cuda.stream(self._writing):
                    for slot, rows in known.outputs.items():
                        if backward:
                            gradients[slot].add(as_matrix(rows), known.index)
                        else:
                            own = known.index[: rows.size(0)]
                            histories[slot].push(as_matrix(rows), own, staged.runs)
                    if use is not None:
                        use(known.batch, known.result)
                written.append(self._writing.record_event())
                if number >= 4:
                    written[number - 4].synchronize()  # the host need not be further ahead
        computing.wait_stream(self._writing)

    def _read(
        self,
        staged: _Staged,
        known: _Pass,
        loss: Mapping[str, Tensor],
        histories: Mapping[str, History],
        gradients: Mapping[str, RowSums],
        *,
        backward: bool,
    ) -> None:
        """Bring a batch and all inputs of its pass to the GPU."""
        size = staged.buffer.numel() if backward else staged.forward_size
        own = staged.package.info.batch_size
        rows = {name: as_matrix(place) for (kind, name), place in known.inputs.items() if kind == "rows"}
        by_copy = {slot for slot, place in rows.items() if histories[slot].raw.dtype == place.dtype}
        by_copy = by_copy if len(staged.runs) <= _MOST_RUNS else set()
        with torch.cuda.stream(self._copying):
            known.front[:size].copy_(staged.buffer[:size], non_blocking=True)
            arrived = self._copying.record_event()
            for slot in by_copy:
                for start, first, count in staged.runs:
                    source = histories[slot].raw[start : start + count]
                    rows[slot][first : first + count].copy_(source, non_blocking=True)
            for (kind, name), place in known.inputs.items():
                if kind == "loss":
                    place.copy_(loss[name], non_blocking=True)
        self._reading.wait_event(arrived)
        index = known.views["rows"]
        with torch.cuda.stream(self._reading):
            for slot, place in rows.items():
                first = own if slot in by_copy else 0
                gather_rows(histories[slot].raw, index[first:], place[first:], programs=_PROGRAMS)
            for (kind, name), place in known.inputs.items():
                if kind == "gradient":
                    gradients[name].read(index[:own], dtype=place.dtype, out=as_matrix(place))
                elif kind == "attribute":
                    staged.unread[name].read_rows(known.views["batch", "n_id"], place)


# Nothing else is waiting for the bus.
_PROGRAMS = 16
# With more pieces, reading rows one by one is faster.
_MOST_RUNS = 64


def _is_transposed(name: Any) -> bool:
    return isinstance(name, tuple) and isinstance(name[-1], str) and name[-1].endswith("_t")


def _placed(place: Tensor | None, name: str, nodes: Tensor, out: Tensor | None) -> Tensor:
    if place is None:
        raise RuntimeError(f"'{name}' was not read when this pass ran first")
    return place


def _with_rows(info: BatchInfo, rows: Tensor) -> BatchInfo:
    """The same batch, but with nothing else of it in the GPU's memory than its rows, ``[num_rows]``."""
    found = Halo.of(rows[info.batch_size :], rows[:0])
    made = BatchInfo(info.graph, info.table, info.own, info.edges, found, info.key)
    made.rows, made.bidirectional = rows, info.bidirectional
    return made


def _pinned(loss: Callable[[Data], dict[str, Tensor]], batch: Data) -> dict[str, Tensor]:
    return map_tensors(lambda value: value if value.is_cuda else value.pin_memory(), loss(batch))


def _laid_out(forms: Mapping[Any, Form]) -> tuple[dict[Any, tuple[torch.dtype, torch.Size, int]], int]:
    return layout_of({name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in forms.items()})
