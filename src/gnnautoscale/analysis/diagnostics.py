"""How far histories, and gradients through them, are from exact ones, and how much layers amplify such errors.

Everything here looks at a model as it is and changes nothing: neither weights, gradients and histories nor the random
state. ``docs/diagnostics.md`` says how to read the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCNConv, GINConv, MessagePassing, SAGEConv  # type: ignore[import-untyped]
from torch_geometric.nn.models.basic_gnn import BasicGNN  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in, undisturbed
from gnnautoscale.analysis.bounds import Layer, LayerErrors, MessageEdges, measure, theorem1_by_node
from gnnautoscale.analysis.lipschitz import jacobian_norm, lipschitz_constant
from gnnautoscale.attach import CallModel, attached, call_with_batch, device_of, near
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.forward import HistoryStore, LayerRun, Observer, Plan, StoreExchange, evaluating
from gnnautoscale.graph import HaloLoader
from gnnautoscale.models import Stack
from gnnautoscale.tasks import Task, task_for

Diagnostic = Literal["staleness", "gradients", "lipschitz"]
DIAGNOSTICS: tuple[Diagnostic, ...] = get_args(Diagnostic)

# The most groups that rows are put into by their age.
_MOST_AGES = 64
# The most iterations to find a Jacobian's norm in, and the most rows of a layer's own network to look at.
_ITERATIONS = 50
_MOST_ROWS = 2048


def diagnose(
    model: nn.Module,
    loader: HaloLoader,
    what: Sequence[Diagnostic] = ("staleness",),
    *,
    ages: Tensor | None = None,
    task: Task | None = None,
    call: CallModel = call_with_batch,
) -> dict[str, dict[str, Any]]:
    r"""Measure what histories do to a model, with its weights and histories as they are now.

    Every batch is computed as if it came next, in evaluation mode. ``"staleness"`` compares the rows of histories and
    of batches with exact ones, layer by layer, and with the bound of Theorem 1 where a model's constants are known.
    ``"gradients"`` compares the gradient of the mean loss over all targets, added up over batches, with that of
    the whole graph at once. ``"lipschitz"`` looks for the largest factor by which each layer can make a small change of
    its inputs larger, on the whole graph at once, with the constants of its messages and its update where they can be
    told apart.

    Args:
        model: An autoscaled model.
        loader: Cuts the training graph into batches.
        what: What to measure.
        ages: How many steps ago each node's rows were written, ``[num_nodes]``, -1 for never, if that is known.
        task: Says what ``"gradients"`` are of; by default node classification, which needs ``y`` and ``train_mask``.
        call: How to call the model with a batch, if ``model(batch)`` is not right.

    Returns:
        For each thing measured what a run's folder holds about it.

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
        >>> 0.5 < found["gradients"]["cosine"] <= 1.0  # no gradient flows through pulled rows
        True
    """
    check_diagnostics(what)
    probes: dict[str, Callable[..., dict[str, Any]]] = {
        "staleness": partial(_staleness, ages=ages),
        "gradients": partial(_gradients, task=task),
        "lipschitz": _lipschitz,
    }
    found: dict[str, dict[str, Any]] = {}
    with _nothing_changed(model):
        for name in what:
            start = time.perf_counter()
            values = probes[name](model, loader, call=call)
            found[name] = {"seconds": time.perf_counter() - start, **values}
    return found


def check_diagnostics(what: Sequence[str]) -> None:
    """Refuse what cannot be measured."""
    if isinstance(what, str) or not set(what) <= set(DIAGNOSTICS):
        raise InputError(
            f"diagnose must be some of {', '.join(DIAGNOSTICS)}", got=repr(what), fix="Name them in a list."
        )


# Staleness ###########################################################################################################


def _staleness(model: nn.Module, loader: HaloLoader, *, call: CallModel, ages: Tensor | None) -> dict[str, Any]:
    errors = measure(model, loader, call=call)
    pulled = torch.zeros(loader.graph.num_nodes, dtype=torch.bool)
    for batch in loader.in_order():
        pulled[batch.edge_index.info.halo] = True
    bounds = _bounds(model, loader, errors)
    return {"layers": [_layer(at, pulled, ages, bound) for at, bound in zip(errors, bounds, strict=True)]}


def _layer(errors: LayerErrors, pulled: Tensor, ages: Tensor | None, bound: float | None) -> dict[str, Any]:
    has_history = errors.name != "output" and bool(pulled.any())
    old = pulled if ages is None else pulled & (ages >= 0)
    grouped = has_history and ages is not None and bool(old.any())
    return {
        "layer": errors.name,
        "staleness": _summary(errors.staleness[pulled], errors.norm[pulled]) if has_history else None,
        "closeness": _summary(errors.closeness, errors.norm),
        "history": _summary(errors.history[pulled], errors.norm[pulled]) if has_history else None,
        "by_age": _by_age(cast(Tensor, ages)[old], errors.staleness[old]) if grouped else [],
        "bound": bound,
    }


def _summary(error: Tensor, norm: Tensor) -> dict[str, float]:
    mean = float(error.mean())
    return {"mean": mean, "max": float(error.max()), "relative": mean / max(float(norm.mean()), 1e-30)}


def _by_age(ages: Tensor, staleness: Tensor) -> list[dict[str, Any]]:
    """Rows by their age, in at most so many groups of neighbouring ages."""
    width = 1 + int(ages.max() - ages.min()) // _MOST_AGES
    _, group, rows = torch.unique((ages - ages.min()) // width, return_inverse=True, return_counts=True)
    zeros = torch.zeros(rows.numel(), dtype=torch.double)
    mean_age, mean = (zeros.index_add(0, group, value.double()) / rows for value in (ages, staleness))
    return [
        {"age": round(age), "rows": count, "staleness": value}
        for age, count, value in zip(mean_age.tolist(), rows.tolist(), mean.tolist(), strict=True)
    ]


# Bounds ##############################################################################################################


def _bounds(model: nn.Module, loader: HaloLoader, errors: Sequence[LayerErrors]) -> list[float | None]:
    """The largest error that Theorem 1 allows at each layer; ``None`` where it does not apply or constants are unknown.

    It is about layers that each read the one before and pass messages along the same edges.
    """
    scaler, plan = attached(model), cast(Plan, attached(model).plan)
    slots = [slot for slot in plan.needs if slot != Plan.OUTPUT]
    plain = all(plan.needs[slot] == {before} for before, slot in pairwise([*slots, Plan.OUTPUT]))
    layers = _constants(model) if plain and not plan.inner and not plan.explicit else None
    events = [event for slot in slots for event in scaler.memory.events.get(slot, [])]
    same = len(events) == len(slots) and len(set(events)) == 1 and events[0].edges.target_row == 1
    if layers is None or not same or len(layers) != len(errors):
        return [None] * len(errors)
    edges = MessageEdges(events[0].edges.edge_index, loader.graph.num_nodes, events[0].constants.get("edge_weight"))
    batch_of = (loader.labels // loader.batch_size)[edges.edge_index]
    stale = [layer.staleness for layer in errors[:-1]]
    by_node = theorem1_by_node(layers, edges, stale, batch_of[0] != batch_of[1])
    return [float(bound.max()) for bound in by_node]


def _constants(model: nn.Module) -> list[Layer] | None:
    """The constants of all layers of a model whose forward pass is known, in evaluation mode.

    What comes between two layers belongs to the one that follows, what comes after the last one to that one.
    """
    convs: list[nn.Module] = list(getattr(model, "convs", []))
    try:
        after = _between(model, len(convs))
        layers = [layer_constants(conv) for conv in convs]
    except InputError:  # a module whose constant is not known
        return None
    if after is None or not layers:
        return None
    found = []
    for layer, before in zip(layers, [1.0, *after], strict=False):
        if layer is None:
            return None
        found.append(replace(layer, message=layer.message * before, own=layer.own * before))
    found[-1] = replace(found[-1], update=found[-1].update * after[-1])
    return found


def _between(model: nn.Module, num_layers: int) -> list[float] | None:
    """The constant of what follows each layer; ``None`` for models whose forward pass is not known."""
    if isinstance(model, Stack):
        known = type(model).forward is Stack.forward and type(model).call_layer is Stack.call_layer
        after = [lipschitz_constant(norm) for norm in model.norms]  # ReLU and dropout change nothing
        after += [1.0] * (num_layers - len(after))
        after[-1] *= 1.0 if model.last is None else lipschitz_constant(model.last)
        return after if known else None
    if isinstance(model, BasicGNN) and type(model).forward is BasicGNN.forward:
        known = model.act is None or isinstance(model.act, (nn.ReLU, nn.Tanh))
        after = [lipschitz_constant(norm) for norm in model.norms]
        return after if known and model.jk_mode is None else None
    return None


def layer_constants(layer: Any) -> Layer | None:
    """The constants of some of PyG's layers by themselves, in evaluation mode; ``None`` for all others.

    Example:
        >>> layer_constants(GCNConv(4, 2)).own  # its own row comes in by a self-loop
        0.0
    """
    if type(layer) is GCNConv:
        return Layer(1.0, lipschitz_constant(layer.lin), own=0.0)
    if type(layer) is GINConv:
        return Layer(1.0, lipschitz_constant(layer.nn), own=abs(1.0 + layer.eps.item()))
    if type(layer) is SAGEConv and layer.aggr == "mean" and not (layer.project or layer.normalize):
        both = [layer.lin_l, layer.lin_r] if layer.root_weight else [layer.lin_l]
        return Layer(1.0, max(map(lipschitz_constant, both)), "mean", own=float(layer.root_weight))
    return None


# Gradients ###########################################################################################################


def _gradients(model: nn.Module, loader: HaloLoader, *, call: CallModel, task: Task | None) -> dict[str, Any]:
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not weights:
        raise InputError("gradients need weights", got="a model without any to train", fix="Leave gradients out.")
    learned = task_for(Dataset.of(loader.data)) if task is None else task
    learned.check(loader.data, ["train"])
    count = learned.targets_of_graph(loader.data)[1].size(0)
    device = device_of(model)

    def added_up(batches: Iterator[Data]) -> list[Tensor]:
        total = [torch.zeros_like(weight, dtype=torch.double) for weight in weights.values()]
        for batch in batches:
            rows, targets = learned.targets(batch)
            if not targets.size(0):
                continue
            with attached(model).running(StoreExchange(HistoryStore(writes=False))):
                out = call(model, near(batch, model))
            out = out if rows is None else out[rows.to(device)]
            loss = targets.size(0) / count * learned.loss(out, targets.to(device))
            pieces = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for sum_, piece in zip(total, pieces, strict=True):
                sum_ += 0.0 if piece is None else piece
        return total

    with torch.enable_grad():
        ours, exact = added_up(loader.in_order()), added_up(iter([_whole(loader)]))
    pairs = [(name, a.flatten(), b.flatten()) for name, a, b in zip(weights, ours, exact, strict=True)]
    return {
        **_compared(torch.cat([a for _, a, _ in pairs]), torch.cat([b for _, _, b in pairs])),
        "layers": [{"layer": name, **_compared(a, b)} for name, a, b in pairs],
    }


def _compared(ours: Tensor, exact: Tensor) -> dict[str, float]:
    lengths = float(ours.norm() * exact.norm())
    length = float(exact.norm())
    return {
        "cosine": float(ours @ exact) / lengths if lengths else math.nan,
        "relative_error": float((ours - exact).norm()) / length if length else math.nan,
    }


# Lipschitz constants #################################################################################################


@torch.no_grad()
def _lipschitz(model: nn.Module, loader: HaloLoader, *, call: CallModel) -> dict[str, Any]:
    observer = _Jacobians()
    exchange = StoreExchange(HistoryStore(writes=False))
    with attached(model).running(exchange, observers=[observer], input_gradients=True):
        call(model, near(_whole(loader), model))
    return {"layers": observer.found}


class _Jacobians(Observer):
    """Looks at each layer around the inputs it gets, in a pass over the whole graph."""

    repeats = True

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def layer_ran(self, run: LayerRun) -> None:
        """Measure a layer."""
        if run.nested:  # a piece of another layer
            return
        rows = [x for x in tensors_in((run.args, run.kwargs)) if x.is_floating_point() and x.dim() > 1]
        x = next((x for x in rows if x.size(0) == run.info.num_rows), None)
        if x is None:
            return

        def again(other: Tensor) -> Any:
            args, kwargs = map_tensors(lambda value: other if value is x else value, (run.args, run.kwargs))
            return run.again(*args, **kwargs)

        # All rows as one, since the layer mixes them.
        whole = _norm(lambda row: again(row.view(x.shape)).reshape(1, -1), x.reshape(1, -1))
        message, update = self._apart(run.layer, again, x)
        self.found.append({"layer": run.call, "whole": whole, "message": message, "update": update})

    def _apart(
        self, layer: MessagePassing, run: Callable[[Tensor], Any], x: Tensor
    ) -> tuple[float | None, float | None]:
        """The constants of messages and update, where they are known."""
        if type(layer) is GINConv:
            seen: list[Tensor] = []
            with layer.nn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
                run(x)
            return 1.0, _norm(layer.nn, seen[0][:: 1 + seen[0].size(0) // _MOST_ROWS])
        known = layer_constants(layer)
        return (None, None) if known is None else (known.message, known.update)


def _norm(function: Callable[[Tensor], Any], x: Tensor) -> float | None:
    """The largest norm of a Jacobian over some rows; ``None`` where PyTorch cannot differentiate twice."""
    try:
        return float(jacobian_norm(function, x, iterations=_ITERATIONS).max())
    except (RuntimeError, AttributeError, InputError):
        return None


# Helpers #############################################################################################################


def _whole(loader: HaloLoader) -> Data:
    """The whole graph as one batch."""
    return loader.batch_for(torch.arange(loader.graph.num_nodes))


@contextmanager
def _nothing_changed(model: nn.Module) -> Iterator[None]:
    """Afterwards random states, and what is known about layers in training, are as they were before."""
    device, scaler = device_of(model), attached(model)
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    draws = {name: call.draws for name, call in scaler.calls.items()}
    try:
        with undisturbed(torch.device("cpu")), evaluating(model):
            yield
    finally:
        for name, call in scaler.calls.items():
            call.draws = draws.get(name)
        # Captured steps share the GPU's random state, so it is touched only if it has to be.
        if on_gpu is not None and not torch.equal(on_gpu, torch.cuda.get_rng_state(device)):
            torch.cuda.set_rng_state(on_gpu, device)
