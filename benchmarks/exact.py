"""Time and memory of an exact step: full batch in the memory of one batch.

    python benchmarks/exact.py --device cuda --output exact.json

On a generated graph of ogbn-products' size, or a share of it, a GCN and a GraphSAGE of three layers, 256 wide, with
histories in host memory: a step of ``gas.exact_forward`` with a loss in host memory, a step of ``fit(mode="exact")``,
an epoch of GAS on the same batches, and a step on the whole graph if it fits: with GAS's fused products as one part,
and with plain PyG.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN, GraphSAGE  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.experiments.bench import PRODUCTS, BenchGraph, make_data, time_epochs

MODELS = {"GCN": GCN, "GraphSAGE": GraphSAGE}
WAYS = ["exact", "exact in fit", "GAS epoch", "GAS epoch, batches in host memory", "full batch, fused", "full batch"]
RATIO, WIDTH, STEPS = 2.0, 256, 5


def measured(step: Callable[[], Any], device: torch.device, steps: int = STEPS) -> dict[str, Any]:
    """Median seconds of a step after the first, and the most GPU memory that it took."""
    on_gpu = device.type == "cuda"
    for _ in range(2):  # the second one is captured
        step()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return {"seconds": statistics.median(seconds), "GPU": peak}


def of_loss(model: nn.Module, output: Callable[[], Tensor], y: Tensor) -> Callable[[], None]:
    """A step of Adam on the loss of all nodes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(output(), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ways(name: str, graph: BenchGraph, data: Data, device: torch.device) -> dict[str, Callable[[], Any]]:
    """All ways to train one model."""
    made = []

    def loader(partition: Tensor = graph.labels) -> gas.HaloLoader:  # another one each time: it may keep batches
        return gas.HaloLoader(data, partition=partition, device=device)

    def model() -> nn.Module:
        torch.manual_seed(0)
        found: nn.Module = MODELS[name](graph.features, WIDTH, num_layers=3, out_channels=graph.classes).to(device)
        return found

    def scaled() -> nn.Module:  # its histories serve all ways
        if not made:
            made.append(gas.autoscale(model(), data, storage="host"))
        return made[0]

    def own_loop() -> dict[str, Any]:
        return measured(of_loss(scaled(), partial(gas.exact_forward, scaled(), loader()), data.y), device)

    def one_part() -> dict[str, Any]:
        whole = gas.autoscale(model(), data, storage="device")
        return time_epochs(whole, loader(torch.zeros(graph.nodes, dtype=torch.long)), epochs=STEPS)

    def plain() -> dict[str, Any]:
        plain, whole = model(), data.clone().to(str(device))
        return measured(of_loss(plain, lambda: plain(whole.x, whole.edge_index), whole.y), device)

    return {
        "exact": own_loop,
        "exact in fit": lambda: time_epochs(scaled(), loader(), epochs=STEPS, exact=True),
        "GAS epoch": lambda: time_epochs(scaled(), loader(), epochs=STEPS),
        "GAS epoch, batches in host memory": lambda: time_epochs(scaled(), loader(), epochs=STEPS, placement="host"),
        "full batch, fused": one_part,
        "full batch": plain,
    }


def compare(name: str, graph: BenchGraph, data: Data, device: torch.device, chosen: list[str]) -> dict[str, Any]:
    """Measure some ways to train one model."""
    found: dict[str, Any] = {"model": name, "nodes": graph.nodes, "edges": data.edge_index.size(1)}
    for way, run in ways(name, graph, data, device).items():
        if way not in chosen:
            continue
        try:
            found[way] = run()
        except torch.OutOfMemoryError:
            found[way] = "does not fit"
        print(name, way, found[way], flush=True)
        gc.collect()
    found["host memory"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def main() -> None:
    """Measure the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", type=float, default=1.0, help="Of ogbn-products' size.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device, parts = torch.device(given.device), max(1, round(given.share * PRODUCTS.batches))
    graph = replace(PRODUCTS, nodes=parts * PRODUCTS.batch_nodes, batches=parts)
    data = make_data(graph, min(RATIO, parts - 1), drawn_on=device)
    found = [compare(name, graph, data, device, given.ways) for name in given.models]
    if given.output:
        given.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
