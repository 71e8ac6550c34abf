"""Audits an autoscaled model on the user's own graph: does it compute what the plain model computes?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch_geometric import seed_everything  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import checked, tensors_in, undisturbed
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.calling import CallModel, call_with_batch, device_of, info_of, to_model_device
from gnnautoscale.attach.inference import infer, nodes_by_type, plan_of, sweep
from gnnautoscale.attach.recomputation import Kinds, Mode, Recomputation, Rows, receptive_hops
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import (
    Arguments,
    HistoryStore,
    Observer,
    PendingRows,
    Plan,
    Session,
    StoreExchange,
    as_matrix,
    evaluating,
    has_rows,
)
from gnnautoscale.graph import BatchInfo, Graph, HaloLoader, TypedGraph, TypedInfo
from gnnautoscale.planner import expected_randomness

# How far rows may be off, relative to the largest value of their column, by rounding: of rows and of histories.
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.int8: 1e-1,
    torch.float8_e4m3fn: 2e-1,
}
# Columns whose largest value is below this share of the largest of all are compared with that share of it, since
# rounding there depends on the other columns.
_SMALL_COLUMN = 1e-2
# How many seeds are tried to find steps that leave out no layer at random.
_MOST_SEEDS = 32


@dataclass(frozen=True, repr=False)
class Verification:
    """What :func:`verify` found.

    Attributes:
        nodes: Number of nodes that were recomputed.
        how: What they were recomputed on: the whole graph, or their receptive field.
        inference: Largest error of :func:`infer` at these nodes, relative to the largest value of its column.
        training: The same for training steps on exact histories; ``None`` if there are no steps to compare, for the
            reason in ``note``.
        layer: The first layer that returns other rows, with its class; ``None`` if there is none. Either the layer
            deviates, or something between it and the layers before it.
        precision: The coarsest type of the outputs and of the histories, which determines the tolerance.
        tolerance: The largest relative error that counts as rounding.
        exact: Whether all errors are within the tolerance.
        note: Why training steps were not compared, or nothing.
    """

    nodes: int
    how: str
    inference: float
    training: float | None
    layer: str | None
    precision: str
    tolerance: float
    exact: bool
    note: str = ""

    def __repr__(self) -> str:
        return f"Verification({self})"

    def __str__(self) -> str:
        verdict = "NOT exact" if not self.exact else "exact" if self.training is not None else "exact in inference"
        steps = "" if self.training is None else f", {self.training:.2g} in training steps"
        words = [
            f"{verdict}: {self.nodes} nodes recomputed on {self.how}, largest relative error {self.inference:.2g} in "
            f"inference{steps} (rounding in {self.precision}: up to {self.tolerance:g})."
        ]
        if self.layer is not None:
            words.append(f"The first layer with other rows is {self.layer}: look at it, and at what comes before it.")
        elif not self.exact:
            words.append("All layers agree, so look at what comes after the last one.")
        return " ".join([*words, *([self.note] if self.note else [])])


@checked(nodes={"least": 1}, seed={"least": 0, "below": 2**32}, loader={"fix": "Pass HaloLoader(data, num_parts=...)."})
@torch.inference_mode(False)  # steps are as in training
@torch.no_grad()
def verify(
    model: nn.Module,
    loader: HaloLoader,
    *,
    nodes: int | Tensor | dict[str, Tensor] = 100,
    call: CallModel = call_with_batch,
    seed: int = 0,
) -> Verification:
    """Check an autoscaled model against the plain model on some nodes of a graph.

    A copy of the model without histories recomputes these nodes directly, on the whole graph if it fits into memory,
    otherwise on their receptive field. This is compared with two things:

    * *Inference*: the rows that :func:`infer` returns.
    * *Training steps*: the rows of the batches that hold these nodes, in training mode and with histories that hold the
      exact rows of that mode. Chance and the statistics of a batch are left out on both sides: dropout does nothing,
      noise is constant, no edges are dropped, and batch norms use their running averages. Gradients are not compared,
      since none flows through pulled rows. A model that cannot be trained is compared in inference only.

    If one of them deviates, the layers are compared too, to name the first that does. Everything is computed without
    autocast and TF32. Weights, buffers, attributes, histories, gradients, modes and random states stay as they are.

    Of several ranks each verifies nodes of its own, on their receptive field, which it gathers from the others; all of
    them get what they found together.

    Args:
        model: An autoscaled model.
        loader: Makes the batches, of the training graph or of another one.
        nodes: Number of nodes to draw, or their indices ``[count]``; on a heterogeneous graph a dictionary of these by
            type, or the number of nodes to draw of all types that the model has outputs for.
        call: Calls the model with a batch, if ``model(batch)`` does not fit. It is also called with the plain copy, and
            then with the whole graph, or a part of it, that has the attributes of a batch.
        seed: Determines the drawn nodes.

    Returns:
        The errors, and whether they are more than rounding. A deviation is returned, not raised. A model that
        :func:`infer` refuses is refused here too.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4, dropout=0.5), data)
        >>> found = gas.verify(model, gas.HaloLoader(data, num_parts=4), nodes=10)
        >>> found.exact, found.nodes, found.how
        (True, 10, 'the whole graph')
    """
    scaler, graph = attached(model), loader.follow()
    with _full_precision(device_of(model)), scaler.visiting(graph, apart=True):
        with evaluating(model):
            plan = plan_of(model, loader, call)  # may initialize lazy weights, which stay
        with undisturbed(device_of(model)):
            with _untouched(model):
                outputs = tensors_in(infer(model, loader, call=call, update_histories=False))
            chosen = _chosen(nodes, loader, seed, plan)
            by_type = _by_type(graph, chosen)
            precision, tolerance = _tolerance(model, plan, outputs, not loader.is_whole)
            plain = _recomputation(model, loader, chosen, plan)
            exact = plain.run(evaluating, call)
            pairs = zip(outputs, Kinds(plan).of_outputs(len(outputs)), strict=True)
            inference = _largest_error([value[by_type[kind]] for value, kind in pairs], exact.outputs)
            # All processes that share the graph look at layers if one of them has to.
            inference, layer = max(loader.everyone(inference)), None
            if inference > tolerance:
                layer = _first_deviating(_steps(model, loader, chosen, evaluating, call, plan), exact, tolerance)
            training, other, note = _compare_training(model, loader, chosen, call, tolerance)
            layer = layer or other
    return Verification(
        nodes=sum(loader.everyone(chosen.numel())),
        how=plain.how,
        inference=inference,
        training=training,
        layer=next((name for name in loader.everyone(layer) if name is not None), None),
        precision=precision,
        tolerance=tolerance,
        exact=max(inference, training or 0.0) <= tolerance,
        note=note and f"Training steps were not compared: {note}",
    )


def _compare_training(
    model: nn.Module, loader: HaloLoader, nodes: Tensor, call: CallModel, tolerance: float
) -> tuple[float | None, str | None, str]:
    """The largest error of training steps, and if that is more than rounding, the first layer that deviates.

    If there are no steps to compare, on one of the processes that share the graph, the reason is the third.
    """
    plan, why_not = Plan(), ""
    try:
        with _training(model):
            plan = plan_of(model, loader, call)  # before chance is left out, since the planner looks at it
    except UnsupportedModelError as refusal:
        why_not = str(refusal)
    why_not = next(filter(None, loader.everyone(why_not)), "")
    if why_not:
        return None, None, why_not
    plain = _recomputation(model, loader, nodes, plan)
    for seed in range(_MOST_SEEDS):
        seeded = partial(_call_seeded, call, seed)
        exact = plain.run(_training_without_chance, seeded)
        if plan.calls.keys() <= exact.described.keys():
            break
    else:
        got = "a model that leaves out some of them at random in every step"
        rule, fix = "there must be steps that run all layers", "Leave out fewer of them."
        why_not = str(UnsupportedModelError(rule, got=got, fix=fix))
    if any(loader.everyone(bool(why_not))):
        return None, None, why_not
    steps = _steps(model, loader, nodes, _training_without_chance, seeded, plan)
    error = max(loader.everyone(_largest_error(steps.outputs, exact.outputs)))
    return error, _first_deviating(steps, exact, tolerance) if error > tolerance else None, ""


def _recomputation(model: nn.Module, loader: HaloLoader, nodes: Tensor, plan: Plan) -> Recomputation:
    graph, places = loader.graph_around(nodes, receptive_hops(plan))
    return Recomputation(model, graph, places, plan, whole=graph is loader.graph)


def _call_seeded(call: CallModel, seed: int, model: nn.Module, batch: Data) -> Any:
    """Call a model so that it draws the same random numbers every time, to leave out the same layers for example."""
    seed_everything(seed)
    return call(model, batch)


def _chosen(nodes: Any, loader: HaloLoader, seed: int, plan: Plan) -> Tensor:
    """The nodes to recompute, sorted and distinct, ``[count]``; those of a heterogeneous graph in the joined one.

    Processes that share the graph draw about as many each, of their own ones.
    """
    graph = loader.graph
    if isinstance(nodes, (Tensor, dict)):
        first = graph.first if isinstance(graph, TypedGraph) else {"": 0}
        nodes = torch.cat([first[kind] + each for kind, each in nodes_by_type(nodes, graph).items()])
    elif not isinstance(nodes, bool) and isinstance(nodes, int) and nodes >= 0:
        among, nodes = torch.arange(loader.num_own), -(-nodes // len(loader.everyone(None)))
        if isinstance(graph, TypedGraph):  # those that the model has outputs for, if there are any here
            of_outputs, own = dict.fromkeys(Kinds(plan).of_outputs(0)), loader.own_counts
            kinds = [kind for kind in of_outputs if own[kind]] or list(own)
            among = torch.cat([graph.first[kind] + torch.arange(own[kind]) for kind in kinds])
        nodes = among[torch.randperm(among.numel(), generator=torch.Generator().manual_seed(seed))[:nodes]]
    if not isinstance(nodes, Tensor) or not nodes.numel():
        got = "no nodes" if isinstance(nodes, Tensor) else repr(nodes)
        rule = "verify takes a number of nodes to draw, at least 1, or their indices, by type if there are several"
        raise InputError(rule, got=got, fix="Leave nodes out to draw 100 of them.")
    chosen: Tensor = torch.unique(nodes)
    return chosen


# Comparing ###########################################################################################################


def _tolerance(model: nn.Module, plan: Plan, outputs: list[Tensor], exchanging: bool) -> tuple[str, float]:
    """The coarsest type of outputs and of histories, if any are used, and the error that it may cause."""
    kept = attached(model).memory.dtype
    used = {value.dtype for value in outputs}
    used |= {kept or plan.rows[slot].dtype for slot in plan.live} if exchanging else set()
    coarsest = max(used & _TOLERANCES.keys() or {torch.float32}, key=lambda dtype: _TOLERANCES[dtype])
    return str(coarsest).removeprefix("torch."), _TOLERANCES[coarsest]


def _largest_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative error of some rows, each ``[count, ...]``; infinite if they cannot be compared."""
    if len(found) != len(exact):
        return math.inf
    return max((_error(got, want) for got, want in zip(found, exact, strict=True)), default=0.0)


