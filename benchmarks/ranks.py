"""Several ranks on one machine: time, bytes and memory, beside what the cost model says.

    python benchmarks/ranks.py                                       # 1, 2 and 4 ranks over gloo, some minutes
    python benchmarks/ranks.py --nodes 2400000 --degree 51 --parts 160 --batch-size 1 --threads 4 --output ranks.json
    python benchmarks/ranks.py --device cuda --ranks 1               # one rank against no torchrun, on a GPU

The graph is a ring on which nodes have neighbours nearby, and a few anywhere; its parts are arcs. Shards are written to
files, and each rank is a process that reads its own. *Strong* scaling keeps the graph, *weak* scaling gives each rank
as many nodes. ``docs/distributed.md`` explains the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale._util import resident_memory
from gnnautoscale.attach import attached

CLASSES, LAYERS = 47, 3


def ring(nodes: int, degree: int, features: int, far: float, seed: int = 0) -> Data:
    """A symmetric graph: neighbours are up to ``4 * degree`` places away, but a share ``far`` of them is anywhere."""
    rng = np.random.default_rng(seed)
    half = nodes * degree // 2
    source = rng.integers(0, nodes, half)
    target = (source + rng.integers(1, 4 * degree + 1, half)) % nodes
    jumps = int(far * half)
    target[:jumps] = (source[:jumps] + rng.integers(1, nodes, jumps)) % nodes
    pairs = torch.from_numpy(np.stack([source, target]))
    return Data(
        x=torch.randn(nodes, features, generator=torch.Generator().manual_seed(seed)),
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
        y=torch.arange(nodes) * CLASSES // nodes,
        train_mask=torch.ones(nodes, dtype=torch.bool),
    )


def make(options: argparse.Namespace, nodes: int, size: int, folder: Path) -> dict[str, Any]:
    """Write the shards of a graph for a number of ranks; returns their manifest."""
    data = ring(nodes, options.degree, options.features, options.far)
    labels = torch.arange(nodes) * options.parts // nodes
    start = time.perf_counter()
    manifest = ranks.write_shards(folder, data, labels, size)
    return {**manifest, "seconds": time.perf_counter() - start}


def model_for(options: argparse.Namespace) -> nn.Module:
    """The model of all runs."""
    torch.manual_seed(0)
    made: nn.Module = GCN(options.features, options.width, num_layers=LAYERS, out_channels=CLASSES)
    return made


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that some work takes."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def rank(options: argparse.Namespace) -> dict[str, Any]:
    """Train on one rank; what it measures."""
    torch.set_num_threads(options.threads)
    world, device = ranks.start(), torch.device(options.device)
    torch.zeros(1, device=device)
    before = resident_memory() or 0
    how: dict[str, Any] = {"batch_size": options.batch_size, "shuffle": True}
    if device.type == "cuda":
        how["device"] = device
    model = model_for(options).to(device)
    if options.plain:
        data = ring(options.nodes, options.degree, options.features, options.far)
        labels = torch.arange(options.nodes) * options.parts // options.nodes
        loader = gas.HaloLoader(data, partition=labels, **how)
        gas.autoscale(model, data, storage=options.storage)
    else:
        loader = ranks.RankLoader(options.folder, **how)
        ranks.autoscale(model, loader, storage=options.storage)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    steps = len(loader) if options.steps is None else min(options.steps, len(loader))

    ends: list[float] = []

    def epoch() -> None:
        for batch in islice(loader, steps):
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            ends.append(time.perf_counter())

    first = timed(epoch, device)
    ends.clear()
    sent = world.sent_bytes
    started = time.perf_counter()
    seconds = [timed(epoch, device) for _ in range(options.epochs)]
    found: dict[str, Any] = {
        "rank": world.rank,
        "steps": steps,
        "first epoch": first,
        "epoch": min(seconds),
        "seconds of steps": np.diff([started, *ends]).reshape(options.epochs, steps).tolist(),
        "sent bytes per step": (world.sent_bytes - sent) / (steps * options.epochs),
        "inference": timed(lambda: gas.infer(model, loader), device),
        "memory": most_resident() - before,
    }
    shard = getattr(loader, "shard", None)
    if shard is not None:
        histories = attached(model).memory.histories.values()
        row = sum(each.codec.raw_width * each.codec.raw_dtype.itemsize for each in histories)
        rows, edges = shard.data.num_nodes, shard.data.num_edges
        found["least bytes per step"] = shard.sent.numel() * row / len(loader)
        found["weights"] = sum(weight.numel() for weight in model.parameters())
        found["expected memory"] = memory_of(rows, edges, row, options)
        found |= wire(world) if world.size > 1 else {}
    return found


def most_resident() -> int:
    """The largest resident memory of this process; that of getrusage would include its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def memory_of(rows: int, edges: int, row_bytes: int, options: argparse.Namespace) -> int:
    """What a rank's memory is made of: edges, a table of them, a record with self-loops, features and histories.

    Inference has a second set of histories while it runs, and outputs of all nodes.
    """
    return 16 * edges + 8 * edges + 12 * (edges + rows) + rows * (4 * options.features + 2 * row_bytes + 4 * CLASSES)


