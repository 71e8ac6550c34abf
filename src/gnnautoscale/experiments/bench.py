"""Measures training steps, transfers and memory on generated graphs, through the library's own training loop."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN, GIN  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.attach import attached, autoscale
from gnnautoscale.data import Dataset
from gnnautoscale.forward import Memory
from gnnautoscale.graph import HaloLoader
from gnnautoscale.history import DiskHistory, Storage
from gnnautoscale.kernels import gather_rows, scatter_rows
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training import Engine, Feed, Placement, Precision, make_optimizer

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """A graph whose batches all look alike; the defaults are those of the paper's Figure 4.

    Attributes:
        nodes: Number of nodes, which is the number of rows of a history.
        batch_nodes: Nodes of a batch.
        batches: Batches of an epoch; further nodes are there to be halo nodes.
        degree: Edges of each batch node from random nodes of its batch.
        halo_degree: Edges of each halo node into random nodes of the batch.
        features: Width of the input.
        classes: Number of classes.
    """

    nodes: int = 1_000_000
    batch_nodes: int = 4000
    batches: int = 25
    degree: int = 60
    halo_degree: int = 60
    features: int = 256
    classes: int = 256


#: As many nodes, edges and features as ogbn-products, in 150 parts.
PRODUCTS = Setup(2_400_000, 16_000, 150, degree=39, halo_degree=6, features=100, classes=47)


def machine(device: torch.device) -> Row:
    """What the measurements were made with."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"gpu": gpu, "cpu": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}


