"""The command ``gas``: train, partition, infer, tune, report and more.

It turns flags and configuration files into calls of the library and prints what they return. Nothing imports it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from torch import nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import check_writable, checked, did_you_mean
from gnnautoscale.attach import autoscale
from gnnautoscale.attach import infer as run_inference
from gnnautoscale.cli import bench
from gnnautoscale.cli.about import about
from gnnautoscale.cli.advice import TUNE, explain, tune
from gnnautoscale.cli.demo import demo
from gnnautoscale.cli.display import Json, megabytes, print_json, print_table, say, show_facts, working
from gnnautoscale.cli.endings import run_to_the_end
from gnnautoscale.cli.expressiveness import expressiveness
from gnnautoscale.cli.help import Command
from gnnautoscale.cli.links import asked_pairs, load_task
from gnnautoscale.cli.partition import LONG_TO_CUT, OUTPUT, partition
from gnnautoscale.cli.predictions import check_ending, write_predictions
from gnnautoscale.cli.report import report
from gnnautoscale.cli.reproduce import reproduce
from gnnautoscale.cli.saved import read_model, save_model
from gnnautoscale.cli.schema import (
    DATA,
    INFER,
    MODEL,
    PARTITION,
    TRAIN,
    chosen,
    files_read,
    load_dataset,
    with_options,
    with_saved,
)
from gnnautoscale.cli.typed import graph_without_targets, typed_facts
from gnnautoscale.data import TypedDataset, TypedLinks, datasets
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader
from gnnautoscale.models import build_model, check_model_options
from gnnautoscale.models import model_name as resolve_name
from gnnautoscale.ranks import COUNTS, MANIFEST, World, read_manifest, start
from gnnautoscale.runs import RESULT, FitResult, free_folder, score_text
from gnnautoscale.tasks import Task, task_for
from gnnautoscale.training import (
    LOGGERS,
    OPTIONS,
    FitOptions,
    check_package,
    fit,
    latest_checkpoint,
    open_checkpoint,
    pick_device,
    summary_of,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def train(
    options: dict[str, Any],
    *,
    save: Annotated[Path | None, typer.Option(help="File for the trained model.")] = None,
    log: Annotated[list[str] | None, typer.Option(help="Where else to send numbers: wandb or mlflow.")] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    timeout: Annotated[
        float, typer.Option(help="On several ranks: seconds to wait for one that does not answer.")
    ] = 600,
) -> None:
    """Train a model on a graph: with histories, in full batch, or with a baseline; under torchrun on several ranks."""
    world = start(timeout=timeout)
    quiet = quiet or not world.is_first
    if options["runs"] > 1 and (options["checkpoint_dir"] or options["resume"]):
        raise InputError(
            "checkpoints belong to one run", got=f"--runs {options['runs']}", fix="Leave --runs out, and use --seed."
        )
    built = chosen(MODEL, options)
    model_name = options["model"] = resolve_name(built.pop("model"))
    check_model_options(model_name, built)
    if save is not None:
        check_writable(save, rule="--save names a file in an existing folder", read=files_read(options))
    for each in log or ():
        if each not in LOGGERS:
            fix = did_you_mean(each, LOGGERS, "For TensorBoard, use --tensorboard.")
            raise InputError(f"--log is one of {', '.join(LOGGERS)}", got=repr(each), fix=fix)
        check_package(each)
    given = {name: options[name] for name in OPTIONS}
    training = FitOptions.of({**given, "run_dir": None if options["run_dir"] == "none" else "runs"})
    results: list[FitResult] = []
    try:
        _train_all(world, options, save, given, training, model_name, built, results, log or (), quiet=quiet)
    finally:  # whatever happened, nothing that was computed is lost
        if results and world.is_first:
            _show_runs(options, training, model_name, results, json=json, quiet=quiet)
    for result in results if world.is_first else ():
        folder = result.options["run_dir"]
        if folder is not None and not (Path(folder) / RESULT).exists():
            fix = "Free some space there, or choose another folder."
            raise InputError("the folder of a run must be writable to the end", got=f"{folder}, which was not", fix=fix)


def _train_all(
    world: World,
    options: dict[str, Any],
    save: Path | None,
    given: dict[str, Any],
    training: FitOptions,
    model_name: str,
    built: dict[str, Any],
    results: list[FitResult],
    log: Sequence[str],
    *,
    quiet: bool,
) -> None:
    """Train as often as was asked for, and save the last model; results are added when they are there."""
    model: nn.Module | None = None
    task: Task
    for run in range(options["runs"]):
        with nullcontext() if quiet else working(f"loading {options['data']}"):
            shards = _shards(options)
            if shards is None:
                dataset, task = load_task(options, options["split"] + run)
            else:
                _check_from_shards(shards, model_name, options)
                dataset = summary_of(shards)
                task = task_for(dataset, options["task"])
        seed = training.seed + run
        torch.manual_seed(seed)
        graph = dataset.passing()
        if not task.num_outputs:  # no target is known; no model can be built for that
            task.check_dataset(dataset)
        model = build_model(model_name, graph, task.num_outputs, dataset.targets, **built)
        unused = _unused(graph)
        if run == 0 and not quiet:
            if dataset.note:
                say(f"note: {dataset.note}")
            if unused:
                say(f"note: none of these models uses {unused}")
        try:
            name = f"{dataset.name}-{model_name}-{training.mode}-seed{seed}"
            run_dir = _run_dir(options, name, seed) if world.is_first else None
            settings = {**given, "seed": seed, "run_dir": run_dir}
            settings["tensorboard"] = given["tensorboard"] and world.is_first
            on = dataset if shards is None else shards
            loggers = [LOGGERS[each]() for each in log if world.is_first]
            results.append(fit(model, on, task=task, loggers=loggers, progress=not quiet, **settings))
        except KeyboardInterrupt:
            _say_how_to_resume(training.checkpoint_dir, is_first=world.is_first)
    if not world.is_first:
        return
    if save is not None and model is not None:
        made = dataset.made_from
        save_model(save, model, {"model": model_name, **built}, task.module, data=made)


def _show_runs(
    options: dict[str, Any],
    training: FitOptions,
    model_name: str,
    results: list[FitResult],
    *,
    json: bool,
    quiet: bool,
) -> None:
    """Print the results of runs, and what else is to be said about them."""
    if json:
        print_json({"options": options, "runs": [result.to_dict() for result in results]})
    else:
        _show_results(f"{options['data']} · {model_name} · {training.mode}", results)
    for result in results:
        if result.verification is not None and not result.verification.exact:
            say(f"warning: the trained model is {result.verification}", style="bold yellow")
        elif result.verification is not None and not quiet:
            say(f"the trained model is {result.verification}")
    if quiet:
        return
    if training.device != "cpu":
        say(f"steps: {results[-1].how}")
    if training.storage == "auto":
        say(f"histories: {results[-1].storage}")
    if results[-1].options["run_dir"] is not None:
        say("run: " + ", ".join(str(result.options["run_dir"]) for result in results))


@checked(num_parts={"least": 1}, top={"least": 1}, relation={"least": 0})
def infer(
    options: dict[str, Any],
    model: Annotated[Path, typer.Argument(help="File that `gas train --save` wrote.")],
    *,
    num_parts: Annotated[int, typer.Option(help="Number of batches to compute in.")] = 8,
    device: Annotated[str, typer.Option(help=OPTIONS["device"].help)] = "auto",
    output: Annotated[Path | None, typer.Option(help="File for predictions: .csv, .parquet or .npz.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="Table of pairs to score, for --task link.")] = None,
    partners_of: Annotated[str | None, typer.Option(help="Nodes whose best new partners to find, like 3,14.")] = None,
    top: Annotated[int, typer.Option(help="Number of partners.")] = 10,
    relation: Annotated[int | None, typer.Option(help="Type of the edges to partners, if edges have types.")] = None,
    json: Json = False,
) -> None:
    """Run a trained model on all nodes of a graph, exactly, in batches."""
    device = pick_device(device)
    if output is not None:
        inputs = [model, *files_read(options), *([] if pairs is None else [pairs])]
        check_writable(output, rule=OUTPUT, read=inputs)
        check_ending(output)
    if output is None and not (pairs is None and partners_of is None):
        fix = "Add --output, a file to write them to."
        raise InputError("scores of pairs and partners go to a file", got="none", fix=fix)
    saved = read_model(model)
    options, added = with_saved(options, saved.data, model)
    if added:
        say(f"note: as in training: {' '.join(added)}")
    with working(f"loading {options['data']}"):
        dataset, task = load_task(options, options["split"])
    if dataset.note:
        say(f"note: {dataset.note}")
    task, graph = task.bound_to(dataset, metric=options["metric"], class_weight="none"), dataset.passing("test")
    trained = saved.build(graph, task.num_outputs, task.module, targets=dataset.targets).to(device)
    scaled = autoscale(trained, graph, storage="host")
    start = time.perf_counter()
    with working("partition", long=graph.num_edges > LONG_TO_CUT):
        loader = HaloLoader(graph, min(num_parts, graph.num_nodes))
    with working("inference"):
        found = run_inference(scaled, loader)
    out = found
    if isinstance(dataset, TypedDataset):
        by_type = found if isinstance(found, dict) else {dataset.targets[0]: found}
        out = dataset.all_rows(by_type)
    facts: dict[str, Any] = {"nodes": graph.num_nodes, "seconds": time.perf_counter() - start}
    splits = ("test",) if dataset.inductive else ("train", "val", "test")
    for split in splits:
        facts[f"{task.metric} {split}"] = task.score(out, dataset.test, split)
    asked = asked_pairs(dataset, task, out, pairs, partners_of, top, relation)
    try:
        if output is not None:
            predicted = task.predictions(out, dataset.test)
            if isinstance(dataset, TypedLinks):  # by type, as nodes are numbered in the file
                predicted = {f"embeddings_{kind}": rows for kind, rows in by_type.items()}
            say(f"written: {write_predictions(output, predicted, asked, dataset.names)}")
    finally:  # whatever happened, nothing that was computed is lost
        show_facts(f"{options['data']} · {model.name}", facts, json)


def data(options: dict[str, Any], *, json: Json = False) -> None:
    """Show size and splits of a graph, or without --data the names of all data sets."""
    if options["data"] is None:
        if json:
            print_json(list(datasets.names()))
        else:
            print("\n".join(datasets.names()))
        return
    if (untold := graph_without_targets(options)) is not None:
        show_facts(options["data"], typed_facts(untold), json)
        return
    dataset = load_dataset(options)
    if dataset.note:
        say(f"note: {dataset.note}")
    if isinstance(dataset, TypedDataset):
        show_facts(options["data"], {**typed_facts(dataset.graph), **task_for(dataset).describe(dataset)}, json)
        return
    graphs = {"": dataset.train} if not dataset.inductive else {"train ": dataset.train, "test ": dataset.test}
    facts: dict[str, Any] = {}
    for prefix, graph in graphs.items():
        facts[f"{prefix}nodes"] = graph.num_nodes
        facts[f"{prefix}directed edges"] = graph.num_edges
    posed = "y" in dataset.train or "graph_y" in dataset.train  # or edges are all that there is to predict
    described = task_for(dataset).describe(dataset) if posed else {}
    facts |= {"features": dataset.num_features, **described}
    show_facts(options["data"], facts, json)


def _help(command: Callable[..., None]) -> str:
    """A command's docstring without the line breaks of the source, which typer keeps after the first paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").split("\n\n"))


