"""Attaches histories to a model of PyG layers, without a change to the model, and detaches them again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.attach.calling import find_batch, needs_input_gradients, unpack_batch
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import (
    ExchangePolicy,
    GraphMemory,
    Hooks,
    LayerCall,
    Observer,
    Plan,
    Session,
    StepExchange,
    describe,
    has_hooks,
)
from gnnautoscale.graph import Graph
from gnnautoscale.history import Storage, codec_for
from gnnautoscale.planner import make_plan

M = TypeVar("M", bound=nn.Module)

# How many graphs besides the training graph are remembered: enough for validation and test in turn.
_MOST_OTHERS = 4


@dataclass(frozen=True)
class _Passes:
    """How the model's calls are run: the policy, who looks on, and whether they are training steps."""

    exchange: ExchangePolicy
    observers: Sequence[Observer] = ()
    input_gradients: bool = False
    trains: bool = False


class Autoscaler:
    """What is attached to a model: its hooks, its plan, and the histories of the graph it is trained on.

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
        _check_model(model)
        self._memory, self._key = memory, key
        self.edge_dropout, self._explicit = edge_dropout, explicit
        self._plan: Plan | None = None
        self._planned_for: set[torch.dtype] = set()
        self._passes = _Passes(StepExchange(), trains=True)
        # What is known about the edges of further graphs that the model was evaluated on.
        self._others: dict[str, GraphMemory] = {}
        self._visited: tuple[str, GraphMemory] | None = None
        self._signature = inspect.signature(model.forward)
        self._weights = list(model.parameters())  # walking through all modules takes time in every step
        self._hooks = Hooks(model, partial(self._forward, model))
        self._hooks.override(model, "_autoscaler", self)

    def detach(self) -> None:
        """Give the model back as it was."""
        self._hooks.remove()
        self._memory.release()

    # Running #########################################################################################################

    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch.compile leaves what happens in here as it is
    def _forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._hooks.session is not None:  # the model calls itself, or is being rehearsed
            return self._hooks.run(None, args, kwargs)
        args, kwargs = unpack_batch(self._signature, type(model).__name__, args, kwargs)
        info = find_batch(args, kwargs)
        memory = self.memory_of(info.graph)
        device = next(iter(self._weights), info.n_id).device
        dtypes = {weight.dtype for weight in self._weights}
        if self._plan is None or self._planned_for != dtypes:
            arguments = self._signature.bind(*args, **kwargs)
            self._plan = make_plan(model, self._hooks, info, arguments, explicit=self._explicit)
            self._planned_for = dtypes
        passes = self._passes
        session = Session(
            info,
            self._plan,
            memory,
            device,
            passes.exchange,
            observers=passes.observers,
            edge_dropout=self.edge_dropout if passes.trains and model.training else 0.0,
            input_gradients=passes.input_gradients or (passes.trains and needs_input_gradients(args, kwargs)),
        )
        session.begin()
        return session.finish(self._hooks.run(session, args, kwargs))

    @contextmanager
    def running(
        self,
        exchange: ExchangePolicy,
        *,
        observers: Sequence[Observer] = (),
        input_gradients: bool = False,
        trains: bool = False,
    ) -> Iterator[None]:
        """Run the model's calls with another policy than that of training steps.

        Args:
            exchange: What happens at a slot.
            observers: Look at layers and their edges.
            input_gradients: Whether gradients of the model's inputs are wanted.
            trains: Whether these are training steps, in which edges are dropped.
        """
        before = self._passes
        self._passes = _Passes(exchange, observers, input_gradients, trains)
        try:
            yield
        finally:
            self._passes = before

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Let an observer look at the passes that are run in this context."""
        before = self._passes
        self._passes = replace(before, observers=(*before.observers, observer))
        try:
            yield
        finally:
            self._passes = before

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Run training steps that the caller begins and completes itself."""
        before = self._passes
        self._passes = replace(before, exchange=StepExchange(begins=False))
        try:
            yield
        finally:
            self._passes = before

    @property
    def session(self) -> Session | None:
        """The pass that is running, if any."""
        return self._hooks.session

    @property
    def plan(self) -> Plan | None:
        """How the model is run; ``None`` before its first call."""
        return self._plan

    @property
    def calls(self) -> dict[str, LayerCall]:
        """What is known about the model's layer calls."""
        return self._plan.calls if self._plan is not None else {}

    @property
    def is_bare(self) -> bool:
        """Whether the model is run without the batch's own edges."""
        return self._plan is not None and self._plan.bare

    def attributes(self, batch: Data) -> list[str]:
        """The attributes of a batch that ``model(batch)`` may look at."""
        args, kwargs = unpack_batch(self._signature, "the model", (batch,), {})
        names = set(batch.keys()) if args else {"edge_index" if name == "adj_t" else name for name in kwargs}
        return [name for name in batch.keys() if name in names | {"edge_index"}]  # noqa: SIM118

    # Graphs ##########################################################################################################

    @property
    def memory(self) -> GraphMemory:
        """Histories and records of the graph that the model is trained on."""
        return self._memory

    @property
    def key(self) -> str | None:
        """Recognises that graph; ``None`` before the first batch if only its size was given."""
        return self._key

    def memory_of(self, graph: Graph) -> GraphMemory:
        """The histories of a graph: the one to train on, or another that is being evaluated."""
        self._recognise(graph)
        if self._visited is not None and graph.key == self._visited[0]:
            return self._visited[1]
        if graph.key == self._key:
            return self._memory
        raise InputError(
            f"an autoscaled model takes batches of the graph that its histories belong to, which has "
            f"{self._memory.num_nodes} nodes",
            got=f"a batch of another graph, with {graph.num_nodes} nodes and {graph.edge_index.size(1)} edges, or of "
            "the same one with other features",
            fix="Use gas.infer(model, other_loader) to evaluate on a second graph; to train on it, detach the model "
            "and autoscale it again.",
        )

    def _recognise(self, graph: Graph) -> None:
        """The first graph of the right size is the training graph if only its size was given."""
        if self._key is None and graph.num_nodes == self._memory.num_nodes:
            self._key = graph.key

    @contextmanager
    def moved_to(self, graph: Graph, memory: GraphMemory) -> Iterator[None]:
        """Train on another graph from now on; if what is done in this context fails, nothing has changed."""
        before = self._memory, self._key
        self._memory, self._key = memory, graph.key
        try:
            yield
        except BaseException:
            self._memory, self._key = before
            raise

    @contextmanager
    def visiting(self, graph: Graph, *, apart: bool) -> Iterator[GraphMemory]:
        """The histories to evaluate a graph with.

        Args:
            graph: The training graph, or any other.
            apart: Leave the training graph's histories alone; another graph's are always dropped afterwards.
        """
        self._recognise(graph)
        if graph.key == self._key:
            memory = self._memory.apart() if apart else self._memory
        else:
            known = self._others.pop(graph.key, None)
            mine = self._memory
            known = known or GraphMemory(graph, graph.num_nodes, mine.medium or mine.storage, mine.dtype, mine.folder)
            self._others = {**dict(list(self._others.items())[1 - _MOST_OTHERS :]), graph.key: known}
            memory = known.apart()
        before, self._visited = self._visited, (graph.key, memory)
        try:
            yield memory
        finally:
            self._visited = before


def _check_model(model: nn.Module) -> None:
    """Refuse a model that histories cannot be attached to."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MessagePassing)]
    if not layers:
        raise UnsupportedModelError(
            "an autoscaled model needs at least one message-passing layer (torch_geometric.nn.MessagePassing)",
            got=f"{type(model).__name__} without one",
            fix="A model that does not pass messages needs no histories: train it on batches of nodes.",
        )
    for module in model.modules():
        if has_hooks(module) or is_autoscaled(module):
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
