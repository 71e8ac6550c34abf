"""The whole graph: checked and hashed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]

from gnnautoscale._util import Option, for_later
from gnnautoscale.errors import InputError
from gnnautoscale.graph.edges import EdgeTable, RowOrder
from gnnautoscale.graph.hashing import fingerprint
from gnnautoscale.graph.undirected import is_symmetric


class Graph:
    """A graph as its data was at one moment: checked, with edges in host memory, and with a key that identifies it.

    Its ``data`` is a copy that shares the tensors of the original, and keeps those that are replaced there later.
    """

    @for_later
    def __init__(self, data: Data) -> None:
        self.num_nodes = _number_of_nodes(data)
        _check_class(type(data))
        edge_index = data.edge_index
        if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.size(0) != 2:
            got = "no edge_index" if edge_index is None else _describe(edge_index)
            fix = "Store sources and targets as two rows; torch_geometric.utils.to_edge_index converts a matrix."
            raise InputError("edge_index must be a tensor of shape [2, num_edges]", got=got, fix=fix)
        if edge_index.dtype != torch.long:
            fix = "Convert it with edge_index.long()."
            raise InputError("edge_index must have dtype torch.int64", got=str(edge_index.dtype), fix=fix)
        _check_range("edge_index", edge_index, self.num_nodes, fix="Renumber the nodes, or set data.num_nodes.")
        self.edge_index = edge_index.cpu().contiguous()
        #: The same object for graphs with the same edges.
        self.edges_id = object()
        #: The numbers of nodes that layers see in edges, ``[num_nodes]``, if these are not the nodes' own.
        self.shown: Tensor | None = None
        self._freeze(data)
        _check_attributes(self.data, self.num_nodes, dict(iter(self.data)))
        inputs: dict[str, Tensor] = {name: self.data[name] for name in _inputs(self.data)}
        of_edges = {name for name in inputs if rows_of(self.data, name) == "edge"}
        self.edge_attributes = {name: value.cpu() for name, value in inputs.items() if name in of_edges}
        self.features = {name: value for name, value in inputs.items() if name not in of_edges}

    def _freeze(self, data: Data) -> None:
        self.data = data = copy.copy(data)
        # Counts of in-place writes; tensors of inference mode have none, and allow no writes outside it.
        tensors = {name: value for name, value in data if isinstance(value, Tensor) and not value.is_inference()}
        self._writes = {name: (value, value._version) for name, value in tensors.items()}
        self._inputs = [name for name in ("edge_index", *_inputs(data)) if name in tensors]
        self._rows = [*self._inputs, *(name for name in tensors if is_label(name))]

    @staticmethod
    def of(data: Data) -> Graph:
        """The graph of a ``Data``: checked, hashed and sorted once, and shared by everyone who asks for it.

        If something was changed in the ``Data`` since, the graph is made anew, from the old one as far as possible.

        Example:
            >>> data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
            >>> Graph.of(data) is Graph.of(data)
            True
        """
        known = _KNOWN.get(id(data))
        if known is None:
            made = Graph(data)
            finalize(data, _KNOWN.pop, id(data), None)
        else:
            changed = known._changes(data)
            if not changed:
                return known
            made = known._after(data, changed)
        _KNOWN[id(data)] = made
        return made

    def follow(self, data: Data) -> Graph:
        """The graph of the same data as it is now, which must have as many nodes; itself if nothing changed."""
        now = Graph.of(data)
        if now.num_nodes != self.num_nodes:
            raise InputError(
                f"the graph of a loader must keep its {self.num_nodes} nodes",
                got=f"{now.num_nodes} nodes in data now",
                fix="Make a new loader, or call gas.grow to keep a model's histories.",
            )
        return now

    def _changes(self, data: Data) -> set[str]:
        """The attributes that were replaced, written to, added or removed since this graph was made from the data."""
        now, then = dict(iter(data)), dict(iter(self.data))
        changed = now.keys() ^ then.keys()
        changed |= {name for name in now.keys() & then.keys() if now[name] is not then[name]}
        return changed | {name for name in self._writes if self._is_written(name)}

    def _is_written(self, name: str) -> bool:
        value, version = self._writes[name]
        return value._version != version

    def _after(self, data: Data, changed: set[str]) -> Graph:
        """The graph of the same data after some of its attributes changed."""
        now = copy.copy(data)
        inputs = {"edge_index", "num_nodes", *self.edge_attributes, *self.features, *_inputs(now)}
        if not changed & inputs:
            _check_attributes(now, self.num_nodes, [name for name, _ in now if name in changed])
            made = copy.copy(self)
            made._freeze(data)
            return made
        made = Graph(data)
        if "edge_index" not in changed and made.num_nodes == self.num_nodes:
            made.edge_index, made.edges_id = self.edge_index, self.edges_id
            known = ("node_order", "incoming", "outgoing", "is_symmetric", "shown")
            vars(made).update({name: value for name, value in vars(self).items() if name in known})
        return made

    def check_unwritten(self, *, labels: bool) -> None:
        """Refuse to go on after a tensor with rows of nodes or edges was written to: old and new rows would mix.

        Labels and masks count only if ``labels``.
        """
        for name in self._rows if labels else self._inputs:
            if self._is_written(name):
                raise InputError(
                    "data must not be written to while its batches are in use",
                    got=f"{name}, whose values were changed in place",
                    fix=f"Write between two epochs, or assign a new tensor (data.{name} = ...) that the next epoch "
                    "takes over; batches from before must not be used any more.",
                )

    @cached_property
    def key(self) -> str:
        """A fingerprint of edges, features and edge-level attributes: all that histories depend on besides weights."""
        named = sorted({**self.features, **self.edge_attributes}.items())
        names = ",".join(name for name, _ in named)
        return fingerprint(self.edge_index, *(value for _, value in named), nodes=self.num_nodes, names=names)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether every edge has a reverse edge."""
        return is_symmetric(self.edge_index, self.num_nodes)

    @cached_property
    def node_order(self) -> RowOrder:
        """The order of the nodes as it is."""
        return RowOrder(torch.arange(self.num_nodes))

    @cached_property
    def incoming(self) -> EdgeTable:
        """The edges grouped by target, in the order of the nodes."""
        return EdgeTable(self.edge_index, self.node_order)

    @cached_property
    def outgoing(self) -> EdgeTable:
        """The edges grouped by source, in the order of the nodes."""
        return EdgeTable(self.edge_index, self.node_order, target_row=0)

    @cached_property
    def _places(self) -> Tensor:
        return torch.full((self.num_nodes,), -1, dtype=torch.long)

    def locate(self, n_id: Tensor, nodes: Tensor) -> Tensor:
        """Position of each of ``nodes`` in ``n_id``, or -1 if absent; same shape as ``nodes``."""
        self._places[n_id] = torch.arange(n_id.numel())
        found = self._places[nodes]
        self._places[n_id] = -1
        return found


