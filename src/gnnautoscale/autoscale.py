"""Attaches histories to a model of PyG layers, without a change to the model, and detaches them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.graph import Graph
from gnnautoscale.history import Storage
from gnnautoscale.loader import BatchInfo, BatchTensor
from gnnautoscale.plan import make_plan
from gnnautoscale.record import EDGE_METHODS, tensors_in
from gnnautoscale.session import Memory, Penalty, Plan, Session, describe

M = TypeVar("M", bound=nn.Module)

OpenSession = Callable[[BatchInfo, Plan, Memory, torch.device], Session]


class Autoscaler:
    """What an attached model's modules report to: holds the plan, the histories and the running session.

    Args:
        model: The model to attach to.
        memory: Histories and records of the graph to train on.
        key: Recognises that graph; ``None`` until the first batch if only its size is known.
        edge_dropout: Share of the edges that is left out at random in training.
        explicit: Whether the model names its own slots.
    """

    def __init__(
        self, model: nn.Module, memory: Memory, key: str | None, *, edge_dropout: float = 0.0, explicit: bool = False
    ) -> None:
        self.memory = memory
        self.key = key
        self.edge_dropout = edge_dropout
        self.explicit = explicit
        self.plan: Plan | None = None
        self.session: Session | None = None
        self.penalty: Penalty | None = None
        # What is known about the edges of further graphs that the model was evaluated on.
        self._others: dict[str, Memory] = {}
        self._visited: tuple[str, Memory] | None = None
        self._open: OpenSession | None = None
        self._attach(model)

    # Attaching #######################################################################################################

    def _attach(self, model: nn.Module) -> None:
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MessagePassing)]
        if not layers:
            raise UnsupportedModelError(
                "an autoscaled model needs at least one message-passing layer (torch_geometric.nn.MessagePassing)",
                got=f"{type(model).__name__} without one",
                fix="A model that does not pass messages needs no histories: train it on batches of nodes.",
            )
        for name, layer in layers:
            if getattr(layer, "cached", False):
                raise UnsupportedModelError(
                    f"{describe(name, layer)} must compute its edges in every call",
                    got="cached=True, which would reuse the first batch's",
                    fix="Create it with cached=False; what it derives from edges is recorded once anyway.",
                )
        for name, layer in layers:
            _override(layer, "forward", partial(self._layer, layer, name or type(layer).__name__, layer.forward))
            for method in EDGE_METHODS:
                _override(layer, method, partial(self._edges, method, getattr(layer, method)))
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                _override(module, "forward", partial(self._batch_norm, module, module.forward))
        _override(model, "forward", partial(self._forward, model, model.forward))
        _override(model, "_autoscaler", self)

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Remove everything that was attached; what the classes define comes back into view."""
        del model._autoscaler
        for module in model.modules():
            for name in ("forward", *EDGE_METHODS):
                module.__dict__.pop(name, None)

    def _layer(self, layer: MessagePassing, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if self.session is None else self.session.layer(layer, name, run, args, kwargs)

    def _edges(self, method: str, run: Callable[..., Any], edge_index: Tensor, size: Any = None, **values: Any) -> Any:
        if self.session is None:
            return run(edge_index, size=size, **values)
        return getattr(self.session, method)(run, edge_index, size, values)

    def _batch_norm(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x) if self.session is None else self.session.batch_norm(norm, run, x)

    # Running #########################################################################################################

    def _forward(self, model: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:  # the model calls itself, or is being rehearsed
            return run(*args, **kwargs)
        args, kwargs = _unpack_batch(run, args, kwargs)
        info = _find_batch(args, kwargs)
        memory = self.memory_of(info.graph)
        device = next(iter(model.parameters()), info.n_id).device
        if self.plan is None:
            self.plan = make_plan(model, partial(self._run, run), info, args, kwargs, explicit=self.explicit)
        session = (self._open or partial(self._step, model))(info, self.plan, memory, device)
        return session.finish(self._run(run, session, args, kwargs))

    def _run(self, run: Callable[..., Any], session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.session = session
        try:
            return run(*args, **kwargs)
        finally:
            self.session = None

    def _step(self, model: nn.Module, info: BatchInfo, plan: Plan, memory: Memory, device: torch.device) -> Session:
        dropout = self.edge_dropout if model.training else 0.0
        return Session(info, plan, memory, device, edge_dropout=dropout, penalty=self.penalty)

    @contextmanager
    def running(self, open_session: OpenSession) -> Iterator[None]:
        """Run the model's calls in sessions of another kind than training steps."""
        self._open = open_session
        try:
            yield
        finally:
            self._open = None

    def memory_of(self, graph: Graph) -> Memory:
        """The histories of a graph: the one to train on, or another that is being evaluated."""
        if self.key is None and graph.num_nodes == self.memory.num_nodes:
            self.key = graph.key
        if self._visited is not None and graph.key == self._visited[0]:
            return self._visited[1]
        if graph.key == self.key:
            return self.memory
        raise InputError(
            f"an autoscaled model takes batches of the graph that its histories belong to, which has "
            f"{self.memory.num_nodes} nodes",
            got=f"a batch of another graph, with {graph.num_nodes} nodes and {graph.edge_index.size(1)} edges",
            fix="Use gas.infer(model, other_loader) to evaluate on a second graph; to train on it, detach the model "
            "and autoscale it again.",
        )

    @contextmanager
    def visiting(self, graph: Graph, *, apart: bool) -> Iterator[Memory]:
        """The histories to evaluate a graph with.

        Args:
            graph: The training graph, or any other.
            apart: Leave the training graph's histories alone; another graph's are always dropped afterwards.
        """
        if self.key is None and graph.num_nodes == self.memory.num_nodes:
            self.key = graph.key
        if graph.key == self.key:
            memory = self.memory.apart() if apart else self.memory
        else:
            known = Memory(graph, graph.num_nodes, self.memory.storage, self.memory.dtype)
            memory = self._others.setdefault(graph.key, known).apart()
        self._visited = graph.key, memory
        try:
            yield memory
        finally:
            self._visited = None


def autoscale(
    model: M,
    data: Data | int,
    *,
    storage: Storage = "device",
    dtype: torch.dtype | None = None,
    edge_dropout: float = 0.0,
) -> M:
    """Train a model in batches of a :class:`HaloLoader`, with histories in place of out-of-batch computation.

    The model is any module made of PyG layers. It is not changed: its modules report what they do, so that each
    layer runs on the right edges, the batch's embeddings are pushed, and the halo's are pulled. Called with a
    batch (``model(batch.x, batch.edge_index)`` or ``model(batch)``) it returns one row per in-batch node. On its
    first call it is tried on a tiny graph; a model that histories cannot make right is refused with the reason.

    Args:
        model: The model; it is returned.
        data: The graph to train on, or its number of nodes.
        storage: Where histories live: ``"device"`` or ``"host"`` memory.
        dtype: The floating-point type histories are kept in; by default that of the embeddings.
        edge_dropout: Share of the edges that is left out at random in each training step. Self-loops stay.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> from gnnautoscale import HaloLoader
        >>> data = KarateClub()[0]
        >>> model = autoscale(GCN(34, 16, num_layers=3, out_channels=4), data)
        >>> batch = next(iter(HaloLoader(data, num_parts=4)))
        >>> model(batch.x, batch.edge_index).size(0) == batch.batch_size
        True
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            "autoscale takes a torch.nn.Module", got=type(model).__name__, fix="Pass an instance of the model."
        )
    if is_autoscaled(model):
        raise InputError(
            "a model is autoscaled once", got="a model that is already", fix="Call gas.detach(model) first."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise InputError("dtype must be a floating-point type", got=f"{dtype}", fix="Use e.g. torch.float32.")
    if not 0.0 <= edge_dropout < 1.0:
        raise InputError(
            "edge_dropout must be at least 0 and below 1", got=f"{edge_dropout}", fix="Pass a share of the edges."
        )
    if isinstance(data, Data):
        graph = Graph(data)
        memory = Memory(graph, graph.num_nodes, storage, dtype)
        Autoscaler(model, memory, graph.key, edge_dropout=edge_dropout)
    else:
        if isinstance(data, bool) or not isinstance(data, int) or data < 1:
            raise InputError(
                "autoscale takes the graph or its number of nodes", got=repr(data), fix="Pass data or data.num_nodes."
            )
        Autoscaler(model, Memory(None, data, storage, dtype), None, edge_dropout=edge_dropout)
    return model


def detach(model: M) -> M:
    """Give a model back as it was before :func:`autoscale`, with the weights it has now.

    Example:
        >>> from torch_geometric.nn import GCN
        >>> model = detach(autoscale(GCN(8, 16, num_layers=2), 100))
    """
    attached(model)
    Autoscaler.detach(model)
    return model


def attached(model: nn.Module) -> Autoscaler:
    """What is attached to an autoscaled model."""
    found = getattr(model, "_autoscaler", None)
    if not isinstance(found, Autoscaler):
        raise InputError(
            "this needs an autoscaled model", got=type(model).__name__, fix="Call gas.autoscale(model, data) first."
        )
    return found


def is_autoscaled(model: nn.Module) -> bool:
    """Whether histories are attached to the model."""
    return isinstance(getattr(model, "_autoscaler", None), Autoscaler)


def _override(module: nn.Module, name: str, value: Any) -> None:
    """Put something before what the module's class defines; deleting it brings that back."""
    module.__dict__[name] = value


def _find_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchInfo:
    found = [
        value.info
        for value in tensors_in((args, kwargs))
        if isinstance(value, BatchTensor) and value.attribute == "edge_index"
    ]
    found += [
        value.edge_index.info
        for value in (*args, *kwargs.values())
        if isinstance(value, Data) and isinstance(value.edge_index, BatchTensor)
    ]
    if not found:
        raise InputError(
            "an autoscaled model is called with a batch of a HaloLoader",
            got="arguments without a batch's edge_index",
            fix="Pass batch.edge_index as it is (moving it to a device is fine); for all nodes of a graph use "
            "gas.infer(model, loader), or gas.detach(model) first.",
        )
    if any(info is not found[0] for info in found):
        raise InputError(
            "all arguments of a call must come from the same batch", got="two batches", fix="Pass one batch at a time."
        )
    return found[0]


def _unpack_batch(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn ``model(batch)`` into the arguments that the model's forward names, unless it wants the batch itself."""
    if len(args) != 1 or not isinstance(args[0], Data):
        return args, kwargs
    batch = args[0]
    parameters = [
        parameter
        for parameter in inspect.signature(run).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name not in kwargs
    ]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    # The paper's listings call the edges adj_t.
    named = {("adj_t" if name == "edge_index" and "adj_t" in required else name): batch[name] for name, _ in batch}
    missing = [name for name in required if name not in named]
    if len(required) == 1 and missing:
        return args, kwargs
    if missing:
        raise InputError(
            f"model(batch) passes each argument of {type(_owner(run)).__name__}.forward that the batch has by its name",
            got=f"a batch without {', '.join(missing)}",
            fix="Call the model with its arguments, e.g. model(batch.x, batch.edge_index).",
        )
    rows = {batch.num_nodes, batch.edge_index.size(1)}
    chosen = {
        parameter.name: named[parameter.name]
        for parameter in parameters
        if parameter.name in named
        and (
            parameter.default is parameter.empty
            or (isinstance(value := named[parameter.name], Tensor) and value.dim() > 0 and value.size(0) in rows)
        )
    }
    return (), {**chosen, **kwargs}


def _owner(run: Callable[..., Any]) -> Any:
    while isinstance(run, partial):
        run = run.func
    return getattr(run, "__self__", run)
