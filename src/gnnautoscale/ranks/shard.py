"""The share of a graph that one rank holds, as a plain graph of its own.

Its rows are the rank's *own* nodes, part by part; then *ghosts*, the nodes of other ranks with an edge into own ones;
then *stand-ins*. All edges that touch an own node or a ghost are there, so degrees of both ends of an edge into an own
node are those of the whole graph, and so is whatever a layer computes from them. Edges of ghosts whose other end is
further away keep their number but not that end: a few stand-ins take its place, as many as one node has such
neighbours. Of stand-ins nothing is ever read, and they have no features.

A compensated step also uses edges into ghosts, and what layers compute from both ends of these. So a *bidirectional*
shard has one ring of nodes more, between ghosts and stand-ins, which have no features either.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.graph import is_target, rows_of
from gnnautoscale.ranks.assignment import edge_chunks

#: The fact about a whole graph that says which node is the last with an edge.
LAST = "last with edges"


class Layout:
    """Where every node of the whole graph lives: all nodes in one order, rank by rank and part by part.

    Attributes:
        nodes: The node of each place in this order, ``[num_nodes]``.
        place_of: The place of each node, ``[num_nodes]``.
        rank_of: The rank of each node, ``[num_nodes]``, int16.
        first_part: The number of parts of all ranks before each, ``[size + 1]``.
        starts: The place where each part begins, parts rank by rank, ``[num_parts + 1]``.

    Args:
        labels: The part of each node, ``[num_nodes]``.
        owners: The rank of each part, ``[num_parts]``.
        size: The number of ranks.

    Example:
        >>> layout = Layout(torch.tensor([0, 1, 2, 1]), torch.tensor([1, 0, 1]), size=2)
        >>> layout.nodes.tolist(), layout.starts.tolist(), layout.first_part.tolist()
        ([1, 3, 0, 2], [0, 2, 3, 4], [0, 1, 3])
    """

    def __init__(self, labels: Tensor, owners: Tensor, size: int) -> None:
        self.size = size
        parts = owners.argsort(stable=True)
        number = torch.empty_like(parts).index_copy_(0, parts, torch.arange(parts.numel()))
        self.nodes = number[labels].argsort(stable=True)
        self.place_of = torch.empty_like(self.nodes).index_copy_(0, self.nodes, torch.arange(labels.numel()))
        self.rank_of = owners[labels].to(torch.int16)
        self.first_part = _from_zero(torch.bincount(owners, minlength=size))
        self.starts = _from_zero(torch.bincount(labels)[parts])

    def own(self, rank: int) -> Tensor:
        """The nodes of a rank in the order of its rows, ``[num_own]``."""
        first, end = self.starts[self.first_part[rank : rank + 2]].tolist()
        return self.nodes[first:end]

    def starts_of(self, rank: int) -> Tensor:
        """The row where each part of a rank begins, ``[parts of the rank + 1]``; the last is the number of its rows."""
        starts = self.starts[self.first_part[rank] : self.first_part[rank + 1] + 1]
        return starts - starts[0]


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank holds of a graph.

    Attributes:
        data: The rank's graph. Masks are false but for own nodes.
        rank: The rank.
        size: The number of ranks.
        nodes: The node of the whole graph of each row that is own or a ghost, ``[num_own + num_ghosts]``.
        starts: The row where each own part begins, ``[num_parts + 1]``; the last one is the number of own nodes.
        sent: Own rows that are ghosts elsewhere, those for rank 0 first, ``[num_sent]``.
        sent_starts: Where the rows of each own part begin in ``sent``, for each rank, ``[size, num_parts + 1]``.
        ghost_starts: Where the ghosts of each part begin among all ghosts, parts rank by rank, ``[all parts + 1]``.
        first_part: The number of parts of all ranks before each, ``[size + 1]``.
        bidirectional: Whether nodes that edges from own ones point to are ghosts as well, and what layers compute for
            edges into ghosts is right, too.
        whole: Facts about the whole graph: numbers of nodes, edges, and more.
    """

    data: Data
    rank: int
    size: int
    nodes: Tensor
    starts: Tensor
    sent: Tensor
    sent_starts: Tensor
    ghost_starts: Tensor
    first_part: Tensor
    bidirectional: bool
    whole: dict[str, Any]

    @property
    def kinds(self) -> dict[str, Shard]:
        """The shard of each type of nodes: a plain graph has one type, without a name."""
        return {"": self}

    @property
    def num_own(self) -> int:
        """Number of nodes that the rank owns."""
        return int(self.starts[-1])

    @property
    def num_ghosts(self) -> int:
        """Number of nodes of other ranks whose rows the rank needs."""
        return self.nodes.numel() - self.num_own

    @property
    def num_parts(self) -> int:
        """Number of parts that the rank owns."""
        return self.starts.numel() - 1

    def in_parts(self, count: int) -> Shard:
        """The same shard, whose own nodes are cut into so many parts; nothing may be sent part by part."""
        return replace(self, starts=torch.arange(count + 1) * self.num_own // count)

    @property
    def parts(self) -> Tensor:
        """The part of each row among the parts of all ranks, rank by rank; stand-ins are in one more."""
        own = int(self.first_part[self.rank]) + self.labels[: self.num_own]
        ghosts = torch.repeat_interleave(self.ghost_starts.diff())
        others = torch.full((self.data.num_nodes - self.nodes.numel(),), self.ghost_starts.numel() - 1)
        return torch.cat([own, ghosts, others])

    @property
    def shown(self) -> Tensor | None:
        """Numbers of all rows by which layers count as in the whole graph, ``[num_rows]``; ``None`` for the rows' own.

        A layer may take the largest number in its edges for the last node, and give nodes up to that a self-loop. So
        nodes without edges come first here, but those after the last one with edges of the whole graph come last.
        """
        if LAST not in self.whole:
            return None
        edge_index = self.data.edge_index
        place = torch.zeros(self.data.num_nodes, dtype=torch.uint8)
        place[: self.nodes.numel()][self.nodes > self.whole[LAST]] = 2
        place[edge_index.flatten()] = 1
        end = int(edge_index.max()) + 1 if edge_index.numel() else 0
        if not bool((place[:end] == 2).any() or (place[end:] == 0).any()):
            return None
        order = place.argsort(stable=True)
        return torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))

    @property
    def labels(self) -> Tensor:
        """The part of each row; ghosts and stand-ins are in one more, which is never trained on."""
        sizes = self.starts.diff()
        others = torch.tensor([self.data.num_nodes - self.num_own])
        return torch.repeat_interleave(torch.arange(self.num_parts + 1), torch.cat([sizes, others]))