def wire(world: ranks.World) -> dict[str, float]:
    """Seconds of the two collectives: for next to nothing, and for a byte more."""
    found = {}
    for name in ("exchange", "sum"):
        took = {}
        for count in (world.size, 1 << 21):
            given = torch.zeros(count // world.size * world.size, dtype=torch.float32, device=world.wire)
            parts = [given.numel() // world.size] * world.size
            works: dict[str, Callable[[], Any]] = {
                "exchange": lambda given=given, parts=parts: world.exchange(given, parts, parts).wait(),  # type: ignore[misc]
                "sum": lambda given=given: world.sum(given).wait(),  # type: ignore[misc]
            }
            world.gather(0)
            took[given.nbytes] = min(timed(works[name], world.wire) for _ in range(10))
        (small, latency), (large, longer) = took.items()
        found[f"{name} latency"] = latency
        found[f"{name} per byte"] = max(longer - latency, 0.0) / (large - small)
    return found


def run(
    options: argparse.Namespace, size: int, folder: Path | None, nodes: int, *, apart: bool = False
) -> list[dict[str, Any]]:
    """Start the ranks as torchrun does, or ``apart`` as many processes that know nothing of each other.

    Returns what each found.
    """
    given = {name: value for name, value in vars(options).items() if name not in ("ranks", "output", "weak", "nodes")}
    given |= {"nodes": nodes, "folder": folder, "plain": folder is None, "as_rank": True}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value not in (None, True, False)]
    flags += [f"--{name.replace('_', '-')}" for name, value in given.items() if value is True]
    port = 20000 + os.getpid() % 20000
    found = []
    for number in range(size):
        place, count = (0, 1) if apart else (number, size)
        world = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        env = {**os.environ, **{name: str(value) for name, value in world.items()}}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(options.threads)}
        command = [sys.executable, __file__, *flags]
        found.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))  # noqa: S603
    told = [process.communicate()[0] for process in found]
    if any(process.returncode for process in found):
        raise SystemExit(f"a rank failed: {[process.returncode for process in found]}")
    return [json.loads(text.splitlines()[-1]) for text in told]


