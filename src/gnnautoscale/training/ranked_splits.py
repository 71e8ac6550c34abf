"""Training on several ranks where scores take the whole data set: links, graphs, own tasks, a graph for each split.

Every rank has the whole data set and computes on its share of each graph. Targets of links and graphs, and perhaps
those of a task of the user's own, know nodes by their numbers in the whole graph.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset, TypedDataset
from gnnautoscale.graph import fingerprint, without_targets
from gnnautoscale.ranks import RankLoader
from gnnautoscale.tasks import Task
from gnnautoscale.training.identity import targets_of
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.ranked import RankStrategy, rank_loader, share_of
from gnnautoscale.training.typed_ranked import TypedRankStrategy

_SPLITS = ("train", "val", "test")


def strategy_on_ranks(
    model: nn.Module,
    dataset: Dataset,
    shards: Path | Data,
    optimizer: torch.optim.Optimizer,
    task: Task,
    options: FitOptions,
    labels: Tensor | None,
) -> tuple[RankStrategy, Dataset]:
    """How this rank trains, and the data set that it scores.

    ``shards`` is a folder of them, or the training graph of the data set. ``labels`` holds the part of each node of
    that graph, ``[num_nodes]``, if it is already cut.
    """
    typed = isinstance(dataset, TypedDataset)
    if isinstance(shards, Path) or (task.knows_rows_only and not dataset.inductive):
        loader = rank_loader(shards, options, labels)
        share = share_of(dataset, loader)
        whole = None if isinstance(shards, Path) else dataset
        loaders = dict.fromkeys(_SPLITS, loader)
        kind = TypedRankStrategy if typed else RankStrategy
        return kind(model, share, loaders, optimizer, task, options, whole=whole), share
    loaders = _loaders(dataset, task, options, labels)
    of_splits = TypedSplitStrategy if typed else SplitStrategy
    return of_splits(model, dataset, loaders, optimizer, task, options), dataset


def _loaders(dataset: Dataset, task: Task, options: FitOptions, labels: Tensor | None) -> dict[str, RankLoader]:
    """A loader of this rank for each split."""
    how: dict[str, Any] = {"method": options.partition, "seed": options.seed, "cache_dir": options.cache_dir}
    train = dataset.passing()
    if labels is None:
        labels = task.cut(train, options.num_parts, options.batch_size, **how)
    loader = rank_loader(without_targets(train), options, labels)
    made = {id(train): loader}
    for graph in (dataset.passing(split) for split in _SPLITS):
        if id(graph) in made:
            continue
        # Batches have about as many nodes as those of the training graph, and each rank has one at least.
        share = graph.num_nodes / train.num_nodes
        count = min(max(round(options.num_parts / options.batch_size * share), loader.world.size), graph.num_nodes)
        cut = task.cut(graph, count, 1, **how)
        made[id(graph)] = RankLoader(
            without_targets(graph),
            count if cut is None else None,
            partition=options.partition if cut is None else cut,
            cache_dir=options.cache_dir,
            balance=options.balance,
            seed=options.seed,
            keep=options.keep_batches,
            device=loader.device,
            num_workers=options.num_workers,
        )
    return {split: made[id(dataset.passing(split))] for split in _SPLITS}


class _Numbered:
    """A batch whose ``n_id`` are the numbers of its nodes in the whole graph, not in the rank's share of it."""

    def __init__(self, loader: RankLoader) -> None:
        self._nodes: Tensor = loader.shard.nodes

    def __call__(self, batch: Data) -> Data:
        rows = batch.n_id.as_subclass(Tensor).long()
        if self._nodes.device != rows.device:
            self._nodes = self._nodes.to(rows.device)
        numbered = copy.copy(batch)
        numbered.n_id = self._nodes[rows]
        return numbered


class SplitStrategy(RankStrategy):
    """Trains on one rank's batches of the training graph; the first rank scores the outputs of all nodes."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        loaders: dict[str, RankLoader],
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
    ) -> None:
        loader = loaders["train"]
        loader.world.agree({"targets": fingerprint(*targets_of(task, dataset))})
        task.prepare(loader)
        super().__init__(model, dataset, loaders, optimizer, task, options, whole=dataset, **self._ends(loader, task))

    def _ends(self, loader: RankLoader, task: Task) -> dict[str, Any]:
        """What the task sees of a batch, if it is not the batch as it is."""
        return {} if task.knows_rows_only else {"nodes": _Numbered(loader)}

    def _output_of_all(self, split: str, evaluation: HowToEvaluate) -> Any:
        """The output for all nodes of a split's graph, on the first rank."""
        return self._of_splits[split].gathered(self.output(split, evaluation).cpu())

    def scores(self, dataset: Dataset, evaluation: HowToEvaluate) -> dict[str, float]:
        """See :meth:`Strategy.scores`; the first rank has the outputs of all nodes of one graph at a time."""
        output = partial(self._output_of_all, evaluation=evaluation)
        scores: dict[str, float] = {}
        if self.world.is_first:
            scores = self._engine.task.evaluate(dataset, output)
        else:
            for _, splits in dataset.graphs():
                output(splits[0])
        told: dict[str, float] = self.world.broadcast(scores)
        return told

    def facts(self) -> dict[str, Any]:
        """Numbers of nodes and edges of the training graph; the task tells the rest."""
        whole = self._shard.whole
        return {"nodes": whole["nodes"], "edges": whole["edges"], "ranks": self.world.size}


class TypedSplitStrategy(SplitStrategy, TypedRankStrategy):
    """The same on a heterogeneous graph, whose batches count the nodes of the whole graph anyway."""

    def _ends(self, loader: RankLoader, task: Task) -> dict[str, Any]:
        return {}

    def _output_of_all(self, split: str, evaluation: HowToEvaluate) -> Any:
        rows = {kind: out.cpu() for kind, out in self._rows_of_types(split, evaluation).items()}
        gathered = self._of_splits[split].gathered(rows)
        return None if gathered is None else self._typed.all_rows(gathered)
