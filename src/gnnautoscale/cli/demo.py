"""The command ``gas demo``: GAS beside full batch, neighbour sampling and Cluster-GCN, on a generated graph."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gnnautoscale.cli.display import Json, megabytes, print_json, print_table, say
from gnnautoscale.data import load
from gnnautoscale.errors import InputError
from gnnautoscale.models import build_model
from gnnautoscale.report import write_report
from gnnautoscale.runs import FitResult, free_folder, score_text
from gnnautoscale.training import fit

_MODEL = {"layers": 3, "hidden": 64, "dropout": 0.3}
_PARTS = 20
_ENOUGH = 0.98  # of the validation accuracy of full batch
#: How each method trains: its mode, epochs in all, epochs between evaluations, and options of its own.
_METHODS: dict[str, dict[str, Any]] = {
    "full batch": {"mode": "full", "epochs": 50, "evaluate_every": 2},
    "neighbour sampling": {"mode": "sage", "epochs": 2, "fan_out": [5, 3, 2]},
    "Cluster-GCN": {"mode": "cluster", "epochs": 8, "evaluate_every": 2},
    "GAS": {"mode": "gas", "epochs": 6},
}


def demo(
    nodes: Annotated[int, typer.Option(help="Number of nodes of the generated graph.")] = 100_000,
    output: Annotated[Path | None, typer.Option(help="New folder for the runs and the report.")] = None,
    json: Json = False,
) -> None:
    """Train a GraphSAGE on a generated graph in four ways, in about a minute; a table and a page compare them."""
    if nodes < 1000:
        raise InputError("--nodes must be at least 1000", got=str(nodes), fix="Increase it.")
    dataset = load("districts", nodes=nodes)
    folder = output or free_folder(Path("runs"), f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    results: dict[str, FitResult] = {}
    for name, options in _METHODS.items():
        torch.manual_seed(0)
        model = build_model("graphsage", dataset.train, dataset.num_classes, **_MODEL)
        run_dir = str(folder / name.lower().replace(" ", "-"))
        shared: dict[str, Any] = {"num_parts": _PARTS, "schedule": "cosine", "run_dir": run_dir}
        results[name] = fit(model, dataset, progress=not json, **shared, **options)
    target = _ENOUGH * max(epoch.scores["val"] for epoch in results["full batch"].epochs if epoch.scores)
    rows = {
        name: {**_facts(result), "seconds_to_target": result.seconds_to(target)} for name, result in results.items()
    }
    page = folder / "report.html"
    write_report([folder], page)
    if json:
        print_json({"target": target, "rows": rows, "report": str(page)})
        return
    print_table(
        f"3-layer GraphSAGE on {nodes:,} nodes and {dataset.train.num_edges:,} edges",
        ["", "test accuracy", f"seconds to {target:.0f} %", "peak memory", "epochs", "steps"],
        [
            [
                name,
                score_text(row["test"]),
                "not reached" if math.isinf(row["seconds_to_target"]) else f"{row['seconds_to_target']:.1f}",
                megabytes(row["peak_memory"]),
                str(row["epochs"]),
                str(row["steps"]),
            ]
            for name, row in rows.items()
        ],
    )
    of_full = f"{target:.0f} % is {100 * _ENOUGH:.0f} % of full batch's best validation accuracy."
    say(f"{of_full} Seconds include partitioning.")
    say("Sampling and Cluster-GCN leave edges out of training; here these are the ones that say most about a node.")
    say(f"more about these runs: {page} (open it in a browser)")


def _facts(result: FitResult) -> dict[str, Any]:
    return {
        "test": result.scores["test"],
        "peak_memory": result.peak_memory,
        "epochs": len(result.epochs),
        "steps": result.steps,
    }
