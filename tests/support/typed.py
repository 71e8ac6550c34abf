"""Heterogeneous graphs and models for tests."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.attach.calling import unpack_batch

WIDTH = 8


def typed_graph(seed: int = 0) -> HeteroData:
    """Authors, papers, terms and venues: directed, with two relations between papers, and nobody cites a venue."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    counts = {"author": 30, "paper": 40, "term": 12, "venue": 5}
    for number, (kind, count) in enumerate(counts.items()):
        data[kind].x = torch.randn(count, 4 + number, generator=generator, dtype=torch.float64)

    def draw(source: str, relation: str, target: str, count: int) -> None:
        ends = [torch.randint(counts[kind], (count,), generator=generator) for kind in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)

    draw("author", "writes", "paper", 70)
    data["paper", "written_by", "author"].edge_index = data["author", "writes", "paper"].edge_index.flip(0)
    draw("paper", "cites", "paper", 60)
    draw("paper", "extends", "paper", 25)
    draw("term", "in", "paper", 50)
    draw("venue", "publishes", "paper", 30)
    draw("paper", "mentions", "term", 40)
    weight = torch.rand(60, generator=generator, dtype=torch.float64) + 0.5
    data["paper", "cites", "paper"].edge_weight = weight
    data["paper"].y = torch.randint(3, (40,), generator=generator)
    data["term", "in", "paper"].edge_weight = torch.rand(50, generator=generator, dtype=torch.float64) + 0.5
    data["venue", "publishes", "paper"].edge_attr = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    return data


GRAPH = typed_graph()
RELATIONS, KINDS = GRAPH.edge_types, GRAPH.node_types


def run(model: nn.Module, data: HeteroData) -> list[Tensor]:
    """The outputs of a plain model for a whole graph; makes the weights that it lacks."""
    data = copy.copy(data)
    for kind in data.node_types:
        data[kind].n_id = torch.arange(data[kind].num_nodes)
    args, kwargs = unpack_batch(inspect.signature(model.forward), "the model", (data,), {})
    return tensors_in(model(*args, **kwargs))


class Stacked(nn.Module):
    """Layers of ``HeteroConv`` with a linear layer for each type before them, and for the output."""

    def __init__(self, conv: Callable[[Any], nn.Module], aggr: str | None = "sum", layers: int = 2) -> None:
        super().__init__()
        self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in KINDS})
        self.convs = nn.ModuleList(
            [pyg.HeteroConv({kind: conv(kind) for kind in RELATIONS}, aggr=aggr) for _ in range(layers)]
        )
        self.last = pyg.Linear(-1, 3)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Tensor:
        rows = start = {kind: self.first[kind](x) for kind, x in x_dict.items()}
        for conv in self.convs:
            found = conv(rows, edge_index_dict)
            rows = {**start, **{kind: F.elu(x.flatten(1)) for kind, x in found.items()}}
        out: Tensor = self.last(rows["paper"])
        return out


class Residual(nn.Module):
    """Residuals, norms and dropout by type, jumping knowledge, and outputs for two types; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.HeteroDictLinear(-1, WIDTH, types=KINDS)
        self.conv = pyg.HeteroConv({kind: pyg.SAGEConv(WIDTH, WIDTH) for kind in RELATIONS}, aggr="mean")
        self.norms = nn.ModuleDict({kind: nn.BatchNorm1d(WIDTH) for kind in KINDS})
        self.last = nn.Linear(3 * WIDTH, 3)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> dict[str, Tensor]:
        rows = self.first(x_dict)
        seen = [rows]
        for _ in range(2):
            found = self.conv(rows, edge_index_dict)
            rows = {kind: x + self.norms[kind](found[kind]).relu() if kind in found else x for kind, x in rows.items()}
            rows = {kind: F.dropout(x, 0.5, self.training) for kind, x in rows.items()}
            seen.append(rows)
        return {kind: self.last(torch.cat([each[kind] for each in seen], dim=1)) for kind in ("author", "paper")}


class Looping(nn.Module):
    """A module of one's own that loops over relations, adds up in place, and looks rows of authors up by number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, WIDTH)
        self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in KINDS if kind != "author"})
        self.convs = nn.ModuleList(
            [nn.ModuleDict({"__".join(kind): pyg.SAGEConv(WIDTH, WIDTH) for kind in RELATIONS}) for _ in range(2)]
        )

    def forward(self, batch: HeteroData) -> Tensor:
        rows = {kind: lin(batch[kind].x) for kind, lin in self.first.items()}
        rows["author"] = self.table(batch["author"].n_id)
        for convs in self.convs:
            found: dict[str, Tensor] = {}
            for kind, edge_index in batch.edge_index_dict.items():
                out = cast(nn.ModuleDict, convs)["__".join(kind)]((rows[kind[0]], rows[kind[2]]), edge_index)
                if kind[2] in found:
                    found[kind[2]] += out
                else:
                    found[kind[2]] = out
            rows = {**rows, **{kind: x.relu() for kind, x in found.items()}}
        papers: Tensor = rows["paper"]
        return papers