app.callback()(about)
# In the order of use.
app.command(cls=Command)(demo)
app.command(cls=Command)(with_options(DATA, data))
app.command(cls=Command)(with_options(TUNE, tune))
app.command(cls=Command)(with_options(TRAIN, train))
app.command(cls=Command)(explain)
app.command(cls=Command)(report)
app.command(cls=Command)(with_options(INFER, infer))
app.command(cls=Command)(with_options(PARTITION, partition))
app.add_typer(bench.app, name="bench")
app.command(cls=Command, help=_help(reproduce))(reproduce)
app.command(cls=Command, help=_help(expressiveness))(expressiveness)


def main() -> None:
    """Run the command line; what goes wrong ends with one sentence instead of a traceback."""
    run_to_the_end(app)


def _run_dir(options: dict[str, Any], name: str, seed: int) -> str | None:
    """The folder of a run: the given one, that of the resumed run, or a new one."""
    given: str | None = options["run_dir"]
    if given == "none":
        return None
    if given is not None:
        return given if options["runs"] == 1 else f"{given}-seed{seed}"
    if options["resume"] is not None:
        checkpoint = open_checkpoint(Path(options["resume"]))
        before = (checkpoint.state.get("options") if checkpoint is not None else None) or {}
        folder = before.get("run_dir") if isinstance(before, dict) else None
        if isinstance(folder, str) and Path(folder).is_dir():
            return folder
    return str(free_folder(Path("runs"), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))


