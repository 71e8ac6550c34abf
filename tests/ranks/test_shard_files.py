"""Shards in files are those in memory, and what is not whole is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import assert_same, odd_graph, undirected_graph
from gnnautoscale import ranks
from gnnautoscale._util.pinned import _is_in_file
from gnnautoscale.ranks.assignment import assign
from gnnautoscale.ranks.files import read_shard
from gnnautoscale.ranks.shard import Layout, cut_shard
from support.ranks import outcomes, run_ranks


def model() -> nn.Module:
    torch.manual_seed(3)
    made: nn.Module = GCN(8, 6, num_layers=3, out_channels=4)
    return made


def infer(folder: Path) -> Tensor | None:
    loader = ranks.RankLoader(folder, batch_size=2)
    found: Tensor | None = loader.gathered(gas.infer(ranks.autoscale(model(), loader), loader))
    return found


def test_a_rank_reads_its_shard_alone(tmp_path: Path) -> None:
    data = undirected_graph()
    labels = torch.arange(40) % 7
    data.x = data.x.to(torch.bfloat16).float()
    data.kind, data.sixteen = "odd", data.x.to(torch.bfloat16)
    manifest = ranks.write_shards(tmp_path / "shards", data, labels, 3)
    assert sum(each["own"] for each in manifest["shards"]) == 40
    assert sum(each["training nodes"] for each in manifest["shards"]) == int(data.train_mask.sum())
    layout = Layout(labels, assign(data.edge_index, labels, 3, data.train_mask), 3)
    for rank in range(3):
        made, read = (
            cut_shard(data, layout, rank, bidirectional=False, whole={}),
            read_shard(tmp_path / "shards", rank, 3),
        )
        for name, value in made.data:
            assert torch.equal(value, read.data[name]) if isinstance(value, Tensor) else value == read.data[name]
        for name in ("nodes", "starts", "sent", "sent_starts", "ghost_starts", "first_part"):
            assert torch.equal(getattr(made, name), getattr(read, name))
    shutil.move(tmp_path / "shards", tmp_path / "moved")
    ranks.write_shards(tmp_path / "one", data, labels, 1)
    weighted = model().eval()
    with torch.no_grad():
        expected = weighted(data.x, data.edge_index, data.edge_weight, data.edge_attr)
    for size, folder in ((3, "moved"), (1, "one")):
        assert_same(run_ranks(size, infer, tmp_path / folder)[0], expected)


def test_the_maker_takes_memory_mapped_tensors_and_looks_at_them_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, labels = odd_graph(), torch.arange(33) % 5
    np.save(tmp_path / "x.npy", data.x.numpy())
    np.save(tmp_path / "edges.npy", data.edge_index.numpy())
    mapped = Data(
        **{
            name: torch.from_numpy(np.load(tmp_path / f"{file}.npy", mmap_mode="c"))
            for name, file in (("x", "x"), ("edge_index", "edges"))
        }
    )
    layout = Layout(labels, assign(data.edge_index, labels, 2), 2)
    at_once = [cut_shard(mapped, layout, rank, bidirectional=True, whole={}) for rank in range(2)]
    monkeypatch.setattr("gnnautoscale.ranks.assignment._CHUNK", 7)
    ranks.write_shards(tmp_path / "shards", mapped, labels, 2, bidirectional=True)
    for rank, one in enumerate(at_once):
        read, in_memory = (read_shard(tmp_path / "shards", rank, 2, room=room) for room in (0, 1 << 20))
        assert [_is_in_file(each.data.x.data_ptr()) for each in (read, in_memory)] == [True, False]
        assert torch.equal(read.data.x, in_memory.data.x)
        assert torch.equal(one.data.edge_index, read.data.edge_index)
        assert torch.equal(one.sent, read.sent)
        assert read.bidirectional
        # Every edge that touches an own node or a ghost is there.
        near = torch.zeros(33, dtype=torch.bool)
        near[one.nodes] = True
        assert read.data.num_edges >= int(near[data.edge_index].any(0).sum())


def damage(folder: Path, what: str) -> None:
    manifest = folder / "shards.json"
    if what == "manifest":
        manifest.unlink()
    if what == "format":
        manifest.write_text("{}")
    if what == "shard":
        about = folder / "rank-1" / "shard.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "made": "elsewhere"}))
    if what == "array":
        (folder / "rank-1" / "data-x.npy").write_bytes(b"short")
    if what == "missing":
        (folder / "rank-1" / "data-x.npy").unlink()
    if what == "facts":
        manifest.write_text(manifest.read_text().replace('"nodes": 40', '"nodes": 41'))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("manifest", "no readable shards.json"),
        ("format", "another format"),
        ("shard", "shard.json, which was damaged or changed"),
        ("array", "data-x.npy, which was damaged or changed"),
        ("missing", "must be whole"),
        ("facts", "shards.json, which was damaged or changed"),
        ("size", "has shards for 2 ranks"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, what: str, message: str) -> None:
    ranks.write_shards(tmp_path / "shards", undirected_graph(), torch.arange(40) % 4, 2)
    damage(tmp_path / "shards", what)
    with pytest.raises(gas.InputError, match=message):
        read_shard(tmp_path / "shards", 1, 3 if what == "size" else 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "at least 1"),
        ({"size": 5}, "a part of its own"),
        ({"labels": torch.zeros(3)}, "integers"),
        ({"folder": "full"}, "a new folder"),
    ],
)
def test_the_maker_refuses(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    folder = tmp_path / given.get("folder", "shards")
    with pytest.raises(gas.InputError, match=message):
        ranks.write_shards(folder, undirected_graph(), given.get("labels", torch.arange(40) % 4), given.get("size", 2))


def parts_again(folder: Path) -> None:
    ranks.RankLoader(folder, 4)


def test_a_folder_is_cut_already(tmp_path: Path) -> None:
    ranks.write_shards(tmp_path / "shards", undirected_graph(), torch.arange(40) % 4, 2)
    for error in outcomes(2, parts_again, tmp_path / "shards"):
        assert "cut into parts already" in str(error)
