"""The training loop: one loop for GAS, full batch and the baselines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.autoscale import autoscale, is_autoscaled
from gnnautoscale.datasets import Dataset
from gnnautoscale.engine import Engine, Precision
from gnnautoscale.errors import InputError
from gnnautoscale.feed import Feed, Placement
from gnnautoscale.files import check_data
from gnnautoscale.history import Storage
from gnnautoscale.modes import OnSubgraphs, WithHistories, halo_loaders, subgraph_loader
from gnnautoscale.options import ON_SUBGRAPHS, Evaluation, HistoryDtype, Mode, Partitioner, Schedule, check_options
from gnnautoscale.peak_memory import PeakMemory
from gnnautoscale.regularize import LocalLipschitz

_CALM_DOWN = "lower lr, or clip gradients with grad_norm"


@dataclass(frozen=True)
class Epoch:
    """What an epoch gave.

    Attributes:
        number: From 1.
        loss: Mean training loss over the epoch's training nodes, without penalties.
        scores: Score on ``"train"``, ``"val"`` and ``"test"``; empty when the epoch was not evaluated.
        learning_rate: The learning rate it was trained with.
        seconds: Time of training, with waiting for batches, without evaluation and refresh.
    """

    number: int
    loss: float
    scores: dict[str, float]
    learning_rate: float
    seconds: float


@dataclass
class FitResult:
    """What training gave.

    Attributes:
        epochs: The curves.
        best_epoch: Number of the epoch with the best validation score, whose weights the model has now.
        scores: Score of that epoch on ``"train"``, ``"val"`` and ``"test"``.
        metric: ``"accuracy"`` or ``"micro-F1"``.
        steps: Number of optimizer steps.
        seconds: Time spent on ``"partition"``, ``"train"``, ``"refresh"`` and ``"evaluate"``.
        peak_memory: Bytes in use at the peak of training, or ``None`` where that cannot be measured. Evaluations count,
            except in the modes ``"cluster"`` and ``"sage"``, where they run on the whole graph at once.
        history_bytes: Bytes that the histories take.
        connectivity: Halo nodes per batch node, the mean over the parts; 0 in modes without a halo.
        options: What :func:`fit` was called with.
        how: How training steps were run, in words.
    """

    metric: str
    options: dict[str, Any]
    epochs: list[Epoch] = field(default_factory=list)
    best_epoch: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int | None = None
    history_bytes: int = 0
    connectivity: float = 0.0
    how: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        values: dict[str, Any] = jsonable(asdict(self))
        return values


def jsonable(value: Any) -> Any:
    """The value with numbers that JSON does not have replaced by ``None``."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def fit(
    model: nn.Module,
    data: Data | Dataset,
    *,
    mode: Mode = "gas",
    parts: int = 8,
    batch_size: int = 1,
    partition: Partitioner = "metis",
    drawings: int | None = None,
    fan_out: Sequence[int] | None = None,
    epochs: int = 200,
    steps_per_epoch: int | None = None,
    lr: float = 0.01,
    schedule: Schedule = "constant",
    weight_decay_conv: float = 0.0,
    weight_decay_other: float = 0.0,
    grad_norm: float | None = None,
    lipschitz: float = 0.0,
    lipschitz_radius: float = 0.1,
    edge_dropout: float = 0.0,
    refresh_every: str | int = "never",
    evaluation: Evaluation = "exact",
    evaluate_every: int = 1,
    evaluate_parts: int | None = None,
    patience: int | None = None,
    storage: Storage = "device",
    history_dtype: HistoryDtype = "same",
    precision: Precision = "float32",
    batches_on: Placement = "auto",
    capture: bool = True,
    device: str = "cpu",
    num_workers: int = 0,
    seed: int = 0,
    cache_dir: str | None = None,
    callback: Callable[[Epoch], None] | None = None,
) -> FitResult:
    """Train a model for node classification and leave it with the weights of its best epoch.

    Args:
        model: Any module of PyG layers that returns one row of class scores per node. It is autoscaled, unless the
            mode has no histories.
        data: The graph, with ``x``, ``y`` and masks, or a data set.
        mode: "gas"; "full" for full batch (one part, no penalty); "history" for the naive baseline (random parts,
            neither penalty nor clipping); "cluster" for Cluster-GCN (parts, and only the edges inside of a batch);
            "sage" for GraphSAGE's neighbour sampling. The last two have no histories: storage, history_dtype,
            batches_on and capture mean nothing to them, and they are evaluated on the whole graph at once.
        parts: Number of parts to cut the graph into.
        batch_size: Number of parts in a batch. With mode "sage" the training nodes are drawn into as many batches as
            the parts would give.
        partition: How to cut: "metis" or "random".
        drawings: Draw parts into batches only so many times, and take these drawings again at random: batches that come
            back are kept, and a GPU's steps on them captured. By default they are drawn for every epoch.
        fan_out: How many neighbours mode "sage" draws for each node, one number per layer: the first for the training
            nodes, the last for those furthest away; -1 takes all.
        epochs: Number of passes over the training graph.
        steps_per_epoch: Number of batches after which an epoch ends early.
        lr: Learning rate of Adam.
        schedule: "constant"; "plateau" halves the rate after 10 evaluations without a better validation score;
            "cosine" lowers it to zero over all epochs.
        weight_decay_conv: Weight decay of the model's first group of weights: its message-passing layers, or what
            the model's decayed_modules() names.
        weight_decay_other: Weight decay of all other weights.
        grad_norm: Norm that gradients are clipped to.
        lipschitz: Weight of the local Lipschitz penalty.
        lipschitz_radius: Radius of that penalty's disturbances.
        edge_dropout: Share of the edges left out at random in each training step.
        refresh_every: When to recompute all histories with the current weights: "never", "epoch", or a number of
            steps.
        evaluation: "exact", which leaves the histories alone, or "histories" for the last layer over histories as
            they are.
        evaluate_every: Number of epochs between evaluations.
        evaluate_parts: Number of batches to evaluate and refresh in: fewer are faster and need more memory. By default
            those of training. Baselines without histories always evaluate at once.
        patience: Number of evaluations without a better validation score after which training stops.
        storage: Where histories live: "device" or "host" memory.
        history_dtype: The type histories are kept in: "same" as the embeddings, "float32", "bfloat16" or "float16"; or
            "int8" or "float8" with a scale for each row.
        precision: Of matrix products: "float32", "tf32" (on a GPU), or "bfloat16" (autocast).
        batches_on: Where a GPU's batches live: on the "device", in "host" memory from where they are copied ahead, or
            "auto" for the device if they fit. Parts that are drawn into new batches every epoch are always copied.
        capture: Whether a GPU's training steps are captured as CUDA graphs where that is possible.
        device: Where to compute, such as "cpu" or "cuda".
        num_workers: Number of processes that prepare batches.
        seed: Makes training reproducible.
        cache_dir: Where partitions are kept between runs.
        callback: Called after each epoch.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from gnnautoscale.models import GCN
        >>> data = KarateClub()[0]
        >>> data.val_mask = data.test_mask = ~data.train_mask
        >>> result = fit(GCN(34, 4, hidden=16), data, parts=4, epochs=5)
        >>> len(result.epochs)
        5
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "data", "callback")}
    check_options(options)
    options["fan_out"] = None if fan_out is None else list(fan_out)
    if is_autoscaled(model):
        raise InputError(
            "fit attaches histories itself", got="an autoscaled model", fix="Call gas.detach(model) first."
        )
    dataset = data if isinstance(data, Dataset) else Dataset.of(data)
    _check_dataset(dataset, evaluation)
    if mode == "full":
        parts, batch_size, lipschitz = 1, 1, 0.0
    elif mode == "history":
        partition, lipschitz, grad_norm = "random", 0.0, None

    torch.manual_seed(seed)
    result = FitResult(metric="micro-F1" if dataset.multilabel else "accuracy", options=options)
    clock = _Clock(result.seconds)
    objective = partial(_objective, dataset.num_classes)
    optimizer = make_optimizer(model.to(device), lr, weight_decay_conv, weight_decay_other)
    scheduler = _scheduler(optimizer, schedule, epochs)
    way: WithHistories | OnSubgraphs
    if mode in ON_SUBGRAPHS:
        with clock("partition"):
            subgraphs = subgraph_loader(
                dataset.train, parts, batch_size, partition, fan_out, seed, num_workers, cache_dir
            )
        way = OnSubgraphs(
            model, subgraphs, dataset, optimizer, objective, device=device, grad_norm=grad_norm, precision=precision
        )
    else:
        with clock("partition"):
            loaders = halo_loaders(dataset, parts, batch_size, partition, drawings, seed, num_workers, cache_dir)
        loader = loaders["train"]
        dtype = None if history_dtype == "same" else getattr(torch, history_dtype.replace("float8", "float8_e4m3fn"))
        autoscale(model, dataset.train, storage=storage, dtype=dtype, edge_dropout=edge_dropout)
        engine = Engine(
            model,
            optimizer,
            Feed(model, placement=batches_on, fixed=loader.is_fixed, num_batches=loader.num_batches),
            objective,
            grad_norm=grad_norm,
            penalty=LocalLipschitz(model, lipschitz_radius) if lipschitz else None,
            penalty_weight=lipschitz,
            precision=precision,
            capture=capture,
        )
        way = WithHistories(model, loaders, engine, evaluate_parts)
    result.connectivity = way.connectivity
    refresh_steps = int(refresh_every) if str(refresh_every).isdecimal() else None
    best_weights: dict[str, Tensor] = {}
    batches_seen = 0

    def after_batch() -> None:
        nonlocal batches_seen
        batches_seen += 1
        if refresh_steps is not None and batches_seen % refresh_steps == 0:
            with clock("refresh"):
                way.refresh()

    on_failure = ExitStack()
    on_failure.callback(way.give_up)
    with on_failure, PeakMemory(torch.device(device)) as peak, way.running():
        for number in range(1, epochs + 1):
            model.train()
            rate = float(optimizer.param_groups[0]["lr"])
            start = clock.total("train")
            with clock("train"):
                mean_loss = way.epoch(steps_per_epoch, after_batch)
            result.steps = way.steps
            if not math.isfinite(mean_loss):
                raise FloatingPointError(f"the loss is {mean_loss} in epoch {number}: {_CALM_DOWN}")
            if refresh_every == "epoch":
                with clock("refresh"):
                    way.refresh()
            scores: dict[str, float] = {}
            if number % evaluate_every == 0 or number == epochs:
                with clock("evaluate"), peak.paused() if way.evaluates_at_once else nullcontext():
                    # Right after a refresh the histories are exact, and one layer is less work than all of them.
                    fresh = refresh_every == "epoch" and not dataset.inductive and not way.at_once
                    scores = _evaluate(dataset, partial(way.output, evaluation="histories" if fresh else evaluation))
            result.epochs.append(Epoch(number, mean_loss, scores, rate, clock.total("train") - start))
            if callback is not None:
                callback(result.epochs[-1])
            if scores and not scores["val"] <= result.scores.get("val", -math.inf):
                result.best_epoch, result.scores = number, scores
                best_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            if scheduler is not None and result.steps and (scores or schedule == "cosine"):
                scheduler(scores.get("val", 0.0))
            evaluated = [epoch.number for epoch in result.epochs if epoch.scores]
            if patience is not None and sum(epoch > result.best_epoch for epoch in evaluated) >= patience:
                break
        result.how = way.how
        on_failure.pop_all()
    model.load_state_dict(best_weights)
    result.peak_memory = peak.num_bytes
    result.history_bytes = way.history_bytes
    return result


def _check_dataset(dataset: Dataset, evaluation: Evaluation) -> None:
    if dataset.inductive:
        for split, graph in (("train", dataset.train), ("val", dataset.val), ("test", dataset.test)):
            check_data(graph, splits=(split,))
            if graph.x.size(1) != dataset.num_features:
                raise InputError(
                    f"all graphs of a data set must have {dataset.num_features} features",
                    got=f"{graph.x.size(1)} in the {split} graph",
                    fix="Prepare all graphs in the same way.",
                )
    else:
        check_data(dataset.train, splits=("train", "val"))
    if evaluation == "histories" and dataset.inductive:
        raise InputError(
            "evaluation from histories needs the validation nodes in the training graph",
            got="a data set with graphs of its own for validation",
            fix="Use evaluation='exact'.",
        )


def score(out: Tensor, y: Tensor, mask: Tensor) -> float:
    """Accuracy of class scores, or micro-averaged F1 of multi-label scores, in percent.

    Args:
        out: Scores, ``[num_nodes, num_classes]``.
        y: Classes ``[num_nodes]``, or labels 0 and 1 ``[num_nodes, num_classes]``.
        mask: The nodes that count, ``[num_nodes]``.

    Example:
        >>> score(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]), torch.tensor([True, True]))
        50.0
    """
    out, y = out[mask], y[mask]
    if not y.size(0):
        return math.nan
    if y.dim() == 1:
        return 100.0 * float((out.argmax(dim=-1) == y).double().mean())
    predicted, wanted = out > 0, y > 0.5
    both = int((predicted & wanted).sum())
    either = int(predicted.sum()) + int(wanted.sum())
    return 100.0 * 2 * both / either if either else math.nan


def _objective(num_classes: int, out: Any, y: Tensor) -> Tensor:
    """Cross entropy over classes, or over each label by itself."""
    if not isinstance(out, Tensor) or out.dim() != 2 or out.size(1) != num_classes:
        raise InputError(
            f"the model must return a tensor of {num_classes} scores per node, one for each class",
            got=f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
            fix="Give its last layer as many outputs as there are classes.",
        )
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return F.cross_entropy(out, y) if y.dim() == 1 else F.binary_cross_entropy_with_logits(out, y.to(out.dtype))


def _evaluate(dataset: Dataset, output: Callable[[str], Tensor]) -> dict[str, float]:
    """The scores of all splits, from the model's output for all nodes of each split's graph."""
    scores: dict[str, float] = {}
    outputs: dict[int, Tensor] = {}
    for split, graph in (("train", dataset.train), ("val", dataset.val), ("test", dataset.test)):
        if id(graph) not in outputs:
            outputs[id(graph)] = output(split)
            if not bool(torch.isfinite(outputs[id(graph)]).all()):
                raise FloatingPointError(f"the model's outputs are not finite any more: {_CALM_DOWN}")
        scores[split] = score(outputs[id(graph)], graph.y.cpu(), graph[f"{split}_mask"].cpu())
    return scores


def make_optimizer(model: nn.Module, lr: float, decay_conv: float, decay_other: float) -> torch.optim.Optimizer:
    """Adam with the two weight-decay groups of the paper's experiments; on a GPU such that steps can be captured.

    Args:
        model: The model, on its device.
        lr: Learning rate.
        decay_conv: Weight decay of the message-passing layers, or of what ``model.decayed_modules()`` names.
        decay_other: Weight decay of all other weights.
    """
    named = getattr(model, "decayed_modules", None)
    modules = named() if named else [module for module in model.modules() if isinstance(module, MessagePassing)]
    first = {id(weight): weight for module in modules for weight in module.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in first]
    groups = [
        {"params": list(first.values()), "weight_decay": decay_conv},
        {"params": rest, "weight_decay": decay_other},
    ]
    groups = [group for group in groups if group["params"]]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return torch.optim.Adam(groups, lr=lr)
    # A captured step reads the learning rate from memory; each group has its own, since schedules write into it.
    groups = [{**group, "lr": torch.tensor(lr, device=device)} for group in groups]
    return torch.optim.Adam(groups, lr=torch.tensor(lr, device=device), fused=True, capturable=True)


def _scheduler(optimizer: torch.optim.Optimizer, schedule: Schedule, epochs: int) -> Callable[[float], None] | None:
    """What to call with the validation score to move the learning rate on."""
    if schedule == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=9, threshold=0.0
        ).step
    if schedule == "cosine":
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
        return lambda _: cosine.step()
    return None


class _Clock:
    """Adds up the time of named pieces of work; a piece inside of another one is not counted twice."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work that was launched belongs to the piece that launched it
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] = self.total(self._running[-1]) + now - self._since
        self._since = now

    def total(self, name: str) -> float:
        """The time of a piece of work so far."""
        return self._seconds.get(name, 0.0)
