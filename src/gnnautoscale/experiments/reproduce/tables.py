"""The table of each experiment, beside the published numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench
from gnnautoscale.experiments.reproduce.config import Experiment, Job, published
from gnnautoscale.experiments.reproduce.report import Report, Results, beside, number, spread
from gnnautoscale.experiments.reproduce.store import Store

_Curves: TypeAlias = dict[str, dict[str, Any]]
_Published: TypeAlias = dict[str, Any]  # the paper's numbers


def make_report(experiment: Experiment, runs: Sequence[Job], store: Store) -> Report:
    """Report on the cells that have results, of all or some of an experiment's runs."""
    found = Results(runs, store)
    if not found.cells():
        raise InputError("a report needs results", got="none", fix="See why the runs failed.")
    report = _REPORTS[experiment.name](found, published().get(experiment.name, {}))
    seeds = sorted({run.seed for run in runs})
    report.values |= {"experiment": experiment.name, "seeds": seeds, **store.origin(runs)}
    made_on = " and ".join(report.values["machines"])
    report.notes.append(f"Seeds: {len(seeds)}; made on {made_on} with {'; '.join(report.values['versions'])}.")
    return report


def _table1(found: Results, paper: _Published) -> Report:
    rows, values = [], {}
    differences: dict[tuple[str, str], list[float]] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        full_paper, full_std, gas_paper, gas_std = paper[model].get(dataset, [math.nan] * 4)
        published_by = {"full": (full_paper, full_std), "gas": (gas_paper, gas_std), "refreshed": (gas_paper, gas_std)}
        values[cell] = tests = {name: found.test_scores(cell, name) for name in published_by}
        means = {name: statistics.mean(scores) if scores else math.nan for name, scores in tests.items()}
        for name in ("gas", "refreshed"):
            differences.setdefault((model, name), []).append(means[name] - means["full"])
        far = [name for name, (mean, std) in published_by.items() if abs(means[name] - mean) > 2 * std]
        wanted = ["-" if math.isnan(mean) else f"{mean:.2f} ± {std:.2f}" for mean, std in published_by.values()]
        row = [f"{model} {dataset}", wanted[0], spread(tests["full"]), wanted[1], spread(tests["gas"])]
        row += [spread(tests["refreshed"]), number(means["gas"] - means["full"], sign=True), ", ".join(far) or "all"]
        rows.append(row)
    notes = []
    for (model, name), points in differences.items():
        known = [point for point in points if not math.isnan(point)]
        if known:
            notes.append(
                f"{model}: mean difference {name} - full batch {statistics.mean(known):+.2f} points over "
                f"{len(known)} data sets (paper {paper['mean_delta'][model]:+.2f})."
            )
    notes.append("The last column lists what is more than two of the paper's standard deviations from its mean.")
    heads = ["test accuracy (%)", "full batch, paper", "full batch", "GAS, paper", "GAS", "GAS, refreshed"]
    heads += ["GAS - full", "within 2 std, or not"]
    return Report("Full batch and GAS on small graphs (Table 1)", heads, rows, notes, {"test": values})


def _table2(found: Results, paper: _Published) -> Report:
    rows = []
    values: dict[str, dict[str, float]] = {}
    for cell in found.cells():
        dataset = cell.split(".")[1]
        place = paper["columns"].index(dataset)
        full = found.mean(cell, "full", "scores", "test")
        row = [dataset, number(full)]
        values[dataset] = {"full": full}
        for variant in ("baseline", "regularization", "metis", "gas"):
            points = found.mean(cell, variant, "scores", "test") - full
            values[dataset][variant] = points
            row.append(beside(points, paper[variant][place], sign=True))
        rows.append(row)
    heads = ["GCNII", "full batch (%)", "neither", "regularization", "METIS", "both"]
    notes = ["Points relative to full batch; the paper's are in brackets."]
    return Report("What METIS and regularization contribute (Table 2)", heads, rows, notes, {"points": values})


