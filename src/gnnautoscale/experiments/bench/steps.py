"""Time training steps, epochs and transfers on generated graphs, through the library's own training loop."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GCN, GIN  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.attach import Autoscaler, autoscale
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.bench.graphs import BenchGraph, make_loader
from gnnautoscale.experiments.bench.measuring import Numbers, free_memory
from gnnautoscale.forward import GraphMemory
from gnnautoscale.graph import HaloLoader
from gnnautoscale.history import DiskHistory, Storage
from gnnautoscale.kernels import gather_rows, scatter_rows
from gnnautoscale.replay import Placement
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training import Engine, Optimization, make_optimizer


def time_epochs(
    model: nn.Module,
    loader: HaloLoader,
    *,
    batches: int | None = None,
    placement: Placement = "auto",
    capture: bool = True,
    epochs: int = 5,
    exact: bool = False,
    before_epoch: Callable[[], None] | None = None,
) -> Numbers:
    """Train an autoscaled model on fixed batches (by default all) and time its epochs, after two epochs of warm-up.

    An ``exact`` epoch is one step with the gradient of the whole graph.

    Calls ``before_epoch`` before each epoch, outside the timing. Returns ``"epoch"`` and ``"step"`` in seconds
    (medians); ``"peak_memory"`` and ``"reserved_memory"``, the bytes that PyTorch allocated and reserved on the GPU,
    ``None`` on a CPU; ``"how"``, whether steps were captured.
    """
    count = len(loader) if batches is None else batches
    task = NodeClassification.of(Dataset.of(loader.data))
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, Optimization(lr=0.001))
    engine = Engine(model, optimizer, task, device, precision="tf32", capture=capture, placement=placement)
    cuda = device.type == "cuda"
    free_memory(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    with engine.running():
        model.train()
        for _ in range(epochs + 2):
            if before_epoch is not None:
                before_epoch()
            start = time.perf_counter()
            if exact:
                engine.exact_epoch(loader, task.weight_of(loader.data), lambda _: None, done=False)
            else:
                engine.epoch(loader, count)
            seconds.append(time.perf_counter() - start)
        how = engine.exact_how if exact else engine.how
    epoch = statistics.median(seconds[2:])
    return {
        "epoch": epoch,
        "step": epoch / count,
        "peak_memory": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved_memory": torch.cuda.max_memory_reserved(device) if cuda else None,
        "how": how,
    }


@dataclass(frozen=True)
class HistorySetup:
    """How a benchmark keeps and moves histories; ``cold`` files leave the system's cache before every epoch."""

    storage: Storage
    dtype: torch.dtype | None = None
    overlap: bool = True
    capture: bool = True
    cold: bool = False


#: The columns of the step benchmark.
COLUMNS = {
    "device fp32": HistorySetup("device"),
    "host fp32": HistorySetup("host"),
    "host bf16": HistorySetup("host", torch.bfloat16),
    "host fp32, serial": HistorySetup("host", overlap=False),
    "host fp32, eager": HistorySetup("host", capture=False),
}

#: The rows of the storage benchmark.
MEDIA = {
    "device float32": HistorySetup("device"),
    "host float32": HistorySetup("host"),
    "host float32, serial": HistorySetup("host", overlap=False),
    "host bfloat16": HistorySetup("host", torch.bfloat16),
    "host float16": HistorySetup("host", torch.float16),
    "host int8": HistorySetup("host", torch.int8),
    "host float8": HistorySetup("host", torch.float8_e4m3fn),
    "disk float32": HistorySetup("disk"),
    "disk float32, serial": HistorySetup("disk", overlap=False),
    "disk float32, cold": HistorySetup("disk", cold=True),
    "disk float32, cold, serial": HistorySetup("disk", cold=True, overlap=False),
    "disk bfloat16": HistorySetup("disk", torch.bfloat16),
    "disk int8": HistorySetup("disk", torch.int8),
}


