"""A step of a ``HeteroConv`` of GraphSAGE, against the plain steps of each of its types of edges, one after the other.

Both kinds of steps are GAS's own, on the same parts, with histories in host memory: uncaptured, and on a GPU captured.
The plain graph of a type of edges has its two types of nodes, joined if they differ. WordNet has so many types that
plain steps are measured for every tenth of them, in the order of their numbers of edges, and the sum is as many times
the mean. Memory is measured again on the doubled graph, whose batches are as large; captured batches stay on the GPU,
if all of them fit, unless that is forbidden.

    PYTHONPATH=src python benchmarks/hetero.py                    # generated graph, small, any machine
    PYTHONPATH=src python benchmarks/hetero.py --large --wordnet wordnet3.npz --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE, HeteroConv, Linear, SAGEConv

import gnnautoscale as gas
from gnnautoscale._util import PeakMemory
from gnnautoscale.experiments.bench.measuring import free_memory, timed
from gnnautoscale.training import describe_machine

LAYERS, CLASSES = 2, 8
# Epochs that are not timed: they build batches, compile kernels and capture steps.
WARM_UP = 3
WAYS = ("uncaptured", "captured", "captured, one batch at a time on the GPU")


class HeteroSAGE(nn.Module):
    """Layers of ``HeteroConv`` with a linear layer for each type before them."""

    def __init__(self, data: HeteroData, width: int) -> None:
        super().__init__()
        self.first = nn.ModuleDict({kind: Linear(data[kind].num_features, width) for kind in data.node_types})
        self.convs = nn.ModuleList(
            [HeteroConv({kind: SAGEConv(width, width) for kind in data.edge_types}) for _ in range(LAYERS)]
        )
        self.last = Linear(width, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Tensor:
        """Rows of the first type of nodes."""
        rows = start = {kind: self.first[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            rows = {**start, **{kind: x.relu() for kind, x in conv(rows, edge_index_dict).items()}}
        out: Tensor = self.last(rows[next(iter(x_dict))])
        return out


class PlainSAGE(nn.Module):
    """The same for a plain graph."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first, self.last = Linear(features, width), Linear(width, CLASSES)
        self.convs = GraphSAGE(width, width, LAYERS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Rows of all nodes."""
        out: Tensor = self.last(self.convs(self.first(x).relu(), edge_index).relu())
        return out


def generated(size: int, features: int, degree: int) -> tuple[HeteroData, dict[str, Tensor]]:
    """Three types of nodes in communities, with nine relations, and the community of each node as its part."""
    generator, parts = torch.Generator().manual_seed(0), 16
    counts = {"paper": 2 * size, "author": size, "term": size // 2}
    data, labels = HeteroData(), {}
    for kind, count in counts.items():
        data[kind].x = torch.randn(count, features, generator=generator)
        data[kind].y = torch.randint(CLASSES, (count,), generator=generator)
        labels[kind] = torch.arange(count) * parts // count
    for source in counts:
        for target in counts:
            ends = torch.arange(counts[target]).repeat_interleave(degree)
            near = ends * counts[source] // counts[target]
            far = torch.randint(counts[source], ends.shape, generator=generator)
            step = torch.randint(-20, 21, ends.shape, generator=generator)
            is_near = torch.rand(ends.shape, generator=generator) < 0.9
            sources = torch.where(is_near, (near + step) % counts[source], far)
            data[source, "to", target].edge_index = torch.stack([sources, ends])
    return data, labels


def wordnet(file: Path, features: int) -> tuple[HeteroData, dict[str, Tensor]]:
    """WordNet with its parts of speech as types of nodes, all relations and their reverses, and METIS's parts."""
    arrays = np.load(file)
    edge_index, relation = torch.from_numpy(arrays["edge_index"]).long(), torch.from_numpy(arrays["edge_type"]).long()
    kinds, pos = np.unique(arrays["pos"], return_inverse=True)
    pos, names = torch.from_numpy(pos), [str(name) for name in arrays["edge_type_names"]]
    indptr, indices = (torch.from_numpy(arrays[name]).long() for name in ("x_indptr", "x_indices"))
    row = torch.repeat_interleave(indptr.diff())
    kept = indices < features
    x = torch.zeros(pos.numel(), features)
    x[row[kept], indices[kept]] = 1.0
    local, data = torch.empty_like(pos), HeteroData()
    for number, kind in enumerate(kinds):
        nodes = (pos == number).nonzero().squeeze(1)
        local[nodes] = torch.arange(nodes.numel())
        data[str(kind)].x, data[str(kind)].y = x[nodes], torch.from_numpy(arrays["y"]).long()[nodes] % CLASSES
    key = (pos[edge_index[0]] * len(names) + relation) * len(kinds) + pos[edge_index[1]]
    for each in key.unique().tolist():
        rest, target = divmod(each, len(kinds))
        source, number = divmod(rest, len(names))
        ends = local[edge_index[:, key == each]]
        name = f"{number}_{''.join(letter for letter in names[number] if letter.isalnum())}"
        data[str(kinds[source]), name, str(kinds[target])].edge_index = ends
        data[str(kinds[target]), f"reverse_{name}", str(kinds[source])].edge_index = ends.flip(0)
    labels = gas.HaloLoader(data, 16).labels
    firsts = np.cumsum([0, *(data[kind].num_nodes for kind in data.node_types)])
    return data, {
        kind: labels[first:last] for kind, first, last in zip(data.node_types, firsts[:-1], firsts[1:], strict=True)
    }


def doubled(data: HeteroData, labels: dict[str, Tensor]) -> tuple[HeteroData, dict[str, Tensor]]:
    """Two copies of a graph, in parts of their own."""
    twice, parts = HeteroData(), {}
    most = max(int(label.max()) for label in labels.values()) + 1
    for kind, store in data.node_items():
        twice[kind].x, twice[kind].y = torch.cat([store.x, store.x]), torch.cat([store.y, store.y])
        parts[kind] = torch.cat([labels[kind], labels[kind] + most])
    for kind, store in data.edge_items():
        ends = torch.tensor([[data[kind[0]].num_nodes], [data[kind[2]].num_nodes]])
        twice[kind].edge_index = torch.cat([store.edge_index, store.edge_index + ends], dim=1)
    return twice, parts


def plain_graph(data: HeteroData, labels: dict[str, Tensor], kind: tuple[str, str, str]) -> tuple[Data, Tensor]:
    """The plain graph of a type of edges, and the part of each node."""
    source, _, target = kind
    ends = [target] if source == target else [target, source]
    shift = torch.tensor([[0 if source == target else data[target].num_nodes], [0]])
    plain = Data(x=torch.cat([data[end].x for end in ends]), edge_index=data[kind].edge_index + shift)
    plain.y = torch.cat([data[end].y for end in ends])
    return plain, torch.cat([labels[end] for end in ends])


def train(model: nn.Module, loader: gas.HaloLoader, device: torch.device, way: str, epochs: int) -> dict[str, Any]:
    """Time steps on all batches of a loader."""
    gas.autoscale(model.to(device), loader.data, storage="host")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    kind = None if isinstance(loader.data, Data) else loader.data.node_types[0]

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        nodes = batch if kind is None else batch[kind]
        loss = F.cross_entropy(model(batch), nodes.y[: nodes.batch_size])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run: Callable[[Any], Tensor] = step
    if way != "uncaptured":
        run = gas.capture(model, step, optimizer, batches_on="host" if way == WAYS[-1] else "auto")
    seconds = [timed(lambda: epoch(run, loader), device)[0] for _ in range(WARM_UP + epochs)]
    return {
        "milliseconds": 1e3 * statistics.median(seconds[WARM_UP:]) / len(loader),
        "how": "uncaptured" if run is step else run.how,  # type: ignore[attr-defined]
    }


def epoch(step: Callable[[Any], Tensor], batches: Iterable[Any]) -> None:
    """Run a step on all batches and wait for their losses."""
    torch.stack([step(batch) for batch in batches]).sum().item()


def measured(
    data: HeteroData, labels: dict[str, Tensor], args: argparse.Namespace, device: torch.device, way: str
) -> dict[str, Any]:
    """The time of a step with all types and its memory, also on the doubled graph."""
    found: dict[str, Any] = {}
    for name, (graph, parts) in {"": (data, labels), " doubled": doubled(data, labels)}.items():
        free_memory(device)
        with PeakMemory(device) as peak:
            loader = gas.HaloLoader(graph, partition=parts, device=device)
            numbers = train(HeteroSAGE(graph, args.width), loader, device, way, args.epochs)
            del loader
        found |= {f"{key}{name}": value for key, value in numbers.items()}
        found[f"peak_memory{name}"] = peak.num_bytes
    return found


def plain_steps(
    data: HeteroData, labels: dict[str, Tensor], args: argparse.Namespace, device: torch.device, way: str
) -> dict[str, Any]:
    """The sum of the plain steps of all types of edges, or as many times the mean of a sample of them."""
    kinds = sorted(data.edge_types, key=lambda kind: -data[kind].num_edges)
    chosen, found = kinds[:: -(-len(kinds) // args.most_types)], []
    for kind in chosen:
        plain, parts = plain_graph(data, labels, kind)
        loader = gas.HaloLoader(plain, partition=parts, device=device)
        found.append(train(PlainSAGE(plain.num_features, args.width), loader, device, way, args.epochs))
    total = len(kinds) * statistics.mean(numbers["milliseconds"] for numbers in found)
    return {"types": len(kinds), "types measured": len(chosen), "sum of plain steps": total}


def main() -> None:
    """Print a line of JSON for each graph and way to run steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true", help="a generated graph of 350,000 nodes, not of 3,500")
    parser.add_argument("--wordnet", type=Path, help="the file of WordNet, to measure it too")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--most-types", type=int, default=13, help="types of edges to measure plain steps of")
    args = parser.parse_args()
    device, start = torch.device(args.device), time.perf_counter()
    graphs = {"generated": generated(100_000 if args.large else 1_000, args.features, 8)}
    if args.wordnet is not None:
        graphs["WordNet"] = wordnet(args.wordnet, args.features)
    print(json.dumps(describe_machine(device)), flush=True)
    for name, (data, labels) in graphs.items():
        for way in WAYS if device.type == "cuda" else WAYS[:1]:
            numbers = measured(data, labels, args, device, way)
            if way != WAYS[-1]:  # which is about memory
                numbers |= plain_steps(data, labels, args, device, way)
                numbers["ratio"] = numbers["milliseconds"] / numbers["sum of plain steps"]
            print(json.dumps({"graph": name, "steps": way, **numbers}), flush=True)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