def _shards(options: dict[str, Any]) -> Path | None:
    """The folder of shards that the options name; ``None`` if it is something else."""
    folder = None if options["data"] is None else Path(options["data"])
    return folder if folder is not None and (folder / MANIFEST).is_file() else None


def _check_from_shards(shards: Path, model: str, options: dict[str, Any]) -> None:
    """Refuse what needs more of a graph than a rank's shard."""
    if model in ("pna", "pna-jk", "rgcn") and COUNTS not in read_manifest(shards)["whole"]:
        fix = "Choose another model, or pass the whole graph as --data."
        raise InputError(f"the model '{model}' is built from the whole graph", got="a folder of shards", fix=fix)
    if options["task"] not in (None, "classification", "regression"):
        fix = "Leave --task out, or pass the whole graph as --data."
        raise InputError("folders of shards have targets of nodes", got=f"--task {options['task']}", fix=fix)
    given = chosen([each for each in DATA if each.name not in ("data", "root", "split")], options)
    if given or options["num_parts"] != OPTIONS["num_parts"].default:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given) or "--num-parts"
        raise InputError("a folder of shards is cut and prepared already", got=names, fix="Leave it out.")


def _say_how_to_resume(folder: str | None, *, is_first: bool) -> NoReturn:
    latest = None if folder is None else latest_checkpoint(Path(folder))
    if latest is not None:
        told = f"stopped; the same command with --resume {folder} continues from {latest.name}"
    else:
        told = "stopped; the trained weights are lost (--checkpoint-dir FOLDER keeps them)"
    if is_first:
        say(told)
    raise typer.Exit(130)


