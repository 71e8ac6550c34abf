"""Batches for link prediction in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked, shown
from gnnautoscale.errors import InputError
from gnnautoscale.graph import fingerprint, without_targets
from gnnautoscale.history import History, Medium, open_history
from gnnautoscale.ranks import RankLoader, current
from gnnautoscale.tasks.in_turn import InTurn
from gnnautoscale.tasks.link_rows import RankMeetings
from gnnautoscale.tasks.pairs import PAIR_NAMES, EdgeKind, Meetings, Pairs, check_messages, known_keys
from gnnautoscale.tasks.ranking import KnownEdges

# The place of nodes that are in no batch of the step, and of those in the batches of other ranks.
_ABSENT, _ELSEWHERE = -1, -2


class LinkLoader(RankLoader):
    """A :class:`HaloLoader` whose batches hold the pairs that touch their nodes.

    A batch has ``edge_label_index``, ``[2, num_pairs]``, ``edge_label``, ``[num_pairs]``, 1.0 for an edge and 0.0 for
    none, ``edge_label_weight``, ``[num_pairs]``, and for typed edges ``edge_label_type``. Ends are rows of what
    :meth:`rows` returns: the model's output for the batch's own nodes, and below it the last known output of other ends
    of edges, which are constants. An edge whose ends are in different batches is in both. Pairs without an edge are in
    batches that hold both ends; weights make up for nodes that meet rarely, so that they stand for all pairs of the
    graph. Batches must therefore consist of several parts, drawn anew in every epoch.

    On several ranks it is a :class:`~gnnautoscale.ranks.RankLoader`: a rank's batch also has pairs between its nodes
    and those of the other ranks' batches, whose outputs :meth:`rows` exchanges. So every rank calls it once with each
    batch.

    Args:
        data: The graph, with pairs in PyG's conventions; see :class:`~gnnautoscale.tasks.LinkPrediction`. Every rank
            has all of it.
        num_parts: Number of parts.
        negatives: Number of pairs without an edge to draw for each edge: two nodes of the batch, or for typed edges an
            edge with one end replaced. By default 0 if the data hold some, else 1.
        storage: Where the last known outputs are: in the memory of the ``"device"``, or of the ``"host"``.
        reconstruct: Whether positives may be edges that pass messages, as in graph autoencoders.
        options: Further arguments of :class:`HaloLoader`.

    Example:
        >>> import torch.nn.functional as F
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> from torch_geometric.transforms import RandomLinkSplit
        >>> import gnnautoscale as gas
        >>> data, _, _ = RandomLinkSplit(is_undirected=True, disjoint_train_ratio=0.3)(KarateClub()[0])
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2), data)
        >>> loader = gas.LinkLoader(data, num_parts=8, batch_size=4, shuffle=True)
        >>> for batch in loader:
        ...     rows = loader.rows(batch, model(batch.x, batch.edge_index))
        ...     source, target = rows[batch.edge_label_index]
        ...     scores, weight = (source * target).sum(dim=1), batch.edge_label_weight
        ...     loss = F.binary_cross_entropy_with_logits(scores, batch.edge_label, weight)
        ...     loss.backward()
    """

    @checked(num_parts={"least": 1}, negatives={"least": 0}, storage={"fix": "Use 'host'."})
    def __init__(
        self,
        data: Data,
        num_parts: int | None = None,
        *,
        negatives: int | None = None,
        storage: Literal["device", "host"] = "device",
        reconstruct: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(data if current().size == 1 else without_targets(data), num_parts, **options)
        self._pairs = Pairs.of(data)
        edges = EdgeKind.of([data])
        if not reconstruct:
            check_messages("train", self._pairs, "train", data, edges)
        self._draws = negatives if negatives is not None else int(self._pairs.are_edges)
        self._known = KnownEdges(known_keys(data, edges), self._pairs.num_nodes)
        self._meetings = self._meet()
        self._random = torch.Generator().manual_seed(self._drawing_seed())
        self._place = torch.full((self._pairs.num_nodes,), _ABSENT, dtype=torch.long)
        self._storage: Medium = storage
        self._outputs: History | None = None
        self._turn = InTurn("loader.rows(batch, out)", needed=self.shard is not None)
        self._parts_of_ranks: list[tuple[Tensor, ...]] = []
        if self.shard is not None:
            self.world.agree({"pairs": fingerprint(self._pairs.ends, self._pairs.label, self._pairs.relation)})
            self._parts_of_ranks = [nodes.split(sizes) for nodes, sizes in self.everyone(self._own_parts())]

    def _meet(self) -> Meetings:
        if not self._draws and self._pairs.are_edges:  # then no two nodes have to meet
            return Meetings(torch.zeros(self._pairs.num_nodes, dtype=torch.long), 1.0)
        return Meetings.of(self) if self.shard is None else RankMeetings.of_ranks(self)

    def _own_parts(self) -> tuple[Tensor, list[int]]:
        """The nodes of this rank, part by part, and the sizes of its parts."""
        return self.nodes, self.shard.starts.diff().tolist()

    def __iter__(self) -> Iterator[Data]:
        batches = enumerate(super().__iter__())
        return self._turn.batches(self._with_pairs(batch, self._elsewhere(step)) for step, batch in batches)

    def _elsewhere(self, step: int) -> Tensor:
        """The nodes of the other ranks' batches in a step of this epoch, ``[count]``."""
        found = [self._place.new_empty(0)]
        for rank, parts in enumerate([] if self.steps is None else self.steps.parts_in_step(step)):
            found += [self._parts_of_ranks[rank][part] for part in parts if rank != self.world.rank]
        return torch.cat(found)

    @checked(out={"dims": 2})
    def rows(self, batch: Data, out: Tensor) -> Tensor:
        """Rows that the batch's ``edge_label_index`` points to; the given ones are remembered for other batches.

        Args:
            batch: A batch of this loader.
            out: The model's output for the batch's own nodes, ``[batch_size, width]``.

        Returns:
            These, and the last known outputs of the pairs' other ends, ``[num_rows, width]``; those in the batches of
            other ranks are of this step.
        """
        if "outside" not in batch:
            fix = "Pass a batch that iterating over this loader gave."
            raise InputError("batch must be one of this loader", got=shown(batch), fix=fix)
        own, outside = self._own_nodes(batch), batch.outside
        if out.dim() != 2 or out.size(0) != own.numel():
            rule = f"the output must have one row for each of the batch's {own.numel()} own nodes"
            raise InputError(rule, got=f"shape {tuple(out.shape)}", fix="Pass what the model returns for this batch.")
        if self._outputs is None:
            size = self._pairs.num_nodes
            self._outputs = open_history(self._storage, size, out.size(1), out.dtype, device=out.device)
        self._turn.answer()
        self._outputs.push(out, own.to(out.device))
        if self.shard is not None:
            others, theirs = self.world.rows_of_others(own.to(out.device), out)
            self._outputs.push(theirs, others)
        return torch.cat([out, self._outputs.pull(outside, device=out.device, dtype=out.dtype)])

    def state_dict(self, done: int = 0) -> dict[str, Any]:
        """See :meth:`HaloLoader.state_dict`; with the last known outputs, and what negatives are drawn from."""
        outputs = None if self._outputs is None else self._outputs.raw
        return {**super().state_dict(done), "negatives": self._random.get_state(), "outputs": outputs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`HaloLoader.load_state_dict`."""
        super().load_state_dict(state)
        self._random.set_state(state["negatives"])
        self._outputs, raw = None, state["outputs"]
        if raw is not None:
            self._outputs = open_history(self._storage, raw.size(0), raw.size(1), raw.dtype, device=raw.device)
            self._outputs.raw.copy_(raw)

    def _with_pairs(self, batch: Data, elsewhere: Tensor) -> Data:
        """Add the pairs of a batch, by rows of the batch and of the nodes outside that they need."""
        nodes = self._own_nodes(batch).cpu()
        self._place[elsewhere], self._place[nodes] = _ELSEWHERE, torch.arange(nodes.numel())
        pairs, found = self._pairs, self._pairs.touching(nodes)
        found = found[pairs.label[found] | (self._place[pairs.ends[:, found]] != _ABSENT).all(dim=0)]
        (source, target), edge = pairs.ends[:, found], pairs.label[found]
        weight = torch.where(edge, 1.0, self._meetings.weight(source, target))
        relation = torch.zeros_like(found) if pairs.relation is None else pairs.relation[found]
        given = [source, target, edge.float(), weight, relation]
        if self._draws:
            drawn = self._draw(nodes, elsewhere, source[edge], target[edge], relation[edge])
            given = [torch.cat(both) for both in zip(given, drawn, strict=True)]
        source, target, label, weight, relation = given
        ends = torch.stack([source, target])
        outside: Tensor = torch.unique(ends[self._place[ends] < 0])
        self._place[outside] = nodes.numel() + torch.arange(outside.numel())
        local = self._place[ends]
        for those in (elsewhere, nodes, outside):
            self._place[those] = _ABSENT
        for name in PAIR_NAMES:
            if name in batch:
                del batch[name]
        added = {"edge_label_index": local, "edge_label": label, "edge_label_weight": weight, "outside": outside}
        if pairs.relation is not None:
            added["edge_label_type"] = relation
        for name, value in added.items():
            batch[name] = value.to(batch.n_id.device)
        return batch

    def _draw(self, nodes: Tensor, elsewhere: Tensor, source: Tensor, target: Tensor, relation: Tensor) -> list[Tensor]:
        """Draw pairs without an edge for edges: sources, targets, labels, weights and relations.

        Those with one end ``elsewhere`` are drawn by two ranks, each of which learns about its own end only. So they
        count double, like edges, which are in two batches.
        """
        source, target, relation = (each.repeat(self._draws) for each in (source, target, relation))
        total, shape = float(source.numel()), source.shape
        if self._pairs.relation is None:
            pools = nodes, torch.cat([nodes, elsewhere])
            first, second = (pool[torch.randint(pool.numel(), shape, generator=self._random)] for pool in pools)
            if elsewhere.numel():
                turned = torch.rand(shape, generator=self._random) < 0.5
                first, second = torch.where(turned, second, first), torch.where(turned, first, second)
        else:
            # Another rank does not know the edge, and could not do its half for an end there.
            first, second = (nodes[torch.randint(nodes.numel(), shape, generator=self._random)] for _ in range(2))
            backwards = torch.rand(shape, generator=self._random) < 0.5
            source_in, target_in = self._place[source] >= 0, self._place[target] >= 0
            backwards = torch.where(source_in & target_in, backwards, target_in)
            first, second = torch.where(backwards, first, source), torch.where(backwards, target, second)
        kind = None if self._pairs.relation is None else relation
        kept = ~self._known.contain(first, second, kind) & (first != second)
        first, second, relation = first[kept], second[kept], relation[kept]
        weight = self._meetings.weight(first, second)
        across = (self._place[torch.stack([first, second])] < 0).any(dim=0)
        if self._pairs.relation is None:
            weight = torch.where(across, 2 * weight, weight)
        weight = weight * (total / weight.sum().clamp(min=1e-12))
        return [first, second, torch.zeros_like(weight), weight, relation]
