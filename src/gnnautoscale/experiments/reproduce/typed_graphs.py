"""The graphs of the experiment on heterogeneous graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset, TypedDataset, files, open_file

_Arrays = dict[str, NDArray[Any]]
# The parts of speech of WordNet, by their number.
_SPEECH = ("noun", "verb", "adjective", "adverb")


def load_typed(root: Path, file: str, **options: Any) -> Dataset:
    """A graph by the name of its file, below a folder or directly in it; options as in ``open_file``."""
    path = root / file
    path = path if path.exists() or not (root / path.name).exists() else root / path.name
    if path.stem == "wordnet3":
        return TypedDataset.of_types(words(_arrays(path), **options), "noun", path.stem)
    if path.stem == "aifb":
        return Dataset.of(entities(_arrays(path)), path.stem)
    return open_file(path, **options)


def entities(arrays: _Arrays) -> Data:
    """A knowledge graph of ``triples`` whose nodes in ``train`` and ``test`` have classes.

    Each relation has a reverse, whose number follows those of all relations. Features say nothing.
    """
    source, relation, target = torch.from_numpy(arrays["triples"].astype(np.int64)).t()
    count, relations = int(arrays["num_nodes"]), int(arrays["num_relations"])
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    y = torch.full((count,), -1)
    masks = {split: torch.zeros(count, dtype=torch.bool) for split in ("train", "test")}
    for split, mask in masks.items():
        nodes, classes = torch.from_numpy(arrays[split].astype(np.int64)).t()
        y[nodes], mask[nodes] = classes, True
    named = {"train_mask": masks["train"], "val_mask": masks["test"], "test_mask": masks["test"]}
    edge_type = torch.cat([relation, relation + relations])
    return Data(x=torch.ones(count, 1), edge_index=edge_index, edge_type=edge_type, y=y, **named)


def words(arrays: _Arrays, *, undirected: bool = False, max_features: int | None = None) -> HeteroData:
    """WordNet with its parts of speech as types of nodes, whose relations between any two of them are types of edges.

    Nouns have classes, numbered anew.
    """
    parts = {name: arrays[name] for name in files.SPARSE}
    x, pos = torch.from_numpy(files.dense(parts, max_features)), torch.from_numpy(arrays["pos"].astype(np.int64))
    place, graph = torch.empty_like(pos), HeteroData()
    for number, kind in enumerate(_SPEECH):
        nodes = (pos == number).nonzero().squeeze(1)
        place[nodes] = torch.arange(nodes.numel())
        graph[kind].x = x[nodes]
    nouns = pos == 0
    graph["noun"].y = torch.from_numpy(arrays["y"].astype(np.int64))[nouns].unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    split = torch.from_numpy(arrays["split"].astype(np.int64))[nouns]
    for number, name in enumerate(files.MASKS):
        graph["noun"][name] = split == number
    edges = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    relation = torch.from_numpy(arrays["edge_type"].astype(np.int64))
    key = (relation * len(_SPEECH) + pos[edges[0]]) * len(_SPEECH) + pos[edges[1]]
    found: Tensor = torch.unique(key)
    for each in found.tolist():
        chosen = place[edges[:, key == each]]
        rest, target = divmod(each, len(_SPEECH))
        number, source = divmod(rest, len(_SPEECH))
        ends = _SPEECH[source], _SPEECH[target]
        graph[ends[0], f"r{number}", ends[1]].edge_index = chosen
        if undirected:
            graph[ends[1], f"rev_r{number}", ends[0]].edge_index = chosen.flip(0)
    return graph


def _arrays(path: Path) -> _Arrays:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
