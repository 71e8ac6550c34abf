"""Labelled pairs of nodes, in PyG's conventions: read, checked, and found by the nodes they touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph, HaloLoader

_TRIPLET = ("src_index", "dst_pos_index", "dst_neg_index")
#: Names of the pairs of a graph in PyG.
PAIR_NAMES = ("edge_label_index", "edge_label", "edge_label_type", *_TRIPLET)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of nodes of a graph, some of which are edges.

    Attributes:
        ends: Sources and targets, ``[2, num_pairs]``.
        label: Whether they are edges, ``[num_pairs]``, bool.
        relation: Their types, ``[num_pairs]``, or ``None`` if edges have none.
        num_nodes: Number of nodes of the graph.
        others: For each positive, in order, targets that it has no edge to, ``[num_positives, count]``, or ``None``.
        between: The first and the last number, exclusive, of nodes that can be sources, and of those that can be
            targets; by default all.
    """

    ends: Tensor
    label: Tensor
    relation: Tensor | None
    num_nodes: int
    others: Tensor | None = None
    between: tuple[tuple[int, int], tuple[int, int]] | None = None

    @staticmethod
    def of(data: Data) -> Pairs:
        """Read the pairs of a graph, and refuse those that do not fit it.

        Example:
            >>> edges = torch.tensor([[0, 1], [1, 2]])
            >>> Pairs.of(Data(num_nodes=3, edge_label_index=edges, edge_label=torch.tensor([1.0, 0.0]))).label
            tensor([ True, False])
        """
        num_nodes = int(data.num_nodes)
        if all(name in data for name in _TRIPLET):
            source, target, other = (_indices(data, name, num_nodes) for name in _TRIPLET)
            fits = source.dim() == 1 and source.shape == target.shape and other.size(0) == source.size(0)
            if not fits:
                got = ", ".join(f"{name} {list(data[name].shape)}" for name in _TRIPLET)
                fix = "Give each positive a row of others."
                raise InputError(
                    "src_index and dst_pos_index must be [pairs], dst_neg_index a row each", got=got, fix=fix
                )
            other = other.view(source.size(0), -1)
            ends = torch.cat(
                [
                    torch.stack([source, target]),
                    torch.stack([source.repeat_interleave(other.size(1)), other.flatten()]),
                ],
                1,
            )
            label = torch.arange(ends.size(1)) < source.numel()
            relation = _relations(data, source.numel())
            if relation is not None:
                relation = torch.cat([relation, relation.repeat_interleave(other.size(1))])
            return Pairs(ends, label, relation, num_nodes, other)
        if "edge_label_index" not in data:
            raise InputError(
                "link prediction needs labelled pairs, edge_label_index or src_index, dst_pos_index and dst_neg_index",
                got=", ".join(data.keys()),
                fix="Split the graph with torch_geometric.transforms.RandomLinkSplit.",
            )
        ends = _indices(data, "edge_label_index", num_nodes)
        if ends.dim() != 2 or ends.size(0) != 2:
            raise InputError("edge_label_index must be [2, pairs]", got=str(list(ends.shape)), fix="Transpose it.")
        label = data.get("edge_label")
        label = torch.ones(ends.size(1)) if label is None else label.cpu()
        if label.shape != (ends.size(1),):
            got, fix = f"{list(label.shape)}", "Give each pair one label."
            raise InputError(f"edge_label must be [{ends.size(1)}]", got=got, fix=fix)
        return Pairs(ends, label > 0, _relations(data, ends.size(1)), num_nodes, between=data.get("between"))

    def range_of(self, end: int) -> tuple[int, int]:
        """The first and the last number, exclusive, of nodes that can be sources, for 0, or targets, for 1."""
        return (0, self.num_nodes) if self.between is None else self.between[end]

    @property
    def num_ends(self) -> int:
        """Number of nodes that can be at an end of a pair."""
        return sum(high - low for low, high in {self.range_of(0), self.range_of(1)})

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, end: int) -> Tensor:
        """Random nodes for an end of pairs: sources for 0, targets for 1."""
        return torch.randint(*self.range_of(end), shape, generator=generator)

    @property
    def positives(self) -> Pairs:
        """The pairs that are edges."""
        return self.at(self.label.nonzero().squeeze(1))

    def at(self, chosen: Tensor) -> Pairs:
        """Some of the pairs, by their place."""
        relation = None if self.relation is None else self.relation[chosen]
        return Pairs(self.ends[:, chosen], self.label[chosen], relation, self.num_nodes, between=self.between)

    @cached_property
    def are_edges(self) -> bool:
        """Whether all pairs are edges."""
        return bool(self.label.all())

    def touching(self, nodes: Tensor) -> Tensor:
        """The pairs with at least one end among distinct nodes, ascending, in a time that depends on these only.

        Example:
            >>> ends = torch.tensor([[0, 1, 2], [1, 2, 3]])
            >>> Pairs(ends, torch.ones(3, dtype=torch.bool), None, 4).touching(torch.tensor([3, 2]))
            tensor([1, 2])
        """
        order, starts = self._by_node
        first, counts = starts[nodes], starts[nodes + 1] - starts[nodes]
        offsets = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        found: Tensor = torch.unique(order[first.repeat_interleave(counts) + offsets])
        return found

    @cached_property
    def _by_node(self) -> tuple[Tensor, Tensor]:
        """The pair of each end, sorted by the end's node, and where each node begins, ``[num_nodes + 1]``."""
        ends = self.ends.flatten()
        order = ends.argsort(stable=True) % max(self.ends.size(1), 1)
        counts = torch.bincount(ends, minlength=self.num_nodes)
        return order, torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])


