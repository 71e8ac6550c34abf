"""Subgraphs of heterogeneous graphs, for the baselines: taken out of the joined graph, then sorted by type."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import for_later
from gnnautoscale.graph.subgraphs import Subgraphs
from gnnautoscale.graph.typed_graph import TypedGraph


class TypedSubgraphs:
    """Takes subgraphs out of a heterogeneous graph; they look like batches of ``NeighborLoader``.

    Nodes are those of the joined graph: of each type, its own numbers plus :attr:`TypedGraph.first`.

    Args:
        data: The whole graph. Changes from now on are not seen.
        graph: The same graph, if it exists already.
    """

    def __init__(self, data: HeteroData, graph: TypedGraph | None = None) -> None:
        self.graph = TypedGraph.of(data) if graph is None else graph
        self._joined = Subgraphs(self.graph.joined.data, self.graph.joined)
        sizes = [relation.edge_index.size(1) for relation in self.graph.relations.values()]
        self._relation = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

    @for_later
    def induced(self, nodes: Tensor) -> HeteroData:
        """The given nodes with all edges between them; see :meth:`Subgraphs.induced`.

        Example:
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
            >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [0, 1, 2]])
            >>> batch = TypedSubgraphs(data).induced(torch.tensor([1, 4, 2]))
            >>> batch["paper"].n_id, batch["author", "writes", "paper"].edge_index.tolist()
            (tensor([2, 0]), [[0], [0]])
        """
        return self._by_type(self._joined.induced(nodes))

    @for_later
    def sample(self, nodes: Tensor, fan_out: Sequence[int], generator: torch.Generator | None = None) -> HeteroData:
        """The given nodes with sampled neighbours: as many of each type of edges; see :meth:`Subgraphs.sample`."""
        return self._by_type(self._joined.sample(nodes, fan_out, generator, kinds=self._relation))

    def check(self, nodes: Tensor) -> Tensor:
        """See :meth:`Subgraphs.check`."""
        return self._joined.check(nodes)

    def _by_type(self, plain: Data) -> HeteroData:
        """Sort a part of the joined graph by type; own nodes come first among those of each type."""
        graph, batch = self.graph, copy.copy(self.graph.data)
        firsts = torch.tensor([*graph.first.values()])
        kind_of = torch.searchsorted(firsts, plain.n_id, right=True) - 1
        local = torch.empty_like(plain.n_id)
        own = torch.arange(plain.n_id.numel()) < plain.batch_size
        for number, (kind, first) in enumerate(graph.first.items()):
            rows, store = (kind_of == number).nonzero().squeeze(1), batch[kind]
            local[rows] = torch.arange(rows.numel())
            n_id = plain.n_id[rows] - first
            for name, value in graph.rows[kind].items():
                store[name] = _select(store, name, value, n_id)
            store.n_id, store.batch_size, store.num_nodes = n_id, int(own[rows].sum()), rows.numel()
        relation = self._relation[plain.e_id]
        for number, (ends, first_edge) in enumerate(graph.first_edge.items()):
            chosen, store = (relation == number).nonzero().squeeze(1), batch[ends]
            e_id = plain.e_id[chosen] - first_edge
            store.edge_index = local[plain.edge_index[:, chosen]]
            for name, value in graph.edge_rows[ends].items():
                store[name] = _select(store, name, value, e_id)
            store.e_id = e_id
        return batch


def _select(store: object, name: str, value: Tensor, index: Tensor) -> Tensor:
    parent = store._parent()  # type: ignore[attr-defined]
    return value.index_select(parent.__cat_dim__(name, value, store), index.to(value.device))
