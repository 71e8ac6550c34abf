"""What training takes with a number of parts: measured in short trials, estimated between and beyond them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import available_memory, weights_of
from gnnautoscale.analysis import GradientAgreement, diagnose
from gnnautoscale.attach import attached, autoscale, detach, is_autoscaled, refresh
from gnnautoscale.data import Dataset, TypedDataset, TypedLinks, nodes_of_type
from gnnautoscale.errors import InputError
from gnnautoscale.forward import TypedPlan
from gnnautoscale.graph import Graph, HaloLoader, TypedGraph, connectivity, partition
from gnnautoscale.history import Medium, choose_medium, codec_for
from gnnautoscale.runs import FitResult
from gnnautoscale.tasks import Task
from gnnautoscale.training import OPTIONS, FitOptions, HistoryDtype, fit

# Memory to leave free: a fresh process loads code, allocators keep pieces, other seeds give other parts.
MARGIN, LEAST_MARGIN = 0.2, 30 * 10**6
# A trial: its epochs, of which the first warms up; steps per epoch on a CPU; the longest it may take.
EPOCHS, STEPS, SECONDS = 3, 16, 120.0
# A trial runs only if an estimate of its memory may be wrong by this factor.
SAFETY = 2.0
# Parts to join into a batch, where that is better or the task needs several.
JOINED = 10
# Batches in memory if none is kept (measured): in use, being copied, being cut, and evaluated.
AT_A_TIME = 4
# Options that would make a trial longer or end it early.
_LENGTH = ("evaluate_every", "patience", "schedule")


@dataclass(frozen=True)
class Place:
    """A place for histories, and whether recurring batches are kept in the memory that is counted."""

    storage: Medium
    history_dtype: HistoryDtype
    why: str
    keep: bool = True


@dataclass(frozen=True)
class Cut:
    """What is known about a partition without training.

    Attributes:
        labels: The part of each node, ``[num_nodes]``.
        rows: Nodes and halo of the largest part.
        work: Mean number of nodes, halo nodes and edges of a part.
        kept: Bytes of the attributes of all parts and their halos.
        largest: Those of the largest part alone.
    """

    labels: Tensor
    connectivity: float
    rows: int
    work: float
    kept: int
    largest: int
    skew: float = 0.0

    @staticmethod
    def of(graph: Data | HeteroData, labels: Tensor, task: Task, target: str | None = None) -> Cut:
        """Measure the parts of a graph; of a heterogeneous one, nodes of the type ``target`` have targets."""
        edge_index = edges_to_cut(graph)
        ratio, sizes = connectivity(edge_index, labels), torch.bincount(labels)
        rows = sizes + (ratio * sizes).round().long()
        edges = torch.bincount(labels[edge_index[1].cpu()], minlength=sizes.numel())
        taken = torch.zeros_like(rows)
        # Nodes and edges of several types count as if they all had what they have on average.
        for store in graph.stores:
            for name, value in store.items():
                if isinstance(value, Tensor) and store.is_node_attr(name):
                    taken += rows * (value.nbytes // graph.num_nodes)
                elif isinstance(value, Tensor) and store.is_edge_attr(name):
                    taken += edges * (value.nbytes // max(graph.num_edges, 1))
        work = float((rows + edges).double().mean())
        if target is None:
            skew = task.skew(graph, labels)
        else:
            typed = TypedGraph.of(graph)
            first = typed.first[target]
            skew = task.skew(nodes_of_type(graph, target), labels[first : first + typed.counts[target]])
        return Cut(labels, float(ratio.mean()), int(rows.max()), work, int(taken.sum()), int(taken.max()), skew)


@dataclass(frozen=True)
class Trial:
    """What training takes: bytes at the peak, and seconds of a step, and of evaluation and refresh in an epoch."""

    memory: int
    step_seconds: float
    other_seconds: float


class Trials:
    """Cuts a graph, trains on it for a few steps where that is safe, and estimates the rest.

    ``counts`` are numbers of batches, ascending: of parts, unless the task needs several of them :attr:`together` in a
    batch. ``memory`` are the bytes to train in, ``None`` for all that are free.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        task: Task,
        counts: list[int],
        memory: int | None,
        options: FitOptions,
    ) -> None:
        self._build, self._dataset, self._task, self._options = build, dataset, task, options
        self._graph, self._device = dataset.passing(), torch.device(options.device)
        self._target = dataset.target if isinstance(dataset, TypedDataset) else None
        free = torch.cuda.mem_get_info(self._device)[0] if self.on_gpu else available_memory()
        if free is None and memory is None:
            raise InputError(
                "tuning needs to know how much memory it may use",
                got="a system that does not say how much is free",
                fix="Pass memory.",
            )
        self._free: int = free or memory or 0
        #: Bytes to train in.
        self.budget = self._free if memory is None else memory
        #: What is known about each number of parts.
        self.cuts = {count: self._batches_of(count) for count in counts}
        self._rows, self.levels, self._saved = self._probe()
        #: Places for histories: first the choice of ``storage="auto"``, then those that take less memory.
        self.places = self._possible_places()
        #: What was measured.
        self.done: dict[tuple[int, Place], Trial] = {}
        self._failed: set[int] = set()

    @property
    def has_penalty(self) -> bool:
        """Whether steps have the local Lipschitz penalty."""
        return self._options.lipschitz > 0

    @property
    def together(self) -> int:
        """Number of parts in a batch."""
        return 1 if self._task.least_parts == 1 else JOINED

    @property
    def compares_gradients(self) -> bool:
        """Whether gradients can be compared with full batch's; those of links of several types cannot."""
        return not isinstance(self._dataset, TypedLinks)

    @property
    def on_gpu(self) -> bool:
        """Whether trials run on a GPU."""
        return self._device.type == "cuda"

    def fits(self, memory: int) -> bool:
        """Whether a peak of that many bytes leaves a margin."""
        return with_margin(memory) <= self.budget

    # What is known without training ##################################################################################

    def cut(self, parts: int, together: int = 1) -> Cut:
        """Cut the graph as ``gas train`` would."""
        how: dict[str, Any] = {"seed": self._options.seed, "cache_dir": self._options.cache_dir}
        labels = self._task.cut(self._dataset.train, parts, together, **how)
        if labels is None:
            labels = partition(edges_to_cut(self._graph), self._graph.num_nodes, parts, **how)
        return self._measured(labels)

    def joined(self, parts: int, together: int) -> Cut:
        """Batches of several parts, drawn at random."""
        labels = self.cut(parts, together).labels
        order = torch.randperm(parts, generator=torch.Generator().manual_seed(self._options.seed))
        return self._measured((order // together)[labels])

    def _measured(self, labels: Tensor) -> Cut:
        # Links of several types have no classes that could be spread unevenly.
        target = None if isinstance(self._dataset, TypedLinks) else self._target
        return Cut.of(self._graph, labels, self._task, target)

    def _batches_of(self, count: int) -> Cut:
        """What a number of batches is made of."""
        if self.together == 1 or count == 1:
            return self.cut(count)
        return self.joined(self.together * count, self.together)

    def _probe(self) -> tuple[list[tuple[int, int, torch.dtype]], int, float]:
        """Rows, widths and types of all histories, their depth, and bytes that autograd keeps per row of a batch."""
        labels = next(reversed(self.cuts.values())).labels
        # One part only: histories of all nodes might not fit.
        piece = self._graph.subgraph(self._by_type(labels == labels.bincount().argmax()))
        model = autoscale(self._model(), piece)
        model.train()
        batch = next(iter(HaloLoader(piece, min(2, piece.num_nodes), partition="random"))).to(self._device)
        with torch.no_grad():
            model(batch)
        own = {weight.data_ptr() for weight in weights_of(model)}
        own |= {value.data_ptr() for store in batch.stores for value in store.values() if isinstance(value, Tensor)}
        saved: dict[int, int] = {}

        def keep(value: Tensor) -> Tensor:
            if value.data_ptr() not in own:
                saved[value.data_ptr()] = value.nbytes
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            out = model(batch)
        plan = attached(model).plan
        if plan is None or not (isinstance(out, Tensor) or isinstance(plan, TypedPlan)):
            raise InputError("the model must return a tensor", got=type(out).__name__, fix="Change its forward.")
        rows = []
        for slot in plan.live:
            store = self._graph[plan.kinds[slot]] if isinstance(plan, TypedPlan) else self._graph
            rows.append((int(store.num_nodes), math.prod(plan.rows[slot].shape[1:]), plan.rows[slot].dtype))
        detach(model)
        return rows, len(plan.levels), sum(saved.values()) / batch.num_nodes

    def _by_type(self, which: Tensor) -> Any:
        """A mask of nodes, ``[num_nodes]``, by type if the graph has types."""
        if not isinstance(self._graph, HeteroData):
            return which
        typed = TypedGraph.of(self._graph)
        return {kind: which[first : first + typed.counts[kind]] for kind, first in typed.first.items()}

    def _model(self) -> nn.Module:
        torch.manual_seed(self._options.seed)
        model = self._build()
        if is_autoscaled(model):
            raise InputError("tune needs a plain model", got="an autoscaled one", fix="Leave gas.autoscale out.")
        return model.to(self._device)

    def _history_bytes(self, dtype: HistoryDtype) -> int:
        """Bytes of all histories, with the second set that exact evaluation in batches takes."""
        total = 0
        for rows, width, own in self._rows:
            codec = codec_for(torch.bfloat16 if dtype == "bfloat16" else own, width)
            total += rows * codec.raw_width * codec.raw_dtype.itemsize
        return total * (1 if self._options.evaluate_parts == 1 else 2)

    def _possible_places(self) -> list[Place]:
        disk = self._options.history_dir is not None
        dtypes: tuple[HistoryDtype, ...] = ("same", "bfloat16")
        places: list[Place] = []
        for dtype in dtypes:
            try:
                medium, why = choose_medium(self._history_bytes(dtype), self._device, disk=disk)
            except InputError:
                if dtype == dtypes[-1]:
                    raise  # its message says what does not fit
                continue
            places.append(Place(medium, dtype, why))
        if self.on_gpu and places[0].storage == "device":
            # Host memory costs little time, so it comes before fewer bits.
            why = "histories beside the batches would not fit into the memory to train in"
            places = [places[0], Place("host", "same", why), *(replace(place, storage="host") for place in places[1:])]
        if disk and all(place.storage != "disk" for place in places):
            places.append(Place("disk", "same", "histories in memory would not fit into the memory to train in"))
        keep = self._options.keep_batches and self._options.batches_on != "host"
        return places * keep + [replace(place, keep=False) for place in places]

    # Trials and estimates ############################################################################################

    def attempt(self, parts: int, place: Place) -> bool:
        """Train for a few epochs if memory and time suffice for certain; returns whether that told something new."""
        if (parts, place) in self.done or parts in self._failed:
            return False
        if self.done:  # the first trial has the smallest batches
            expected = self.expect(parts, place)
            too_long = EPOCHS * self._batches(parts) * expected.step_seconds > SECONDS
            if too_long or not self.fits(expected.memory) or SAFETY * expected.memory > self._free:
                return False
        try:
            self.done[parts, place] = self.run(parts, place)
        except MemoryError:
            self._failed.add(parts)
        return True

    def run(self, parts: int, place: Place, **changed: Any) -> Trial:
        """Train for a few epochs, with changed options of ``fit``; one part is full batch."""
        batches, together = self._batches(parts), 1 if parts == 1 else self.together
        how = {"batch_size": together, "steps_per_epoch": batches, **changed}
        model, result = self._fit(parts * together, place, how)
        detach(model)  # frees the folder of histories
        if result.peak_memory is None:
            raise InputError("trials need a system that reports the memory in use", got="none", fix="Use Linux.")
        step = min(epoch.seconds for epoch in result.epochs[1:]) / batches
        other = sum(result.seconds.get(name, 0.0) for name in ("evaluate", "refresh")) / EPOCHS
        return Trial(result.peak_memory, step, other)

    def agreement(self, parts: int, together: int, place: Place) -> GradientAgreement:
        """How the gradient of steps agrees with full batch's after a few epochs with batches of so many parts each.

        Histories are exact, so that only the border of batches makes a difference.
        """
        model, _ = self._fit(parts, place, {"batch_size": together, "steps_per_epoch": STEPS})
        try:
            typed = isinstance(self._graph, HeteroData)
            graph = TypedGraph.of(self._graph).joined if typed else Graph.of(self._graph)
            labels, both = self.cut(parts, together).labels, not graph.is_symmetric
            loader = HaloLoader(self._graph, partition=labels, batch_size=together, bidirectional=both)
            refresh(model, loader)
            found = diagnose(model, loader, "gradients", task=self._task, target=self._target)["gradients"]
            return cast(GradientAgreement, found)
        finally:
            detach(model)

    def _fit(self, parts: int, place: Place, changed: dict[str, Any]) -> tuple[nn.Module, FitResult]:
        """Train for a few epochs; returns the model, with histories, and the result."""
        options = self._options.to_dict() | {name: OPTIONS[name].default for name in _LENGTH}
        options |= {"mode": "full" if parts == 1 else "gas", "num_parts": parts}
        options |= {"storage": place.storage, "history_dtype": place.history_dtype, **self.batch_options(place)}
        options |= {"epochs": EPOCHS, **changed}
        model = self._model()
        try:
            return model, fit(model, self._dataset, task=self._task, progress=False, **options)
        except BaseException:
            if is_autoscaled(model):
                detach(model)
            raise

    def expect(self, parts: int, place: Place) -> Trial:
        """A measurement or an estimate: histories and kept batches are known, the rest grows with the batch."""
        if (parts, place) in self.done:
            return self.done[parts, place]
        cut = self.cuts[parts]
        rest, steps, others = {}, {}, {}
        # Beyond the trials, a row takes what autograd keeps of it, and as much again for gradients.
        for (tried, where), trial in self.done.items():
            known = self.cuts[tried]
            rest[float(known.rows)] = float(max(trial.memory - self.known_bytes(tried, where), 0))
            steps[known.work], others[known.work] = trial.step_seconds, trial.other_seconds
        memory = self.known_bytes(parts, place) + int(interpolate(rest, cut.rows, least_slope=2 * self._saved))
        if parts in self._failed:
            memory = max(memory, self.budget)
        return Trial(memory, interpolate(steps, cut.work), interpolate(others, cut.work))

    def known_bytes(self, parts: int, place: Place) -> int:
        """Bytes of batches, and of histories if they are in the memory that is counted."""
        cut = self.cuts[parts]
        histories = place.storage == "device" and parts > 1  # full batch has none
        batches = cut.kept if place.keep else min(cut.kept, AT_A_TIME * cut.largest)
        return batches + self._history_bytes(place.history_dtype) * histories

    def batch_options(self, place: Place) -> dict[str, Any]:
        """Options of ``fit`` that keep batches out of the memory that is counted, if the place does."""
        if place.keep:
            return {}
        return {"batches_on": "host"} if self.on_gpu else {"keep_batches": False}

    def _batches(self, count: int) -> int:
        """Number of steps in an epoch of a trial. A GPU captures each batch when it first appears."""
        return count if self.on_gpu else min(count, STEPS)


def edges_to_cut(graph: Data | HeteroData) -> Tensor:
    """The edges of all types between nodes numbered type after type, ``[2, num_edges]``."""
    edges: Tensor = TypedGraph.of(graph).edge_index if isinstance(graph, HeteroData) else graph.edge_index
    return edges


def with_margin(memory: int) -> int:
    """The memory needed for an expected peak of that many bytes."""
    return memory + max(int(MARGIN * memory), LEAST_MARGIN)


def interpolate(points: dict[float, float], place: float, *, least_slope: float = 0.0) -> float:
    """The value at a place on straight lines through known points, or in proportion to the only one.

    Beyond the points there is a least slope.
    """
    places = sorted(points)
    if len(places) == 1:
        return points[places[0]] + max(points[places[0]] / places[0], least_slope) * (place - places[0])
    after = next((number for number, known in enumerate(places) if known > place), len(places))
    after = min(max(after, 1), len(places) - 1)
    first, second = places[after - 1], places[after]
    slope = (points[second] - points[first]) / (second - first)
    if place > second:
        slope = max(slope, least_slope)
    near = first if place < second else second
    return max(points[near] + slope * (place - near), 0.0)
