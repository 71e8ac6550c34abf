"""Recomputes some nodes of a graph with a plain copy of a model: without batches, histories or recorded edges."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import available_memory, tensors_in
from gnnautoscale.attach.autoscaler import Autoscaler, attached
from gnnautoscale.attach.calling import CallModel, device_of, unpack_batch
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import Plan, TypedPlan, describe, has_rows, in_place_of
from gnnautoscale.graph import WHOLE_ID, Graph, Subgraphs, TypedGraph

#: Puts a model into a mode for as long as the context lasts.
Mode = Callable[[nn.Module], AbstractContextManager[None]]

# How many tensors of a layer's size, per edge and per node, may exist at once; the share of free memory that they may
# take; and an amount of memory that is always there.
_COPIES, _SHARE, _LITTLE = 4, 0.5, 1 << 26


@dataclass
class Rows:
    """What a model computes for some nodes, each ``[count, ...]``.

    Attributes:
        outputs: Its outputs.
        layers: What its layers return, by call.
        described: All layers that ran, in words, by call.
        histories: The rows in histories, by slot.
    """

    outputs: list[Tensor] = field(default_factory=list)
    layers: dict[str, Tensor] = field(default_factory=dict)
    described: dict[str, str] = field(default_factory=dict)
    histories: dict[str, Tensor] = field(default_factory=dict)


class Recomputation:
    """Recomputes nodes, ``[count]``: on the whole graph if it fits into memory, else on their receptive field.

    Those of a heterogeneous graph are nodes of the joined graph. The model's ``plan`` tells how wide its layers are,
    and how far it looks. The graph may be less than ``whole``, and end as far from the nodes as the model looks.
    """

    def __init__(
        self, model: nn.Module, graph: Graph | TypedGraph, nodes: Tensor, plan: Plan, *, whole: bool = True
    ) -> None:
        self._scaler, self._whole, self._nodes = attached(model), graph, nodes
        self._graph = graph.joined if isinstance(graph, TypedGraph) else graph
        features = (
            graph.features
            if isinstance(graph, Graph)
            else {kind: rows["x"] for kind, rows in graph.rows.items() if "x" in rows}
        )
        self._widths = [math.prod(rows.shape[1:]) for rows in (*plan.rows.values(), *features.values())]
        self._kinds = Kinds(plan)
        self._hops = receptive_hops(plan)
        places = list(dict.fromkeys([device_of(model), torch.device("cpu")]))
        needed = self._bytes(graph.num_nodes, graph.edge_index.size(1))
        fitting = [place for place in places if needed <= max(_SHARE * free_memory(place), _LITTLE)]
        self._device = fitting[0] if fitting else max(places, key=free_memory)
        if plan.node_sums and not fitting:
            got, fix = "one that does not fit into memory", "Compare with plain PyG on a smaller graph."
            raise UnsupportedModelError(
                "a model that adds up rows of all nodes needs the whole graph", got=got, fix=fix
            )
        self._groups = None if fitting else list(self._split(nodes))
        #: What nodes are recomputed on, in words.
        self.how = "the whole graph" if fitting and whole else f"their receptive field of {self._hops} hops"

    def run(self, mode: Mode, call: CallModel) -> Rows:
        """What the model computes in a mode. It starts from its present state, which stays as it is."""
        pieces = [self._run(mode, call, subgraph, rows) for subgraph, rows in self._subgraphs()]
        outputs = [torch.cat(values) for values in zip(*(piece.outputs for piece in pieces), strict=True)]
        names = [name for name in pieces[0].layers if all(name in piece.layers for piece in pieces)]
        layers = {name: torch.cat([piece.layers[name] for piece in pieces]) for name in names}
        return Rows(outputs, layers, pieces[0].described)

    def _subgraphs(self) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """The subgraphs to run, and in each the rows of the nodes to recompute, by type."""
        graph = self._whole
        if isinstance(graph, TypedGraph):
            if self._groups is None:
                yield _typed_subgraph(graph, None), graph.split(self._nodes)
            for group in self._groups or ():
                inside = graph.split(receptive_field(self._graph, group, self._hops))
                rows = {kind: torch.arange(each.numel()) for kind, each in graph.split(group).items()}
                yield _typed_subgraph(graph, inside), rows
            return
        if self._groups is None:
            whole = copy.copy(graph.data)
            count = graph.num_nodes
            whole.n_id, whole.e_id = torch.arange(count), torch.arange(graph.edge_index.size(1))
            whole.batch_size = whole.num_nodes = count
            yield whole, {"": self._nodes}
            return
        subgraphs = Subgraphs(graph.data, graph)
        for group in self._groups:
            subgraph = subgraphs.induced(receptive_field(graph, group, self._hops))
            yield subgraph, {"": torch.arange(group.numel())}

    def _run(self, mode: Mode, call: CallModel, subgraph: Any, rows: dict[str, Tensor]) -> Rows:
        counts = {"": subgraph.num_nodes} if "" in rows else dict(subgraph.num_nodes_dict)
        plain = _PlainCopy(self._scaler, self._device, rows, counts, self._kinds)
        # Copied even if it is on the device already: a model may write into its inputs.
        subgraph = subgraph.apply(lambda value: value.to(self._device, copy=True))
        try:
            with mode(plain.model):
                out = call(plain.model, subgraph)
        except Exception as error:  # whatever the user's code raises
            if "memory" in str(error):
                raise
            raise InputError(
                "verify runs a plain copy of the model on all nodes at once",
                got=f"{type(error).__name__}: {error}",
                fix="Pass the same call as to gas.infer; it is called with that copy, and with the graph as a batch.",
            ) from error
        kinds = self._kinds.of_outputs(len(tensors_in(out)))
        outputs = [plain.chosen(value, kind) for value, kind in zip(tensors_in(out), kinds, strict=True)]
        return Rows(outputs, plain.layers, plain.described)

    def _split(self, nodes: Tensor) -> Iterator[Tensor]:
        """Groups of the nodes whose receptive fields fit into memory."""
        inside = receptive_field(self._graph, nodes, self._hops)
        needed = self._bytes(inside.numel(), self._graph.incoming.into(inside)[0].numel())
        free = free_memory(self._device)
        if needed <= max(_SHARE * free, _LITTLE):
            yield nodes
        elif nodes.numel() > 1:
            for half in torch.tensor_split(nodes, 2):
                yield from self._split(half)
        elif needed <= _COPIES * free:  # the estimate is a high one
            yield nodes
        else:
            raise InputError(
                "verify needs room for the receptive field of a node",
                got=f"{inside.numel()} nodes within {self._hops} hops of node {int(nodes[0])}, about "
                f"{needed / 1e9:.3g} GB, where {free / 1e9:.3g} GB are free",
                fix="Verify nodes with a smaller neighbourhood (nodes=torch.tensor([...])), or a graph like this one, "
                "but smaller.",
            )

    def _bytes(self, num_nodes: int, num_edges: int) -> int:
        """The memory that a pass over a subgraph takes at most."""
        return _COPIES * 4 * (num_edges * max(self._widths, default=1) + num_nodes * sum(self._widths))


class Kinds:
    """The types of nodes that a model's layers and outputs have rows of; in a plain graph there is one, without name.

    Example:
        >>> Kinds(Plan()).of_call("conv"), Kinds(Plan()).of_outputs(2)
        ('', ['', ''])
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def of_call(self, call: str) -> str | None:
        """That of a layer call; ``None`` if it is not known, or several."""
        return (self._plan.call_kinds.get(call) or None) if isinstance(self._plan, TypedPlan) else ""

    def of_outputs(self, count: int) -> list[str]:
        """Those of the model's outputs, of which there are so many."""
        return self._plan.output_kinds if isinstance(self._plan, TypedPlan) else [""] * count


