"""Lets a model follow a growing graph, and recomputes only the history rows that the growth affects."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.attach.autoscaler import attached, attached_to_plain_graph
from gnnautoscale.attach.calling import CallModel, call_with_batch, to_model_device
from gnnautoscale.attach.inference import weights_checksum
from gnnautoscale.attach.scalable import ScalableGNN
from gnnautoscale.errors import InputError
from gnnautoscale.forward import (
    ActiveLayer,
    EdgeRecord,
    GraphMemory,
    Observer,
    Plan,
    RowStore,
    Session,
    SweepExchange,
    as_matrix,
    evaluating,
    run_pass,
)
from gnnautoscale.graph import Graph, HaloLoader

# A part takes new nodes until it is this much larger than the mean.
_MOST_ABOVE_MEAN = 1.25
# How many rows to compare at once.
_MOST_COMPARED = 1 << 20


@torch.no_grad()
def grow(model: nn.Module, loader: HaloLoader, data: Data, *, call: CallModel = call_with_batch) -> HaloLoader:
    """Move an autoscaled model to a graph with new nodes, new edges or new features.

    New nodes join the part of most of their neighbours; new nodes that know only new nodes follow these. A part a
    quarter larger than the mean takes no more nodes. Nodes that find no part this way fill up the smallest ones.

    Histories get rows for the new nodes. Level by level, the rows that the change reaches are recomputed with the
    current weights, in evaluation mode: those of new nodes, of nodes with new features, of nodes whose edges or
    recorded edge weights differ, and all rows computed from such rows. Other rows stay the same, bit for bit. So exact
    histories, as :func:`refresh` leaves them, stay exact, and those of training stay as stale as they were. From then
    on the model takes batches of the new graph only. If something fails, the model stays as it was.

    Args:
        model: An autoscaled model.
        loader: A loader of the model's training graph.
        data: The grown graph: the old nodes first and in their order, and all old edges in any order (in another
            order, sums of edge weights may be rounded differently and count as changed). Features and edge weights may
            differ, but must be new tensors, because the old ones are compared with them.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.

    Returns:
        A loader of the grown graph, with the settings of the old one.

    Example:
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> path = torch.stack([torch.arange(9), torch.arange(1, 10)])
        >>> old = Data(x=torch.rand(10, 4), edge_index=torch.cat([path, path.flip(0)], dim=1))
        >>> loader = gas.HaloLoader(old, num_parts=2)
        >>> model = gas.autoscale(GCN(4, 16, num_layers=3, out_channels=2), old)
        >>> gas.refresh(model, loader)
        >>> link = torch.tensor([[9, 10], [10, 9]])
        >>> new = Data(x=torch.cat([old.x, torch.rand(1, 4)]), edge_index=torch.cat([old.edge_index, link], dim=1))
        >>> loader = gas.grow(model, loader, new)
        >>> gas.predict(model, loader, torch.tensor([10])).shape
        torch.Size([1, 2])
    """
    scaler = attached_to_plain_graph(model, "grow")
    before = scaler.memory_of(loader.graph)
    _check_old(loader.graph, scaler.key)
    graph = _check_grown(loader.graph, data)
    grown = loader.with_data(data, grown_parts(loader.labels, graph.edge_index, graph.num_nodes))
    batch = _small_batch(grown, model)
    memory = before.grown(batch.edge_index.info, batch.edge_index.device)
    with scaler.moved_to(grown.graph, memory), evaluating(model):
        _bring_up_to_date(model, before, loader, grown, batch, call)
    if isinstance(model, ScalableGNN):
        model.num_nodes = graph.num_nodes
    return grown


# Parts ###############################################################################################################


def grown_parts(labels: Tensor, edge_index: Tensor, num_nodes: int) -> Tensor:
    """The part of each node of a grown graph, ``[num_nodes]``, by the rule of :func:`grow`.

    ``labels`` holds the parts of the old nodes, ``[num_old_nodes]``.
    """
    num_old, num_parts = labels.numel(), int(labels.max()) + 1
    limit = math.ceil(_MOST_ABOVE_MEAN * num_nodes / num_parts)
    parts = torch.cat([labels, labels.new_full((num_nodes - num_old,), -1)])
    ends = edge_index[:, (edge_index >= num_old).any(0)]
    node, neighbour = torch.cat([ends, ends.flip(0)], dim=1)
    while True:
        waiting = parts[node] < 0
        node, neighbour = node[waiting], neighbour[waiting]
        room = limit - torch.bincount(parts[parts >= 0], minlength=num_parts)
        part = parts[neighbour]
        known = (part >= 0) & (room[part] > 0)
        wishes, count = torch.unique(node[known] * num_parts + part[known], return_counts=True)
        if not wishes.numel():
            break
        # For each node the part with most of its neighbours, the first of equals.
        order = count.argsort(descending=True, stable=True)
        order = order[(wishes[order] // num_parts).argsort(stable=True)]
        order = order[_rank(wishes[order] // num_parts) == 0]
        # Into each part the nodes with most neighbours there, as many as fit.
        order = order[count[order].argsort(descending=True, stable=True)]
        order = order[(wishes[order] % num_parts).argsort(stable=True)]
        wish = wishes[order]
        wish = wish[_rank(wish % num_parts) < room[wish % num_parts]]
        parts[wish // num_parts] = wish % num_parts
    left = (parts < 0).nonzero().squeeze(1)
    parts[left] = _smallest_first(torch.bincount(parts[parts >= 0], minlength=num_parts), left.numel())
    return parts


def _rank(values: Tensor) -> Tensor:
    """For each of some sorted values the number of equal ones before it."""
    return torch.arange(values.numel()) - torch.searchsorted(values, values)


def _smallest_first(sizes: Tensor, count: int) -> Tensor:
    """The parts of ``count`` nodes that fill up the smallest parts first."""
    order = sizes.argsort(stable=True)
    ascending = sizes[order]
    # For each part the number of nodes that raises all smaller ones to its size.
    needed = ascending * torch.arange(sizes.numel()) - (ascending.cumsum(0) - ascending)
    filled = int((needed <= count).sum())
    level, rest = divmod(count + int(ascending[:filled].sum()), filled)
    added = level - ascending[:filled]
    added[:rest] += 1
    return order[:filled].repeat_interleave(added)


# Changes #############################################################################################################


class EdgeList(NamedTuple):
    """Sources and targets of edges, each ``[num_edges]``, and edge-level values by name, each ``[num_edges, ...]``."""

    source: Tensor
    target: Tensor
    values: dict[str, Tensor]

    @staticmethod
    def of(record: EdgeRecord) -> EdgeList:
        """The edges of a record, in the direction of messages."""
        row = record.edges.target_row
        return EdgeList(record.edges.edge_index[1 - row], record.edges.edge_index[row], record.constants)

    @staticmethod
    def of_graph(graph: Graph, *, reverse: bool = False) -> EdgeList:
        """A graph's own edges, or their reverse."""
        source, target = graph.edge_index.flip(0) if reverse else graph.edge_index
        return EdgeList(source, target, graph.edge_attributes)


