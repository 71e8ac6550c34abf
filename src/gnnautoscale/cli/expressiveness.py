"""The command ``gas expressiveness``: which nodes GAS and the baselines can tell apart, beside Weisfeiler-Lehman."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.cli.display import print_json, print_table
from gnnautoscale.data import generate
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.expressiveness import (
    TOLERANCE,
    Comparison,
    PowerfulGNN,
    compare,
    full_batch,
    nearest_colours,
    row_classes,
    while_training,
    with_clusters,
    with_histories,
    with_samples,
    wl_colours,
)
from gnnautoscale.training import Partitioner


@dataclass(frozen=True)
class Example:
    """A graph to look at, and what to look at it with.

    Args:
        name: What it is called.
        data: ``x`` [num_nodes, num_colours] one-hot, and ``edge_index`` [2, num_edges].
        layers: Number of layers of the model, and of rounds of Weisfeiler-Lehman.
        num_parts: Number of parts to cut into.
        fan_out: How many neighbours are drawn for each node.
    """

    name: str
    data: Data
    layers: int
    num_parts: int
    fan_out: int

    @property
    def colours(self) -> Tensor:
        """Weisfeiler-Lehman's colours after as many rounds as there are layers, ``[num_nodes]``."""
        start = row_classes(self.data.x)
        return wl_colours(self.data.edge_index, self.data.num_nodes, colours=start, rounds=self.layers)


def examples() -> list[Example]:
    """The graphs of the table, small ones first.

    Example:
        >>> [example.name for example in examples()][:3]
        ['counterexample', 'two stars', 'hexagon and triangles']
    """
    ring = torch.arange(24)
    marked = _graph(torch.stack([ring, ring.roll(-1)]), (ring == 0).long())
    cora = generate.communities(2708, degree=3.9, num_features=1, num_classes=7)
    return [
        Example("counterexample", counterexample(), layers=1, num_parts=2, fan_out=1),
        Example("two stars", two_stars(), layers=1, num_parts=2, fan_out=1),
        Example("hexagon and triangles", hexagon_and_triangles(), layers=3, num_parts=4, fan_out=1),
        Example("ring, one node marked", marked, layers=4, num_parts=4, fan_out=1),
        Example("random", random_graph(100, pairs=200, colours=3), layers=2, num_parts=4, fan_out=2),
        Example("as large as Cora", _graph(cora.edge_index, cora.y, both=False), layers=2, num_parts=10, fan_out=2),
    ]


def counterexample() -> Data:
    """A graph for the paper's Proposition: nodes 0 and 3 both have the neighbours 1 and 2, of two colours.

    After one round nodes 0 and 3 are alike. If one neighbour of each is drawn, they may see different ones.
    """
    return _graph(torch.tensor([[0, 0, 3, 3], [1, 2, 1, 2]]), torch.tensor([0, 1, 2, 0]))


def two_stars() -> Data:
    """The other direction: node 0 has neighbours of colours 1, 1, 2 and node 1 of 1, 2, 2.

    One round tells 0 and 1 apart. If one neighbour of each is drawn, they may look alike.
    """
    edges = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 3, 4, 5, 6, 7]])
    return _graph(edges, torch.tensor([0, 0, 1, 1, 2, 1, 2, 2]))


def hexagon_and_triangles() -> Data:
    """A ring of 6 nodes and two of 3: no round of Weisfeiler-Lehman tells any of these nodes apart."""
    hexagon = torch.arange(6)
    triangle = torch.arange(6, 9)
    rings = [torch.stack([nodes, nodes.roll(-1)]) for nodes in (hexagon, triangle, triangle + 3)]
    return _graph(torch.cat(rings, dim=1), torch.zeros(12, dtype=torch.long))