def make_loader(setup: Setup, ratio: float, seed: int = 0) -> HaloLoader:
    """A graph with ``ratio`` halo nodes per batch node, and a loader of it.

    Example:
        >>> setup = Setup(nodes=100, batch_nodes=10, batches=2, degree=3, halo_degree=3, features=4)
        >>> batch = next(iter(make_loader(setup, 2.0)))
        >>> batch.batch_size, batch.num_nodes, batch.num_edges
        (10, 30, 90)
    """
    generator = torch.Generator().manual_seed(seed)
    size, halo = setup.batch_nodes, int(ratio * setup.batch_nodes)
    edges = []
    for part in range(setup.batches):
        first = part * size
        nodes = torch.arange(first, first + size).repeat_interleave(setup.degree)
        inside = first + torch.randint(size, nodes.shape, generator=generator)
        # Distinct nodes of all others, drawn at random.
        outside = torch.randperm(setup.nodes - size, generator=generator)[:halo]
        outside = (outside + (outside >= first) * size).repeat_interleave(setup.halo_degree)
        into = first + torch.randint(size, outside.shape, generator=generator)
        edges.append(torch.stack([torch.cat([inside, outside]), torch.cat([nodes, into])]))
    data = Data(
        x=torch.randn(setup.nodes, setup.features, generator=generator),
        edge_index=torch.cat(edges, dim=1),
        y=torch.randint(setup.classes, (setup.nodes,), generator=generator),
        train_mask=torch.ones(setup.nodes, dtype=torch.bool),
    )
    return HaloLoader(data, parts=torch.arange(setup.nodes) // size)


def time_epochs(
    model: nn.Module,
    loader: HaloLoader,
    *,
    batches: int | None = None,
    placement: Placement = "auto",
    precision: Precision = "tf32",
    capture: bool = True,
    epochs: int = 5,
    before_epoch: Callable[[], None] | None = None,
) -> Row:
    """Train a model for some epochs and take the time of all but the first two.

    Args:
        model: An autoscaled model.
        loader: Cuts the graph into fixed batches.
        batches: Number of batches of an epoch; by default all.
        placement: Where batches live.
        precision: Of matrix products.
        capture: Whether steps are captured.
        epochs: How many epochs are timed.
        before_epoch: Called before each of them; its time does not count.

    Returns:
        ``"epoch"`` and ``"step"`` in seconds, the median over epochs; ``"peak_memory"`` in bytes as allocated and
        ``"reserved_memory"`` as held by PyTorch, ``None`` on a CPU; ``"how"`` in words.
    """
    count = len(loader) if batches is None else batches
    task = NodeClassification.of(Dataset.of(loader.data))
    feed = Feed(model, task, placement=placement, fixed=loader.is_fixed, num_batches=count)
    optimizer = make_optimizer(model, 0.001, 0.0, 0.0)
    engine = Engine(model, optimizer, feed, precision=precision, capture=capture)
    cuda = feed.device.type == "cuda"
    if cuda:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # of earlier work in this process: every measurement pays for its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(feed.device)
    with engine.running():
        model.train()
        seconds = []
        for _ in range(epochs + 2):
            if before_epoch is not None:
                before_epoch()
            # An epoch ends with its loss on the host, so nothing is under way any more.
            seconds.append(
                _seconds(lambda: engine.epoch(islice(loader.ready(), count), then=loader.first_of_next_epoch))
            )
        seconds = seconds[2:]
        how = engine.how
    return {
        "epoch": statistics.median(seconds),
        "step": statistics.median(seconds) / count,
        "peak_memory": torch.cuda.max_memory_allocated(feed.device) if cuda else None,
        "reserved_memory": torch.cuda.max_memory_reserved(feed.device) if cuda else None,
        "how": how,
    }


#: How histories are kept in each column of the step benchmark.
COLUMNS: dict[str, Row] = {
    "device fp32": {"storage": "device"},
    "host fp32": {"storage": "host"},
    "host bf16": {"storage": "host", "dtype": torch.bfloat16},
    "host fp32, serial": {"storage": "host", "overlap": False},
    "host fp32, eager": {"storage": "host", "capture": False},
}


def bench_step(
    setup: Setup, ratios: Sequence[float], device: torch.device, *, layers: int = 4, epochs: int = 5
) -> list[Row]:
    """Time a GIN's training step for growing halos, as in the paper's Figure 4.

    Args:
        setup: The graph.
        ratios: Halo nodes per batch node.
        device: The compute device.
        layers: Number of layers.
        epochs: How many epochs are timed for each number.

    Returns:
        For each ratio the milliseconds of a step per column of ``COLUMNS``; ``"computation"``, how much longer than
        at the first ratio a step with histories on the device takes; and for each column its ``"I/O"``, how much
        longer than with histories on the device.
    """
    rows: list[Row] = []
    for ratio in ratios:
        loader = make_loader(setup, ratio)
        steps: dict[str, float] = {}
        for column, options in COLUMNS.items():
            torch.manual_seed(0)
            model = GIN(setup.features, setup.features, num_layers=layers, out_channels=setup.classes).to(device)
            history = {name: options[name] for name in ("storage", "dtype") if name in options}
            autoscale(model, setup.nodes, **history)
            attached(model).memory.overlap = options.get("overlap", True)
            capture = options.get("capture", True)
            measured = time_epochs(model, loader, batches=setup.batches, capture=capture, epochs=epochs)
            steps[column] = 1e3 * measured["step"]
        base = steps["device fp32"]
        first = rows[0]["milliseconds"]["device fp32"] if rows else base
        rows.append(
            {
                "ratio": ratio,
                "milliseconds": steps,
                "computation": base / first - 1.0,
                "I/O": {column: value / base - 1.0 for column, value in steps.items() if column != "device fp32"},
            }
        )
    return rows


# How much longer than with histories on the device a step has to take for transfers to be told from noise.
_TOLD = 1.1

#: How histories are kept in each row of the storage benchmark.
MEDIA: dict[str, Row] = {
    "device float32": {"storage": "device"},
    "host float32": {"storage": "host"},
    "host float32, serial": {"storage": "host", "overlap": False},
    "host bfloat16": {"storage": "host", "dtype": torch.bfloat16},
    "host float16": {"storage": "host", "dtype": torch.float16},
    "host int8": {"storage": "host", "dtype": torch.int8},
    "host float8": {"storage": "host", "dtype": torch.float8_e4m3fn},
    "disk float32": {"storage": "disk"},
    "disk float32, serial": {"storage": "disk", "overlap": False},
    "disk float32, cold": {"storage": "disk", "cold": True},
    "disk float32, cold, serial": {"storage": "disk", "cold": True, "overlap": False},
    "disk bfloat16": {"storage": "disk", "dtype": torch.bfloat16},
    "disk int8": {"storage": "disk", "dtype": torch.int8},
}


def bench_storage(
    setup: Setup, ratio: float, device: torch.device, folder: Path, *, layers: int = 4, epochs: int = 5
) -> list[Row]:
    """Time a GIN's training step for every medium and precision of histories, on one graph.

    Args:
        setup: The graph.
        ratio: Halo nodes per batch node.
        device: The compute device.
        folder: Where histories on disk go.
        layers: Number of layers.
        epochs: How many epochs are timed for each row.

    Returns:
        A row for each of ``MEDIA``: ``"milliseconds"`` of a step, that ``"to host"`` memory in float32,
        ``"megabytes"`` of rows moved in a step, ``"overlap"``, the share of the time of transfers that steps hide,
        where it was also timed without any overlap, ``"history"`` in bytes, and ``"peak_memory"`` in bytes: on a GPU
        what PyTorch allocated, on a CPU what the process grew by, with pages of files that the system keeps for it.
    """
    loader = make_loader(setup, ratio)
    rows: list[Row] = []
    for name, options in MEDIA.items():
        torch.manual_seed(0)
        model = GIN(setup.features, setup.features, num_layers=layers, out_channels=setup.classes).to(device)
        timed = _time_medium(model, setup, loader, folder, epochs, **options)
        del model  # and its histories with it
        gc.collect()
        moved = timed["history"] // setup.nodes * setup.batch_nodes * (1 + ratio)
        rows.append({"histories": name, "megabytes": 1e-6 * moved, **timed})
    times = {row["histories"]: row["milliseconds"] for row in rows}
    for row in rows:
        name, base = row["histories"], times["device float32"]
        row["to host"] = row["milliseconds"] / times["host float32"]
        serial = times.get(f"{name}, serial")
        # Where transfers without overlap hardly show, there is nothing to tell.
        told = serial is not None and serial > _TOLD * base
        row["overlap"] = (serial - row["milliseconds"]) / (serial - base) if told else None
    return rows


def _time_medium(
    model: nn.Module,
    setup: Setup,
    loader: HaloLoader,
    folder: Path,
    epochs: int,
    *,
    storage: Storage,
    dtype: torch.dtype | None = None,
    overlap: bool = True,
    cold: bool = False,
) -> Row:
    device = next(model.parameters()).device
    with PeakMemory(device) as peak:
        autoscale(model, setup.nodes, storage=storage, dtype=dtype, history_dir=folder if storage == "disk" else None)
        memory = attached(model).memory
        memory.overlap = overlap
        evict = partial(_evict, memory) if cold else None
        timed = time_epochs(model, loader, batches=setup.batches, epochs=epochs, before_epoch=evict)
    size = sum(history.num_bytes for history in memory.histories.values())
    return {"milliseconds": 1e3 * timed["step"], "history": size, "peak_memory": peak.num_bytes}


def _evict(memory: Memory) -> None:
    memory.settle()
    for history in memory.histories.values():
        if isinstance(history, DiskHistory):
            history.evict()


def draw_steps(figure: Any, result: Row) -> None:
    """Draw the milliseconds of a step, and the overhead of histories in host memory.

    Args:
        figure: An empty figure of matplotlib.
        result: The rows of :func:`bench_step` as ``"rows"``, :func:`machine` as ``"machine"``, and as ``"setup"`` the
            fields of :class:`Setup` with the number of layers.
    """
    rows, setup, made_on = result["rows"], result["setup"], result["machine"]
    ratios = [row["ratio"] for row in rows]
    left, right = figure.subplots(1, 2)
    styles = {"device fp32": "k-", "host fp32": "C0o-", "host bf16": "C2s-", "host fp32, serial": "C3^--"}
    names = {
        "device fp32": "on the device",
        "host fp32": "in host memory",
        "host bf16": "in host memory, bf16",
    }
    for column, style in styles.items():
        label = names.get(column, "in host memory, serial")
        left.plot(ratios, [row["milliseconds"][column] for row in rows], style, label=label)
        if column != "device fp32":
            right.plot(ratios, [100 * row["I/O"][column] for row in rows], style, label=label)
    left.set_ylabel("milliseconds per training step")
    right.set_ylabel("I/O overhead (%)")
    left.set_ylim(bottom=0)
    # Small steps on a CPU differ by chance, either way.
    right.set_ylim(bottom=min(0.0, *(100 * value for row in rows for value in row["I/O"].values())))
    for axes in (left, right):
        axes.set_xlabel("halo nodes per batch node")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(
        f"{setup['layers']}-layer GIN, {setup['features']} wide, {setup['batch_nodes']:,} batch nodes, "
        f"{setup['nodes']:,}-node histories, {made_on['gpu'] or made_on['cpu']}",
        fontsize=10,
    )


def bench_io(device: torch.device, *, nodes: int = 1_000_000, rows: int = 100_000, width: int = 256) -> list[Row]:
    """Compare pulls and pushes of random rows with plain copies of as many bytes over the same bus.

    Args:
        device: A GPU.
        nodes: Rows of the history, in pinned host memory.
        rows: How many of them are pulled or pushed.
        width: Values in a row.

    Returns:
        For each type and direction the gigabytes per second and their share of the copy's.
    """
    found: list[Row] = []
    index = torch.randperm(nodes, device=device)[:rows]
    for dtype in (torch.float32, torch.bfloat16):
        history = torch.zeros(nodes, width, dtype=dtype, pin_memory=True)
        near = torch.zeros(rows, width, dtype=dtype, device=device)
        far = history[:rows]
        work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "pull": (partial(gather_rows, history, index, near), partial(near.copy_, far, non_blocking=True)),
            "push": (partial(scatter_rows, near, index, history), partial(far.copy_, near, non_blocking=True)),
        }
        for name, (moved, copied) in work.items():
            speed, bus = (near.nbytes / _gpu_seconds(call) / 1e9 for call in (moved, copied))
            found.append(
                {
                    "what": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "GB/s": speed,
                    "copy GB/s": bus,
                    "share": speed / bus,
                }
            )
    return found


def bench_epoch(setup: Setup, ratio: float, device: torch.device, *, layers: int = 3, width: int = 256) -> list[Row]:
    """Time an epoch of a GCN over all nodes of a large graph, with batches on the device and in host memory.

    Args:
        setup: The graph; its batches cover all nodes.
        ratio: Halo nodes per batch node.
        device: The compute device.
        layers: Number of layers.
        width: Width of the layers between the first and the last.

    Returns:
        What :func:`time_epochs` measures, for both places.
    """
    loader = make_loader(setup, ratio)
    model = GCN(setup.features, width, num_layers=layers, out_channels=setup.classes).to(device)
    autoscale(model, loader.graph.num_nodes, storage="host")
    places: tuple[Placement, ...] = ("device", "host")
    return [{"batches": place, **time_epochs(model, loader, placement=place, epochs=3)} for place in places]


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _gpu_seconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of some work on the GPU, after a warm-up."""
    times: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])
