"""Attaches histories to a model of PyG layers, without a change to the model, and detaches them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import EDGE_METHODS, GraphMemory, LayerCall, Penalty, Plan, Session, describe
from gnnautoscale.graph import BatchInfo, BatchTensor, Graph
from gnnautoscale.history import Storage, codec_for
from gnnautoscale.planner import make_plan

M = TypeVar("M", bound=nn.Module)

# How many graphs besides the training graph are remembered: enough for validation and test in turn.
_MOST_OTHERS = 4

OpenSession = Callable[[BatchInfo, Plan, GraphMemory, torch.device], Session]


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
        self,
        model: nn.Module,
        memory: GraphMemory,
        key: str | None,
        *,
        edge_dropout: float = 0.0,
        explicit: bool = False,
    ) -> None:
        self.memory = memory
        self.key = key
        self.edge_dropout = edge_dropout
        self.explicit = explicit
        self.plan: Plan | None = None
        self._planned_for: set[torch.dtype] = set()
        self.session: Session | None = None
        self.penalty: Penalty | None = None
        # What is known about the edges of further graphs that the model was evaluated on.
        self._others: dict[str, GraphMemory] = {}
        self._visited: tuple[str, GraphMemory] | None = None
        self._open: OpenSession | None = None
        self._begins = True
        self._signature = inspect.signature(model.forward)
        self._weights = list(model.parameters())  # walking through all modules takes time in every step
        self._overridden: list[tuple[nn.Module, str, Any]] = []
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
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), Autoscaler):
                raise InputError(
                    "a model is autoscaled once and as a whole",
                    got=f"{type(module).__name__}, which already is or belongs to a model that is",
                    fix="Call gas.detach on the model that was autoscaled first.",
                )
            if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
                raise UnsupportedModelError(
                    "histories are attached to the model itself",
                    got=f"{type(module).__name__}, which torch.compile has wrapped",
                    fix="Pass the model as it is; on a GPU, gas.fit captures whole training steps as CUDA graphs.",
                )
        for name, layer in layers:
            if getattr(layer, "cached", False):
                raise UnsupportedModelError(
                    f"{describe(name, layer)} must compute its edges in every call",
                    got="cached=True, which would reuse the first batch's",
                    fix="Create it with cached=False; what it derives from edges is recorded once anyway.",
                )
        for name, layer in layers:
            self._override(layer, "forward", partial(self._layer, layer, name or type(layer).__name__, layer.forward))
            self._override(layer, "SUPPORTS_FUSED_EDGE_INDEX", True)
            for method in EDGE_METHODS:
                self._override(layer, method, partial(self._edges, method, getattr(layer, method)))
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                self._override(module, "forward", partial(self._batch_norm, module, module.forward))
        self._override(model, "forward", partial(self._forward, model, model.forward))
        self._override(model, "_autoscaler", self)

    def _override(self, module: nn.Module, name: str, value: Any) -> None:
        """Put something before what a module or its class defines."""
        self._overridden.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    def detach(self) -> None:
        """Remove everything that was attached; what was there before comes back into view."""
        for module, name, before in reversed(self._overridden):
            if before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before
        self._overridden.clear()
        self.memory.release()

    def _layer(self, layer: MessagePassing, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            raise UnsupportedModelError(
                f"{describe(name, layer)} of an autoscaled model runs in the model's forward pass",
                got="a call outside of it, by hand or by gradient checkpointing",
                fix="Call the model as a whole; detach it to use its layers by themselves; histories make "
                "checkpointing unnecessary.",
            )
        return self.session.layer(layer, name, run, args, kwargs)

    def _edges(self, method: str, run: Callable[..., Any], edge_index: Tensor, size: Any = None, **values: Any) -> Any:
        if self.session is None:
            return run(edge_index, size=size, **values)
        return getattr(self.session, method)(run, edge_index, size, values)

    def _batch_norm(self, norm: _BatchNorm, run: Callable[[Tensor], Tensor], *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        return run(x) if self.session is None else self.session.batch_norm(norm, run, x)

    # Running #########################################################################################################

    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch.compile leaves what happens in here as it is
    def _forward(self, model: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:  # the model calls itself, or is being rehearsed
            return run(*args, **kwargs)
        args, kwargs = unpack_batch(self._signature, type(model).__name__, args, kwargs)
        info = _find_batch(args, kwargs)
        memory = self.memory_of(info.graph)
        device = next(iter(self._weights), info.n_id).device
        dtypes = {weight.dtype for weight in self._weights}
        if self.plan is None or self._planned_for != dtypes:
            arguments = self._signature.bind(*args, **kwargs)
            self.plan = make_plan(model, partial(self._run, run), info, arguments, explicit=self.explicit)
            self._planned_for = dtypes
        open_session = self._open or partial(self._step, model, _any_needs_gradient(args, kwargs))
        session = open_session(info, self.plan, memory, device)
        session.begin()
        return session.finish(self._run(run, session, args, kwargs))

    def _run(self, run: Callable[..., Any], session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.plan.bare:
            args, kwargs = map_tensors(_without_edges, (args, kwargs))
        self.session = session
        try:
            return run(*args, **kwargs)
        finally:
            self.session = None

    def _step(
        self,
        model: nn.Module,
        input_gradients: bool,
        info: BatchInfo,
        plan: Plan,
        memory: GraphMemory,
        device: torch.device,
    ) -> Session:
        return Session(
            info,
            plan,
            memory,
            device,
            edge_dropout=self.edge_dropout if model.training else 0.0,
            penalty=self.penalty,
            input_gradients=input_gradients,
            begins=self._begins,
        )

    @property
    def calls(self) -> dict[str, LayerCall]:
        """What is known about the model's layer calls."""
        return self.plan.calls if self.plan is not None else {}

    @property
    def is_bare(self) -> bool:
        """Whether the model is run without the batch's own edges."""
        return self.plan is not None and self.plan.bare

    def attributes(self, batch: Data) -> list[str]:
        """The attributes of a batch that ``model(batch)`` may look at."""
        args, kwargs = unpack_batch(self._signature, "the model", (batch,), {})
        names = set(batch.keys()) if args else {"edge_index" if name == "adj_t" else name for name in kwargs}
        return [name for name in batch.keys() if name in names | {"edge_index"}]  # noqa: SIM118

    @contextmanager
    def running(self, open_session: OpenSession) -> Iterator[None]:
        """Run the model's calls in sessions of another kind than training steps."""
        self._open = open_session
        try:
            yield
        finally:
            self._open = None

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Run training steps that the caller begins and completes itself."""
        before, self._begins = self._begins, False
        try:
            yield
        finally:
            self._begins = before

    def memory_of(self, graph: Graph) -> GraphMemory:
        """The histories of a graph: the one to train on, or another that is being evaluated."""
        self._recognise(graph)
        if self._visited is not None and graph.key == self._visited[0]:
            return self._visited[1]
        if graph.key == self.key:
            return self.memory
        raise InputError(
            f"an autoscaled model takes batches of the graph that its histories belong to, which has "
            f"{self.memory.num_nodes} nodes",
            got=f"a batch of another graph, with {graph.num_nodes} nodes and {graph.edge_index.size(1)} edges, or of "
            "the same one with other features",
            fix="Use gas.infer(model, other_loader) to evaluate on a second graph; to train on it, detach the model "
            "and autoscale it again.",
        )

    def _recognise(self, graph: Graph) -> None:
        """The first graph of the right size is the training graph if only its size was given."""
        if self.key is None and graph.num_nodes == self.memory.num_nodes:
            self.key = graph.key

    @contextmanager
    def visiting(self, graph: Graph, *, apart: bool) -> Iterator[GraphMemory]:
        """The histories to evaluate a graph with.

        Args:
            graph: The training graph, or any other.
            apart: Leave the training graph's histories alone; another graph's are always dropped afterwards.
        """
        self._recognise(graph)
        if graph.key == self.key:
            memory = self.memory.apart() if apart else self.memory
        else:
            known = self._others.pop(graph.key, None)
            mine = self.memory
            known = known or GraphMemory(graph, graph.num_nodes, mine.medium or mine.storage, mine.dtype, mine.folder)
            self._others = {**dict(list(self._others.items())[1 - _MOST_OTHERS :]), graph.key: known}
            memory = known.apart()
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
    history_dir: str | Path | None = None,
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
        storage: Where histories live: ``"device"`` or ``"host"`` memory, on ``"disk"``, or ``"auto"`` for the first of
            these that has room for them.
        dtype: The type histories are kept in: a floating-point type, or ``torch.int8`` or ``torch.float8_e4m3fn`` with
            a scale for each row; by default that of the embeddings.
        history_dir: The folder for histories on disk.
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
    if dtype is not None:
        codec_for(dtype, 1)  # refuses what cannot be
    if not 0.0 <= edge_dropout < 1.0:
        raise InputError(
            "edge_dropout must be at least 0 and below 1", got=f"{edge_dropout}", fix="Pass a share of the edges."
        )
    if isinstance(data, Data):
        graph = Graph.of(data)
        memory = GraphMemory(graph, graph.num_nodes, storage, dtype, history_dir)
        Autoscaler(model, memory, graph.key, edge_dropout=edge_dropout)
    else:
        if isinstance(data, bool) or not isinstance(data, int) or data < 1:
            raise InputError(
                "autoscale takes the graph or its number of nodes", got=repr(data), fix="Pass data or data.num_nodes."
            )
        Autoscaler(model, GraphMemory(None, data, storage, dtype, history_dir), None, edge_dropout=edge_dropout)
    return model


def detach(model: M) -> M:
    """Give a model back as it was before :func:`autoscale`, with the weights it has now.

    Example:
        >>> from torch_geometric.nn import GCN
        >>> model = detach(autoscale(GCN(8, 16, num_layers=2), 100))
    """
    attached(model).detach()
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


def _any_needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Data)]
    tensors = [value for batch in batches for _, value in batch if isinstance(value, Tensor)]
    return any(value.requires_grad for value in (*tensors_in((args, kwargs)), *tensors))


def _without_edges(value: Tensor) -> Tensor:
    """An edge-level tensor of a batch as one without edges, which costs no time to look at."""
    return value.emptied() if isinstance(value, BatchTensor) and value.is_own_edges else value


def unpack_batch(
    signature: inspect.Signature, model: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn ``model(batch)`` into the arguments that the model's forward names, unless it wants the batch itself."""
    if len(args) != 1 or not isinstance(args[0], Data):
        return args, kwargs
    batch = args[0]
    parameters = [
        parameter
        for parameter in signature.parameters.values()
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
            f"model(batch) passes each argument of {model}.forward that the batch has by its name",
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
