"""The command ``gas bench``: measure steps, transfers, storage, own loops, inference, start-up and memory."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gnnautoscale._util import check_writable, write_atomically
from gnnautoscale.cli.display import Json, megabytes, print_json, print_table
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench, figure
from gnnautoscale.graph import Partitioner
from gnnautoscale.training import describe_machine, pick_device


def _writable(path: Path | None) -> Path | None:
    """A file to write to, before anything is measured."""
    if path is not None:
        check_writable(path, rule="--output and --plot name files in existing folders")
    return path


app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)
Nodes = Annotated[int, typer.Option(help="Rows of a history.")]
BatchNodes = Annotated[int, typer.Option(help="Nodes per batch.")]
Batches = Annotated[int, typer.Option(help="Batches per epoch.")]
Degree = Annotated[int, typer.Option(help="Edges of a node within its batch, and of a halo node into it.")]
Ratio = Annotated[float, typer.Option(help="Halo nodes per batch node.")]
Width = Annotated[int, typer.Option(help="Width of features and layers.")]
Layers = Annotated[int, typer.Option(help="Number of layers.")]
Epochs = Annotated[int, typer.Option(help="Timed epochs for each number.")]
Device = Annotated[str, typer.Option(help="Where to compute.")]
Parts = Annotated[int, typer.Option(help="Number of parts, all of the same size.")]
PartNodes = Annotated[int, typer.Option(help="Nodes per part.")]
Hidden = Annotated[int, typer.Option(help="Width of hidden layers.")]
Output = Annotated[Path | None, typer.Option(help="Where to write the numbers, as JSON.", callback=_writable)]


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
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw the numbers, as .svg or .png.", callback=_writable)
    ] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Time a GIN's training step for growing halos, with histories on the GPU and in host memory (Figure 4)."""
    device = pick_device(device)
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise InputError("--plot ends in .svg or .png", got=str(plot), fix="Choose one of these endings.")
    graph = bench.BenchGraph(nodes, batch_nodes, batches, degree, degree, width, width)
    numbers = _numbers(ratios)
    graph.check(*numbers, layers=layers, epochs=epochs)
    measure = partial(bench.bench_step, graph, device=torch.device(device), layers=layers, epochs=epochs)
    rows = bench.with_computation(map(measure, numbers))
    setup = {**vars(graph), "layers": layers}
    result = _report("a training step", *bench.step_table(rows), rows, setup, device, output, json)
    if plot is not None and not figure.save_figure(partial(bench.draw_steps, result), plot):
        raise InputError("--plot needs matplotlib", got="no matplotlib", fix="Run: pip install matplotlib")


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
    num_parts: Parts = bench.PRODUCTS.batches,
    part_nodes: PartNodes = bench.PRODUCTS.batch_nodes,
    ratio: Ratio = 2.0,
    width: Hidden = 256,
    layers: Layers = 3,
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time an epoch of a GCN on a graph as large as ogbn-products, with batches on the GPU and in host memory."""
    device = pick_device(device)
    graph = _like_products(num_parts, part_nodes)
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
    folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / "rows", rule="histories on disk go to a folder that is writable")
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


@app.command()
def loop(
    num_parts: Parts = bench.PRODUCTS.batches,
    part_nodes: PartNodes = bench.PRODUCTS.batch_nodes,
    together: Annotated[int, typer.Option(help="Parts of a drawn batch, smaller by this factor.")] = 10,
    ratio: Ratio = 2.0,
    width: Hidden = 256,
    layers: Layers = 3,
    epochs: Epochs = 3,
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time a user's own training loop on fixed and drawn batches, captured and not, next to plain PyG."""
    device = pick_device(device)
    graph = _like_products(num_parts, part_nodes)
    graph.check(ratio, layers=layers, width=width, epochs=epochs, together=together)
    if part_nodes % together:
        rule = "--part-nodes must be a multiple of --together"
        raise InputError(rule, got=f"{part_nodes} and {together}", fix="Change one of the two.")
    sizes = {"layers": layers, "width": width, "together": together}
    rows = bench.bench_loop(graph, ratio, torch.device(device), epochs=epochs, **sizes)
    table = [
        [
            f"{row['batches']}, {row['loop']}",
            f"{row['milliseconds']:.2f}",
            _seconds(row["epoch"]),
            _seconds(row["first epoch"]),
            megabytes(row["peak_memory"]),
            _ratio(row["to PyG"]),
            row["how"],
        ]
        for row in rows
    ]
    heads = ["batches, loop", "step (ms)", "epoch (s)", "first epoch (s)", "peak memory", "to PyG", "steps"]
    _report("an own loop", heads, table, rows, {**vars(graph), "ratio": ratio, **sizes}, device, output, json)


