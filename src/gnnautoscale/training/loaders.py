"""The loaders of a run: batches of parts with their halo, or the baselines' subgraphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset, TypedDataset, TypedLinks
from gnnautoscale.graph import ClusterLoader, Graph, HaloLoader, SampleLoader, TypedGraph
from gnnautoscale.tasks import Task
from gnnautoscale.training.options import FitOptions


def halo_loaders(
    dataset: Dataset, task: Task, options: FitOptions, labels: Tensor | None = None
) -> dict[str, HaloLoader]:
    """One loader for each split; splits of the same graph share it.

    ``labels`` holds the part of each node of the training graph, ``[num_nodes]``, if it is already cut.
    """
    typed, graph = isinstance(dataset, TypedDataset), dataset.passing()
    names = ("partition", "balance", "seed", "num_workers", "cache_dir")
    common: dict[str, Any] = {"keep": options.keep_batches, **{name: getattr(options, name) for name in names}}
    if torch.device(options.device).type == "cuda":
        common["device"] = options.device
    train = {**common, "batch_size": options.batch_size, "shuffle": True, "drawings": options.drawings}
    labels = _cut(task, graph, options.num_parts, options.batch_size, options) if labels is None else labels
    if labels is not None:
        train["partition"] = labels
    if options.compensate != "none":
        train["bidirectional"] = typed or not Graph.of(graph).is_symmetric
    loader = HaloLoader(graph, options.num_parts if labels is None else None, **train)
    made = {id(graph): loader}
    for split in ("val", "test"):
        other = dataset.passing(split)
        if id(other) in made:
            continue
        if typed:  # the same nodes, and so the same parts
            parts = {"partition": loader.labels, "batch_size": loader.batch_size}
            made[id(other)] = HaloLoader(other, **{**common, **parts})
            continue
        # Batches of other graphs have about as many nodes as those of the training graph.
        share = other.num_nodes / graph.num_nodes
        count = min(max(1, round(options.num_parts / options.batch_size * share)), other.num_nodes)
        known = _cut(task, other, count, 1, options)
        cut = {} if known is None else {"partition": known}
        made[id(other)] = HaloLoader(other, count if known is None else None, **{**common, **cut})
    return {split: made[id(dataset.passing(split))] for split in ("train", "val", "test")}


def subgraph_loader(dataset: Dataset, task: Task, options: FitOptions) -> ClusterLoader | SampleLoader:
    """A loader of joined parts, or with a fan-out of as many sampled neighbourhoods of what the task trains on."""
    graph = dataset.passing()
    common: dict[str, Any] = {"seed": options.seed, "num_workers": options.num_workers}
    if options.fan_out is None:
        labels = _cut(task, graph, options.num_parts, options.batch_size, options)
        common |= {"partition": options.partition if labels is None else labels, "balance": options.balance}
        common["cache_dir"] = options.cache_dir
        count = options.num_parts if labels is None else None
        return ClusterLoader(graph, count, batch_size=options.batch_size, shuffle=True, **common)
    count = -(-options.num_parts // options.batch_size)
    if not isinstance(dataset, TypedDataset) or isinstance(dataset, TypedLinks):
        return task.sampled(graph, options.fan_out, count, **common)
    rows, _ = task.targets_of_graph(dataset.train)
    nodes = torch.arange(dataset.train.num_nodes) if rows is None else rows
    nodes = nodes + TypedGraph.of(graph).first[dataset.target]
    return SampleLoader(graph, nodes, options.fan_out, count, **common)


def _cut(task: Task, graph: Data, num_parts: int, batch_size: int, options: FitOptions) -> Tensor | None:
    """The parts of a graph, if the task cuts it."""
    how = {"method": options.partition, "seed": options.seed, "cache_dir": options.cache_dir}
    return task.cut(graph, num_parts, batch_size, **how)
