"""Shards in files: a folder with one folder for each rank, and a manifest that is written last.

Each tensor is an array in a ``.npy`` file. A rank reads these into its memory if there is room, since a GPU reads rows
there by itself; otherwise it maps them, so that pages are read when they are used. Before, each file is read once and
compared with the checksum that the manifest has. Of a heterogeneous graph a
rank has a folder for each type of nodes, which is a plain shard, and for each type of edges; they are numbered, since
types may be called anything. The maker goes through the graph in pieces, one rank after the other: it holds one shard
and a few numbers for each node, while the graph's own tensors may be in memory-mapped files that exceed the memory; of
a heterogeneous graph it also holds the edges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import (
    checked,
    checksums_of,
    damaged_file,
    is_unchanged,
    ordinary,
    with_checksum,
    write_atomically,
)
from gnnautoscale.errors import InputError
from gnnautoscale.graph import labels_for
from gnnautoscale.ranks.assignment import assign
from gnnautoscale.ranks.cutting import COUNTS, RELATIONS, cut, facts_of, graph_of, training_nodes
from gnnautoscale.ranks.shard import Layout, Shard, check_shardable
from gnnautoscale.ranks.typed_shard import TypedShard

_FORMAT = "gnnautoscale shards 2"
MANIFEST = "shards.json"
# Where the manifest has the checksums of a shard's files.
_FILES = "files"
_TENSORS = ("nodes", "starts", "sent", "sent_starts", "ghost_starts", "first_part")
# The folders of types, and the file that says what a folder holds.
_NODES, _EDGES, _ABOUT = "nodes-{}", "edges-{}", "shard.json"
_RULE = "a folder of shards must be writable"


@checked(size={"least": 1}, seed={"least": 0, "below": 2**32})
def write_shards(
    folder: str | Path,
    data: Data | HeteroData,
    labels: Tensor | dict[str, Tensor],
    size: int,
    *,
    bidirectional: bool = False,
    seed: int = 0,
    facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Cut a graph into shards for a number of ranks, and write them to a new folder.

    Args:
        folder: The folder, which must be new or empty.
        data: The whole graph; its tensors may be in memory-mapped files.
        labels: The part of each node, ``[num_nodes]``; of a heterogeneous graph in a dictionary by type, or of all
            types one behind the other.
        size: The number of ranks.
        bidirectional: Whether the shards serve layers that pass messages against edges, and compensated steps; see
            :class:`~gnnautoscale.ranks.RankLoader`. Such shards are larger.
        seed: Makes the assignment of parts to ranks reproducible.
        facts: What else to say in the manifest, for JSON.

    Returns:
        The manifest: facts about the graph and about each shard.

    Example:
        >>> from tempfile import mkdtemp
        >>> from torch_geometric.datasets import KarateClub
        >>> data = KarateClub()[0]
        >>> manifest = write_shards(mkdtemp(), data, torch.arange(34) % 4, size=2)
        >>> sum(shard["own"] for shard in manifest["shards"])
        34
    """
    folder, graph = Path(folder), graph_of(check_shardable(data))
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise InputError("facts must be values that JSON has", got=str(error), fix="Convert them.") from None
    labels = labels_for(graph, None, labels)
    owners = assign(graph.edge_index, labels, size, training_nodes(graph), seed=seed)
    _make(folder)
    layout = Layout(labels, owners, size)
    whole = {**facts_of(graph), "parts": owners.numel(), "made": uuid4().hex, **(facts or {})}
    described = []
    for rank in range(size):
        shard = cut(graph, layout, rank, bidirectional=bidirectional, whole=whole)
        inside = folder / f"rank-{rank}"
        facts_of_shard = _write_typed(inside, shard) if isinstance(shard, TypedShard) else _write(inside, shard)
        described.append({**facts_of_shard, _FILES: checksums_of(inside)})
    manifest = with_checksum({"format": _FORMAT, "ranks": size, "whole": whole, "shards": described})
    _write_json(folder / MANIFEST, manifest)
    return manifest


