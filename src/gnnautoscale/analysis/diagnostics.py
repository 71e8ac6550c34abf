"""Measures the errors of histories and gradients, and how much layers amplify them.

Nothing here changes the model: neither weights, gradients and histories nor the random state. ``docs/diagnostics.md``
explains the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCNConv, GINConv, SAGEConv  # type: ignore[import-untyped]
from torch_geometric.nn.models.basic_gnn import BasicGNN  # type: ignore[import-untyped]

from gnnautoscale._util import checked, map_tensors, tensors_in, undisturbed
from gnnautoscale.analysis.bounds import LayerConstants, LayerErrors, MessageEdges, measure, theorem1_by_node
from gnnautoscale.analysis.gradients import gradient_agreement
from gnnautoscale.analysis.lipschitz import jacobian_norm, lipschitz_constant
from gnnautoscale.attach import (
    CallModel,
    attached,
    attached_alone,
    call_with_batch,
    device_of,
    info_of,
    to_model_device,
)
from gnnautoscale.errors import InputError
from gnnautoscale.forward import HistoryStore, LayerRun, Observer, Plan, StoreExchange, evaluating
from gnnautoscale.graph import HaloLoader, TypedGraph, TypedInfo
from gnnautoscale.models import Stack
from gnnautoscale.tasks import Task

Diagnostic = Literal["staleness", "gradients", "lipschitz"]
DIAGNOSTICS: tuple[Diagnostic, ...] = get_args(Diagnostic)

# The most groups of ages.
_MOST_AGES = 64
# The most iterations for a Jacobian's norm, and the most rows of a layer's own network to examine.
_ITERATIONS = 50
_MOST_ROWS = 2048


@checked(what={"fix": "Name them in a list."}, ages={"dims": 1, "integers": True})
def diagnose(
    model: nn.Module,
    loader: HaloLoader,
    what: Diagnostic | Sequence[Diagnostic] = "staleness",
    *,
    ages: Tensor | None = None,
    task: Task | None = None,
    target: str | None = None,
    call: CallModel = call_with_batch,
) -> dict[str, dict[str, Any]]:
    r"""Measure the errors of a model with its current weights and histories.

    Every batch is computed as if it came next, in evaluation mode. ``"staleness"`` compares the rows of histories and
    of batches with exact ones, layer by layer, and with the bound of Theorem 1 if the model's constants are known.
    ``"gradients"`` compares the gradient of the mean loss over all targets, summed over batches, with that of full
    batch, for plain steps and for steps with ``compensate="gradient"``, which run on a copy of the model; the result
    is a :class:`gnnautoscale.analysis.GradientAgreement`. ``"lipschitz"`` finds the largest factor by which each layer
    amplifies a small change of its inputs on the whole graph, and the constants of its messages and its update if
    these are known.

    Several ranks measure ``"staleness"`` and ``"gradients"`` together, and each gets those of all nodes; there are no
    bound and no compensated gradients.

    On a heterogeneous graph each slot has rows of one type of nodes, and so has its staleness. There is no bound, and
    no ``"lipschitz"``.

    Args:
        model: An autoscaled model.
        loader: Makes the batches of the training graph.
        what: The diagnostics to run, or one of them.
        ages: Number of steps since each node's rows were written, ``[num_nodes]``, -1 for never; optional. The types of
            a heterogeneous graph lie behind each other.
        task: Gives the loss for ``"gradients"``; by default node classification, which needs ``y`` and ``train_mask``.
        target: The type of nodes with targets for ``"gradients"`` on a heterogeneous graph; by default the only one
            that has both outputs of the model and ``y``.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.

    Returns:
        The results of each diagnostic, as run folders store them.

    Example:
        >>> import gnnautoscale as gas
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> loader = gas.HaloLoader(data, num_parts=4)
        >>> gas.refresh(model, loader)
        >>> found = gas.diagnose(model, loader, ["staleness", "gradients"])
        >>> found["staleness"]["layers"][0]["staleness"]["max"] < 1e-5
        True
        >>> plain, compensated = found["gradients"], found["gradients"]["compensated"]
        >>> plain["cosine"] < 0.999 < compensated["cosine"]  # plain, no gradient flows through pulled rows
        True
    """
    if ages is not None and ages.shape != (loader.graph.num_nodes,):
        rule = f"ages must have one number for each of the {loader.graph.num_nodes} nodes"
        raise InputError(rule, got=f"shape {tuple(ages.shape)}", fix="Leave them out, or pass [num_nodes].")
    if target is not None and not isinstance(loader.graph, TypedGraph):
        raise InputError("target is a type of nodes of a heterogeneous graph", got="a plain one", fix="Leave it out.")
    names = [what] if isinstance(what, str) else list(what)
    if not set(names) <= set(DIAGNOSTICS):
        rule = f"diagnose must be some of {', '.join(DIAGNOSTICS)}"
        raise InputError(rule, got=repr(what), fix="Name them in a list.")
    probes: dict[str, Callable[..., Mapping[str, Any]]] = {
        "staleness": partial(_staleness, ages=ages),
        "gradients": partial(gradient_agreement, task=task, target=target),
        "lipschitz": _lipschitz,
    }
    found: dict[str, dict[str, Any]] = {}
    if "lipschitz" in names:
        attached_alone(model, "diagnose 'lipschitz'")
    with _nothing_changed(model):
        for name in names:
            start = time.perf_counter()
            values = probes[name](model, loader, call=call)
            found[name] = {"seconds": time.perf_counter() - start, **values}
    return found


def _staleness(model: nn.Module, loader: HaloLoader, *, call: CallModel, ages: Tensor | None) -> dict[str, Any]:
    errors, graph = measure(model, loader, call=call), loader.graph
    pulled = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for batch in loader.in_order():
        info = info_of(batch)
        pulled[(info.joined if isinstance(info, TypedInfo) else info).halo] = True
    pulled[loader.pulled_elsewhere] = True

    def of_type(kind: str | None, by_node: Tensor) -> Tensor:
        if kind is None or not isinstance(graph, TypedGraph):
            return by_node
        return by_node[graph.first[kind] : graph.first[kind] + graph.counts[kind]]

    def of_all(kind: str | None, values: Tensor) -> Tensor:
        """The values of all nodes of a type, of which each of several ranks has those of its own first."""
        num_own = loader.num_own if kind is None else loader.own_counts[kind]
        return torch.cat(loader.everyone(values[:num_own]))

    names = ("closeness", "staleness", "history", "norm")
    for name in names:
        errors = [replace(at, **{name: of_all(at.kind, getattr(at, name))}) for at in errors]  # type: ignore[arg-type]
    bounds = [None] * len(errors) if isinstance(graph, TypedGraph) else _bounds(model, loader, errors)
    layers = []
    for at, bound in zip(errors, bounds, strict=True):
        known = None if ages is None else of_all(at.kind, of_type(at.kind, ages))
        layer = _layer(at, of_all(at.kind, of_type(at.kind, pulled)), known, bound)
        layers.append(layer if at.kind is None else {**layer, "type": at.kind})
    return {"layers": layers}


def _layer(errors: LayerErrors, pulled: Tensor, ages: Tensor | None, bound: float | None) -> dict[str, Any]:
    has_history = errors.has_history and bool(pulled.any())
    old = torch.zeros_like(pulled) if ages is None or not has_history else pulled & (ages >= 0)
    return {
        "layer": errors.name,
        "staleness": _summary(errors.staleness[pulled], errors.norm[pulled]) if has_history else None,
        "closeness": _summary(errors.closeness, errors.norm),
        "history": _summary(errors.history[pulled], errors.norm[pulled]) if has_history else None,
        "by_age": _by_age(ages[old], errors.staleness[old]) if ages is not None and bool(old.any()) else [],
        "bound": bound,
    }


def _summary(error: Tensor, norm: Tensor) -> dict[str, float]:
    mean = float(error.mean())
    return {"mean": mean, "max": float(error.max()), "relative": mean / max(float(norm.mean()), 1e-30)}


def _by_age(ages: Tensor, staleness: Tensor) -> list[dict[str, Any]]:
    """Mean staleness of rows by age, in at most ``_MOST_AGES`` groups."""
    width = 1 + int(ages.max() - ages.min()) // _MOST_AGES
    _, group, rows = torch.unique((ages - ages.min()) // width, return_inverse=True, return_counts=True)
    zeros = torch.zeros(rows.numel(), dtype=torch.double)
    mean_age, mean = (zeros.index_add(0, group, value.double()) / rows for value in (ages, staleness))
    return [
        {"age": round(age), "rows": count, "staleness": value}
        for age, count, value in zip(mean_age.tolist(), rows.tolist(), mean.tolist(), strict=True)
    ]


def _bounds(model: nn.Module, loader: HaloLoader, errors: Sequence[LayerErrors]) -> list[float | None]:
    """Theorem 1's bound on the largest error of each layer; ``None`` if it does not apply or constants are unknown.

    It applies to layers that read only the layer before and all use the same edges, which must be in one process.
    """
    scaler, plan = attached(model), cast(Plan, attached(model).plan)
    slots = [slot for slot in plan.needs if slot != Plan.OUTPUT]
    plain = all(plan.needs[slot] == {before} for before, slot in pairwise([*slots, Plan.OUTPUT]))
    plain = plain and getattr(scaler.memory, "sharing", None) is None
    layers = _constants(model) if plain and not plan.inner and not plan.explicit else None
    records = [record for slot in slots for record in scaler.memory.records.get(slot, [])]
    same = len(records) == len(slots) and len(set(records)) == 1 and records[0].edges.target_row == 1
    if layers is None or not same or len(layers) != len(errors):
        return [None] * len(errors)
    edges = MessageEdges(records[0].edges.edge_index, loader.graph.num_nodes, records[0].constants.get("edge_weight"))
    batch_of = (loader.labels // loader.batch_size)[edges.edge_index]
    stale = [layer.staleness for layer in errors[:-1]]
    by_node = theorem1_by_node(layers, edges, stale, batch_of[0] != batch_of[1])
    return [float(bound.max()) for bound in by_node]


def _constants(model: nn.Module) -> list[LayerConstants] | None:
    """The constants of a model's layers in evaluation mode; ``None`` if its forward pass or a layer is unknown."""
    convs: list[nn.Module] = list(getattr(model, "convs", []))
    try:
        after = _between(model, len(convs))
        layers = [layer for layer in map(layer_constants, convs) if layer is not None]
    except InputError:  # a module with unknown constant
        return None
    if after is None or not layers or len(layers) < len(convs):
        return None
    found = [
        replace(layer, message=layer.message * before, own=layer.own * before)
        for layer, before in zip(layers, [1.0, *after], strict=False)
    ]
    found[-1] = replace(found[-1], update=found[-1].update * after[-1])
    return found


