"""Trains on subgraphs of a heterogeneous graph, without histories: joined parts, or sampled neighbours."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.attach import unpack_batch
from gnnautoscale.data import TypedDataset, TypedLinks
from gnnautoscale.errors import InputError
from gnnautoscale.forward import evaluating
from gnnautoscale.graph import ClusterLoader, SampleLoader, TypedGraph
from gnnautoscale.tasks import Task
from gnnautoscale.training.feed import Item
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.strategies import SubgraphStrategy


def typed_subgraphs(dataset: TypedDataset, task: Task, options: FitOptions) -> ClusterLoader | SampleLoader:
    """A loader of joined parts, or with a fan-out of sampled neighbourhoods of the nodes with targets."""
    if options.fan_out is None:
        cut: dict[str, Any] = {name: getattr(options, name) for name in ("partition", "balance", "seed", "cache_dir")}
        return ClusterLoader(dataset.graph, options.num_parts, batch_size=options.batch_size, shuffle=True, **cut)
    count = -(-options.num_parts // options.batch_size)
    if isinstance(dataset, TypedLinks):
        return task.sampled(dataset.graph, options.fan_out, count, seed=options.seed)
    rows, _ = task.targets_of_graph(dataset.train)
    nodes = torch.arange(dataset.train.num_nodes) if rows is None else rows
    nodes = nodes + TypedGraph.of(dataset.graph).first[dataset.target]
    return SampleLoader(dataset.graph, nodes, options.fan_out, count, seed=options.seed)


class TypedSubgraphStrategy(SubgraphStrategy):
    """Trains a plain model on subgraphs of a heterogeneous graph; evaluation runs it on the whole graph at once."""

    def __init__(
        self,
        model: nn.Module,
        loader: ClusterLoader | SampleLoader,
        dataset: TypedDataset,
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
    ) -> None:
        self._dataset = dataset
        super().__init__(model, loader, dataset, optimizer, task, options, nodes=dataset.seen)
        if any(is_lazy(weight) for weight in model.parameters()):
            with torch.no_grad():
                self._call(self._whole("train").to(str(self._device)))  # gives them their shapes

    def _item(self, batch: HeteroData) -> Item:
        rows, targets = self._steps.task.targets(self._dataset.seen(batch))
        rows = None if rows is None else rows.to(self._device)
        return Item(batch.to(str(self._device)), rows, targets.to(self._device))

    def _whole(self, split: str) -> HeteroData:
        whole = copy.copy(self._dataset.passing(split))
        for store in whole.node_stores:
            count = store.num_nodes
            store.n_id, store.num_nodes, store.batch_size = torch.arange(count), count, count
        for store in whole.edge_stores:
            store.e_id = torch.arange(store.edge_index.size(1))
        return whole

    @torch.no_grad()
    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """See :meth:`Strategy.output`."""
        with evaluating(self._model):
            rows = self._rows(self._whole(split).to(str(self._device)))
        return self._dataset.all_rows(rows).cpu()

    def _call(self, batch: HeteroData) -> Tensor:
        rows = self._rows(batch)
        return self._dataset.own_rows({kind: each[: batch[kind].batch_size] for kind, each in rows.items()})

    def _rows(self, batch: HeteroData) -> dict[str, Tensor]:
        """The model's rows of the target types."""
        args, kwargs = unpack_batch(self._signature, type(self._model).__name__, (batch,), {})
        out, kinds = self._model(*args, **kwargs), self._dataset.targets
        rows = out if isinstance(out, dict) else {kinds[0]: out}
        for kind in kinds:
            each = rows.get(kind)
            if not isinstance(each, Tensor) or each.dim() != 2 or each.size(0) != batch[kind].num_nodes:
                got = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(out).__name__}"
                rule = f"the model must return one row for each of the {batch[kind].num_nodes} nodes of {kind!r}"
                raise InputError(rule, got=got, fix="Return these, or a dictionary that has them.")
        return {kind: rows[kind] for kind in kinds}
