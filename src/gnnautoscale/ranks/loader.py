"""``RankLoader``: the batches of one rank, with ghosts in their halos."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import available_memory
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph, HaloLoader, PartGroup, TypedGraph, fingerprint, is_label, labels_for, rows_of
from gnnautoscale.kernels import Runs
from gnnautoscale.ranks.assignment import assign
from gnnautoscale.ranks.cutting import COUNTS, cut, facts_of, graph_of, training_nodes
from gnnautoscale.ranks.exchange import Ghosts
from gnnautoscale.ranks.files import read_shard
from gnnautoscale.ranks.shard import Layout, Shard, check_shardable
from gnnautoscale.ranks.steps import Steps
from gnnautoscale.ranks.surroundings import surroundings
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import World, current

# What a rank's drawings differ by from those of the rank before.
_SEEDS_APART = 7919


class RankLoader(HaloLoader):
    """Iterates over one rank's share of a graph; otherwise a :class:`HaloLoader`.

    Parts are assigned to ranks, and each rank keeps its parts' features and edges, those of its *ghosts*, which are the
    nodes of other ranks with an edge into them, and nothing else; ``loader.data`` is that share, a graph of its own.
    All ranks have as many batches in an epoch, and step on them together. With one rank it is a ``HaloLoader`` of the
    graph as it is.

    Args:
        data: The whole graph, which this process may forget afterwards; or a folder that
            :func:`~gnnautoscale.ranks.write_shards` or ``gas partition --ranks`` wrote, of which each rank reads its
            own share.
        num_parts: Number of parts of the whole graph; not needed for a folder or given labels.
        batch_size: Number of parts in a batch of a rank; if ranks have different numbers of parts, some batches have
            one more or less.
        options: Further arguments of :class:`HaloLoader`; partition, balance and cache_dir do not apply to a folder.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> loader = RankLoader(KarateClub()[0], num_parts=4, batch_size=2)
        >>> loader.num_own, loader.nodes.tolist() == list(range(34))
        (34, True)
    """

    #: The rank's share, a :class:`Shard` or a :class:`TypedShard`; ``None`` if there is only one rank.
    shard: Any = None
    #: The part of each node of the whole graph, ``[num_nodes]``, on the first rank, if it was cut here.
    whole_labels: Tensor | None = None
    #: The steps that ranks make together; ``None`` if there is only one rank.
    steps: Steps | None = None
    # Shares rows when models visit the graph that they are not trained on.
    _visits: Ghosts | None = None

    def __init__(
        self, data: Data | HeteroData | str | Path, num_parts: int | None = None, *, batch_size: int = 1, **options: Any
    ) -> None:
        self.world = current()
        options["batch_size"] = batch_size
        if isinstance(data, (str, Path)):
            room = (available_memory() or 0) // (2 * self.world.on_machine)
            shard: Any = read_shard(Path(data), self.world.rank, self.world.size, room=room)
            unfit = {"num_parts": num_parts, **options}.keys() & {"partition", "balance", "cache_dir"}
            if unfit or num_parts is not None:
                got = ", ".join(sorted(unfit)) or f"num_parts={num_parts}"
                raise InputError("a folder of shards is cut into parts already", got=got, fix="Leave it out.")
            self.world.agree({"folder of shards": shard.whole["made"], "settings": _settings(options)})
        elif self.world.size == 1:
            super().__init__(data, num_parts, **options)
            return
        else:
            shard = self._cut(check_shardable(data), num_parts, options)
        if options.get("bidirectional", False) and not shard.bidirectional:
            fix = "Write them with bidirectional=True."
            raise InputError("bidirectional halos need such shards", got="one of sources only", fix=fix)
        self._share(shard, batch_size)
        given = {name: value for name, value in options.items() if name not in ("partition", "balance", "cache_dir")}
        if isinstance(given.get("batch_size"), int):
            given["batch_size"] = min(given["batch_size"], shard.num_parts)
        # Models are tried on graphs like the rank's, and have to get the same histories on all ranks.
        symmetric = isinstance(shard, Shard) and all(self.everyone(Graph.of(shard.data).is_symmetric))
        # Halos of a symmetric graph are the same without, and take less memory.
        given["bidirectional"] = bool(given.get("bidirectional", False)) and not symmetric
        super().__init__(shard.data, partition=shard.labels, **given)
        if isinstance(shard, Shard):
            self.graph.is_symmetric, self.graph.shown = symmetric, shard.shown

    def _cut(self, data: Data | HeteroData, num_parts: int | None, options: dict[str, Any]) -> Shard | TypedShard:
        """This rank's share of a graph that all ranks have; the first one decides about parts and ranks."""
        world, graph = self.world, graph_of(data)
        given = options.get("partition")
        world.agree({"graph": graph.key, "targets and masks": fingerprint(*_targets(graph))})
        world.agree({"num_parts": num_parts, "settings": _settings(options)})
        decided: Any = None
        if world.is_first:
            try:
                how = {name: options[name] for name in ("partition", "balance", "seed", "cache_dir") if name in options}
                labels = labels_for(graph, num_parts, **how)
                mask = training_nodes(graph)
                decided = labels, assign(graph.edge_index, labels, world.size, mask, seed=options.get("seed", 0))
            except InputError as error:  # which all ranks have to know about
                decided = error
        decided = world.broadcast(decided)
        if isinstance(decided, InputError):
            raise decided
        if isinstance(given, (Tensor, dict)):
            every = [given] if isinstance(given, Tensor) else list(given.values())
            world.agree({"labels of parts": [each.double().sum().item() for each in every]})
        labels, owners = decided
        self.whole_labels = labels if world.is_first else None
        layout, bidirectional = Layout(labels, owners, world.size), bool(options.get("bidirectional", False))
        return cut(graph, layout, world.rank, bidirectional=bidirectional, whole=facts_of(graph))

    def _share(self, shard: Shard | TypedShard, batch_size: int) -> None:
        self.shard = shard
        if self.world.size > 1:
            self.steps = Steps(shard, self.world)
            self._visits = Ghosts(self.steps)
        sizes = shard.first_part.diff().tolist()
        if isinstance(batch_size, int) and batch_size > sum(sizes):
            rule = f"batch_size must be at most the number of parts, {sum(sizes)}"
            raise InputError(rule, got=str(batch_size), fix="Lower batch_size, or cut the graph into more parts.")
        # Every rank has as many batches, and none is empty.
        self._length = min(max(-(-size // batch_size) for size in sizes), min(sizes))

    def __len__(self) -> int:
        return super().__len__() if self.shard is None else self._length

    def __iter__(self) -> Iterator[Data]:
        for batch in super().__iter__():
            yield batch
            self.world.open.answer()
            self.world.open.clear()

    def _parts_to_draw(self) -> int:
        return super()._parts_to_draw() if self.shard is None else self.shard.num_parts

    @property
    def _spread(self) -> int | None:
        # Ranks wait for each other in every step, so a small last batch would save nothing.
        return None if self.steps is None else self._length

    def _drawing_seed(self) -> int:
        return self.seed + _SEEDS_APART * self.world.rank

    def _next_groups(self) -> list[PartGroup]:
        groups = super()._next_groups()
        if self.steps is not None:
            builder = self._source.builder
            self.steps.announce(groups, [_runs(builder.own_rows(group)) for group in groups])
        return groups

    @property
    def num_own(self) -> int:
        """Number of nodes that this rank owns; they have the first rows of ``loader.data``."""
        return super().num_own if self.shard is None else self.shard.num_own

    @property
    def own_counts(self) -> dict[str, int]:
        """Number of nodes of each type of a heterogeneous graph that this rank owns."""
        if self.shard is None:
            return super().own_counts
        return {kind: shard.num_own for kind, shard in self.shard.kinds.items()}

    @property
    def is_own(self) -> Tensor:
        """See :meth:`HaloLoader.is_own`."""
        if self.shard is None:
            return super().is_own
        return torch.cat([torch.arange(each.data.num_nodes) < each.num_own for each in self.shard.kinds.values()])

    @property
    def sharing(self) -> Ghosts | None:
        """See :attr:`HaloLoader.sharing`."""
        return self._visits

    @property
    def is_whole(self) -> bool:
        """Whether one batch holds the whole graph."""
        return self.shard is None and super().is_whole

    @property
    def nodes(self) -> Any:
        """Which nodes of the whole graph this rank owns, ``[num_own]``, in the order of its rows.

        Of a heterogeneous graph a dictionary of these, by type.
        """
        if self.shard is not None:
            found = {kind: shard.nodes[: shard.num_own] for kind, shard in self.shard.kinds.items()}
        else:
            counts = self.own_counts if self.is_typed else {"": self.num_own}
            found = {kind: torch.arange(count) for kind, count in counts.items()}
        return found if self.is_typed else found[""]

    def _own_nodes(self, batch: Data) -> Tensor:
        """The own nodes of a batch of a plain graph, by their numbers in the whole graph, ``[batch_size]``."""
        rows: Tensor = batch.n_id[: batch["batch_size"]].as_subclass(Tensor)
        return rows if self.shard is None else self.nodes[rows.cpu()].to(rows.device)

    @property
    def joined_nodes(self) -> Tensor:
        """The same, ``[num_own]``, with the nodes of all types of the whole graph numbered type after type."""
        if not self.is_typed:
            rows: Tensor = self.nodes
            return rows
        counts = self.own_counts if self.shard is None else self.shard.whole[COUNTS]
        firsts = accumulate(counts.values(), initial=0)
        return torch.cat([first + self.nodes[kind] for kind, first in zip(counts, firsts, strict=False)])

    @property
    def is_typed(self) -> bool:
        """Whether the graph has several types of nodes."""
        return isinstance(self.data, HeteroData)

    def batch_for(self, nodes: Any) -> Any:
        """The batch of some of the rank's own nodes, given by their rows; see :meth:`HaloLoader.batch_for`."""
        if self.shard is not None:
            for kind, given in (nodes if isinstance(nodes, dict) else {"": nodes}).items():
                shard = self.shard.kinds.get(kind)
                if shard is not None and isinstance(given, Tensor) and bool((given >= shard.num_own).any()):
                    rule = f"a rank has batches of its own nodes, rows 0 to {shard.num_own - 1} of loader.data"
                    fix = "Ask the rank that owns the node; see loader.nodes."
                    raise InputError(rule, got=str(int(given.max())), fix=fix)
        return super().batch_for(nodes)

    def everyone(self, value: Any) -> list[Any]:
        """See :meth:`HaloLoader.everyone`."""
        return self.world.gather(value)

    def graph_around(self, nodes: Tensor, hops: int) -> tuple[Any, Tensor]:
        """See :meth:`HaloLoader.graph_around`; every rank calls it."""
        if self.shard is None:
            return super().graph_around(nodes, hops)
        by_type = self.graph.split(nodes) if self.is_typed else {"": nodes}
        around = surroundings(self.world, self.shard, by_type, hops)
        if not self.is_typed:
            return Graph.of(around), torch.arange(nodes.numel())
        graph = TypedGraph.of(around)
        return graph, torch.cat([graph.first[kind] + torch.arange(each.numel()) for kind, each in by_type.items()])

    @property
    def parts(self) -> Tensor:
        """See :meth:`HaloLoader.parts`; they are numbered rank by rank."""
        if self.shard is None:
            return super().parts
        return torch.cat([shard.parts for shard in self.shard.kinds.values()])

    @property
    def pulled_elsewhere(self) -> Tensor:
        """See :meth:`HaloLoader.pulled_elsewhere`."""
        if self.shard is None:
            return super().pulled_elsewhere
        firsts = self.graph.first if self.is_typed else {"": 0}
        return torch.cat([firsts[kind] + each.sent for kind, each in self.shard.kinds.items()])

    def in_batches(self, count: int) -> HaloLoader:
        """A loader of the same share for sweeps in so many batches of all ranks, at least one of each."""
        if self.shard is None:
            return super().in_batches(count)
        made = copy.copy(self)
        each = min(-(-count // self.shard.size), self.num_own)
        made.shard = self.shard.in_parts(each)
        made._length = each
        how: dict[str, Any] = {"keep": self.keep, "device": self.device, "bidirectional": self.bidirectional}
        HaloLoader.__init__(made, self.shard.data, partition=made.shard.labels, **how)
        return made

    def labels_of_all(self) -> Tensor:
        """The part of each node of the whole graph, ``[num_nodes]``, on every rank, which all have to ask for it."""
        if self.shard is None:
            return self.labels
        labels: Tensor | None = self.world.broadcast(self.whole_labels)
        if labels is None:
            fix = "Pass the whole graph to each rank."
            raise InputError("the parts of all nodes are known where they were cut", got="a folder of shards", fix=fix)
        return labels

    def gathered(self, rows: Any) -> Any:
        """Rows of all nodes in the order of the whole graph, ``[num_nodes, ...]``, on the first rank; else ``None``.

        Every rank gives the rows of its own nodes, ``[num_own, ...]``, as :func:`gnnautoscale.infer` returns them; of a
        heterogeneous graph in a dictionary by type, ``{"paper": rows}``, and gets one.
        """
        if self.shard is None:
            return rows
        if not self.is_typed:
            return _in_order(self.world, self.nodes, rows)
        if not isinstance(rows, dict) or not rows.keys() <= self.nodes.keys():
            got = f"{list(rows)}" if isinstance(rows, dict) else type(rows).__name__
            rule = f"rows of a heterogeneous graph are a dictionary by type ({', '.join(self.nodes)})"
            raise InputError(rule, got=got, fix="Pass {type: rows}.")
        found = {kind: _in_order(self.world, self.nodes[kind], rows[kind]) for kind in sorted(rows)}
        return found if self.world.is_first else None


def _in_order(world: World, nodes: Tensor, rows: Tensor) -> Tensor | None:
    """The rows of all ranks' nodes in the order of these, on the first rank."""
    order, found = world.gather_to_first(nodes), world.gather_to_first(rows)
    if order is None or found is None:
        return None
    every = torch.cat(found)
    return torch.empty_like(every).index_copy_(0, torch.cat(order), every)


def _runs(own: Any) -> dict[str, Runs]:
    """The rows of a batch by type; a plain graph has one type, without a name."""
    kinds: dict[str, Any] = getattr(own, "kinds", {"": own})
    return {kind: each.runs for kind, each in kinds.items()}


def _targets(graph: Graph | TypedGraph) -> list[Tensor]:
    """The targets and masks of a graph, which its key says nothing of."""
    if isinstance(graph, TypedGraph):
        return [rows[name] for rows in graph.rows.values() for name in sorted(rows) if is_label(name)]
    data = graph.data
    names = sorted(data.keys())
    return [data[name] for name in names if is_label(name) and rows_of(data, name) == "node"]


def _settings(options: dict[str, Any]) -> str:
    """The options that all ranks must have alike, in words."""
    own = ("device", "num_workers", "partition", "cache_dir")
    return repr(sorted((name, value) for name, value in options.items() if name not in own))