@dataclass(frozen=True, eq=False)
class Meetings:
    """How often two nodes meet in a batch, when parts are drawn into batches.

    Attributes:
        labels: The part of each node, ``[num_nodes]``.
        chance: The chance that two different parts are drawn into the same batch.
    """

    labels: Tensor
    chance: float

    @staticmethod
    def of(loader: HaloLoader) -> Meetings:
        """Refuse a loader whose batches never let some nodes meet."""
        return Meetings(loader.labels, chance_to_meet(loader.parts_in_batches, shuffled=loader.shuffle))

    def on(self, device: torch.device) -> Meetings:
        """The same on a device."""
        return self if self.labels.device == device else replace(self, labels=self.labels.to(device))

    def weight(self, source: Tensor, target: Tensor) -> Tensor:
        """What pairs that meet stand for: 1 inside a part, and more for parts that rarely meet, ``[num_pairs]``."""
        labels = self.labels.to(source.device)
        return torch.where(labels[source] == labels[target], 1.0, 1.0 / self.chance)


def chance_to_meet(sizes: Sequence[int], *, shuffled: bool) -> float:
    """The chance that two different parts are in the same batch of an epoch, whose batches have so many parts each.

    Example:
        >>> chance_to_meet([2, 2], shuffled=True)
        0.3333333333333333
    """
    parts, together = sum(sizes), sum(size * (size - 1) for size in sizes)
    if len(sizes) > 1 and (not together or not shuffled):
        raise InputError(
            "pairs without an edge need both ends in a batch, so batches must consist of several parts, drawn anew",
            got=f"{parts} parts, {max(sizes)} in a batch{'' if shuffled else ', not shuffled'}",
            fix=f"Put many small parts in a batch, as with num_parts={10 * parts}, batch_size=10, shuffle=True.",
        )
    return together / (parts * (parts - 1)) if parts > 1 else 1.0


def keys_of(source: Tensor, target: Tensor, relation: Tensor | None, num_nodes: int) -> Tensor:
    """One number for each triple of a source, a relation and a target, in this order of significance."""
    start = source if relation is None else relation * num_nodes + source
    return start * num_nodes + target


@dataclass(frozen=True)
class EdgeKind:
    """What the edges of link prediction are.

    Attributes:
        num_relations: Number of types of pairs, or ``None`` if edges have no types.
        both_ways: Whether an edge without type is the same in both directions.
    """

    num_relations: int | None
    both_ways: bool

    @staticmethod
    def of(graphs: Sequence[Data]) -> EdgeKind:
        """The kind of edges of some graphs: without direction, if one of these has every edge in both of them."""
        found = [Pairs.of(graph).relation for graph in graphs]
        typed = [int(relation.max()) + 1 for relation in found if relation is not None and relation.numel()]
        if typed and any(relation is None for relation in found):
            fix = "Set edge_label_type in all graphs, or in none."
            raise InputError("all splits have relations, or none has", got="some with edge_label_type", fix=fix)
        if typed:
            return EdgeKind(max(typed), both_ways=False)
        return EdgeKind(None, both_ways=any(Graph.of(graph).is_symmetric for graph in graphs))


def message_keys(data: Data, edges: EdgeKind) -> Tensor:
    """The edges that pass messages as keys.

    Of typed edges, the reverse of a relation is the one with as many relations added to its number.
    """
    source, target = data.edge_index.cpu()
    count, relations = data.num_nodes, edges.num_relations
    if relations is None:
        ahead = keys_of(source, target, None, count)
        return torch.cat([ahead, keys_of(target, source, None, count)]) if edges.both_ways else ahead
    kind = data.edge_type.cpu()
    first, second = kind < relations, (kind >= relations) & (kind < 2 * relations)
    return torch.cat(
        [
            keys_of(source[first], target[first], kind[first], count),
            keys_of(target[second], source[second], kind[second] - relations, count),
        ]
    )


