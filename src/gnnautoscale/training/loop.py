"""The training loop: one loop for GAS, full batch and the baselines."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import (
    PeakMemory,
    check_argument,
    check_weights,
    describe_arguments,
    load_state,
    no_empty_folders,
    state_of,
)
from gnnautoscale.attach import detach, is_autoscaled
from gnnautoscale.data import Dataset, TypedDataset, TypedLinks, holds_graphs, is_collection
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader
from gnnautoscale.ranks import current
from gnnautoscale.runs import Epoch, FitResult, RunFolder, check_run_dir, epochs_shown, is_run_dir
from gnnautoscale.tasks import NodeClassification, Task, TaskName, check_task, task_for
from gnnautoscale.training.clock import Clock
from gnnautoscale.training.faults import explained
from gnnautoscale.training.identity import identity_of
from gnnautoscale.training.journal import Journal, describe_run, epoch_record, title_of
from gnnautoscale.training.loaders import halo_loaders, subgraph_loader
from gnnautoscale.training.loggers import Logger, TensorBoard, check_loggers, check_package, start_logger
from gnnautoscale.training.optimizer import LearningRate, make_optimizer
from gnnautoscale.training.options import OPTIONS, FitOptions
from gnnautoscale.training.rank_checks import check_from_files, check_ranked
from gnnautoscale.training.rank_summary import balance_by_shards, summary_of
from gnnautoscale.training.ranked import is_ranked, on_rank
from gnnautoscale.training.ranked_splits import strategy_on_ranks
from gnnautoscale.training.resume import (
    RunState,
    as_written,
    check_fresh,
    check_same_run,
    labels_of,
    only_writer,
    open_checkpoint,
    stop_requests,
)
from gnnautoscale.training.strategies import HistoryStrategy, Strategy, SubgraphStrategy
from gnnautoscale.training.typed_baselines import TypedSubgraphStrategy
from gnnautoscale.training.typed_strategy import TypedStrategy, check_typed_run

_LONG_TO_CUT = 5_000_000  # edges; more take longer than two seconds


def fit(  # noqa: D417 - the options are filled in below
    model: nn.Module,
    data: Data
    | HeteroData
    | Dataset
    | tuple[Data, Data, Data]
    | tuple[list[Data], list[Data], list[Data]]
    | str
    | Path,
    *,
    task: Task | TaskName | None = None,
    callback: Callable[[Epoch], None] | None = None,
    on_phase: Callable[[str], None] | None = None,
    loggers: Sequence[Logger] = (),
    progress: bool = True,
    **options: Any,
) -> FitResult:
    """Train a model and leave it with the weights of its best epoch.

    The model keeps its histories, so that :func:`~gnnautoscale.infer` and :func:`~gnnautoscale.predict` take it as it
    is. Another ``fit`` goes on from its weights, with new histories and a new optimizer; to continue a run as if it had
    never stopped, use ``checkpoint_dir`` and ``resume``.

    Args:
        model: Any module of PyG layers that returns one row of outputs per node. It is autoscaled, unless the mode
            has no histories.
        data: The graph, with ``x`` and what the task needs; one for each split, as ``RandomLinkSplit`` makes them; a
            list of graphs for each split, to predict something of each graph; a heterogeneous graph, of which one type
            of nodes has targets; a data set; or, to train on several ranks, a folder of shards.
        task: What to learn and how to score it: an object, or ``"classification"`` or ``"regression"`` of nodes, which
            need ``y`` and masks, ``"link"`` or ``"graph"``. By default the one that fits ``y``.
        {options}
        callback: Called after each epoch.
        on_phase: Called with the name of the work that runs from now on ("partition", "train", "evaluate", ...), and
            with an empty one when it is done: for displays of progress.
        loggers: Objects that get the numbers of each epoch: :class:`~gnnautoscale.training.TensorBoard`,
            :class:`~gnnautoscale.training.WandB`, :class:`~gnnautoscale.training.MLflow`, or your own.
        progress: Whether to show a bar on the error stream, or lines if that is not a terminal.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from gnnautoscale.models import GCN
        >>> data = KarateClub()[0]
        >>> data.val_mask = data.test_mask = ~data.train_mask
        >>> result = fit(GCN(34, 4, hidden=16), data, num_parts=4, epochs=5)
        >>> len(result.epochs)
        5
    """
    check_argument("model", model, nn.Module, "Pass an instance of the model.")
    check_weights(model)
    progress = check_argument("progress", progress, bool, "Pass True or False.")
    for name, function in (("callback", callback), ("on_phase", on_phase)):
        check_argument(name, function, Callable[[Any], Any] | None, "Pass a function, or leave it out.")
    given = FitOptions.of(options)
    if given.tensorboard:
        check_package("tensorboard")
    if is_autoscaled(model):  # by an earlier fit: go on from its weights
        detach(model)
    folder = Path(data) if isinstance(data, (str, Path)) else None
    if folder is not None:
        check_from_files(task)
    dataset = dataset_of(data) if folder is None else summary_of(folder)
    dataset.check()
    task = task_for(dataset, task) if task is None or isinstance(task, str) else task
    if isinstance(task, Task):
        task.check_dataset(dataset)
        task = task.bound_to(dataset, metric=given.metric, class_weight=given.class_weight)
        if folder is not None and given.class_weight != "none" and isinstance(task, NodeClassification):
            balance_by_shards(task, folder)
    task = check_task(task, dataset.train)
    _check_inseparable(task, given)
    if isinstance(dataset, TypedDataset):
        check_typed_run(dataset, task, given)
    if given.evaluation == "histories" and dataset.inductive:
        raise InputError(
            "evaluation from histories needs the validation nodes in the training graph",
            got="a data set with graphs of its own for validation",
            fix="Use evaluation='exact'.",
        )
    shards: Any = None
    if is_ranked(data):
        check_ranked(dataset, task, model, given)
        given, shards = on_rank(given), folder or dataset.passing()
        progress, loggers = progress and current().is_first, loggers if current().is_first else ()
    told = check_loggers(loggers)
    slow = ["partition"] if shards is None and dataset.passing().num_edges > _LONG_TO_CUT else []
    title = title_of(given.to_dict(), dataset, model)
    with epochs_shown(title, given.epochs, quiet=not progress, at_once=slow, percent=task.percent) as show:

        def after_epoch(epoch: Epoch) -> None:
            show.epoch(epoch)
            if callback is not None:
                callback(epoch)

        def at_phase(name: str) -> None:
            show.phase(name)
            if on_phase is not None:
                on_phase(name)

        with no_empty_folders(given.run_dir, given.checkpoint_dir, given.history_dir):
            return _train(model, dataset, task, given, after_epoch, at_phase, shards=shards, loggers=told)


*_own, _callback, _on_phase, _loggers, _progress, _ = inspect.signature(fit).parameters.values()
_options = (
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
    for name, option in OPTIONS.items()
)
fit.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_own, *_options, _callback, _on_phase, _loggers, _progress], return_annotation=FitResult
)
describe_arguments(fit, {name: option.help for name, option in OPTIONS.items()})


def dataset_of(data: Any) -> Dataset:
    """The data set that someone means who passes a graph, one for each split, or lists of graphs."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, HeteroData):
        return TypedDataset.of_types(data)
    if isinstance(data, Data) and holds_graphs(data):
        if "graph_split" not in data and "train_mask" not in data:
            fix = "Pass three lists, or gas.Dataset.of_graphs(graphs), which draws one."
            raise InputError("graphs to train on need a split", got="none", fix=fix)
        return Dataset.of_graphs(data)
    if isinstance(data, Data):
        return Dataset.of(data)
    if isinstance(data, (tuple, list)) and len(data) == 3 and all(isinstance(each, HeteroData) for each in data):
        return TypedLinks.of_splits(data)
    if isinstance(data, (tuple, list)) and len(data) == 3 and all(is_collection(each) for each in data):
        return Dataset.of_graphs(data)
    if not isinstance(data, (tuple, list)) or len(data) != 3 or not all(isinstance(each, Data) for each in data):
        got = f"{len(data)} items" if isinstance(data, (tuple, list)) else type(data).__name__
        rule = (
            "data must be a torch_geometric.data.Data or HeteroData, three of them or three lists of Data for "
            "training, validation and test, or a Dataset"
        )
        raise InputError(rule, got=got, fix="Pass one of these.")
    return Dataset("data", *data)


