"""Measure the memory that each phase of training takes, next to what it must take and to a step of plain PyG."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory, resident_memory
from gnnautoscale.attach import autoscale, infer
from gnnautoscale.experiments.bench.graphs import BenchGraph, make_data
from gnnautoscale.experiments.bench.inference import whole_graph_bytes
from gnnautoscale.experiments.bench.measuring import Numbers, free_memory, if_it_fits, wake
from gnnautoscale.experiments.bench.own_loop import make_model, own_step, run_epoch
from gnnautoscale.graph import HaloLoader

T = TypeVar("T")


def bench_memory(
    graph: BenchGraph, ratio: float, device: torch.device, *, layers: int = 3, width: int = 256
) -> list[Numbers]:
    """Measure host and GPU memory while a GCN trains for an epoch and infers, histories in host memory.

    Returns for each ``"phase"``, in bytes and ``None`` where unknown: ``"resident"``, what the process holds in host
    memory after it; ``"peak"``, the most it held during it; ``"device peak"``, what PyTorch allocated on a GPU;
    ``"needed"``, what of the graph and the model must be held somewhere: two 4-byte integers per edge, features,
    histories and outputs in float32; and a ``"note"`` if something does not fit. The last phase is plain PyG's: a
    training step on the whole graph.
    """
    wake(device)
    free_memory(device)
    phases = _Phases(device)
    phases.run("start", lambda: None)
    edges = graph.batches * (graph.batch_nodes * graph.degree + int(ratio * graph.batch_nodes) * graph.halo_degree)
    needed = 8 * edges + 4 * graph.features * graph.nodes
    data = phases.run("data", lambda: make_data(graph, ratio), needed)
    _train_and_infer(phases, graph, data, layers, width, needed)
    free_memory(device)
    step = partial(_whole_graph_step, graph, data, device, layers, width)
    needed = whole_graph_bytes(graph, data, width)
    if phases.run("plain PyG, whole graph", lambda: if_it_fits(step, needed, device)) is None:
        phases.rows[-1].update({"peak": None, "device peak": None, "note": "does not fit"})
    return phases.rows


class _Phases:
    """Runs phases one after the other, and collects what was measured in each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: list[Numbers] = []

    def run(self, name: str, work: Callable[[], T], needed: int | None = None) -> T:
        """Run a phase; its result is part of what is held after it."""
        with PeakMemory(self.device) as on_device, PeakMemory(torch.device("cpu")) as in_host:
            before = resident_memory()
            result = work()
        grown = in_host.num_bytes
        numbers = {
            "resident": resident_memory(),
            "peak": None if before is None or grown is None else before + grown,
            "device peak": on_device.num_bytes if self.device.type == "cuda" else None,
        }
        self.rows.append({"phase": name, **numbers, "needed": needed, "note": ""})
        return result


def _train_and_infer(phases: _Phases, graph: BenchGraph, data: Data, layers: int, width: int, needed: int) -> None:
    loader = phases.run("loader", lambda: HaloLoader(data, partition=graph.labels, device=phases.device), needed)
    model = make_model(graph, phases.device, layers=layers, width=width)

    def epoch() -> None:
        autoscale(model, data, storage="host")
        run_epoch(own_step(model)[0], loader)

    needed += 4 * width * graph.nodes * (layers - 1)
    phases.run("first epoch", epoch, needed)
    phases.run("inference", lambda: infer(model, loader), needed + 4 * graph.classes * graph.nodes)


def _whole_graph_step(graph: BenchGraph, data: Data, device: torch.device, layers: int, width: int) -> bool:
    step, _ = own_step(make_model(graph, device, layers=layers, width=width))
    whole = Data(x=data.x, edge_index=data.edge_index, y=data.y, batch_size=data.num_nodes).to(str(device))
    step(whole).item()
    return True
