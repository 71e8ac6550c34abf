"""The experiment on heterogeneous graphs: its graphs, its model of entities, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import RGCNConv  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data import TypedDataset
from gnnautoscale.experiments.reproduce.relational import EntityConv, EntityRGCN
from gnnautoscale.experiments.reproduce.typed_graphs import entities, load_typed, words
from gnnautoscale.experiments.reproduce.work import perform


def triples(seed: int = 0) -> dict[str, Any]:
    """20 nodes, 3 relations, 60 triples; the classes of 12 nodes are known."""
    random = np.random.default_rng(seed)
    columns = [random.integers(0, high, 60) for high in (20, 3, 20)]
    known = np.stack([np.arange(12), np.arange(12) % 2], axis=1)
    return {"triples": np.stack(columns, 1), "train": known[:8], "test": known[8:], "num_nodes": 20, "num_relations": 3}


def vocabulary() -> dict[str, Any]:
    """Five nouns, two verbs and an adverb."""
    return {
        "pos": np.array([0, 1, 0, 0, 3, 0, 1, 0], dtype=np.uint8),
        "y": np.array([7, 1, 9, 7, 2, 9, 1, 7], dtype=np.int8),
        "split": np.array([0, 0, 1, 2, 0, 0, 1, 0], dtype=np.uint8),
        "edge_index": np.array([[0, 2, 1, 6, 5], [2, 3, 0, 1, 4]]),
        "edge_type": np.array([0, 0, 0, 4, 4], dtype=np.uint8),
        "x_indptr": np.arange(9),
        "x_indices": np.array([0, 1, 2, 0, 1, 2, 0, 1]),
        "x_shape": np.array([8, 3]),
    }


def test_entities_have_relations_both_ways_and_some_classes() -> None:
    data = entities(triples())
    assert data.edge_index.shape == (2, 120)
    assert torch.equal(data.edge_index[:, 60:], data.edge_index[:, :60].flip(0))
    assert torch.equal(data.edge_type[60:], data.edge_type[:60] + 3)
    assert data.y.tolist() == [0, 1] * 6 + [-1] * 8
    assert [int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [8, 4, 4]


def test_words_are_sorted_by_speech() -> None:
    graph = words(vocabulary(), undirected=True, max_features=2)
    assert {kind: store.num_nodes for kind, store in graph.node_items()} == {
        "noun": 5,
        "verb": 2,
        "adjective": 0,
        "adverb": 1,
    }
    assert graph["noun"].y.tolist() == [0, 1, 0, 1, 0]
    assert graph["noun"].val_mask.tolist() == [False, True, False, False, False]
    assert graph["noun"].x.size(1) == 2
    assert graph["noun", "r0", "noun"].edge_index.tolist() == [[0, 1], [1, 2]]
    assert graph["verb", "r0", "noun"].edge_index.tolist() == [[0], [0]]
    assert graph["verb", "r4", "verb"].edge_index.tolist() == [[1], [0]]
    assert graph["adverb", "rev_r4", "noun"].edge_index.tolist() == [[0], [3]]
    assert len(graph.edge_types) == 8


def test_the_layer_of_entities_is_r_gcn_on_one_hot_rows() -> None:
    torch.manual_seed(0)
    data, layer = entities(triples(1)), EntityConv(20, 6, 4)
    plain = RGCNConv(20, 4, 6)
    with torch.no_grad():
        plain.weight.copy_(layer.rows.weight.view(6, 20, 4))
        plain.root.copy_(layer.own.weight)
        plain.bias.copy_(layer.bias)
    found = layer(torch.arange(20), data.edge_index, data.edge_type)
    assert torch.allclose(found, plain(torch.eye(20), data.edge_index, data.edge_type), atol=1e-6)


def test_histories_keep_the_model_of_entities_exact() -> None:
    torch.manual_seed(0)
    data = entities(triples(2))
    model: nn.Module = EntityRGCN.of(data, 2, hidden=8)
    wanted = model(torch.arange(20), data.edge_index, data.edge_type)
    gas.autoscale(model, data)
    assert torch.allclose(gas.infer(model, gas.HaloLoader(data, num_parts=4)), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "file", "mode"),
    [
        *(("rgcn", "aifb", mode) for mode in ("full", "gas", "sage")),
        *(("rgcn", "wordnet3", mode) for mode in ("full", "sage")),
        *(("hgt", "wordnet3", mode) for mode in ("gas", "sage")),
    ],
)
def test_all_of_them_are_trained(model: str, file: str, mode: str, tmp_path: Path) -> None:
    arrays = triples() if file == "aifb" else vocabulary()
    np.savez(tmp_path / f"{file}.npz", **arrays)
    typed = isinstance(load_typed(tmp_path, f"Some/raw/{file}.npz"), TypedDataset)
    assert typed == (file == "wordnet3")
    train: dict[str, Any] = {"mode": mode, "epochs": 2} | ({} if mode == "full" else {"num_parts": 3, "batch_size": 2})
    work = {
        "kind": "train",
        "dataset": file,
        "data": {"typed": f"Some/raw/{file}.npz", **({"undirected": True} if typed else {})},
        "model": model,
        "options": {"hidden": 8},
        "train": {**train, **({"fan_out": [2, 2]} if mode == "sage" else {})},
        "seed": 0,
    }
    found = perform(work, root=str(tmp_path), device="cpu")
    assert found["steps"] >= 2
    assert found["metric"] == "accuracy"
