"""Batches for graph-level prediction in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked, shown
from gnnautoscale.data import join_graphs
from gnnautoscale.errors import InputError
from gnnautoscale.graph import fingerprint, partition_graphs, without_targets
from gnnautoscale.ranks import RankLoader, current
from gnnautoscale.tasks.in_turn import InTurn
from gnnautoscale.tasks.pooling import PooledParts, pool_exactly
from gnnautoscale.tasks.readouts import ReadoutName, make_readout


class GraphLoader(RankLoader):
    """A :class:`HaloLoader` of many graphs, whose batches know which graphs their nodes belong to.

    A batch has ``graphs``, ``[num_graphs]``, the numbers of the graphs that it has nodes of; ``y``, their targets; and
    ``graph_weight``, ``[num_graphs]``, the share of each graph's nodes that the batch has: 1 for whole graphs.
    ``graph_id`` is the graph of each node. :meth:`pool` makes a row for each of these graphs. Weigh their losses by
    ``graph_weight``; gradients of all batches then add up to that of whole graphs.

    On several ranks it is a :class:`~gnnautoscale.ranks.RankLoader`, whose ranks may have parts of the same graph.
    :meth:`pool` tells the others what a rank's batch pools, so every rank calls it once with each batch.

    Args:
        graphs: A list of graphs, or joined ones, all of them on every rank; see :func:`gnnautoscale.data.join_graphs`.
        num_parts: Number of parts: groups of whole graphs, or pieces of large ones; see
            :func:`gnnautoscale.graph.partition_graphs`. As many as graphs make each graph a part.
        readout: As for :class:`~gnnautoscale.tasks.GraphPrediction`.
        width: Number of outputs of the model, which the readout ``"attention"`` needs to know.
        stale_dropout: Share of the last known parts that :meth:`pool` leaves out in training.
        options: Further arguments of :class:`HaloLoader`.

    Example:
        >>> import torch.nn.functional as F
        >>> from torch_geometric.nn import GIN
        >>> import gnnautoscale as gas
        >>> ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
        >>> graphs = [Data(x=torch.ones(6, 1), edge_index=ring, y=torch.tensor([i % 2])) for i in range(8)]
        >>> loader = gas.GraphLoader(graphs, num_parts=8, batch_size=2, shuffle=True, readout="mean")
        >>> model, head = gas.autoscale(GIN(1, 4, num_layers=2), loader.data), torch.nn.Linear(4, 2)
        >>> for batch in loader:
        ...     pooled = loader.pool(batch, model(batch.x, batch.edge_index))
        ...     losses = F.cross_entropy(head(pooled), batch.y, reduction="none")
        ...     loss = (losses * batch.graph_weight).sum() / batch.graph_weight.sum()
        ...     loss.backward()
        >>> loader.pool_all(gas.infer(model, loader)).shape
        torch.Size([8, 4])
    """

    @checked(num_parts={"least": 1}, width={"least": 1}, stale_dropout={"least": 0, "below": 1})
    def __init__(
        self,
        graphs: Any,
        num_parts: int | None = None,
        *,
        readout: ReadoutName | nn.Module = "sum",
        width: int = 64,
        stale_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        data = join_graphs(graphs)
        method = options.get("partition", "metis")
        if isinstance(method, str) and isinstance(num_parts, int):
            how = {name: options[name] for name in ("batch_size", "seed", "cache_dir") if name in options}
            labels = partition_graphs(data.edge_index, data.graph_id, num_parts, method=method, **how)  # type: ignore[arg-type]
            num_parts, options = None, {**options, "partition": labels}
        alone = current().size == 1
        super().__init__(data if alone else without_targets(data), num_parts, **options)
        #: What pools; train its weights, if it has some, with those of the model.
        self.readout = make_readout(readout, width)
        self._graph_id, self._y = data.graph_id, data.graph_y
        world = None if alone else self.world
        self._pooled = PooledParts(self.readout, data.graph_id, self.labels_of_all(), stale_dropout, world)
        self._sizes = torch.bincount(data.graph_id)
        self._turn = InTurn("loader.pool(batch, out)", needed=not alone)
        self.world.agree({"targets of graphs": fingerprint(data.graph_y)})

    def __iter__(self) -> Iterator[Data]:
        return self._turn.batches(map(self._with_graphs, super().__iter__()))

    @checked(out={"dims": 2})
    def pool(self, batch: Data, out: Tensor) -> Tensor:
        """Pool the graphs of a batch; what the batch has of them is remembered for other batches.

        Args:
            batch: A batch of this loader.
            out: The model's output for the batch's own nodes, ``[batch_size, width]``.

        Returns:
            A row for each of ``batch.graphs``, ``[num_graphs, pooled_width]``.
        """
        if "graph_pieces" not in batch:
            fix = "Pass a batch that iterating over this loader gave."
            raise InputError("batch must be one of this loader", got=shown(batch), fix=fix)
        nodes = self._own_nodes(batch).to(out.device)
        if out.size(0) != nodes.numel():
            rule = f"the output must have one row for each of the batch's {nodes.numel()} own nodes"
            raise InputError(rule, got=f"shape {tuple(out.shape)}", fix="Pass what the model returns for this batch.")
        self._turn.answer()
        self._pooled.tell(out, nodes)
        return self._pooled.pool(out, nodes, batch.graph_pieces)[0]

    @checked(out={"dims": 2})
    def pool_all(self, out: Tensor) -> Tensor:
        """Pool all graphs exactly, given the output for all nodes, ``[num_nodes, width]``.

        That is what ``gas.infer(model, loader)`` returns; on several ranks ``loader.gathered`` of it.
        """
        if out.size(0) != self._graph_id.numel():
            rule = f"the output must have one row for each of the {self._graph_id.numel()} nodes"
            fix = "Pass what gas.infer returns; on several ranks loader.gathered(...) of it."
            raise InputError(rule, got=f"shape {tuple(out.shape)}", fix=fix)
        return pool_exactly(self.readout, out, self._graph_id)

    def state_dict(self, done: int = 0) -> dict[str, Any]:
        """See :meth:`HaloLoader.state_dict`; with the last known pooled rows."""
        return {**super().state_dict(done), **self._pooled.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`HaloLoader.load_state_dict`."""
        super().load_state_dict(state)
        known = state.get("pooled")
        self._pooled.load_state_dict(state, self.device if known is None else known.device)

    def _with_graphs(self, batch: Data) -> Data:
        nodes = self._own_nodes(batch).cpu()
        table = self._pooled.graphs_of(nodes)
        graphs, device = table[:, 0], batch.n_id.device
        own = torch.bincount(self._graph_id[nodes], minlength=self._sizes.numel())[graphs]
        batch.graphs, batch.graph_pieces = graphs.to(device), table.to(device)
        batch.graph_weight = (own / self._sizes[graphs]).to(device)
        batch.y = self._y[graphs].to(device)
        if "graph_y" in batch:
            del batch.graph_y
        return batch
