"""Batches for link prediction in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked, shown
from gnnautoscale.errors import InputError
from gnnautoscale.graph import HaloLoader
from gnnautoscale.history import History, Medium, open_history
from gnnautoscale.tasks.pairs import PAIR_NAMES, EdgeKind, Meetings, Pairs, check_messages, known_keys
from gnnautoscale.tasks.ranking import KnownEdges


class LinkLoader(HaloLoader):
    """A :class:`HaloLoader` whose batches hold the pairs that touch their nodes.

    A batch has ``edge_label_index``, ``[2, num_pairs]``, ``edge_label``, ``[num_pairs]``, 1.0 for an edge and 0.0 for
    none, ``edge_label_weight``, ``[num_pairs]``, and for typed edges ``edge_label_type``. Ends are rows of what
    :meth:`rows` returns: the model's output for the batch's own nodes, and below it the last known output of other ends
    of edges, which are constants. An edge whose ends are in different batches is in both. Pairs without an edge are in
    batches that hold both ends; weights make up for nodes that meet rarely, so that they stand for all pairs of the
    graph. Batches must therefore consist of several parts, drawn anew in every epoch.

    Args:
        data: The graph, with pairs in PyG's conventions; see :class:`~gnnautoscale.tasks.LinkPrediction`.
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
        super().__init__(data, num_parts, **options)
        self._pairs = Pairs.of(data)
        edges = EdgeKind.of([data])
        if not reconstruct:
            check_messages("train", self._pairs, "train", data, edges)
        self._draws = negatives if negatives is not None else int(self._pairs.are_edges)
        self._known = KnownEdges(known_keys(data, edges), self.graph.num_nodes)
        needs_others = self._draws > 0 or not self._pairs.are_edges
        self._meetings = Meetings.of(self) if needs_others else Meetings(self.labels, 1.0)
        self._random = torch.Generator().manual_seed(self.seed)
        self._place = torch.full((self.graph.num_nodes,), -1, dtype=torch.long)
        self._storage: Medium = storage
        self._outputs: History | None = None

    def __iter__(self) -> Iterator[Data]:
        return map(self._with_pairs, super().__iter__())

    @checked(out={"dims": 2})
    def rows(self, batch: Data, out: Tensor) -> Tensor:
        """Rows that the batch's ``edge_label_index`` points to; the given ones are remembered for other batches.

        Args:
            batch: A batch of this loader.
            out: The model's output for the batch's own nodes, ``[batch_size, width]``.

        Returns:
            These, and the last known outputs of the pairs' other ends, ``[num_rows, width]``.
        """
        if "outside" not in batch:
            fix = "Pass a batch that iterating over this loader gave."
            raise InputError("batch must be one of this loader", got=shown(batch), fix=fix)
        own, outside = batch.n_id[: batch.batch_size].as_subclass(Tensor), batch.outside
        if out.dim() != 2 or out.size(0) != own.numel():
            rule = f"the output must have one row for each of the batch's {own.numel()} own nodes"
            raise InputError(rule, got=f"shape {tuple(out.shape)}", fix="Pass what the model returns for this batch.")
        if self._outputs is None:
            size = self.graph.num_nodes
            self._outputs = open_history(self._storage, size, out.size(1), out.dtype, device=out.device)
        self._outputs.push(out, own)
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

    def _with_pairs(self, batch: Data) -> Data:
        """Add the pairs of a batch, by rows of the batch and of the nodes outside that they need."""
        nodes = batch.n_id[: batch.batch_size].cpu().as_subclass(Tensor)
        self._place[nodes] = torch.arange(nodes.numel())
        pairs, found = self._pairs, self._pairs.touching(nodes)
        found = found[pairs.label[found] | (self._place[pairs.ends[:, found]] >= 0).all(dim=0)]
        (source, target), edge = pairs.ends[:, found], pairs.label[found]
        weight = torch.where(edge, 1.0, self._meetings.weight(source, target))
        relation = torch.zeros_like(found) if pairs.relation is None else pairs.relation[found]
        given = [source, target, edge.float(), weight, relation]
        if self._draws:
            drawn = self._draw(nodes, source[edge], target[edge], relation[edge])
            given = [torch.cat(both) for both in zip(given, drawn, strict=True)]
        source, target, label, weight, relation = given
        ends = torch.stack([source, target])
        outside: Tensor = torch.unique(ends[self._place[ends] < 0])
        self._place[outside] = nodes.numel() + torch.arange(outside.numel())
        local = self._place[ends]
        self._place[nodes] = self._place[outside] = -1
        for name in PAIR_NAMES:
            if name in batch:
                del batch[name]
        added = {"edge_label_index": local, "edge_label": label, "edge_label_weight": weight, "outside": outside}
        if pairs.relation is not None:
            added["edge_label_type"] = relation
        for name, value in added.items():
            batch[name] = value.to(batch.n_id.device)
        return batch

    def _draw(self, nodes: Tensor, source: Tensor, target: Tensor, relation: Tensor) -> list[Tensor]:
        """Draw pairs without an edge for edges: sources, targets, labels, weights and relations."""
        source, target, relation = (each.repeat(self._draws) for each in (source, target, relation))
        total, shape = float(source.numel()), source.shape
        first, second = (nodes[torch.randint(nodes.numel(), shape, generator=self._random)] for _ in range(2))
        if self._pairs.relation is not None:
            backwards = torch.rand(shape, generator=self._random) < 0.5
            source_in, target_in = self._place[source] >= 0, self._place[target] >= 0
            backwards = torch.where(source_in & target_in, backwards, target_in)
            first, second = torch.where(backwards, first, source), torch.where(backwards, target, second)
        kind = None if self._pairs.relation is None else relation
        kept = ~self._known.contain(first, second, kind) & (first != second)
        first, second, relation = first[kept], second[kept], relation[kept]
        weight = self._meetings.weight(first, second)
        weight = weight * (total / weight.sum().clamp(min=1e-12))
        return [first, second, torch.zeros_like(weight), weight, relation]
