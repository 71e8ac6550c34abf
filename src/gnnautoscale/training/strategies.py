"""How the modes of training differ: where batches come from, what a step runs, and how to evaluate."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.attach import attached, detach, infer, infer_from_histories, refresh, unpack_batch
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import describe, evaluating
from gnnautoscale.graph import BatchInfo, ClusterLoader, HaloLoader, SampleLoader, fingerprint
from gnnautoscale.tasks import Task
from gnnautoscale.training.captured import Engine
from gnnautoscale.training.feed import Item, plain_item
from gnnautoscale.training.flow import Flow
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.steps import Steps
from gnnautoscale.transfer import times_for


class HistoryStrategy:
    """Trains an autoscaled model on batches with their halo: GAS, full batch and naive histories.

    Args:
        model: The autoscaled model.
        loaders: A loader for each split, see :func:`halo_loaders`.
        engine: Runs the steps.
        evaluate_parts: Number of batches to evaluate and refresh in; by default those of training.
    """

    #: Whether an evaluation needs memory for the whole graph at once.
    evaluates_at_once = False

    def __init__(
        self, model: nn.Module, loaders: dict[str, HaloLoader], engine: Engine, evaluate_parts: int | None = None
    ) -> None:
        self._model, self._loaders, self._engine = model, loaders, engine
        self._loader = loaders["train"]
        self._exact_loaders = loaders
        #: Whether one batch evaluates the whole training graph, which a GPU captures.
        self.at_once = evaluate_parts == 1
        if evaluate_parts is not None:
            made = {loader: HaloLoader(loader.data, evaluate_parts, keep=loader.keep) for loader in loaders.values()}
            self._exact_loaders = {split: made[loader] for split, loader in loaders.items()}
        self.connectivity = self._loader.connectivity
        #: Number of batches done in this epoch.
        self.done = 0
        #: Whether no training step is running.
        self.between = True
        #: Follows the rows that steps pull and push; see :meth:`watch`.
        self.flow: Flow | None = None

    def watch(self) -> None:
        """Start to measure the time that training steps take and the rows they move."""
        self._engine.times = times_for(self._engine.device)
        if len(self._loader) > 1:
            self.flow = Flow(self._loader.labels)

    def measured(self) -> dict[str, Any]:
        """Times and moved rows of the steps since the last call."""
        codecs = [history.codec for history in attached(self._model).memory.histories.values()]
        row_bytes = sum(codec.raw_width * codec.raw_dtype.itemsize for codec in codecs)
        moved = {} if self.flow is None else self.flow.taken(row_bytes)
        return {"time": self._engine.times.taken(), **moved}

    def _follow(self, info: BatchInfo) -> None:
        if self.flow is not None:
            transfer = attached(self._model).memory.transfer(self._engine.device)
            self.flow.step(info, skips_shared=transfer.skips_shared)

    def make_room_to_evaluate(self) -> None:
        """Reserve room for the second set of histories that exact evaluation in batches needs."""
        if len(self._exact_loaders["train"]) > 1:
            attached(self._model).memory.reserve_second_set()

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far."""
        return self._engine.steps

    @cached_property
    def _key(self) -> str:
        return data_key(self._loader, self._engine.task)

    @property
    def how(self) -> str:
        """How steps run, in words."""
        return self._engine.how

    @property
    def storage(self) -> str:
        """Where histories live and why, in words."""
        memory = attached(self._model).memory
        return f"{memory.medium or memory.storage}: {memory.why}"

    @property
    def history_bytes(self) -> int:
        """Bytes of all histories."""
        return sum(history.num_bytes for history in attached(self._model).memory.histories.values())

    def running(self) -> AbstractContextManager[None]:
        """The context for all training."""
        return self._engine.running()

    def epoch(self, most: int | None, after_batch: Callable[[], None]) -> float:
        """Train for an epoch, or for its first ``most`` batches; returns the mean loss."""

        def after_step(item: Item) -> None:
            self._follow(item.info)
            self.done, self.between = self.done + 1, True
            after_batch()
            self.between = False

        self.between = False
        batches = islice(self._loader.ready_batches(), None if most is None else most - self.done)
        loss = self._engine.epoch(batches, after_step=after_step, then=self._loader.first_of_next_epoch)
        self.done, self.between = 0, True
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, even within an epoch: histories, parts, order and loss."""
        memory = attached(self._model).memory
        memory.settle()
        if self._engine.on_gpu:
            torch.cuda.synchronize(self._engine.device)  # the host reads rows that the GPU wrote
        return {
            "graph": self._key,
            "labels": self._loader.labels,
            "loader": self._loader.state_dict(self.done),
            "engine": self._engine.state_dict(),
            "histories": {
                slot: {"width": history.width, "dtype": str(history.dtype).removeprefix("torch."), "raw": history.raw}
                for slot, history in memory.histories.items()
            },
            **({} if self.flow is None else {"flow": self.flow.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state of a checkpoint; the loader must have the same parts."""
        memory = attached(self._model).memory
        if self.flow is not None:
            self.flow.load_state_dict(state.get("flow"))
        self._loader.load_state_dict(state["loader"])
        self.done = state["loader"]["done"]
        self._engine.load_state_dict(state["engine"])
        memory.reopen(
            {slot: (kept["width"], getattr(torch, kept["dtype"])) for slot, kept in state["histories"].items()},
            device,
            self._loader.part_order,
        )
        for slot, kept in state["histories"].items():
            memory.histories[slot].raw.copy_(kept["raw"])

    def refresh(self) -> None:
        """Recompute all histories."""
        if self.flow is not None:
            self.flow.refreshed()
        loader = self._exact_loaders["train"]
        if self.at_once and attached(self._model).memory.medium == "device":
            self._engine.output(next(loader.ready_batches()), refresh=True)
        else:
            refresh(self._model, loader)

    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """The model's output for all nodes of a split's graph, ``[num_nodes, num_outputs]``, in host memory."""
        out: Tensor
        if evaluation == "histories":
            out = infer_from_histories(self._model, self._loaders[split])
            return out
        loader = self._exact_loaders[split]
        if self.at_once and loader.data is self._loader.data:
            return self._engine.output(next(loader.ready_batches())).cpu()
        out = infer(self._model, loader, update_histories=False)
        return out

    def give_up(self) -> None:
        """Detach histories from the model after a failure."""
        detach(self._model)


