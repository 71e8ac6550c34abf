"""Edges held back from a graph, to be predicted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]
from torch_geometric.transforms import RandomLinkSplit  # type: ignore[import-untyped]

from gnnautoscale._util import undisturbed
from gnnautoscale.data.files import EDGE_LEVEL
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph

# The share of edges for validation and for tests.
_VAL, _TEST = 0.05, 0.1


def split_edges(data: Data, seed: int, *, disjoint: float, typed: bool) -> list[Data]:
    """Split the edges of a graph; returns one for each split. See :meth:`gnnautoscale.data.Dataset.split_links`."""
    kept = ["x", "edge_index", *EDGE_LEVEL, "edge_split"]
    data = Data(**{name: data[name] for name in kept if name in data and (typed or name != "edge_type")})
    if typed and "edge_type" not in data:
        fix = "Set edge_type, or leave the decoder out."
        raise InputError("relations are predicted where edges have types", got="edges without edge_type", fix=fix)
    if "edge_split" in data or typed:
        return _by_number(data, seed, disjoint, typed)
    return draw_split(data, seed, disjoint, is_undirected=Graph.of(data).is_symmetric)


def draw_split(data: Data | HeteroData, seed: int, disjoint: float, **how: Any) -> list[Any]:
    """The graphs of all splits as PyG draws them; ``how`` are further options of its ``RandomLinkSplit``."""
    split = RandomLinkSplit(
        num_val=_VAL, num_test=_TEST, disjoint_train_ratio=disjoint, add_negative_train_samples=False, **how
    )
    with undisturbed(torch.device("cpu")):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - PyG draws from it
        try:
            return list(split(data))
        except ValueError as error:
            fix = "Use a larger graph."
            raise InputError("links to predict need edges to hold back", got=str(error), fix=fix) from error


def _by_number(data: Data, seed: int, disjoint: float, typed: bool) -> list[Data]:
    """The graphs of all splits, by ``edge_split``: messages take the edges that are known by then."""
    (source, target), num_nodes = data.edge_index, data.num_nodes
    first, second = _numbers_of_pairs(data.edge_index, num_nodes, seed)
    held_back = torch.where(first < _VAL, 1, torch.where(first < _VAL + _TEST, 2, 0))
    split: Tensor = data.get("edge_split", held_back)
    if split.shape != source.shape:
        fix = "Give each edge one number."
        raise InputError(f"edge_split must be [{source.numel()}]", got=str(list(split.shape)), fix=fix)
    only_passing, trained = (split < 0) | (split > 2), split == 0
    passing = only_passing
    if not disjoint:
        passing = only_passing | trained
    elif not bool(only_passing.any()):  # nobody says which edges pass messages in training
        passing = trained & (second >= disjoint)
        trained = trained & ~passing
    before_val = only_passing | (split == 0)
    known = [passing, before_val, before_val | (split == 1)]
    asked = [trained, split == 1, split == 2]
    if typed:
        return [_typed_graph(data, *each, split) for each in zip(known, asked, strict=True)]
    if Graph.of(Data(edge_index=data.edge_index, num_nodes=num_nodes)).is_symmetric:
        asked = [each & (source <= target) for each in asked]  # one of both ways
    return [_graph(data, *each) for each in zip(known, asked, strict=True)]


def _graph(data: Data, known: Tensor, asked: Tensor) -> Data:
    """The graph of some edges, with others to predict."""
    kept = {name: data[name][known] for name in EDGE_LEVEL if name in data}
    pairs = {"edge_label_index": data.edge_index[:, asked], "edge_label": torch.ones(int(asked.sum()))}
    return Data(x=data.x, edge_index=data.edge_index[:, known], **kept, **pairs)


def _typed_graph(data: Data, known: Tensor, asked: Tensor, split: Tensor) -> Data:
    """The graph of some edges and, as relations of their own, of their reverses, with other edges to predict."""
    count, last = int(data.edge_type.max()) + 1, int(data.edge_type[(split >= 0) & (split <= 2)].max()) + 1
    if last < count:
        raise InputError(
            "relations that only pass messages have smaller numbers than those to predict, whose reverses come next",
            got=f"relation {count - 1}, but no edge of it to predict",
            fix="Number the relations anew.",
        )
    graph = _graph(data, known, asked)
    graph.edge_index = torch.cat([graph.edge_index, graph.edge_index.flip(0)], dim=1)
    for name in EDGE_LEVEL:
        if name in graph:
            graph[name] = torch.cat([graph[name], graph[name] + count if name == "edge_type" else graph[name]])
    graph.edge_label_type = data.edge_type[asked]
    graph.num_relations = 2 * count  # some may be missing from the graph of a split
    return graph


def _numbers_of_pairs(edge_index: Tensor, num_nodes: int, seed: int) -> Tensor:
    """Two numbers from 0 to 1 for each edge, ``[2, num_edges]``; edges between the same nodes have the same ones."""
    low, high = edge_index.sort(dim=0).values
    pairs, place = torch.unique(low * num_nodes + high, return_inverse=True)
    drawn: Tensor = torch.rand(2, pairs.numel(), generator=torch.Generator().manual_seed(seed))[:, place]
    return drawn
