"""How the modes of training differ: where batches come from, what a step runs, and how to evaluate."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import set_random_states
from gnnautoscale.attach import (
    attached,
    detach,
    infer_from_histories,
    infer_on,
    info_of,
    model_must_run,
    refresh,
    unpack_batch,
)
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import GraphMemory, describe, evaluating
from gnnautoscale.graph import ClusterLoader, HaloLoader, SampleLoader
from gnnautoscale.runs import FitResult
from gnnautoscale.tasks import Task
from gnnautoscale.training.captured import engine_for, num_targets_of
from gnnautoscale.training.checkpoint import Checkpoint, save_checkpoint
from gnnautoscale.training.feed import Item, as_it_is, plain_item
from gnnautoscale.training.flow import Flow
from gnnautoscale.training.identity import key_of, targets_of
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.resharding import load_rows, pieces_of, read_shards, saved_rows, take_rows
from gnnautoscale.training.steps import Steps
from gnnautoscale.transfer import times_for

# The share of a GPU's free memory that the outputs of all nodes may take.
_SHARE_OF_OUTPUTS = 1 / 16


class Strategy(ABC):
    """How a mode trains and evaluates; this base has no histories.

    ``done`` is the number of batches done in this epoch, ``between`` tells whether no step is running, and after
    :meth:`watch` ``flow`` follows the rows that steps pull and push.
    """

    #: Whether an evaluation needs memory for the whole graph at once.
    evaluates_at_once = False
    #: Whether one batch evaluates the whole training graph, which a GPU captures.
    at_once = False

    def __init__(self, model: nn.Module, steps: Steps) -> None:
        self._model, self._steps = model, steps
        self.done, self.between = 0, True
        self.flow: Flow | None = None

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far."""
        return self._steps.steps

    @property
    def key(self) -> str:
        """Fingerprint of everything that a run learns from; empty where there are no checkpoints."""
        return ""

    @abstractmethod
    def describe(self, result: FitResult) -> None:
        """Say in a result how steps ran, where histories live, and how large halo and histories are."""

    def running(self) -> AbstractContextManager[None]:
        """The context for all training."""
        return self._steps.running()

    def watch(self) -> None:
        """Start to measure the time that training steps take and the rows they move."""
        self._steps.times = times_for(self._steps.device)

    def measured(self) -> dict[str, Any]:
        """Times and moved rows of the steps since the last call."""
        return {"time": self._steps.times.taken()}

    def epoch(self, number: int, most: int | None, after_batch: Callable[[], None]) -> float:
        """Train for the epoch with a number, from 1, or for its first ``most`` batches; returns the mean loss."""

        def after_step(item: Item | None) -> None:
            if item is not None:
                self._follow(item)
            self.done, self.between = self.done + 1, True
            after_batch()
            self.between = False

        self.between = False
        loss = self._train(number, None if most is None else most - self.done, after_step)
        self.done, self.between = 0, True
        return loss

    @abstractmethod
    def _train(self, number: int, most: int | None, after_step: Callable[[Item | None], None]) -> float:
        """Train on the batches of an epoch, or on its first ``most``; returns the mean loss.

        ``after_step`` is called with each batch, or with ``None`` after a step on all of them.
        """

    @abstractmethod
    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """The model's output for all nodes of a split's graph, ``[num_nodes, num_outputs]``, in host memory."""

    def scores(self, dataset: Dataset, evaluation: HowToEvaluate) -> dict[str, float]:
        """Score all splits of a data set."""
        return self._steps.task.evaluate(dataset, partial(self.output, evaluation=evaluation))

    def stopping(self, stop: Event) -> Callable[[], bool]:
        """What tells whether to end training after this step, once an event asks for that."""
        return stop.is_set

    def agreed(self, fact: bool) -> bool:
        """Whether the first process says so."""
        return fact

    def peak(self, num_bytes: int | None) -> int | None:
        """The largest peak of memory of all processes, given that of this one."""
        return num_bytes

    def _follow(self, item: Item) -> None:
        """Note the rows that a step moved."""
        return

    def refresh(self) -> None:
        """Recompute all histories."""
        return

    def give_up(self) -> None:
        """Detach histories from the model after a failure."""
        return

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, even within an epoch: histories, parts, order and loss."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state of a checkpoint; the loader must have the same parts."""
        return

    def save(self, folder: Path, step: int, state: dict[str, Any], random: dict[str, Any]) -> Path:
        """Write a checkpoint of a run's ``state`` and of the ``random`` states, with that of the strategy."""
        return save_checkpoint(folder, step, {**state, "random": random, "strategy": self.state_dict()})

    def restore(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Continue from a checkpoint that :meth:`save` wrote, with the same random numbers."""
        self.load_state_dict(checkpoint.state["strategy"], device)
        set_random_states(checkpoint.state["random"], device)


class HistoryStrategy(Strategy):
    """Attaches histories to a model and trains it on batches with their halo: GAS, full batch and naive histories.

    After epoch ``exact_after`` an epoch is one step with the gradient of the whole graph. It evaluates and refreshes in
    ``evaluate_parts`` batches, ``None`` for those of training. Before each step on a batch, as many others as the
    option ``refresh`` says are refreshed: those of the parts whose rows are oldest. ``ends`` tell the engine what a
    task sees of a batch and of the model's output.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        loaders: dict[str, HaloLoader],
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
        **ends: Any,
    ) -> None:
        self._dataset, self._loaders, self._loader = dataset, loaders, loaders["train"]
        self._engine = engine_for(model, dataset, self._loader, optimizer, task, options, **ends)
        super().__init__(model, self._engine)
        self._exact_after, self._refreshes = options.exact_after, options.refresh
        if self._refreshes:
            self._follow_rows()
        self._exact_loaders, parts = loaders, options.evaluate_parts
        if parts is not None:
            made = {loader: loader.in_batches(parts) for loader in loaders.values()}
            self._exact_loaders = {split: made[loader] for split, loader in loaders.items()}
            self.at_once = self._exact_loaders["train"].is_whole
        self._make_room(options)

    @property
    def _memory(self) -> GraphMemory:
        memory: GraphMemory = attached(self._model).memory
        return memory

    def watch(self) -> None:
        """See :meth:`Strategy.watch`."""
        super().watch()
        self._follow_rows()

    def _follow_rows(self) -> None:
        if self.flow is None and not self._loader.is_whole and self._exact_after:
            self.flow = self._new_flow()

    def _new_flow(self) -> Flow:
        return Flow(self._loader.parts)

    def measured(self) -> dict[str, Any]:
        """See :meth:`Strategy.measured`."""
        codecs = [history.codec for history in self._memory.histories.values()]
        row_bytes = sum(codec.raw_width * codec.raw_dtype.itemsize for codec in codecs)
        return {
            **super().measured(),
            **({} if self.flow is None else self.flow.taken(row_bytes, self._loader.everyone)),
        }

    def _follow(self, item: Item) -> None:
        if self.flow is not None:
            transfer = self._memory.transfer(self._engine.device)
            self.flow.step(item.info, skips_shared=transfer.skips_shared, elsewhere=self._elsewhere())

    def _elsewhere(self) -> list[int]:
        """The parts whose rows other processes wrote meanwhile."""
        return []

    def _make_room(self, options: FitOptions) -> None:
        """Reserve room for further sets of histories: gradients, and one for exact evaluation in batches."""
        if self._exact_after < options.epochs:
            self._memory.reserve_another_set()
        if options.compensate == "gradient":
            self._memory.reserve_another_set()
        evaluates = options.verify or (options.evaluation == "exact" and options.refresh_every != "epoch")
        if evaluates and not self._exact_loaders["train"].is_whole:
            self._memory.reserve_another_set()

    @cached_property
    def key(self) -> str:
        """See :attr:`Strategy.key`: the graph, and what the task reads from its data."""
        keys = (loader.graph.key for loader in self._loaders.values())
        return key_of(targets_of(self._engine.task, self._dataset), keys)

    def describe(self, result: FitResult) -> None:
        """See :meth:`Strategy.describe`."""
        memory = self._memory
        result.how = self._engine.how
        if not self._exact_after:
            result.how = f"exact steps, {self._engine.exact_how}"
        kept = (*memory.histories.values(), *memory.last_gradients.values())
        kept = (*kept, *(sums.history for sums in memory.gradients.values()))
        result.history_bytes = sum(history.num_bytes for history in kept)
        if result.history_bytes:
            result.storage = f"{memory.medium or memory.storage}: {memory.why}"
        result.connectivity = self._loader.connectivity

    def _train(self, number: int, most: int | None, after_step: Callable[[Item | None], None]) -> float:
        if number <= self._exact_after:
            return self._engine.epoch(self._loader, most, after_step, self._refresh_oldest)
        targets = num_targets_of(self._engine.task, self._dataset, self._loader)
        return self._engine.exact_epoch(self._loader, targets, after_step, done=self.done > 0)

    def _refresh_oldest(self) -> None:
        flow = self.flow
        for _ in range(self._refreshes):
            if flow is not None:
                batch = self._loader.batch_of(flow.oldest(self._loader.batch_size))
                self._engine.refresh(batch)
                flow.refreshed(info_of(batch), elsewhere=self._elsewhere())

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Strategy.state_dict`."""
        memory = self._memory
        memory.settle()
        if self._engine.on_gpu:
            torch.cuda.synchronize(self._engine.device)  # the host reads rows that the GPU wrote
        return {
            "graph": self.key,
            "labels": self._loader.labels,
            "loader": self._loader.state_dict(self.done),
            "engine": self._engine.state_dict(),
            **self._saved_rows(),
            **({} if self.flow is None else {"flow": self.flow.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """See :meth:`Strategy.load_state_dict`."""
        if self.flow is not None:
            self.flow.load_state_dict(state.get("flow"))
        self._loader.load_state_dict(state["loader"])
        self.done = state["loader"]["done"]
        self._engine.load_state_dict(state["engine"])
        self._load_rows(state, device)

    def restore(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """See :meth:`Strategy.restore`; after several ranks, the epoch that was under way begins anew."""
        shards = read_shards(checkpoint)
        if not shards:
            super().restore(checkpoint, device)
            return
        self._engine.steps = shards[0]["strategy"]["engine"]["steps"]
        take_rows(self._memory, self._loader, pieces_of(checkpoint, shards), device)

    def _saved_rows(self) -> dict[str, Any]:
        return saved_rows(self._memory)

    def _load_rows(self, state: dict[str, Any], device: torch.device) -> None:
        load_rows(self._memory, state, device, self._loader.row_order)

    def refresh(self) -> None:
        """See :meth:`Strategy.refresh`."""
        if self.flow is not None:
            self.flow.refreshed()
        loader = self._exact_loaders["train"]
        if self.at_once and self._memory.medium == "device":
            self._engine.output(next(loader.ready_batches()), refresh=True)
        else:
            refresh(self._model, loader)

    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """See :meth:`Strategy.output`."""
        loader = self._exact_loaders[split]
        out: Any
        if evaluation == "histories":
            out = infer_from_histories(self._model, self._loaders[split])
        elif self.at_once and loader.data is self._loader.data:
            out = self._engine.output(next(loader.ready_batches())).to(self._place_of_outputs(loader))
        else:
            out = infer_on(self._place_of_outputs(loader), self._model, loader, update_histories=False)
        rows: Tensor = out
        return rows

    def _place_of_outputs(self, loader: HaloLoader) -> torch.device:
        """Where to score outputs: on the GPU, if the task can and there is room."""
        task, device = self._engine.task, self._engine.device
        if device.type == "cuda" and task.scores_anywhere:
            free, _ = torch.cuda.mem_get_info(device)
            if 4 * task.num_outputs * loader.graph.num_nodes <= _SHARE_OF_OUTPUTS * free:
                return device
        return torch.device("cpu")

    def give_up(self) -> None:
        """See :meth:`Strategy.give_up`."""
        detach(self._model)


class SubgraphStrategy(Strategy):
    """Trains a plain model on plain subgraphs: Cluster-GCN and neighbour sampling.

    The loader yields the subgraphs of an epoch in host memory, each with its own nodes first. Batches without training
    nodes are skipped. Evaluation runs the model on a whole graph at once.
    """

    evaluates_at_once = True

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        loader: ClusterLoader | SampleLoader,
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
        *,
        nodes: Callable[[Any], Data] = as_it_is,
    ) -> None:
        _refuse_cached(model)
        self._loader, self._device = loader, torch.device(options.device)
        self._dataset, self._nodes = dataset, nodes
        self._signature = inspect.signature(model.forward)
        clip, precision = options.grad_norm, options.precision
        steps = Steps(
            model,
            optimizer,
            task,
            self._device,
            call=self._call,
            nodes=nodes,
            grad_norm=clip,
            precision=precision,
            accumulate=options.accumulate,
        )
        super().__init__(model, steps)

    def describe(self, result: FitResult) -> None:
        """See :meth:`Strategy.describe`."""
        result.how = f"uncaptured: a plain model on {self._loader.kind}"

    def _train(self, number: int, most: int | None, after_step: Callable[[Item | None], None]) -> float:
        task, batches = self._steps.task, islice(self._loader, most)
        items = (plain_item(batch, task, self._device, self._nodes) for batch in batches)
        return self._steps.train((item for item in items if item.targets.size(0)), after_step)

    def _whole(self, split: str) -> Any:
        """A split's graph as one batch."""
        graph = self._dataset.passing(split)
        whole = copy.copy(graph)
        whole.n_id, whole.e_id = torch.arange(graph.num_nodes), torch.arange(graph.num_edges)
        whole.batch_size = graph.num_nodes
        return whole

    @torch.no_grad()
    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """See :meth:`Strategy.output`."""
        # Copied even if it is on the device already: a model may write into its inputs.
        whole = self._whole(split).apply(lambda value: value.to(self._device, copy=True))
        with evaluating(self._model):
            return self._all_rows(whole).cpu()

    def _all_rows(self, whole: Any) -> Tensor:
        """The rows that the task scores, for a whole graph."""
        out: Tensor = self._call(whole)
        return out

    def _call(self, batch: Data) -> Any:
        args, kwargs = unpack_batch(self._signature, type(self._model).__name__, (batch,), {})
        with model_must_run(self._model):
            out = self._model(*args, **kwargs)
        dense = isinstance(out, Tensor) and out.layout == torch.strided
        if isinstance(out, Tensor) and (not dense or not out.dim() or out.size(0) != batch.num_nodes):
            raise InputError(
                f"the model must return one row for each of the {batch.num_nodes} nodes",
                got=f"{out.layout if not dense else 'shape'} {tuple(out.shape)}",
                fix="Return the last layer's output as it is.",
            )
        # The item, because a graph made of several has a property of that name, its number of graphs.
        return out[: batch["batch_size"]] if isinstance(out, Tensor) else out


def _refuse_cached(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, MessagePassing) and getattr(layer, "cached", False):
            raise UnsupportedModelError(
                f"{describe(name or type(layer).__name__, layer)} must compute its edges in every call",
                got="cached=True, which would reuse the first batch's",
                fix="Create it with cached=False.",
            )
