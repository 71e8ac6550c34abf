"""Time what happens before training is under way, phase by phase, next to what plain PyG does in its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.loader import ClusterData, NeighborLoader  # type: ignore[import-untyped]
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE  # type: ignore[import-untyped]

from gnnautoscale.attach import autoscale
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.bench.graphs import BenchGraph, make_data
from gnnautoscale.experiments.bench.measuring import Numbers, timed, wake
from gnnautoscale.experiments.bench.own_loop import make_model, own_step, plain_batches
from gnnautoscale.graph import HaloLoader, Partitioner, partition


def bench_start(
    graph: BenchGraph,
    ratio: float,
    device: torch.device,
    *,
    layers: int = 3,
    width: int = 256,
    partitioners: Sequence[Partitioner] = ("metis", "kaminpar"),
) -> list[Numbers]:
    """Time each phase from a graph in memory to the second training step of a GCN, next to plain PyG.

    PyG cuts with ``ClusterData`` and makes a ``NeighborLoader``; its steps run on batches that are built already. The
    parts are those of the last partitioner, or those the graph was generated with if there is none.

    Returns for each ``"phase"``: ``"seconds"`` of GAS and ``"PyG seconds"``, ``None`` where there is nothing to do or
    something is not installed; ``"to PyG"``, their ratio; and a ``"note"`` that says what is missing.
    """
    wake(device)
    data, labels = make_data(graph, ratio), graph.labels
    rows: list[Numbers] = []

    def add(phase: str, gas: float | None, pyg: float | None, note: str = "") -> None:
        compared = None if gas is None or pyg is None else gas / pyg
        rows.append({"phase": phase, "seconds": gas, "PyG seconds": pyg, "to PyG": compared, "note": note})

    for method in partitioners:
        cut = partial(partition, data.edge_index, data.num_nodes, graph.batches, method=method)
        seconds, found, missing = _try(cut, device)
        labels = labels if found is None else found
        pyg, absent = None, ""
        if method == "metis":  # the only one that PyG has
            pyg, _, absent = _try(partial(ClusterData, data, graph.batches, log=False), device)
        add(f"partition, {method}", seconds, pyg, missing or absent)
    seconds, loader = timed(lambda: HaloLoader(data, partition=labels, device=device), device)
    make = partial(NeighborLoader, data, num_neighbors=[-1], batch_size=graph.batch_nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the note says it
        pyg, _, absent = _try(make, device)
    samples = WITH_PYG_LIB or WITH_TORCH_SPARSE
    add("loader", seconds, pyg, absent if samples else "'NeighborLoader' samples only with 'pyg-lib' or 'torch-sparse'")
    model = make_model(graph, device, layers=layers, width=width)
    add("autoscale", timed(lambda: autoscale(model, data, storage="host"), device)[0], None)
    steps = _time_steps(model, chain(loader, loader), device)
    plain = make_model(graph, device, layers=layers, width=width)
    built = list(islice(HaloLoader(data, partition=labels), 2))
    plain_steps = _time_steps(plain, plain_batches(chain(built, built), device), device)
    for phase, gas_step, plain_step in zip(("first step", "second step"), steps, plain_steps, strict=True):
        add(phase, gas_step, plain_step)
    return rows


def _time_steps(model: nn.Module, batches: Iterable[Data], device: torch.device) -> list[float]:
    """The seconds of the first two steps, each with the time to get its batch."""
    step, _ = own_step(model)
    waiting = iter(batches)
    return [timed(lambda: step(next(waiting)), device)[0] for _ in range(2)]


def _try(work: Callable[[], Any], device: torch.device) -> tuple[float | None, Any, str]:
    """The seconds and the result of a piece of work, or what is not installed for it."""
    try:
        return *timed(work, device), ""
    except (ImportError, InputError) as error:
        return None, None, str(error).splitlines()[0]