def _check_inseparable(task: Task, options: FitOptions) -> None:
    """Refuse what exact steps cannot do if the loss takes the outputs of all nodes together."""
    if task.separable or options.exact_after >= options.epochs:
        return
    refused = {"lipschitz": options.lipschitz, "precision": options.precision == "bfloat16" and options.precision}
    for name, value in refused.items():
        if value:
            raise InputError(
                f"exact steps of {type(task).__name__}, whose loss takes all outputs together, have no {name}",
                got=f"{name}={value!r}",
                fix=f"Leave {name} out, or the exact steps.",
            )


def _train(
    model: nn.Module,
    dataset: Dataset,
    task: Task,
    given: FitOptions,
    callback: Callable[[Epoch], None] | None,
    on_phase: Callable[[str], None] | None,
    shards: Path | Data | None = None,
    loggers: Sequence[Logger] = (),
) -> FitResult:
    """Train, on several ranks if ``shards`` are given: a folder of them, or the graph that they are cut from."""
    folder = None if given.checkpoint_dir is None else Path(given.checkpoint_dir)
    with only_writer(folder if current().is_first else None):
        return _train_alone(model, dataset, task, given, folder, callback, on_phase, shards, loggers)


def _train_alone(
    model: nn.Module,
    dataset: Dataset,
    task: Task,
    given: FitOptions,
    folder: Path | None,
    callback: Callable[[Epoch], None] | None,
    on_phase: Callable[[str], None] | None,
    shards: Path | Data | None,
    loggers: Sequence[Logger],
) -> FitResult:
    """Train, while no other run saves to the folder of checkpoints."""
    options, device = given.in_effect(), torch.device(given.device)
    checkpoint = None if options.resume is None else open_checkpoint(Path(options.resume))
    if options.resume is not None and checkpoint is None:
        warnings.warn(f"{options.resume} holds no checkpoint yet, so training starts anew", stacklevel=4)
    if folder is not None and (checkpoint is None or folder.resolve() != checkpoint.path.parent.resolve()):
        check_fresh(folder)
    if options.run_dir is not None and options.resume is None:
        check_run_dir(Path(options.run_dir))

    torch.manual_seed(options.seed + current().rank)
    result = FitResult(
        metric=task.metric,
        options=given.to_dict(),
        higher_is_better=task.higher_is_better,
        percent=task.percent,
    )
    clock = Clock(result.seconds, device, on_phase)
    learner = model if task.module is None else nn.ModuleDict({"model": model, "task": task.module})
    identity = identity_of(learner, task, dataset)
    learner.to(device)
    optimizer = make_optimizer(model, options, also=task.module)
    rate = LearningRate(optimizer, options.schedule, options.epochs, higher_is_better=task.higher_is_better)
    strategy: Strategy
    loader: HaloLoader | None = None
    about = dataset
    whole: dict[str, Any] = {}
    if shards is not None:
        with clock("partition"):
            known = None
            if checkpoint is not None and not isinstance(shards, Path):
                known = labels_of(checkpoint, dataset.passing().num_nodes)
            ranked, dataset = strategy_on_ranks(model, dataset, shards, optimizer, task, options, known)
        loader, strategy, whole = ranked.loader, ranked, ranked.facts()
    elif options.has_histories:
        labels = None if checkpoint is None else labels_of(checkpoint, dataset.passing().num_nodes)
        with clock("partition"):
            loaders = halo_loaders(dataset, task, options, labels)
        loader = loaders["train"]
        if options.exact_after:
            task.prepare(loader)
        if isinstance(dataset, TypedDataset):
            strategy = TypedStrategy(model, dataset, loaders, optimizer, task, options)
        else:
            strategy = HistoryStrategy(model, dataset, loaders, optimizer, task, options)
    else:
        with clock("partition"):
            subgraphs = subgraph_loader(dataset, task, options)
        task.prepare(subgraphs)
        if isinstance(dataset, TypedDataset):
            strategy = TypedSubgraphStrategy(model, dataset, subgraphs, optimizer, task, options)
        else:
            strategy = SubgraphStrategy(model, dataset, subgraphs, optimizer, task, options)
    if strategy.agreed(options.run_dir is not None):
        strategy.watch()
    run = RunState(learner, task, optimizer, rate, strategy, result, device, identity=identity)
    on_failure = ExitStack()
    on_failure.callback(strategy.give_up)
    with (
        on_failure,
        ExitStack() as files,
        PeakMemory(device) as peak,
        strategy.running(),
        stop_requests(folder is not None, together=shards is not None) as stop,
    ):
        if checkpoint is not None:
            with as_written(checkpoint):
                check_same_run(checkpoint, given, strategy.key, learner, identity)
                run.load(checkpoint)
        journal = files.enter_context(_open_journal(given, about, task, model, run, loader, whole, loggers))
        is_stopping = strategy.stopping(stop)

        def save() -> None:
            if folder is not None:
                with clock("checkpoint"):
                    run.save(folder)
                if is_stopping():
                    raise KeyboardInterrupt(f"go on from its last checkpoint with resume={str(folder)!r}")

        def is_due(every: str | int) -> bool:
            return isinstance(every, int) and run.batches % every == 0

        def after_batch() -> None:
            run.batches += 1
            if is_due(options.refresh_every):
                with clock("refresh"):
                    strategy.refresh()
            if is_stopping() or is_due(options.checkpoint_every):
                save()

        def scores_now() -> dict[str, float]:
            with clock("evaluate"), peak.paused() if strategy.evaluates_at_once else nullcontext():
                # Right after a refresh the histories are exact, and one layer is less work than all of them.
                fresh = options.refresh_every == "epoch" and not dataset.inductive and not strategy.at_once
                how = "histories" if fresh else options.evaluation
                return strategy.scores(dataset, how)

        def keep_if_best(epoch: Epoch) -> None:
            sign = 1 if task.higher_is_better else -1
            if epoch.scores and not sign * epoch.scores["val"] <= sign * result.scores.get("val", -sign * math.inf):
                result.best_epoch, result.scores = epoch.number, epoch.scores
                run.best_weights = {name: value.detach().clone() for name, value in state_of(learner).items()}

        def diagnose(epoch: int, *, last: bool) -> None:
            if journal.is_due(epoch, last=last, trained=clock.total("train")):
                with clock("diagnose"), peak.paused():
                    journal.probe(epoch)

        def is_done() -> bool:
            enough = options.patience is not None and result.evaluations_since_best >= options.patience
            return enough or len(result.epochs) >= options.epochs

        while not is_done():
            number = len(result.epochs) + 1
            is_last = number == options.epochs
            learner.train()
            learning_rate = float(optimizer.param_groups[0]["lr"])
            start = clock.total("train")
            with explained(strategy, number, options):
                with clock("train"):
                    loss = strategy.epoch(number, options.steps_per_epoch, after_batch)
                if not math.isfinite(loss):
                    raise FloatingPointError(f"the loss is {loss}")
                result.steps = strategy.steps
                diagnose(number, last=is_last)  # before a refresh: the histories that the steps used
                if options.refresh_every == "epoch":
                    with clock("refresh"):
                        strategy.refresh()
                scores = scores_now() if is_last or number % options.evaluate_every == 0 else {}
            epoch = Epoch(number, loss, scores, learning_rate, clock.total("train") - start)
            result.epochs.append(epoch)
            journal.epoch(epoch, peak.so_far)
            keep_if_best(epoch)
            if result.steps:
                rate.step(scores.get("val"))
            if callback is not None:
                callback(epoch)
            with explained(strategy, number, options):
                if is_done() and options.refresh_every != "epoch":
                    diagnose(number, last=True)
                if is_stopping() or options.checkpoint_every == "epoch" or is_done():
                    save()
        if not result.epochs[-1].scores:  # resumed with no epochs left, before the last one was evaluated
            with explained(strategy, len(result.epochs), options):
                result.epochs[-1] = replace(result.epochs[-1], scores=scores_now())
            keep_if_best(result.epochs[-1])
        strategy.describe(result)
        journal.succeeded(result)
        on_failure.pop_all()
    load_state(learner, run.best_weights)
    result.peak_memory = strategy.peak(peak.num_bytes)
    journal.finish(result)  # even if something happens to what follows
    if options.verify:
        with clock("verify"):
            result.verification = journal.verify()
        journal.finish(result)
    return result


