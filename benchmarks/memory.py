"""Peak GPU memory of training a GCN on a graph the size of ogbn-products, and the share of edges used (Table 3).

Run with ``PYTHONPATH=src python benchmarks/memory.py results.json [--tiny]``. ``--tiny`` is toy size and also runs
without a GPU, but then reports no memory. All methods aggregate with the same fused kernel.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCN

from gnnautoscale.attach.autoscaler import attached, autoscale
from gnnautoscale.experiments.bench import PRODUCTS, BenchGraph, Numbers, free_memory, make_loader, time_epochs
from gnnautoscale.forward.record import EdgeRecord, Recorder
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.kernels import Adjacency, spmm
from gnnautoscale.training import describe_machine

WIDTH = 256
DEPTHS = (2, 3, 4)
RATIO = 2.0  # halo nodes per batch node
FAN_OUT = (15, 10, 5, 5)
STEPS = 2
METHODS = ("GAS", "full batch", "neighbour sampling", "Cluster-GCN")

#: A tenth of the nodes in batches of the same size.
TENTH = BenchGraph(240_000, 16_000, 15, degree=39, halo_degree=6, features=100, classes=47)
TINY = BenchGraph(2_400, 160, 15, degree=39, halo_degree=6, features=100, classes=47)
TINY_PIECE = BenchGraph(800, 160, 5, degree=39, halo_degree=6, features=100, classes=47)


@dataclass(eq=False)
class Batch:
    """The input of a training step.

    Attributes:
        x: Features, ``[num_nodes, features]``.
        adjacency: Edges between these nodes, with self-loops and symmetric normalization.
        y: Labels of the first nodes; the loss is over these.
    """

    x: Tensor
    adjacency: Adjacency
    y: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Move it to a device, with the transposed edges."""
        tensors = {name: tensor.to(device) for name, tensor in self.adjacency.tensors().items()}
        return Batch(self.x.to(device), Adjacency.of(tensors, self.adjacency.num_sources), self.y.to(device))


class PlainGCN(nn.Module):
    """A GCN without histories.

    Args:
        widths: Of the input and of each layer's output.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, x: Tensor, adjacency: Adjacency) -> Tensor:
        """Class scores of all nodes, ``[num_nodes, classes]``."""
        for position, layer in enumerate(self.layers):
            x = spmm(adjacency, layer(x if position == 0 else F.relu(x)))
        return x


class OneRecord(Recorder):
    """Records the first layer only, which takes seconds; all layers of a GCN have the same edge weights."""

    known: list[EdgeRecord] | None = None

    def record(self, *args: Any, **kwargs: Any) -> list[EdgeRecord]:
        """See :meth:`Recorder.record`."""
        if self.known is None:
            self.known = super().record(*args, **kwargs)
        return self.known


class Results:
    """Prints and writes every number at once.

    Args:
        path: The JSON file.
        device: The compute device.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device, self._start = path, device, time.perf_counter()
        self.rows: list[Numbers] = []
        self.content: Numbers = {
            "machine": describe_machine(str(device)),
            "torch": torch.__version__,
            "width": WIDTH,
            "ratio": RATIO,
            "fan_out": FAN_OUT,
        }
        self.content |= {"rows": self.rows, "growth_percent": {}}

    def say(self, text: str) -> None:
        """Print a line with the time since the start, and write the numbers so far."""
        seconds = time.perf_counter() - self._start
        self.content["seconds"] = round(seconds, 1)
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")
        print(f"{seconds:6.1f} s  {text}", flush=True)

    def measure(
        self, method: str, layers: int, nodes: int, share: float, work: Callable[[], Numbers], **more: Any
    ) -> None:
        """Measure the memory of some work; if it fails, note why and carry on.

        Args:
            method: Name of the method.
            layers: Number of layers.
            nodes: Nodes of the graph.
            share: Share of the edges into its nodes that the method uses.
            work: Returns ``"peak_memory"`` and ``"reserved_memory"`` in bytes.
            more: Further numbers.
        """
        free_memory(self._device)
        cuda = self._device.type == "cuda"
        row: Numbers = {"method": method, "layers": layers, "nodes": nodes, "share": share, **more}
        row["held_before"] = torch.cuda.memory_allocated() if cuda else None
        try:
            row |= work()
        except Exception as error:
            traceback.print_exc()
            row["error"] = repr(error).partition("\\n")[0]
        self.rows.append(row)
        outcome = row.get("error") or f"{gigabytes(row['peak_memory'])} GB"
        details = ", ".join(f"{name} {value:,}" for name, value in more.items() if isinstance(value, int))
        line = f"{method}, {layers} layers, {nodes:,} nodes: {outcome}, {share:.1%} of data"
        self.say(", ".join(filter(None, [line, details, row.get("how")])))

    def peak(self, method: str, layers: int, nodes: int) -> int | None:
        """The measured peak memory, if any."""
        found = self.row(method, layers, nodes)
        return None if found is None else found.get("peak_memory")

    def row(self, method: str, layers: int, nodes: int) -> Numbers | None:
        """A measurement, if there is one."""
        key = {"method": method, "layers": layers, "nodes": nodes}
        return next((row for row in self.rows if key.items() <= row.items()), None)