def _between(model: nn.Module, num_layers: int) -> list[float] | None:
    """The constant of the modules after each layer; ``None`` if the model's forward pass is unknown."""
    if isinstance(model, Stack):
        known = type(model).forward is Stack.forward and type(model).call_layer is Stack.call_layer
        after = [lipschitz_constant(norm) for norm in model.norms]  # ReLU and dropout have constant 1
        after += [1.0] * (num_layers - len(after))
        after[-1] *= 1.0 if model.last is None else lipschitz_constant(model.last)
        return after if known else None
    if isinstance(model, BasicGNN) and type(model).forward is BasicGNN.forward:
        known = model.act is None or isinstance(model.act, (nn.ReLU, nn.Tanh))
        after = [lipschitz_constant(norm) for norm in model.norms]
        return after if known and model.jk_mode is None else None
    return None


def layer_constants(layer: Any) -> LayerConstants | None:
    """The constants of a PyG layer in evaluation mode; ``None`` if unknown."""
    if type(layer) is GCNConv:  # the node's own row comes by a self-loop
        return LayerConstants(1.0, lipschitz_constant(layer.lin), own=0.0)
    if type(layer) is GINConv:
        return LayerConstants(1.0, lipschitz_constant(layer.nn), own=abs(1.0 + layer.eps.item()))
    if type(layer) is SAGEConv and layer.aggr == "mean" and not (layer.project or layer.normalize):
        both = [layer.lin_l, layer.lin_r] if layer.root_weight else [layer.lin_l]
        return LayerConstants(1.0, max(map(lipschitz_constant, both)), "mean", own=float(layer.root_weight))
    return None


