"""The command on heterogeneous graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnautoscale.data import read_typed_graph
from gnnautoscale.errors import InputError
from support.command import invoke

FAST = ["--epochs", "2", "--num-parts", "4", "--batch-size", "2", "--run-dir", "none", "--quiet"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Authors without features, papers of two classes, and who writes what, in one direction."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    y = np.arange(40) % 2
    edges = np.stack([random.integers(0, 10, 90) * 2, random.integers(0, 20, 90) * 2])
    edges[:, 45:] += 1
    x = random.normal(size=(40, 3)) + y[:, None]
    split = np.where(y < 0, 3, np.arange(40) // 2 % 4)
    arrays: dict[str, Any] = {"x_paper": x, "y_paper": y, "split_paper": split, "edges_author__writes__paper": edges}
    np.savez(tmp_path / "papers.npz", node_types=["author", "paper"], num_nodes=[20, 40], **arrays)
    return tmp_path / "papers.npz"


def call(*arguments: Any) -> Any:
    result = invoke([str(each) for each in arguments])
    if result.exception is not None:
        raise result.exception
    return result


@pytest.mark.parametrize("model", ["hetero-sage", "hgt", "han", "rgcn"])
def test_a_model_is_trained_and_run(model: str, file: Path) -> None:
    """Types may be empty, isolated or without columns."""
    with np.load(file) as archive:
        arrays = dict(archive)
    arrays |= {"node_types": ["author", "paper", "old & odd", "none"], "num_nodes": [20, 40, 3, 0]}
    arrays |= {"x_author": np.zeros((20, 0)), "edges_none__of__paper": np.zeros((2, 0), dtype=int)}
    np.savez("odd.npz", **arrays)
    chosen = ["--model", model, "--hidden", 8, "--layers", 2, "--dropout", 0.1]
    data = ["--data", "odd.npz"]
    made = json.loads(call("train", *data, *chosen, *FAST, "--save", "model.pt", "--json").stdout)
    (run,) = made["runs"]
    found = json.loads(call("infer", "model.pt", *data, "--num-parts", 3, "--output", "out.npz", "--json").stdout)
    for split in ("train", "val", "test"):
        assert found[f"accuracy {split}"] == pytest.approx(run["scores"][split])
    with np.load("out.npz") as predictions:
        assert predictions["logits"].shape == (40, 2)


def test_a_folder_and_a_saved_graph_are_taken(file: Path) -> None:
    torch.save(read_typed_graph(file), "papers.pt")
    folder = Path("tables")
    folder.mkdir()
    graph = read_typed_graph(file)
    (folder / "nodes_author.csv").write_text("id\n" + "".join(f"a{i}\n" for i in range(20)))
    rows = zip(graph["paper"].x.tolist(), graph["paper"].y.tolist(), strict=True)
    text = "".join(f"{i},{a},{b},{c},{y}\n" for i, ((a, b, c), y) in enumerate(rows))
    (folder / "nodes_paper.csv").write_text("id,a,b,c,y\n" + text)
    edges = graph["author", "writes", "paper"].edge_index.t().tolist()
    (folder / "edges_author__writes__paper.csv").write_text(
        "source,target\n" + "".join(f"a{s},{t}\n" for s, t in edges)
    )
    facts = [json.loads(call("data", "--data", path, "--json").stdout) for path in (file, "papers.pt", "tables")]
    assert facts[0] == facts[1]
    drawn = {f"{split} nodes in split": count for split, count in (("train", 24), ("val", 8), ("test", 8))}
    assert facts[2] == {**facts[0], **drawn}
    assert (facts[0]["author nodes"], facts[0]["author features"], facts[0]["author writes paper"]) == (20, 0, 90)
    call("train", "--data", "tables", "--undirected", "--model", "hetero-sage", *FAST)


def test_what_does_not_fit_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"models of a heterogeneous graph are .*but got 'gcn'"):
        call("train", "--data", file, *FAST)
    with pytest.raises(InputError, match=r"models of a plain graph are .*but got 'hgt'"):
        call("train", "--data", "communities", "--nodes", 400, "--model", "hgt", *FAST)
    with pytest.raises(InputError, match="one of the types of nodes"):
        call("train", "--data", file, "--model", "hgt", "--target", "book", *FAST)
    with np.load(file) as archive:
        np.savez("unknown.npz", **{**archive, "y_paper": np.full(40, -1)})
    with pytest.raises(InputError, match="train_mask must hold at least one node whose target is known"):
        call("train", "--data", "unknown.npz", "--model", "hgt", *FAST)
    call("train", "--data", file, "--undirected", "--model", "rgcn", *FAST, "--save", "model.pt")
    assert "note: as in training: --undirected" in call("infer", "model.pt", "--data", file).stderr
    with pytest.raises(InputError, match=r"model\.pt was trained with --undirected, but got --no-undirected"):
        call("infer", "model.pt", "--data", file, "--no-undirected")


@pytest.mark.parametrize("target", ["author,writes,paper", "writes", None])
def test_links_are_trained_scored_and_found(target: str | None, file: Path) -> None:
    links = ["--task", "link", "--data", file, "--undirected", "--width", 8]
    links += [] if target is None else ["--target", target]
    model = ["--model", "hetero-sage", "--hidden", 8, "--layers", 2]
    made = json.loads(call("train", *links, *model, *FAST, "--save", "model.pt", "--json").stdout)
    (run,) = made["runs"]
    Path("pairs.csv").write_text("source,target\n3,39\n19,0\n")
    asked = ["--pairs", "pairs.csv", "--partners-of", "3,19", "--top", 4, "--output", "out.npz"]
    found = json.loads(call("infer", "model.pt", *links, *asked, "--json").stdout)
    assert found["ROC-AUC test"] == pytest.approx(run["scores"]["test"], rel=1e-4)
    with np.load("out.npz") as saved:
        out = dict(saved)
    authors, papers = out["embeddings_author"], out["embeddings_paper"]
    assert (authors.shape, papers.shape) == ((20, 8), (40, 8))
    assert out["pair_scores"] == pytest.approx([authors[3] @ papers[39], authors[19] @ papers[0]], rel=1e-4)
    known = read_typed_graph(file)["author", "writes", "paper"].edge_index
    for node, partners, scores in zip((3, 19), out["partners"], out["partner_scores"], strict=True):
        every = papers @ authors[node]
        every[known[1, known[0] == node]] = -np.inf
        assert scores == pytest.approx(np.sort(every)[::-1][:4], rel=1e-4)
        assert every[partners] == pytest.approx(scores, rel=1e-4)


def test_links_that_cannot_be_are_refused(file: Path) -> None:
    links = ["--task", "link", "--data", file, "--model", "hetero-sage", "--width", 8]
    refused = {
        "author,paper": "source, relation and target",
        "author,reads,paper": r"Name one of author,writes,paper",
        "reads": r"Name one of author,writes,paper",
    }
    for target, message in refused.items():
        with pytest.raises(InputError, match=message):
            call("train", *links, "--target", target, *FAST)
    with pytest.raises(InputError, match="distmult for typed ones"):
        call("train", *links, "--decoder", "distmult", *FAST)
    call("train", *links, *FAST, "--save", "model.pt")
    with pytest.raises(InputError, match="--partners-of must be nodes from 0 to 19"):
        call("infer", "model.pt", *links[:4], "--width", 8, "--partners-of", "20", "--output", "out.npz")
    Path("pairs.csv").write_text("source,target\n3,40\n")
    with pytest.raises(InputError, match="target must be nodes from 0 to 39"):
        call("infer", "model.pt", *links[:4], "--width", 8, "--pairs", "pairs.csv", "--output", "out.npz")


def test_settings_are_proposed_for_nodes_and_links(file: Path) -> None:
    tuned = ["--data", file, "--undirected", "--model", "hetero-sage", "--hidden", 8, "--device", "cpu", "--json"]
    found = json.loads(call("tune", *tuned).stdout)
    assert "--undirected --model hetero-sage" in found["command"]
    found = json.loads(call("tune", *tuned, "--task", "link", "--target", "author,writes,paper").stdout)
    assert "--task link" in found["command"]
    assert "--target author,writes,paper" in found["command"]


def test_a_graph_without_targets_is_shown_and_cut(file: Path) -> None:
    with np.load(file) as archive:
        kept = set(archive.files) - {"y_paper", "split_paper"}
        np.savez("bare.npz", **{name: archive[name] for name in kept})
    facts = json.loads(call("data", "--data", "bare.npz", "--json").stdout)
    assert facts["author writes paper"] == 90
    cut = json.loads(call("partition", "--data", "bare.npz", "--num-parts", 3, "--json").stdout)
    assert (cut["nodes"], cut["parts"]) == (60, 3)
    with pytest.raises(InputError, match=r"no y at all. .*--task link"):
        call("train", "--data", "bare.npz", "--model", "hgt", *FAST)
