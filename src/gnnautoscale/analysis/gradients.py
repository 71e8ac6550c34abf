"""How far the gradient of training steps agrees with that of full batch: plain, and compensated at the border."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.analysis.bounds import memory_by_type
from gnnautoscale.attach import Autoscaler, CallModel, attached, device_of, info_of, refresh, to_model_device
from gnnautoscale.data import Dataset, TypedDataset, TypedLinks
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.exact import ExactPasses, Loss, exact_forward
from gnnautoscale.forward import GraphMemory, HistoryStore, Plan, StoreExchange, TypedMemory, TypedPlan
from gnnautoscale.graph import BatchInfo, HaloLoader
from gnnautoscale.history import History
from gnnautoscale.tasks import LinkPrediction, Task, task_for, trained_rows
from gnnautoscale.transfer import Sharing

# Kept gradients are as they will be once a sweep changes the sum of all batches by less than this share. A model with
# many layers takes many sweeps; it is measured after the last of these.
_SETTLED, _MOST_SWEEPS = 1e-3, 20
# What a task draws, such as pairs without an edge, is the same in every sweep.
_SEED = 0


class Agreement(TypedDict):
    """How a gradient compares with that of full batch.

    Attributes:
        cosine: The cosine of the angle between them.
        norm_ratio: How many times as long as full batch's it is.
        relative_error: The length of their difference, relative to full batch's.
    """

    cosine: float
    norm_ratio: float
    relative_error: float


class LayerAgreement(Agreement):
    """The same for the weights of one layer, by its name."""

    layer: str


class StepAgreement(Agreement):
    """All weights together, and those of each layer in the order of the model."""

    layers: list[LayerAgreement]


class GradientAgreement(StepAgreement):
    """Plain steps, and steps with ``compensate="gradient"`` on the same batches and histories.

    Attributes:
        compensated: These, with kept gradients of the current weights; ``None`` if the model does not allow it.
        why_not: The reason then.
        sweeps: Number of passes over all batches that have filled the histories of gradients.
    """

    compensated: StepAgreement | None
    why_not: str | None
    sweeps: int


def gradient_agreement(
    model: nn.Module, loader: HaloLoader, *, call: CallModel, task: Task | None = None, target: str | None = None
) -> GradientAgreement:
    """Compare the gradient of the mean loss over all targets, summed over all batches, with that of full batch.

    The model keeps its weights, their gradients and its histories: compensated steps run on a copy of it.
    """
    weights = {
        name: weight for name, weight in model.named_parameters() if weight.requires_grad and not is_lazy(weight)
    }
    if not weights:
        raise InputError("'gradients' needs weights", got="a model without any to train", fix="Leave gradients out.")
    scaler = attached(model)
    dataset = _typed_dataset(scaler, loader, target, task) if isinstance(scaler.memory, TypedMemory) else None
    posed = dataset or Dataset.of(loader.data)
    learned = task_for(posed) if task is None else task
    if isinstance(task, LinkPrediction) and not task.is_bound:
        learned = copy.copy(task).bound_to(posed, metric=None, class_weight="none")
    data = loader.data if dataset is None else dataset.train
    sharing: Sharing | None = scaler.memory.sharing
    if sharing is None:
        learned.check(data, ["train"])
    elif not learned.knows_rows_only:
        rule, fix = "ranks diagnose gradients for the library's tasks of nodes", "Measure them in one process."
        raise InputError(rule, got=f"a {type(learned).__name__}", fix=fix)
    whole = sum(loader.everyone(learned.weight_of(data)))
    loss = _mean_loss(learned, whole, device_of(model), dataset)
    exchange = StoreExchange(HistoryStore(writes=False))
    with learned.measuring():
        plain = _Sweep(model, list(weights.values()), loader, loss, call).run(lambda _: scaler.running(exchange))
        with scaler.visiting(loader.graph, apart=True):
            found = _of_whole_graph(model, list(weights.values()), loader, loss, call, learned, dataset)
        full = [
            torch.zeros_like(total) if piece is None else piece.double()
            for total, piece in zip(plain, found, strict=True)
        ]
        if sharing is not None:
            plain, full = sharing.add_up(*plain), sharing.add_up(*full)
        owners = [_owner(model, name) for name in weights]
        compensated, why_not, sweeps = None, None, 0
        try:
            if sharing is not None:
                fix = "Measure them in one process."
                raise InputError("compensated gradients need the whole graph", got="a rank's share of it", fix=fix)
            gradient, sweeps = _compensated(model, list(weights), loader, loss, call)
            compensated = _compared(owners, gradient, full)
        except (InputError, UnsupportedModelError) as error:
            why_not = str(error)
    return {**_compared(owners, plain, full), "compensated": compensated, "why_not": why_not, "sweeps": sweeps}


def _typed_dataset(scaler: Autoscaler, loader: HaloLoader, target: str | None, task: Task | None) -> TypedDataset:
    """The nodes with targets: of the type named, or the only one with both outputs and ``y``; or pairs of nodes."""
    if isinstance(task, LinkPrediction):
        return TypedLinks.of_splits((loader.data, loader.data, loader.data))
    kinds = dict.fromkeys(scaler.plan.output_kinds if isinstance(scaler.plan, TypedPlan) else loader.data.node_types)
    able = [kind for kind in kinds if "y" in loader.data[kind]]
    chosen = able[0] if target is None and len(able) == 1 else target
    if chosen in able:
        return TypedDataset.of_types(loader.data, chosen)
    raise InputError(
        "'gradients' needs one type of nodes with outputs of the model and targets y",
        got=f"target={target!r} and {', '.join(able) or 'no such type'}",
        fix="Name the type, target=..., or leave gradients out.",
    )


def _mean_loss(task: Task, whole: float, device: torch.device, dataset: TypedDataset | None) -> Loss:
    """The mean loss over all targets of a graph, as a sum over batches; a data set has those of one type of nodes.

    The targets count ``whole`` together.
    """

    def inputs(batch: Data) -> dict[str, Tensor]:
        batch = batch if dataset is None else dataset.seen(batch)
        rows, targets = task.targets(batch)
        found = {"targets": targets, "nodes": batch.n_id[: batch["batch_size"]].as_subclass(Tensor)}
        found |= {} if rows is None else {"rows": rows}
        return {name: value.to(device) for name, value in found.items()} if targets.size(0) else {}

    def seeds(out: Any, given: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        if not given:
            return [], []
        out = _seen(out, dataset)
        task.see(out, given["nodes"])
        loss = task.loss(trained_rows(out, given.get("rows")), given["targets"])
        return [task.weight(given["targets"]) / whole * loss], [None]

    return Loss(inputs, seeds)


def _of_whole_graph(
    model: nn.Module,
    weights: list[Tensor],
    loader: HaloLoader,
    loss: Loss,
    call: CallModel,
    task: Task,
    dataset: TypedDataset | None,
) -> Sequence[Tensor | None]:
    """The gradients of full batch; of a loss that takes the outputs of all nodes together, these are held at once."""
    if task.separable:
        passes = ExactPasses(model, loader, call)
        passes.forward()
        return passes.gradients(weights, loss)
    device = device_of(model)
    torch.manual_seed(_SEED)
    with torch.enable_grad():
        whole = loader.data, torch.arange(loader.graph.num_nodes)
        data, nodes = whole if dataset is None else dataset.seen_whole()
        out, (_, targets) = exact_forward(model, loader, call=call, device=device), task.targets_of_graph(data)
        out = _seen(out, dataset)
        task.see(out, nodes.to(device))
        return torch.autograd.grad(task.loss(out, targets.to(device)), weights, allow_unused=True)


def _seen(out: Any, dataset: TypedDataset | None) -> Any:
    """The rows of the nodes that a task looks at."""
    if dataset is None:
        return out
    rows = out if isinstance(out, dict) else dict.fromkeys(dataset.targets, out)
    return dataset.own_rows({kind: rows[kind] for kind in dataset.targets})


class _Sweep:
    """A training step's forward and backward pass on every batch."""

    def __init__(
        self, model: nn.Module, weights: Sequence[Tensor], loader: HaloLoader, loss: Loss, call: CallModel
    ) -> None:
        self._model, self._weights, self._loader = model, weights, loader
        self._loss, self._call = loss, call

    @torch.enable_grad()
    def run(self, around: Callable[[Data], AbstractContextManager[None]] = lambda _: nullcontext()) -> list[Tensor]:
        """The gradients of all batches, added up; each is computed in a context."""
        torch.manual_seed(_SEED)
        sums = [torch.zeros_like(weight, dtype=torch.double) for weight in self._weights]
        for batch in self._loader.in_order():
            with around(batch):
                out = self._call(self._model, to_model_device(batch, self._model))
                losses, _ = self._loss.seeds(out, self._loss.inputs(batch))
                # Targets of other batches may depend on the rows of one without any.
                losses = losses or [0.0 * value.sum() for value in tensors_in(out)]
                found = torch.autograd.grad(losses, list(self._weights), allow_unused=True)
            for total, piece in zip(sums, found, strict=True):
                total += 0.0 if piece is None else piece
        return sums


