"""The small graph that models are tried on, and a model's arguments for it."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.forward import ArgumentKind, Arguments, GraphMemory, has_rows
from gnnautoscale.graph import BatchInfo, BatchTensor, HaloLoader

# A ring with chords and one self-loop. Halo nodes have neighbours beyond the halo, so their degrees in a batch are
# wrong; no number of edges equals a number of nodes.
NUM_NODES = 13
_PAIRS = [(i, (i + 1) % NUM_NODES) for i in range(NUM_NODES)]
_PAIRS += [(0, 5), (1, 7), (2, 9), (11, 3), (8, 4), (12, 6), (0, 10)]
_PARTS = (0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2)


class TrialGraph:
    """The trial graph, as a whole and in parts, with features and edge attributes like those of a real batch."""

    def __init__(self, info: BatchInfo, arguments: BoundArguments, device: torch.device) -> None:
        self.info, self.call, self.device = info, arguments, device
        # Symmetric if the real graph is, because a model may rely on that.
        pairs = [*_PAIRS, *((b, a) for a, b in _PAIRS)] if info.graph.is_symmetric else _PAIRS
        # Sorted by target, as some aggregations require.
        edge_index = torch.tensor(sorted([*pairs, (2, 2)], key=lambda pair: pair[1])).t().contiguous()
        data = Data(edge_index=edge_index, num_nodes=NUM_NODES)
        for name, value in info.graph.edge_attributes.items():
            data[name] = _sample(value, edge_index.size(1), edge_level=True)
        self._names: dict[int, str] = {}
        for parameter, value in arguments.arguments.items():
            for leaf in _leaves(value):
                if isinstance(leaf, Data):
                    self._add_batch(data, leaf)
                elif not isinstance(leaf, BatchTensor):
                    self._add(data, f"{parameter} {len(self._names)}", leaf)
        self.whole = HaloLoader(data, partition=torch.zeros(NUM_NODES, dtype=torch.long))
        # Bidirectional, because the real loader may be; if a layer needs that and it is not, the layer says so later.
        self.parts = HaloLoader(data, partition=torch.tensor(_PARTS), bidirectional=True)
        self.memory = GraphMemory(self.parts.graph, NUM_NODES, "device", None)

    def _add_batch(self, data: Data, batch: Data) -> None:
        for name, value in batch:
            if isinstance(value, BatchTensor) or name in ("e_id", "batch_size", "num_nodes"):
                continue
            if not isinstance(value, Tensor) or not self._add(data, name, value):
                data[name] = value

    def _add(self, data: Data, name: str, value: Tensor) -> bool:
        """Add rows like the given ones to the trial graph, if they belong to nodes or edges."""
        kind = kind_of(value, self.info.num_rows, self.info.e_id.numel(), name)
        if kind == "other":
            return False
        num_rows = NUM_NODES if kind == "node" else data.edge_index.size(1)
        data[name] = _sample(value, num_rows, edge_level=kind == "edge").cpu()
        self._names[id(value)] = name
        return True

    def arguments(self, batch: Data) -> Arguments:
        """The call's arguments, taken from a batch of the trial graph."""
        # A copy, because the model may write into its inputs.
        batch = batch.clone().to(str(self.device))

        def recast(value: Any) -> Any:
            if isinstance(value, BatchTensor):
                # A node may index a table of the real graph's size, which can be smaller than the trial graph.
                own = batch.n_id % self.info.graph.num_nodes if value.attribute == "n_id" else batch[value.attribute]
                return own if value.is_original and not value.requires_grad else own.clone().detach().mul(1)
            if isinstance(value, Tensor):
                name = self._names.get(id(value))
                if name is None:
                    return value
                found = batch[name]
                return found.plain if isinstance(found, BatchTensor) else found
            if isinstance(value, Data):
                return batch
            if isinstance(value, (tuple, list)):
                return type(value)(recast(item) for item in value)
            if isinstance(value, dict):
                return {name: recast(item) for name, item in value.items()}
            return value

        return recast(self.call.args), recast(self.call.kwargs)


def kind_of(value: Tensor, num_nodes: int, num_edges: int, name: str = "") -> ArgumentKind:
    """Whether a tensor's rows belong to nodes, to edges or to neither."""
    if not has_rows(value, num_nodes, num_edges):
        return "other"
    # With as many edges as nodes, only the name can tell.
    return "node" if value.size(0) == num_nodes and not (num_nodes == num_edges and "edge" in name) else "edge"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, Data)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def _sample(value: Tensor, num_rows: int, *, edge_level: bool) -> Tensor:
    """Rows like the given ones: random if they are floating-point numbers, otherwise taken from them."""
    shape = (num_rows, *value.shape[1:])
    if value.is_floating_point():
        # Positive edge weights, because layers take roots of their sums.
        rows = torch.rand(shape) + 0.5 if edge_level else torch.randn(shape)
        return rows.to(value.device, value.dtype)
    if not value.size(0):
        return value.new_zeros(shape)
    return value.detach()[torch.arange(num_rows, device=value.device) % value.size(0)]
