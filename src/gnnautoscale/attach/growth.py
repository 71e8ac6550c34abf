"""Lets a model follow a growing graph, and recomputes only the history rows that the growth affects."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.attach.autoscaler import attached, attached_alone
from gnnautoscale.attach.calling import CallModel, call_with_batch, info_of, to_model_device
from gnnautoscale.attach.changes import EdgeList, ReachedNodes, by_node, differ, pair_edges, rank
from gnnautoscale.attach.inference import sweep, weights_checksum
from gnnautoscale.attach.scalable import ScalableGNN
from gnnautoscale.attach.typed_growth import TypedChange, check_grown_types, old_nodes_first
from gnnautoscale.errors import InputError
from gnnautoscale.forward import (
    ActiveLayer,
    GraphMemory,
    Observer,
    Plan,
    RowStore,
    Session,
    SweepExchange,
    evaluating,
    run_pass,
)
from gnnautoscale.graph import Graph, HaloLoader, TypedGraph

# A part takes new nodes until it is this much larger than the mean.
_MOST_ABOVE_MEAN = 1.25


@checked()
@torch.no_grad()
def grow(
    model: nn.Module, loader: HaloLoader, data: Data | HeteroData, *, call: CallModel = call_with_batch
) -> HaloLoader:
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
        data: The grown graph: the old nodes (of each type) first and in their order, and all old edges in any order
            (in another order, sums of edge weights may be rounded differently and count as changed). Features and edge
            weights may differ, but must be new tensors, because the old ones are compared with them.
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
    scaler, old = attached_alone(model, "grow"), loader.graph
    before = scaler.memory_of(old)
    if isinstance(old, TypedGraph):
        old.check_unwritten(labels=False)
        graph: Any = check_grown_types(old, data)
        places = old_nodes_first(old, graph)
        labels = grown_parts(loader.labels, places[graph.edge_index], graph.num_nodes)[places]
    else:
        _check_old(old, scaler.key)
        graph = _check_grown(old, data)
        labels = grown_parts(loader.labels, graph.edge_index, graph.num_nodes)
    grown = loader.with_data(data, labels)
    batch = _small_batch(grown, model)
    memory = before.grown(info_of(batch), batch.edge_stores[0].edge_index.device)
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
        order = order[rank(wishes[order] // num_parts) == 0]
        # Into each part the nodes with most neighbours there, as many as fit.
        order = order[count[order].argsort(descending=True, stable=True)]
        order = order[(wishes[order] % num_parts).argsort(stable=True)]
        wish = wishes[order]
        wish = wish[rank(wish % num_parts) < room[wish % num_parts]]
        parts[wish // num_parts] = wish % num_parts
    left = (parts < 0).nonzero().squeeze(1)
    parts[left] = _smallest_first(torch.bincount(parts[parts >= 0], minlength=num_parts), left.numel())
    return parts


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


# Affected rows ########################################################################################################


def _changed_nodes(old: Graph, new: Graph, data: Data) -> Tensor:
    """Mask of the nodes that are new or have different features, ``[num_nodes]``."""
    changed = torch.ones(new.num_nodes, dtype=torch.bool)
    changed[: old.num_nodes] = False
    for name, value in old.features.items():
        after = by_node(data, name, new.features[name])[: old.num_nodes]
        changed[: old.num_nodes] |= differ(by_node(data, name, value), after)
    return changed


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
        self._reached = ReachedNodes(_changed_nodes(old, loader.graph, loader.data))

    def next_level(self, edge_calls: list[ActiveLayer]) -> Tensor:
        """The nodes whose rows in the next level must be recomputed, given that level's edge calls."""
        used: dict[Any, tuple[EdgeList | None, EdgeList]] = {}
        for active in edge_calls:
            if active.record is not None:
                old = next(iter(self._before.records.get(active.name, [])[active.num_edge_calls :]), None)
                used[old, active.record] = None if old is None else EdgeList.of(old), EdgeList.of(active.record)
        for reverse in self._own_directions(edge_calls):
            used[reverse] = EdgeList.of_graph(self._old, reverse=reverse), EdgeList.of_graph(self._new, reverse=reverse)
        return self._reached.next_level(used)

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
    model: nn.Module, before: Any, loader: HaloLoader, grown: HaloLoader, batch: Data, call: CallModel
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
    if plan.node_sums:  # the change reaches all rows
        sweep(model, grown, call)
        memory.mark_written_by(checksum)
        return
    change: Change | TypedChange
    if isinstance(loader.graph, TypedGraph):
        change = TypedChange(before, loader.graph, grown)
    else:
        change = Change(before, loader.graph, grown, ignores_edges=plan.ignores_edges)
    levels = [(level, change.next_level(_edge_calls(model, level, batch, call))) for level in plan.levels]
    size = math.ceil(loader.graph.num_nodes * loader.batch_size / loader.num_parts)
    for level, nodes in levels:
        nodes = nodes[grown.labels[nodes].argsort(stable=True)]
        with scaler.running(SweepExchange(level)):
            for some in torch.tensor_split(nodes, math.ceil(nodes.numel() / size)) if nodes.numel() else ():
                run_pass(partial(call, model, to_model_device(_batch_for(grown, some), model)))
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
    return to_model_device(_batch_for(loader, node.unsqueeze(0)), model)


def _batch_for(loader: HaloLoader, nodes: Tensor) -> Data:
    """The batch of some nodes, those of a heterogeneous graph in the joined one."""
    graph = loader.graph
    return loader.batch_for(graph.split(nodes) if isinstance(graph, TypedGraph) else nodes)


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
            expected, got = by_node(data, name, value), by_node(data, name, after[name])
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