class Weighted(nn.Module):
    """Normalized, weighted edges between papers, others with weights and features, and some as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in KINDS})
        self.gcn = nn.ModuleList([pyg.GCNConv(WIDTH, WIDTH) for _ in range(2)])
        self.sage = nn.ModuleList([pyg.SAGEConv(WIDTH, WIDTH) for _ in range(2)])
        self.graph = nn.ModuleList([pyg.GraphConv(WIDTH, WIDTH) for _ in range(2)])
        self.cg = nn.ModuleList([pyg.CGConv(WIDTH, 2) for _ in range(2)])

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: Any, edge_weight_dict: Any, edge_attr_dict: Any
    ) -> Tensor:
        rows = {kind: self.first[kind](x) for kind, x in x_dict.items()}
        cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
        has, publishes = ("term", "in", "paper"), ("venue", "publishes", "paper")
        for gcn, sage, graph, cg in zip(self.gcn, self.sage, self.graph, self.cg, strict=True):
            papers = gcn(rows["paper"], edge_index_dict[cites], edge_weight_dict[cites])
            papers = papers + sage((rows["author"], rows["paper"]), edge_index_dict[writes])
            papers = papers + graph((rows["term"], rows["paper"]), edge_index_dict[has], edge_weight_dict[has])
            ends, features = (rows["venue"], rows["paper"]), edge_attr_dict[publishes]
            papers = papers + cg(ends, edge_index_dict[publishes], features)
            rows = {**rows, "paper": torch.tanh(papers)}
        out: Tensor = rows["paper"]
        return out


class Attending(nn.Module):
    """Layers that take all types at once."""

    def __init__(self, conv: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in KINDS})
        self.convs = nn.ModuleList([conv() for _ in range(2)])

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Tensor:
        rows = {kind: self.first[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            found = conv(rows, edge_index_dict)
            rows = {kind: rows[kind] if found.get(kind) is None else found[kind] for kind in rows}
        out: Tensor = rows["paper"]
        return out


class Averaging(Attending):
    """Attention between relations of its own, by a mean over all papers."""

    def __init__(self) -> None:
        super().__init__(lambda: pyg.HeteroConv({kind: pyg.SAGEConv(WIDTH, WIDTH) for kind in RELATIONS}, aggr=None))
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Tensor:
        rows = {kind: self.first[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            found = conv(rows, edge_index_dict)
            for kind, each in found.items():
                share = self.score(each.tanh()).mean(dim=0, keepdim=True).softmax(1)
                rows[kind] = (share * each).sum(1)
        out: Tensor = rows["paper"] - rows["paper"].mean(0)
        return out


#: Models that add up rows of all nodes.
ADDING: dict[str, Callable[[], nn.Module]] = {
    "HAN": lambda: Attending(lambda: pyg.HANConv(WIDTH, WIDTH, (KINDS, RELATIONS), heads=2)),
    "averages": Averaging,
}


class Plain(nn.Module):
    """A model of a plain graph, to be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv((-1, -1), WIDTH), pyg.SAGEConv((-1, -1), WIDTH)
        self.last = pyg.Linear(-1, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.one(x, edge_index).relu()
        out: Tensor = self.last(self.two(x, edge_index).relu())
        return out


# PyG converts models only where each type is some edge's target.
TARGETS = [("author", "writes", "paper"), ("paper", "written_by", "author"), ("paper", "cites", "paper")]


def converted(aggr: str) -> nn.Module:
    """A converted model of authors and papers."""
    model: nn.Module = pyg.to_hetero(Plain(), (["author", "paper"], TARGETS), aggr=aggr)
    return model


class OfTwo(nn.Module):
    """Gives a converted model its types."""

    def __init__(self, aggr: str) -> None:
        super().__init__()
        self.model = converted(aggr)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Any:
        rows = {kind: x_dict[kind] for kind in ("author", "paper")}
        return self.model(rows, {kind: edge_index_dict[kind] for kind in TARGETS})


def within_types(same: Callable[[], nn.Module]) -> Callable[[Any], nn.Module]:
    """A layer for edges between nodes of one type, and GraphSAGE for others."""
    return lambda kind: same() if kind[0] == kind[2] else pyg.SAGEConv(WIDTH, WIDTH)


AGGREGATIONS = ("sum", "mean", "max", "min")
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"SAGE {aggr}": partial(Stacked, lambda _: pyg.SAGEConv(WIDTH, WIDTH), aggr) for aggr in AGGREGATIONS},
    "SAGE cat": lambda: Stacked(lambda _: pyg.SAGEConv((-1, -1), WIDTH), "cat"),
    "SAGE stacked": lambda: Stacked(lambda _: pyg.SAGEConv((-1, -1), WIDTH), None),
    "SAGE deep": lambda: Stacked(lambda _: pyg.SAGEConv(WIDTH, WIDTH), layers=4),
    "GAT": lambda: Stacked(lambda _: pyg.GATConv((-1, -1), 4, heads=2, add_self_loops=False)),
    "GATv2": lambda: Stacked(lambda _: pyg.GATv2Conv((-1, -1), 4, heads=2, add_self_loops=False)),
    "GraphConv": lambda: Stacked(lambda _: pyg.GraphConv(WIDTH, WIDTH)),
    "Transformer": lambda: Stacked(lambda _: pyg.TransformerConv(WIDTH, WIDTH)),
    "GCN": lambda: Stacked(within_types(lambda: pyg.GCNConv(WIDTH, WIDTH))),
    "GAT with loops": lambda: Stacked(within_types(lambda: pyg.GATConv(WIDTH, WIDTH))),
    "SGC": lambda: Stacked(within_types(lambda: pyg.SGConv(WIDTH, WIDTH, K=2))),
    "HGT": lambda: Attending(lambda: pyg.HGTConv(WIDTH, WIDTH, (KINDS, RELATIONS), heads=2)),
    "residual": Residual,
    "looping": Looping,
    "weighted": Weighted,
    **{f"to_hetero {aggr}": partial(OfTwo, aggr) for aggr in ("sum", "mean", "max")},
}
