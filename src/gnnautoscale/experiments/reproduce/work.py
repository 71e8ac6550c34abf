"""Does the work of one job, in this process."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnnautoscale.attach import autoscale, infer, is_autoscaled
from gnnautoscale.data import Dataset, datasets, files, folds, join_graphs, take_graphs
from gnnautoscale.experiments import bench
from gnnautoscale.experiments.reproduce.neighbourhood import measure_steps
from gnnautoscale.experiments.reproduce.relational import EntityRGCN
from gnnautoscale.experiments.reproduce.typed_graphs import load_typed
from gnnautoscale.graph import connectivity, partition
from gnnautoscale.models import build_model
from gnnautoscale.runs import jsonable
from gnnautoscale.tasks import Dot, GraphPrediction, LinkPrediction, Task, task_for
from gnnautoscale.training import describe_machine, fit

Work = Mapping[str, Any]

_MOST_POINTS = 100  # kept of a learning curve


def perform(work: Work, *, root: str, device: str, run_dir: Path | None = None) -> dict[str, Any]:
    """Do the work of a job; returns its result as plain values. Only training writes to ``run_dir``."""
    do = partial(_train, run_dir=run_dir) if work["kind"] == "train" else _KINDS[work["kind"]]
    result: dict[str, Any] = jsonable(do(work, root, device))
    return result


def _train(work: Work, root: str, device: str, run_dir: Path | None) -> dict[str, Any]:
    dataset = _dataset(work["dataset"], root, work["seed"], **work["data"])
    task: Task
    if "graph_y" in dataset.train:
        task = GraphPrediction(**work["task"])
    elif "task" in work:
        dataset, task = _links(dataset, work["seed"], **work["task"])
    else:
        task = task_for(dataset)
    torch.manual_seed(work["seed"])
    model = _model(work["model"], dataset, task, work["options"])
    fitted = fit(
        model,
        dataset,
        task=task,
        **work["train"],
        seed=work["seed"],
        device=device,
        cache_dir=str(Path(root) / "partitions"),
        run_dir=None if run_dir is None else str(run_dir),
        diagnose_every="never",  # times and memory are results
        progress=False,
    )
    found = fitted.to_dict()
    kept = ("scores", "metric", "best_epoch", "steps", "seconds", "peak_memory", "history_bytes", "connectivity", "how")
    result = {name: found[name] for name in kept}
    # The first epoch tries the model, and compiles or captures.
    later = [epoch.seconds for epoch in fitted.epochs[1:]] or [fitted.epochs[0].seconds]
    result["seconds"]["step"] = statistics.median(later) * len(fitted.epochs) / max(1, fitted.steps)
    evaluated = [epoch for epoch in fitted.epochs if epoch.scores]
    totals = accumulate(epoch.seconds for epoch in fitted.epochs)
    passed = dict(zip((epoch.number for epoch in fitted.epochs), totals, strict=True))
    shown = evaluated[:: -(-len(evaluated) // _MOST_POINTS)]
    result["curve"] = {
        "epoch": [epoch.number for epoch in shown],
        "loss": [round(epoch.loss, 5) for epoch in shown],
        "seconds": [round(passed[epoch.number], 4) for epoch in shown],
        **{split: [round(epoch.scores[split], 3) for epoch in shown] for split in ("train", "val", "test")},
    }
    if isinstance(task, LinkPrediction):
        result["metrics"] = _metrics_of_links(model, dataset, task)
    return result


def _model(name: str, dataset: Dataset, task: Task, options: Mapping[str, Any]) -> nn.Module:
    if dataset.name == "aifb":
        return EntityRGCN.of(dataset.train, task.num_outputs, **options)
    return build_model(name, dataset.passing(), task.num_outputs, dataset.targets, **options)


def _links(dataset: Dataset, seed: int, **options: Any) -> tuple[Dataset, LinkPrediction]:
    """Edges held back, and the task to predict them."""
    disjoint, typed = 0.0 if options.get("reconstruct") else 0.3, options["decoder"] == "distmult"
    return dataset.split_links(seed, disjoint=disjoint, typed=typed), LinkPrediction(**options)


def _metrics_of_links(model: nn.Module, dataset: Dataset, task: Task) -> dict[str, float]:
    """Test scores of a trained model by all metrics of its kind, by name; ranks are among all nodes."""
    if not is_autoscaled(model):
        autoscale(model, dataset.test)
    rows = infer(model, dataset.test)
    scores = {}
    for name in ("MRR", "Hits@10") if task.metric == "MRR" else ("ROC-AUC", "average-precision"):
        judge = LinkPrediction(task.module or Dot(), metric=name, width=task.num_outputs)
        scores[name] = judge.bound_to(dataset, metric=None, class_weight="none").score(rows, dataset.test, "test")
    return scores


def _connectivity(work: Work, root: str, device: str) -> dict[str, Any]:
    graph = _dataset(work["cell"], root, 0, **work.get("data", {})).train
    labels = partition(graph.edge_index, graph.num_nodes, work["num_parts"], method=work["method"], seed=work["seed"])
    return {"connectivity": float(connectivity(graph.edge_index, labels).mean()), "num_parts": work["num_parts"]}


def _neighbourhood(work: Work, root: str, device: str) -> dict[str, Any]:
    dataset = _dataset(work["cell"], root, 0, **work.get("data", {}))
    names = ("method", "batch_nodes", "hidden", "layers", "steps", "epochs", "seed")
    options = {name: work[name] for name in names}
    return measure_steps(dataset, torch.device(device), **options, cache_dir=str(Path(root) / "partitions"))


def _step(work: Work, root: str, device: str) -> dict[str, Any]:
    graph = bench.BenchGraph(**{field.name: work[field.name] for field in fields(bench.BenchGraph)})
    layers = work["layers"]
    row = bench.bench_step(graph, work["ratio"], torch.device(device), layers=layers, epochs=work["epochs"])
    return {"row": row, "setup": {**vars(graph), "layers": layers}, "machine": describe_machine(device)}


@lru_cache(maxsize=4)  # jobs come sorted by data set
def _load(name: str, root: str, split: int, options: tuple[tuple[str, Any], ...]) -> Dataset:
    given = dict(options)
    name = given.pop("source", name)
    if given.pop("folds", False):
        return _fold(Path(root) / given.pop("file"), split)
    if given.pop("binary", False):  # features are there, or not
        dataset = _load(name, root, split, tuple(given.items()))
        data = copy.copy(dataset.train)
        data.x = (data.x != 0).float()
        return Dataset.of(data, name)
    if "typed" in given:
        return load_typed(Path(root), given.pop("typed"), **given)
    if "file" in given:
        return datasets.from_file(Path(root) / given.pop("file"), split=split, **given)
    if given.pop("random_split", False):
        data = datasets.load(name, root, **given).train
        datasets.split_at_random(data, split)
        return Dataset.of(data, name)
    return datasets.load(name, root, split=split, **given)


def _fold(path: Path, number: int) -> Dataset:
    """Graphs of a file, but one fold of ten, which is for validation and for tests (Xu et al., 2019)."""
    graphs = join_graphs(files.read_graph(path))
    held = folds(graphs.graph_y, 10) == number % 10
    chosen = (~held, held, held)
    return Dataset(path.stem, *(take_graphs(graphs, each.nonzero().squeeze(1)) for each in chosen))


def _dataset(name: str, root: str, split: int, **options: Any) -> Dataset:
    several = options.get("random_split", False) or options.get("folds", False)
    has_splits = name.startswith(("coauthor", "amazon", "wiki")) or several
    return _load(name, root, split if has_splits else 0, tuple(sorted(options.items())))


_KINDS: dict[str, Callable[[Work, str, str], dict[str, Any]]] = {
    "connectivity": _connectivity,
    "neighbourhood": _neighbourhood,
    "step": _step,
}