def _table3(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "graphsage": "neighbour sampling", "cluster-gcn": "Cluster-GCN", "gas": "GAS"}
    datasets = {cell: cell.split(".")[1] for cell in found.cells()}
    rows = []
    values: dict[str, dict[str, float]] = {dataset: {} for dataset in datasets.values()}
    for layers in (2, 3, 4):
        for method, name in names.items():
            row = [f"{layers} layers, {name}"]
            for cell, dataset in datasets.items():
                variant = f"{method}-{layers}"
                wanted, _ = paper[f"layers{layers}"][method][paper["datasets"].index(dataset)]
                values[dataset][variant] = memory = found.mean(cell, variant, "peak_memory")
                row.append(beside(memory / 2**30, wanted))
            rows.append(row)
    notes = ["The paper's numbers are in brackets; it names neither widths nor batches."]
    return Report("Memory (Table 3)", ["GB", *datasets.values()], rows, notes, {"peak_memory": values})


def _table4(found: Results, paper: _Published) -> Report:
    names = {"gttf": "all hops", "gas": "GAS"}
    rows = []
    values: dict[str, dict[str, dict[str, float]]] = {}
    for cell in found.cells():
        row, values[cell] = [cell], {}
        for variant in names:
            fields = ("step_seconds", "build_seconds", "peak_memory", "nodes", "edges")
            values[cell][variant] = ours = {name: found.mean(cell, variant, name) for name in fields}
            seconds, megabytes = (paper[cell][paper["columns"].index(f"{variant}_{unit}")] for unit in ("s", "mb"))
            row += [
                f"{number(ours['step_seconds'], 4)} ({seconds:.3f})",
                beside(ours["peak_memory"] / 2**20, megabytes),
                f"{number(ours['nodes'], 0)} / {number(ours['edges'], 0)}",
            ]
            if variant == "gttf":
                row.insert(2, number(ours["build_seconds"], 4))
        rows.append(row)
    heads = [f"{name}: {what}" for name in names.values() for what in ("seconds", "MB", "nodes / edges")]
    heads.insert(1, "building them")
    notes = [
        "A training step with all neighbours of all 4 hops, built anew for each step, and with GAS, whose batches are "
        "built once. The former runs a plain PyG model, the latter aggregates by sparse products. The paper's numbers, "
        "for GTTF and GAS on its GPU, are in brackets.",
        "Memory on a CPU is what an epoch adds; on a GPU all that PyTorch allocates, without cuBLAS workspaces.",
    ]
    return Report("A step of a 4-layer GCN (Table 4)", ["", *heads], rows, notes, {"steps": values})


def _table5(found: Results, paper: _Published) -> Report:
    rows, values = [], {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        wanted = paper[f"gas-{model.removesuffix('-jk')}"][paper["datasets"].index(dataset)]
        values[cell] = tests = {name: found.test_scores(cell, name) for name in ("gas", "refreshed")}
        rows.append([f"{model} {dataset}", number(wanted), *map(spread, tests.values())])
    return Report("Large graphs (Table 5)", ["", "GAS, paper", "GAS", "GAS, refreshed"], rows, [], {"test": values})


def _table6(found: Results, paper: _Published) -> Report:
    rows, values = [], {}
    for cell in found.cells():
        parts = found.of(cell, "random" if found.of(cell, "random") else "metis")[0]["num_parts"]
        ours = {name: found.mean(cell, name, "connectivity") for name in ("random", "metis")}
        values[cell] = {"parts": parts, **ours}
        row = [cell, f"{parts:,}"]
        for name, mean in ours.items():
            row += [number(paper[name][cell]), number(mean)]
        rows.append([*row, "yes" if ours["metis"] <= 1.25 * paper["metis"][cell] + 0.05 else "no"])
    columns = ["", "parts", "random, paper", "random", "METIS, paper", "METIS", "at most 1.25 x paper + 0.05"]
    notes = ["Halo nodes per batch node. The number of parts is chosen to match the paper's random column."]
    return Report("Connectivity of parts (Table 6)", columns, rows, notes, {"connectivity": values})


def _table7(found: Results, paper: _Published) -> Report:
    cell = found.cells()[0]
    names = {variant: variant.replace("_", " ") for variant in paper}
    rows, values = [], {}
    for variant, wanted in paper.items():
        values[variant] = {split: found.mean(cell, variant, "scores", split) for split in ("train", "val", "test")}
        rows.append([names[variant], *map(beside, values[variant].values(), wanted)])
    for variant in ("gradient", "momentum"):  # on request
        if found.of(cell, variant):
            values[variant] = {split: found.mean(cell, variant, "scores", split) for split in ("train", "val", "test")}
            rows.append([f"metis, compensate {variant}", *map(number, values[variant].values())])
    curves = _curves(found, names)
    title, heads = "A 4-layer GIN on CLUSTER (Table 7)", ["accuracy (%)", "train", "validation", "test"]
    notes = ["The paper's numbers are in brackets."]
    return Report(title, heads, rows, notes, {"accuracy": values, "curves": curves}, partial(_draw, curves, names))


def _figure3(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "history": "naive history", "gas": "GAS"}
    rows = [
        [cell, *(number(found.mean(cell, variant, "scores", "test")) for variant in names)] for cell in found.cells()
    ]
    curves = _curves(found, names)
    heads = ["test accuracy (%)", *names.values()]
    return Report("Learning curves (Figure 3)", heads, rows, [], {"curves": curves}, partial(_draw, curves, names))


def _curves(found: Results, variants: Iterable[str]) -> _Curves:
    """The first seed's learning curves, by cell and variant."""
    return {cell: {v: found.of(cell, v)[0]["curve"] for v in variants if found.of(cell, v)} for cell in found.cells()}


def _draw(curves: _Curves, names: Mapping[str, str], figure: Any) -> None:
    """Draw validation accuracy during training, one panel per cell."""
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    styles = dict(zip(names, ("k-", "C3-", "C0-", "C2-"), strict=False))
    for axes, (cell, by_variant) in zip(panels, curves.items(), strict=True):
        for variant, curve in by_variant.items():
            last = curve["epoch"][-1]  # differs: full batch takes one step per epoch
            axes.plot([n / last for n in curve["epoch"]], curve["val"], styles[variant], label=names[variant])
        axes.set(title=cell, xlabel="share of training")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="validation accuracy (%)")
    panels[0].legend(frameon=False)


