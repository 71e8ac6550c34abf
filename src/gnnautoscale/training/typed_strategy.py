"""Trains on a heterogeneous graph: GAS, full batch as one part, or exact steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnautoscale.attach import attached
from gnnautoscale.data import TypedDataset, TypedLinks
from gnnautoscale.errors import InputError
from gnnautoscale.forward import TypedMemory
from gnnautoscale.graph import HaloLoader, TypedGraph
from gnnautoscale.tasks import LinkPrediction, Task
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.resharding import load_rows, saved_rows
from gnnautoscale.training.strategies import HistoryStrategy

# What a heterogeneous graph cannot do yet, and the value that leaves it out.
_REFUSED = {"num_workers": 0}


def check_typed_run(dataset: TypedDataset, task: Task, options: FitOptions) -> None:
    """Refuse what needs a plain graph."""
    refused = {name: getattr(options, name) for name, plain in _REFUSED.items() if getattr(options, name) != plain}
    links = isinstance(dataset, TypedLinks)
    if links != isinstance(task, LinkPrediction) or type(task).cut is not Task.cut:
        refused["task"] = task
    for name, value in refused.items():
        got = type(value).__name__ if name == "task" else f"{name}={value!r}"
        fix = "Use a task that fits the data." if name == "task" else f"Leave {name} out."
        raise InputError("this needs a plain graph", got=f"a heterogeneous one, with {got}", fix=fix)


class TypedStrategy(HistoryStrategy):
    """Trains a model on batches of a heterogeneous graph, with histories."""

    def __init__(
        self,
        model: nn.Module,
        dataset: TypedDataset,
        loaders: dict[str, HaloLoader],
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
    ) -> None:
        self._typed = dataset

        def rows(out: Any) -> Tensor:
            return dataset.own_rows(_of_targets(model, dataset.targets, out))

        ends = {"nodes": dataset.seen, "rows": rows, "whole": lambda _: dataset.seen_whole()}
        super().__init__(model, dataset, loaders, optimizer, task, options, **ends)

    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """See :meth:`Strategy.output`."""
        return self._typed.all_rows(self._rows_of_types(split, evaluation))

    def _rows_of_types(self, split: str, evaluation: HowToEvaluate) -> dict[str, Tensor]:
        """The model's output for the types that have targets."""
        out: Any = super().output(split, evaluation)
        if self.at_once and evaluation != "histories" and self._exact_loaders[split].data is self._loader.data:
            counts = TypedGraph.of(self._typed.graph).counts
            of_kinds = out.split([counts[kind] for kind in self._typed.targets])  # already chosen
            return dict(zip(self._typed.targets, of_kinds, strict=True))
        return _of_targets(self._model, self._typed.targets, out)

    def _saved_rows(self) -> dict[str, Any]:
        memory: TypedMemory = attached(self._model).memory
        return {"types": {kind: saved_rows(each) for kind, each in memory.kinds.items()}}

    def _load_rows(self, state: dict[str, Any], device: torch.device) -> None:
        memory: TypedMemory = attached(self._model).memory
        for kind, kept in state["types"].items():
            load_rows(memory.kinds[kind], kept, device, self._loader.row_orders[kind])


def _of_targets(model: nn.Module, targets: Sequence[str], out: Any) -> dict[str, Tensor]:
    """The rows of the types that have targets."""
    if isinstance(out, dict):
        if all(target in out for target in targets):
            return {target: out[target] for target in targets}
        got = f"a dictionary with {', '.join(map(repr, out))}"
    else:
        kinds = getattr(attached(model).plan, "output_kinds", [])
        if isinstance(out, Tensor) and kinds == list(targets):
            return {targets[0]: out}
        got = f"rows of {', '.join(kinds)}" if isinstance(out, Tensor) else type(out).__name__
    rule = f"the model must return rows of {' and '.join(map(repr, targets))}, or a dictionary that has them"
    raise InputError(rule, got=got, fix="Return these, or choose another target.")
