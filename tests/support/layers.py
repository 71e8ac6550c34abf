"""The layers that are exact, each with the edge attributes it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from conftest import (
    CHANNELS,
    EDGE_CHANNELS,
    NUM_RELATIONS,
    Stack,
    spread_norms,
)

C = CHANNELS


DEGREES = torch.tensor([2, 6, 12, 20, 10, 5, 3, 1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, 2 * C), nn.BatchNorm1d(2 * C), nn.ReLU(), nn.Linear(2 * C, C))


def pna(edge_dim: int | None = None, scalers: tuple[str, ...] = ("identity", "amplification", "attenuation")) -> Any:
    aggregators = ["mean", "min", "max", "std"]
    return pyg.PNAConv(C, C, aggregators, list(scalers), DEGREES, edge_dim=edge_dim, towers=2, post_layers=1)


# Name -> how to make one layer, and the edge-level arguments it takes.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "GCN": (lambda: pyg.GCNConv(C, C), ()),
    "GCN weighted": (lambda: pyg.GCNConv(C, C), ("edge_weight",)),
    "GCN improved": (lambda: pyg.GCNConv(C, C, improved=True), ("edge_weight",)),
    "GCN no self-loops": (lambda: pyg.GCNConv(C, C, add_self_loops=False), ()),
    "GCN no self-loops weighted": (lambda: pyg.GCNConv(C, C, add_self_loops=False), ("edge_weight",)),
    "GCN not normalized": (lambda: pyg.GCNConv(C, C, normalize=False), ("edge_weight",)),
    "SAGE mean": (lambda: pyg.SAGEConv(C, C), ()),
    "SAGE max": (lambda: pyg.SAGEConv(C, C, aggr="max"), ()),
    "SAGE several": (lambda: pyg.SAGEConv(C, C, aggr=["mean", "std", "median"], normalize=True, project=True), ()),
    "SAGE softmax": (lambda: pyg.SAGEConv(C, C, aggr="softmax"), ()),
    "GAT": (lambda: pyg.GATConv(C, C // 2, heads=2), ()),
    "GAT edge_attr": (lambda: pyg.GATConv(C, C, heads=2, concat=False, edge_dim=EDGE_CHANNELS), ("edge_attr",)),
    "GAT no self-loops": (lambda: pyg.GATConv(C, C, add_self_loops=False, residual=True), ()),
    "GATv2": (lambda: pyg.GATv2Conv(C, C // 2, heads=2), ()),
    "GATv2 edge_attr": (lambda: pyg.GATv2Conv(C, C, edge_dim=EDGE_CHANNELS), ("edge_attr",)),
    "GATv2 edge_attr no self-loops": (
        lambda: pyg.GATv2Conv(C, C, edge_dim=EDGE_CHANNELS, add_self_loops=False, share_weights=True),
        ("edge_attr",),
    ),
    "GIN": (lambda: pyg.GINConv(mlp(), train_eps=True), ()),
    "GINE": (lambda: pyg.GINEConv(mlp(), edge_dim=EDGE_CHANNELS), ("edge_attr",)),
    "PNA": (pna, ()),
    "PNA edge_attr": (lambda: pna(EDGE_CHANNELS, ("identity", "linear", "inverse_linear")), ("edge_attr",)),
    "APPNP": (lambda: pyg.APPNP(K=3, alpha=0.1), ()),
    "APPNP weighted": (lambda: pyg.APPNP(K=3, alpha=0.1), ("edge_weight",)),
    "SG": (lambda: pyg.SGConv(C, C, K=3), ()),
    "SG weighted": (lambda: pyg.SGConv(C, C, K=2), ("edge_weight",)),
    "SSG": (lambda: pyg.SSGConv(C, C, alpha=0.1, K=3), ()),
    "TAG": (lambda: pyg.TAGConv(C, C, K=2), ()),
    "TAG weighted": (lambda: pyg.TAGConv(C, C, K=2), ("edge_weight",)),
    "Graph": (lambda: pyg.GraphConv(C, C), ()),
    "Graph weighted": (lambda: pyg.GraphConv(C, C, aggr="mean"), ("edge_weight",)),
    "Transformer": (lambda: pyg.TransformerConv(C, C // 2, heads=2, beta=True), ()),
    "Transformer edge_attr": (lambda: pyg.TransformerConv(C, C, edge_dim=EDGE_CHANNELS), ("edge_attr",)),
    "Cheb": (lambda: pyg.ChebConv(C, C, K=3), ()),
    "Cheb weighted": (lambda: pyg.ChebConv(C, C, K=2), ("edge_weight",)),
    "ARMA": (lambda: pyg.ARMAConv(C, C, num_stacks=2, num_layers=2), ()),
    "ClusterGCN": (lambda: pyg.ClusterGCNConv(C, C, diag_lambda=0.1), ()),
    "LE": (lambda: pyg.LEConv(C, C), ("edge_weight",)),
    "MF": (lambda: pyg.MFConv(C, C, max_degree=6), ()),
    "GEN": (lambda: pyg.GENConv(C, C, learn_t=True), ()),
    "GEN edge_attr": (lambda: pyg.GENConv(C, C, edge_dim=EDGE_CHANNELS, msg_norm=True), ("edge_attr",)),
    "RGCN": (lambda: pyg.RGCNConv(C, C, NUM_RELATIONS), ("edge_type",)),
    "RGCN bases": (lambda: pyg.RGCNConv(C, C, NUM_RELATIONS, num_bases=2), ("edge_type",)),
    "FastRGCN": (lambda: pyg.FastRGCNConv(C, C, NUM_RELATIONS), ("edge_type",)),
    "ResGated": (lambda: pyg.ResGatedGraphConv(C, C), ()),
    "ResGated edge_attr": (lambda: pyg.ResGatedGraphConv(C, C, edge_dim=EDGE_CHANNELS), ("edge_attr",)),
    "EG": (lambda: pyg.EGConv(C, C, aggregators=["symnorm", "mean"], num_heads=2, num_bases=2), ()),
    "FiLM": (lambda: pyg.FiLMConv(C, C), ()),
    "FiLM relations": (lambda: pyg.FiLMConv(C, C, NUM_RELATIONS), ("edge_type",)),
    "LG": (lambda: pyg.LGConv(), ("edge_weight",)),
    "Simple": (lambda: pyg.SimpleConv(aggr="mean", combine_root="sum"), ("edge_weight",)),
    "MixHop": (lambda: pyg.MixHopConv(C, C // 2, powers=[0, 2]), ()),
    "GatedGraph": (lambda: pyg.GatedGraphConv(C, num_layers=2), ("edge_weight",)),
    "CG": (lambda: pyg.CGConv(C, dim=EDGE_CHANNELS, batch_norm=True), ("edge_attr",)),
    "NN": (lambda: pyg.NNConv(C, C, nn.Linear(EDGE_CHANNELS, C * C), aggr="mean"), ("edge_attr",)),
    "Edge": (lambda: pyg.EdgeConv(nn.Linear(2 * C, C)), ()),
    "AGNN": (lambda: pyg.AGNNConv(), ()),
    "FeaSt": (lambda: pyg.FeaStConv(C, C, heads=2), ()),
    "SuperGAT": (lambda: pyg.SuperGATConv(C, C), ()),
    "AntiSymmetric": (lambda: pyg.AntiSymmetricConv(C, num_iters=2), ()),
    "General": (lambda: pyg.GeneralConv(C, C, in_edge_channels=EDGE_CHANNELS, attention=True), ("edge_attr",)),
}


# Layers that also take the features the model started from.
INITIAL_LAYERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "GCN2": (lambda: pyg.GCN2Conv(C, alpha=0.1, theta=0.5, layer=1), ()),
    "GCN2 weighted": (lambda: pyg.GCN2Conv(C, alpha=0.1, shared_weights=False), ("edge_weight",)),
    "FA": (lambda: pyg.FAConv(C, eps=0.2), ()),
}


# Layers that pass messages both ways: exact on undirected graphs, and on others with a halo on both sides.
TWO_WAY_LAYERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "DirGNN GCN": (lambda: pyg.DirGNNConv(pyg.GCNConv(C, C)), ()),
    "DirGNN SAGE": (lambda: pyg.DirGNNConv(pyg.SAGEConv(C, C), alpha=0.3, root_weight=False), ()),
    "SAGE target_to_source": (lambda: pyg.SAGEConv(C, C, flow="target_to_source"), ()),
    "GCN target_to_source": (lambda: pyg.GCNConv(C, C, flow="target_to_source"), ("edge_weight",)),
}


ALL_LAYERS = {**LAYERS, **INITIAL_LAYERS, **TWO_WAY_LAYERS}


def three_layers(name: str) -> Stack:
    make, arguments = ALL_LAYERS[name]
    model = Stack([make() for _ in range(3)], arguments, initial=name in INITIAL_LAYERS)
    spread_norms(model)
    return model


def alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of up to four layers that may be in one stack, as they take the same arguments and the same halo."""
    kinds: dict[Any, list[str]] = {}
    for name in names:
        kinds.setdefault((ALL_LAYERS[name][1], name in INITIAL_LAYERS, name in TWO_WAY_LAYERS), []).append(name)
    return [group[at : at + 4] for group in kinds.values() for at in range(0, len(group), 4)]


def stacked(group: list[str]) -> Stack:
    """Layers of different kinds, at least three; the first comes again, so that each is given rows of others."""
    names = [*group, *group[:1], *group[:1]][: max(3, len(group) + 1)]
    model = Stack(
        [ALL_LAYERS[name][0]() for name in names], ALL_LAYERS[group[0]][1], initial=group[0] in INITIAL_LAYERS
    )
    spread_norms(model)
    return model