def _figure4(found: Results, paper: _Published) -> Report:
    results = sorted((found.of(cell, "gin")[0] for cell in found.cells()), key=lambda result: result["row"]["ratio"])
    steps = bench.with_computation(result["row"] for result in results)
    heads, rows = bench.step_table(steps)
    notes = [
        "Computation is relative to the smallest halo, I/O to histories on the device. The paper: serial transfers add "
        f"up to {paper['serial_overhead_percent_at_most']} %; concurrent ones {paper['concurrent']}."
    ]
    values = {"rows": steps, "setup": results[0]["setup"], "machine": results[0]["machine"]}
    title = "A step of a 4-layer GIN for growing halos (Figure 4)"
    return Report(title, heads, rows, notes, values, partial(bench.draw_steps, values))


def _wordnet(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "gas": "GAS", "lean": "GAS, lean", "history": "naive history"}
    names |= {"sage": "GraphSAGE sampling", "cluster": "Cluster-GCN"}
    rows = []
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in found.cells():
        model = cell.split(".")[0]
        for variant, name in names.items():
            results = found.of(cell, variant)
            if not results:
                continue
            ours = {
                "test": found.test_scores(cell, variant),
                "milliseconds": [1e3 * result["seconds"]["train"] / max(1, result["steps"]) for result in results],
                "megabytes": [num_bytes / 2**20 for num_bytes in found.values(cell, variant, "peak_memory")],
            }
            values.setdefault(model, {})[variant] = ours
            times, memory = (statistics.mean(ours[k]) if ours[k] else math.nan for k in ("milliseconds", "megabytes"))
            rows.append([model, name, spread(ours["test"]), number(times, 1), number(memory, 0)])
    heads = ["", "", "test accuracy (%)", "ms per step", "MB"]
    notes = [
        "Time is that of a training step, including waiting for batches. Memory is the peak, including evaluations "
        "except for GraphSAGE sampling and Cluster-GCN, which are evaluated on the whole graph at once."
    ]
    return Report("WordNet 3.0, 117,659 nodes", heads, rows, notes, {"wordnet": values})


