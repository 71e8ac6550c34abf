"""What a layer hands to ``propagate`` on the whole graph, recorded once, and a batch's slice of it.

Inside a batch the halo's degrees are wrong, so whatever a layer derives from the edges (self-loops, normalized
weights) may be wrong too. A copy of the layer without weights or features is therefore run once over the whole
graph's edges; in a batch, what the layer computed is replaced by the batch's slice of that record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.fused import FusedEdges
from gnnautoscale.graph import BatchInfo, BatchTensor, EdgesByTarget, Graph
from gnnautoscale.kernels import Adjacency

# The methods of a layer that take edges; instances of them are overridden on an attached layer.
EDGE_METHODS = ("propagate", "edge_updater")

ArgumentKind = Literal["own", "node", "edge", "other"]


@dataclass(eq=False)
class Slice:
    """A batch's part of a record.

    Attributes:
        edge_index: Edges between rows of the batch, ``[2, num_edges]``, grouped by target; ``None`` once only fused
            edges are needed.
        constants: Edge-level values by argument name, each ``[num_edges, ...]``.
        adjacencies: The same edges for layers that aggregate in one go, by the name of the constant that weighs them.
        fused: These as PyG's layers take them, by how they are to be used; kept because they take time to make.
        kept: Which edges of the full slice these are, or ``None`` for all of them.
    """

    edge_index: Tensor | None
    constants: dict[str, Tensor]
    adjacencies: dict[str | None, Adjacency] = field(default_factory=dict)
    fused: dict[Any, FusedEdges] = field(default_factory=dict)
    kept: Tensor | None = None

    def to(self, device: torch.device) -> Slice:
        """The same on another device."""
        constants = {name: value.to(device) for name, value in self.constants.items()}
        return Slice(None if self.edge_index is None else self.edge_index.to(device), constants, kept=self.kept)

    def take(self, kept: Tensor) -> Slice:
        """Some of the edges."""
        constants = {name: value[kept] for name, value in self.constants.items()}
        return Slice(self.edges[:, kept], constants, kept=kept)

    @property
    def edges(self) -> Tensor:
        """The edges themselves."""
        if self.edge_index is None:
            raise RuntimeError("this slice was prepared for layers that aggregate in one go")
        return self.edge_index

    @torch.inference_mode(False)  # kept for training too
    def adjacency(self, weight: str | None, target_row: int, info: BatchInfo) -> Adjacency:
        """The edges for layers that aggregate in one go, weighed by one of the constants or not at all."""
        if weight not in self.adjacencies:
            self.adjacencies[weight] = Adjacency.build(
                self.edges[target_row],
                self.edges[1 - target_row],
                info.batch_size,
                info.num_rows,
                None if weight is None else self.constants[weight],
            )
        return self.adjacencies[weight]

    def fuse(self, adjacency: Adjacency, *, widened: bool, grad_rows: int | None) -> FusedEdges:
        """One of the adjacencies as a layer takes it; see :meth:`FusedEdges.of`."""
        key = id(adjacency), widened, grad_rows
        if key not in self.fused:
            self.fused[key] = FusedEdges.of(adjacency, widened=widened, grad_rows=grad_rows)
        return self.fused[key]


@dataclass(eq=False)
class Event:
    """One call of ``propagate`` or ``edge_updater`` on the whole graph.

    Attributes:
        edges: The edges the layer handed over.
        constants: The edge-level arguments that depend on edges alone, each ``[num_edges, ...]``.
    """

    edges: EdgesByTarget
    constants: dict[str, Tensor]

    @torch.inference_mode(False)  # kept for training too
    def slice_for(self, info: BatchInfo, layer: str) -> Slice:
        """The edges that point into a batch, with their constants; in host memory, of which there is plenty."""
        return info.derive(self, lambda: self._cut(info, layer))

    def _cut(self, info: BatchInfo, layer: str) -> Slice:
        target, source, edge = self.edges.into(info.nodes)
        local = info.graph.locate(info.n_id, source)
        if local.numel() and int(local.min()) < 0:
            raise UnsupportedModelError(
                f"{layer} passes messages along edges whose source must be in the batch's halo",
                got="a halo of nodes with edges into the batch only, on a graph that is not symmetric",
                fix="Build the loader with HaloLoader(..., bidirectional=True).",
            )
        ends = [local, target] if self.edges.target_row == 1 else [target, local]
        constants = {name: value[edge] for name, value in self.constants.items()}
        return Slice(torch.stack(ends), constants)


def keep_edges(edge_index: Tensor, dropout: float) -> Tensor:
    """Draw which edges stay when a share of them is dropped; self-loops always do."""
    loop = edge_index[0] == edge_index[1]
    return (loop | (torch.rand(loop.shape, device=loop.device) >= dropout)).nonzero().squeeze(1)


class Recorder:
    """Records layers over one graph; layers that hand over the same edges share them.

    Args:
        graph: The whole graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._events: list[Event] = []

    @torch.inference_mode(False)  # kept for training too
    def record(
        self,
        layer: MessagePassing,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kinds: list[ArgumentKind],
        num_events: int,
    ) -> list[Event]:
        """Run a copy of the layer over the whole graph's edges and keep what it hands over.

        Args:
            layer: The layer; it is not run itself.
            name: How to call the layer in messages.
            args: Positional arguments of the layer's call in a batch.
            kwargs: Keyword arguments of that call.
            kinds: For every tensor among the arguments, in order, what it is.
            num_events: How many times the layer calls ``propagate`` and ``edge_updater``.
        """
        failures = []
        # Edge features that a layer multiplies with weights cannot be mixed with the weightless copy: they are
        # then left out, and the layer computes with the batch's own.
        for edge_features in (True, False):
            whole = self._whole_graph_arguments(args, kwargs, kinds, edge_features)
            try:
                caught = _run_without_weights(layer, whole[0], whole[1], num_events)
            except RuntimeError as error:
                failures.append(error)
                continue
            return [self._event(layer, edge_index, constants) for edge_index, constants in caught]
        raise UnsupportedModelError(
            f"{name} must compute what it hands to propagate from its edges alone",
            got=f"the error '{failures[-1]}' when it was run without features",
            fix="Replace the layer, or move what it does before propagate into message().",
        ) from failures[-1]

    def _whole_graph_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: list[ArgumentKind], edge_features: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        remaining = iter(kinds)

        def convert(value: Tensor) -> Tensor:
            kind = next(remaining)
            if kind == "own":
                name = cast(BatchTensor, value).attribute
                if name == "edge_index":
                    return self.graph.edge_index
                if name == "reversed edge_index":
                    return self.graph.edge_index.flip(0)
                if name == "n_id":
                    return torch.arange(self.graph.num_nodes)
                whole = self.graph.edge_attributes[name]
                return whole if edge_features else whole.to("meta")
            if kind == "node":
                return value.new_empty((self.graph.num_nodes, *value.shape[1:]), device="meta")
            if kind == "edge":
                return value.new_empty((self.graph.edge_index.size(1), *value.shape[1:]), device="meta")
            return value.to("meta") if value.is_floating_point() else value.cpu()

        return map_tensors(convert, (args, kwargs))

    def _event(self, layer: MessagePassing, edge_index: Tensor, constants: dict[str, Tensor]) -> Event:
        row = 1 if layer.flow == "source_to_target" else 0
        for event in self._events:
            if (
                event.edges.target_row == row
                and _same(event.edges.edge_index, edge_index)
                and event.constants.keys() == constants.keys()
                and all(_same(event.constants[name], constants[name]) for name in constants)
            ):
                return event
        shared = next(
            (e.edges for e in self._events if e.edges.target_row == row and _same(e.edges.edge_index, edge_index)), None
        )
        if shared is None and row == 1 and edge_index is self.graph.edge_index:
            shared = self.graph.incoming
        event = Event(shared or EdgesByTarget(edge_index, self.graph.num_nodes, row), constants)
        self._events.append(event)
        return event