# Targets and splits of whole graphs that are joined in one.
_GRAPH_TARGETS = ("graph_y", "graph_split")
# Further targets of link prediction: splits of edges, relations of pairs, and PyG's triplets.
_LINK_TARGETS = ("edge_split", "edge_label_type", "src_index", "dst_pos_index", "dst_neg_index")
# Attributes that must have one row per edge; any other is one of edges if it happens to.
#: Attributes that have a row for each edge, by their names.
EDGE_LEVEL = ("edge_weight", "edge_attr", "edge_type")

# The graph of each Data object in use, by its id, so that a loader, a model and a training run share it.
_KNOWN: dict[int, Graph] = {}


def rows_of(data: Data, name: str) -> Literal["node", "edge"] | None:
    """Whether an attribute is a tensor with a row for every node or every edge, in the dimension ``__cat_dim__`` says.

    Three kinds of tensors have another number of rows, even if it is that of the nodes or edges by chance: the targets
    of link prediction, like ``edge_label_index`` and ``edge_label``, those of whole graphs, and in a ``Batch`` where
    each of its graphs begins.
    """
    if is_target(data, name) or not isinstance(data[name], Tensor) or is_start(data, name):
        return None
    return "node" if data.is_node_attr(name) else "edge" if data.is_edge_attr(name) else None


