"""Measure a training step with histories, and one on all nodes its batch depends on (the paper's Table 4)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.attach import autoscale
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.bench import free_memory
from gnnautoscale.graph import HaloLoader, Subgraphs, whole_neighbourhood
from gnnautoscale.models import build_model
from gnnautoscale.tasks import NodeClassification, Task
from gnnautoscale.training import Engine, Optimization, Steps, make_optimizer, plain_item

# Untimed epochs: they build the batches that return, compile kernels and capture steps.
_WARM_UP = 2


def measure_steps(
    dataset: Dataset,
    device: torch.device,
    *,
    method: str,
    batch_nodes: int,
    hidden: int,
    layers: int,
    steps: int,
    epochs: int,
    seed: int = 0,
    cache_dir: str | None = None,
) -> dict[str, Any]:
    """Train a GCN on METIS parts of about ``batch_nodes`` nodes, one part per step, and measure a step.

    The method ``"gas"`` keeps histories and batches in host memory; ``"recursive"`` takes all neighbours of all hops,
    one per layer, and no histories. Both train on the same parts. The loss is over all nodes of the training graph, so
    that every step computes something. An epoch has at most ``steps`` steps.

    Returns:
        ``"step_seconds"``, the median over epochs; ``"build_seconds"``, the part of it that builds batches, 0 for GAS,
        which builds them once; ``"peak_memory"`` in bytes, ``None`` if unknown: on a GPU what PyTorch allocates
        without cuBLAS workspaces, on a CPU what an epoch adds to model, histories and batches; and the mean number of
        ``"nodes"`` and ``"edges"`` per step.
    """
    if method not in _METHODS:
        raise InputError(f"a method is one of {', '.join(_METHODS)}", got=repr(method), fix="Choose one of these.")
    whole = dataset.train
    graph = Data(x=whole.x, edge_index=whole.edge_index, y=whole.y)
    graph.train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
    num_parts = max(1, round(graph.num_nodes / batch_nodes))
    loader = HaloLoader(graph, num_parts, seed=seed, cache_dir=cache_dir)
    count = min(steps, len(loader))
    free_memory(device)
    held = 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(seed)
    task = NodeClassification.of(dataset)
    model = build_model("gcn", graph, task.num_outputs, layers=layers, hidden=hidden).to(device)
    training = _METHODS[method](model, task, loader, layers, count, device)
    memory: int | None = None
    with training.running:
        model.train()
        times = []
        for _ in range(_WARM_UP + epochs):
            start = time.perf_counter()
            building = training.epoch()
            times.append((time.perf_counter() - start, building))
        if device.type == "cpu":
            with PeakMemory(device) as peak:  # in an epoch of its own, because watching takes time
                training.epoch()
            memory = peak.num_bytes
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) - held - free_memory(device)
    sizes = [(batch.num_nodes, batch.num_edges) for batch in training.batches()]
    return {
        "step_seconds": statistics.median(seconds for seconds, _ in times[_WARM_UP:]) / count,
        "build_seconds": statistics.median(building for _, building in times[_WARM_UP:]) / count,
        "peak_memory": memory,
        "nodes": statistics.mean(nodes for nodes, _ in sizes),
        "edges": statistics.mean(edges for _, edges in sizes),
    }


@dataclass(frozen=True)
class _Training:
    """What to enter before training, an epoch that returns the seconds for building batches, and an epoch's batches."""

    running: AbstractContextManager[None]
    epoch: Callable[[], float]
    batches: Callable[[], Iterable[Data]]


def _with_histories(
    model: nn.Module, task: Task, loader: HaloLoader, hops: int, count: int, device: torch.device
) -> _Training:
    autoscale(model, loader.data, storage="host")
    engine = Engine(model, make_optimizer(model, Optimization(lr=0.001)), task, device, placement="host")

    def epoch() -> float:
        engine.epoch(loader, count)
        return 0.0

    return _Training(engine.running(), epoch, lambda: islice(loader, count))


def _on_neighbourhoods(
    model: nn.Module, task: Task, loader: HaloLoader, hops: int, count: int, device: torch.device
) -> _Training:
    subgraphs = Subgraphs(loader.data, loader.graph)
    parts = [loader.nodes_of(group) for group in loader.draw()[:count]]
    building = 0.0

    def call(batch: Data) -> Any:
        return model(batch.x, batch.edge_index)[: batch.batch_size]

    def batches() -> Iterator[Data]:
        nonlocal building
        for nodes in parts:
            start = time.perf_counter()
            batch = whole_neighbourhood(subgraphs, nodes, hops)
            building += time.perf_counter() - start
            yield batch

    def epoch() -> float:
        nonlocal building
        building = 0.0
        trainer.train(plain_item(batch, task, device) for batch in batches())
        return building

    trainer = Steps(model, make_optimizer(model, Optimization(lr=0.001)), task, device, call=call)
    return _Training(trainer.running(), epoch, batches)


_METHODS = {"gas": _with_histories, "recursive": _on_neighbourhoods}
