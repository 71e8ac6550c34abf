"""Time a user's own training loop, plain and captured, on fixed and on drawn batches, next to the loop of plain PyG."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.attach import autoscale
from gnnautoscale.experiments.bench.graphs import BenchGraph, make_data
from gnnautoscale.experiments.bench.measuring import Numbers, free_memory, timed, wake
from gnnautoscale.graph import HaloLoader
from gnnautoscale.replay import capture

#: The loops that are compared.
LOOPS = ("plain PyG", "GAS", "GAS, captured")
# Epochs that are not timed: they build the batches that return, compile kernels and capture steps.
_WARM_UP = 2


def make_model(graph: BenchGraph, device: torch.device, *, layers: int, width: int) -> nn.Module:
    """A GCN for a graph, always with the same weights."""
    torch.manual_seed(0)
    model: nn.Module = GCN(graph.features, width, num_layers=layers, out_channels=graph.classes)
    return model.to(device)


def own_step(model: nn.Module) -> tuple[Callable[[Data], Tensor], torch.optim.Optimizer]:
    """The training step that a user would write for a model, autoscaled or not, and its optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def step(batch: Data) -> Tensor:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step, optimizer


def run_epoch(step: Callable[[Data], Tensor], batches: Iterable[Data]) -> int:
    """Run a step on all batches and wait for the sum of the losses; returns the number of batches."""
    losses = [step(batch) for batch in batches]
    torch.stack(losses).sum().item()
    return len(losses)


def plain_batches(batches: Iterable[Data], device: torch.device) -> Iterator[Data]:
    """A loader's batches in host memory as those of PyG's loaders are: plain tensors, moved when they are used."""
    for batch in batches:
        plain = Data(x=batch.x, edge_index=batch.edge_index.plain, y=batch.y, batch_size=batch.batch_size)
        yield plain.to(str(device))


def bench_loop(
    graph: BenchGraph,
    ratio: float,
    device: torch.device,
    *,
    layers: int = 3,
    width: int = 256,
    together: int = 10,
    epochs: int = 3,
) -> list[Numbers]:
    """Time epochs of a GCN in a user's own loop, histories in host memory, next to plain PyG on the same batches.

    Batches are fixed, one part each, or drawn anew every epoch, ``together`` parts that are smaller by this factor.
    Plain PyG has the same model, step and batches, but no histories: what it computes for halo nodes is not exact.

    Returns for both kinds of ``"batches"`` and each of ``LOOPS``, after two epochs of warm-up: ``"epoch"`` in seconds
    (median); ``"milliseconds"`` of a step; ``"first epoch"`` in seconds; ``"to PyG"``, the ratio to plain PyG's epoch;
    ``"peak_memory"`` in bytes: what PyTorch allocated on a GPU, or by how much the process grew on a CPU, loader
    included; and ``"how"`` steps ran.
    """
    wake(device)
    size = graph.batch_nodes // together
    small = replace(graph, batch_nodes=size, batches=graph.batches * together)
    rows: list[Numbers] = []
    for name, parts, count in (("fixed", graph, 1), ("drawn", small, together)):
        data = make_data(parts, ratio)
        for loop in LOOPS:
            free_memory(device)
            with PeakMemory(device) as peak:
                place = torch.device("cpu") if loop == "plain PyG" else device
                loader = HaloLoader(data, partition=parts.labels, batch_size=count, shuffle=count > 1, device=place)
                numbers = _time_loop(
                    loop, make_model(graph, device, layers=layers, width=width), loader, device, epochs
                )
            rows.append({"batches": name, "loop": loop, **numbers, "peak_memory": peak.num_bytes})
            rows[-1]["to PyG"] = numbers["epoch"] / rows[-1 - LOOPS.index(loop)]["epoch"]
            del loader
    return rows


def _time_loop(loop: str, model: nn.Module, loader: HaloLoader, device: torch.device, epochs: int) -> Numbers:
    step, optimizer = own_step(model)
    batches: Callable[[], Iterable[Data]] = partial(iter, loader)
    captured = None
    if loop == "plain PyG":
        batches = partial(plain_batches, loader, device)
    else:
        autoscale(model, loader.data, storage="host")
    if loop == "GAS, captured":
        step = captured = capture(model, step, optimizer)
    seconds = [timed(lambda: run_epoch(step, batches()), device)[0] for _ in range(_WARM_UP + epochs)]
    epoch = statistics.median(seconds[_WARM_UP:])
    how = "in Python" if captured is None else captured.how
    return {"epoch": epoch, "milliseconds": 1e3 * epoch / len(loader), "first epoch": seconds[0], "how": how}
