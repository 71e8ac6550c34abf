"""A model with histories: its hooks, its plans, and what its passes run on."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.attach.calling import (
    device_of,
    find_batch,
    form_of_arguments,
    model_must_run,
    needs_input_gradients,
    unpack_batch,
    weighted_sum,
)
from gnnautoscale.attach.hooked import HookedModel
from gnnautoscale.errors import InputError
from gnnautoscale.forward import (
    Arguments,
    Compensation,
    ExchangePolicy,
    Form,
    GraphMemory,
    LayerCall,
    Normalize,
    Observer,
    Plan,
    Session,
    TypedMemory,
    TypedPlan,
    TypedSession,
    step_exchange,
)
from gnnautoscale.graph import BatchTensor, Graph, TypedGraph, TypedInfo
from gnnautoscale.history import Storage
from gnnautoscale.planner import graph_form, make_plan, skips_at_random, still_holds
from gnnautoscale.transfer import Sharing

M = TypeVar("M", bound=nn.Module)

# How many graphs besides the training graph keep their records: enough for validation and test in turn.
_MOST_OTHERS = 4
# How many plans are kept: for training and evaluation, other arguments, and numbers that change.
_MOST_PLANS = 16


class _Situation(NamedTuple):
    """What a plan was made for; see :class:`Form`."""

    structure: Hashable
    numbers: Hashable


@dataclass(frozen=True)
class _Passes:
    """How to run the model's calls."""

    exchange: ExchangePolicy
    observers: Sequence[Observer] = ()
    input_gradients: bool = False
    trains: bool = False
    normalize: Normalize | None = None


