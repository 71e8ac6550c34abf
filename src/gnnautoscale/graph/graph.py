"""The whole graph as the library sees it: edges grouped by the node they point to, and slices of them."""

from __future__ import annotations

from functools import cached_property
from weakref import finalize

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.graph.partitioning import fingerprint


class EdgesByTarget:
    """Edges in the order they were given, and where to find the ones that point to a node.

    Args:
        edge_index: Sources and targets, ``[2, num_edges]``.
        num_nodes: Number of nodes of the graph.
        target_row: Which row of ``edge_index`` holds the nodes that aggregate.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, target_row: int = 1) -> None:
        self.edge_index = edge_index
        self.num_nodes = num_nodes
        self.target_row = target_row
        target = edge_index[target_row]
        # Stable, so that the edges of one target keep their order: a batch can then be compared edge by edge
        # with what a layer computed by itself.
        self._order = target.argsort(stable=True)
        count = torch.bincount(target, minlength=num_nodes)
        self._ptr = torch.cat([count.new_zeros(1), count.cumsum(0)])

    def into(self, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every edge that points to one of the nodes, grouped by node in the order of ``nodes``.

        Args:
            nodes: Node indices, ``[num_targets]``.

        Returns:
            For each edge the position of its target in ``nodes``, its source, and its position in
            ``edge_index``; each ``[num_edges_into_nodes]``.
        """
        start = self._ptr[nodes]
        count = self._ptr[nodes + 1] - start
        target = torch.repeat_interleave(count)
        first = count.cumsum(0) - count
        edge = self._order[torch.arange(target.numel()) + (start - first)[target]]
        return target, self.edge_index[1 - self.target_row, edge], edge