def _compensated(
    model: nn.Module, names: Sequence[str], loader: HaloLoader, loss: Loss, call: CallModel
) -> tuple[list[Tensor], int]:
    """The gradients of compensated steps, added up, and how many sweeps have filled histories of gradients before."""
    now, twin = attached(model).memory, attached(model).twin(loader.graph, "gradient")
    own = dict(twin.named_parameters())
    sweep, memory = _Sweep(twin, [own[name] for name in names], loader, loss, call), attached(twin).memory
    refresh(twin, loader, call=call)
    before, sweeps = sweep.run(), 1
    while sweeps < _MOST_SWEEPS:
        after, sweeps = sweep.run(), sweeps + 1
        change, length = _length([a - b for a, b in zip(after, before, strict=True)]), _length(after)
        before = after
        if change <= _SETTLED * length:
            break
    device = device_of(model)
    for batch in loader.in_order():
        of_types = zip(memory_by_type(memory, info_of(batch)), memory_by_type(now, info_of(batch)), strict=True)
        for (mine, info), (kept, _) in of_types:
            _take_rows(mine, kept, cast(Plan, attached(model).plan), info, device)
    return sweep.run(lambda batch: _all_undone(memory, info_of(batch), device)), sweeps


def _take_rows(memory: GraphMemory, now: GraphMemory, plan: Plan | None, info: BatchInfo, device: torch.device) -> None:
    """Take over a batch's rows of histories as they are now, zero if never written.

    Others, which the model has in no history as it is, stay exact.
    """
    place, source = memory.rows_of(info), now.rows_of(info)
    for slot, history in memory.histories.items():
        if slot in now.histories:
            index = source.on(device)[: source.batch_size]
            rows = now.histories[slot].pull(index, device=device, dtype=_exact_type(history))
        elif plan is not None and slot in plan.live:
            rows = torch.zeros(place.batch_size, history.width, device=device)
        else:
            continue
        history.push(rows, place.on(device)[: place.batch_size], place.runs)