def _compensation(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "exact": "exact steps", "gas": "GAS", "gradient": "GAS, gradient"}
    names |= {"momentum": "GAS, momentum", "cluster": "Cluster-GCN", "sage": "GraphSAGE sampling"}
    rows = []
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    differences: dict[str, list[float]] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        full = found.mean(cell, "full", "scores", "test")
        for variant, name in names.items():
            results = found.of(cell, variant)
            if not results:
                continue
            tests = found.test_scores(cell, variant)
            times = [1e3 * result["seconds"]["train"] / max(1, result["steps"]) for result in results]
            values.setdefault(cell, {})[variant] = {"test": tests, "milliseconds": times}
            points = statistics.mean(tests) - full
            if variant != "full" and not math.isnan(points):
                differences.setdefault(name, []).append(points)
            known = "" if variant == "full" else number(points, sign=True)
            rows.append([dataset, model, name, spread(tests), known, number(statistics.mean(times), 1)])
    notes = [
        f"{name}: mean difference to full batch {statistics.mean(points):+.2f} points, from {min(points):+.2f} to "
        f"{max(points):+.2f}, over {len(points)} {'model and graph' if len(points) == 1 else 'models and graphs'}."
        for name, points in differences.items()
    ]
    notes.append("All ways take the same number of steps. Time is that of a step, including waiting for batches.")
    heads = ["graph", "model", "", "test accuracy (%)", "difference to full batch", "ms per step"]
    return Report("What the border of batches costs", heads, rows, notes, {"compensation": values})


def _graphs(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "gas": "GAS", "cluster": "Cluster-GCN"}
    rows, notes = [], []
    values: dict[str, Any] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        wanted = paper.get(cell)
        for variant, name in names.items():
            results = found.of(cell, variant)
            if not results:
                continue
            # Few graphs to validate on are soon all right, long before training ends.
            tests = [result["curve"]["test"][-1] for result in results]
            if wanted is not None:
                best, tests = _best_epoch(results)
                notes.append(
                    f"{dataset}, {name}: after epoch {best}, at which the mean over {len(tests)} folds is best; "
                    "there is no third split (Xu et al., 2019)."
                )
            memory = [num_bytes / 2**20 for num_bytes in found.values(cell, variant, "peak_memory")]
            values.setdefault(cell, {})[variant] = {"test": tests, "megabytes": memory}
            published_as = "" if wanted is None else f"{wanted[0]:.1f} ± {wanted[1]:.1f}"
            at = number(statistics.mean(memory) if memory else math.nan, 0)
            rows.append([dataset, model, name, published_as, spread(tests), at])
    heads = ["graphs", "model", "", "published", "accuracy (%)", "MB"]
    return Report("Graph-level prediction", heads, rows, notes, {"graphs": values})


def _best_epoch(results: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]]:
    """The epoch with the best mean score over folds, and the scores of the folds after it."""
    curves = [result["curve"]["val"] for result in results]
    means = [statistics.mean(scores) for scores in zip(*curves, strict=True)]
    best = means.index(max(means))
    return results[0]["curve"]["epoch"][best], [curve[best] for curve in curves]


def _links(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "gas": "GAS", "cluster": "Cluster-GCN", "sage": "neighbour sampling"}
    rows = []
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        for variant, name in names.items():
            results = found.of(cell, variant)
            means = [result["seconds"]["train"] / max(1, result["steps"]) for result in results]
            times = [1e3 * result["seconds"].get("step", mean) for result, mean in zip(results, means, strict=True)]
            memory = found.mean(cell, variant, "peak_memory") / 2**20
            for metric in results[0]["metrics"] if results else ():
                scores = found.values(cell, variant, "metrics", metric)
                values.setdefault(cell, {}).setdefault(variant, {})[metric] = scores
                full = found.values(cell, "full", "metrics", metric)
                # Over the seeds that both have, since seeds are splits.
                pairs = [ours - theirs for ours, theirs in zip(scores, full, strict=False)]
                points = statistics.mean(pairs) if pairs and variant != "full" else math.nan
                known = paper.get(dataset, {}).get(metric, math.nan)
                row = [dataset, model, name, str(len(scores)), metric, spread(scores), number(known, 1)]
                rows.append([*row, number(points, sign=True), number(statistics.mean(times), 1), number(memory, 0)])
    heads = ["graph", "model", "", "seeds", "metric", "test (%)", "published", "difference to full batch"]
    heads += ["ms per step", "MB"]
    notes = [
        "All ways take the same number of steps. Published are GAE of Kipf and Welling (2016), and DistMult alone of "
        "Dettmers et al. (2018) for WN18RR. Time is that of a step, including waiting for batches: the "
        "median over epochs but the first, or in older results the mean. Memory is the peak, "
        "of Cluster-GCN and sampling without evaluations, which take the whole graph at once."
    ]
    return Report("Links", heads, rows, notes, {"links": values})