def _error(found: Tensor, exact: Tensor) -> float:
    if found.shape != exact.shape:
        return math.inf
    if not exact.numel():
        return 0.0
    got, want = (as_matrix(rows).double() for rows in (found, exact))
    error = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, (got - want).abs())
    column = torch.where(want.isfinite(), want.abs(), 0.0).amax(0)
    largest = error / torch.maximum(column, _SMALL_COLUMN * column.max()).clamp(min=1e-6)
    return float(largest.nan_to_num(nan=math.inf).max())


def _first_deviating(found: Rows, exact: Rows, tolerance: float) -> str | None:
    """The first layer, in words, that returns other rows, leaves others in its history, or does not run at all."""
    for call, want in exact.layers.items():
        differs = _error(found.layers.get(call, want[:0]), want) > tolerance
        if differs or _error(found.histories.get(call, as_matrix(want)), as_matrix(want)) > tolerance:
            return exact.described[call]
    return None


# Training steps ######################################################################################################


def _steps(model: nn.Module, loader: HaloLoader, nodes: Tensor, mode: Mode, call: CallModel, plan: Plan) -> Rows:
    """What steps compute for some nodes, in a mode and with histories that a sweep in the same mode has filled."""
    scaler, graph, histories = attached(model), loader.graph, dict[str, Tensor]()
    by_type = _by_type(graph, nodes)
    seen = _Seen(by_type, Kinds(plan))
    call = partial(_from_the_same_state, call)
    with _untouched(model), mode(model), scaler.visiting(loader.graph, apart=True) as memory:
        if not loader.is_whole:
            sweep(model, loader, call)
            batch = loader.batch_for(by_type if isinstance(graph, TypedGraph) else nodes)
            histories = _kept(memory, info_of(batch), device_of(model))
        exchange = StoreExchange(HistoryStore(writes=False))
        with scaler.running(exchange, observers=[seen]), torch.enable_grad():
            for batch in loader.in_order():
                info = info_of(batch)
                if seen.any_in(info):
                    seen.output(info, call(model, to_model_device(batch, model)))
    return Rows(list(seen.outputs.values()), seen.layers, histories=histories)