def cut_shard(data: Data, layout: Layout, rank: int, *, bidirectional: bool, whole: dict[str, Any]) -> Shard:
    """The share of a rank; tensors of the graph may be in memory-mapped files, and are read in pieces.

    Args:
        data: The whole graph.
        layout: Where its nodes live.
        rank: The rank.
        bidirectional: See :class:`Shard`.
        whole: Facts about the whole graph to hand on.

    Example:
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=4)
        >>> layout = Layout(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1]), size=2)
        >>> shard = cut_shard(path, layout, 1, bidirectional=False, whole={})
        >>> shard.nodes.tolist(), shard.num_own  # node 1 is a ghost, and node 0 has a stand-in
        ([2, 3, 1], 2)
        >>> shard.data.edge_index.tolist()
        [[3, 2, 0], [2, 0, 1]]
    """
    edges, own = data.edge_index, layout.own(rank)
    ghosts, sent = border(edges, layout, rank, bidirectional)
    nodes = torch.cat([own, ghosts])
    near = torch.cat([nodes, ring(edges, nodes, layout.nodes.numel())]) if bidirectional else nodes
    e_id, edge_index, num_rows = near_edges(edges, near, layout.nodes.numel())
    return Shard(
        data=_rows(data, nodes, own.numel(), num_rows, e_id, edge_index),
        rank=rank,
        size=layout.size,
        nodes=nodes,
        first_part=layout.first_part,
        bidirectional=bidirectional,
        whole=whole,
        **exchanged(layout, layout.starts_of(rank), sent, ghosts),
    )


def exchanged(layout: Layout, starts: Tensor, sent: Tensor, ghosts: Tensor) -> dict[str, Tensor]:
    """What a :class:`Shard` says about the rows that ranks exchange.

    Args:
        layout: Where all nodes live.
        starts: The row where each own part begins, ``[num_parts + 1]``.
        sent: Own rows that are ghosts elsewhere, each as ``peer * num_own + row``, in order.
        ghosts: The ghosts in the order of their places.
    """
    num_own, peers = int(starts[-1]), torch.arange(layout.size).unsqueeze(1)
    return {
        "starts": starts,
        "sent": sent % max(num_own, 1),
        "sent_starts": torch.searchsorted(sent, peers * num_own + starts),
        "ghost_starts": torch.searchsorted(layout.place_of[ghosts], layout.starts),
    }


def check_shardable(data: Any) -> Data | HeteroData:
    """Refuse what cannot be spread over ranks: anything but one graph, and targets of links."""
    if isinstance(data, HeteroData):
        for kind, store in data.edge_items():
            if "edge_label_index" in store:
                fix = "Remove it, or train on links in one process."
                raise InputError("ranks predict something of nodes", got=f"targets of links, of {kind!r}", fix=fix)
        return data
    if not isinstance(data, Data) or isinstance(data, Batch):
        got, fix = f"a {type(data).__name__}", "Train on it in one process."
        raise InputError("ranks share one graph", got=got, fix=fix)
    foreign = [name for name in data.keys() if is_target(data, name)]  # noqa: SIM118
    if foreign:
        fix = "Remove it, or use gas.LinkLoader, gas.GraphLoader or gas.fit, which take the whole data set."
        got = f"targets of links or graphs, {foreign[0]}"
        raise InputError("a rank's share of a graph has targets of nodes", got=got, fix=fix)
    return data


