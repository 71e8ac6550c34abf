"""The command ``gas expressiveness``: which nodes GAS and the baselines can tell apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gnnautoscale.cli.display import Json, print_json, print_table, say, working
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import expressiveness as experiment


def expressiveness(
    draws: Annotated[int, typer.Option(help="Number of draws of weights, parts and neighbours.")] = 10,
    partition: Annotated[str, typer.Option(help="How to partition graphs: metis, kaminpar or random.")] = "metis",
    rescale: Annotated[bool, typer.Option(help="Let the baselines' remaining edges stand for those they drop.")] = True,
    lr: Annotated[float, typer.Option(help="Learning rate of 'GAS in training'.")] = 1e-3,
    json: Json = False,
) -> None:
    """Show which nodes GAS and the baselines can tell apart, of those that a full-batch model can.

    The Weisfeiler-Lehman test sorts the nodes of a graph into kinds: no message-passing model can tell nodes of one
    kind apart, and a good one gives different kinds different outputs.
    """
    if draws < 1:
        raise InputError("--draws must be at least 1", got=str(draws), fix="Increase it.")
    options: dict[str, Any] = {"partition": partition, "rescale": rescale, "lr": lr}
    rows: list[dict[str, Any]] = []
    table = []
    for example in experiment.examples():
        found = []
        for seed in range(draws):
            with working(f"{example.name}: draw {seed + 1} of {draws}"):
                found.append(experiment.survey(example, seed, **options))
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
        heads = ["graph", "nodes", "layers", "kinds of nodes", *rows[0]["methods"]]
        print_table("Are nodes of the same kind given the same outputs, and of other kinds others?", heads, table)
        say(
            "yes: in all draws of weights, parts and neighbours. 3/10: in 3 of 10 draws; on average so many kinds are "
            "split (nodes that are alike get different outputs) or mixed up (different nodes get the same output)."
        )


def _cell(results: Sequence[experiment.Comparison]) -> str:
    """``yes`` if every draw keeps the kinds; else how many do, and the mean number of kinds split and mixed up."""
    kept = sum(result.same for result in results)
    if kept == len(results):
        return "yes"
    names = {"torn": "split", "merged": "mixed up"}
    means = {word: statistics.mean(getattr(result, name) for result in results) for name, word in names.items()}
    return f"{kept}/{len(results)}: " + ", ".join(f"{mean:.1f} {word}" for word, mean in means.items() if mean)
