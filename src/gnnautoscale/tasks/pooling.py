"""Pooled rows of graphs, part by part: those of a batch's own nodes are fresh, others as they were last known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gnnautoscale.ranks import World
from gnnautoscale.tasks.readouts import Readout

# Rows that are pooled at a time in inference.
_CHUNK = 1 << 18


class PooledParts:
    """The partial results of a readout for each part of each graph.

    On several ranks, parts of one graph may belong to several: each knows the results of all.

    A batch pools its own nodes, with gradients, and adds the last known results of the parts that are not in it, which
    are constants. Over an epoch each node is in one batch, so the gradients of all nodes add up to those of the whole
    graph. What follows, the head, sees a graph once in each batch that has nodes of it. Therefore a batch counts a
    graph by the share of its nodes, and the gradient of the pooled row is divided by this share.

    Args:
        readout: What pools.
        graph_id: The graph of each node, ``[num_nodes]``.
        labels: The part of each node, ``[num_nodes]``.
        stale_dropout: The share of last known results that are left out in training.
        world: The ranks that train together, if there are several.
    """

    def __init__(
        self,
        readout: Readout,
        graph_id: Tensor,
        labels: Tensor,
        stale_dropout: float = 0.0,
        world: World | None = None,
    ) -> None:
        self.readout, self._dropout, self._world = readout, stale_dropout, world
        num_parts = int(labels.max()) + 1
        # A piece is what a part has of a graph; pieces are numbered graph by graph.
        found, piece = torch.unique(graph_id * num_parts + labels, return_inverse=True)
        self._graph_id, self._piece = graph_id, piece.int()
        self._sizes = torch.bincount(graph_id)
        self._pieces = torch.bincount(found // num_parts)
        self._first = self._pieces.cumsum(0) - self._pieces
        self._num_pieces = found.numel()
        # Of each piece, and at the end of none; made with the first batch, when the width is known.
        self._known: Tensor | None = None
        self._when: Tensor | None = None
        self._now = torch.ones((), dtype=torch.long)
        self._there: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._measures = False

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which pooled rows are not remembered."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def graphs_of(self, nodes: Tensor) -> Tensor:
        """The graphs of some nodes, ``[num_nodes]`` in host memory, and all pieces of each of them.

        Returns ``[num_graphs, 1 + most_pieces]``: the graph's number, and its pieces, padded with one of no nodes.
        """
        graphs: Tensor = torch.unique(self._graph_id[nodes])
        pieces, first = self._pieces[graphs], self._first[graphs]
        step = torch.arange(int(pieces.max()) if graphs.numel() else 0)
        table = torch.where(step < pieces.unsqueeze(1), first.unsqueeze(1) + step, self._num_pieces)
        return torch.cat([graphs.unsqueeze(1), table], dim=1)

    def pool(self, out: Tensor, nodes: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Pool a batch; the host reads no value here, so that a GPU can capture it.

        Args:
            out: The model's output for the batch's own nodes, ``[batch_size, width]``.
            nodes: Which nodes these are, ``[batch_size]``.
            table: Graphs to pool and their pieces, see :meth:`graphs_of`.

        Returns:
            A row for each graph, ``[num_graphs, pooled_width]``, and the share of the graph's nodes that the batch has,
            ``[num_graphs]``.
        """
        piece, place, sizes = self._on(out.device)
        graphs, pieces = table[:, 0], table[:, 1:].flatten()
        count, most = pieces.numel(), table.size(1) - 1
        place.fill_(count)  # nodes of graphs that are not asked for
        place[pieces] = torch.arange(count, device=out.device)
        rows = out.to(torch.promote_types(out.dtype, torch.float32))
        own = self.readout.partial(rows, place[piece[nodes].long()], count + 1)[:-1]
        table = self._known_like(own.detach())
        known, fresh = table[pieces].to(own.dtype), own[:, :1] > 0
        if not self._measures:
            table[pieces] = torch.where(fresh, own.detach(), known).to(table.dtype)
        known = self._brought_forward(known, own.detach(), fresh, pieces)
        if self._dropout and self.readout.training:
            known = known * (torch.rand(count, 1, device=out.device) >= self._dropout)
        parts = torch.where(fresh, own, known).view(-1, most, own.size(1))
        nodes_of = sizes[graphs]
        share = own.detach()[:, 0].view(-1, most).sum(dim=1) / nodes_of.to(own.dtype)
        pooled = self.readout.finish(self.readout.merge(parts), nodes_of)
        # Adds nothing but the gradient.
        pooled = pooled + (1 / share - 1).unsqueeze(1) * (pooled - pooled.detach())
        return pooled, share

    @torch.no_grad()
    def tell(self, out: Tensor, nodes: Tensor) -> None:
        """Give other ranks what this one's batch pools, and learn what theirs do; each calls it in every step.

        Args:
            out: The model's output for the batch's own nodes, ``[batch_size, width]``.
            nodes: Which nodes these are, ``[batch_size]``.
        """
        if self._world is None or self._measures:
            return
        when, now = self._when_on(out.device)
        now += 1
        piece, place, _ = self._on(out.device)
        pieces = torch.unique(piece[nodes].long())
        place[pieces] = torch.arange(pieces.numel(), device=out.device)
        rows = out.to(torch.promote_types(out.dtype, torch.float32))
        own = self.readout.partial(rows, place[piece[nodes].long()], pieces.numel())
        theirs, others = self._world.rows_of_others(pieces, own)
        known = self._known_like(own)
        known[theirs] = others.to(known.dtype)
        when[theirs] = now

    def _known_like(self, parts: Tensor) -> Tensor:
        """What is known of each piece, in columns like those of other partial results."""
        if self._known is None:
            self._known = parts.new_zeros(self._num_pieces + 1, parts.size(1))
        return self._known

    def _brought_forward(self, known: Tensor, own: Tensor, fresh: Tensor, pieces: Tensor) -> Tensor:
        """What is known of pieces, moved as far as those of the batch have moved on average, step by step.

        All rows drift as weights change, by far more than graphs differ. Where weights stay the same, nothing moves.
        """
        when, now = self._when_on(own.device)
        age = (now - when[pieces]).to(own.dtype).unsqueeze(1)
        weight = torch.where(fresh & (known[:, :1] > 0), own[:, :1], 0.0)
        moved = self.readout.place(own) - self.readout.place(known)
        rate = (weight * moved).sum(dim=0) / (weight * age).sum().clamp(min=1)
        if not self._measures:
            when[pieces] = torch.where(fresh.squeeze(1), now, when[pieces])
            if self._world is None:
                now += 1
        return self.readout.moved(known, age * rate)

    def _when_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The step in which each piece was last pooled, and that of now."""
        if self._when is None:
            self._when = torch.zeros(self._num_pieces + 1, dtype=torch.long, device=device)
            self._now = torch.ones((), dtype=torch.long, device=device)
        return self._when, self._now

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The piece of each node, a place for each piece and for none, and the nodes of each graph, on a device."""
        if device not in self._there:
            place = torch.zeros(self._num_pieces + 1, dtype=torch.long, device=device)
            self._there[device] = self._piece.to(device), place, self._sizes.to(device)
        return self._there[device]

    def state_dict(self) -> dict[str, Any]:
        """What is known, for a checkpoint."""
        if self._known is None or self._when is None:
            return {}
        return {"pooled": self._known, "pooled_when": self._when, "pooled_now": self._now}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from a checkpoint."""
        self._known = self._when = None
        if "pooled" in state:
            self._known, self._when = state["pooled"].to(device), state["pooled_when"].to(device)
            self._now = state["pooled_now"].to(device)


@torch.no_grad()
def pool_exactly(readout: Readout, out: Tensor, graph_id: Tensor) -> Tensor:
    """Pool the rows of all nodes, chunk by chunk, where the readout's weights are, or else the rows.

    ``out`` is ``[num_nodes, width]`` and ``graph_id`` ``[num_nodes]``; returns ``[num_graphs, pooled_width]``.
    """
    device = device_of(readout, out.device)
    sizes = torch.bincount(graph_id).to(device)
    merged: Tensor | None = None
    for rows, number in zip(torch.split(out, _CHUNK), torch.split(graph_id, _CHUNK), strict=True):
        rows = rows.to(device, torch.promote_types(rows.dtype, torch.float32))
        found = readout.partial(rows, number.to(device), sizes.numel())
        merged = found if merged is None else readout.merge(torch.stack([merged, found], dim=1))
    if merged is None:
        return out.new_zeros(0, out.size(1))
    return readout.finish(merged, sizes)


def device_of(module: nn.Module, other: torch.device) -> torch.device:
    """Where the weights of a module are, or another device if it has none."""
    return next((weight.device for weight in module.parameters()), other)
