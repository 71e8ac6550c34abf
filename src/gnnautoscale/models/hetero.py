"""Models of heterogeneous graphs, built on PyG's layers."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]
from torch_geometric.nn.module_dict import ModuleDict  # type: ignore[import-untyped]

from gnnautoscale._util import checked, option
from gnnautoscale.errors import InputError
from gnnautoscale.graph import EdgeType
from gnnautoscale.models.stack import NamedModel

Rows = dict[str, Tensor]


@checked()
@dataclass(frozen=True)
class Types:
    """What a model has to know of a heterogeneous graph.

    Attributes:
        counts: The number of nodes of each type.
        columns: The number of their features, 0 if they have none.
        relations: The types of edges.
    """

    counts: Mapping[str, int]
    columns: Mapping[str, int]
    relations: Sequence[EdgeType]

    @staticmethod
    @checked()
    def of(data: HeteroData) -> Types:
        """The types of a graph.

        Example:
            >>> import torch
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].x = 2, torch.ones(3, 5)
            >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
            >>> Types.of(data).columns
            {'author': 0, 'paper': 5}
        """
        columns = {}
        for kind, store in data.node_items():
            x = store.get("x")
            if x is not None and not (isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()):
                got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise InputError(f"x of {kind!r} must be floating, [nodes, features]", got=got, fix="Use x.float().")
            columns[kind] = 0 if x is None else int(x.size(1))
        counts = {kind: int(store.num_nodes) for kind, store in data.node_items()}
        return Types(counts, columns, list(data.edge_types))


@dataclass(eq=False, repr=False)
class TypedStack(NamedModel):
    """Layers between nodes of all types, each followed by ReLU and dropout.

    A linear layer for each type comes before the first of them, or a trained row for each node of a type without
    features; a linear layer after the last gives the output. Where no edge points to a type, its rows stay as they are.
    A subclass creates a layer in ``_make_layer``.
    """

    types: Types
    targets: Sequence[str]
    out_channels: int

    @abstractmethod
    def _make_layer(self) -> nn.Module:
        """Create a layer, from rows of all types and edges of all types to rows."""

    def _build(self) -> None:
        columns, hidden = self.types.columns, self.hidden
        self.first = ModuleDict({kind: nn.Linear(width, hidden) for kind, width in columns.items() if width})
        counts = {kind: count for kind, count in self.types.counts.items() if not columns[kind]}
        self.rows = ModuleDict({kind: nn.Embedding(max(count, 1), hidden) for kind, count in counts.items()})
        self.convs = nn.ModuleList(self._make_layer() for _ in range(self.layers))
        self.last = ModuleDict({kind: nn.Linear(hidden, self.out_channels) for kind in self.targets})

    def forward(
        self, edge_index_dict: dict[EdgeType, Tensor], n_id_dict: Rows, x_dict: Rows | None = None
    ) -> Tensor | Rows:
        """Compute the output of every node of the target types.

        Args:
            edge_index_dict: Sources and targets of each type of edges, ``[2, num_edges]``.
            n_id_dict: The numbers of the nodes of each type in the whole graph, ``[num_nodes]``.
            x_dict: Features of the types that have some, ``[num_nodes, features]``.

        Returns:
            ``[num_nodes, out_channels]`` for the only target type, or a dictionary of these.
        """
        given = {kind: x for kind, x in (x_dict or {}).items() if kind in self.first}  # others have no columns
        rows: Rows = {kind: self._drop(self.first[kind](x).relu()) for kind, x in given.items()}
        rows |= {kind: self.rows[kind](n_id) for kind, n_id in n_id_dict.items() if kind in self.rows}
        for conv in self.convs:
            found: dict[str, Tensor | None] = conv(rows, edge_index_dict)
            rows |= {kind: self._drop(x.relu()) for kind, x in found.items() if x is not None}
        out = {kind: self.last[kind](rows[kind]) for kind in self.targets}
        return out if len(out) > 1 else out[self.targets[0]]


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class HeteroSAGE(TypedStack):
    r"""GraphSAGE for each type of edges: :math:`h_v = \sum_r W_r h_v + V_r \, \textrm{mean}_{w \to_r v} h_w`.

    Args:
        types: The graph's types.
        targets: The types of nodes to compute outputs for.
        out_channels: Width of the output.
        {options}

    Example:
        >>> types = Types({"a": 3}, {"a": 2}, [("a", "to", "a")])
        >>> len(HeteroSAGE(types, ["a"], 4, layers=3).convs)
        3
    """

    def _make_layer(self) -> nn.Module:
        return _summed({kind: pyg.SAGEConv(self.hidden, self.hidden) for kind in self.types.relations})


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class HeteroRGCN(TypedStack):
    r"""R-GCN: :math:`h_v = W_{t(v)} h_v + \sum_r V_r \, \textrm{mean}_{w \to_r v} h_w`, with weights for each type.

    Args:
        types: The graph's types.
        targets: The types of nodes to compute outputs for.
        out_channels: Width of the output.
        {options}

    Example:
        >>> types = Types({"a": 3}, {"a": 2}, [("a", "to", "a")])
        >>> HeteroRGCN(types, ["a"], 4, hidden=8).convs[1].own["a"]
        Linear(in_features=8, out_features=8, bias=True)
    """

    def _make_layer(self) -> nn.Module:
        return _RelationalLayer(self.types, self.hidden)


def _summed(convs: dict[EdgeType, nn.Module]) -> nn.Module:
    """A layer for each type of edges, whose outputs add up."""
    with warnings.catch_warnings():  # types that no edge points to keep their rows
        warnings.filterwarnings("ignore", "There exist node types", UserWarning)
        made: nn.Module = pyg.HeteroConv(convs, aggr="sum")
    return made


class _RelationalLayer(nn.Module):
    """A layer of R-GCN."""

    def __init__(self, types: Types, width: int) -> None:
        super().__init__()
        convs = {kind: pyg.SAGEConv(width, width, root_weight=False, bias=False) for kind in types.relations}
        self.conv = _summed(convs)
        self.own = ModuleDict({kind: nn.Linear(width, width) for kind in types.counts})

    def forward(self, x_dict: Rows, edge_index_dict: dict[EdgeType, Tensor]) -> Rows:
        """Rows of the types that edges point to, ``[num_nodes, width]`` each."""
        found: Rows = self.conv(x_dict, edge_index_dict)
        return {kind: x + self.own[kind](x_dict[kind]) for kind, x in found.items()}


@dataclass(eq=False, repr=False, kw_only=True)
class _AttentionStack(TypedStack):
    """Attention layers between all types."""

    heads: int = option(4, "Number of attention heads, which divides the width.", least=1)

    def _attention(self, layer: Callable[..., Any]) -> Any:
        """One of PyG's layers."""
        if self.hidden % self.heads:
            rule = "the width of hidden layers must be a multiple of heads"
            raise InputError(rule, got=f"{self.hidden} and {self.heads}", fix="Change one of them.")
        kinds = list(self.types.counts), list(self.types.relations)
        try:
            return layer(self.hidden, self.hidden, kinds, heads=self.heads)
        except KeyError as error:  # PyG names modules after types
            rule = "attention layers need types whose names modules can have"
            fix = "Rename the type, or use another model."
            raise InputError(rule, got=str(error.args[0]), fix=fix) from error


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class HGT(_AttentionStack):
    """Heterogeneous graph transformer: attention between all types, with weights for each type of nodes and edges.

    Args:
        types: The graph's types.
        targets: The types of nodes to compute outputs for.
        out_channels: Width of the output.
        {options}

    Example:
        >>> types = Types({"a": 3}, {"a": 2}, [("a", "to", "a")])
        >>> HGT(types, ["a"], 4, hidden=8, heads=2).convs[0]
        HGTConv(-1, 8, heads=2)
    """

    def _make_layer(self) -> nn.Module:
        made = self._attention(pyg.HGTConv)
        for linear in (made.k_rel, made.v_rel):
            linear.__class__ = _LinearByType
        layer: nn.Module = made
        return layer


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class HAN(_AttentionStack):
    """Heterogeneous graph attention: attention along each type of edges, and between the types of edges into a node.

    The latter weighs types by a mean over all nodes.

    Args:
        types: The graph's types.
        targets: The types of nodes to compute outputs for.
        out_channels: Width of the output.
        {options}

    Example:
        >>> types = Types({"a": 3}, {"a": 2}, [("a", "to", "a")])
        >>> HAN(types, ["a"], 4, hidden=8, heads=2).convs[0]
        HANConv(8, heads=2)
    """

    def _make_layer(self) -> nn.Module:
        made: nn.Module = self._attention(pyg.HANConv)
        return made


class _LinearByType(pyg.HeteroLinear):  # type: ignore[misc]
    """PyG's layer, which without its C++ library writes the rows of one type after the other into one tensor.

    The backward pass then copies all rows for every type. Rows that are split and put together again are copied once.
    """

    def forward_naive(self, x: Tensor, type_ptr: Tensor) -> Tensor:
        """See PyG's layer: ``[num_rows, in_channels]``, sorted by type, to ``[num_rows, out_channels]``."""
        pieces = torch.split(x, type_ptr.diff().tolist())
        return torch.cat([rows @ weight for rows, weight in zip(pieces, self.weight.unbind(), strict=True)])
