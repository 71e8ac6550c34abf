"""Trains on subgraphs of a heterogeneous graph, without histories: joined parts, or sampled neighbours."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.attach import model_must_run, unpack_batch
from gnnautoscale.data import TypedDataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import ClusterLoader, SampleLoader
from gnnautoscale.tasks import Task
from gnnautoscale.training.options import FitOptions
from gnnautoscale.training.strategies import SubgraphStrategy


class TypedSubgraphStrategy(SubgraphStrategy):
    """Trains a plain model on subgraphs of a heterogeneous graph; evaluation runs it on the whole graph at once."""

    def __init__(
        self,
        model: nn.Module,
        dataset: TypedDataset,
        loader: ClusterLoader | SampleLoader,
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
    ) -> None:
        self._typed = dataset
        super().__init__(model, dataset, loader, optimizer, task, options, nodes=dataset.seen)
        if any(is_lazy(weight) for weight in model.parameters()):
            with torch.no_grad():
                self._call(self._whole("train").to(str(self._device)))  # gives them their shapes

    def _whole(self, split: str) -> HeteroData:
        whole = copy.copy(self._dataset.passing(split))
        for store in whole.node_stores:
            count = store.num_nodes
            store.n_id, store.num_nodes, store.batch_size = torch.arange(count), count, count
        for store in whole.edge_stores:
            store.e_id = torch.arange(store.edge_index.size(1))
        return whole

    def _all_rows(self, whole: HeteroData) -> Tensor:
        return self._typed.all_rows(self._rows(whole))

    def _call(self, batch: HeteroData) -> Tensor:
        rows = self._rows(batch)
        return self._typed.own_rows({kind: each[: batch[kind].batch_size] for kind, each in rows.items()})

    def _rows(self, batch: HeteroData) -> dict[str, Tensor]:
        """The model's rows of the target types."""
        args, kwargs = unpack_batch(self._signature, type(self._model).__name__, (batch,), {})
        with model_must_run(self._model):
            out, kinds = self._model(*args, **kwargs), self._typed.targets
        rows = out if isinstance(out, dict) else {kinds[0]: out}
        for kind in kinds:
            each = rows.get(kind)
            if not isinstance(each, Tensor) or each.dim() != 2 or each.size(0) != batch[kind].num_nodes:
                got = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(out).__name__}"
                rule = f"the model must return one row for each of the {batch[kind].num_nodes} nodes of {kind!r}"
                raise InputError(rule, got=got, fix="Return these, or a dictionary that has them.")
        return {kind: rows[kind] for kind in kinds}