def _open_journal(
    options: FitOptions,
    dataset: Dataset,
    task: Task,
    model: nn.Module,
    run: RunState,
    loader: HaloLoader | None,
    whole: dict[str, Any],
    loggers: Sequence[Logger],
) -> Journal:
    """Open the run's folder, if it has one: a new one, or that of the run that is resumed.

    ``whole`` are facts about the whole graph, if the data set is a part of it.
    """
    folder, epochs, told = None, run.result.epochs, list(loggers)
    about: dict[str, Any] = {}
    measured = run.strategy.agreed(options.run_dir is not None)
    if run.strategy.agreed(options.run_dir is not None or bool(told)):
        about = describe_run(options.to_dict(), dataset, task, model, loader)
        about["data"] |= whole
    with ExitStack() as started:  # before there is a folder, which a logger that cannot start would leave behind
        for logger in loggers:
            start_logger(logger, about)
            started.callback(logger.end, None)
        if options.run_dir is not None:
            path = Path(options.run_dir)
            known = [epoch_record(epoch) for epoch in epochs]
            if options.resume is not None and is_run_dir(path):
                folder = RunFolder.reopen(path, about, known, free=options.may_change())
            else:
                folder = RunFolder.create(path, about)
                for record in known:  # of a run that resumes with a new folder
                    folder.append(record)
            if options.tensorboard:
                told.append(TensorBoard(folder.path, len(epochs) + 1))
        started.pop_all()
    target = dataset.target if isinstance(dataset, TypedDataset) else None
    what, every = options.diagnose, options.diagnose_every
    how: dict[str, Any] = {"measured": measured, "what": what, "every": every, "target": target, "loggers": told}
    return Journal(folder, run.strategy, model, loader, task, **how)
