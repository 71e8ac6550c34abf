"""Compare METIS and KaMinPar: time, memory, edge cut, halo nodes per node and balance.

On the data sets under ``--root`` (those that are not there are left out):

    python benchmarks/partition.py --root data --output real.json

and on a generated graph; the number of edges counts both directions:

    python benchmarks/partition.py --generated --nodes 2400000 --edges 122000000 --parts 150 --output generated.json

Peak memory is what a call adds to the edges in memory. KaMinPar needs ``pip install gnnautoscale[partition]``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnautoscale._util import available_cores
from gnnautoscale.data.datasets import from_file, load
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Partitioner, connectivity, fingerprint, partition
from gnnautoscale.graph.partitioners import import_kaminpar, kaminpar, metis
from gnnautoscale.graph.undirected import undirected

PARTS = {
    "cora": 10,
    "citeseer": 10,
    "pubmed": 20,
    "coauthor-cs": 20,
    "coauthor-physics": 40,
    "amazon-computers": 20,
    "amazon-photo": 10,
    "WordNet3/raw/wordnet3.npz": 200,
}
METHODS: tuple[Partitioner, ...] = ("metis", "kaminpar")
COMMUNITY, BLOCK = 1_000, 16_000  # nodes
NEAR, MIDDLE = 0.7, 0.26  # shares of edges in a community and in a block; the others go anywhere
PIECE = 2**22  # edges that are drawn together


def generate(num_nodes: int, num_edges: int) -> Tensor:
    """A graph of communities in blocks, ``[2, num_edges]``: symmetric, sorted, nodes in random order."""
    generator = torch.Generator().manual_seed(0)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator)

    number = torch.randperm(num_nodes, generator=generator).int()
    pairs = torch.empty(2, num_edges // 2, dtype=torch.int32)
    for first in range(0, pairs.size(1), PIECE):
        piece = pairs[:, first : first + PIECE]
        source, share = draw(num_nodes, piece.size(1)), torch.rand(piece.size(1), generator=generator)
        target = draw(num_nodes, piece.size(1))
        for size, limit in ((BLOCK, NEAR + MIDDLE), (COMMUNITY, NEAR)):
            target = torch.where(share < limit, source // size * size + draw(size, source.numel()), target)
        piece[0], piece[1] = number[source], number[target.clamp_(max=num_nodes - 1)]
    graph = undirected(pairs, num_nodes)
    del pairs
    edges = torch.empty(2, graph.neighbors.numel(), dtype=torch.int64)
    edges[0], edges[1] = torch.repeat_interleave(graph.starts.diff()), graph.neighbors
    return edges


def measured(call: Callable[[], Any]) -> tuple[Any, float, int | None]:
    """The result of a call, its seconds, and by how many bytes the process's memory rose at most."""
    gc.collect()
    status, peak = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    before = None
    if platform.system() == "Linux":
        ctypes.CDLL(None).malloc_trim(0)
        peak.write_text("5")  # forgets the peak so far; a thread could not watch, since METIS keeps the interpreter
        before = _kilobytes(status, "VmRSS:")
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    return result, seconds, None if before is None else (_kilobytes(status, "VmHWM:") - before) * 1024


def _kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))


def share_of_cut_edges(edges: Tensor, labels: Tensor) -> float:
    """The share of edges between different parts."""
    pieces = edges.split(PIECE, dim=1)
    return sum(int((labels[piece[0]] != labels[piece[1]]).sum()) for piece in pieces) / max(edges.size(1), 1)


def cut_once(edges: Tensor, num_nodes: int, num_parts: int, method: Partitioner, seed: int) -> dict[str, Any]:
    """Cut a graph; returns what it took and what came of it."""
    _, total, peak = measured(lambda: partition(edges, num_nodes, num_parts, method=method, seed=seed))
    # The same again, step by step.
    graph, prepare, prepare_peak = measured(lambda: undirected(edges, num_nodes))
    cut = metis if method == "metis" else kaminpar
    labels, seconds, _ = measured(lambda: cut(graph, num_parts, seed))
    ratio, ratio_seconds, ratio_peak = measured(lambda: connectivity(edges, labels))
    return {
        "seconds": total,
        "prepare_seconds": prepare,
        "cut_seconds": seconds,
        "connectivity_seconds": ratio_seconds,
        "edge_cut": share_of_cut_edges(edges, labels),
        "connectivity": float(ratio.mean()),
        "balance": float(labels.bincount().max()) * num_parts / num_nodes,
        "peak_bytes": peak,
        "prepare_peak_bytes": prepare_peak,
        "connectivity_peak_bytes": ratio_peak,
    }


def compare(name: str, edges: Tensor, num_nodes: int, num_parts: int, seeds: int) -> list[dict[str, Any]]:
    """Cut a graph with both partitioners and print a line for each; values are means over seeds, memory the maximum."""
    rows = []
    _, hash_seconds, _ = measured(lambda: fingerprint(edges))
    for method in METHODS:
        runs = [cut_once(edges, num_nodes, num_parts, method, seed) for seed in range(seeds)]
        row: dict[str, Any] = {"graph": name, "nodes": num_nodes, "edges": edges.size(1), "parts": num_parts}
        row |= {"method": method, "fingerprint_seconds": hash_seconds}
        for key in runs[0]:
            values = [run[key] or 0 for run in runs]
            row[key] = max(values) if key.endswith("bytes") else sum(values) / seeds
        rows.append(row)
        print(
            f"{name}, {num_parts} parts, {method}: {row['seconds']:.2f} s ({row['prepare_seconds']:.2f} s prepare), "
            f"cut {row['edge_cut']:.4f}, halo {row['connectivity']:.4f}, balance {row['balance']:.3f}, "
            f"{row['peak_bytes'] / 2**20:,.0f} MB",
            flush=True,
        )
    return rows


def real_graphs(root: Path) -> list[tuple[str, Tensor, int, int]]:
    """Name, edges, number of nodes and number of parts of each data set that is there."""
    found = []
    for name, num_parts in PARTS.items():
        try:
            is_file = name.endswith(".npz")
            loaded = from_file(root / name, undirected=True, max_features=1) if is_file else load(name, str(root))
        except (InputError, OSError) as error:
            print(f"{name} is left out: {error}")
            continue
        found.append((Path(name).stem, loaded.train.edge_index, loaded.train.num_nodes, num_parts))
    return found


def main() -> None:
    """Read the flags, compare, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", action="store_true", help="Use a generated graph.")
    parser.add_argument("--nodes", type=int, default=120_000)
    parser.add_argument("--edges", type=int, default=6_100_000)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds to average over.")
    parser.add_argument("--root", type=Path, default=Path(os.environ.get("GNNAUTOSCALE_DATA", "data")))
    parser.add_argument("--output", type=Path, help="File for the numbers, as JSON.")
    args = parser.parse_args()
    version = import_kaminpar().__version__
    graphs: list[tuple[str, Tensor, int, int]]
    if args.generated:
        graphs = [("generated", generate(args.nodes, args.edges), args.nodes, args.parts)]
    else:
        graphs = real_graphs(args.root)
    rows = [row for graph in graphs for row in compare(*graph, seeds=args.seeds)]
    machine = {"cores": available_cores(), "processor": platform.machine(), "kaminpar": version}
    if args.output is not None:
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
