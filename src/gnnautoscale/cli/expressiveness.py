"""The command ``gas expressiveness``: which nodes GAS and the baselines can tell apart, beside Weisfeiler-Lehman."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gnnautoscale.cli.display import Json, print_json, print_table
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import expressiveness as experiment


def expressiveness(
    draws: Annotated[int, typer.Option(help="Number of draws of weights, parts and neighbours.")] = 10,
    partition: Annotated[str, typer.Option(help="How to partition graphs: metis, kaminpar or random.")] = "metis",
    rescale: Annotated[bool, typer.Option(help="Let the baselines' remaining edges stand for those they drop.")] = True,
    lr: Annotated[float, typer.Option(help="Learning rate of 'GAS in training'.")] = 1e-3,
    json: Json = False,
) -> None:
    """Show which nodes GAS and the baselines can tell apart, beside the Weisfeiler-Lehman test."""
    if draws < 1:
        raise InputError("--draws must be at least 1", got=str(draws), fix="Increase it.")
    options: dict[str, Any] = {"partition": partition, "rescale": rescale, "lr": lr}
    rows: list[dict[str, Any]] = []
    table = []
    for example in experiment.examples():
        found = [experiment.survey(example, seed, **options) for seed in range(draws)]
        methods = {method: [draw[method] for draw in found] for method in found[0]}
        colours = int(example.colours.max()) + 1
        facts = {"graph": example.name, "nodes": example.data.num_nodes, "layers": example.layers, "colours": colours}
        kept = {
            method: {"kept": sum(result.same for result in results), "draws": [asdict(result) for result in results]}
            for method, results in methods.items()
        }
        rows.append({**facts, "methods": kept})
        table.append([*map(str, facts.values()), *(_cell(results) for results in methods.values())])
    if json:
        print_json({"draws": draws, **options, "rows": rows})
    else:
        heads = ["graph", "nodes", "layers", "WL colours", *rows[0]["methods"]]
        print_table("Do outputs keep the Weisfeiler-Lehman classes?", heads, table)


def _cell(results: Sequence[experiment.Comparison]) -> str:
    """``yes`` if every draw keeps the classes; else how many do, and the mean number of torn and merged colours."""
    kept = sum(result.same for result in results)
    if kept == len(results):
        return "yes"
    changes = {name: statistics.mean(getattr(result, name) for result in results) for name in ("torn", "merged")}
    return f"{kept}/{len(results)}: " + ", ".join(f"{mean:.1f} {name}" for name, mean in changes.items() if mean)