class Graph:
    """A graph's edges and edge-level attributes in host memory, and a key that recognises it and its features.

    Args:
        data: The graph as PyG holds it, with ``edge_index`` ``[2, num_edges]``.
    """

    @torch.inference_mode(False)  # written to later
    def __init__(self, data: Data) -> None:
        self.num_nodes = _num_nodes(data)
        edge_index = data.edge_index
        if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.size(0) != 2:
            raise InputError(
                "edge_index must be a tensor of shape [2, num_edges]",
                got="no edge_index" if edge_index is None else f"{_describe(edge_index)}",
                fix="Row 0 holds the sources, row 1 the targets; an adjacency matrix converts with "
                "torch_geometric.utils.to_edge_index.",
            )
        if edge_index.dtype != torch.long:
            raise InputError(
                "edge_index must have dtype torch.int64",
                got=f"{edge_index.dtype}",
                fix="Convert it with edge_index.long().",
            )
        low, high = (int(end) for end in torch.aminmax(edge_index)) if edge_index.numel() else (0, 0)
        if low < 0 or high >= self.num_nodes:
            raise InputError(
                f"edge_index must hold node indices from 0 to {self.num_nodes - 1}",
                got=f"values from {low} to {high}",
                fix="Number the nodes from 0, or set data.num_nodes to the number of nodes.",
            )
        self.edge_index = edge_index.cpu().contiguous()
        self.edge_attributes = {
            name: value.cpu()
            for name, value in data
            if name != "edge_index" and isinstance(value, Tensor) and data.is_edge_attr(name)
        }
        _check_attributes(data, self.num_nodes, self.edge_attributes)
        self.features = {
            name: value
            for name, value in data
            if isinstance(value, Tensor) and data.is_node_attr(name) and name != "y" and not name.endswith("_mask")
        }
        self._local = torch.full((self.num_nodes,), -1, dtype=torch.long)
        self._tensors = {name: (value, _version(value)) for name, value in data if isinstance(value, Tensor)}

    @staticmethod
    def of(data: Data) -> Graph:
        """The graph that a ``Data`` holds: checked, hashed and sorted once, whoever asks for it.

        A graph is made anew once a tensor of the ``Data`` was replaced or written to.

        Example:
            >>> data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
            >>> Graph.of(data) is Graph.of(data)
            True
        """
        known = _KNOWN.get(id(data))
        if known is not None and known._is_of(data):
            return known
        made = Graph(data)
        if known is None:
            finalize(data, _KNOWN.pop, id(data), None)
        _KNOWN[id(data)] = made
        return made

    def _is_of(self, data: Data) -> bool:
        """Whether the data holds the very tensors that this graph was made from, as they were then."""
        now = {name: value for name, value in data if isinstance(value, Tensor)}
        return (
            data.num_nodes == self.num_nodes
            and now.keys() == self._tensors.keys()
            and all(
                now[name] is tensor and _version(tensor) == version for name, (tensor, version) in self._tensors.items()
            )
        )

    @cached_property
    def key(self) -> str:
        """A fingerprint of edges, features and edge-level attributes: what histories depend on besides weights."""
        named = sorted({**self.features, **self.edge_attributes}.items())
        names = ",".join(name for name, _ in named)
        return fingerprint(self.edge_index, *(value for _, value in named), nodes=self.num_nodes, names=names)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether the reverse of every edge is an edge too."""
        # The sum of a random hash of (source, target) over all edges equals that of (target, source) if the edges
        # are the same in both directions, and by chance hardly ever: no sorting is needed.
        generator = torch.Generator().manual_seed(0)
        first, second = (torch.randint(-(2**62), 2**62, (self.num_nodes,), generator=generator) for _ in range(2))
        source, target = self.edge_index
        return bool((first[source] * second[target]).sum() == (first[target] * second[source]).sum())

    @cached_property
    def incoming(self) -> EdgesByTarget:
        """The edges grouped by target."""
        return EdgesByTarget(self.edge_index, self.num_nodes)

    @cached_property
    def outgoing(self) -> EdgesByTarget:
        """The edges grouped by source."""
        return EdgesByTarget(self.edge_index, self.num_nodes, target_row=0)

    def locate(self, n_id: Tensor, nodes: Tensor) -> Tensor:
        """Position of each of ``nodes`` in ``n_id``, or -1 where it is not there; same shape as ``nodes``."""
        self._local[n_id] = torch.arange(n_id.numel())
        found = self._local[nodes]
        self._local[n_id] = -1
        return found


# Attributes that must have one row per edge; any other is one of edges if it happens to.
_EDGE_LEVEL = ("edge_weight", "edge_attr", "edge_type")

# The graphs of all data in use, by its identity, so that a loader, a model and a training run share one.
_KNOWN: dict[int, Graph] = {}


def _version(tensor: Tensor) -> int:
    """Counts in-place changes; tensors made in inference mode do not count, and cannot be changed outside of it."""
    return 0 if tensor.is_inference() else tensor._version


def _num_nodes(data: Data) -> int:
    num_nodes = data.num_nodes
    if not num_nodes:
        raise InputError(
            "a graph needs at least one node", got=f"num_nodes={num_nodes}", fix="Set data.x or data.num_nodes."
        )
    return int(num_nodes)


def _check_attributes(data: Data, num_nodes: int, edge_attributes: dict[str, Tensor]) -> None:
    for name, value in data:
        if not isinstance(value, Tensor):
            continue
        of_nodes, of_edges = name in ("x", "y") or name.endswith("_mask"), name in _EDGE_LEVEL
        if (of_nodes or of_edges) and value.layout != torch.strided:
            raise InputError(f"{name} must be a dense tensor", got=str(value.layout), fix=f"Use {name}.to_dense().")
        rows = num_nodes if of_nodes else data.num_edges
        if (of_nodes or of_edges) and (value.dim() == 0 or value.size(0) != rows):
            kind = "node" if of_nodes else "edge"
            raise InputError(
                f"{name} must have one row for each of the {rows} {kind}s",
                got=_describe(value),
                fix=f"Give it one row per {kind}, in the order of the {kind}s.",
            )
    for name, value in (*edge_attributes.items(), ("x", data.x)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.requires_grad:
            raise InputError(
                f"{name} must be data, not something to train",
                got="a tensor that requires a gradient",
                fix="Make it a parameter of the model and pass batch.n_id or batch.e_id to look rows up.",
            )
        # NaN is both the least and the greatest value; a mask of all values would take long for a large graph.
        if value.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(value))).all()):
            bad = ~torch.isfinite(value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)).all(1)
            raise InputError(
                f"{name} must be finite, since a bad value would stay in the histories",
                got=f"NaN or infinity in {int(bad.sum())} rows, the first in row {int(bad.nonzero()[0])}",
                fix="Fill in or remove these values.",
            )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