def _hetero(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "gas": "GAS", "sage": "neighbour sampling"}
    rows = []
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in found.cells():
        model, dataset = cell.split(".")
        full = found.test_scores(cell, "full")
        for variant, name in names.items():
            results, tests = found.of(cell, variant), found.test_scores(cell, variant)
            if not results:
                continue
            times = [1e3 * result["seconds"]["train"] / max(1, result["steps"]) for result in results]
            memory = found.values(cell, variant, "peak_memory")
            values.setdefault(cell, {})[variant] = {"test": tests, "milliseconds": times, "bytes": memory}
            points = statistics.mean(tests) - statistics.mean(full) if full and variant != "full" else math.nan
            known = paper.get(cell, math.nan)
            row = [dataset, model, name, str(len(tests)), spread(tests), number(known), number(points, sign=True)]
            size = statistics.mean(memory) / 2**20 if memory else math.nan
            rows.append([*row, number(statistics.mean(times), 1), number(size, 0)])
    heads = ["graph", "model", "", "seeds", "test accuracy (%)", "published", "difference to full batch"]
    notes = [
        "All ways take the same number of steps. Time is that of a step, including waiting for batches. Memory is the "
        "peak, of neighbour sampling without evaluations, which take the whole graph at once."
    ]
    return Report("Heterogeneous graphs", [*heads, "ms per step", "MB"], rows, notes, {"hetero": values})


def _results(found: Results, paper: _Published) -> Report:
    names = {"full": "full batch", "sage": "neighbour sampling", "cluster": "Cluster-GCN", "gas": "GAS"}
    rows = []
    values: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in found.cells():
        model, graph = cell.split(".")
        best = [max(result["curve"]["val"]) for result in found.of(cell, "full")]
        target = statistics.mean(best) - _WITHIN if best else math.nan
        # Cutting counts in full for each way that needs it, whichever ran first and left it to the other.
        cutting = max((found.mean(cell, way, "seconds", "partition") for way in ("gas", "cluster")), key=_known)
        for variant, name in names.items():
            results = found.of(cell, variant)
            if not results:
                continue
            extra = cutting if variant in ("gas", "cluster") else 0.0
            times = [_seconds_to(result["curve"], target) + extra for result in results]
            tests, memory = found.test_scores(cell, variant), found.values(cell, variant, "peak_memory")
            values.setdefault(cell, {})[variant] = {"test": tests, "target": target, "seconds": times, "bytes": memory}
            seconds, size = statistics.mean(times), statistics.mean(memory) / 2**30 if memory else math.nan
            told = "-" if math.isnan(target) else "not reached" if math.isinf(seconds) else number(seconds, 1)
            steps = number(found.mean(cell, variant, "steps"), 0)
            rows.append([f"{graph}, {model}", name, spread(tests), number(target, 1), told, number(size), steps])
    heads = ["graph, model", "", "test accuracy (%)", "goal (%)", "seconds to the goal", "memory (GB)", "steps in all"]
    notes = [
        f"The goal is a validation accuracy within {_WITHIN:g} point of full batch's best; seconds are those of "
        "training and of cutting the graph, without evaluations. Memory is the peak of the GPU (on a CPU, what "
        "training adds), of sampling and Cluster-GCN without evaluations, which take the whole graph at once."
    ]
    return Report("GAS beside full batch, neighbour sampling and Cluster-GCN", heads, rows, notes, {"results": values})


_WITHIN = 1.0  # points of validation accuracy


def _seconds_to(curve: Mapping[str, Any], target: float) -> float:
    """Training time at the first evaluation that reaches a validation score; infinite if none does."""
    reached = (seconds for seconds, score in zip(curve["seconds"], curve["val"], strict=True) if score >= target)
    return next(reached, math.inf)


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value


_REPORTS: dict[str, Callable[[Results, _Published], Report]] = {
    "compensation": _compensation,
    "figure3": _figure3,
    "figure4": _figure4,
    "graphs": _graphs,
    "hetero": _hetero,
    "links": _links,
    "results": _results,
    "table1": _table1,
    "table2": _table2,
    "table3": _table3,
    "table4": _table4,
    "table5": _table5,
    "table6": _table6,
    "table7": _table7,
    "wordnet": _wordnet,
}