class Autoscaler:
    """A model's hooks, its plans, and the histories of its training graph.

    A plan holds for the model, its mode and its arguments as they were when it was made; if any of these changes,
    another one is made. The ``key`` identifies that graph; it is ``None`` until the first batch if only the graph's
    size is known. An ``explicit`` model names its own slots.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Any,
        key: str | None,
        *,
        edge_dropout: float = 0.0,
        compensate: Compensation = "none",
        explicit: bool = False,
    ) -> None:
        self.memory, self.key = memory, key
        self.edge_dropout, self.compensate, self._explicit = edge_dropout, compensate, explicit
        #: How many forward passes the model has begun.
        self.num_passes = 0
        #: The plan of the last pass; ``None`` before the first.
        self.plan: Plan | None = None
        self._step_plan: Plan | None = None
        self._planned_for: _Situation | None = None
        self._plans: dict[_Situation, Plan] = {}
        self._passes = _Passes(step_exchange(compensate), trains=True)
        # Records of other graphs that the model was evaluated on.
        self._others: dict[str, GraphMemory] = {}
        self._visited: tuple[str, GraphMemory] | None = None
        # The batch of the last training step, the versions of weights, and the inputs.
        self._last_inputs: tuple[Any, int, list[ref[Tensor]]] = None, 0, []
        self._model, self._signature = model, inspect.signature(model.forward)  # before hooks take its place
        self._hooked = HookedModel(model, self, partial(self._forward, model))
        self._hooks = self._hooked.hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> Autoscaler:
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce__(self) -> Any:
        # Histories belong to a process, and their files to a run.
        fix = "Save model.state_dict(), or call gas.detach(model) first."
        raise InputError("an autoscaled model is saved by its weights", got="a pickle of all of it", fix=fix)

    @property
    def version(self) -> int:
        """Changes when the model does, apart from its weights and its mode."""
        return self._hooked.version

    @property
    def form(self) -> Form:
        """The model's modules, modes and attributes as they are now."""
        return self._hooked.form

    def detach(self) -> None:
        """Restore the model."""
        self._hooks.remove()
        self.memory.release()

    def bare_copy(self) -> nn.Module:
        """A deep copy of the model without histories, in the same mode."""
        return self._hooks.bare_copy()

    def twin(self, graph: Graph, compensate: Compensation) -> nn.Module:
        """A copy of the model in the same mode, autoscaled for the same graph with temporary histories of its own."""
        copied, memory = self.bare_copy(), self.memory.apart(graph, device_of(self._model))
        Autoscaler(copied, memory, graph.key, compensate=compensate, explicit=self._explicit)
        return copied

    # Running #########################################################################################################

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._hooks.session is not None:  # the model calls itself, or the planner runs it
            return self._hooks.run(None, (args, kwargs))
        arguments = unpack_batch(self._signature, type(model).__name__, args, kwargs)
        info = find_batch(arguments)
        memory = self.memory_of(info.graph)
        passes = self._passes
        with model_must_run(model):
            plan = self._plan_for(info, arguments)
        # A model without weights runs where its arguments are.
        device = next((value.device for value in (*self._hooked.weights, *tensors_in(arguments))), info.device)
        edge_dropout = self.edge_dropout if passes.trains and model.training else 0.0
        how: dict[str, Any] = {
            "normalize": passes.normalize,
            "observers": passes.observers,
            "edge_dropout": edge_dropout,
        }
        session: Session
        if isinstance(info, TypedInfo):
            session = TypedSession(info, cast(TypedPlan, plan), memory, device, passes.exchange, **how)
        else:
            how["input_gradients"] = passes.input_gradients or (passes.trains and needs_input_gradients(arguments))
            session = Session(info, plan, memory, device, passes.exchange, **how)
        self.num_passes += 1
        if passes.trains and memory.sharing is not None:
            memory.sharing.start()
        if passes.trains:
            self._step_plan = session.plan  # which computes the halo's rows too in some steps
            self._compare_inputs(info, arguments)
        session.begin()
        out = self._hooks.run(session, arguments)
        skipped = [] if isinstance(info, TypedInfo) else session.unseen_calls()
        if skipped and model.training and skips_at_random(plan, skipped, self._hooks, info, self._bound(arguments)):
            plan.optional.update(skipped)
        out = session.finish(out)
        if passes.trains and memory.sharing is not None:
            memory.sharing.finish(out)
        return out

    def _compare_inputs(self, info: Any, arguments: Arguments) -> None:
        """Warn if the model runs twice on a batch with different inputs, since histories have room for one."""
        versions = sum(weight._version for weight in self._hooked.weights)
        plain = [value for value in tensors_in(arguments) if not isinstance(value, BatchTensor)]
        inputs = [value for value in plain if value.layout == torch.strided]
        same_step, before = self._last_inputs[:2] == (info, versions), self._last_inputs[2]
        self._last_inputs = info, versions, [ref(value) for value in inputs]
        if not same_step or len(inputs) != len(before):
            return
        pairs = [(old, value) for old, value in zip([old() for old in before], inputs, strict=True) if old is not value]
        if any(old is not None and old.shape == value.shape and not torch.equal(old, value) for old, value in pairs):
            warnings.warn(
                "The model ran on one batch with two different inputs and the same weights. Its histories hold the "
                "rows of the last one, which other batches will pull. Make what calls it twice one model, or use one "
                "input.",
                stacklevel=6,
            )

    def _plan_for(self, info: Any, arguments: Arguments) -> Plan:
        """The plan for the model as it is now, called with these arguments; made if there is none."""
        situation = self._situation(info, arguments)
        if self.plan is not None and situation == self._planned_for:
            return self.plan
        plan = self._plans.pop(situation, None)
        if plan is None:
            alike = (known for other, known in self._plans.items() if other.structure == situation.structure)
            similar = None if isinstance(info, TypedInfo) else next(alike, None)
            plan = None if similar is None else similar.copy()
            if plan is None or not still_holds(plan, self._hooks, info, self._bound(arguments)):
                plan = make_plan(
                    self._hooks,
                    info,
                    self._bound(arguments),
                    explicit=self._explicit,
                    at_sums=self.compensate == "gradient",
                )
                self._hooked.planned(plan)
                if info.device.type == "cuda":
                    gc.collect()  # rehearsals leave tensors in reference cycles, which a GPU has no room for
                situation = self._situation(info, arguments)
        self._plans = {**dict(list(self._plans.items())[1 - _MOST_PLANS :]), situation: plan}
        self.plan, self._planned_for = plan, situation
        return plan

    def _situation(self, info: Any, arguments: Arguments) -> _Situation:
        model, given = self.form, form_of_arguments(info, arguments)
        kinds = frozenset({(weight.dtype, weight.device.type) for weight in self._hooked.weights})
        form = tuple(info.edges) if isinstance(info, TypedInfo) else graph_form(info.graph)
        structure = model.structure, model.mode, given.structure, form, kinds
        read = tuple(float(weighted_sum(value)) for value in self._hooked.values_read())
        return _Situation(structure, (model.numbers, given.numbers, read))

    def _bound(self, arguments: Arguments) -> inspect.BoundArguments:
        return self._signature.bind(*arguments[0], **arguments[1])

    def running(
        self,
        exchange: ExchangePolicy,
        *,
        observers: Sequence[Observer] = (),
        input_gradients: bool = False,
        normalize: Normalize | None = None,
    ) -> AbstractContextManager[None]:
        """Run the model with another policy than that of training steps; see :class:`Session`."""
        return self._running(_Passes(exchange, observers, input_gradients, normalize=normalize))

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        """Let another observer watch."""
        return self._running(replace(self._passes, observers=(*self._passes.observers, observer)))

    @contextmanager
    def _running(self, passes: _Passes) -> Iterator[None]:
        before, self._passes = self._passes, passes
        try:
            yield
        finally:
            self._passes = before

    def normalize_by(self, normalize: Normalize) -> None:
        """Let training steps run this in place of batch norms; see :class:`Session`."""
        self._passes = replace(self._passes, normalize=normalize)

    def driven(self) -> AbstractContextManager[None]:
        """Run training steps that the caller begins and completes itself."""
        return self._running(replace(self._passes, exchange=step_exchange(self.compensate, begins=False)))

    @property
    def session(self) -> Session | None:
        """The running pass, if any."""
        return self._hooks.session

    @property
    def calls(self) -> dict[str, LayerCall]:
        """The layer calls of training steps."""
        plan = self._step_plan or self.plan
        return plan.calls if plan is not None else {}

    @property
    def ignores_edges(self) -> bool:
        """Whether training steps run without the batch's own edges, on recorded ones alone."""
        plan = self._step_plan or self.plan
        return plan is not None and plan.ignores_edges

    def attributes(self, batch: Data) -> list[str]:
        """The batch attributes that ``model(batch)`` may use; of a batch of several types, all."""
        if isinstance(batch, HeteroData):
            return [*{name: None for store in batch.stores for name in store}]
        args, kwargs = unpack_batch(self._signature, "the model", (batch,), {})
        names = set(batch.keys()) if args else {"edge_index" if name == "adj_t" else name for name in kwargs}
        return [name for name in batch.keys() if name in names | {"edge_index"}]  # noqa: SIM118

    def needed_attributes(self) -> Collection[str] | None:
        """The attributes of a batch that the last plan's ``model(batch)`` uses; ``None`` if that may be any."""
        names = self._signature.parameters.keys()
        if self.plan is None or not names & {"edge_index", "adj_t"}:
            return None
        edges = {"edge_index"} if "e_id" in names or not self.plan.ignores_edges else set()
        return (names - {"edge_index", "adj_t"}) | edges

    # Graphs ##########################################################################################################

    def memory_of(self, graph: Any) -> Any:
        """The histories of the training graph, or of another one that is being evaluated."""
        self._identify(graph)
        if self._visited is not None and graph.key == self._visited[0]:
            return self._visited[1]
        if graph.key == self.key:
            return self.memory
        raise InputError(
            f"an autoscaled model takes batches of its training graph, which has {self.memory.num_nodes} nodes",
            got=f"a batch of another graph, with {graph.num_nodes} nodes and {graph.edge_index.size(1)} edges, or of "
            "the same graph with different features",
            fix="Use gas.infer(model, other_loader) to evaluate on another graph; to train on it, detach the model "
            "and autoscale it again.",
        )

    def _identify(self, graph: Graph) -> None:
        """Take the first graph of the right size for the training graph if only its size was given."""
        if self.key is None and graph.num_nodes == self.memory.num_nodes:
            self.key = graph.key

    @contextmanager
    def moved_to(self, graph: Graph, memory: GraphMemory) -> Iterator[None]:
        """Make another graph the training graph, unless this context fails."""
        before = self.memory, self.key
        self.memory, self.key = memory, graph.key
        try:
            yield
        except BaseException:
            self.memory, self.key = before
            raise

    @contextmanager
    def visiting(self, graph: Any, *, apart: bool, sharing: Sharing | None = None) -> Iterator[Any]:
        """Evaluate a graph; yields the histories to use, temporary ones unless it is the training graph itself.

        Those of the training graph are temporary too if ``apart``. Other processes are ``sharing`` another graph.
        """
        self._identify(graph)
        mine: Sharing | None = self.memory.sharing
        if mine is not None:
            mine.answer()
        # Other processes may see another graph where this one sees the same, so what they share decides.
        alike = sharing is None or (mine is not None and sharing.shared is mine.shared)
        is_own = graph.key == self.key and alike
        if is_own:
            memory = self.memory.apart(graph, device_of(self._model)) if apart else self.memory
        else:
            known = self._others.pop(graph.key, None)
            own = self.memory
            known = known or memory_for(graph, own.medium or own.storage, own.dtype, own.folder)
            if sharing is not None:
                known.sharing = sharing
                sharing.follow(lambda: known.records_by_kind)
            self._others = {**dict(list(self._others.items())[1 - _MOST_OTHERS :]), graph.key: known}
            memory = known.apart(graph, device_of(self._model))
        before, self._visited = self._visited, (graph.key, memory)
        try:
            yield memory
        finally:
            self._visited = before


