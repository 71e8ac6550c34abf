"""Trains on a heterogeneous graph: GAS, or full batch as one part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.attach import attached, autoscale, detach, infer_from_histories, infer_on, plan_of, refresh
from gnnautoscale.data import TypedDataset
from gnnautoscale.errors import InputError
from gnnautoscale.forward import TypedMemory
from gnnautoscale.graph import HaloLoader, fingerprint
from gnnautoscale.runs import FitResult
from gnnautoscale.tasks import Task
from gnnautoscale.training.feed import Item
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.steps import Steps
from gnnautoscale.training.strategies import Strategy, history_dtype, opened_forms, saved_histories

# What a heterogeneous graph cannot do yet, and the value that leaves it out.
_REFUSED = {
    "compensate": "none",
    "lipschitz": 0.0,
    "edge_dropout": 0.0,
    "exact_epochs": 0,
    "refresh": 0,
    "num_workers": 0,
    "evaluate_parts": None,
    "verify": False,
}


def check_typed_run(task: Task, options: FitOptions) -> None:
    """Refuse what needs a plain graph."""
    refused = {name: getattr(options, name) for name, plain in _REFUSED.items() if getattr(options, name) != plain}
    if options.mode not in ("gas", "full", "cluster", "sage"):
        refused["mode"] = options.mode
    if type(task).see is not Task.see or type(task).cut is not Task.cut:
        refused["task"] = task
    for name, value in refused.items():
        got = type(value).__name__ if name == "task" else f"{name}={value!r}"
        fix = "Use a task of nodes." if name == "task" else f"Leave {name} out."
        raise InputError("this needs a plain graph", got=f"a heterogeneous one, with {got}", fix=fix)


class TypedStrategy(Strategy):
    """Trains a model on batches of a heterogeneous graph, with histories."""

    def __init__(
        self,
        model: nn.Module,
        dataset: TypedDataset,
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
        labels: Tensor | None,
    ) -> None:
        self._dataset, self._target, self._device = dataset, dataset.target, torch.device(options.device)
        cut: Any = options.partition if labels is None else labels
        whole = options.mode == "full"
        #: Makes the batches.
        self.loader = HaloLoader(
            dataset.graph,
            (1 if whole else options.num_parts) if labels is None else None,
            partition=cut,
            balance=options.balance,
            batch_size=1 if whole else options.batch_size,
            shuffle=True,
            drawings=None if whole else options.drawings,
            seed=options.seed,
            keep=options.keep_batches,
            cache_dir=options.cache_dir,
            device=self._device,
        )
        autoscale(
            model,
            dataset.graph,
            storage=options.storage,
            dtype=history_dtype(options),
            history_dir=options.history_dir,
        )
        if any(is_lazy(weight) for weight in model.parameters()):
            plan_of(model, self.loader)  # gives them their shapes
        steps = Steps(
            model,
            optimizer,
            task,
            self._device,
            call=self._call,
            grad_norm=options.grad_norm,
            precision=options.precision,
            accumulate=options.accumulate,
        )
        super().__init__(model, steps)
        #: A fingerprint of everything that the run learns from.
        self.key = fingerprint(*task.identity(dataset.train), graph=self.loader.graph.key)
        if options.evaluation == "exact" and options.refresh_every != "epoch" and len(self.loader) > 1:
            self._memory.reserve_another_set()

    @property
    def _memory(self) -> TypedMemory:
        memory: TypedMemory = attached(self._model).memory
        return memory

    def describe(self, result: FitResult) -> None:
        """See :meth:`Strategy.describe`."""
        memory = self._memory
        result.how = "uncaptured: the graph is heterogeneous"
        result.storage = f"{memory.medium or memory.storage}: {memory.why}"
        result.history_bytes = sum(history.num_bytes for history in memory.histories.values())
        result.connectivity = self.loader.connectivity

    def _call(self, batch: HeteroData) -> Any:
        return self._of_target(self._model(batch))

    def _of_target(self, out: Any) -> Any:
        """The rows of the type that has targets."""
        if isinstance(out, dict):
            if self._target in out:
                return out[self._target]
            got = f"a dictionary with {', '.join(map(repr, out))}"
        else:
            kinds = getattr(attached(self._model).plan, "output_kinds", [])
            if isinstance(out, Tensor) and kinds == [self._target]:
                return out
            got = f"rows of {', '.join(kinds)}" if isinstance(out, Tensor) else type(out).__name__
        rule = f"the model must return rows of {self._target!r}, or a dictionary that has them"
        raise InputError(rule, got=got, fix="Return these, or choose another target.")

    def _items(self, most: int | None) -> Iterator[Item]:
        for batch in islice(self.loader, most):
            rows, targets = self._steps.task.targets(self._dataset.seen(batch))
            rows = None if rows is None else rows.to(self._device)
            yield Item(batch.to(self._device), rows, targets.to(self._device))

    def _train(self, number: int, most: int | None, after_step: Callable[[Item | None], None]) -> float:
        return self._steps.train(self._items(most), after_step)

    def refresh(self) -> None:
        """See :meth:`Strategy.refresh`."""
        refresh(self._model, self.loader)

    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """See :meth:`Strategy.output`."""
        if evaluation == "histories":
            out = infer_from_histories(self._model, self.loader)
        else:
            out = infer_on(torch.device("cpu"), self._model, self.loader, update_histories=False)
        rows: Tensor = self._of_target(out)
        return rows

    def give_up(self) -> None:
        """See :meth:`Strategy.give_up`."""
        detach(self._model)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Strategy.state_dict`."""
        self._memory.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the host reads rows that the GPU wrote
        return {
            "graph": self.key,
            "labels": self.loader.labels,
            "loader": self.loader.state_dict(self.done),
            "engine": self._steps.state_dict(),
            "histories": {kind: saved_histories(memory.histories) for kind, memory in self._memory.kinds.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """See :meth:`Strategy.load_state_dict`."""
        self.loader.load_state_dict(state["loader"])
        self.done = state["loader"]["done"]
        self._steps.load_state_dict(state["engine"])
        for kind, kept in state["histories"].items():
            memory = self._memory.kinds[kind]
            memory.reopen(opened_forms(kept), device, self.loader.row_orders[kind])
            for slot, history in kept.items():
                memory.histories[slot].raw.copy_(history["raw"])