@app.command()
def infer(
    num_parts: Parts = bench.PRODUCTS.batches,
    part_nodes: PartNodes = bench.PRODUCTS.batch_nodes,
    ratio: Ratio = 2.0,
    width: Hidden = 256,
    layers: Layers = 3,
    repeats: Annotated[int, typer.Option(help="Timed runs for each number.")] = 3,
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time exact inference over all nodes, next to plain PyG on the whole graph at once."""
    device = pick_device(device)
    graph = _like_products(num_parts, part_nodes)
    graph.check(ratio, layers=layers, width=width, repeats=repeats)
    sizes = {"layers": layers, "width": width}
    rows = bench.bench_infer(graph, ratio, torch.device(device), repeats=repeats, **sizes)
    table = [
        [
            row["way"],
            _seconds(row["seconds"], "does not fit"),
            _seconds(row["first"]),
            megabytes(row["peak_memory"]),
            _ratio(row["to PyG"]),
            "" if row["difference"] is None else f"{row['difference']:.1e}",
        ]
        for row in rows
    ]
    heads = ["inference", "seconds", "first time (s)", "peak memory", "to PyG", "difference"]
    _report("inference", heads, table, rows, {**vars(graph), "ratio": ratio, **sizes}, device, output, json)


@app.command()
def start(
    num_parts: Parts = bench.PRODUCTS.batches,
    part_nodes: PartNodes = bench.PRODUCTS.batch_nodes,
    ratio: Ratio = 2.0,
    width: Hidden = 256,
    layers: Layers = 3,
    partition: Annotated[
        str, typer.Option(help="metis, kaminpar, both separated by a comma, or none: the parts as generated.")
    ] = "metis,kaminpar",
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Time every phase from a graph in memory to the second training step, next to plain PyG."""
    device = pick_device(device)
    graph = _like_products(num_parts, part_nodes)
    graph.check(ratio, layers=layers, width=width)
    sizes = {"layers": layers, "width": width}
    methods = _partitioners(partition)
    rows = bench.bench_start(graph, ratio, torch.device(device), partitioners=methods, **sizes)
    table = [
        [row["phase"], _seconds(row["seconds"]), _seconds(row["PyG seconds"]), _ratio(row["to PyG"]), row["note"]]
        for row in rows
    ]
    heads = ["phase", "seconds", "plain PyG (s)", "to PyG", "note"]
    _report("start-up", heads, table, rows, {**vars(graph), "ratio": ratio, **sizes}, device, output, json)


@app.command()
def memory(
    num_parts: Parts = bench.PRODUCTS.batches,
    part_nodes: PartNodes = bench.PRODUCTS.batch_nodes,
    ratio: Ratio = 2.0,
    width: Hidden = 256,
    layers: Layers = 3,
    device: Device = "cuda",
    output: Output = None,
    json: Json = False,
) -> None:
    """Measure host and GPU memory after each phase of training, next to what it must take and to plain PyG."""
    device = pick_device(device)
    graph = _like_products(num_parts, part_nodes)
    graph.check(ratio, layers=layers, width=width)
    sizes = {"layers": layers, "width": width}
    rows = bench.bench_memory(graph, ratio, torch.device(device), **sizes)
    columns = {"resident": "resident", "peak": "peak", "device peak": "GPU peak", "needed": "at least"}
    table = [[row["phase"], *(megabytes(row[name]) for name in columns), row["note"]] for row in rows]
    heads = ["phase", *columns.values(), "note"]
    _report("memory", heads, table, rows, {**vars(graph), "ratio": ratio, **sizes}, device, output, json)


def _like_products(num_parts: int, part_nodes: int) -> bench.BenchGraph:
    return replace(bench.PRODUCTS, nodes=num_parts * part_nodes, batch_nodes=part_nodes, batches=num_parts)


def _seconds(value: float | None, unknown: str = "") -> str:
    return unknown if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _partitioners(text: str) -> list[Partitioner]:
    known: dict[str, Partitioner] = {"metis": "metis", "kaminpar": "kaminpar"}
    words = [] if text == "none" else text.split(",")
    if not known.keys() >= set(words):
        rule = "--partition must be metis, kaminpar, both separated by a comma, or none"
        raise InputError(rule, got=repr(text), fix="Choose one of these.")
    return [known[word] for word in words]


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
    if json:
        print_json(result)
    else:
        print_table(title, heads, table)
    if output is not None:
        text = json_format.dumps(result, indent=1).encode()
        write_atomically(output, lambda stream: stream.write(text), rule="--output must be writable")
    return result


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        rule = "--ratios must be numbers separated by commas"
        raise InputError(rule, got=repr(text), fix="Pass for example 0,1,5.") from None