def _show_results(title: str, results: list[FitResult]) -> None:
    metric = results[0].metric
    columns = ["run", *(f"{split} {metric}" for split in results[0].scores), "best epoch", "steps", "seconds", "memory"]
    rows = [
        [
            str(result.options["seed"]),
            *(score_text(value, percent=result.percent) for value in result.scores.values()),
            str(result.best_epoch),
            str(result.steps),
            f"{sum(result.seconds.values()):.1f}",
            megabytes(result.peak_memory),
        ]
        for result in results
    ]
    if len(results) > 1:
        scores = [[result.scores[split] for result in results] for split in results[0].scores]
        text = partial(score_text, percent=results[0].percent)
        spread = [f"{text(statistics.mean(values))} ± {text(statistics.stdev(values))}" for values in scores]
        total = sum(sum(result.seconds.values()) for result in results)
        rows.append(["mean", *spread, "", "", f"{total / len(results):.1f}", ""])
    print_table(title, columns, rows)


def _unused(graph: Data | HeteroData) -> str:
    """Attributes of edges that no model on the command line uses."""
    if isinstance(graph, Data):
        return "edge features (edge_attr)" if "edge_attr" in graph else ""
    names = [name for name in ("edge_attr", "edge_weight") if any(name in store for store in graph.edge_stores)]
    return ", ".join(names)