def is_target(data: Data, name: str) -> bool:
    """Whether an attribute holds targets of links or of whole graphs, by its name."""
    is_link = "edge_label_index" in name or (name.endswith("edge_label") and f"{name}_index" in data)
    return is_link or name in _LINK_TARGETS or name in _GRAPH_TARGETS


def without_targets(data: Any) -> Any:
    """A graph without targets of links and of whole graphs, which are no rows of nodes or edges; of any kind."""
    plain = copy.copy(data)
    for store in plain.stores:
        for name in [name for name in store.keys() if is_target(store, name)]:  # noqa: SIM118
            del store[name]
    return plain


def is_start(data: Data, name: str) -> bool:
    """Whether an attribute says where each graph of a ``Batch`` begins."""
    return isinstance(data, Batch) and (name == "ptr" or name.endswith("_ptr"))


def _inputs(data: Data) -> list[str]:
    """The tensors with a row for every node or edge that histories depend on: all but edges, labels and masks."""
    levels = {name: rows_of(data, name) for name, _ in data if name != "edge_index"}
    return [name for name, level in levels.items() if level == "edge" or (level == "node" and not is_label(name))]


def is_label(name: str) -> bool:
    """Whether an attribute is a target or a mask, by its name."""
    return name == "y" or name.startswith("y_") or name.endswith("_mask")


def check_nodes(nodes: Tensor, num_nodes: int) -> Tensor:
    """Refuse anything but a tensor of node indices, ``[count]``; returns it in host memory."""
    if not isinstance(nodes, Tensor) or nodes.dtype != torch.long or nodes.dim() != 1:
        got = f"{nodes.dtype} {tuple(nodes.shape)}" if isinstance(nodes, Tensor) else type(nodes).__name__
        rule = "nodes must be a tensor of node indices, int64 and one-dimensional"
        raise InputError(rule, got=got, fix="Use nodes.long().")
    _check_range("nodes", nodes, num_nodes, fix="Check the node numbering.")
    return nodes.cpu()


def check_distinct_nodes(nodes: Tensor, num_nodes: int) -> Tensor:
    """Refuse anything but a tensor of distinct node indices, ``[count]``; returns it in host memory."""
    nodes = check_nodes(nodes, num_nodes)
    if torch.unique(nodes).numel() != nodes.numel():
        raise InputError("a batch holds each node once", got="the same node twice", fix="Pass torch.unique(nodes).")
    return nodes


def _number_of_nodes(data: Data) -> int:
    """The number of nodes, after the tensors that it is counted by."""
    _check_kinds(data)
    count = data.num_nodes
    if count is None or (isinstance(count, int) and not count):
        got = f"num_nodes={count}"
        raise InputError("a graph needs at least one node", got=got, fix="Set data.x or data.num_nodes.")
    return int(Option("num_nodes", int, least=1).check(count))


