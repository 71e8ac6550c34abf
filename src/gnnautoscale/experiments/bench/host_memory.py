"""Measure the memory that each phase of training takes, next to what it must take and to a step of plain PyG."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory, resident_memory
from gnnautoscale.attach import autoscale, infer
from gnnautoscale.experiments.bench.graphs import BenchGraph, make_data
from gnnautoscale.experiments.bench.inference import whole_graph_bytes
from gnnautoscale.experiments.bench.measuring import Numbers, free_memory, if_it_fits, wake
from gnnautoscale.experiments.bench.own_loop import make_model, own_step, run_epoch
from gnnautoscale.graph import HaloLoader


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
    rows: list[Numbers] = []
    needed = 0

    def run(phase: str, work: Callable[[], Any], more: int = 0) -> Any:
        nonlocal needed
        needed += more
        numbers, result = _watch(work, device)
        rows.append({"phase": phase, **numbers, "needed": needed, "note": ""})
        return result

    run("start", lambda: None)
    edges = graph.batches * (graph.batch_nodes * graph.degree + int(ratio * graph.batch_nodes) * graph.halo_degree)
    data = run("data", partial(make_data, graph, ratio), 8 * edges + 4 * graph.features * graph.nodes)
    loader = run("loader", lambda: HaloLoader(data, partition=graph.labels, device=device))
    model = make_model(graph, device, layers=layers, width=width)

    def epoch() -> None:
        autoscale(model, data, storage="host")
        run_epoch(own_step(model)[0], loader)

    run("first epoch", epoch, 4 * width * graph.nodes * (layers - 1))
    run("inference", lambda: infer(model, loader), 4 * graph.classes * graph.nodes)
    del loader, model
    free_memory(device)
    plain = partial(_whole_graph_step, graph, data, device, layers, width)
    fits = run("plain PyG, whole graph", partial(if_it_fits, plain, whole_graph_bytes(graph, data, width), device))
    rows[-1]["needed"] = None
    if fits is None:
        rows[-1].update({"peak": None, "device peak": None, "note": "does not fit"})
    return rows


def _whole_graph_step(graph: BenchGraph, data: Data, device: torch.device, layers: int, width: int) -> bool:
    step, _ = own_step(make_model(graph, device, layers=layers, width=width))
    whole = Data(x=data.x, edge_index=data.edge_index, y=data.y, batch_size=data.num_nodes).to(str(device))
    step(whole).item()
    return True


def _watch(work: Callable[[], Any], device: torch.device) -> tuple[Numbers, Any]:
    """The memory of a piece of work, and its result, which is part of what is held after it."""
    with PeakMemory(device) as on_device, PeakMemory(torch.device("cpu")) as in_host:
        before = resident_memory()
        result = work()
    known = before is not None and in_host.num_bytes is not None
    numbers = {
        "resident": resident_memory(),
        "peak": before + in_host.num_bytes if known else None,
        "device peak": on_device.num_bytes if device.type == "cuda" else None,
    }
    return numbers, result
