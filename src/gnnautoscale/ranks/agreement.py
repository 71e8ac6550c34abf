"""Checks that ranks agree about what layers compute from edges.

A layer may normalize edges by anything that it finds in its graph. On a shard that is right if it depends on both ends
of an edge and on their edges alone, which is what shards hold; a sum over all edges, say, would differ from rank to
rank. An edge between two ranks is in the shards of both, so they compare what their layers made of these edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import World

# How far sums over the same edges may be apart, relative to the sum of their sizes.
_TOLERANCE = 1e-4
# Edges that are looked at together.
_CHUNK = 1 << 20


def check_agreement(
    world: World, shard: Shard | TypedShard, records: Mapping[str, Mapping[str, Sequence[Any]]]
) -> None:
    """Refuse a model with a layer whose edges between two ranks have other values on these; every rank calls it.

    ``records`` are those of each layer call along edges between nodes of one type, by type.
    """
    named = {
        f"{call} {place}": (shard.kinds[kind], record)
        for kind, calls in records.items()
        for call, made in calls.items()
        for place, record in enumerate(made)
    }
    mine = {name: _sums(*each) for name, each in sorted(named.items())}
    everyone = world.gather(mine)
    for rank, theirs in enumerate(everyone):
        for peer in range(rank + 1, world.size):
            for name in {**theirs, **everyone[peer]}:
                here, there = (each.get(name) for each in (theirs, everyone[peer]))
                if here is None or there is None or not _close(here[:, peer], there[:, rank]):
                    raise UnsupportedModelError(
                        f"layer '{name.rpartition(' ')[0]}' must make the same of an edge on all ranks",
                        got="values that depend on more than both ends of the edge and their edges",
                        fix="Compute them on the whole graph, and pass them as edge_weight or edge_attr.",
                    )


def _close(here: Tensor, there: Tensor) -> bool:
    """Whether two sums of signed values and of sizes, ``[2]``, are those of the same values."""
    return bool((here - there).abs().max() <= _TOLERANCE * here[1].abs().clamp(min=1e-12))


def _sums(shard: Shard, record: Any) -> Tensor:
    """Sums over the edges that each rank shares with this one: of weighted values, and of sizes, ``[2, size]``."""
    sums = torch.zeros(2, shard.size, dtype=torch.double)
    is_sent = torch.zeros(shard.size * shard.num_own, dtype=torch.bool)
    counts = shard.sent_starts[:, -1] - shard.sent_starts[:, 0]
    is_sent[torch.repeat_interleave(torch.arange(shard.size), counts) * shard.num_own + shard.sent] = True
    for first in range(0, record.edges.source.numel(), _CHUNK):
        _add_up(shard, record, slice(first, min(first + _CHUNK, record.edges.source.numel())), is_sent, sums)
    return sums


def _add_up(shard: Shard, record: Any, part: slice, is_sent: Tensor, sums: Tensor) -> None:
    """Add some edges to the sums; ``is_sent`` tells for each rank and own row whether that is a ghost there."""
    table, own, known = record.edges, shard.num_own, shard.nodes.numel()
    places = torch.arange(part.start, part.stop)
    target = table.order.nodes_at(torch.searchsorted(table.ptr, places, right=True) - 1)
    source = table.source_order.nodes_at(table.source[part].long())
    inner, outer = torch.minimum(source, target), torch.maximum(source, target)
    crossing = ((inner < own) & (outer >= own) & (outer < known)).nonzero().squeeze(1)
    peer = torch.searchsorted(shard.ghost_starts[shard.first_part], outer[crossing] - own, right=True) - 1
    both = is_sent[peer * own + inner[crossing]]  # so that both ranks know both ends
    crossing, peer = crossing[both], peer[both]
    ends = shard.nodes[source[crossing]] * 1_000_003 + shard.nodes[target[crossing]] * 7_919
    factor = 0.5 + (ends % 8_191).double() / 8_191
    values = [torch.ones(crossing.numel(), 1, dtype=torch.double)]
    for value in record.constants.values():
        chosen = value[part].cpu()[crossing].double()
        values.append(chosen.flatten(1) if chosen.dim() > 1 else chosen.unsqueeze(1))
    weighed = torch.cat(values, dim=1)
    weighed = weighed * torch.linspace(1.0, 2.0, weighed.size(1), dtype=torch.double) * factor.unsqueeze(1)
    sums[0].index_add_(0, peer, weighed.sum(1))
    sums[1].index_add_(0, peer, weighed.abs().sum(1))