class SubgraphStrategy:
    """Trains a plain model on plain subgraphs: Cluster-GCN and neighbour sampling.

    Batches without training nodes are skipped. Evaluation runs the model on a whole graph at once.

    Args:
        model: The model, on the compute device.
        loader: Yields the subgraphs of an epoch in host memory, each with its own nodes first.
        dataset: The graphs to evaluate on.
        optimizer: Updates the weights.
        task: What to learn.
        options: Device, clipping and precision.
    """

    evaluates_at_once = True
    at_once = False
    connectivity = 0.0
    history_bytes = 0
    storage = ""

    def __init__(
        self,
        model: nn.Module,
        loader: ClusterLoader | SampleLoader,
        dataset: Dataset,
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
    ) -> None:
        _refuse_cached(model)
        self._model, self._loader, self._device = model, loader, torch.device(options.device)
        self._graphs = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
        self._signature = inspect.signature(model.forward)
        self._steps = Steps(
            model,
            optimizer,
            task,
            self._device,
            call=self._call,
            grad_norm=options.grad_norm,
            precision=options.precision,
        )
        #: How steps run, in words.
        self.how = f"uncaptured: a plain model on {loader.kind}"
        #: Number of batches done in this epoch.
        self.done = 0
        #: Whether no training step is running.
        self.between = True

    def watch(self) -> None:
        """Start to measure the time that training steps take."""
        self._steps.times = times_for(self._device)

    def measured(self) -> dict[str, Any]:
        """Times of the steps since the last call."""
        return {"time": self._steps.times.taken()}

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far."""
        return self._steps.steps

    def running(self) -> AbstractContextManager[None]:
        """The context for all training."""
        return self._steps.running()

    def epoch(self, most: int | None, after_batch: Callable[[], None]) -> float:
        """Train for an epoch, or for its first ``most`` batches; returns the mean loss."""

        def after_step(_: Item) -> None:
            self.done, self.between = self.done + 1, True
            after_batch()
            self.between = False

        self.between = False
        items = (plain_item(batch, self._steps.task, self._device) for batch in islice(self._loader, most))
        loss = self._steps.train((item for item in items if item.targets.size(0)), after_step)
        self.done, self.between = 0, True
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Refuse: these modes have no checkpoints."""
        raise InputError("checkpoints belong to modes with histories", got="another mode", fix="Train without them.")

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """See :meth:`state_dict`."""
        self.state_dict()

    def refresh(self) -> None:
        """Nothing to do without histories."""

    @torch.no_grad()
    def output(self, split: str, evaluation: HowToEvaluate) -> Tensor:
        """The model's output for all nodes of a split's graph, ``[num_nodes, num_outputs]``, in host memory."""
        graph = self._graphs[split]
        whole = copy.copy(graph)
        whole.n_id, whole.e_id = torch.arange(graph.num_nodes), torch.arange(graph.num_edges)
        whole.batch_size = graph.num_nodes
        # Copied even if it is on the device already: a model may write into its inputs.
        whole = whole.apply(lambda value: value.to(self._device, copy=True))
        with evaluating(self._model):
            out: Tensor = self._call(whole)
        return out.cpu()

    def give_up(self) -> None:
        """Nothing to detach."""

    def _call(self, batch: Data) -> Any:
        args, kwargs = unpack_batch(self._signature, type(self._model).__name__, (batch,), {})
        out = self._model(*args, **kwargs)
        if isinstance(out, Tensor) and (not out.dim() or out.size(0) != batch.num_nodes):
            raise InputError(
                f"the model must return one row for each of the {batch.num_nodes} nodes",
                got=f"shape {tuple(out.shape)}",
                fix="Return the last layer's output as it is.",
            )
        return out[: batch.batch_size] if isinstance(out, Tensor) else out


