"""The command ``gas bench``: measures steps, transfers and epochs on this machine."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gnnautoscale._util import write_atomically
from gnnautoscale.cli.display import megabytes, print_json, print_table
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench
from gnnautoscale.training import check_device

app = typer.Typer(help="Measure steps, transfers and epochs on this machine.", no_args_is_help=True)
Device = Annotated[str, typer.Option(help="Where to compute.")]
Output = Annotated[Path | None, typer.Option(help="Where to write the numbers, as JSON.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def step(
    ratios: Annotated[str, typer.Option(help="Halo nodes per batch node, separated by commas.")] = "0,1,2,3,4,5",
    nodes: Annotated[int, typer.Option(help="Rows of a history.")] = 1_000_000,
    batch_nodes: Annotated[int, typer.Option(help="Nodes of a batch.")] = 4000,
    batches: Annotated[int, typer.Option(help="Batches of an epoch.")] = 25,
    degree: Annotated[int, typer.Option(help="Edges of a node into its batch.")] = 60,
    width: Annotated[int, typer.Option(help="Width of features and layers.")] = 256,
    layers: Annotated[int, typer.Option(help="Number of GIN layers.")] = 4,
    epochs: Annotated[int, typer.Option(help="Epochs that are timed for each number.")] = 5,
    device: Device = "cuda",
    plot: Annotated[Path | None, typer.Option(help="Where to draw the numbers, as .svg or .png.")] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Time a training step for growing halos, with histories on the GPU and in host memory (the paper's Figure 4)."""
    check_device(device)
    setup = bench.Setup(nodes, batch_nodes, batches, degree, degree, width, width)
    _check_setup(setup, _numbers(ratios), layers, epochs)
    rows = bench.bench_step(setup, _numbers(ratios), torch.device(device), layers=layers, epochs=epochs)
    result = {"setup": {**vars(setup), "layers": layers}, "machine": bench.machine(torch.device(device)), "rows": rows}
    if plot is not None:
        draw_steps(result, plot)
    columns = list(bench.COLUMNS)
    table = [
        [
            f"{row['ratio']:g}",
            *(f"{row['milliseconds'][column]:.3f}" for column in columns),
            f"{100 * row['computation']:+.0f} %",
            *(f"{100 * row['I/O'][column]:+.1f} %" for column in columns[1:4]),
        ]
        for row in rows
    ]
    heads = [
        "halo / batch",
        *(f"{column} (ms)" for column in columns),
        "computation",
        *(f"I/O {c}" for c in columns[1:4]),
    ]
    _show("a training step", heads, table, result, output, json)


@app.command()
def io(device: Device = "cuda", output: Output = None, json: Json = False) -> None:
    """Compare pulls and pushes of random rows with the bus's own speed."""
    _need_gpu(device)
    rows = bench.bench_io(torch.device(device))
    table = [
        [row["what"], row["dtype"], f"{row['GB/s']:.1f}", f"{row['copy GB/s']:.1f}", f"{100 * row['share']:.0f} %"]
        for row in rows
    ]
    result = {"machine": bench.machine(torch.device(device)), "rows": rows}
    heads = ["100,000 rows x 256", "type", "GB/s", "plain copy GB/s", "share"]
    _show("rows over the bus", heads, table, result, output, json)


