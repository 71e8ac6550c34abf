"""Random models on random heterogeneous graphs; see :mod:`support.random_models`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.graph import EdgeType
from support.oracle import NoDropout, NotComparableError, Outcome, compare, judged, leaves

W = 6
NAMES = ("author", "my paper", "term/x", "v1.2", "venue", "_")
#: Layers by name: between any types, given what edges have, and the names of what they take of edges.
Make = Callable[[], nn.Module]
BETWEEN: dict[str, tuple[Make, tuple[str, ...]]] = {
    "SAGE": (lambda: pyg.SAGEConv((-1, -1), W), ()),
    "SAGE max": (lambda: pyg.SAGEConv(W, W, aggr="max", normalize=True), ()),
    "SAGE several": (lambda: pyg.SAGEConv(W, W, aggr=["mean", "max", "std"]), ()),
    "GAT": (lambda: pyg.GATConv((W, W), W // 2, heads=2, add_self_loops=False), ()),
    "GATv2 features": (lambda: pyg.GATv2Conv((W, W), W // 2, 2, add_self_loops=False, edge_dim=2), ("edge_attr",)),
    "GraphConv": (lambda: pyg.GraphConv(W, W), ("edge_weight",)),
    "Transformer": (lambda: pyg.TransformerConv(W, W, edge_dim=2), ("edge_attr",)),
    "GIN": (lambda: pyg.GINConv(nn.Linear(W, W)), ()),
    "GINE": (lambda: pyg.GINEConv(nn.Linear(W, W), edge_dim=2), ("edge_attr",)),
    "ResGated": (lambda: pyg.ResGatedGraphConv(W, W), ()),
    "FiLM": (lambda: pyg.FiLMConv((W, W), W), ()),
    "CG": (lambda: pyg.CGConv(W, 2), ("edge_attr",)),
    "LE": (lambda: pyg.LEConv((W, W), W), ("edge_weight",)),
    "Edge": (lambda: pyg.EdgeConv(nn.Linear(2 * W, W)), ()),
    "MF": (lambda: pyg.MFConv(W, W), ()),
}
#: And within one.
WITHIN: dict[str, tuple[Make, tuple[str, ...]]] = {
    **BETWEEN,
    "GCN": (lambda: pyg.GCNConv(W, W), ("edge_weight",)),
    "GAT loops": (lambda: pyg.GATConv(W, W), ()),
    "Gated": (lambda: pyg.GatedGraphConv(W, 2), ()),
    "TAG": (lambda: pyg.TAGConv(W, W, 2), ()),
    "APPNP": (lambda: pyg.APPNP(2, 0.1), ()),
    "ARMA": (lambda: pyg.ARMAConv(W, W, 2, 2), ()),
    "PNA": (lambda: pyg.GENConv(W, W, aggr="mean"), ()),
}
NORMS: dict[str, Make] = {
    "none": nn.Identity,
    "layer": lambda: nn.LayerNorm(W),
    "batch": lambda: nn.BatchNorm1d(W),
    "PyG batch": lambda: pyg.BatchNorm(W),
}
#: These look at all rows, so that a refusal is right.
MIXING: dict[str, Make] = {"pair": pyg.PairNorm, "graph": lambda: pyg.GraphNorm(W)}
AGGREGATIONS = ("sum", "mean", "max", "min")


def key(relation: EdgeType | str) -> str:
    """A name that a module can have."""
    return str(relation).replace(".", "_")


@dataclass(frozen=True)
class TypedRecipe:
    """What to make of a seed."""

    seed: int
    kind: str
    counts: dict[str, int]
    relations: dict[EdgeType, tuple[int, str]]
    features: frozenset[str]
    layers: int
    aggr: str
    norm: str
    wiring: str
    output: str | None
    num_parts: int
    batch_size: int
    bidirectional: bool
    drops: bool = field(default=False)

    @staticmethod
    def draw(seed: int) -> TypedRecipe:
        """Draw everything."""
        rng = random.Random(seed)
        kinds = rng.sample(NAMES, rng.randint(2, 5))
        counts = {kind: rng.choice([1, 7, 15, 30, 30]) for kind in kinds}
        counts[kinds[0]] = 30
        relations = dict[EdgeType, tuple[int, str]]()
        for number in range(rng.randint(2, 7)):
            source, target = rng.choice(kinds), rng.choice(kinds)
            of = WITHIN if source == target else BETWEEN
            edges = 0 if rng.random() < 0.05 else rng.randint(5, 60)
            relations[source, f"to {number % 3}", target] = edges, rng.choice(list(of))
        makes = {kind for _, _, kind in relations}
        return TypedRecipe(
            seed=seed,
            kind=rng.choice(["HeteroConv", "HeteroConv", "loop", "HGT"]),
            counts=counts,
            relations=relations,
            features=frozenset(kind for kind in kinds if rng.random() < 0.8),
            layers=rng.choice([1, 2, 2, 3]),
            aggr=rng.choice(AGGREGATIONS),
            norm=rng.choice(list(NORMS)) if rng.random() < 0.85 else rng.choice(list(MIXING)),
            wiring=rng.choice(["plain", "residual", "shared", "jumping"]),
            output=rng.choice([*sorted(makes), None]),
            num_parts=rng.choice([2, 3, 5]),
            batch_size=rng.choice([1, 1, 2]),
            bidirectional=rng.random() < 0.3,
            drops=rng.random() < 0.3,
        )

    @property
    def is_harmless(self) -> bool:
        """Whether every part is known to be exact, so that a refusal would be needless."""
        return self.norm in NORMS

    def data(self) -> HeteroData:
        """The graph: directed, with isolated nodes, and types that nothing points to."""
        generator, data = torch.Generator().manual_seed(self.seed), HeteroData()
        for number, (kind, count) in enumerate(self.counts.items()):
            data[kind].num_nodes = count
            if kind in self.features:
                data[kind].x = torch.randn(count, 3 + number, generator=generator, dtype=torch.double)
        for (source, name, target), (count, layer) in self.relations.items():
            store = data[source, name, target]
            ends = [torch.randint(self.counts[kind], (count,), generator=generator) for kind in (source, target)]
            store.edge_index = torch.stack(ends)
            if "edge_weight" in WITHIN[layer][1]:
                store.edge_weight = torch.rand(count, generator=generator, dtype=torch.double) + 0.3
            if "edge_attr" in WITHIN[layer][1]:
                store.edge_attr = torch.randn(count, 2, generator=generator, dtype=torch.double)
        return data

    def outcome(self) -> Outcome:
        """What becomes of the model: in steps until its histories are exact, in inference then, and as one part."""
        data = self.data()
        plain = self._made(data)
        pairs: list[tuple[nn.Module, list[Tensor]]] = []  # one, so that the model is planned once

        def settle() -> None:
            pairs.append(self._pair(data, plain))
            self._settles(data, *pairs[0])

        found = [judged(settle, "steps")]
        if found[0].kind == "exact":
            found += [judged(lambda: self._infers(data, *pairs[0]), "evaluation")]
            found += [judged(lambda: self._one(data), "one part")]
        return Outcome.worst(found)

    def _made(self, data: HeteroData) -> nn.Module:
        torch.manual_seed(self.seed)
        model = RandomTypedModel(self).double().eval()
        try:
            with torch.no_grad():
                model(whole(data))
        except Exception as error:
            model.broken = str(error)  # type: ignore[assignment]
        return model

    def _pair(self, data: HeteroData, plain: nn.Module) -> tuple[nn.Module, list[Tensor]]:
        if hasattr(plain, "broken"):
            raise NotComparableError(f"fails on the whole graph: {plain.broken}")
        with torch.no_grad():
            return gas.autoscale(copy.deepcopy(plain), data), leaves(plain(whole(data)))

    def _loader(self, data: HeteroData) -> gas.HaloLoader:
        how: dict[str, Any] = {"batch_size": min(self.batch_size, self.num_parts), "bidirectional": self.bidirectional}
        return gas.HaloLoader(data, self.num_parts, partition="random", seed=self.seed, **how)

    def _infers(self, data: HeteroData, model: nn.Module, want: list[Tensor]) -> None:
        loader = self._loader(data)
        compare(gas.infer(model, loader, update_histories=False), want, "inference")
        gas.refresh(model, loader)
        out = [self.output] if self.output else list(self.counts)
        nodes = {kind: torch.arange(self.counts[kind])[:: 1 + self.counts[kind] // 3] for kind in out}
        compare(
            gas.predict(model, loader, nodes), [rows[nodes[kind]] for rows, kind in zip(want, out, strict=True)], "some"
        )
        compare(gas.exact_forward(model, loader), want, "an exact pass")
        if not gas.verify(model, loader, nodes=10).exact:
            compare([], want, "verification")

    def _settles(self, data: HeteroData, model: nn.Module, want: list[Tensor]) -> None:
        loader, kinds = self._loader(data), [self.output] if self.output else list(self.counts)
        found = [torch.full_like(rows, torch.nan) for rows in want]
        with torch.no_grad():
            for _ in range(2 * self.layers + 8):
                for batch in loader:
                    for rows, mine, kind in zip(found, leaves(model(batch)), kinds, strict=True):
                        rows[batch[kind].n_id[: batch[kind].batch_size].as_subclass(Tensor)] = mine
        compare(found, want, "steps")

    def _one(self, data: HeteroData) -> None:
        gradients = []
        for autoscaled in (False, True):
            model = self._made(data)
            batch = next(iter(gas.HaloLoader(data, 1))) if autoscaled else whole(data)
            model = gas.autoscale(model, data) if autoscaled else model
            with NoDropout():
                torch.manual_seed(0)
                out = model(batch)
            losses = [(value * torch.linspace(-1, 2, value.numel()).view_as(value)).sum() for value in leaves(out)]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            gradients.append({name: weight.grad for name, weight in model.named_parameters()})
        most = max(float(value.abs().max()) for value in gradients[0].values() if value is not None)
        for name, value in gradients[0].items():
            other = gradients[1][name]
            pair = [torch.zeros(1) if each is None or not each.numel() else each / most for each in (other, value)]
            compare(pair[0] + 1.0, pair[1] + 1.0, f"the gradient of {name}")


def whole(data: HeteroData) -> HeteroData:
    """A graph as a batch."""
    data = copy.copy(data)
    for store in data.node_stores:
        store.n_id = torch.arange(store.num_nodes)
    return data


class RandomTypedModel(nn.Module):
    """The model of a recipe; types without features have a trained row for each node."""

    def __init__(self, recipe: TypedRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        kinds, relations = list(recipe.counts), recipe.relations
        self.first = nn.ModuleDict({key(kind): pyg.Linear(-1, W) for kind in kinds if kind in recipe.features})
        rest = [kind for kind in kinds if kind not in recipe.features]
        self.tables = nn.ModuleDict({key(kind): nn.Embedding(recipe.counts[kind], W) for kind in rest})
        self.kind = "loop" if recipe.kind == "HGT" and any("." in kind for kind in kinds) else recipe.kind
        self.convs = nn.ModuleList([self._layer() for _ in range(1 if recipe.wiring == "shared" else recipe.layers)])
        made = {**NORMS, **MIXING}[recipe.norm]
        self.norms = nn.ModuleDict({key(kind): made() for kind in kinds})
        # Nothing uses some of these, whose weights stay lazy.
        self.lift = nn.ModuleDict({key(kind): pyg.Linear(-1, W) for kind in kinds})
        self.last, self.relations = pyg.Linear(-1, 3), relations

    def _layer(self) -> nn.Module:
        recipe = self.recipe
        if self.kind == "HGT":
            conv: nn.Module = pyg.HGTConv(W, W, (list(recipe.counts), list(recipe.relations)), heads=2)
            return conv
        convs = {kind: WITHIN[layer][0]() for kind, (_, layer) in recipe.relations.items()}
        if self.kind == "HeteroConv":
            return pyg.HeteroConv(convs, aggr=recipe.aggr)  # type: ignore[no-any-return]
        return nn.ModuleDict({key(kind): conv for kind, conv in convs.items()})

    def forward(self, batch: HeteroData) -> Any:
        recipe = self.recipe
        rows = {
            kind: self.first[key(kind)](batch[kind].x)
            if kind in recipe.features
            else self.tables[key(kind)](batch[kind].n_id)
            for kind in recipe.counts
        }
        seen = [rows]
        for number in range(recipe.layers):
            conv = self.convs[0 if recipe.wiring == "shared" else number]
            found = {kind: x for kind, x in self._run(conv, rows, batch).items() if x is not None}
            found = {kind: self.lift[key(kind)](self.norms[key(kind)](x).tanh()) for kind, x in found.items()}
            if recipe.drops:
                found = {kind: F.dropout(x, 0.5, self.training) for kind, x in found.items()}
            if recipe.wiring == "residual":
                found = {kind: x + rows[kind] for kind, x in found.items()}
            rows = {**rows, **found}
            seen.append(rows)
        if recipe.wiring == "jumping":
            rows = {kind: torch.cat([each[kind] for each in seen], dim=1) for kind in rows}
        return (
            {kind: self.last(x) for kind, x in rows.items()}
            if recipe.output is None
            else self.last(rows[recipe.output])
        )

    def _run(self, conv: Any, rows: dict[str, Tensor], batch: HeteroData) -> dict[str, Any]:
        given: dict[str, dict[EdgeType, Tensor]] = {"edge_weight": {}, "edge_attr": {}}
        for kind, (_, layer) in self.relations.items():
            for name in WITHIN[layer][1]:
                given[name][kind] = batch[kind][name]
        edges = {kind: batch[kind].edge_index for kind in self.relations}
        if self.kind == "HGT":
            out: dict[str, Any] = conv(rows, edges)
            return out
        if self.kind == "HeteroConv":
            found: dict[str, Any] = conv(rows, edges, **{f"{name}_dict": each for name, each in given.items() if each})
            return found
        total: dict[str, Tensor] = {}
        for kind, edge_index in edges.items():
            source, target = rows[kind[0]], rows[kind[2]]
            values = {name: each[kind] for name, each in given.items() if kind in each}
            x = conv[key(kind)](source if kind[0] == kind[2] else (source, target), edge_index, **values)
            total[kind[2]] = total[kind[2]] + 0.5 * x if kind[2] in total else x
        return total
