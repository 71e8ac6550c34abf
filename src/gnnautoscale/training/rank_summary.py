"""What a folder of shards is about: a data set of a few nodes, which poses the same task as all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset, TypedDataset
from gnnautoscale.errors import InputError
from gnnautoscale.ranks import COUNTS, RELATIONS, TARGET, Shard, World, current, read_manifest, read_shard
from gnnautoscale.tasks import NodeClassification, known_rows

_SPLITS = ("train", "val", "test")


def summary_of(folder: Path) -> Dataset:
    """A data set of a few nodes of a folder of shards, which poses the same task as all of them.

    A heterogeneous one has all nodes of the types without features, for which models have a table, and no edges.
    """
    world = current()
    whole = read_manifest(folder)["whole"]
    name, shard = str(whole.get("name", folder.name)), read_shard(folder, world.rank, world.size)
    if COUNTS in whole:
        return _typed_summary(world, shard.kinds, whole, name)
    if not isinstance(shard.data.get("x"), Tensor):
        got = f"{', '.join(shard.data.keys())}"
        raise InputError("shards to train on need x and y", got=got, fix="Write them again.")
    joined = _some_rows(world, shard.data, shard.num_own)
    joined.edge_index = torch.empty(2, 0, dtype=torch.long)
    return Dataset.of(joined, name)


def _target_of(whole: dict[str, Any], shards: dict[str, Shard]) -> str:
    """The type of nodes with targets."""
    named = [kind for kind, shard in shards.items() if isinstance(shard.data.get("y"), Tensor)]
    target: str | None = whole.get(TARGET, named[0] if len(named) == 1 else None)
    if target is None or target not in named:
        rule = f"the manifest of shards to train on says which type of nodes has targets, as {TARGET!r}"
        got = f"{target!r}" if target is not None else f"y of {', '.join(named) or 'no type'}"
        raise InputError(rule, got=got, fix="Write them again, with facts={'target': type}.")
    return target


def _typed_summary(world: World, shards: dict[str, Shard], whole: dict[str, Any], name: str) -> TypedDataset:
    graph, target = HeteroData(), _target_of(whole, shards)
    for kind, shard in shards.items():
        x = shard.data.get("x")
        if isinstance(x, Tensor):
            graph[kind].x = x.new_zeros((1, *x.shape[1:]))
        else:
            graph[kind].num_nodes = whole[COUNTS][kind]
    joined, store = _some_rows(world, shards[target].data, shards[target].num_own), graph[target]
    if "x" not in store:  # as many nodes as there are
        of_all = torch.arange(store.num_nodes)
        masks = {key: (of_all < mask.numel()) & mask[of_all % mask.numel()] for key, mask in joined if key != "y"}
        joined = Data(y=joined.y[of_all % joined.y.size(0)], **masks)
    for key, value in joined:
        store[key] = value
    for source, relation, end in whole[RELATIONS]:
        graph[source, relation, end].edge_index = torch.empty(2, 0, dtype=torch.long)
    return TypedDataset.of_types(graph, target, name)


def _some_rows(world: World, data: Data, own: int) -> Data:
    """Some rows of x, y and masks of each rank, together, given its nodes, the first of which are its own."""
    if not isinstance(data.get("y"), Tensor):
        raise InputError("shards to train on need x and y", got=f"{', '.join(data.keys())}", fix="Write them again.")
    y = data.y[:own]
    masks = {f"{split}_mask": data[f"{split}_mask"][:own] for split in _SPLITS if f"{split}_mask" in data}
    values = y.unsqueeze(-1).flatten(1).double()
    odd = ((values != 0) & (values != 1) & ~values.isnan()).any(1)
    known = known_rows(y)
    some = [mask.nonzero()[0, 0] for mask in (odd, ~odd, known) if bool(mask.any())]
    if own:
        some += [values.nan_to_num(-torch.inf).amax(1).argmax(), values.nan_to_num(torch.inf).amin(1).argmin()]
    some += [each.nonzero()[0, 0] for mask in masks.values() for each in (mask, mask & known) if bool(each.any())]
    rows = torch.unique(torch.stack(some)) if some else torch.empty(0, dtype=torch.long)
    given = {"x": data.x[:own]} if isinstance(data.get("x"), Tensor) else {}
    found = {key: value[rows].clone() for key, value in {**given, "y": y, **masks}.items()}
    everyone = world.gather(found)
    return Data(**{key: torch.cat([each[key] for each in everyone]) for key in found})


def balance_by_shards(task: NodeClassification, folder: Path) -> None:
    """Weigh classes by the training nodes of all shards in a folder; every rank calls it."""
    world = current()
    whole, shards = read_manifest(folder)["whole"], read_shard(folder, world.rank, world.size).kinds
    shard = shards[_target_of(whole, shards)] if COUNTS in whole else shards[""]
    own = {name: shard.data[name][: shard.num_own] for name in ("y", "train_mask")}
    task.balance(world.sum(task.counts(Data(**own)).to(world.wire)).wait().cpu())
