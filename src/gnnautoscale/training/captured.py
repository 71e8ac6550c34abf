"""Training steps of an autoscaled model: captured on a GPU where that is possible."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.attach import LocalLipschitz, attached, autoscale, plan_of, refresh
from gnnautoscale.data import Dataset
from gnnautoscale.exact import ExactPasses, Loss, exact_forward, forget_captured
from gnnautoscale.forward import StepExchange, evaluating
from gnnautoscale.graph import BatchInfo, HaloLoader, ReadyBatch
from gnnautoscale.ranks import RankLoader, attach_shared, average_gradients
from gnnautoscale.replay import WARM_UP, Placement, Replayer, on_training_stream
from gnnautoscale.tasks import Task, trained_rows
from gnnautoscale.training.feed import Feed, Item, as_it_is, plain_item
from gnnautoscale.training.options import FitOptions
from gnnautoscale.training.steps import Steps


def plain_graph(loader: HaloLoader) -> tuple[Data, Tensor]:
    """What a task sees of a loader's plain graph: all of it."""
    return loader.data, torch.arange(loader.graph.num_nodes)


class Engine(Steps):
    """Trains an autoscaled model on the batches of a loader.

    On a GPU each batch's step is captured if ``capture`` allows it, batches come back unchanged and the model does the
    same in every step; :attr:`how` says so, or why not. Batches that come back live where ``placement`` says. The
    optimizer needs ``capturable=True`` there. ``nodes`` gives those nodes of a batch that may have targets, and
    ``rows`` their rows of the model's output; ``whole`` gives those of the whole graph, as its task sees them, and
    their numbers there. Further arguments are those of :class:`Steps`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        device: torch.device,
        *,
        capture: bool = True,
        placement: Placement = "auto",
        nodes: Callable[[Any], Data] = as_it_is,
        rows: Callable[[Any], Any] = as_it_is,
        whole: Callable[[HaloLoader], tuple[Data, Tensor]] = plain_graph,
        **further: Any,
    ) -> None:
        super().__init__(model, optimizer, task, device, call=lambda batch: rows(model(batch)), nodes=nodes, **further)
        self._rows, self._of_whole = rows, whole
        self._feed = Feed(task, device, nodes)
        self._scaler = attached(model)
        self._replayer = Replayer(
            model, device, capture=capture, placement=placement, attributes=self._scaler.attributes
        )
        self._replayer.why_not = self._replayer.why_not or task.why_uncaptured or self._why_not_with_ranks()
        self._model_version = self._scaler.version
        # The whole graph as a batch, if it is the same every time. With and without a refresh: the number of passes
        # over it so far, and a captured pass.
        self._whole: weakref.ref[BatchInfo] | None = None
        self._passes: Counter[bool] = Counter()
        self._captured: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor, Data]] = {}
        #: How the last exact step ran, in words.
        self.exact_how = "no step ran"
        self._why_no_pass = None if capture and self.on_gpu else "it is not wanted, or there is no GPU"

    def _why_not_with_ranks(self) -> str | None:
        """What other ranks have to be told within a step, which a graph cannot do."""
        if self.together is not None and self._always_backward:
            return "norms need the rows of all ranks"
        if self.together is not None and type(self.task).see is not Task.see:
            return "the loss needs the outputs of all ranks"
        return None

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU."""
        return self.device.type == "cuda"

    @property
    def how(self) -> str:
        """How steps run, in words."""
        return self._replayer.how

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of everything that touches the model while it trains; on a GPU it has a stream of its own."""
        if not self.on_gpu:
            yield
            return
        try:
            with super().running(), on_training_stream(self.device):
                yield
                self._scaler.memory.settle()
        finally:
            self.times.stop()
            self._forget()

    def epoch(
        self,
        loader: HaloLoader,
        most: int | None = None,
        after_step: Callable[[Item], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> float:
        """Train for an epoch, or on its first ``most`` batches; waits for the mean loss over all targets.

        That is without the penalty. ``after_step`` is called with every batch.
        """
        self._notice_changes()
        self._replayer.times = self.times
        # A step knows what it reads of a batch that comes back.
        batches = islice(loader.ready_batches(kept_with=()), most)
        return self.train(self._feed.items(batches, loader.first_of_next_epoch), after_step, before_step)

    def refresh(self, batch: Data) -> None:
        """Push fresh rows of a batch, and of compensated steps fresh gradients of these, without training on it."""
        self._replayer.why_not = self._replayer.why_not or "batches are refreshed between steps"
        item = plain_item(batch, self.task, self.device, self._feed.nodes)

        def loss(out: Any) -> Tensor:
            self._show(out, item.batch)
            return self._losses(out, item)[1]

        with self._autocast():
            refresh(self._model, item.batch, loss=loss)

    def exact_epoch(
        self, loader: HaloLoader, num_targets: float, after_step: Callable[[None], None], *, done: bool
    ) -> float:
        """Train for one step with the gradient of the whole graph; returns the mean loss over all its targets.

        If it was ``done`` before a checkpoint, only its loss is left to return.
        """
        try:
            if not done:
                self._exact_step(loader, num_targets)
                after_step(None)
            return float(self._total) / max(self._count, 1)
        finally:
            self._total.zero_()
            self._count = 0

    def _exact_step(self, loader: HaloLoader, num_targets: float) -> None:
        self._replayer.forget()
        self._feed.clear()
        self._forget_whole()
        if not self.task.separable:
            self._exact_step_at_once(loader)
            return
        # Ranks add up their shares by the mean of their gradients.
        size = 1 if self.together is None else self.together.world.size

        def inputs(batch: Data) -> dict[str, Tensor]:
            rows, targets = self.task.targets(self._feed.nodes(batch))
            if not targets.size(0):
                return {}
            return {"targets": targets} if rows is None else {"targets": targets, "rows": rows}

        def seeds(out: Any, given: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
            if not given:
                return [], []
            out, targets = self._rows(out), given["targets"]
            chosen = trained_rows(out, given.get("rows"))
            mean = self.task.loss(chosen, targets)
            self._check_loss(mean)
            loss = mean * (targets.size(0) / num_targets)
            self._total += loss.detach()
            return [size * loss], [None]

        penalty = None if self._penalty is None else (self._penalty, size * self._penalty_weight)
        loss = Loss(inputs, seeds, fixed=True)
        passes = ExactPasses(self._model, loader, inside=self._autocast, penalty=penalty, loss=loss)
        passes.forward()
        self._optimizer.zero_grad()
        passes.backward(loss)
        if self.together is not None:
            self.together.average(self.together.gradients(), counts=True)
            self._total.fill_(self.together.world.add_up(float(self._total))[0])
        self.exact_how = passes.how
        if not math.isfinite(self._total):
            raise FloatingPointError(f"the loss is {float(self._total)}")
        self._update()
        self.steps, self._count = self.steps + 1, 1

    def _exact_step_at_once(self, loader: HaloLoader) -> None:
        """An exact step whose loss takes the outputs of all nodes together."""
        seen, nodes = self._of_whole(loader)
        rows, targets = self.task.targets_of_graph(seen)
        self._optimizer.zero_grad()
        out = self._rows(exact_forward(self._model, loader, device=self.device))
        self.task.see(out, nodes.to(self.device))
        loss = self.task.loss(out if rows is None else out[rows.to(self.device)], targets.to(self.device))
        self._check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._total += loss.detach()
        self.exact_how = "uncaptured, since the loss takes all outputs together"
        if not math.isfinite(self._total):
            raise FloatingPointError(f"the loss is {float(self._total)}")
        self._update()
        self.steps, self._count = self.steps + 1, 1

    def _notice_changes(self) -> None:
        """Forget what was captured and packed if the model was changed, by a callback for example."""
        version = self._scaler.version
        if version != self._model_version:
            self._model_version = version
            self._forget()

    def _forget(self) -> None:
        forget_captured(self._model)
        self._replayer.forget()
        self._feed.clear()
        self._forget_whole()

    def _run(self, item: Item) -> None:
        if self._penalty is not None and any(call.draws for call in self._scaler.calls.values()):
            self._replayer.why_not = (
                "the penalty runs layers with dropout inside a second time with the same random numbers"
            )
        extras = {"targets": item.targets} if item.rows is None else {"targets": item.targets, "rows": item.rows}
        trains = item.targets.size(0) > 0
        if self.together is None or self._replayer.why_not is not None:
            self._replayer.run(item.batch, self._work, extras, trains=trains)
        else:
            with self.together.later():
                gradients = self._replayer.run(item.batch, self._own_work, extras, trains=trains)
            self.together.average(gradients, counts=self._trains_on(item))
            if self._accumulate == 1 and self.together.trained:
                self._update()
        if self._replayer.why_not is not None:
            self._replayer.packer.keep(item.batch)

    def _work(self, batch: Data, extras: dict[str, Tensor]) -> None:
        self._step(Item(batch, extras.get("rows"), extras["targets"]))

    def _own_work(self, batch: Data, extras: dict[str, Tensor]) -> list[Tensor | None]:
        """What a rank does in a step by itself; returns the gradients, which are not those of all ranks yet."""
        self._optimizer.zero_grad()
        self._learn(Item(batch, extras.get("rows"), extras["targets"]))
        return self.together.gradients() if self.together is not None else []

    @torch.no_grad()
    def output(self, batch: ReadyBatch, *, refresh: bool = False) -> Tensor:
        """The model's output for the whole training graph as one batch, in evaluation mode.

        On a GPU a batch that comes back stays there, and from the third pass on a captured one is replayed if nothing
        stands in the way. Another batch takes its place. A refresh also writes all histories, which must be in device
        memory then. The output, ``[num_nodes, num_outputs]``, is on the model's device; the next call overwrites it.
        """
        self._notice_changes()
        if batch.info.keeper is not None:
            batch.info.keeper(batch)  # it comes back
        if self._whole is None or self._whole() is not batch.info:
            self._forget_whole()
            self._whole = weakref.ref(batch.info)
        if refresh not in self._captured:
            with (
                evaluating(self._model),
                self._scaler.visiting(batch.info.graph, apart=not refresh) as memory,
                self._scaler.running(StepExchange(push_all=refresh)),
            ):
                memory.mark_changed()  # not asked for during training, and checksums take time
                whole = batch.tagged_copy().to(str(self.device))
                self._passes[refresh] += 1
                if self._passes[refresh] > WARM_UP and self._why_no_pass is None:
                    batch.info.wait()  # a graph cannot wait for what came before it
                    graph, out, self._why_no_pass = self._replayer.graphs.record(partial(self._call, whole))
                    if self._why_no_pass is None:
                        self._captured[refresh] = graph, out, whole
                if refresh not in self._captured:
                    plain: Tensor = self._call(whole)
                    return plain
        graph, out, _ = self._captured[refresh]
        graph.replay()
        return out

    def _forget_whole(self) -> None:
        self._whole = None
        self._captured.clear()
        self._passes.clear()


def engine_for(
    model: nn.Module,
    dataset: Dataset,
    loader: HaloLoader,
    optimizer: torch.optim.Optimizer,
    task: Task,
    options: FitOptions,
    **further: Any,
) -> Engine:
    """Attach histories of the training graph to a model; returns what trains it."""
    shared = partial(attach_shared, model, loader) if isinstance(loader, RankLoader) else None
    if shared is not None:
        shared = partial(shared, lag=options.lag, sync_norms=options.sync_norms)
    attach = shared or partial(autoscale, model, dataset.passing())
    attach(
        storage=options.storage,
        dtype=history_dtype(options),
        history_dir=options.history_dir,
        edge_dropout=options.edge_dropout,
        compensate=options.compensate,
    )
    if any(is_lazy(weight) for weight in model.parameters()):
        plan_of(model, loader)  # gives them their shapes
    per_target, together = None, None
    if isinstance(loader, RankLoader) and loader.world.size > 1:
        together = average_gradients(model, loader, *([] if task.module is None else [task.module]))
    if options.compensate == "gradient":
        # On average over the batches, the loss is that of the whole graph.
        per_target = sum(loader.everyone(len(loader))) / num_targets_of(task, dataset, loader)
    return Engine(
        model,
        optimizer,
        task,
        torch.device(options.device),
        grad_norm=options.grad_norm,
        penalty=LocalLipschitz(model, options.lipschitz_radius) if options.lipschitz else None,
        penalty_weight=options.lipschitz,
        precision=options.precision,
        accumulate=options.accumulate,
        capture=options.capture,
        placement=options.batches_on,
        per_target=per_target,
        together=together,
        always_backward=options.sync_norms and together is not None,
        **further,
    )


def num_targets_of(task: Task, dataset: Dataset, loader: HaloLoader) -> float:
    """What the targets of all batches count together; a rank's data set is its share of the graph, or all of it."""
    here = task.weight_of(dataset.train)
    return sum(loader.everyone(here)) if dataset.passing() is loader.data else here


def history_dtype(options: FitOptions) -> torch.dtype | None:
    """The type of histories; ``None`` for that of the model's rows."""
    name = options.history_dtype
    return None if name == "same" else getattr(torch, name.replace("float8", "float8_e4m3fn"))