def _typed_subgraph(graph: TypedGraph, nodes: dict[str, Tensor] | None) -> HeteroData:
    """All of a graph, or what is between some nodes, with the attributes of a batch."""
    data = copy.copy(graph.data)
    for kind, edges in graph.relations.items():
        data[kind].e_id = torch.arange(edges.edge_index.size(1))
    for kind, count in graph.counts.items():
        numbers = data[kind].pop(WHOLE_ID, None)
        data[kind].n_id = torch.arange(count) if numbers is None else numbers
        data[kind].num_nodes = count
    data = data if nodes is None else data.subgraph(nodes)
    for kind in graph.counts:
        data[kind].batch_size = data[kind].num_nodes = data[kind].n_id.numel()
    return data


class _PlainCopy:
    """A copy of a model without histories, which notes what its layers return for some of the rows.

    It names calls of layers as :class:`Session` does.
    """

    def __init__(
        self,
        scaler: Autoscaler,
        device: torch.device,
        rows: dict[str, Tensor],
        num_rows: dict[str, int],
        kinds: Kinds,
    ) -> None:
        self.model = scaler.bare_copy().to(device)
        self._rows, self._num_rows = {kind: each.to(device) for kind, each in rows.items()}, num_rows
        self._kinds = kinds
        self.layers: dict[str, Tensor] = {}
        self.described: dict[str, str] = {}
        self._active: list[str] = []
        self._counts: Counter[str] = Counter()
        signature = inspect.signature(self.model.forward)
        for name, layer in self.model.named_modules():
            if isinstance(layer, MessagePassing):
                run = partial(self._layer, name or type(layer).__name__, layer, layer.forward)
                layer.__dict__["forward"] = in_place_of(layer.forward, run)
        self.model.__dict__["forward"] = partial(self._forward, signature, self.model.forward)

    def _forward(self, signature: inspect.Signature, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unpack_batch(signature, type(self.model).__name__, args, kwargs)
        return run(*args, **kwargs)

    def _layer(self, name: str, layer: MessagePassing, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = f"{self._active[-1]}>{name}" if self._active else name
        self._counts[call] += 1
        call = call if self._counts[call] == 1 else f"{call}#{self._counts[call]}"
        self.described[call] = describe(call, layer)
        self._active.append(call)
        try:
            out = run(*args, **kwargs)
        finally:
            self._active.pop()
        kind = self._kinds.of_call(call)
        if kind is not None and has_rows(out, self._num_rows[kind]):
            self.layers[call] = self.chosen(out, kind)
        return out

    def chosen(self, value: Tensor, kind: str) -> Tensor:
        """The chosen rows of a value of a type, in host memory; none of a value that is not node-level."""
        there = has_rows(value, self._num_rows[kind])
        return (value.detach()[self._rows[kind]] if there else value.detach()[:0]).cpu()


def receptive_hops(plan: Plan) -> int:
    """Number of hops around a node that its output depends on, and one more for the degrees of the outermost nodes."""
    depth: dict[str, int] = {}
    for slot, needed in plan.needs.items():
        # A slot lies one hop beyond those that it is computed from. So does the output of models that name their own
        # slots, whose last layer is none; that of others lies no further than the last slot.
        beyond = int(slot != Plan.OUTPUT or plan.explicit)
        depth[slot] = beyond + max((depth[other] for other in needed), default=0)
    return max(depth.values(), default=0) + 1


def receptive_field(graph: Graph, nodes: Tensor, hops: int) -> Tensor:
    """The nodes, then all others at most so many hops away along or against the edges, ``[num_found]``."""
    found = frontier = nodes
    for _ in range(hops):
        neighbours = graph.incoming.into(frontier)[1]
        if not graph.is_symmetric:
            neighbours = torch.cat([neighbours, graph.outgoing.into(frontier)[1]])
        frontier = torch.unique(neighbours[graph.locate(found, neighbours) < 0])
        found = torch.cat([found, frontier])
    return found


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a device; infinite if the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    free = available_memory()
    return math.inf if free is None else float(free)
