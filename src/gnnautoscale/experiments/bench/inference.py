"""Time exact inference over a whole graph, next to plain PyG's pass over the whole graph at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import remove_self_loops, to_torch_csr_tensor  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.attach import autoscale, infer
from gnnautoscale.experiments.bench.graphs import BenchGraph, make_data
from gnnautoscale.experiments.bench.measuring import Numbers, free_memory, if_it_fits, timed, wake
from gnnautoscale.experiments.bench.own_loop import make_model
from gnnautoscale.graph import HaloLoader


def bench_infer(
    graph: BenchGraph, ratio: float, device: torch.device, *, layers: int = 3, width: int = 256, repeats: int = 3
) -> list[Numbers]:
    """Time ``gas.infer`` on a GCN, histories in host memory, next to the plain model on the whole graph at once.

    All take features and edges from host memory and leave the output there. Plain PyG gets the edges as an
    ``edge_index``, and as a sparse matrix, which needs less memory.

    Returns for each of these ``"ways"``: the ``"first"`` time in ``"seconds"`` and the median of those after it;
    ``"to PyG"``, the ratio to the fastest plain one; ``"peak_memory"`` in bytes: what PyTorch allocated on a GPU, or by
    how much the process grew on a CPU; and for the plain ones ``"difference"``, the largest of ``gas.infer`` to their
    output, relative to the largest output. All are ``None`` if the memory does not suffice.
    """
    wake(device)
    data = make_data(graph, ratio)
    numbers, exact = _run_gas(graph, data, device, layers, width, repeats)
    rows = [{"way": "gas.infer", **numbers, "difference": None}]
    rows += [
        {"way": f"plain PyG, {name}", **_run_plain(graph, data, edges, exact, device, layers, width, repeats)}
        for name, edges in (("edge_index", _as_they_are), ("sparse matrix", _as_matrix))
    ]
    known = [row["seconds"] for row in rows[1:] if row["seconds"] is not None]
    for row in rows:
        row["to PyG"] = row["seconds"] / min(known) if known and row["seconds"] is not None else None
    return rows


def whole_graph_bytes(graph: BenchGraph, data: Data, width: int) -> int:
    """What plain PyG needs for a layer on the whole graph: messages of all edges, before and after their weights."""
    num_edges: int = data.num_edges
    return 2 * 4 * max(width, graph.classes) * (num_edges + graph.nodes)


def _run_gas(
    graph: BenchGraph, data: Data, device: torch.device, layers: int, width: int, repeats: int
) -> tuple[Numbers, Tensor]:
    loader = HaloLoader(data, partition=graph.labels, device=device)
    model = autoscale(make_model(graph, device, layers=layers, width=width), data, storage="host")
    return _repeat(lambda: infer(model, loader), device, repeats)


def _run_plain(
    graph: BenchGraph,
    data: Data,
    edges: Callable[[Data], Tensor],
    exact: Tensor,
    device: torch.device,
    layers: int,
    width: int,
    repeats: int,
) -> Numbers:
    model = make_model(graph, device, layers=layers, width=width).eval()
    adjacency = edges(data)
    needed = whole_graph_bytes(graph, data, width) if edges is _as_they_are else 0

    @torch.no_grad()
    def run() -> Tensor:
        out: Tensor = model(data.x.to(device), adjacency.to(device)).cpu()
        return out

    found = if_it_fits(lambda: _repeat(run, device, repeats), needed, device)
    if found is None:
        return dict.fromkeys(("first", "seconds", "peak_memory", "difference"))
    numbers, out = found
    return {**numbers, "difference": ((exact - out).abs().max() / out.abs().max()).item()}


def _repeat(work: Callable[[], Any], device: torch.device, repeats: int) -> tuple[Numbers, Any]:
    """The times and the memory of a piece of work, and its last result."""
    free_memory(device)
    with PeakMemory(device) as peak:
        first, result = timed(work, device)
        seconds = []
        for _ in range(repeats):
            again, result = timed(work, device)
            seconds.append(again)
    return {"first": first, "seconds": statistics.median(seconds), "peak_memory": peak.num_bytes}, result


def _as_they_are(data: Data) -> Tensor:
    edges: Tensor = data.edge_index
    return edges


def _as_matrix(data: Data) -> Tensor:
    """The transposed adjacency, as PyG's layers take it, which add self-loops to it."""
    edges, _ = remove_self_loops(data.edge_index)
    # Said explicitly, because PyTorch would warn that it does not check them.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        matrix: Tensor = to_torch_csr_tensor(edges.flip(0), torch.ones(edges.size(1)), size=data.num_nodes)
    return matrix