@torch.no_grad()
def _lipschitz(model: nn.Module, loader: HaloLoader, *, call: CallModel) -> dict[str, Any]:
    observer, exchange = _Jacobians(), StoreExchange(HistoryStore(writes=False))
    with attached(model).running(exchange, observers=[observer], input_gradients=True):
        call(model, to_model_device(_whole(loader), model))
    return {"layers": observer.found}


class _Jacobians(Observer):
    """Measures each layer's Jacobian in a pass over the whole graph."""

    repeats = True

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def layer_ran(self, run: LayerRun) -> None:
        if run.nested:  # part of another layer
            return
        rows = _rows_given(run)
        if not rows:
            return

        # All rows as one, because the layer mixes them.
        def again(joined: Tensor) -> Tensor:
            pieces = torch.split(joined.view(-1), [x.numel() for x in rows])
            other = {id(x): piece.view(x.shape) for x, piece in zip(rows, pieces, strict=True)}
            args, kwargs = map_tensors(lambda value: other.get(id(value), value), (run.args, run.kwargs))
            return torch.cat([out.reshape(1, -1) for out in tensors_in(run.again(*args, **kwargs))], dim=1)

        joined = torch.cat([x.reshape(1, -1) for x in rows], dim=1)
        whole = _norm(again, joined)
        if type(run.layer) is GINConv:
            seen: list[Tensor] = []
            with run.layer.nn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
                again(joined)
            constants: Any = 1.0, _norm(run.layer.nn, seen[0][:: 1 + seen[0].size(0) // _MOST_ROWS])
        else:
            known = layer_constants(run.layer)
            constants = (None, None) if known is None else (known.message, known.update)
        self.found.append({"layer": run.call, "whole": whole, "message": constants[0], "update": constants[1]})


def _rows_given(run: LayerRun) -> list[Tensor]:
    """The rows of nodes that a layer gets, each once: with several types, all those in its first argument."""
    info, typed = run.info, isinstance(run.info, TypedInfo) or run.info.typed is not None
    given = next(iter((*run.args, *run.kwargs.values())), None) if typed else (run.args, run.kwargs)
    found = [x for x in tensors_in(given) if x.is_floating_point() and x.dim() > 1]
    if typed:
        return list({id(x): x for x in found}.values())
    return [x for x in found if x.size(0) == info.num_rows][:1]


def _norm(function: Callable[[Tensor], Any], x: Tensor) -> float | None:
    """The largest norm of the Jacobians at some rows; ``None`` if PyTorch cannot differentiate twice."""
    try:
        return float(jacobian_norm(function, x, iterations=_ITERATIONS).max())
    except (RuntimeError, AttributeError, InputError):
        return None


def _whole(loader: HaloLoader) -> Data:
    """The whole graph as one batch."""
    graph = loader.graph
    if isinstance(graph, TypedGraph):
        return loader.batch_for({kind: torch.arange(count) for kind, count in graph.counts.items()})
    return loader.batch_for(torch.arange(graph.num_nodes))


@contextmanager
def _nothing_changed(model: nn.Module) -> Iterator[None]:
    """Restore random states, and what the plan knows about layers in training."""
    device, scaler = device_of(model), attached(model)
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    draws = {name: call.draws for name, call in scaler.calls.items()}
    try:
        with undisturbed(torch.device("cpu")), evaluating(model):
            yield
    finally:
        for name, call in scaler.calls.items():
            call.draws = draws.get(name)
        # Captured steps share the GPU's random state, so it is restored only if it has changed.
        if on_gpu is not None and not torch.equal(on_gpu, torch.cuda.get_rng_state(device)):
            torch.cuda.set_rng_state(on_gpu, device)
