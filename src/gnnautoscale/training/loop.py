"""The training loop: one loop for GAS, full batch and the baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import PeakMemory
from gnnautoscale.analysis import check_diagnostics
from gnnautoscale.attach import LocalLipschitz, autoscale, is_autoscaled
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader
from gnnautoscale.history import Storage
from gnnautoscale.runs import Epoch, FitResult, check_run_dir
from gnnautoscale.tasks import Task, task_for
from gnnautoscale.training.captured import Engine
from gnnautoscale.training.checkpoint import Checkpoint
from gnnautoscale.training.clock import Clock
from gnnautoscale.training.faults import explained
from gnnautoscale.training.feed import Feed, Placement
from gnnautoscale.training.journal import Board, Journal, check_tensorboard, describe_run
from gnnautoscale.training.optimizer import LearningRate, make_optimizer
from gnnautoscale.training.options import (
    ON_SUBGRAPHS,
    Evaluation,
    HistoryDtype,
    Mode,
    Partitioner,
    Schedule,
    check_options,
)
from gnnautoscale.training.resume import (
    Run,
    check_fresh,
    check_same_run,
    labels_of,
    open_checkpoint,
    open_run_folder,
    stop_requests,
)
from gnnautoscale.training.steps import Precision
from gnnautoscale.training.strategies import HistoryStrategy, SubgraphStrategy, data_key, halo_loaders, subgraph_loader


def fit(
    model: nn.Module,
    data: Data | Dataset,
    *,
    task: Task | None = None,
    mode: Mode = "gas",
    num_parts: int = 8,
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
    history_dir: str | None = None,
    history_dtype: HistoryDtype = "same",
    precision: Precision = "float32",
    batches_on: Placement = "auto",
    keep_batches: bool = True,
    capture: bool = True,
    device: str = "cpu",
    num_workers: int = 0,
    seed: int = 0,
    cache_dir: str | None = None,
    checkpoint_dir: str | None = None,
    checkpoint_every: str | int = "epoch",
    resume: str | None = None,
    run_dir: str | None = None,
    diagnose: Sequence[str] = ("staleness",),
    diagnose_every: str | int = "auto",
    tensorboard: bool = False,
    callback: Callable[[Epoch], None] | None = None,
) -> FitResult:
    """Train a model and leave it with the weights of its best epoch.

    Args:
        model: Any module of PyG layers that returns one row of outputs per node. It is autoscaled, unless the mode
            has no histories.
        data: The graph, with ``x`` and what the task needs, or a data set.
        task: What to learn and how to score it; by default the one that fits the data: node classification, which
            needs ``y`` and masks.
        mode: "gas"; "full" for full batch (one part, no penalty); "history" for the naive baseline (random parts,
            neither penalty nor clipping); "cluster" for Cluster-GCN (parts, and only the edges inside of a batch);
            "sage" for GraphSAGE's neighbour sampling. The last two have no histories: storage, history_dtype,
            batches_on and capture mean nothing to them, and they are evaluated on the whole graph at once.
        num_parts: Number of parts to cut the graph into.
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
        storage: Where histories live: "device" or "host" memory, on "disk", or "auto" for the first of these that has
            room for them.
        history_dir: The folder for histories on disk, which belongs to one run at a time.
        history_dtype: The type histories are kept in: "same" as the embeddings, "float32", "bfloat16" or "float16"; or
            "int8" or "float8" with a scale for each row.
        precision: Of matrix products: "float32", "tf32" (on a GPU), or "bfloat16" (autocast).
        batches_on: Where a GPU's batches live: on the "device", in "host" memory from where they are copied ahead, or
            "auto" for the device if they fit. Parts that are drawn into new batches every epoch are always copied.
        keep_batches: Whether batches that come back are cut once and kept in host memory. If not, features may be
            memory-mapped and larger than the memory; steps are not captured then.
        capture: Whether a GPU's training steps are captured as CUDA graphs where that is possible.
        device: Where to compute, such as "cpu" or "cuda".
        num_workers: Number of processes that prepare batches.
        seed: Makes training reproducible.
        cache_dir: Where partitions are kept between runs.
        checkpoint_dir: The folder for checkpoints; the newest two are kept. With it, Ctrl-C ends training after the
            current step and a last checkpoint.
        checkpoint_every: When to write one: "epoch", or a number of steps.
        resume: A checkpoint, or a folder whose newest one is meant, to go on from as if training had never stopped.
        run_dir: A new folder for what the run is, gives, takes and moves, epoch by epoch. When resuming, the folder of
            the same run goes on. It changes nothing about training. The command line makes one below ./runs unless this
            is "none".
        diagnose: What else to measure then: "staleness" of histories, error of "gradients", and constants of layers
            ("lipschitz"). The last two run the model on the whole graph at once.
        diagnose_every: When to: "auto" after the first and the last epoch, and in between as often as it takes at most
            about 2 % of the training time; "never"; or a number of epochs.
        tensorboard: Whether the folder's numbers are written for TensorBoard too.
        callback: Called after each epoch.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from gnnautoscale.models import GCN
        >>> data = KarateClub()[0]
        >>> data.val_mask = data.test_mask = ~data.train_mask
        >>> result = fit(GCN(34, 4, hidden=16), data, num_parts=4, epochs=5)
        >>> len(result.epochs)
        5
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "data", "task", "callback")}
    check_options(options)
    options["fan_out"] = None if fan_out is None else list(fan_out)
    check_diagnostics(diagnose)
    if tensorboard:
        check_tensorboard()
    options["diagnose"] = list(diagnose)
    if is_autoscaled(model):
        raise InputError(
            "fit attaches histories itself", got="an autoscaled model", fix="Call gas.detach(model) first."
        )
    dataset = data if isinstance(data, Dataset) else Dataset.of(data)
    dataset.check()
    task = task_for(dataset) if task is None else task
    task.check_dataset(dataset)
    _check_evaluation(dataset, evaluation)
    if mode == "full":
        num_parts, batch_size, lipschitz = 1, 1, 0.0
    elif mode == "history":
        partition, lipschitz, grad_norm = "random", 0.0, None

    checkpoint = None if resume is None else open_checkpoint(Path(resume))
    folder = None if checkpoint_dir is None else Path(checkpoint_dir)
    if folder is not None and (checkpoint is None or folder.resolve() != checkpoint.path.parent.resolve()):
        check_fresh(folder)
    if run_dir is not None and checkpoint is None:
        check_run_dir(Path(run_dir))

    torch.manual_seed(seed)
    result = FitResult(metric=task.metric, options=options)
    clock = Clock(result.seconds)
    optimizer = make_optimizer(model.to(device), lr, weight_decay_conv, weight_decay_other)
    rate = LearningRate(optimizer, schedule, epochs)
    strategy: HistoryStrategy | SubgraphStrategy
    loader: HaloLoader | None = None
    if mode in ON_SUBGRAPHS:
        with clock("partition"):
            subgraphs = subgraph_loader(
                dataset.train, task, num_parts, batch_size, partition, fan_out, seed, num_workers, cache_dir
            )
        strategy = SubgraphStrategy(
            model, subgraphs, dataset, optimizer, task, device=device, grad_norm=grad_norm, precision=precision
        )
    else:
        labels = None if checkpoint is None else labels_of(checkpoint, dataset.train.num_nodes)
        with clock("partition"):
            loaders = halo_loaders(
                dataset, num_parts, batch_size, partition, drawings, seed, num_workers, cache_dir, keep_batches, labels
            )
        loader = loaders["train"]
        if checkpoint is not None:
            check_same_run(checkpoint, options, data_key(loader, task), model)
        dtype = None if history_dtype == "same" else getattr(torch, history_dtype.replace("float8", "float8_e4m3fn"))
        autoscale(
            model, dataset.train, storage=storage, dtype=dtype, history_dir=history_dir, edge_dropout=edge_dropout
        )
        engine = Engine(
            model,
            optimizer,
            Feed(model, task, placement=batches_on, fixed=loader.is_fixed, num_batches=loader.num_batches),
            grad_norm=grad_norm,
            penalty=LocalLipschitz(model, lipschitz_radius) if lipschitz else None,
            penalty_weight=lipschitz,
            precision=precision,
            capture=capture,
        )
        strategy = HistoryStrategy(model, loaders, engine, evaluate_parts)
        if evaluation == "exact" and refresh_every != "epoch":
            strategy.make_room_to_evaluate()
    if run_dir is not None:
        strategy.watch()
    run = Run(model, optimizer, rate, strategy, result, torch.device(device))
    refresh_steps, checkpoint_steps = _steps(refresh_every), _steps(checkpoint_every)
    on_failure = ExitStack()
    on_failure.callback(strategy.give_up)
    with (
        on_failure,
        ExitStack() as files,
        PeakMemory(run.device) as peak,
        strategy.running(),
        stop_requests(folder is not None) as stop,
    ):
        if checkpoint is not None:
            run.load(checkpoint)
        result.connectivity = strategy.connectivity
        journal = files.enter_context(_open_journal(options, dataset, task, run, loader, checkpoint))

        def save() -> None:
            if folder is not None:
                with clock("checkpoint"):
                    run.save(folder)
                if stop.is_set():
                    raise KeyboardInterrupt

        def after_batch() -> None:
            run.batches += 1
            if refresh_steps is not None and run.batches % refresh_steps == 0:
                with clock("refresh"):
                    strategy.refresh()
            if stop.is_set() or (checkpoint_steps is not None and run.batches % checkpoint_steps == 0):
                save()

        def look_into(epoch: int, *, last: bool) -> None:
            if journal.is_due(epoch, last=last, trained=clock.total("train")):
                with clock("diagnose"), peak.paused():
                    journal.probe(epoch)

        def is_done() -> bool:
            enough = patience is not None and result.evaluations_since_best >= patience
            return enough or len(result.epochs) >= epochs

        while not is_done():
            number = len(result.epochs) + 1
            model.train()
            learning_rate = float(optimizer.param_groups[0]["lr"])
            start = clock.total("train")
            scores: dict[str, float] = {}
            helped = partial(
                explained, strategy, number, num_parts=num_parts, batch_size=batch_size, evaluate_parts=evaluate_parts
            )
            with helped():
                with clock("train"):
                    mean_loss = strategy.epoch(steps_per_epoch, after_batch)
                if not math.isfinite(mean_loss):
                    raise FloatingPointError(f"the loss is {mean_loss}")
                result.steps = strategy.steps
                look_into(number, last=number == epochs)  # before a refresh: what the steps had to do with
                if refresh_every == "epoch":
                    with clock("refresh"):
                        strategy.refresh()
                if number % evaluate_every == 0 or number == epochs:
                    with clock("evaluate"), peak.paused() if strategy.evaluates_at_once else nullcontext():
                        # Right after a refresh the histories are exact, and one layer is less work than all of them.
                        fresh = refresh_every == "epoch" and not dataset.inductive and not strategy.at_once
                        output = partial(strategy.output, evaluation="histories" if fresh else evaluation)
                        scores = task.evaluate(dataset, output)
            result.epochs.append(Epoch(number, mean_loss, scores, learning_rate, clock.total("train") - start))
            journal.epoch(result.epochs[-1], peak.so_far)
            if scores and not scores["val"] <= result.scores.get("val", -math.inf):
                result.best_epoch, result.scores = number, scores
                run.best_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            if result.steps:
                rate.step(scores.get("val"))
            if callback is not None:
                callback(result.epochs[-1])
            with helped():
                if is_done() and refresh_every != "epoch":
                    look_into(number, last=True)
                if stop.is_set() or checkpoint_steps is None or is_done():
                    save()
        result.how, result.storage = strategy.how, strategy.storage
        on_failure.pop_all()
    model.load_state_dict(run.best_weights)
    result.peak_memory = peak.num_bytes
    result.history_bytes = strategy.history_bytes
    journal.finish(result)
    return result


def _open_journal(
    options: dict[str, Any],
    dataset: Dataset,
    task: Task,
    run: Run,
    loader: HaloLoader | None,
    checkpoint: Checkpoint | None,
) -> Journal:
    """What writes the run's folder, if it has one."""
    folder, board = None, None
    if options["run_dir"] is not None:
        about = describe_run(options, dataset, task, run.model, loader)
        folder = open_run_folder(Path(options["run_dir"]), about, checkpoint, run.result)
        board = Board(folder.path, len(run.result.epochs) + 1) if options["tensorboard"] else None
    what, every = options["diagnose"], options["diagnose_every"]
    return Journal(folder, run.strategy, run.model, loader, task, what=what, every=every, board=board)


def _steps(every: str | int) -> int | None:
    """The number of steps that an option names, if it does."""
    return int(every) if str(every).isdecimal() else None


def _check_evaluation(dataset: Dataset, evaluation: Evaluation) -> None:
    if evaluation == "histories" and dataset.inductive:
        raise InputError(
            "evaluation from histories needs the validation nodes in the training graph",
            got="a data set with graphs of its own for validation",
            fix="Use evaluation='exact'.",
        )
