"""Rows in checkpoints, also of several ranks: one file for each, and rows find their nodes again on any number of them.

Each rank writes its own rows. When all have, the first one writes the checkpoint itself, which names these files: so a
checkpoint that is there is whole. Rows are known by their nodes in the whole graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.forward import GraphMemory, TypedMemory
from gnnautoscale.graph import HaloLoader, RowOrder
from gnnautoscale.history import History
from gnnautoscale.ranks import RankLoader, World
from gnnautoscale.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, shard_path

# Rows that are copied at once.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Piece:
    """The rows of some nodes, ``[num_rows]``, in all histories and last gradients of a checkpoint.

    Of a heterogeneous graph nodes are in a dictionary by type.
    """

    nodes: Any
    rows: dict[str, Any]

    def of(self, kind: str) -> Piece:
        """The rows of one type of nodes."""
        return Piece(self.nodes[kind], self.rows["types"][kind])


def save_shards(world: World, folder: Path, step: int, common: dict[str, Any], own: dict[str, Any]) -> Path:
    """Write a checkpoint together: each rank its ``own`` state, the first one also the ``common`` one."""
    made = world.broadcast(uuid4().hex)
    path = shard_path(folder, step, world.rank, world.size)
    save_checkpoint(folder, step, {**own, "made": made}, path=path)
    names = world.gather(path.name)
    if world.is_first:
        save_checkpoint(folder, step, {**common, "shards": names, "made": made})
    written: str = world.broadcast(str(folder / f"checkpoint-{step:09d}.pt"))
    return Path(written)


def read_shards(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The states of all ranks in a checkpoint, none of one process; damage to any of them is noticed."""
    found = []
    for name in checkpoint.state.get("shards", ()):
        shard = load_checkpoint(checkpoint.path.parent / name)
        if shard.state.get("made") != checkpoint.state["made"]:
            fix = "Resume from another checkpoint."
            raise InputError(f"{name} must belong to {checkpoint.path}", got="a shard of another one", fix=fix)
        found.append(shard.state)
    return found


def pieces_of(
    checkpoint: Checkpoint, shards: list[dict[str, Any]], counts: Mapping[str, int] | None = None
) -> list[Piece]:
    """All rows of a checkpoint of several ranks, or of one process, which has no shards.

    ``counts`` are the numbers of nodes of each type of a heterogeneous graph.
    """
    if shards:
        return [Piece(shard["nodes"], shard["strategy"]) for shard in shards]
    state = checkpoint.state["strategy"]
    if counts is None:
        return [Piece(state["labels"].argsort(stable=True), state)]
    labels = torch.split(state["labels"], list(counts.values()))
    return [Piece({kind: of.argsort(stable=True) for kind, of in zip(counts, labels, strict=True)}, state)]


def take_rows(memory: Any, loader: HaloLoader, pieces: list[Piece], device: torch.device) -> None:
    """Create the histories of a loader's graph as they were, and give them the rows of their nodes.

    ``memory`` is a :class:`GraphMemory`, or a :class:`TypedMemory`.
    """
    own = loader.nodes if isinstance(loader, RankLoader) and loader.shard is not None else None
    if isinstance(memory, TypedMemory):
        orders = loader.row_orders
        nodes = own or {kind: order.nodes.long() for kind, order in orders.items()}
        for kind, each in memory.kinds.items():
            place_rows(each, [piece.of(kind) for piece in pieces], nodes[kind], device, orders[kind])
    else:
        order = loader.row_order
        place_rows(memory, pieces, order.nodes.long() if own is None else own, device, order)


def place_rows(memory: GraphMemory, pieces: list[Piece], nodes: Tensor, device: torch.device, order: RowOrder) -> None:
    """Create histories as they were, and give them the rows of their nodes.

    Args:
        memory: What gets them.
        pieces: The rows that were kept, those of ``nodes`` among them.
        nodes: The node of each row of a history that is its own, ``[num_rows]``.
        device: Where steps run.
        order: The order of the rows.
    """
    kinds = ("histories", "last_gradients")
    kept, gradients = (forms_of(pieces[0].rows[kind]) for kind in kinds)
    memory.reopen(kept, device, order, gradients=gradients)
    named = [each for each in (nodes, *(piece.nodes for piece in pieces)) if each.numel()]
    row_of = torch.full((1 + max((int(each.max()) for each in named), default=0),), -1)
    row_of[nodes] = torch.arange(nodes.numel())
    opened = {"histories": memory.histories, "last_gradients": memory.last_gradients}
    for piece in pieces:
        for chunk in torch.split(torch.arange(piece.nodes.numel()), _CHUNK):
            rows = row_of[piece.nodes[chunk]]
            here = (rows >= 0).nonzero().squeeze(1)
            for kind in kinds:
                for slot, history in opened[kind].items():
                    raw = piece.rows[kind][slot]["raw"][chunk][here]
                    history.raw.index_copy_(0, rows[here].to(history.raw.device), raw.to(history.raw.device))


def saved_rows(memory: GraphMemory) -> dict[str, Any]:
    """All rows of histories in a form that checkpoints hold."""
    rows = {"histories": _saved(memory.histories), "last_gradients": _saved(memory.last_gradients)}
    return {**rows, "totals": dict(memory.totals)} if memory.totals else rows


def load_rows(memory: GraphMemory, state: dict[str, Any], device: torch.device, order: RowOrder) -> None:
    """Restore the rows of a checkpoint, which are in an order."""
    rows, gradients = state["histories"], state["last_gradients"]
    memory.reopen(forms_of(rows), device, order, gradients=forms_of(gradients))
    for opened, kept in ((memory.histories, rows), (memory.last_gradients, gradients)):
        for slot, history in kept.items():
            opened[slot].raw.copy_(history["raw"])
    memory.totals = {slot: total.to(device) for slot, total in state.get("totals", {}).items()}


def _saved(histories: dict[str, History]) -> dict[str, dict[str, Any]]:
    return {
        slot: {"width": history.width, "dtype": str(history.dtype).removeprefix("torch."), "raw": history.raw}
        for slot, history in histories.items()
    }


def forms_of(saved: dict[str, dict[str, Any]]) -> dict[str, tuple[int, torch.dtype]]:
    """Width and type of each of the histories of a checkpoint."""
    return {slot: (history["width"], getattr(torch, history["dtype"])) for slot, history in saved.items()}
