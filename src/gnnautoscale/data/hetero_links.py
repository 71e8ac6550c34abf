"""Links of heterogeneous graphs: edges of one type held back, to be predicted.

What a task looks at are plain graphs of the nodes of all types, numbered type after type, with the edges of the one
type only: so pairs, leaks and negatives are those of plain graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.data.hetero import TypedDataset
from gnnautoscale.data.links import draw_split
from gnnautoscale.errors import InputError
from gnnautoscale.graph import EdgeType, Graph, TypedGraph

# A type of edges is the reverse of another if more than this share of the other's edges go back in it.
_MOSTLY = 0.5


@dataclass(frozen=True)
class TypedLinks(TypedDataset):
    """Heterogeneous graphs for training, validation and test, one type of whose edges is to be predicted.

    Args:
        relation: The type of edges.
        passed: The graphs of all splits, whose edges pass messages.
    """

    relation: EdgeType
    passed: tuple[HeteroData, HeteroData, HeteroData]

    @staticmethod
    @checked()
    def of_splits(graphs: Sequence[HeteroData], relation: EdgeType | None = None, name: str = "data") -> TypedLinks:
        """Make a data set of the three graphs that ``RandomLinkSplit(edge_types=..., rev_edge_types=...)`` returns.

        Args:
            graphs: Graphs with the same nodes, with ``edge_label_index`` and ``edge_label`` of a type of edges.
            relation: This type; by default the only one that has them.
            name: Name of the data set.

        Example:
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
            >>> writes = data["author", "writes", "paper"]
            >>> writes.edge_index = writes.edge_label_index = torch.tensor([[0, 1], [2, 0]])
            >>> TypedLinks.of_splits([data, data, data]).train.edge_label_index
            tensor([[0, 1],
                    [4, 2]])
        """
        first = graphs[0]
        named = [kind for kind, store in first.edge_items() if "edge_label_index" in store]
        if relation is None and len(named) != 1:
            raise InputError(
                "one type of edges has edge_label_index, the pairs to predict",
                got=", ".join(map(str, named)) or "none",
                fix="Split one with torch_geometric.transforms.RandomLinkSplit(edge_types=..., rev_edge_types=...), "
                "or pass gnnautoscale.data.TypedLinks.of_splits(graphs, relation).",
            )
        relation = named[0] if relation is None else relation
        for split, graph in zip(("train", "val", "test"), graphs, strict=True):
            if relation not in graph.edge_types or "edge_label_index" not in graph[relation]:
                rule = f"the {split} graph must have edge_label_index of {relation!r}"
                fix = "Use the graphs that RandomLinkSplit returns."
                raise InputError(rule, got=f"edges {', '.join(map(str, graph.edge_types))}", fix=fix)
            if TypedGraph.of(graph).counts != TypedGraph.of(first).counts:
                got, fix = f"others in the {split} graph", "Split edges only."
                raise InputError("the graphs of link prediction have the same nodes", got=got, fix=fix)
        back = _reverses(first, relation)
        train, val, test = (_view(graph, relation, back) for graph in graphs)
        return TypedLinks(name, train, val, test, first, relation[0], relation, (graphs[0], graphs[1], graphs[2]))

    @staticmethod
    def split(
        graph: HeteroData,
        relation: EdgeType | str | None = None,
        seed: int = 0,
        *,
        disjoint: float = 0.3,
        name: str = "data",
    ) -> TypedLinks:
        """Hold edges of one type back, to predict them: 5 % for validation and 10 % for tests.

        Args:
            graph: The graph.
            relation: The type of edges, or the name of its relation if no other has that; by default the only one,
                apart from those called ``rev_...``.
            seed: Of the draw.
            disjoint: The share of training edges that are trained on; the rest passes messages. 0: all do both.
            name: Name of the data set.

        Messages go backwards along the same edges only, in the type that is the reverse of this one. Edges between the
        same nodes count once.

        Example:
            >>> data = HeteroData()
            >>> data["author"].num_nodes, data["paper"].num_nodes = 10, 30
            >>> every = torch.cartesian_prod(torch.arange(10), torch.arange(10))
            >>> data["author", "writes", "paper"].edge_index = every.t().contiguous()
            >>> links = TypedLinks.split(data, "writes")
            >>> links.relation, links.train.edge_label.numel(), links.test.edge_label.sum()
            (('author', 'writes', 'paper'), 25, tensor(10.))
        """
        TypedGraph.of(graph)
        chosen = relation_named(graph, relation)
        back = _reverses(graph, chosen)
        if len(back) > 1:
            got, fix = ", ".join(map(str, back)), "Remove all but one of them."
            raise InputError(
                f"{chosen!r} must have at most one reverse, or held back edges pass messages", got=got, fix=fix
            )
        single = _without_copies(graph, chosen)
        ends, count = single[chosen].edge_index, graph[chosen[0]].num_nodes
        both_ways = chosen[0] == chosen[2] and Graph.of(Data(edge_index=ends, num_nodes=count)).is_symmetric
        graphs = draw_split(
            single,
            seed,
            disjoint,
            is_undirected=both_ways,
            edge_types=[chosen],
            rev_edge_types=[back[0] if back else None],
        )
        return TypedLinks.of_splits(graphs, chosen, name)

    def passing(self, split: str = "train") -> HeteroData:
        """See :meth:`Dataset.passing`."""
        return self.passed[("train", "val", "test").index(split)]

    @property
    def targets(self) -> tuple[str, ...]:
        """See :meth:`Dataset.targets`: the types at both ends."""
        return tuple(dict.fromkeys((self.relation[0], self.relation[2])))

    def seen(self, batch: HeteroData) -> Data:
        """What a task looks at in a batch: its own nodes of the types at both ends, numbered as in the views."""
        first = TypedGraph.of(self.graph).first
        own = [batch[kind].n_id[: batch[kind].batch_size].as_subclass(Tensor) + first[kind] for kind in self.targets]
        nodes = Data(n_id=torch.cat(own), num_nodes=sum(each.numel() for each in own))
        nodes.batch_size = nodes.num_nodes
        if "links" in batch:  # pairs that a sampled batch brings
            nodes.links = batch["links"]
        return nodes

    def seen_whole(self) -> tuple[Data, Tensor]:
        """See :meth:`TypedDataset.seen_whole`."""
        graph = TypedGraph.of(self.graph)
        return self.train, torch.cat([graph.first[kind] + torch.arange(graph.counts[kind]) for kind in self.targets])

    def own_rows(self, rows: dict[str, Tensor]) -> Tensor:
        """See :meth:`TypedDataset.own_rows`."""
        return torch.cat([rows[kind] for kind in self.targets])

    def all_rows(self, rows: dict[str, Tensor]) -> Tensor:
        """See :meth:`TypedDataset.all_rows`; rows of other types are 0."""
        graph, one = TypedGraph.of(self.graph), rows[self.targets[0]]
        whole = one.new_zeros(graph.num_nodes, one.size(1))
        for kind in self.targets:
            whole[graph.first[kind] : graph.first[kind] + graph.counts[kind]] = rows[kind]
        return whole

    def check(self) -> None:
        """See :meth:`TypedDataset.check`."""
        for graph in self.passed:
            TypedGraph.of(graph)


def relation_named(graph: HeteroData, named: EdgeType | str | None) -> EdgeType:
    """The type of edges that someone means by three names, the middle one, or none if there is only one."""
    kinds: list[EdgeType] = list(graph.edge_types)
    if named is None:
        found = [kind for kind in kinds if not kind[1].startswith("rev_")]
    else:
        found = [kind for kind in kinds if named in (kind, kind[1])]
    if len(found) != 1:
        raise InputError(
            "links to predict are edges of one type",
            got=f"{named!r}, which {'none is' if not found else 'several are'} called" if named else "no type",
            fix=f"Name one of {', '.join(map(','.join, found or kinds))}.",
        )
    return found[0]


def _without_copies(graph: HeteroData, relation: EdgeType) -> HeteroData:
    """The graph with the first of all edges of a type between the same nodes."""
    source, target = graph[relation].edge_index
    _, place = torch.unique(source * graph[relation[2]].num_nodes + target, return_inverse=True)
    count = int(place.max()) + 1 if place.numel() else 0
    if count == place.numel():
        return graph
    first = torch.full((count,), place.numel()).scatter_reduce(0, place, torch.arange(place.numel()), "amin")
    kept = first.sort().values
    single = copy.copy(graph)
    for name, value in graph[relation].items():
        if graph[relation].is_edge_attr(name):
            single[relation][name] = value[:, kept] if name == "edge_index" else value[kept]
    return single


def _reverses(graph: HeteroData, relation: EdgeType) -> list[EdgeType]:
    """The types of edges that say the same backwards: by their name, or because most edges go back in them."""
    source, name, target = relation
    count = graph[target].num_nodes
    (ends, others), found = graph[relation].edge_index, []
    for kind in graph.edge_types:
        if (kind[0], kind[2]) != (target, source) or kind == relation:
            continue
        back = graph[kind].edge_index
        share = torch.isin(ends * count + others, back[1] * count + back[0]).double().mean() if ends.numel() else 0.0
        if kind[1] == f"rev_{name}" or float(share) > _MOSTLY:
            found.append(kind)
    return found


def _view(graph: HeteroData, relation: EdgeType, back: Sequence[EdgeType]) -> Data:
    """All nodes with the edges of one type, also those that go back in other types, and with pairs to predict."""
    typed = TypedGraph.of(graph)
    first = torch.tensor([[typed.first[relation[0]]], [typed.first[relation[2]]]])
    ways = [graph[relation].edge_index, *(graph[kind].edge_index.flip(0) for kind in back if kind in graph.edge_types)]
    view = Data(edge_index=torch.cat(ways, dim=1) + first, num_nodes=typed.num_nodes)
    store: Any = graph[relation]
    view.edge_label_index = store.edge_label_index + first
    if "edge_label" in store:
        view.edge_label = store.edge_label
    ranges = [(typed.first[kind], typed.first[kind] + typed.counts[kind]) for kind in (relation[0], relation[2])]
    view.between = ranges[0], ranges[1]
    return view