def step_apart(options: argparse.Namespace, size: int, nodes: int) -> float:
    """Seconds of a step of processes that share the machine, but not the graph: each has one of a rank's size.

    The slowest one counts in each step, since ranks would wait for it.
    """
    share = argparse.Namespace(**{**vars(options), "parts": options.parts * nodes // options.nodes // size})
    found = run(share, size, None, nodes // size, apart=True)
    slowest = np.max([each["seconds of steps"] for each in found], axis=0)
    return float(slowest.mean(axis=1).min())


def measure(options: argparse.Namespace, size: int, nodes: int, fixed: int) -> dict[str, Any]:
    """Write shards, and train on so many ranks; ``fixed`` is the memory of a step and of all but the graph."""
    with tempfile.TemporaryDirectory(prefix="gnnautoscale-") as folder:
        arguments = argparse.Namespace(**{**vars(options), "parts": options.parts * nodes // options.nodes})
        manifest = make(arguments, nodes, size, Path(folder) / "shards")
        found = run(arguments, size, Path(folder) / "shards", nodes)
    worst = {name: max(each[name] for each in found) for name in found[0] if name != "seconds of steps"}
    step = worst["epoch"] / worst["steps"]
    result = {
        "ranks": size,
        "nodes": nodes,
        "own": max(each["own"] for each in manifest["shards"]),
        "ghosts": max(each["ghosts"] for each in manifest["shards"]),
        "edges": max(each["edges"] for each in manifest["shards"]),
        "seconds to write shards": manifest["seconds"],
        "step": step,
        **worst,
        "expected memory": fixed + worst["expected memory"],
    }
    if size > 1:
        sums = 2 * (size - 1) / size * 4 * worst["weights"]
        result["step apart"] = step_apart(options, size, nodes)
        result["expected step"] = (
            result["step apart"]
            + (worst["exchange latency"] + worst["sent bytes per step"] * worst["exchange per byte"])
            + (2 * worst["sum latency"] + sums * worst["sum per byte"])
        )
    return result


def show(title: str, results: list[dict[str, Any]]) -> None:
    """Print a short table."""
    print(f"\n{title}")
    print("ranks  epoch s  step ms  apart  expected  inference s  sent kB/step  least  memory MB  expected  ghosts/own")
    for each in results:
        cells = (
            f"{each['ranks']:5d}",
            f"{each['epoch']:8.2f}",
            f"{1e3 * each['step']:8.1f}",
            f"{1e3 * each.get('step apart', each['step']):6.1f}",
            f"{1e3 * each.get('expected step', each['step']):9.1f}",
            f"{each['inference']:12.2f}",
            f"{each['sent bytes per step'] / 1e3:13.1f}",
            f"{each['least bytes per step'] / 1e3:6.1f}",
            f"{each['memory'] / 2**20:10.0f}",
            f"{each['expected memory'] / 2**20:9.0f}",
            f"{each['ghosts'] / each['own']:11.2f}",
        )
        print(" ".join(cells))


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="Numbers of ranks, separated by commas.")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--far", type=float, default=0.02, help="Share of neighbours that are anywhere.")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="Most steps of an epoch; by default all.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of each rank.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--storage", default="host")
    parser.add_argument("--weak", action="store_true", help="Measure weak scaling as well.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        print(json.dumps(rank(options)))
        return
    hidden = ("output", "folder", "plain", "as_rank")
    given = {name: value for name, value in vars(options).items() if name not in hidden}
    found: dict[str, Any] = {"options": given}
    sizes = [int(size) for size in options.ranks.split(",")]
    # Two batches: the memory of a step, and what there is besides the graph.
    small = argparse.Namespace(**{**vars(options), "parts": 2 * options.batch_size})
    nodes = 2 * options.batch_size * options.nodes // options.parts
    tiny = run(small, 1, None, nodes)[0]["memory"]
    found["fixed memory"] = fixed = tiny - memory_of(nodes, nodes * options.degree, 8 * options.width, options)
    plain = run(options, 1, None, options.nodes)[0]
    found["no torchrun"] = {**plain, "step": plain["epoch"] / plain["steps"]}
    print(f"no torchrun: {1e3 * found['no torchrun']['step']:.1f} ms a step, {plain['memory'] / 2**20:.0f} MB")
    for kind in ("strong", *(["weak"] if options.weak else [])):
        found[kind] = []
        for size in sizes:
            nodes = options.nodes * (size if kind == "weak" else 1)
            found[kind].append(measure(options, size, nodes, fixed))
        show(f"{kind} scaling", found[kind])
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
