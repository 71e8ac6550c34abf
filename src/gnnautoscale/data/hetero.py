"""Data sets of heterogeneous graphs: the targets are those of one type of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale.data.datasets import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import TypedGraph


@dataclass(frozen=True)
class TypedDataset(Dataset):
    """A heterogeneous graph, one type of whose nodes has targets.

    Its ``train``, ``val`` and ``test`` are the nodes of that type, without edges: all that a task looks at.

    Args:
        graph: The whole graph.
        target: The type of nodes with targets.
    """

    graph: HeteroData
    target: str

    @staticmethod
    def of_types(graph: HeteroData, target: str | None = None, name: str = "data") -> TypedDataset:
        """Make a data set; by default its targets are those of the only type of nodes that has ``y``.

        Example:
            >>> import torch
            >>> from torch_geometric.data import HeteroData
            >>> graph = HeteroData()
            >>> graph["author"].num_nodes, graph["paper"].num_nodes = 2, 3
            >>> graph["paper"].y = torch.tensor([0, 1, 0])
            >>> graph["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
            >>> TypedDataset.of_types(graph).target
            'paper'
        """
        named = [kind for kind, store in graph.node_items() if isinstance(store.get("y"), Tensor)]
        if target is None and len(named) != 1:
            raise InputError(
                "one type of nodes has targets",
                got=f"y for {', '.join(named)}" if named else "no y at all",
                fix="Pass gnnautoscale.data.TypedDataset.of_types(data, target=...), and set y and masks of that type.",
            )
        target = named[0] if target is None else target
        if target not in graph.node_types:
            rule = f"target is one of the types of nodes, {', '.join(graph.node_types)}"
            raise InputError(rule, got=repr(target), fix="Choose one of these.")
        nodes = nodes_of_type(graph, target)
        return TypedDataset(name, nodes, nodes, nodes, graph, target)

    @property
    def num_features(self) -> int:
        """Columns of ``x`` of the nodes with targets; 0 if they have none."""
        x = self.train.get("x")
        return int(x.size(1)) if isinstance(x, Tensor) and x.dim() > 1 else 0

    def check(self) -> None:
        """Refuse graphs that no model can be trained on; targets and splits are checked by the task."""
        TypedGraph.of(self.graph)


def nodes_of_type(graph: HeteroData, kind: str) -> Any:
    """The nodes of a type, of a graph or of a batch, as a plain graph without edges."""
    store = graph[kind]
    nodes = Data(**{name: value for name, value in store.items() if name != "num_nodes"})
    nodes.num_nodes = store.num_nodes
    return nodes
