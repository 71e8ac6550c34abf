"""Measures a training step with histories, and one on everything that its batch depends on (the paper's Table 4)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.attach import autoscale
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader, Subgraphs, whole_neighbourhood
from gnnautoscale.models import build_model
from gnnautoscale.tasks import NodeClassification, Task
from gnnautoscale.training import Engine, Feed, Item, Steps, make_optimizer, plain_item

# Epochs before measuring: they cut the batches that come back, compile kernels and capture steps.
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
    """Train a GCN on METIS parts, one after the other, and take time and memory of a step.

    Both methods train on the same sets of nodes. All nodes have a part in the loss, so that no step is left out.

    Args:
        dataset: Its training graph is used.
        device: Where to compute.
        method: ``"gas"``, with histories and batches in host memory, or ``"recursive"``, with all neighbours of all
            hops and without histories.
        batch_nodes: About how many nodes a part has.
        hidden: Width of the GCN's layers.
        layers: Number of layers, and of hops.
        steps: How many parts an epoch has, at most.
        epochs: How many epochs are timed.
        seed: Of partition and weights.
        cache_dir: Where partitions are kept.

    Returns:
        ``"step_seconds"``, the median over epochs, and how much of it the building of batches takes,
        ``"build_seconds"``: none for GAS, whose batches come back and are built once. ``"peak_memory"`` in bytes, or
        ``None`` where it cannot be measured: on a GPU everything that PyTorch allocates, but for cuBLAS's work space;
        on a CPU what an epoch adds to model, histories and batches that are there already. ``"nodes"`` and
        ``"edges"`` of a step, the mean over parts.

    Example:
        >>> from gnnautoscale.data import datasets
        >>> graph = datasets.load("communities", nodes=60, degree=4.0, classes=3)
        >>> sizes = {"batch_nodes": 15, "hidden": 4, "layers": 2, "steps": 2, "epochs": 1}
        >>> gas, whole = (measure_steps(graph, torch.device("cpu"), method=m, **sizes) for m in ("gas", "recursive"))
        >>> gas["nodes"] <= whole["nodes"]
        True
    """
    if method not in _METHODS:
        raise InputError(f"a method is one of {', '.join(_METHODS)}", got=repr(method), fix="Choose one of these.")
    whole = dataset.train
    graph = Data(x=whole.x, edge_index=whole.edge_index, y=whole.y)
    graph.train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
    parts = max(1, round(graph.num_nodes / batch_nodes))
    loader = HaloLoader(graph, parts, seed=seed, cache_dir=cache_dir)
    count = min(steps, len(loader))
    _free_work_space(device)
    held = 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(seed)
    task = NodeClassification.of(dataset)
    model = build_model("gcn", graph, task.num_outputs, layers=layers, hidden=hidden).to(device)
    training = _METHODS[method](model, task, loader, layers, count, device)
    memory: int | None = None
    with training.running():
        model.train()
        times = [training.epoch() for _ in range(_WARM_UP + epochs)][_WARM_UP:]
        if device.type == "cpu":
            with PeakMemory(device) as peak:  # not while times are taken: it takes time itself
                training.epoch()
            memory = peak.num_bytes
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) - held - _free_work_space(device)
    sizes = list(training.sizes())
    return {
        "step_seconds": statistics.median(seconds for seconds, _ in times) / count,
        "build_seconds": statistics.median(building for _, building in times) / count,
        "peak_memory": memory,
        "nodes": statistics.mean(nodes for nodes, _ in sizes),
        "edges": statistics.mean(edges for _, edges in sizes),
    }


class _WithHistories:
    """GAS on the first parts of a loader."""

    def __init__(
        self, model: nn.Module, task: Task, loader: HaloLoader, hops: int, count: int, device: torch.device
    ) -> None:
        autoscale(model, loader.data, storage="host")
        feed = Feed(model, task, placement="host", fixed=loader.is_fixed, num_batches=count)
        self._engine = Engine(model, make_optimizer(model, 0.001, 0.0, 0.0), feed)
        self._loader, self._count = loader, count

    def running(self) -> AbstractContextManager[None]:
        return self._engine.running()

    def epoch(self) -> tuple[float, float]:
        """Train on all parts; gives the seconds, and those for building batches."""
        start = time.perf_counter()
        batches = islice(self._loader.ready(), self._count)
        self._engine.epoch(batches, then=self._loader.first_of_next_epoch)  # ends with its loss on the host
        return time.perf_counter() - start, 0.0

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Nodes and edges of each batch."""
        return ((batch.num_nodes, batch.num_edges) for batch in islice(self._loader, self._count))


class _OnNeighbourhoods:
    """A plain model on the first parts of a loader, with all neighbours of all hops, which are built for each step."""

    def __init__(
        self, model: nn.Module, task: Task, loader: HaloLoader, hops: int, count: int, device: torch.device
    ) -> None:
        self._subgraphs = Subgraphs(loader.data, loader.graph)
        self._nodes = [loader.nodes_of(group) for group in loader.draw()[:count]]
        self._hops, self._device = hops, device

        def call(batch: Data) -> Any:
            return model(batch.x, batch.edge_index)[: batch.batch_size]

        optimizer = make_optimizer(model, 0.001, 0.0, 0.0)
        self._steps = Steps(model, optimizer, task, device, call=call)
        self._building = 0.0

    def running(self) -> AbstractContextManager[None]:
        return self._steps.running()

    def epoch(self) -> tuple[float, float]:
        self._building, start = 0.0, time.perf_counter()
        self._steps.train(self._items())
        return time.perf_counter() - start, self._building

    def sizes(self) -> Iterator[tuple[int, int]]:
        return ((batch.num_nodes, batch.num_edges) for batch in self._batches())

    def _items(self) -> Iterator[Item]:
        return (plain_item(batch, self._steps.task, self._device) for batch in self._batches())

    def _batches(self) -> Iterator[Data]:
        for nodes in self._nodes:
            start = time.perf_counter()
            batch = whole_neighbourhood(self._subgraphs, nodes, self._hops)
            self._building += time.perf_counter() - start
            yield batch


_METHODS: dict[str, type[_WithHistories] | type[_OnNeighbourhoods]] = {
    "gas": _WithHistories,
    "recursive": _OnNeighbourhoods,
}


def _free_work_space(device: torch.device) -> int:
    """Free what cuBLAS keeps on a GPU; gives its bytes: many for a small batch, and as many for any other."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)