class _Recorded(BaseException):
    """Stops a layer once all its calls are recorded."""


def _run_without_weights(
    layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any], num_events: int
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    copied = weightless_copy(layer)
    caught: list[tuple[Tensor, dict[str, Tensor]]] = []

    def catch(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(edge_index: Tensor, size: Any = None, **values: Any) -> Any:
            constants = {
                name: value
                for name, value in values.items()
                if isinstance(value, Tensor)
                and not value.is_meta
                and value.dim() > 0
                and value.size(0) == edge_index.size(1)
            }
            caught.append((edge_index, constants))
            if len(caught) == num_events:
                raise _Recorded
            # On with shapes alone, to the layer's next call.
            return method(edge_index.to("meta"), size=size, **map_tensors(lambda value: value.to("meta"), values))

        return run

    for module in copied.modules():
        if isinstance(module, MessagePassing):
            for method in EDGE_METHODS:
                run = getattr(module, method)
                setattr(module, method, catch(run) if module is copied else _on_meta(run))
    try:
        with torch.no_grad():
            copied(*args, **kwargs)
    except _Recorded:
        return caught
    raise RuntimeError(f"it made {len(caught)} calls of propagate instead of {num_events}")


def _on_meta(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(lambda value: value.to("meta"), (args, kwargs))
        return method(*args, **kwargs)

    return run


def weightless_copy(layer: MessagePassing) -> MessagePassing:
    """A copy of the layer, in evaluation mode, whose weights have shapes but no values."""
    memo: dict[int, Any] = {}
    for tensor in (*layer.parameters(), *layer.buffers()):
        memo[id(tensor)] = tensor.detach().to("meta")
    overrides = ("forward", *EDGE_METHODS, "_autoscaler")
    for module in layer.modules():
        # What a layer remembers of its last call cannot be copied while it is part of a computation.
        memo.update({id(value): value.detach() for value in vars(module).values() if isinstance(value, Tensor)})
        for name in overrides:
            if name in module.__dict__:
                memo[id(module.__dict__[name])] = None
    copied = copy.deepcopy(layer, memo)
    for module in copied.modules():
        for name in overrides:
            module.__dict__.pop(name, None)
        module.training = False
    return copied


def align(local: Tensor, wanted: Tensor, target_row: int, batch_size: int, layer: str) -> Tensor:
    """Find the recorded edges among those a layer computed inside a batch.

    Args:
        local: The layer's own edges, ``[2, num_local_edges]``.
        wanted: The batch's slice of the record, ``[2, num_edges]``.
        target_row: Which row holds the nodes that aggregate.
        batch_size: Number of the batch's own nodes.
        layer: How to call the layer in messages.

    Returns:
        For each wanted edge its position in ``local``, ``[num_edges]``.
    """
    inside = (local[target_row] < batch_size).nonzero().squeeze(1)
    position = inside[local[target_row, inside].argsort(stable=True)]
    if not _same(local[:, position], wanted):
        raise UnsupportedModelError(
            f"{layer} weighs edges with values that need a gradient, so it must see the same edges in a batch as in "
            "the whole graph",
            got="other edges",
            fix="Compute such values in message() or edge_update(), or pass constant edge weights.",
        )
    return position


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))
