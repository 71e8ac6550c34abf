"""The command ``gas partition``: cut a graph into parts, or into shards for several ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import check_writable, write_atomically
from gnnautoscale.cli.display import Json, show_facts, working
from gnnautoscale.cli.schema import files_read, load_dataset
from gnnautoscale.cli.typed import facts_of_parts, graph_without_targets
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph, TypedGraph, connectivity, groups_to_balance
from gnnautoscale.graph import partition as cut
from gnnautoscale.ranks import TARGET, write_shards

#: The rule of a file that results are written to.
OUTPUT = "--output names a file in an existing folder"
#: How many edges take longer than two seconds to cut.
LONG_TO_CUT = 5_000_000


def partition(
    options: dict[str, Any],
    *,
    ranks: Annotated[int | None, typer.Option(help="Write shards for this many ranks to the folder --output.")] = None,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Shards also serve compensated steps and layers that reverse edges.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="File for the part of each node, as .npy; with --ranks a new folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Cut a graph into parts and show how many edges stay inside them; or write shards for several ranks."""
    if ranks is not None and output is None:
        raise InputError("--ranks needs a folder to write to", got="no --output", fix="Add --output with a new folder.")
    if ranks is None:
        if output is not None:
            check_writable(output, rule=OUTPUT, read=files_read(options))
        if bidirectional:
            raise InputError("--bidirectional belongs to --ranks", got="it alone", fix="Add --ranks, or leave it out.")
    with working(f"loading {options['data']}"):
        loaded: Any = graph_without_targets(options)
        targets: tuple[str, ...] = ()
        if loaded is None:
            dataset = load_dataset(options)
            loaded, targets = dataset.passing(), dataset.targets
    typed = TypedGraph.of(loaded) if isinstance(loaded, HeteroData) else None
    graph = loaded if typed is None else typed.joined.data
    groups = groups_to_balance(Graph.of(graph) if typed is None else typed) if options["balance"] else None
    start = time.perf_counter()
    with working("partition", long=graph.num_edges > LONG_TO_CUT):
        labels = cut(
            graph.edge_index,
            graph.num_nodes,
            options["num_parts"],
            method=options["partition"],
            groups=groups,
            seed=options["seed"],
            cache_dir=options["cache_dir"],
        )
    seconds = time.perf_counter() - start
    sizes = torch.bincount(labels)
    inside = (labels[graph.edge_index[0]] == labels[graph.edge_index[1]]).double().mean()
    with working("halo"):
        ratio = connectivity(graph.edge_index, labels)
    facts: dict[str, Any] = {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "parts": int(sizes.numel()),
        "smallest part": int(sizes.min()),
        "largest part": int(sizes.max()),
        "edges inside parts": float(inside),
        "halo nodes per batch node": float(ratio.mean()),
        "seconds": seconds,
    }
    if typed is not None:
        facts |= facts_of_parts(typed, labels)
    try:
        if output is not None and ranks is not None:
            with working("shards", long=graph.num_edges > LONG_TO_CUT):
                told = {"name": Path(options["data"]).stem, **({TARGET: targets[0]} if targets else {})}
                how: dict[str, Any] = {"bidirectional": bidirectional, "seed": options["seed"], "facts": told}
                manifest = write_shards(output, loaded, labels, ranks, **how)
            for title, key in (("own nodes", "own"), ("ghosts", "ghosts"), ("edges", "edges")):
                counts = [shard[key] for shard in manifest["shards"]]
                facts[f"{title} of a rank, most"], facts[f"{title} of a rank, least"] = max(counts), min(counts)
        elif output is not None:
            write_atomically(output, lambda stream: np.save(stream, labels.numpy()), rule="--output must be writable")
    finally:  # whatever happened, nothing that was computed is lost
        show_facts(f"{options['data']} · {options['partition']}", facts, json)
