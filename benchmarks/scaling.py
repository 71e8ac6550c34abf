"""Time and memory of preparation, training and inference as a graph grows, beside what the cost model says.

    python benchmarks/scaling.py --times 1,10 --device cuda --output scaling.json

Graphs are ogbn-products' size times these factors, in parts of the same size; the model is a GCN of three layers, 256
wide, with histories in host memory. Each size runs in a process of its own. ``docs/scaling.md`` explains the model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale._util import resident_memory
from gnnautoscale.experiments.bench import PRODUCTS, BenchGraph, make_data

LAYERS, WIDTH, RATIO = 3, 256, 2.0


def bytes_of(graph: BenchGraph, num_edges: int, row_bytes: int) -> dict[str, int]:
    """What the cost model says about host memory."""
    return {
        "edge_index": 16 * num_edges,
        "tables of edges": 8 * num_edges + 8 * graph.nodes,
        "a record with self-loops": 8 * (num_edges + graph.nodes),
        "features": 4 * graph.features * graph.nodes,
        "histories": (LAYERS - 1) * row_bytes * graph.nodes,
    }


def measure(graph: BenchGraph, device: torch.device, dtype: str | None) -> dict[str, Any]:
    """Prepare, train for two epochs and infer."""
    found: dict[str, Any] = {"nodes": graph.nodes, "parts": graph.batches, "history_dtype": dtype or "float32"}
    cuda = device.type == "cuda"

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(device)
        found[name] = {
            "seconds": time.perf_counter() - start,
            "resident": resident_memory(),
            "most resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "GPU": torch.cuda.max_memory_allocated(device) if cuda else None,
        }
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)

    torch.manual_seed(0)
    with phase("generate"):
        data = make_data(graph, RATIO, drawn_on=device)
    found["edges"] = data.edge_index.size(1)
    row_bytes = WIDTH * (torch.finfo(getattr(torch, dtype)).bits // 8 if dtype else 4)
    found["bytes"] = bytes_of(graph, found["edges"], row_bytes)
    with phase("loader"):
        loader = gas.HaloLoader(data, partition=graph.labels, device=device)
    with phase("model"):
        model = GCN(graph.features, WIDTH, num_layers=LAYERS, out_channels=graph.classes).to(device)
        gas.autoscale(model, data, storage="host", dtype=None if dtype is None else getattr(torch, dtype))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> None:
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x, batch.edge_index), batch.y[: batch.batch_size]).backward()
            optimizer.step()

    with phase("first step"):
        batch = next(iter(loader))
        model(batch.x, batch.edge_index).sum().backward()
    for name in ("first epoch", "epoch"):
        with phase(name):
            epoch()
    with phase("inference"):
        gas.infer(model, loader)
    return found


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    """Measure in a process of its own, so that its peak memory is its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", default="1", help="Factors, separated by commas.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--history-dtype", help="Such as bfloat16.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", action="store_true", help="One size, in this process.")
    given = parser.parse_args()
    if given.here:
        parts = round(float(given.times) * PRODUCTS.batches)
        graph = replace(PRODUCTS, nodes=parts * PRODUCTS.batch_nodes, batches=parts)
        print(json.dumps(measure(graph, torch.device(given.device), given.history_dtype)))
        return
    further = ["--history-dtype", given.history_dtype] if given.history_dtype else []
    found = []
    for times in given.times.split(","):
        found.append(in_a_process(["--here", "--times", times, "--device", given.device, *further]))
        if given.output:
            given.output.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
