"""Decides whether a model in batches is exact, refused, or silently wrong.

Two equal models are made. One runs as it is on the whole graph; the other is autoscaled and runs in batches. What is
compared:

* ``one part``: outputs, gradients, buffers and attributes after one training step with the whole graph in one batch;
* ``evaluation``: ``gas.infer`` with the whole graph in evaluation mode;
* ``training``: the batches' rows in training mode, once the histories are exact, with the whole graph in training mode,
  and then ``gas.infer`` with the detached model on the whole graph.

Models that are equal in one comparison go on to the next, as a user's model is trained and evaluated in turn, and need
no new plans for that; those that are changed on the way go on as they are after the changes, as do models that are
refused after a change. After any other outcome the next pair is fresh. A model that is refused as one part, thus in
training mode, and in evaluation, thus in parts, is not trained in parts too. Dropout is off wherever training mode is
compared. Batch norms take the statistics of a batch, so that models with one are compared in training as one part only.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import call_whole

Kind = Literal["exact", "not comparable", "refused", "raw error", "wrong"]  # the worse, the later
Check = Literal["one part", "evaluation", "training"]
CHECKS: tuple[Check, ...] = get_args(Check)
Call = Callable[[Any, Data], Any]
Change = Callable[[Any], object]

MOST_SWEEPS = 30


@dataclass(frozen=True)
class Outcome:
    """What became of a model: the kind, and the message or where it deviates and by how much."""

    kind: Kind
    detail: str = ""

    @property
    def held(self) -> bool:
        """Whether the promise was kept."""
        return self.kind not in ("wrong", "raw error")

    @property
    def has_no_plan(self) -> bool:
        """Whether the model was refused, not only warned about when it had run."""
        return self.kind == "refused" and "warned: " not in self.detail

    @staticmethod
    def worst(outcomes: Sequence[Outcome]) -> Outcome:
        """The outcome of several checks."""
        return max(outcomes, key=lambda outcome: get_args(Kind).index(outcome.kind), default=Outcome("not comparable"))


def outcome(
    make_model: Callable[[], nn.Module],
    data: Data,
    loader: Callable[[Data], gas.HaloLoader] | gas.HaloLoader | None = None,
    *,
    mode: Check | Sequence[Check] | None = None,
    call: Call | None = None,
    changes: Sequence[Change] = (),
    then: Call | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = torch.double,
    tolerance: float = 1e-6,
) -> Outcome:
    """Compare a model in batches with the same model on the whole graph.

    Args:
        make_model: Makes the model; called under the same random state for each copy.
        data: The whole graph.
        loader: Makes the batches; by default four random parts.
        mode: What to compare; by default everything, but nothing as one part for models that are changed.
        call: Calls the model with a batch or with the whole graph; by default ``model(batch)``, and the plain model
            with the arguments of its forward that the data has.
        changes: What happens to the model between two comparisons; each is followed by a further comparison.
        then: How to call the model after the first change, if differently.
        seed: For the weights.
        dtype: The models are moved to this type, if any.
        tolerance: The largest deviation from the whole graph, per column and relative to its largest value.
    """
    pair = _Pair(make_model, data, loader, call, list(changes), then, seed, dtype, tolerance)
    checks = {"one part": pair.one_part, "evaluation": pair.evaluation, "training": pair.training}
    names = [mode] if isinstance(mode, str) else mode or (CHECKS[1:] if changes else CHECKS)
    found: dict[Check, Outcome] = {}
    for name in names:
        if name != "training" or not all(other in found and found[other].has_no_plan for other in CHECKS[:2]):
            found[name] = judged(checks[name], name)
    return Outcome.worst([*found.values()])


class NotComparableError(Exception):
    """The plain model does not run on the whole graph."""


class RandomModelError(NotComparableError):
    """The plain model gives something else every time."""


class DeviationError(Exception):
    """The batches' rows are not those of the whole graph."""


# Words of the library's own warnings, which tell as much as a refusal.
WARNINGS = ("depend on the partition", "with two different inputs")


def judged(check: Callable[[], object], name: str = "") -> Outcome:
    """The outcome of a check of one's own, which calls :func:`compare` for what has to be equal."""
    name = f"{name}: " if name else ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            check()
        except NotComparableError as reason:
            return Outcome("not comparable", f"{name}{reason}")
        except gas.InputError as refusal:
            return Outcome("refused", f"{name}{refusal}")
        except DeviationError as deviation:
            told = [text for text in (str(entry.message) for entry in warned) if any(word in text for word in WARNINGS)]
            return Outcome("refused", f"{name}warned: {told[0]}") if told else Outcome("wrong", f"{name}{deviation}")
        except Exception as error:
            return Outcome("raw error", f"{name}{type(error).__name__}: {error}")
    return Outcome("exact")


