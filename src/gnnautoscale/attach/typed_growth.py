"""What is different about growing heterogeneous graphs: changes are found relation by relation, in the joined graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.attach.changes import EdgeList, ReachedNodes, by_node, differ, pair_edges
from gnnautoscale.errors import InputError
from gnnautoscale.forward import ActiveLayer, TypedMemory
from gnnautoscale.graph import EdgeType, Graph, HaloLoader, TypedGraph


def check_grown_types(old: TypedGraph, data: HeteroData) -> TypedGraph:
    """Refuse a graph that lacks something of the old one."""
    if not isinstance(data, HeteroData):
        fix = "Pass the whole graph."
        raise InputError("the grown graph must be a HeteroData, as the old one is", got=type(data).__name__, fix=fix)
    new = TypedGraph.of(data)
    before, after = ([*graph.counts, *map(str, graph.relations)] for graph in (old, new))
    if before != after:
        raise InputError(
            f"the grown graph must have the types of the old one, in their order ({', '.join(before)})",
            got=", ".join(after),
            fix="A type without nodes or edges must be there from the beginning; others need another model.",
        )
    for kind, count in old.counts.items():
        if new.counts[kind] < count:
            raise InputError(
                f"the grown graph must begin with the {count} old {kind!r} nodes, in their order",
                got=f"{new.counts[kind]} of them",
                fix="If nodes were removed, autoscale the model again.",
            )
    for kind in (*old.counts, *old.relations):
        _check_rows(kind, _rows(old, kind), _rows(new, kind))
    for relation, graph in old.relations.items():
        most = max(new.counts[relation[0]], new.counts[relation[2]], 1)
        _, _, gone, _ = pair_edges(EdgeList.of_graph(graph), EdgeList.of_graph(new.relations[relation]), most)
        if gone.numel():
            source, target = graph.edge_index[:, gone[0]].tolist()
            raise InputError(
                f"the grown graph must have all edges {relation!r} of the old one",
                got=f"{gone.numel()} missing edges, one of them from {source} to {target}",
                fix="If edges were removed, autoscale the model again.",
            )
    return new


def _rows(graph: TypedGraph, kind: Any) -> dict[str, Tensor]:
    """What a model reads of a type, with nodes or edges in the first dimension."""
    found = graph.features_of(kind) if isinstance(kind, str) else graph.relations[kind].edge_attributes
    return {name: by_node(graph.data, name, value) for name, value in found.items()}


def _check_rows(kind: Any, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    if before.keys() != after.keys():
        names = [", ".join(sorted(found)) or "none" for found in (before, after)]
        fix = "Give it the same attributes, each with one row for every node or edge of the type."
        raise InputError(f"{kind!r} must have the attributes of the old graph ({names[0]})", got=names[1], fix=fix)
    for name, value in before.items():
        if value.dtype != after[name].dtype or value.shape[1:] != after[name].shape[1:]:
            raise InputError(
                f"{name} of {kind!r} must still have rows of shape {tuple(value.shape[1:])} and type {value.dtype}",
                got=f"rows of shape {tuple(after[name].shape[1:])} and type {after[name].dtype}",
                fix="Convert the features; other ones need another model.",
            )


def old_nodes_first(old: TypedGraph, new: TypedGraph) -> Tensor:
    """For each node of the new joined graph its place if old nodes come first, in their order, ``[num_nodes]``.

    Example:
        >>> data = HeteroData()
        >>> data["a"].num_nodes, data["b"].num_nodes = 2, 1
        >>> data["a", "to", "b"].edge_index = torch.tensor([[0], [0]])
        >>> old = TypedGraph.of(data)
        >>> grown = data.clone()
        >>> grown["a"].num_nodes = 3
        >>> old_nodes_first(old, TypedGraph.of(grown)).tolist()
        [0, 1, 3, 2]
    """
    kinds = [(new.first[kind], old.counts[kind], new.counts[kind]) for kind in new.counts]
    known = [torch.arange(first, first + before) for first, before, _ in kinds]
    added = [torch.arange(first + before, first + now) for first, before, now in kinds]
    places = torch.empty(new.num_nodes, dtype=torch.long)
    places[torch.cat([*known, *added])] = torch.arange(new.num_nodes)
    return places


class TypedChange:
    """The nodes of the joined graph that the change to a grown graph reaches, level by level."""

    def __init__(self, before: TypedMemory, old: TypedGraph, loader: HaloLoader) -> None:
        self._before, self._old, self._new = before, old, loader.graph
        # Edges that a model derives itself are reversed ones only if the halo is bidirectional.
        self._directions = {False, loader.bidirectional or loader.graph.joined.is_symmetric}
        self._reached = ReachedNodes(self._changed_nodes())

    def _changed_nodes(self) -> Tensor:
        """Mask of the nodes that are new or have different features, ``[num_nodes]``."""
        masks = []
        for kind, count in self._new.counts.items():
            known = self._old.counts[kind]
            changed = torch.arange(count) >= known
            before, after = _rows(self._old, kind), _rows(self._new, kind)
            for name, value in before.items():
                changed[:known] |= differ(value, after[name][:known])
            masks.append(changed)
        return torch.cat(masks)

    def next_level(self, edge_calls: list[ActiveLayer]) -> Tensor:
        """The nodes whose rows in the next level must be recomputed, given that level's edge calls."""
        used: dict[Any, tuple[EdgeList | None, EdgeList]] = {}
        for active in edge_calls:
            for relation, directions in self._relations(active).items():
                for reverse in directions:
                    used[relation, reverse] = (
                        self._lifted(relation, self._own(self._old, relation, reverse), reverse=reverse),
                        self._lifted(relation, self._own(self._new, relation, reverse), reverse=reverse),
                    )
                if active.record is not None:
                    made = self._before.recorder.records.get(relation, {}).get(active.name, [])
                    old = next(iter(made[active.num_edge_calls :]), None)
                    lists = (None if old is None else EdgeList.of(old), EdgeList.of(active.record))
                    used[old, active.record] = (
                        None if lists[0] is None else self._lifted(relation, lists[0], reverse=False),
                        self._lifted(relation, lists[1], reverse=False),
                    )
        return self._reached.next_level(used)

    def _relations(self, active: ActiveLayer) -> dict[EdgeType, set[bool]]:
        """The types of edges that a layer call gets, and whether messages go along (``False``) or against them."""
        names = set(active.call.attributes)
        found: dict[EdgeType, set[bool]] = {}
        for relation in self._new.relations:
            directions = {
                reverse
                for reverse, name in ((False, "edge_index"), (True, "reversed edge_index"))
                if f"{name} of {relation}" in names
            }
            if directions:
                found[relation] = directions if active.record is not None else directions | self._directions
        return found

    @staticmethod
    def _own(graph: TypedGraph, relation: EdgeType, reverse: bool) -> EdgeList:
        edges: Graph = graph.relations[relation]
        return EdgeList.of_graph(edges, reverse=reverse)

    def _lifted(self, relation: EdgeType, edges: EdgeList, *, reverse: bool) -> EdgeList:
        """The same edges between nodes of the new joined graph."""
        ends = [self._new.first[kind] for kind in (relation[0], relation[2])]
        first, last = ends[::-1] if reverse else ends
        return EdgeList(edges.source + first, edges.target + last, edges.values)