def random_graph(num_nodes: int, *, pairs: int, colours: int, seed: int = 0) -> Data:
    """So many pairs of nodes joined at random, both ways, and random colours."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, pairs), generator=generator)
    edges = torch.unique(edges[:, edges[0] != edges[1]].sort(dim=0).values, dim=1)
    return _graph(edges, torch.randint(colours, (num_nodes,), generator=generator), num_colours=colours)


def _graph(edges: Tensor, colours: Tensor, *, both: bool = True, num_colours: int = -1) -> Data:
    edge_index = torch.cat([edges, edges.flip(0)], dim=1) if both else edges
    return Data(x=one_hot(colours, num_colours).double(), edge_index=edge_index)


def survey(
    example: Example, seed: int, *, partition: Partitioner = "metis", rescale: bool = True, lr: float = 1e-3
) -> dict[str, Comparison]:
    """Compare the classes of a model's outputs with Weisfeiler-Lehman's, for every way to run the model.

    Args:
        example: The graph.
        seed: Draws weights, parts and neighbours.
        partition: How to cut the graph.
        rescale: Whether edges that baselines keep stand for those that they drop.
        lr: Step size of "GAS in training".

    Example:
        >>> found = survey(examples()[0], seed=0)
        >>> found["full batch"].same, found["GAS"].same
        (True, True)
    """
    data, layers, num_parts, colours = example.data, example.layers, example.num_parts, example.colours
    model = PowerfulGNN(data.num_features, layers, seed=seed)
    outputs = {
        "full batch": full_batch(model, data),
        "GAS": with_histories(model, data, num_parts, partition=partition, seed=seed),
        "GAS, a pass per layer": with_histories(model, data, num_parts, partition=partition, passes=layers, seed=seed),
        "GAS, first pass": with_histories(model, data, num_parts, partition=partition, passes=1, seed=seed),
        "GraphSAGE": with_samples(model, data, [example.fan_out] * layers, rescale=rescale, seed=seed),
        "Cluster-GCN": with_clusters(model, data, num_parts, partition=partition, rescale=rescale, seed=seed),
    }
    stale, exact = while_training(model, data, num_parts, partition=partition, lr=lr, seed=seed)
    classes = {way: row_classes(out, TOLERANCE) for way, out in outputs.items()}
    classes["GAS in training"] = nearest_colours(stale, exact, colours)
    order = ["full batch", "GAS", "GAS, a pass per layer", "GAS, first pass", "GAS in training", "GraphSAGE"]
    return {way: compare(classes[way], colours) for way in [*order, "Cluster-GCN"]}


def expressiveness(
    draws: Annotated[int, typer.Option(help="How often weights, parts and neighbours are drawn.")] = 10,
    partition: Annotated[str, typer.Option(help="How to cut graphs: metis or random.")] = "metis",
    rescale: Annotated[bool, typer.Option(help="Let edges that baselines keep stand for those they drop.")] = True,
    lr: Annotated[float, typer.Option(help="Step size of 'GAS in training'.")] = 1e-3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show which nodes GAS and the baselines can tell apart, beside the Weisfeiler-Lehman test."""
    if draws < 1 or not 0 <= lr < math.inf:
        raise InputError("draws must be at least 1, and lr at least 0", got=f"{draws} and {lr}", fix="Change them.")
    if partition not in ("metis", "random"):
        raise InputError("partition must be metis or random", got=partition, fix="Change this option.")
    method: Partitioner = "metis" if partition == "metis" else "random"
    rows: list[dict[str, Any]] = []
    table = []
    for example in examples():
        found = [survey(example, seed, partition=method, rescale=rescale, lr=lr) for seed in range(draws)]
        ways = {way: [draw[way] for draw in found] for way in found[0]}
        colours = int(example.colours.max()) + 1
        facts = {"graph": example.name, "nodes": example.data.num_nodes, "layers": example.layers, "colours": colours}
        rows.append({**facts, "ways": {way: _facts(results) for way, results in ways.items()}})
        table.append([*map(str, facts.values()), *(_cell(results) for results in ways.values())])
    if json:
        print_json({"draws": draws, "partition": partition, "rescale": rescale, "lr": lr, "rows": rows})
    else:
        heads = ["graph", "nodes", "layers", "WL colours", *rows[0]["ways"]]
        print_table("are Weisfeiler-Lehman's classes kept?", heads, table)


def _facts(results: Sequence[Comparison]) -> dict[str, Any]:
    return {"kept": sum(result.same for result in results), "draws": [asdict(result) for result in results]}


def _cell(results: Sequence[Comparison]) -> str:
    """Whether classes are kept in every draw; if not, in how many, and what happens to how many colours on average."""
    kept = sum(result.same for result in results)
    if kept == len(results):
        return "yes"
    changes = {
        "torn": statistics.mean(result.torn for result in results),
        "merged": statistics.mean(result.merged for result in results),
    }
    return f"{kept}/{len(results)}: " + ", ".join(f"{mean:.1f} {name}" for name, mean in changes.items() if mean)