@dataclass
class _Pair:
    """The comparisons; see :func:`outcome` for the fields."""

    make_model: Callable[[], nn.Module]
    data: Data
    loader: Callable[[Data], gas.HaloLoader] | gas.HaloLoader | None
    call: Call | None
    changes: list[Change]
    then: Call | None
    seed: int
    dtype: torch.dtype | None
    tolerance: float
    # The plain and the autoscaled model, if all comparisons so far have left them equal, and whether they were changed.
    equal: tuple[nn.Module, nn.Module, bool] | None = None

    def evaluation(self) -> None:
        plain, model, changed = self._models()
        try:
            expected = self._plain_run(plain.eval(), after=changed)
        except RandomModelError:
            self._inferred(model, self._loader(), after=changed)  # may be refused
            raise
        loader = self._loader()
        self._compare("output", self._inferred(model, loader, after=changed), expected)
        for number, change in enumerate([] if changed else self.changes, start=1):
            self._changed(plain, change)
            expected = self._plain_run(plain.eval(), after=True)
            self._changed(model, change)
            if number == len(self.changes):
                self.equal = plain, model, True  # also if it is refused now
            self._compare(f"output after change {number}", self._inferred(model, loader, after=True), expected)
        self.equal = plain, model, bool(self.changes)

    def one_part(self) -> None:
        plain, model, changed = self._models()
        assert not changed, "one part comes first"
        plain.train()
        with NoDropout():
            expected = self._plain_run(plain, after=False, grad=True)
        whole = gas.HaloLoader(self.data, 1)
        model.train()
        with NoDropout():
            self._seed()
            batch = next(iter(whole))
            got = self._batch_call(after=False)(model, batch)
            for out in (got, expected):
                _backward(out)
        order = batch.n_id[: batch.batch_size]
        rows = [value[order] if value.dim() and value.size(0) == order.numel() else value for value in leaves(expected)]
        self._compare("output", got, rows)
        self._compare_gradients(plain, model)
        other = self._made().train()
        with NoDropout(), torch.no_grad():
            self._seed(1)
            self._whole_call(after=False)(other, self.data.clone())
        _compare_state(plain, other, model, self._compare)
        self.equal = plain, model, False

    def training(self) -> None:
        plain, model, changed = self._models()
        if any(isinstance(module, _BatchNorm) and module.training for module in plain.train().modules()):
            raise NotComparableError("batch norm")
        with NoDropout():
            expected = self._plain_run(plain, after=changed)
        loader = self._loader()
        self._compare("output", self._settled(model.train(), loader, after=changed), expected)
        for number, change in enumerate([] if changed else self.changes, start=1):
            self._changed(plain, change)
            with NoDropout():
                expected = self._plain_run(plain.train(), after=True)
            self._changed(model, change)
            self._compare(f"output after change {number}", self._settled(model.train(), loader, after=True), expected)
        after = bool(self.changes)
        for batch in loader:
            _backward(self._batch_call(after)(model, batch))
        inferred = self._inferred(model.eval(), loader, after=after)
        expected = self._plain_run(gas.detach(model).eval(), after=after)
        self._compare("evaluation after training", inferred, expected)

    # Private #########################################################################################################

    def _seed(self, offset: int = 0) -> None:
        torch.manual_seed(self.seed + offset)
        random.seed(self.seed + offset)

    def _made(self) -> nn.Module:
        self._seed()
        model = self.make_model()
        return model if self.dtype is None else model.to(self.dtype)

    def _models(self) -> tuple[nn.Module, nn.Module, bool]:
        """A plain and an autoscaled model, of the comparison before or fresh, and whether they were changed."""
        models, self.equal = self.equal, None
        return models or (self._made(), gas.autoscale(self._made(), self.data), False)

    def _loader(self) -> gas.HaloLoader:
        if isinstance(self.loader, gas.HaloLoader):
            return self.loader
        return gas.HaloLoader(self.data, 4, partition="random") if self.loader is None else self.loader(self.data)

    def _changed(self, model: nn.Module, change: Change) -> None:
        self._seed(1)
        change(model)

    def _batch_call(self, after: bool) -> Call:
        return (self.then if after else None) or self.call or (lambda model, batch: model(batch))

    def _whole_call(self, after: bool) -> Call:
        return (self.then if after else None) or self.call or call_whole

    def _plain_run(self, plain: nn.Module, *, after: bool, grad: bool = False) -> Any:
        """The whole graph's output, which must come again with another random state."""
        call = self._whole_call(after)
        try:
            with torch.no_grad():
                # A copy, since a run may leave something behind.
                probe, runs = copy.deepcopy(plain), []
                for number in range(3):
                    self._seed(number)
                    runs.append(call(probe, self.data.clone()))
            with torch.set_grad_enabled(grad):
                self._seed()
                out = call(plain, self.data.clone())
        except Exception as error:
            raise NotComparableError(f"fails on the whole graph: {type(error).__name__}: {error}") from error
        if any(deviation(other, runs[0]) > self.tolerance for other in runs[1:]):
            raise RandomModelError("differs from run to run on the whole graph")
        return out

    def _inferred(self, model: nn.Module, loader: gas.HaloLoader, *, after: bool) -> Any:
        self._seed()
        return gas.infer(model, loader, call=self._batch_call(after))

    @torch.no_grad()
    def _settled(self, model: nn.Module, loader: gas.HaloLoader, *, after: bool) -> list[Tensor]:
        """The rows of all nodes in training mode, once a further sweep over the batches changes nothing."""
        before: list[Tensor] = []
        with NoDropout():
            for _ in range(MOST_SWEEPS):
                self._seed()
                outputs = [(batch, leaves(self._batch_call(after)(model, batch))) for batch in loader]
                nodes = torch.cat([batch.n_id[: batch.batch_size].as_subclass(Tensor) for batch, _ in outputs])
                rows = [torch.cat(parts)[nodes.argsort()] for parts in zip(*(out for _, out in outputs), strict=True)]
                if before and deviation(rows, before) < 1e-3 * self.tolerance:
                    return rows
                before = rows
        raise DeviationError("histories do not settle")

    def _compare_gradients(self, plain: nn.Module, model: nn.Module) -> None:
        """Loosely, and relative to the largest of all: a gradient may be a sum that cancels out."""
        grads = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
        largest = max([float(grad.abs().max()) for grad in grads.values()], default=0.0)
        for name, weight in model.named_parameters():
            wanted = torch.zeros_like(weight) if name not in grads else grads[name]
            got = torch.zeros_like(weight) if weight.grad is None else weight.grad
            scale = max(float(wanted.abs().max()), 1e-4 * largest, 1e-9)
            error = float((got - wanted).abs().max()) / scale
            if not error <= max(1e-4, self.tolerance):
                raise DeviationError(f"the gradient of {name} deviates by {error:.2g}")

    def _compare(self, where: str, got: Any, expected: Any) -> None:
        compare(got, expected, where, self.tolerance)