def known_keys(data: Data, edges: EdgeKind, *, backwards: bool = False) -> Tensor:
    """All edges of a graph, those that pass messages and the positives, as keys; by targets first if ``backwards``."""
    pairs = Pairs.of(data).positives
    (source, target), count = pairs.ends, pairs.num_nodes
    found = [message_keys(data, edges), keys_of(source, target, pairs.relation, count)]
    if edges.both_ways:
        found.append(keys_of(target, source, None, count))
    keys = torch.cat(found)
    if not backwards:
        return keys
    start, end = keys // count, keys % count
    return keys_of(end, start % count, None if edges.num_relations is None else start // count, count)


def check_graphs(dataset: Dataset) -> None:
    """Refuse a data set that has no graph for each split, of the same nodes."""
    if len(dataset.graphs()) < 3:
        raise InputError(
            "link prediction needs a graph for each split",
            got="one graph for several",
            fix="Pass the three that torch_geometric.transforms.RandomLinkSplit(...)(data) returns.",
        )
    if len({graph.num_nodes for graph, _ in dataset.graphs()}) > 1:
        sizes = ", ".join(str(graph.num_nodes) for graph, _ in dataset.graphs())
        raise InputError(
            "the graphs of link prediction have the same nodes", got=f"{sizes} nodes", fix="Split edges only."
        )


def check_messages(split: str, pairs: Pairs, place: str, data: Data, edges: EdgeKind) -> None:
    """Refuse positives of a split that are edges that pass messages in the graph of another, or the same, split."""
    asked = _keys(pairs.positives, edges)
    count = int(torch.isin(asked, message_keys(data, edges)).sum())
    if not count:
        return
    fix = "Remove them from edge_index, in both directions, as RandomLinkSplit does with is_undirected=True."
    if split == "train":
        fix = (
            "Hold some edges back with RandomLinkSplit(disjoint_train_ratio=0.3), or pass reconstruct=True to learn "
            "the edges that messages take, as graph autoencoders do."
        )
    raise InputError(
        f"positives of the {split} split must not be edges that pass messages in the {place} graph",
        got=f"{count:,} of {asked.numel():,} that are",
        fix=fix,
    )


def check_leaks(dataset: Dataset, edges: EdgeKind, *, reconstruct: bool) -> None:
    """Refuse positives that a model has seen: as edges that pass messages, or in training if they are to test it."""
    graphs = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    pairs = {split: Pairs.of(graph) for split, graph in graphs.items()}
    for number, split in enumerate(graphs):
        for place in list(graphs)[: number + 1]:
            if not (split == "train" and reconstruct):
                check_messages(split, pairs[split], place, graphs[place], edges)
            asked, before = (_keys(pairs[each].positives, edges) for each in (split, place))
            again = int(torch.isin(asked, before).sum()) if split != place else 0
            if again:
                raise InputError(
                    f"positives of the {split} split must not be among those of the {place} split",
                    got=f"{again:,} of {asked.numel():,} that are",
                    fix="Split each edge once, both directions together.",
                )


def _keys(pairs: Pairs, edges: EdgeKind) -> Tensor:
    source, target = pairs.ends
    if edges.both_ways:
        source, target = torch.minimum(source, target), torch.maximum(source, target)
    return keys_of(source, target, pairs.relation, pairs.num_nodes)


def _indices(data: Data, name: str, num_nodes: int) -> Tensor:
    value = data[name]
    if not isinstance(value, Tensor) or value.dtype != torch.long:
        got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} must hold nodes as int64", got=got, fix="Convert it with .long().")
    if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < num_nodes:
        got = f"values from {int(value.min())} to {int(value.max())}"
        raise InputError(f"{name} must hold nodes from 0 to {num_nodes - 1}", got=got, fix="Check the numbering.")
    return value.cpu()


def _relations(data: Data, count: int) -> Tensor | None:
    relation: Tensor | None = data.get("edge_label_type")
    if relation is None:
        return None
    fits = isinstance(relation, Tensor) and relation.dtype == torch.long and relation.shape == (count,)
    if not fits or (count and int(relation.min()) < 0):
        fix = "Give each (positive) pair the number of its relation, from 0."
        raise InputError(
            f"edge_label_type must be int64 from 0, [{count}]", got=str(getattr(relation, "shape", relation)), fix=fix
        )
    if "edge_type" not in data:
        fix = "Set data.edge_type, for example zeros if messages take no notice."
        raise InputError("pairs with edge_label_type need edges with edge_type", got="none", fix=fix)
    return relation.cpu()