def bench_step(graph: BenchGraph, ratio: float, device: torch.device, *, layers: int = 4, epochs: int = 5) -> Numbers:
    """Time a GIN's training step with ``ratio`` halo nodes per batch node, as in the paper's Figure 4.

    Returns ``"ratio"``; ``"milliseconds"`` of a step, for each of ``COLUMNS``; and ``"I/O"``, how much longer a step
    takes than with histories on the device, as a share, for each of the other columns.
    """
    loader = make_loader(graph, ratio, device)
    timed = {name: _time_gin(graph, loader, device, how, layers, epochs) for name, how in COLUMNS.items()}
    times = {name: numbers["milliseconds"] for name, numbers in timed.items()}
    base, *others = times
    overheads = {name: times[name] / times[base] - 1.0 for name in others}
    return {"ratio": ratio, "milliseconds": times, "I/O": overheads}


def with_computation(rows: Iterable[Numbers]) -> list[Numbers]:
    """Add ``"computation"`` to rows of :func:`bench_step`: the device's extra time over the first row, as a share."""
    rows = list(rows)
    steps = [row["milliseconds"]["device fp32"] for row in rows]
    return [{**row, "computation": step / steps[0] - 1.0} for row, step in zip(rows, steps, strict=True)]


def step_table(rows: Iterable[Numbers]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a table of :func:`with_computation`'s rows."""
    overheads = ["host fp32", "host bf16", "host fp32, serial"]
    cells = [
        [
            f"{row['ratio']:g}",
            *(f"{row['milliseconds'][name]:.3f}" for name in COLUMNS),
            f"{100 * row['computation']:+.0f} %",
            *(f"{100 * row['I/O'][name]:+.1f} %" for name in overheads),
        ]
        for row in rows
    ]
    return ["halo / batch", *(f"{n} (ms)" for n in COLUMNS), "computation", *(f"I/O {n}" for n in overheads)], cells


def bench_storage(
    graph: BenchGraph, ratio: float, device: torch.device, folder: Path, *, layers: int = 4, epochs: int = 5
) -> list[Numbers]:
    """Time a GIN's training step for every storage and precision of histories; those on disk go to ``folder``.

    Returns for each of ``MEDIA``: ``"milliseconds"`` of a step; ``"to host"``, their ratio to host memory in float32;
    ``"megabytes"`` of rows moved per step; ``"overlap"``, the share of the transfers' time that is hidden, if known;
    ``"history"``, the bytes of all histories; and ``"peak_memory"`` in bytes: what PyTorch allocated on a GPU, or by
    how much the process grew on a CPU, cached files included.
    """
    loader = make_loader(graph, ratio, device)
    rows: list[Numbers] = []
    for name, how in MEDIA.items():
        timed = _time_gin(graph, loader, device, how, layers, epochs, folder)
        gc.collect()  # frees the histories
        moved = timed["history"] // graph.nodes * graph.batch_nodes * (1 + ratio)
        rows.append({"histories": name, "megabytes": 1e-6 * moved, **timed})
    times = {row["histories"]: row["milliseconds"] for row in rows}
    base = times["device float32"]
    for row in rows:
        row["to host"] = row["milliseconds"] / times["host float32"]
        serial = times.get(f"{row['histories']}, serial", 0.0)
        visible = serial > 1.1 * base  # otherwise transfers cannot be told from noise
        row["overlap"] = (serial - row["milliseconds"]) / (serial - base) if visible else None
    return rows


def _time_gin(
    graph: BenchGraph,
    loader: HaloLoader,
    device: torch.device,
    how: HistorySetup,
    layers: int,
    epochs: int,
    folder: Path | None = None,
) -> Numbers:
    torch.manual_seed(0)
    model = GIN(graph.features, graph.features, num_layers=layers, out_channels=graph.classes).to(device)
    folder = folder if how.storage == "disk" else None
    with PeakMemory(device) as peak:
        memory = GraphMemory(None, graph.nodes, how.storage, how.dtype, folder, overlap=how.overlap)
        Autoscaler(model, memory, None)
        evict = partial(_evict, memory) if how.cold else None
        timed = time_epochs(
            model, loader, batches=graph.batches, capture=how.capture, epochs=epochs, before_epoch=evict
        )
    size = sum(history.num_bytes for history in memory.histories.values())
    return {"milliseconds": 1e3 * timed["step"], "history": size, "peak_memory": peak.num_bytes}


def _evict(memory: GraphMemory) -> None:
    memory.settle()
    for history in memory.histories.values():
        if isinstance(history, DiskHistory):
            history.evict()


def draw_steps(result: Numbers, figure: Any) -> None:
    """Draw the time of a step, and the overhead of histories in host memory, into an empty matplotlib figure.

    ``result`` holds ``"rows"`` of :func:`bench_step`; ``"setup"``, the graph's fields and the number of layers; and
    ``"machine"``.
    """
    rows, setup = result["rows"], result["setup"]
    ratios = [row["ratio"] for row in rows]
    left, right = figure.subplots(1, 2)
    for name, style, label in (
        ("device fp32", "k-", "on the device"),
        ("host fp32", "C0o-", "in host memory"),
        ("host bf16", "C2s-", "in host memory, bf16"),
        ("host fp32, serial", "C3^--", "in host memory, serial"),
    ):
        left.plot(ratios, [row["milliseconds"][name] for row in rows], style, label=label)
        if name != "device fp32":
            right.plot(ratios, [100 * row["I/O"][name] for row in rows], style, label=label)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=min(0.0, *(100 * value for row in rows for value in row["I/O"].values())))
    for axes, y_label in ((left, "milliseconds per training step"), (right, "I/O overhead (%)")):
        axes.set(xlabel="halo nodes per batch node", ylabel=y_label)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    title = f"{setup['layers']}-layer GIN, {setup['features']} wide, {setup['batch_nodes']:,} batch nodes, "
    figure.suptitle(f"{title}{setup['nodes']:,}-node histories, {result['machine']}", fontsize=10)