def compare(got: Any, expected: Any, where: str = "output", tolerance: float = 1e-6) -> None:
    """Raise a :class:`DeviationError` unless both are equal up to rounding."""
    error = deviation(got, expected)
    if not error <= tolerance:
        raise DeviationError(f"{where} deviates by {error:.2g}")


def deviation(got: Any, expected: Any) -> float:
    """The largest deviation of a value in any column, relative to the column's largest value; infinite if unlike."""
    left, right = leaves(got), leaves(expected)
    if len(left) != len(right):
        return float("inf")
    worst = 0.0
    for value, wanted in zip(left, right, strict=True):
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            return float("inf")
        if not wanted.numel():
            continue
        value, wanted = (
            rows.detach().double().reshape(rows.size(0) if rows.dim() else 1, -1) for rows in (value, wanted)
        )
        if not torch.equal(value.isfinite(), wanted.isfinite()):
            return float("inf")
        value, wanted = value.nan_to_num(), wanted.nan_to_num()
        scale = wanted.abs().amax(0)
        scale = scale.clamp(min=max(1e-8 * float(scale.max()), 1e-9))  # a column of zeros has no scale of its own
        worst = max(worst, float(((value - wanted).abs() / scale).max()))
    return worst


def leaves(value: Any) -> list[Tensor]:
    """The tensors in a nested value."""
    if isinstance(value, Tensor):
        value = value if value.layout == torch.strided else value.to_dense()
        return [value.detach() if isinstance(value, nn.Parameter) else value.as_subclass(Tensor)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name))]
    return []


def _backward(out: Any) -> None:
    losses = [value.square().sum() for value in leaves(out) if value.is_floating_point() and value.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def _compare_state(
    plain: nn.Module, other: nn.Module, model: nn.Module, compare: Callable[[str, Any, Any], None]
) -> None:
    """Buffers and plain attributes, which a trial must not have touched; not those that are random in a plain model."""
    others, modules = dict(other.named_modules()), dict(model.named_modules())
    for path, module in plain.named_modules():
        for name, wanted in [*module.named_buffers(recurse=False), *vars(module).items()]:
            if name in ("training", "_version") or (name.startswith("_") and isinstance(wanted, dict)):
                continue
            if deviation(getattr(others[path], name, None), wanted) > 1e-6:
                continue
            got = getattr(modules[path], name, None)
            where = f"{path}.{name}" if path else name
            if isinstance(wanted, (bool, int, float, str)) and got != wanted:
                raise DeviationError(f"{where} is {got!r} instead of {wanted!r}")
            compare(where, *([] if got is None else leaves(value) for value in (got, wanted)))


class NoDropout(TorchFunctionMode):
    """Switches dropout off."""

    _DROPOUTS = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))