@checked()
def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What a folder of shards says about them."""
    folder = Path(folder)
    rule, fix = f"{folder} must be a folder that write_shards or `gas partition --ranks` wrote", "Write it again."
    try:
        manifest = json.loads(ordinary(folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InputError(rule, got=f"no readable {MANIFEST} ({error})", fix=fix) from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise InputError(rule, got=f"another format, {str(manifest)[:80]}", fix=fix)
    if not is_unchanged(manifest):
        raise InputError(rule, got=f"{MANIFEST}, which was damaged or changed", fix=fix)
    return manifest


@checked(rank={"least": 0}, size={"least": 1}, room={"least": 0})
def read_shard(folder: str | Path, rank: int, size: int, *, room: int = 0) -> Any:
    """The shard of a rank, a :class:`Shard` or a :class:`TypedShard`.

    It is mapped into memory, or read if it takes no more than ``room`` bytes.
    """
    folder, manifest = Path(folder), read_manifest(folder)
    if manifest["ranks"] != size:
        fix = f"Start {manifest['ranks']} processes, or write shards for {size}."
        raise InputError(f"{folder} has shards for {manifest['ranks']} ranks", got=f"{size}", fix=fix)
    if rank >= size:
        raise InputError(f"rank must be below {size}", got=str(rank), fix="Ranks are numbered from 0.")
    inside = folder / f"rank-{rank}"
    rule, fix = f"{inside} must be whole", "Write the shards again."
    try:
        damaged = damaged_file(inside, manifest["shards"][rank][_FILES])
        if damaged is not None:
            raise InputError(rule, got=f"{damaged}, which was damaged or changed", fix=fix)
        mapped = sum(path.stat().st_size for path in inside.rglob("*.npy")) > room
        read = _read_typed if COUNTS in manifest["whole"] else _read_plain
        return read(inside, rank, size, manifest["whole"], mapped)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(rule, got=str(error) or type(error).__name__, fix=fix) from None


def _read_plain(folder: Path, rank: int, size: int, whole: dict[str, Any], mapped: bool) -> Shard:
    about, data = _read_data(folder, whole, mapped)
    tensors = {name: _read(folder / f"{name}.npy", "long", mapped) for name in _TENSORS}
    data.num_nodes = about["rows"]
    return Shard(data=data, rank=rank, size=size, bidirectional=about["bidirectional"], whole=whole, **tensors)


def _read_typed(folder: Path, rank: int, size: int, whole: dict[str, Any], mapped: bool) -> TypedShard:
    kinds = {
        kind: _read_plain(folder / _NODES.format(number), rank, size, whole, mapped)
        for number, kind in enumerate(whole[COUNTS])
    }
    edges = {
        (source, relation, target): _read_data(folder / _EDGES.format(number), whole, mapped)[1]
        for number, (source, relation, target) in enumerate(whole[RELATIONS])
    }
    return TypedShard(kinds, edges, _read_data(folder, whole, mapped)[1].to_dict(), whole)


def _read_data(folder: Path, whole: dict[str, Any], mapped: bool) -> tuple[dict[str, Any], Data]:
    """What :func:`_write_data` has written, and all that it noted."""
    about = json.loads(ordinary(folder / _ABOUT).read_text())
    if about["made"] != whole["made"]:
        rule, fix = f"{folder} must be whole", "Write the shards again."
        raise InputError(rule, got="a shard of another folder", fix=fix)
    data = Data.from_dict(about["values"])
    for name, kind in about["attributes"].items():
        data[name] = _read(folder / f"data-{name}.npy", kind, mapped)
    return about, data


def _write(folder: Path, shard: Shard) -> dict[str, Any]:
    """Write a shard; returns what the manifest says about it."""
    data = shard.data
    _write_data(folder, data, shard.whole, {"bidirectional": shard.bidirectional, "rows": data.num_nodes})
    for name in _TENSORS:
        _write_array(folder / f"{name}.npy", getattr(shard, name))
    mask = data.get("train_mask")
    return {
        "own": shard.num_own,
        "ghosts": shard.num_ghosts,
        "parts": shard.num_parts,
        "edges": data.num_edges,
        "training nodes": None if mask is None else int(mask.sum()),
        "sent": shard.sent.numel(),
    }


def _write_typed(folder: Path, shard: TypedShard) -> dict[str, Any]:
    """See :func:`_write`."""
    _write_data(folder, Data.from_dict(shard.extra), shard.whole, {})
    kinds = {
        kind: _write(folder / _NODES.format(number), each) for number, (kind, each) in enumerate(shard.kinds.items())
    }
    for number, edges in enumerate(shard.edges.values()):
        _write_data(folder / _EDGES.format(number), edges, shard.whole, {})
    trained = [each["training nodes"] for each in kinds.values() if each["training nodes"] is not None]
    total = {name: sum(each[name] for each in kinds.values()) for name in ("own", "ghosts", "sent")}
    return {
        **total,
        "parts": shard.num_parts,
        "edges": sum(each.num_edges for each in shard.edges.values()),
        "training nodes": sum(trained) if trained else None,
        "types": kinds,
    }


def _write_data(folder: Path, data: Data, whole: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the attributes of some nodes or edges to a new folder, and something about them."""
    _make(folder)
    attributes, values = {}, {}
    for name, value in data:
        if isinstance(value, Tensor):
            attributes[name] = str(value.dtype).removeprefix("torch.")
            _write_array(folder / f"data-{name}.npy", value)
        elif name != "num_nodes" and (value is None or isinstance(value, (bool, int, float, str))):
            values[name] = value
        elif name != "num_nodes":
            fix = f"Remove it: del data.{name}."
            raise InputError("shards hold tensors, numbers and text", got=f"a {type(value).__name__}, {name}", fix=fix)
    facts = {"made": whole["made"], **about, "attributes": attributes, "values": values}
    _write_json(folder / _ABOUT, facts)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filled = any(folder.iterdir())
    except OSError as error:
        raise InputError(_RULE, got=f"{folder} ({error})", fix="Choose another one.") from None
    if filled:
        raise InputError("shards go to a new folder", got=f"{folder}, which has files", fix="Choose another one.")


def _write_array(path: Path, value: Tensor) -> None:
    # NumPy has no bfloat16, and knows bytes of any type.
    plain = value.contiguous().view(torch.int16) if value.dtype == torch.bfloat16 else value
    write_atomically(path, lambda stream: np.save(stream, plain.numpy(), allow_pickle=False), rule=_RULE)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, lambda stream: stream.write(json.dumps(value, indent=1).encode()), rule=_RULE)


def _read(path: Path, kind: str, mapped: bool) -> Tensor:
    """Read an array, or map it: then pages load as they are used, and writes never reach the file."""
    mode: Literal["c"] | None = "c" if mapped else None
    array = torch.from_numpy(np.load(ordinary(path), mmap_mode=mode, allow_pickle=False))
    return array.view(torch.bfloat16) if kind == "bfloat16" else array