def pair_edges(old: EdgeList, new: EdgeList, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions of common edges in the old and in the new graph, each ``[num_common]``, and of their other edges.

    Parallel edges are paired in their order.

    Example:
        >>> old = EdgeList(torch.tensor([0, 1]), torch.tensor([1, 2]), {})
        >>> new = EdgeList(torch.tensor([1, 2, 0]), torch.tensor([2, 0, 1]), {})
        >>> pair_edges(old, new, num_nodes=3)
        (tensor([0, 1]), tensor([2, 0]), tensor([], dtype=torch.int64), tensor([1]))
    """
    keys_old, order_old = (old.source * num_nodes + old.target).sort(stable=True)
    keys_new, order_new = (new.source * num_nodes + new.target).sort(stable=True)
    place = (torch.searchsorted(keys_new, keys_old) + _rank(keys_old)).clamp(max=keys_new.numel())
    found = torch.cat([keys_new, keys_new.new_full((1,), -1)])[place] == keys_old
    added = torch.ones(keys_new.numel(), dtype=torch.bool)
    added[place[found]] = False
    return order_old[found], order_new[place[found]], order_old[~found], order_new[added]


def _changed_targets(old: EdgeList | None, new: EdgeList, num_nodes: int) -> Tensor:
    """The nodes with different incoming edges or edge values; all nodes if these cannot be compared."""
    if old is None or old.values.keys() != new.values.keys():
        return torch.arange(num_nodes)
    before, after, gone, added = pair_edges(old, new, num_nodes)
    changed = torch.zeros(after.numel(), dtype=torch.bool)
    for name, values in old.values.items():
        changed |= _differ(values[before], new.values[name][after])
    return torch.cat([old.target[gone], new.target[added], new.target[after[changed]]])


def _changed_nodes(old: Graph, new: Graph, data: Data) -> Tensor:
    """Mask of the nodes that are new or have different features, ``[num_nodes]``."""
    changed = torch.ones(new.num_nodes, dtype=torch.bool)
    changed[: old.num_nodes] = False
    for name, value in old.features.items():
        after = _by_node(data, name, new.features[name])[: old.num_nodes]
        changed[: old.num_nodes] |= _differ(_by_node(data, name, value), after)
    return changed


def _differ(before: Tensor, after: Tensor) -> Tensor:
    """Mask of the rows that differ, ``[num_rows]``."""
    after = after.to(before.device)
    if before.dtype == after.dtype and torch.equal(before, after):
        return torch.zeros(before.size(0), dtype=torch.bool)
    pieces = zip(torch.split(before, _MOST_COMPARED), torch.split(after, _MOST_COMPARED), strict=True)
    return torch.cat([as_matrix(one != other).any(1).cpu() for one, other in pieces])


def _by_node(data: Data, name: str, value: Tensor) -> Tensor:
    """An attribute with its nodes or edges in the first dimension."""
    return value.movedim(data.__cat_dim__(name, value), 0)


# Affected rows #######################################################################################################


class _EdgeCalls(Observer):
    """Lists the edge calls of a pass, each as its layer at that moment."""

    def __init__(self) -> None:
        self.found: list[ActiveLayer] = []

    def edges_used(self, session: Session, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> None:
        self.found.append(replace(active))


class Change:
    """The nodes that the change to a grown graph reaches, level by level."""

    def __init__(self, before: GraphMemory, old: Graph, loader: HaloLoader, *, ignores_edges: bool) -> None:
        self._before, self._old, self._new, self._ignores_edges = before, old, loader.graph, ignores_edges
        # Edges that a model derives itself are reversed ones only if the halo is bidirectional.
        self._directions = {False, loader.bidirectional or loader.graph.is_symmetric}
        self._affected = _changed_nodes(old, loader.graph, loader.data)
        self._changed: dict[Any, Tensor] = {}  # shared by layers with the same records

    def next_level(self, edge_calls: list[ActiveLayer]) -> Tensor:
        """The nodes whose rows in the next level must be recomputed, given that level's edge calls."""
        used: dict[Any, tuple[EdgeList | None, EdgeList]] = {}
        for active in edge_calls:
            if active.record is not None:
                old = next(iter(self._before.records.get(active.name, [])[active.num_edge_calls :]), None)
                used[old, active.record] = None if old is None else EdgeList.of(old), EdgeList.of(active.record)
        for reverse in self._own_directions(edge_calls):
            used[reverse] = EdgeList.of_graph(self._old, reverse=reverse), EdgeList.of_graph(self._new, reverse=reverse)
        reached = self._affected.clone()
        for key, (before, after) in used.items():
            reached[after.target[self._affected[after.source]]] = True
            if key not in self._changed:
                self._changed[key] = _changed_targets(before, after, self._new.num_nodes)
            reached[self._changed[key]] = True
        self._affected = reached
        return reached.nonzero().squeeze(1)

    def _own_directions(self, edge_calls: list[ActiveLayer]) -> set[bool]:
        """Whether the graph's own edges are used too, forward (``False``) or reversed (``True``)."""
        directions: set[bool] = set() if self._ignores_edges else set(self._directions)
        for active in edge_calls:
            record, attributes = active.record, active.call.attributes
            if record is None:
                directions |= self._directions
            elif "edge" in active.call.kinds or any(name in self._new.edge_attributes for name in attributes):
                names = [name for name in attributes if name is not None and name.endswith("edge_index")]
                directions |= {(name != "edge_index") != (record.edges.target_row == 0) for name in names}
        return directions


def _bring_up_to_date(
    model: nn.Module, before: GraphMemory, loader: HaloLoader, grown: HaloLoader, batch: Data, call: CallModel
) -> None:
    """Recompute the rows that the change reaches, level by level; ``batch`` is a small one to find edge calls with."""
    scaler = attached(model)
    memory = scaler.memory
    if not memory.histories:
        return
    _edge_calls(model, None, batch, call)  # makes a plan if there is none
    plan = cast(Plan, scaler.plan)
    if plan.live - memory.histories.keys():
        return
    checksum = weights_checksum(model)
    change = Change(before, loader.graph, grown, ignores_edges=plan.ignores_edges)
    levels = [(level, change.next_level(_edge_calls(model, level, batch, call))) for level in plan.levels]
    size = math.ceil(loader.graph.num_nodes * loader.batch_size / loader.num_parts)
    for level, nodes in levels:
        nodes = nodes[grown.labels[nodes].argsort(stable=True)]
        with scaler.running(SweepExchange(level)):
            for some in torch.tensor_split(nodes, math.ceil(nodes.numel() / size)) if nodes.numel() else ():
                run_pass(partial(call, model, to_model_device(grown.batch_for(some), model)))
    if before.is_written_by(checksum):
        memory.mark_written_by(checksum)


def _edge_calls(model: nn.Module, level: frozenset[str] | None, batch: Data, call: CallModel) -> list[ActiveLayer]:
    """The edge calls of a level."""
    observer = _EdgeCalls()
    with attached(model).running(SweepExchange(level, RowStore()), observers=[observer]):
        run_pass(partial(call, model, batch))
    return observer.found


def _small_batch(loader: HaloLoader, model: nn.Module) -> Data:
    """The batch of one node with few neighbours."""
    degree = torch.bincount(loader.graph.edge_index[1], minlength=loader.graph.num_nodes)
    node = degree.masked_fill(degree == 0, loader.graph.edge_index.size(1)).argmin()
    return to_model_device(loader.batch_for(node.unsqueeze(0)), model)


# Checks ##############################################################################################################


def _check_old(graph: Graph, key: str | None) -> None:
    """Refuse a graph whose tensors were overwritten, because changes could not be found."""
    now = copy.copy(graph)
    vars(now).pop("key", None)  # computed anew
    if now.key != key:
        raise InputError(
            "the old graph's tensors must be unchanged, because the new ones are compared with them",
            got="tensors that were overwritten after the loader was made",
            fix="Give the grown graph its own tensors, e.g. x = data.x.clone().",
        )


def _check_grown(old: Graph, data: Data) -> Graph:
    """Refuse a graph that lacks something of the old one."""
    if not isinstance(data, Data):
        raise InputError(
            "the grown graph must be a torch_geometric.data.Data", got=type(data).__name__, fix="Pass the whole graph."
        )
    new = Graph(data)
    if new.num_nodes < old.num_nodes:
        raise InputError(
            f"the grown graph must begin with the {old.num_nodes} old nodes, in their order",
            got=f"{new.num_nodes} nodes",
            fix="If nodes were removed, autoscale the model again.",
        )
    features, attributes = (old.features, new.features), (old.edge_attributes, new.edge_attributes)
    for level, (before, after) in (("node", features), ("edge", attributes)):
        if before.keys() != after.keys():
            names = [", ".join(sorted(found)) or "none" for found in (before, after)]
            raise InputError(
                f"the grown graph must have the {level}-level attributes of the old one ({names[0]})",
                got=names[1],
                fix=f"Give it the same attributes, each with one row for every {level}.",
            )
        for name, value in before.items():
            expected, got = _by_node(data, name, value), _by_node(data, name, after[name])
            if expected.dtype != got.dtype or expected.shape[1:] != got.shape[1:]:
                raise InputError(
                    f"{name} must still have rows of shape {tuple(expected.shape[1:])} and type {expected.dtype}",
                    got=f"rows of shape {tuple(got.shape[1:])} and type {got.dtype}",
                    fix="Convert the features; other ones need another model.",
                )
    _, _, gone, _ = pair_edges(EdgeList.of_graph(old), EdgeList.of_graph(new), new.num_nodes)
    if gone.numel():
        source, target = old.edge_index[:, gone[0]].tolist()
        raise InputError(
            "the grown graph must have all edges of the old one",
            got=f"{gone.numel()} missing edges, one of them from {source} to {target}",
            fix="If edges were removed, autoscale the model again.",
        )
    return new