def memory_for(
    graph: Graph | TypedGraph,
    storage: Storage,
    dtype: torch.dtype | None,
    folder: Any = None,
    *,
    overlap: bool = True,
) -> Any:
    """Room for the histories of a graph."""
    if isinstance(graph, TypedGraph):
        return TypedMemory(graph, storage, dtype, folder, overlap=overlap)
    return GraphMemory(graph, graph.num_nodes, storage, dtype, folder, overlap=overlap)


def attached(model: nn.Module) -> Autoscaler:
    """The autoscaler of a model."""
    found = getattr(model, "_autoscaler", None)
    if not isinstance(found, Autoscaler):
        raise InputError(
            "the model must be autoscaled", got=type(model).__name__, fix="Call gas.autoscale(model, data) first."
        )
    return found


def attached_to_plain_graph(model: nn.Module, what: str) -> Autoscaler:
    """The autoscaler of a model on a graph with one type of nodes, which ``what`` needs."""
    scaler = attached(model)
    if isinstance(scaler.memory, TypedMemory):
        raise InputError(
            f"{what} needs a plain graph",
            got="a model on a heterogeneous one",
            fix="Leave it out, or convert the graph with to_homogeneous() and use layers with edge types (RGCNConv).",
        )
    return scaler


def attached_alone(model: nn.Module, what: str) -> Autoscaler:
    """The autoscaler of a model whose graph is in this process as a whole, which ``what`` needs."""
    scaler = attached(model)
    if getattr(scaler.memory, "sharing", None) is not None:
        raise InputError(
            f"{what} needs the whole graph in one process",
            got="a model that several ranks train",
            fix="Load its weights in a process of its own, on the whole graph.",
        )
    return scaler


def is_autoscaled(model: nn.Module) -> bool:
    """Whether the model has histories."""
    return isinstance(getattr(model, "_autoscaler", None), Autoscaler)