@contextmanager
def _all_undone(memory: Any, info: Any, device: torch.device) -> Iterator[None]:
    """Undo what a step writes, so that every batch is computed as if it came next."""
    with ExitStack() as undone:
        for of, its in memory_by_type(memory, info):
            undone.enter_context(_undone(of, its, device))
        yield


@contextmanager
def _undone(memory: GraphMemory, info: BatchInfo, device: torch.device) -> Iterator[None]:
    place = memory.rows_of(info)
    index = place.on(device)[: place.batch_size]
    kept = (*memory.histories.values(), *memory.last_gradients.values())
    before = [history.pull(index, device=device, dtype=_exact_type(history)) for history in kept]
    yield
    memory.settle()
    for history, rows in zip(kept, before, strict=True):
        history.push(rows, index, place.runs)


def _exact_type(history: History) -> torch.dtype:
    """A type that rows of a history come back in as they are."""
    return torch.float64 if history.dtype == torch.float64 else torch.float32


def _owner(model: nn.Module, weight: str) -> str:
    """The layer that a weight belongs to: the outermost one that passes messages, or else its own module."""
    *path, _ = weight.split(".")
    parts = [".".join(path[:end]) for end in range(1, len(path) + 1)]
    layers = (part for part in parts if isinstance(model.get_submodule(part), MessagePassing))
    return next(layers, ".".join(path) or weight)


def _compared(owners: Sequence[str], ours: Sequence[Tensor], full: Sequence[Tensor]) -> StepAgreement:
    def of(layer: str | None) -> Agreement:
        chosen = [number for number, owner in enumerate(owners) if layer in (None, owner)]
        a, b = (torch.cat([gradients[number].flatten() for number in chosen]) for gradients in (ours, full))
        length, wanted, error = float(a.norm()), float(b.norm()), float((a - b).norm())
        return {
            "cosine": float(a @ b) / (length * wanted) if length * wanted else math.nan,
            "norm_ratio": length / wanted if wanted else math.nan,
            "relative_error": error / wanted if wanted else math.nan,
        }

    return {**of(None), "layers": [{"layer": layer, **of(layer)} for layer in dict.fromkeys(owners)]}


def _length(gradients: Sequence[Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())