def gigabytes(num_bytes: int | None) -> str:
    """Bytes in units of 10^9, or a dash."""
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.3f}"


def normalized(target: Tensor, source: Tensor, num_nodes: int) -> Adjacency:
    """Edges with self-loops and symmetric normalization, and their transpose.

    Args:
        target: Target of each edge, ``[num_edges]``, ascending.
        source: Source of each edge, ``[num_edges]``.
        num_nodes: Number of nodes.
    """
    nodes = torch.arange(num_nodes, device=target.device)
    degree = torch.bincount(target, minlength=num_nodes) + 1
    # A self-loop comes after the node's other edges, which shift by one for each node before it.
    loops = degree.cumsum(0) - 1
    sources = torch.empty(target.numel() + num_nodes, dtype=torch.long, device=target.device)
    sources[loops] = nodes
    sources[torch.arange(target.numel(), device=target.device) + target] = source
    targets = nodes.repeat_interleave(degree)
    scale = degree.float().rsqrt()
    adjacency = Adjacency.build(targets, sources, num_nodes, num_nodes, scale[targets] * scale[sources])
    _ = adjacency.transposed
    return adjacency


def edges_into(ptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The edges into some nodes, grouped by node: position of the target in ``nodes``, and position of the edge.

    Args:
        ptr: First edge of each node of the graph, ``[num_nodes + 1]``.
        nodes: Node indices, ``[num_targets]``.
    """
    start = ptr[nodes]
    count = ptr[nodes + 1] - start
    target = torch.repeat_interleave(count)
    shift = start - (count.cumsum(0) - count)
    return target, torch.arange(target.numel(), device=ptr.device) + shift[target]


def draw(ptr: Tensor, nodes: Tensor, fan_out: int) -> tuple[Tensor, Tensor]:
    """Draw at most ``fan_out`` edges into each node, without replacement.

    It shuffles all edges into the nodes with one sort and takes the first ones of each node.

    Args:
        ptr: First edge of each node of the graph, ``[num_nodes + 1]``.
        nodes: Node indices, ``[num_targets]``.
        fan_out: The most edges per node.

    Returns:
        As :func:`edges_into`.
    """
    target, edge = edges_into(ptr, nodes)
    count = ptr[nodes + 1] - ptr[nodes]
    # Far enough below 1 that no sum rounds up to the next target.
    key = torch.rand(target.shape, dtype=torch.float64, device=ptr.device).mul_(0.999).add_(target)
    order = key.argsort()
    del key
    rank = torch.arange(target.numel(), device=ptr.device) - (count.cumsum(0) - count)[target]
    kept = order[rank < fan_out]
    return target[kept], edge[kept]


def sample(ptr: Tensor, source: Tensor, seeds: Tensor, fan_out: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sample neighbours hop by hop; like PyG, draw those of a node when it first appears.

    Args:
        ptr: First edge of each node of the graph, ``[num_nodes + 1]``.
        source: Source of each edge, grouped by target, ``[num_edges]``.
        seeds: Distinct nodes, ``[num_seeds]``.
        fan_out: The most edges per node, for each hop.

    Returns:
        The nodes, seeds first; target and source of each edge as positions among them, by ascending target; and the
        number of nodes, counted from the first, whose neighbours were drawn.
    """
    place = torch.full((ptr.numel() - 1,), -1, dtype=torch.long, device=ptr.device)
    place[seeds] = torch.arange(seeds.numel(), device=ptr.device)
    found, frontier, expanded = [seeds], seeds, 0
    targets, sources = [], []
    for most in fan_out:
        target, edge = draw(ptr, frontier, most)
        neighbour = source[edge]
        targets.append(target + expanded)
        expanded += frontier.numel()
        frontier = torch.unique(neighbour[place[neighbour] < 0])
        place[frontier] = torch.arange(expanded, expanded + frontier.numel(), device=ptr.device)
        found.append(frontier)
        sources.append(place[neighbour])
    return torch.cat(found), torch.cat(targets), torch.cat(sources), expanded


def train(batch: Batch, layers: int, classes: int, device: torch.device) -> Numbers:
    """Train on a batch for a few steps, with nothing else on the GPU.

    Args:
        batch: On any device.
        layers: Number of layers.
        classes: Number of classes.
        device: The compute device.

    Returns:
        ``"peak_memory"`` and ``"reserved_memory"`` in bytes, ``None`` on a CPU.
    """
    cuda = device.type == "cuda"
    batch = batch.to(device)
    model = PlainGCN([batch.x.size(1), *[WIDTH] * (layers - 1), classes]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    free_memory(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.adjacency)[: batch.y.size(0)], batch.y)
        loss.backward()
        optimizer.step()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {float(loss)}")
    return {
        "peak_memory": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_memory": torch.cuda.max_memory_reserved() if cuda else None,
    }


def measure_gas(results: Results, graph: BenchGraph, loader: HaloLoader, device: torch.device) -> None:
    """Measure training with histories and batches in host memory, at all depths."""
    recorder = OneRecord(loader.graph)

    def work(layers: int) -> Numbers:
        model = GCN(graph.features, WIDTH, num_layers=layers, out_channels=graph.classes).to(device)
        autoscale(model, loader.graph.num_nodes, storage="host")
        attached(model).memory.recorder = recorder
        return time_epochs(model, loader, placement="host", epochs=1)

    # Warm-up: the first training in a process leaves some memory of PyTorch's own behind.
    work(DEPTHS[0])
    for layers in DEPTHS:
        results.measure("GAS", layers, graph.nodes, 1.0, partial(work, layers), batches=graph.batches)


def measure_others(results: Results, graph: BenchGraph, loader: HaloLoader, device: torch.device) -> None:
    """Measure training without histories: on all nodes, on sampled neighbours, and on one part."""
    data, host = loader.data, torch.device("cpu")
    nodes = graph.nodes
    ptr = loader.graph.incoming._ptr.to(device)
    source = loader.graph.edge_index[0].to(device)[loader.graph.incoming._order.to(device)]

    # Build all batches first, in host memory, so that the GPU later holds only what a method needs.
    part = (loader.labels == 0).nonzero().squeeze(1).to(device)
    target, edge = edges_into(ptr, part)
    place = torch.full((nodes,), -1, dtype=torch.long, device=device)
    place[part] = torch.arange(part.numel(), device=device)
    local = place[source[edge]]
    inside = local >= 0
    part_share = float(inside.double().mean())
    adjacency = normalized(target[inside], local[inside], part.numel())
    cluster = Batch(data.x[part.cpu()], adjacency, data.y[part.cpu()]).to(host)
    del target, edge, place, local, inside, adjacency
    results.say("part cut")

    sampled: dict[int, tuple[Batch, float, Numbers]] = {}
    degree = ptr.diff()
    seeds = torch.randperm(nodes, device=device)[: graph.batch_nodes]
    for layers in DEPTHS:
        found, target, local, expanded = sample(ptr, source, seeds, FAN_OUT[:layers])
        known, used = int(degree[found[:expanded]].sum()), target.numel()
        facts = {
            "sampled_nodes": found.numel(),
            "expanded_nodes": expanded,
            "sampled_edges": used,
            "share_with_last_hop": used / int(degree[found].sum()),
        }
        adjacency = normalized(target, local, found.numel())
        found = found.cpu()
        batch = Batch(data.x[found], adjacency, data.y[found[: seeds.numel()]]).to(host)
        sampled[layers] = batch, used / known, facts
        del target, local, adjacency
    results.say("neighbours sampled")

    whole = normalized(torch.arange(nodes, device=device).repeat_interleave(degree), source, nodes)
    del ptr, source, part, degree, seeds
    full = Batch(data.x.to(device), whole, data.y.to(device))
    results.say("whole graph normalized")
    for layers in DEPTHS:
        results.measure("full batch", layers, nodes, 1.0, partial(train, full, layers, graph.classes, device))
    del whole, full
    for layers, (batch, share, facts) in sampled.items():
        work = partial(train, batch, layers, graph.classes, device)
        results.measure("neighbour sampling", layers, nodes, share, work, **facts)
    for layers in DEPTHS:
        work = partial(train, cluster, layers, graph.classes, device)
        results.measure("Cluster-GCN", layers, nodes, part_share, work)


def table(results: Results, small: BenchGraph, large: BenchGraph) -> str:
    """The results in Markdown: memory in GB, share of edges used, and growth of GAS's memory."""
    lines = ["| | " + " | ".join(f"{layers} layers" for layers in DEPTHS) + " |", "|---" * (len(DEPTHS) + 1) + "|"]
    for method in METHODS:
        cells = []
        for layers in DEPTHS:
            row = results.row(method, layers, large.nodes) or {}
            cells.append(f"{gigabytes(row.get('peak_memory'))} GB, {row['share']:.0%}" if "share" in row else "-")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    cells = [f"{gigabytes(results.peak('GAS', layers, small.nodes))} GB" for layers in DEPTHS]
    lines.append(f"| GAS, {small.nodes:,} nodes | {' | '.join(cells)} |")
    growth = results.content["growth_percent"]
    cells = [f"{growth[layers]:+.2f} %" if layers in growth else "-" for layers in DEPTHS]
    lines.append(f"| growth to {large.nodes:,} nodes | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything on two graphs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="toy size")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        sys.exit("Only --tiny runs without a GPU.")
    small, large = (TINY_PIECE, TINY) if arguments.tiny else (TENTH, PRODUCTS)
    torch.manual_seed(0)
    results = Results(arguments.results, device)
    results.content["graphs"] = [asdict(small), asdict(large)]

    loader = make_loader(small, RATIO)
    results.say(f"graph of {small.nodes:,} nodes and {loader.graph.edge_index.size(1):,} edges")
    measure_gas(results, small, loader, device)
    loader = make_loader(large, RATIO)
    results.say(f"graph of {large.nodes:,} nodes and {loader.graph.edge_index.size(1):,} edges")
    measure_others(results, large, loader, device)
    measure_gas(results, large, loader, device)

    for layers in DEPTHS:
        before, after = (results.peak("GAS", layers, graph.nodes) for graph in (small, large))
        if before and after:
            growth = results.content["growth_percent"][layers] = 100.0 * (after / before - 1.0)
            results.say(f"GAS, {layers} layers: {growth:+.2f} % from {small.nodes:,} to {large.nodes:,} nodes")
    results.say("done")
    print(table(results, small, large))
    if any("error" in row for row in results.rows):
        sys.exit("Some measurements failed.")


if __name__ == "__main__":
    main()