def _refuse_cached(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, MessagePassing) and getattr(layer, "cached", False):
            raise UnsupportedModelError(
                f"{describe(name or type(layer).__name__, layer)} must compute its edges in every call",
                got="cached=True, which would reuse the first batch's",
                fix="Create it with cached=False.",
            )


def data_key(loader: HaloLoader, task: Task) -> str:
    """Fingerprint of everything that a run learns from: the graph, and what the task reads from its data."""
    return fingerprint(*task.identity(loader.data), graph=loader.graph.key)


def halo_loaders(dataset: Dataset, options: FitOptions, labels: Tensor | None = None) -> dict[str, HaloLoader]:
    """One loader for each split; splits of the same graph share it.

    Args:
        dataset: The graphs.
        options: How to cut them into batches.
        labels: The part of each node of the training graph, ``[num_nodes]``, if it is already cut.
    """
    common: dict[str, Any] = {
        name: getattr(options, name) for name in ("partition", "seed", "num_workers", "cache_dir")
    } | {"keep": options.keep_batches}
    train = {**common, "batch_size": options.batch_size, "shuffle": True, "drawings": options.drawings}
    if labels is not None:
        train["partition"] = labels
    made = {id(dataset.train): HaloLoader(dataset.train, None if labels is not None else options.num_parts, **train)}
    graphs = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    for graph in graphs.values():
        if id(graph) not in made:
            # Batches of other graphs have about as many nodes as those of the training graph.
            share = graph.num_nodes / dataset.train.num_nodes
            made[id(graph)] = HaloLoader(graph, max(1, round(options.num_parts / options.batch_size * share)), **common)
    return {split: made[id(graph)] for split, graph in graphs.items()}


def subgraph_loader(graph: Data, task: Task, options: FitOptions) -> ClusterLoader | SampleLoader:
    """A loader of joined parts, or with a fan-out of sampled neighbourhoods of the training nodes.

    Both have the same number of batches in an epoch.
    """
    common: dict[str, Any] = {"seed": options.seed, "num_workers": options.num_workers}
    if options.fan_out is None:
        common |= {"partition": options.partition, "cache_dir": options.cache_dir}
        return ClusterLoader(graph, options.num_parts, batch_size=options.batch_size, shuffle=True, **common)
    rows, _ = task.targets_of_graph(graph)
    nodes = torch.arange(graph.num_nodes) if rows is None else rows
    return SampleLoader(graph, nodes, options.fan_out, -(-options.num_parts // options.batch_size), **common)