def _check_kinds(data: Data) -> None:
    """Refuse what cannot be rows of nodes or edges: other objects than tensors, single numbers, no values."""
    for name in ("x", "edge_index", *EDGE_LEVEL):
        value = data.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.dim() == 0):
            got = "a single number" if isinstance(value, Tensor) else _describe(value)
            raise InputError(f"{name} must be a tensor of rows", got=got, fix="Give it one row per node or edge.")
    for name, value in data:
        if isinstance(value, Tensor) and value.is_meta:
            raise InputError(f"{name} must have values", got="a tensor on the device meta", fix="Load them first.")
        if isinstance(value, Tensor) and value.is_nested:
            fix = "Use torch.nested.to_padded_tensor."
            raise InputError(f"{name} must be a dense tensor", got="a nested one", fix=fix)
    weight = data.get("edge_weight")
    if weight is not None and (weight.dim() != 1 or weight.dtype == torch.bool or weight.is_complex()):
        got, fix = f"{weight.dtype} of shape {tuple(weight.shape)}", "Store several numbers per edge as edge_attr."
        raise InputError("edge_weight must hold one real number for each edge", got=got, fix=fix)


def _check_range(name: str, indices: Tensor, num_nodes: int, *, fix: str) -> None:
    low, high = (int(end) for end in torch.aminmax(indices)) if indices.numel() else (0, -1)
    if low < 0 or high >= num_nodes:
        got = f"values from {low} to {high}"
        raise InputError(f"{name} must hold indices from 0 to {num_nodes - 1}", got=got, fix=fix)


def _check_class(kind: type[Data]) -> None:
    """Refuse a class whose own attributes would hide those of batches; a ``Batch`` is known to."""
    hidden = [name for name in ("n_id", "e_id", "batch_size") if hasattr(kind, name)]
    if hidden and not issubclass(kind, Batch):
        rule = "batches have n_id, e_id and batch_size, which the class of the graph must not define"
        raise InputError(rule, got=f"{kind.__name__}.{hidden[0]}", fix="Give it another name.")


def _check_attributes(data: Data, num_nodes: int, names: Iterable[str]) -> None:
    """Check some attributes of a graph."""
    for name in names:
        value = data[name]
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        second = name != "edge_index" and "edge_index" in name and "label" not in name
        if second or (name in ("adj", "adj_t") and not dense):
            fix = (
                "Remove it, or join both in edge_index, with an edge_type that says which set an edge is from, and use "
                "layers that tell edges apart by it, such as RGCNConv."
            )
            raise InputError("a graph must have one set of edges, edge_index", got=f"also {name}", fix=fix)
        if not isinstance(value, Tensor):
            continue
        of_nodes, of_edges = name in ("x", "y") or name.endswith("_mask"), name in EDGE_LEVEL
        if (of_nodes or of_edges or rows_of(data, name)) and not dense:
            fix = f"Use data.{name} = data.{name}.to_dense()."
            raise InputError(f"{name} must be a dense tensor", got=str(value.layout), fix=fix)
        rows = num_nodes if of_nodes else data.num_edges
        # Labels and masks may have their nodes in another dimension; models need rows of features.
        dim = data.__cat_dim__(name, value) if is_label(name) else 0
        if (of_nodes or of_edges) and (value.dim() == 0 or not isinstance(dim, int) or value.size(dim) != rows):
            kind = "node" if of_nodes else "edge"
            rule = f"{name} must have one row for each of the {rows} {kind}s"
            raise InputError(rule, got=_describe(value), fix=f"Give it one row per {kind}, in {kind} order.")
        if value.is_floating_point() and (name == "x" or rows_of(data, name) == "edge"):
            _check_values(name, value)


def _check_values(name: str, value: Tensor) -> None:
    if value.requires_grad:
        fix = "Make it a parameter of the model, and look rows up with batch.n_id or batch.e_id."
        raise InputError(f"{name} must be data, not a parameter", got="a tensor that requires a gradient", fix=fix)
    # aminmax returns NaN if there is one; a mask of all values would take long on a large graph.
    if value.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(value))).all()):
        bad = ~torch.isfinite(value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)).all(1)
        rule = f"{name} must be finite, or histories would keep the bad value"
        got = f"NaN or infinity in {int(bad.sum())} rows, the first in row {int(bad.nonzero()[0])}"
        raise InputError(rule, got=got, fix="Replace or remove these values.")


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
