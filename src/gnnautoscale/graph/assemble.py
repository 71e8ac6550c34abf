"""Builds batches out of a graph: their nodes and halo, their edges, and the rows of all attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]

from gnnautoscale.graph.graph import Graph, is_start, rows_of

#: The parts of one batch.
PartGroup: TypeAlias = tuple[int, ...]


class BatchBuilder:
    """Builds a batch from some nodes of a graph: these nodes, their halo, and every edge into them."""

    def __init__(self, graph: Graph, members: list[Tensor], bidirectional: bool) -> None:
        self.graph = graph
        self._members = members
        self._bidirectional = bidirectional
        # Group the edges once here, not once per worker.
        _ = graph.incoming, graph.outgoing if bidirectional else None

    def of(self, graph: Graph) -> BatchBuilder:
        """A builder of the same parts of another graph."""
        return BatchBuilder(graph, self._members, self._bidirectional)

    def nodes(self, parts: PartGroup) -> Tensor:
        """The nodes of some parts, part by part, ``[num_nodes_in_parts]``."""
        return torch.cat([self._members[part] for part in parts])

    def from_parts(self, parts: PartGroup) -> Data:
        """The batch of some parts."""
        return self.from_nodes(self.nodes(parts))

    # The loader may keep a batch for training even if inference asks for it first, so it needs ordinary tensors.
    @torch.inference_mode(False)
    def from_nodes(self, nodes: Tensor) -> Data:
        """The batch of distinct nodes, ``[batch_size]``, in their order."""
        target, source, e_id = self.graph.incoming.into(nodes)
        neighbours = source
        if self._bidirectional:
            neighbours = torch.cat([source, self.graph.outgoing.into(nodes)[1]])
        outside = neighbours[self.graph.locate(nodes, neighbours) < 0]
        n_id = torch.cat([nodes, torch.unique(outside)])
        edge_index = torch.stack([self.graph.locate(n_id, source), target])
        return select_attributes(self.graph.data, n_id, nodes.numel(), e_id, edge_index)


def select_attributes(data: Data, n_id: Tensor, batch_size: int, e_id: Tensor, edge_index: Tensor) -> Data:
    """A subgraph with its rows of all node- and edge-level tensors; other attributes and the class stay as they are.

    The first ``batch_size`` of its nodes ``n_id``, ``[num_rows]``, are the batch's own. ``edge_index`` has its edges
    ``e_id``, ``[num_edges]``, as positions in ``n_id``.
    """
    subgraph = _as_one_graph(data)
    for name, value in data:
        level = rows_of(data, name)
        if level is not None and name != "edge_index":
            index = n_id if level == "node" else e_id
            subgraph[name] = value.index_select(data.__cat_dim__(name, value), index.to(value.device))
    subgraph.edge_index, subgraph.num_nodes = edge_index, n_id.numel()
    subgraph.n_id, subgraph.e_id, subgraph.batch_size = n_id, e_id, batch_size
    return subgraph


def _as_one_graph(data: Data) -> Data:
    """A copy that shares all attributes, of the same class.

    Only a ``Batch`` becomes the class of its graphs: its ``batch_size`` would hide that of a subgraph, and where each
    graph begins says nothing about nodes in another order.
    """
    single = copy.copy(data)
    if isinstance(data, Batch):
        object.__setattr__(single, "__class__", type(data).__bases__[-1])
        starts = [name for name, _ in data if is_start(data, name)]
        notes = [name for name in ("_num_graphs", "_slice_dict", "_inc_dict") if hasattr(data, name)]
        for name in (*starts, *notes):
            delattr(single, name)
    return single


def without_tensors(batch: Data) -> Data:
    """A copy of a batch that lacks its tensors: of the same class and with all other attributes."""
    bare = copy.copy(batch)
    for name, value in batch:
        if isinstance(value, Tensor):
            del bare[name]
    return bare


def write_counts(data: Data) -> list[int]:
    """Counters of in-place writes, one per tensor: equal lists mean unchanged data."""
    return [value._version for _, value in data if isinstance(value, Tensor) and not value.is_inference()]


def build_each(
    build: Callable[[Any], Data], jobs: Iterable[Any], num_workers: int, worker_seeds: torch.Generator
) -> Iterator[Data]:
    """Build one batch per job, in order, in worker processes or, if there are none, here.

    ``worker_seeds`` seeds the workers, so that they leave the global random state alone.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "generator": worker_seeds}
    yield from DataLoader(_Jobs(build), sampler=list(jobs), batch_size=None, collate_fn=_unchanged, **options)


class _Jobs(Dataset[Data]):
    def __init__(self, build: Callable[[Any], Data]) -> None:
        self._build = build

    def __getitem__(self, job: Any) -> Data:
        return self._build(job)


def _unchanged(batch: Data) -> Data:
    return batch