def border(edges: Tensor, layout: Layout, rank: int, bidirectional: bool) -> tuple[Tensor, Tensor]:
    """The ghosts of a rank in the order of their places; and what it sends, ``peer * num_own + row``, in order."""
    num_own, first = layout.own(rank).numel(), int(layout.starts[layout.first_part[rank]])
    is_ghost = torch.zeros(layout.nodes.numel(), dtype=torch.bool)
    sent = [torch.empty(0, dtype=torch.long)]
    for part in edge_chunks(edges):
        source, target = edges[:, part]
        from_rank, to_rank = layout.rank_of[source], layout.rank_of[target]
        arrives, leaves = (to_rank == rank) & (from_rank != rank), (from_rank == rank) & (to_rank != rank)
        is_ghost[source[arrives]] = True
        given = [(to_rank[leaves], source[leaves])]
        if bidirectional:
            is_ghost[target[leaves]] = True
            given.append((from_rank[arrives], target[arrives]))
        sent += [torch.unique(peer.long() * num_own + layout.place_of[node] - first) for peer, node in given]
    ghosts = is_ghost.nonzero().squeeze(1)
    return ghosts[layout.place_of[ghosts].argsort()], torch.unique(torch.cat(sent))


def ring(edges: Tensor, nodes: Tensor, num_nodes: int) -> Tensor:
    """The nodes beside some nodes that have an edge to or from them, ``[count]``."""
    inside, beside = (torch.zeros(num_nodes, dtype=torch.bool) for _ in range(2))
    inside[nodes] = True
    for part in edge_chunks(edges):
        ends = edges[:, part]
        beside[ends[:, inside[ends].any(0)].flatten()] = True
    return (beside & ~inside).nonzero().squeeze(1)


def near_edges(edges: Tensor, nodes: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, int]:
    """The edges that touch some nodes, in their order: which they are, both ends as rows, and the number of rows.

    Rows are those of ``nodes``, followed by those of stand-ins, of which there is at least one.
    """
    row_of = torch.full((num_nodes,), -1, dtype=torch.int32)
    row_of[nodes] = torch.arange(nodes.numel(), dtype=torch.int32)
    found: list[tuple[Tensor, Tensor]] = []
    for part in edge_chunks(edges):
        chunk = edges[:, part]
        rows = row_of[chunk]
        kept = (rows >= 0).any(0).nonzero().squeeze(1)
        # The other end of an edge that leaves is noted as a number below -1.
        ends = torch.where(rows[:, kept] >= 0, rows[:, kept].long(), -2 - chunk[:, kept])
        found.append((kept + part.start, ends))
    e_id, ends = (torch.cat([each[at] for each in found], dim=-1) for at in (0, 1))
    leaving = (ends < 0).any(0).nonzero().squeeze(1)
    inner, outer = ends[:, leaving].max(0).values, -2 - ends[:, leaving].min(0).values
    pairs, place = torch.unique(inner * num_nodes + outer, return_inverse=True)
    of = pairs // num_nodes
    number = torch.arange(pairs.numel()) - torch.searchsorted(of, of)
    count = int(number.max()) + 1 if number.numel() else 1
    ends[:, leaving] = torch.where(ends[:, leaving] < 0, nodes.numel() + number[place], ends[:, leaving])
    return e_id, ends, nodes.numel() + count


def _rows(data: Data, nodes: Tensor, num_own: int, num_rows: int, e_id: Tensor, edge_index: Tensor) -> Data:
    """The rank's graph: its rows of all attributes."""
    shard = copy.copy(data)
    for name, value in data:
        level = rows_of(data, name)
        if level == "edge" and name != "edge_index":
            shard[name] = value.index_select(data.__cat_dim__(name, value), e_id)
        elif level == "node":
            dim = data.__cat_dim__(name, value)
            shard[name] = node_rows(value, dim, nodes[:num_own] if name.endswith("_mask") else nodes, num_rows)
    shard.edge_index, shard.num_nodes = edge_index, num_rows
    return shard


def node_rows(value: Tensor, dim: int, nodes: Tensor, num_rows: int) -> Tensor:
    """The rows of some nodes, which lie along a dimension, followed by zeros up to a number of rows."""
    shape = list(value.shape)
    shape[dim] = num_rows
    rows = value.new_zeros(shape)
    if dim == 0:  # without a copy in between
        torch.index_select(value, 0, nodes, out=rows[: nodes.numel()])
    else:
        rows.narrow(dim, 0, nodes.numel()).copy_(value.index_select(dim, nodes))
    return rows


def _from_zero(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