def bench_io(device: torch.device, *, nodes: int = 1_000_000, rows: int = 100_000) -> list[Numbers]:
    """Compare pulls and pushes of random rows of a history in pinned host memory with plain copies of the same size.

    Returns for each direction and type: the speed ``"GB/s"``, that of the copy, ``"copy GB/s"``, and their ``"share"``.
    """
    if device.type != "cuda":
        raise InputError("this benchmark needs a GPU", got=repr(str(device)), fix="Run it on a machine with one.")
    from torch.utils.benchmark import Timer  # here, because importing it takes a third of a second

    found: list[Numbers] = []
    index = torch.randperm(nodes, device=device)[:rows]
    for dtype in (torch.float32, torch.bfloat16):
        history = torch.zeros(nodes, 256, dtype=dtype, pin_memory=True)
        near = torch.zeros(rows, 256, dtype=dtype, device=device)
        far = history[:rows]
        work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "pull": (partial(gather_rows, history, index, near), partial(near.copy_, far, non_blocking=True)),
            "push": (partial(scatter_rows, near, index, history), partial(far.copy_, near, non_blocking=True)),
        }
        for what, calls in work.items():
            timers = [Timer("call()", globals={"call": call}).blocked_autorange() for call in calls]
            speed, copy = (near.nbytes / timer.median / 1e9 for timer in timers)
            numbers = {"GB/s": speed, "copy GB/s": copy, "share": speed / copy}
            found.append({"what": what, "dtype": str(dtype).removeprefix("torch."), **numbers})
    return found


def bench_epoch(graph: BenchGraph, ratio: float, device: torch.device, *, layers: int, width: int) -> list[Numbers]:
    """Time an epoch of a GCN on a graph whose batches cover all nodes, with batches on the device and in host memory.

    Returns the numbers of :func:`time_epochs` for each of these ``"batches"``.
    """
    loader = make_loader(graph, ratio, device)
    model = GCN(graph.features, width, num_layers=layers, out_channels=graph.classes).to(device)
    autoscale(model, loader.graph.num_nodes, storage="host")
    places: tuple[Placement, ...] = ("device", "host")
    return [{"batches": place, **time_epochs(model, loader, placement=place, epochs=3)} for place in places]
