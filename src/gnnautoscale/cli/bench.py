"""The command ``gas bench``: measure steps, transfers, epochs and storage on this machine."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gnnautoscale._util import write_atomically
from gnnautoscale.cli.display import Json, megabytes, print_json, print_table
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench, figure
from gnnautoscale.training import describe_machine, pick_device

app = typer.Typer(help="Measure steps, transfers, epochs and storage on this machine.", no_args_is_help=True)
Nodes = Annotated[int, typer.Option(help="Rows of a history.")]
BatchNodes = Annotated[int, typer.Option(help="Nodes per batch.")]
Batches = Annotated[int, typer.Option(help="Batches per epoch.")]
Degree = Annotated[int, typer.Option(help="Edges of a node within its batch, and of a halo node into it.")]
Ratio = Annotated[float, typer.Option(help="Halo nodes per batch node.")]
Width = Annotated[int, typer.Option(help="Width of features and layers.")]
Layers = Annotated[int, typer.Option(help="Number of layers.")]
Epochs = Annotated[int, typer.Option(help="Timed epochs for each number.")]
Device = Annotated[str, typer.Option(help="Where to compute.")]
Output = Annotated[Path | None, typer.Option(help="Where to write the numbers, as JSON.")]


@app.command()
def step(
    ratios: Annotated[str, typer.Option(help="Halo nodes per batch node, separated by commas.")] = "0,1,2,3,4,5",
    nodes: Nodes = 1_000_000,
    batch_nodes: BatchNodes = 4000,
    batches: Batches = 25,
    degree: Degree = 60,
    width: Width = 256,
    layers: Layers = 4,
    epochs: Epochs = 5,
    device: Device = "cuda",
    plot: Annotated[Path | None, typer.Option(help="Where to draw the numbers, as .svg or .png.")] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Time a GIN's training step for growing halos, with histories on the GPU and in host memory (Figure 4)."""
    device = pick_device(device)
    graph = bench.BenchGraph(nodes, batch_nodes, batches, degree, degree, width, width)
    numbers = _numbers(ratios)
    graph.check(*numbers, layers=layers, epochs=epochs)
    measure = partial(bench.bench_step, graph, device=torch.device(device), layers=layers, epochs=epochs)
    rows = bench.with_computation(map(measure, numbers))
    setup = {**vars(graph), "layers": layers}
    result = _report("a training step", *bench.step_table(rows), rows, setup, device, output, json)
    if plot is not None and not figure.save_figure(partial(bench.draw_steps, result), plot):
        raise InputError("--plot needs matplotlib", got="no matplotlib", fix="pip install gnnautoscale[report]")


@app.command()
def io(device: Device = "cuda", output: Output = None, json: Json = False) -> None:
    """Compare pulls and pushes of random rows with plain copies over the bus."""
    device = pick_device(device)
    rows = bench.bench_io(torch.device(device))
    table = [
        [row["what"], row["dtype"], f"{row['GB/s']:.1f}", f"{row['copy GB/s']:.1f}", f"{100 * row['share']:.0f} %"]
        for row in rows
    ]
    heads = ["100,000 rows x 256", "type", "GB/s", "plain copy GB/s", "share"]
    _report("rows over the bus", heads, table, rows, {}, device, output, json)


@app.command()
def epoch(
    num_parts: Annotated[int, typer.Option(help="Number of parts, all of the same size.")] = bench.PRODUCTS.batches,
    part_nodes: Annotated[int, typer.Option(help="Nodes per part.")] = bench.PRODUCTS.batch_nodes,
    ratio: Ratio = 2.0,
    width: Annotated[int, typer.Option(help="Width of hidden layers.")] = 256,
    layers: Layers = 3,
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time an epoch of a GCN on a graph as large as ogbn-products, with batches on the GPU and in host memory."""
    device = pick_device(device)
    graph = replace(bench.PRODUCTS, nodes=num_parts * part_nodes, batch_nodes=part_nodes, batches=num_parts)
    graph.check(ratio, layers=layers, width=width)
    rows = bench.bench_epoch(graph, ratio, torch.device(device), layers=layers, width=width)
    table = [[row["batches"], f"{row['epoch']:.3f}", megabytes(row["peak_memory"]), row["how"]] for row in rows]
    heads = ["batches", "seconds", "peak memory", "steps"]
    _report("an epoch", heads, table, rows, vars(graph), device, output, json)


@app.command()
def storage(
    folder: Annotated[Path, typer.Argument(help="Where histories on disk go; a local disk.")],
    ratio: Ratio = 1.0,
    nodes: Nodes = 400_000,
    batch_nodes: BatchNodes = 4000,
    batches: Batches = 25,
    degree: Degree = 20,
    width: Width = 256,
    layers: Layers = 4,
    epochs: Epochs = 5,
    device: Device = "cpu",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time a GIN's training step with histories in device memory, host memory and on disk, in every precision."""
    device = pick_device(device)
    graph = bench.BenchGraph(nodes, batch_nodes, batches, degree, degree, width, width)
    graph.check(ratio, layers=layers, epochs=epochs)
    rows = bench.bench_storage(graph, ratio, torch.device(device), folder, layers=layers, epochs=epochs)
    table = [
        [
            row["histories"],
            f"{row['milliseconds']:.2f}",
            f"{row['to host']:.2f}",
            f"{row['megabytes']:.1f}",
            "" if row["overlap"] is None else f"{100 * row['overlap']:.0f} %",
            megabytes(row["history"]),
            megabytes(row["peak_memory"]),
        ]
        for row in rows
    ]
    heads = ["histories", "step (ms)", "to host", "MB moved", "hidden", "size", "peak memory"]
    setup = {**vars(graph), "layers": layers, "ratio": ratio}
    _report("a training step", heads, table, rows, setup, device, output, json)


def _report(
    title: str,
    heads: list[str],
    table: list[list[str]],
    rows: list[bench.Numbers],
    setup: dict[str, Any],
    device: str,
    output: Path | None,
    json: bool,
) -> dict[str, Any]:
    """Print the numbers and write them to a file; returns what is written."""
    result = {"setup": setup, "machine": describe_machine(device), "torch": torch.__version__, "rows": rows}
    if output is not None:
        text = json_format.dumps(result, indent=1).encode()
        write_atomically(output, lambda stream: stream.write(text), rule="--output must be writable")
    if json:
        print_json(result)
    else:
        print_table(title, heads, table)
    return result


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        rule = "--ratios must be numbers separated by commas"
        raise InputError(rule, got=repr(text), fix="Pass for example 0,1,5.") from None
