"""Heterogeneous graphs: nodes and edges of several types, checked and joined to one plain graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import for_later
from gnnautoscale.errors import InputError
from gnnautoscale.graph.graph import EDGE_LEVEL, Graph, is_label
from gnnautoscale.graph.hashing import fingerprint

#: A type of edges: the type of their sources, a relation, and the type of their targets.
EdgeType: TypeAlias = tuple[str, str, str]
#: An attribute of nodes that are a part of a larger graph: their numbers there, which batches show as ``n_id``.
WHOLE_ID = "whole_id"


class TypedGraph:
    """A heterogeneous graph as its data was at one moment: checked, and joined to one plain graph.

    Attributes:
        counts: The number of nodes of each type.
        first: The number of each type's first node in the joined graph.
        relations: For each type of edges a graph of its own, with their attributes. If sources and targets are of
            different types, its nodes are whichever are more, and only its edges mean something.
        first_edge: The number of each type's first edge in the joined graph.
        joined: All nodes and edges, without attributes.
    """

    @for_later
    def __init__(self, data: HeteroData) -> None:
        _check_dense(data)
        self.data = copy.copy(data)
        self.counts: dict[str, int] = {kind: _count(data, kind) for kind in data.node_types}
        if not sum(self.counts.values()):
            raise InputError("a graph needs at least one node", got="none", fix="Set x or num_nodes of a node type.")
        self.first = _firsts(self.counts)
        self.relations = {kind: self._relation(kind) for kind in data.edge_types}
        if not self.relations:
            raise InputError("a heterogeneous graph needs a type of edges", got="none", fix="Add an edge_index.")
        self.first_edge = _firsts({kind: graph.edge_index.size(1) for kind, graph in self.relations.items()})
        joined = [
            graph.edge_index + torch.tensor([[self.first[kind[0]]], [self.first[kind[2]]]])
            for kind, graph in self.relations.items()
        ]
        self.num_nodes = sum(self.counts.values())
        self.joined = Graph(Data(edge_index=torch.cat(joined, dim=1), num_nodes=self.num_nodes))
        self.rows = {kind: _rows(data[kind], "node") for kind in self.counts}
        self.edge_rows = {kind: _rows(data[kind], "edge") for kind in self.relations}
        self._check_rows()
        self._writes = {
            (kind, name): (value, value._version)
            for kind, store in (*data.node_items(), *data.edge_items())
            for name, value in store.items()
            if isinstance(value, Tensor) and not value.is_inference()
        }

    @staticmethod
    def of(data: HeteroData) -> TypedGraph:
        """The graph of some data, made once for all who ask, and anew if something was changed there since.

        Example:
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
            >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
            >>> graph = TypedGraph.of(data)
            >>> graph.joined.edge_index.tolist(), TypedGraph.of(data) is graph
            ([[0, 1], [4, 2]], True)
        """
        known = _KNOWN.get(id(data))
        if known is not None and known._is_of(data):
            return known
        made = TypedGraph(data)
        if known is None:
            finalize(data, _KNOWN.pop, id(data), None)
        _KNOWN[id(data)] = made
        return made

    @property
    def edge_index(self) -> Tensor:
        """The edges of the joined graph, ``[2, num_edges]``."""
        return self.joined.edge_index

    def features_of(self, kind: str) -> dict[str, Tensor]:
        """The node-level tensors of a type apart from labels and masks, by name."""
        return {name: value for name, value in self.rows[kind].items() if not is_label(name)}

    def numbers_below(self, kind: str) -> int:
        """What the ``n_id`` of all nodes of a type are below: a table of them has as many rows, at least one."""
        known = self.rows[kind].get(WHOLE_ID)
        count = self.counts[kind] if known is None or not known.numel() else int(known.max()) + 1
        return max(count, 1)

    def split(self, nodes: Tensor) -> dict[str, Tensor]:
        """Nodes of the joined graph, ``[count]``, by type, with their numbers among those of their type.

        Example:
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
            >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
            >>> TypedGraph.of(data).split(torch.tensor([1, 4]))
            {'author': tensor([1]), 'paper': tensor([2])}
        """
        firsts = [(kind, self.first[kind], count) for kind, count in self.counts.items()]
        return {kind: nodes[(nodes >= first) & (nodes < first + count)] - first for kind, first, count in firsts}

    def follow(self, data: HeteroData) -> TypedGraph:
        """The graph of the same data as it is now, which must have as many nodes; itself if nothing changed."""
        now = TypedGraph.of(data)
        if now.counts != self.counts:
            raise InputError(
                f"the graph of a loader must keep its nodes ({_listed(self.counts)})",
                got=_listed(now.counts),
                fix="Make a new loader.",
            )
        return now

    def _is_of(self, data: HeteroData) -> bool:
        stores = (*data.node_items(), *data.edge_items())
        now = {(kind, name): value for kind, store in stores for name, value in store.items()}
        before = (*self.data.node_items(), *self.data.edge_items())
        then = {(kind, name): value for kind, store in before for name, value in store.items()}
        same = now.keys() == then.keys() and all(now[place] is then[place] for place in now)
        return same and not any(self._is_written(place) for place in self._writes)

    def _is_written(self, place: tuple[Any, str]) -> bool:
        value, version = self._writes[place]
        return value._version != version

    def check_unwritten(self, *, labels: bool) -> None:
        """Refuse to go on after a tensor was written to; labels and masks count only if ``labels``."""
        for kind, name in self._writes:
            if self._is_written((kind, name)) and (labels or not is_label(name)):
                raise InputError(
                    "data must not be written to while its batches are in use",
                    got=f"{name} of {kind!r}, whose values were changed in place",
                    fix="Write between two epochs, or assign a new tensor, which the next epoch takes over.",
                )

    @cached_property
    def key(self) -> str:
        """A fingerprint of edges, features and edge-level attributes: all that histories depend on besides weights."""
        parts = {str(kind): graph.key for kind, graph in self.relations.items()}
        features = {f"{kind} {name}": value for kind in self.rows for name, value in self.features_of(kind).items()}
        return fingerprint(*features.values(), nodes=_listed(self.counts), names=",".join(features), **parts)

    def _relation(self, kind: EdgeType) -> Graph:
        source, _, target = kind
        if source not in self.counts or target not in self.counts:
            missing = source if source not in self.counts else target
            fix = f"Set data[{missing!r}].x or data[{missing!r}].num_nodes."
            raise InputError(f"edges {kind!r} need nodes of both types", got=f"no {missing!r}", fix=fix)
        store = self.data[kind]
        most = max(self.counts[source], self.counts[target], 1)
        data = Data(edge_index=store.get("edge_index"), num_nodes=most)
        try:
            graph = Graph(data)  # before attributes are looked at
        except InputError as error:
            fix = f"Correct data[{kind!r}]."
            raise InputError(
                f"edges {kind!r} must be those of a graph", got=f"this: {error}".rstrip("."), fix=fix
            ) from error
        for row, end in zip(graph.edge_index, (source, target), strict=True):
            high = int(row.max()) if row.numel() else -1
            if high >= self.counts[end]:
                rule = f"edges {kind!r} must hold indices from 0 to {self.counts[end] - 1} of {end!r}"
                raise InputError(rule, got=f"{high}", fix="Renumber the nodes, or set num_nodes.")
        for name, value in _rows(store, "edge").items():
            data[name] = value
        return Graph(data)

    def _check_rows(self) -> None:
        for relation, rows in self.edge_rows.items():
            for name in EDGE_LEVEL:
                value = self.data[relation].get(name)
                if value is not None and name not in rows:
                    rule = f"{name} of {relation!r} must have one row for each of its edges"
                    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                    raise InputError(rule, got=got, fix="Give it one row per edge, in edge order.")
        for kind, rows in self.rows.items():
            for name in ("x", "y"):
                value = self.data[kind].get(name)
                if isinstance(value, Tensor) and name not in rows:
                    rule = f"{name} of {kind!r} must have one row for each of its {self.counts[kind]} nodes"
                    raise InputError(rule, got=f"shape {tuple(value.shape)}", fix="Give it one row per node.")
            x = rows.get("x")
            if x is not None and x.is_floating_point() and x.numel() and not bool(torch.isfinite(x).all()):
                rule = f"x of {kind!r} must be finite, or histories would keep the bad value"
                raise InputError(rule, got="NaN or infinity", fix="Replace or remove these values.")


# The graph of each HeteroData in use, by its id.
_KNOWN: dict[int, TypedGraph] = {}


def joined_labels(graph: TypedGraph, labels: Mapping[str, Tensor]) -> Tensor:
    """The part of each node of the joined graph, given that of each node of each type."""
    for kind, count in graph.counts.items():
        given = labels.get(kind)
        if not isinstance(given, Tensor) or given.shape != (count,):
            got = (
                "none" if given is None else f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else "no tensor"
            )
            rule = f"partition must give a part for each of the {count} nodes of {kind!r}"
            raise InputError(rule, got=got, fix="Pass a dictionary with a tensor for each type of nodes.")
    return torch.cat([labels[kind].long().cpu() for kind in graph.counts])


def _check_dense(data: HeteroData) -> None:
    """Refuse tensors without values or plain rows, which nothing can be read from."""
    for kind, store in (*data.node_items(), *data.edge_items()):
        for name, value in store.items():
            if not isinstance(value, Tensor):
                continue
            sparse = value.layout != torch.strided and name in ("x", "y", *EDGE_LEVEL)
            if value.is_meta or value.is_nested or sparse:
                got = "one on the device meta" if value.is_meta else "a nested one" if value.is_nested else value.layout
                rule, fix = f"{name} of {kind!r} must be a dense tensor with values", "Store it as one."
                raise InputError(rule, got=str(got), fix=fix)


def _count(data: HeteroData, kind: str) -> int:
    count = data[kind].num_nodes
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    fix = f"Set data[{kind!r}].x or data[{kind!r}].num_nodes."
    raise InputError(f"the number of {kind!r} nodes must be known", got=repr(count), fix=fix)


def _rows(store: Any, level: str) -> dict[str, Tensor]:
    """The tensors of a type with a row for each of its nodes or edges, apart from the edges themselves."""
    has_rows = store.is_node_attr if level == "node" else store.is_edge_attr
    named = {name: value for name, value in store.items() if isinstance(value, Tensor) and name != "edge_index"}
    return {name: value for name, value in named.items() if "edge_label" not in name and has_rows(name)}


def _firsts(counts: Mapping[Any, int]) -> dict[Any, int]:
    return dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
