"""Random models on random graphs: layers, wiring, norms, edges, modes, state, and changes between calls.

A seed gives a recipe, and a recipe gives a model, a graph and what happens to the model. Every model runs on the whole
graph; whether it runs in batches is for the oracle to find out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn.resolver import aggregation_resolver  # type: ignore[import-untyped]
from torch_geometric.utils import (  # type: ignore[import-untyped]
    add_self_loops,
    coalesce,
    dropout_edge,
    remove_self_loops,
    to_undirected,
)

import gnnautoscale as gas
from conftest import CHANNELS, odd_graph, spread_norms, undirected_graph, with_attributes
from support.layers import ALL_LAYERS, INITIAL_LAYERS, TWO_WAY_LAYERS
from support.oracle import Change, Check, Outcome, outcome
from support.traps.known import Annealed, PerRelation, Tracked
from support.traps.mixing import OwnAttention
from support.traps.registry import centred

C = CHANNELS

Step = Callable[[Any, Tensor], Tensor]
Edges = tuple[Tensor, dict[str, Tensor]]

# Layers ##############################################################################################################

OWN_LAYERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "own per relation": (PerRelation, ("edge_type",)),
    "own tracked": (Tracked, ()),
    "own annealed": (Annealed, ("edge_weight",)),
    "own attention": (OwnAttention, ()),
    "GAT dropout": (lambda: pyg.GATConv(C, C, dropout=0.5), ()),
    "APPNP dropout": (lambda: pyg.APPNP(2, 0.2, dropout=0.5), ()),
    "GPS": (lambda: pyg.GPSConv(C, pyg.SAGEConv(C, C), heads=2, norm="layer_norm"), ()),
    "GIN with a norm": (lambda: pyg.GINConv(pyg.MLP([C, C, C], norm="layer_norm")), ()),
    "PDN": (lambda: pyg.PDNConv(C, C, 3, 4), ("edge_attr",)),
}
LAYERS = {**ALL_LAYERS, **OWN_LAYERS}
del LAYERS["SAGE several"]  # PyG's median fails on graphs whose last node is isolated
WITH_BATCH_NORM = {
    name for name, (make, _) in LAYERS.items() if any(isinstance(module, _BatchNorm) for module in make().modules())
}
WITHOUT_ATTRIBUTES = [name for name, (_, arguments) in LAYERS.items() if not arguments]

# Graphs ##############################################################################################################


def few_relations(seed: int) -> Data:
    """One relation leads to the first nodes only, and another to the last node only."""
    data = undirected_graph(36, 50, seed, torch.double)
    data.edge_type = torch.where(data.edge_index[1] < 6, 1, 0)
    data.edge_type[data.edge_index[1] == 35] = 2
    return data


def ring(seed: int) -> Data:
    nodes = torch.arange(16)
    return with_attributes(torch.stack([nodes, (nodes + 1) % 16]), 16, seed=seed, dtype=torch.double)


def star(seed: int) -> Data:
    """Every node points to the first one and back."""
    nodes = torch.arange(1, 30)
    edges = torch.stack([nodes, torch.zeros_like(nodes)])
    return with_attributes(torch.cat([edges, edges.flip(0)], dim=1), 30, seed=seed, dtype=torch.double)


def sparse_directed(seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return with_attributes(torch.randint(50, (2, 60), generator=generator), 50, seed=seed, dtype=torch.double)


GRAPHS: dict[str, Callable[[int], Data]] = {
    "undirected": lambda seed: undirected_graph(40, 60, seed, torch.double),
    "large": lambda seed: undirected_graph(150, 100, seed, torch.double),
    "dense": lambda seed: undirected_graph(24, 200, seed, torch.double),
    "odd": lambda seed: odd_graph(seed, torch.double),
    "sparse, directed": sparse_directed,
    "few relations": few_relations,
    "ring": ring,
    "star": star,
}

SYMMETRIC = {"undirected", "large", "dense", "few relations", "star"}


def _outlier(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1] *= 100
    return x


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "positive": lambda x: x.abs(),
    "probabilities": lambda x: x.softmax(-1),
    "codes": lambda x: (x.abs() * 4).floor().clamp(max=9),
    "large": lambda x: x * 50 + 100,
    "one large column": lambda x: torch.cat([x[:, :1] * 1e4, x[:, 1:]], dim=1),
    "outlier": _outlier,
}
# What a model does first to features of these kinds; elsewhere it would fail on the whole graph.
FIRST: dict[str, dict[str, Step]] = {
    "positive": {"log1p": lambda model, x: x.log1p(), "sqrt": lambda model, x: x.sqrt()},
    "probabilities": {"logit": lambda model, x: x.logit(), "log": lambda model, x: x.log()},
    "codes": {
        "embedded": lambda model, x: model.table(x.long()).mean(1),
        "one column embedded": lambda model, x: x + model.table(x[:, 0].long()),
    },
}

# Parts of a model ####################################################################################################

NORMS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "layer norm": lambda: nn.LayerNorm(C),
    "layer norm by node": lambda: pyg.LayerNorm(C, mode="node"),
    "batch norm": lambda: nn.BatchNorm1d(C),
    "batch norm of PyG": lambda: pyg.BatchNorm(C),
    "batch norm without running averages": lambda: nn.BatchNorm1d(C, track_running_stats=False),
    "layer norm over the graph": lambda: pyg.LayerNorm(C),
    "graph norm": lambda: pyg.GraphNorm(C),
    "pair norm": pyg.PairNorm,
    "instance norm": lambda: pyg.InstanceNorm(C),
    "instance norm with running averages": lambda: pyg.InstanceNorm(C, track_running_stats=True),
    "group norm": lambda: pyg.DiffGroupNorm(C, 2),
    "mean subtraction": pyg.MeanSubtractionNorm,
}
HARMLESS_NORMS = ["none", "layer norm", "layer norm by node", "batch norm", "batch norm of PyG"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "relu in place": lambda x: F.relu(x, inplace=True),
}
WIRINGS = [
    "plain",
    "residual",
    "dense",
    "last of all",
    "cat",
    "max",
    "lstm",
    "fused",
    "parallel",
    "shared",
    "to output",
]


def _masked(keep: Tensor, edge_index: Tensor, attributes: dict[str, Tensor]) -> Edges:
    return edge_index[:, keep], {name: value[keep] for name, value in attributes.items()}


# What a model does to its edges before the layers; the first group keeps the edge attributes.
EDGES: dict[str, Callable[[Tensor, dict[str, Tensor], int], Edges]] = {
    "as they are": lambda edges, attributes, count: (edges, attributes),
    "without a relation": lambda edges, attributes, count: _masked(attributes["edge_type"] != 1, edges, attributes),
    "without self-loops": lambda edges, attributes, count: _masked(edges[0] != edges[1], edges, attributes),
    "sorted": lambda edges, attributes, count: _masked(edges[1].argsort(stable=True), edges, attributes),
    "cloned": lambda edges, attributes, count: (edges.clone(), attributes),
}
BARE_EDGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "reversed": lambda edges, count: edges.flip(0),
    "undirected": lambda edges, count: to_undirected(edges, num_nodes=count),
    "coalesced": lambda edges, count: coalesce(edges, num_nodes=count),
    "remove_self_loops": lambda edges, count: remove_self_loops(edges)[0],
    "add_self_loops": lambda edges, count: add_self_loops(edges, num_nodes=count)[0],
    "two directions": lambda edges, count: torch.cat([edges, edges.flip(0)], dim=1),
}


def _first_mean(model: Any, x: Tensor) -> Any:
    if model.kept is None:
        model.kept = x.mean(0).detach()
    return x - model.kept


def _counted(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def _running(model: Any, x: Tensor) -> Any:
    if model.training:
        model.running.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x
    return x - model.running


def _own_batch_norm(model: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, model.running, model.spread, training=model.training)


# What a model does somewhere, besides: with each row alone, or with more than that.
ROWWISE: dict[str, Step] = {
    "nothing": lambda model, x: x,
    "scaled by an attribute": lambda model, x: x * model.scale,
    "unit rows": lambda model, x: F.normalize(x, dim=1),
    "clamped": lambda model, x: x.clamp(-1, 1),
    "counted": _counted,
    "detached": lambda model, x: x.detach() + x,
    "half in training": lambda model, x: x / 2 if model.training else x,
    "running mean": _running,
}
MIXING: dict[str, Step] = {
    "centred": lambda model, x: centred(x),
    "centred in training": lambda model, x: centred(x) if model.training else x,
    "centred in evaluation": lambda model, x: x if model.training else centred(x),
    "centred if flagged": lambda model, x: centred(x) if model.flag else x,
    "centred if configured": lambda model, x: centred(x) if model.config["center"] else x,
    "centred above 20 rows": lambda model, x: centred(x) if x.size(0) > 20 else x,
    "centred above 60 rows": lambda model, x: centred(x) if x.size(0) > 60 else x,
    "centred above 30": lambda model, x: centred(x) if bool(x.abs().max() > 30) else x,
    "centred below -0.5": lambda model, x: centred(x) if bool(x.min() < -0.5) else x,
    "mean of the first call": _first_mean,
    "tiny mean": lambda model, x: x + 1e-3 * x.mean(0),
    "mean in one column": lambda model, x: torch.cat([x[:, :1] - x[:, :1].mean(), x[:, 1:] * 1e3], dim=1),
    "gated mean": lambda model, x: x + model.gate * x.mean(0),
    "gated mean above 1": lambda model, x: x + model.gate * x.mean(0) if float(model.gate) > 1 else x,
    "softmax over rows": lambda model, x: x * x.softmax(0),
    "first row": lambda model, x: x - x[:1],
    "shifted": lambda model, x: x + x.roll(1, 0),
    "attention": lambda model, x: x + F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "functional batch norm": _own_batch_norm,
    "noise in training": lambda model, x: x + torch.randn_like(x) if model.training else x,
}
STEPS = {**ROWWISE, **MIXING}
PLACES = ["first", "between", "last"]

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda x: x,
    "log_softmax": lambda x: x.log_softmax(-1),
    "tuple": lambda x: (x, x.tanh()),
    "dictionary": lambda x: {"logits": x, "class": x.argmax(-1)},
}

# Changes between calls ###############################################################################################


def _replace_layer(which: int, model: Any) -> None:
    make, _ = LAYERS[model.names[which]]
    model.convs[which] = make().to(model.gate.dtype)


def _other_aggregation(model: Any) -> None:
    for conv in model.convs:
        if getattr(conv, "aggr", None) == "mean":
            conv.aggr, conv.aggr_module = "max", aggregation_resolver("max")


def _scale_weights(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.2)


def _set(model: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(model, name, value)


def _centre_output(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return centred(out)


def _double_output(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return out * 2


CHANGES: dict[str, Change] = {
    "weights scaled": _scale_weights,
    "flag set": partial(_set, flag=True),
    "configured": lambda model: model.config.update(center=True),
    "scale set": partial(_set, scale=0.3),
    "gate opened": lambda model: model.gate.data.fill_(1.5),
    "last layer replaced": partial(_replace_layer, -1),
    "first layer replaced": partial(_replace_layer, 0),
    "activation replaced": partial(_set, activation=torch.sin),
    "activation over all rows": partial(_set, activation=lambda x: x.softmax(0)),
    "norm replaced": partial(_set, norm=pyg.PairNorm()),
    "norm left out": partial(_set, norm=nn.Identity()),
    "hook on a layer": lambda model: model.convs[0].register_forward_hook(_double_output),
    "hook over all rows": lambda model: model.convs[0].register_forward_hook(_centre_output),
    "aggregation": _other_aggregation,
    "depth": partial(_set, depth=1),
    "wiring": partial(_set, wiring="residual"),
    "edges": partial(_set, edges="without self-loops"),
    "frozen": lambda model: model.requires_grad_(False),
    "deep copy of the norm": lambda model: setattr(model, "norm", copy.deepcopy(model.norm)),
    "single precision": lambda model: model.float(),
}
HARMLESS_CHANGES = {"weights scaled", "scale set", "frozen", "activation replaced"}
# The changes that wake up a step.
WAKES = {
    "centred if flagged": "flag set",
    "centred if configured": "configured",
    "scaled by an attribute": "scale set",
    "gated mean above 1": "gate opened",
}

# Recipes #############################################################################################################


@dataclass(frozen=True)
class Recipe:
    """What to make of a seed."""

    seed: int
    graph: str
    features: str
    first: str
    edges: str
    layers: tuple[str, ...]
    wiring: str
    norm: str
    activation: str
    dropout: float
    step: str
    place: str
    output: str
    changes: tuple[str, ...]
    num_parts: int
    partition: str
    batch_size: int
    bidirectional: bool
    unpacks: bool
    check: Check

    @staticmethod
    def draw(seed: int) -> Recipe:
        """Draw everything; most parts are harmless most of the time, so that the rest can be seen."""
        rng = random.Random(seed)

        def mostly(usual: Iterable[str], others: Iterable[str], share: float) -> str:
            return rng.choice(list(usual if rng.random() < share else others))

        features = rng.choice(list(FEATURES))
        edges = mostly(["as they are"], [*EDGES, *BARE_EDGES, "dropped in training"], 0.75)
        names = WITHOUT_ATTRIBUTES if edges in BARE_EDGES or edges == "dropped in training" else list(LAYERS)
        step = mostly(ROWWISE, MIXING, 0.6)
        changes = rng.sample(list(CHANGES), rng.choice([0, 0, 1, 1, 2]))
        if step in WAKES and rng.random() < 0.8:
            changes.append(WAKES[step])
        layers = tuple(rng.choice(names) for _ in range(rng.choice([2, 2, 3, 4])))
        norm = mostly(HARMLESS_NORMS, NORMS, 0.7)
        # Neither batch norms nor what is random in training can be compared with the whole graph there.
        trains = "batch norm" not in norm and not WITH_BATCH_NORM & {*layers}
        random_training = step == "noise in training" or edges == "dropped in training"
        checks: list[Check] = ["evaluation"]
        if not random_training:
            checks += ["one part", "training"] if trains else ["one part"]
        return Recipe(
            seed=seed,
            graph=rng.choice(list(GRAPHS)),
            features=features,
            first=rng.choice(["nothing", *FIRST.get(features, {})]),
            edges=edges,
            layers=layers,
            wiring=rng.choice(WIRINGS),
            norm=norm,
            activation=rng.choice(list(ACTIVATIONS)),
            dropout=rng.choice([0.0, 0.0, 0.5]),
            step=step,
            place=rng.choice(PLACES),
            output=mostly(["rows"], OUTPUTS, 0.6),
            changes=tuple(changes),
            num_parts=rng.choice([2, 3, 4, 6]),
            partition=rng.choice(["random", "random", "metis"]),
            batch_size=rng.choice([1, 1, 2]),
            bidirectional=rng.random() < 0.5,
            unpacks=rng.random() < 0.3,
            check=rng.choice(checks),
        )

    @property
    def is_harmless(self) -> bool:
        """Whether every part is known to be exact, so that a refusal would be needless."""
        one_way = self.bidirectional or self.graph in SYMMETRIC or not {*self.layers} & {*TWO_WAY_LAYERS}
        rowwise = self.step in ROWWISE and self.step != "running mean"  # which takes the mean of a batch
        harmless = rowwise and self.norm in HARMLESS_NORMS and self.edges == "as they are"
        exact = {*ALL_LAYERS} - {"SuperGAT"}  # it keeps a loss over its edges
        return harmless and one_way and {*self.layers} <= exact and {*self.changes} <= HARMLESS_CHANGES

    def data(self) -> Data:
        data = GRAPHS[self.graph](self.seed)
        data.x = FEATURES[self.features](data.x)
        return data

    def loader(self, data: Data) -> gas.HaloLoader:
        return gas.HaloLoader(
            data,
            self.num_parts,
            partition=self.partition,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            bidirectional=self.bidirectional,
        )

    def outcome(self) -> Outcome:
        """What becomes of the model."""
        single = "single precision" in self.changes
        return outcome(
            lambda: RandomModel(self),
            self.data(),
            self.loader,
            mode=self.check,
            call=None if self.unpacks else self.call,
            then=partial(self.call, like_model=True),
            changes=[CHANGES[name] for name in self.changes],
            seed=self.seed,
            tolerance=1e-3 if single else 1e-6,
        )

    @staticmethod
    def call(model: Any, batch: Data, *, like_model: bool = False) -> Any:
        """Call with everything that the data has, in the type of the model if that may have changed."""
        names = ("x", "edge_index", "edge_weight", "edge_attr", "edge_type")
        given = {name: batch[name] for name in names}
        dtype = next((weight.dtype for weight in model.parameters()), torch.double)
        if like_model and dtype != torch.double:
            given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}
        return model(**given)


class RandomModel(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        made = [LAYERS[name] for name in recipe.layers]
        self.convs = nn.ModuleList([make() for make, _ in made])
        self.names = recipe.layers
        self.arguments = [arguments for _, arguments in made]
        self.initial = [name in INITIAL_LAYERS for name in recipe.layers]
        self.norm = NORMS[recipe.norm]()
        self.activation = ACTIVATIONS[recipe.activation]
        self.first = FIRST.get(recipe.features, {}).get(recipe.first, STEPS["nothing"])
        self.step, self.output = STEPS[recipe.step], OUTPUTS[recipe.output]
        self.place, self.edges, self.wiring, self.dropout = recipe.place, recipe.edges, recipe.wiring, recipe.dropout
        self.depth = len(made)
        self.table, self.mix = nn.Embedding(10, C), nn.Linear(2 * C, C)
        self.jump = (
            pyg.JumpingKnowledge(recipe.wiring, C, self.depth) if recipe.wiring in ("cat", "max", "lstm") else None
        )
        self.narrow = nn.Parameter(torch.randn(C, self.depth * C) / C)
        self.score, self.gate = nn.Linear(C, 1), nn.Parameter(torch.zeros(()))
        # What steps keep or look at.
        self.flag, self.scale, self.calls = False, 1.5, 0
        self.config = {"center": False}
        self.kept: Tensor | None = None
        self.register_buffer("running", torch.zeros(C))
        self.register_buffer("spread", torch.ones(C))
        spread_norms(self)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor, edge_type: Tensor) -> Any:
        attributes = {"edge_weight": edge_weight, "edge_attr": edge_attr, "edge_type": edge_type}
        edge_index, attributes = self._edges(edge_index, attributes, x.size(0))
        x = self._at("first", self.first(self, x))
        start, rows = x, []
        for number in range(self.depth):
            if number:
                x = F.dropout(self.activation(self.norm(x)), self.dropout, self.training)
                x = self._at("between", x) if number == 1 else x
            x = self._wired(number, x, start, edge_index, attributes)
            rows.append(x)
        return self.output(self._at("last", self._joined(rows, start)))

    def _at(self, place: str, x: Tensor) -> Tensor:
        return self.step(self, x) if place == self.place else x

    def _edges(self, edge_index: Tensor, attributes: dict[str, Tensor], count: int) -> Edges:
        if self.edges == "dropped in training":
            return dropout_edge(edge_index, 0.3, training=self.training)[0], {}
        if self.edges in BARE_EDGES:
            return BARE_EDGES[self.edges](edge_index, count), {}
        return EDGES[self.edges](edge_index, attributes, count)

    def _layer(
        self, number: int, x: Tensor, start: Tensor, edge_index: Tensor, attributes: dict[str, Tensor]
    ) -> Tensor:
        given = {name: attributes[name] for name in self.arguments[number]}
        rows = (x, start) if self.initial[number] else (x,)
        out: Tensor = self.convs[number](*rows, edge_index, **given)
        return out

    def _wired(
        self, number: int, x: Tensor, start: Tensor, edge_index: Tensor, attributes: dict[str, Tensor]
    ) -> Tensor:
        used = 0 if self.wiring == "shared" else number
        out = self._layer(used, x, start, edge_index, attributes)
        if self.wiring == "residual":
            return x + out
        if self.wiring == "dense":
            mixed: Tensor = self.mix(torch.cat([x, out], dim=-1))
            return mixed
        if self.wiring == "parallel" and number + 1 < len(self.convs):
            return out + self._layer(number + 1, x, start, edge_index, attributes)
        return out

    def _joined(self, rows: list[Tensor], start: Tensor) -> Tensor:
        if self.wiring == "fused":
            shares = torch.stack([self.score(torch.tanh(row)) for row in rows]).softmax(0)
            return (shares * torch.stack(rows)).sum(0)
        if self.wiring == "to output":
            return rows[-1] + start
        if self.wiring == "last of all":
            return torch.stack(rows).mean(0)
        if self.jump is None:
            return rows[-1]
        joined: Tensor = self.jump(rows)
        return F.linear(joined, self.narrow) if self.jump.mode == "cat" else joined