def _from_the_same_state(call: CallModel, model: nn.Module, batch: Data) -> Any:
    """Call a model without a trace, so that what changes from step to step, such as a temperature, stays the same."""
    with _untouched(model, weights=False):
        return call(model, batch)


def _kept(memory: Any, info: Any, device: torch.device) -> dict[str, Tensor]:
    """The rows of a batch's own nodes in all histories, by slot, each ``[batch_size, width]``."""
    if isinstance(info, TypedInfo):
        kinds = (_kept(memory.kinds[kind], of, device) for kind, of in info.nodes.items())
        return {slot: rows for each in kinds for slot, rows in each.items()}
    index = memory.rows_of(info).index[: info.batch_size]
    return {
        slot: history.pull(index, device=device, dtype=torch.double).cpu() for slot, history in memory.histories.items()
    }


class _Seen(Observer):
    """Keeps what layers and the model return for some nodes, batch by batch."""

    def __init__(self, nodes: dict[str, Tensor], kinds: Kinds) -> None:
        self._nodes, self._kinds = nodes, kinds
        self.layers: dict[str, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def any_in(self, info: BatchInfo | TypedInfo) -> bool:
        """Whether a batch holds one of the nodes."""
        return any(bool((self._places(_of_kind(info, kind), kind) >= 0).any()) for kind in self._nodes)

    def output(self, info: BatchInfo | TypedInfo, out: Any) -> None:
        """Keep the output of a batch."""
        found = tensors_in(out)
        for number, (value, kind) in enumerate(zip(found, self._kinds.of_outputs(len(found)), strict=True)):
            self._keep(self.outputs, number, value, info, kind)

    def around_layer(
        self, session: Session, call: str, layer: MessagePassing, arguments: Arguments, run: Callable[[], Any]
    ) -> Any:
        """See :meth:`Observer.around_layer`."""
        out, kind = run(), self._kinds.of_call(call)
        of = None if kind is None else _of_kind(session.info, kind)
        if of is not None and kind is not None and has_rows(out, of.num_rows, of.batch_size):
            rows = out.plain if isinstance(out, PendingRows) else out  # of which the batch's own are there
            self._keep(self.layers, call, rows, session.info, kind)
        return out

    def _places(self, info: BatchInfo, kind: str) -> Tensor:
        return info.graph.locate(info.nodes, self._nodes[kind])

    def _keep(self, kept: dict[Any, Tensor], name: Any, value: Tensor, info: BatchInfo | TypedInfo, kind: str) -> None:
        places = self._places(_of_kind(info, kind), kind)
        here, rows = places >= 0, value.detach().cpu()
        if name not in kept:
            kept[name] = torch.zeros((self._nodes[kind].numel(), *rows.shape[1:]), dtype=rows.dtype)
        if kept[name].shape[1:] == rows.shape[1:]:
            kept[name][here] = rows[places[here]].to(kept[name].dtype)


def _of_kind(info: BatchInfo | TypedInfo, kind: str) -> BatchInfo:
    return info.nodes[kind] if isinstance(info, TypedInfo) else info


def _by_type(graph: Graph | TypedGraph, nodes: Tensor) -> dict[str, Tensor]:
    """Chosen nodes by type; a plain graph has one type, without a name."""
    return graph.split(nodes) if isinstance(graph, TypedGraph) else {"": nodes}


# Modes ###############################################################################################################


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode, in which batch norms use their running averages."""
    with evaluating(model):  # which puts all modules back into their modes
        model.train()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        yield


@contextmanager
def _training_without_chance(model: nn.Module) -> Iterator[None]:
    """The same, with constants in place of random numbers."""
    with _training(model), expected_randomness():
        yield


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Compute in the types of the weights: without autocast, and on a GPU without TF32."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _untouched(model: nn.Module, *, weights: bool = True) -> Iterator[None]:
    """Afterwards buffers, attributes and modes are as before, and so are weights unless they are left out."""
    containers: dict[int, tuple[Any, Any]] = {}
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    waiting: list[Any] = [vars(module) for module in model.modules()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if is_lazy(value):
                continue
            if weights or not isinstance(value, nn.Parameter):
                tensors.setdefault(id(value), (value, value.detach().clone()))
        elif isinstance(value, (dict, list, set, tuple)) and id(value) not in containers:
            containers[id(value)] = value, copy.copy(value)
            waiting += value.values() if isinstance(value, dict) else value
    try:
        yield
    finally:
        for now, before in containers.values():
            if isinstance(now, list):
                now[:] = before
            elif isinstance(now, (dict, set)):
                now.clear()
                now.update(before)
        with torch.no_grad():
            for tensor, value in tensors.values():
                # Only if something was written: autograd notices every write.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