@app.command()
def epoch(
    num_parts: Annotated[int, typer.Option(help="Number of parts; all have as many nodes.")] = bench.PRODUCTS.batches,
    part_nodes: Annotated[int, typer.Option(help="Nodes of a part.")] = bench.PRODUCTS.batch_nodes,
    ratio: Annotated[float, typer.Option(help="Halo nodes per batch node.")] = 2.0,
    width: Annotated[int, typer.Option(help="Width of the layers.")] = 256,
    layers: Annotated[int, typer.Option(help="Number of GCN layers.")] = 3,
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time an epoch of a GCN on a graph as large as ogbn-products, with batches on the GPU and in host memory."""
    check_device(device)
    like = bench.PRODUCTS
    setup = bench.Setup(
        num_parts * part_nodes, part_nodes, num_parts, like.degree, like.halo_degree, like.features, like.classes
    )
    _check_setup(setup, [ratio], layers, 1)
    rows = bench.bench_epoch(setup, ratio, torch.device(device), layers=layers, width=width)
    result = {"setup": vars(setup), "machine": bench.machine(torch.device(device)), "rows": rows}
    table = [[row["batches"], f"{row['epoch']:.3f}", megabytes(row["peak_memory"]), row["how"]] for row in rows]
    _show("an epoch", ["batches", "seconds", "peak memory", "steps"], table, result, output, json)


@app.command()
def storage(
    folder: Annotated[Path, typer.Argument(help="Where histories on disk go; a local disk.")],
    ratio: Annotated[float, typer.Option(help="Halo nodes per batch node.")] = 1.0,
    nodes: Annotated[int, typer.Option(help="Rows of a history.")] = 400_000,
    batch_nodes: Annotated[int, typer.Option(help="Nodes of a batch.")] = 4000,
    batches: Annotated[int, typer.Option(help="Batches of an epoch.")] = 25,
    degree: Annotated[int, typer.Option(help="Edges of a node into its batch.")] = 20,
    width: Annotated[int, typer.Option(help="Width of features and layers.")] = 256,
    layers: Annotated[int, typer.Option(help="Number of GIN layers.")] = 4,
    epochs: Annotated[int, typer.Option(help="Epochs that are timed for each number.")] = 5,
    device: Device = "cpu",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time a training step with histories in device memory, host memory and on disk, in every precision."""
    check_device(device)
    setup = bench.Setup(nodes, batch_nodes, batches, degree, degree, width, width)
    _check_setup(setup, [ratio], layers, epochs)
    rows = bench.bench_storage(setup, ratio, torch.device(device), folder, layers=layers, epochs=epochs)
    result = {
        "setup": {**vars(setup), "layers": layers, "ratio": ratio},
        "machine": bench.machine(torch.device(device)),
        "rows": rows,
    }
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
    _show("a training step", heads, table, result, output, json)


def draw_steps(result: dict[str, Any], path: Path) -> None:
    """Draw the numbers of ``gas bench step``: milliseconds, and the overhead of histories in host memory.

    Args:
        result: What ``gas bench step --output`` writes.
        path: An ``.svg`` or ``.png`` file.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise InputError(
            "--plot needs matplotlib", got="an installation without it", fix="pip install gnnautoscale[report]"
        ) from None
    figure = pyplot.figure(figsize=(10, 3.8), layout="constrained")
    bench.draw_steps(figure, result)
    figure.savefig(path)
    pyplot.close(figure)


def _show(
    title: str, heads: list[str], table: list[list[str]], result: dict[str, Any], output: Path | None, json: bool
) -> None:
    if output is not None:
        text = json_format.dumps(result, indent=1).encode()
        write_atomically(output, lambda stream: stream.write(text), rule="--output must be writable")
    if json:
        print_json(result)
    else:
        print_table(title, heads, table)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            "--ratios are numbers separated by commas", got=repr(text), fix="Pass for example 0,1,5."
        ) from None


def _check_setup(setup: bench.Setup, ratios: list[float], layers: int, epochs: int) -> None:
    counts = (*vars(setup).values(), layers, epochs)
    if min(counts) < 1 or min(ratios) < 0:
        raise InputError("all sizes are at least 1 and ratios at least 0", got="smaller ones", fix="Change them.")
    if setup.batches * setup.batch_nodes > setup.nodes or (1 + max(ratios)) * setup.batch_nodes > setup.nodes:
        raise InputError(
            "the graph needs nodes for all batches and for the largest halo",
            got=f"{setup.nodes:,} for {setup.batches} batches of {setup.batch_nodes:,} and a ratio of {max(ratios):g}",
            fix="Use more nodes, or fewer or smaller batches.",
        )


def _need_gpu(device: str) -> None:
    check_device(device)
    if torch.device(device).type != "cuda":
        raise InputError("this benchmark needs a GPU", got=repr(device), fix="Run it where there is one.")
