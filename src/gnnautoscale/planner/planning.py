"""Finds out how a model must be run with histories, and proves on a trial graph that this gives the right rows.

The model is run on a small graph twice: as a whole, and in batches whose histories hold the exact rows. Every
layer, norm and output must then agree. So no table of layer types is needed: a layer that looks beyond its
neighbours is seen to deviate and gets a history at each of its propagations; if that does not help, or if
something outside of the layers mixes nodes, the model is refused and the culprit is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in, undisturbed
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import SHORTCUTS, Hooks, Plan, evaluating, run_pass
from gnnautoscale.graph import BatchInfo, BatchTensor
from gnnautoscale.planner.rehearsal import DeviationError, LayerError, Observation, Rehearsal, Truth
from gnnautoscale.planner.trial_graph import TrialGraph


def make_plan(model: nn.Module, hooks: Hooks, info: BatchInfo, arguments: BoundArguments, *, explicit: bool) -> Plan:
    """Find out how a model must be run, and check that its batches agree with the whole graph.

    Args:
        model: The attached model.
        hooks: Run the model in a session.
        info: The batch that the arguments come from.
        arguments: The arguments of a call with that batch.
        explicit: Whether the model names its own slots.

    Raises:
        UnsupportedModelError: If no placement of histories makes the model right; the message names the layer.
    """
    device = next((value.device for value in model.parameters()), info.n_id.device)
    with evaluating(model), torch.autocast(device.type, enabled=False), torch.inference_mode(False):
        with undisturbed(device):
            torch.manual_seed(0)
            trial = TrialGraph(info, arguments, device)
        rehearsals = _Rehearsals(model, hooks, trial, explicit)
        if any(is_lazy(parameter) for parameter in model.parameters()):
            # Weights that are drawn now must come from the user's own random state.
            rehearsals.observe(set())
        with undisturbed(device), _stirred(model):
            return rehearsals.plan()


class _Rehearsals:
    """The runs on the trial graph that lead to a plan."""

    def __init__(self, model: nn.Module, hooks: Hooks, trial: TrialGraph, explicit: bool) -> None:
        self.model, self.hooks, self.trial, self.explicit = model, hooks, trial, explicit
        # The attributes of batches that the model looks at outside of its layers.
        self._looks: list[str] = []

    def plan(self) -> Plan:
        """Try histories at the layers' outputs, and at inner propagations where these deviate."""
        inner: set[str] = set()
        everything_needed = False
        while True:
            plan, truth = self.observe(inner, everything_needed=everything_needed)
            deviation = self._rehearse(plan, truth) or self._sweep(plan, truth)
            if deviation is None:
                break
            call = plan.calls.get(deviation.name)
            if call is not None and call.num_propagations > 1 and deviation.name not in inner:
                inner = inner | {deviation.name}
            elif not everything_needed:
                # Autograd may not have seen what a slot is computed from, for example under no_grad.
                everything_needed = True
            else:
                raise deviation.error()
        with evaluating(self.model):
            self._check_training_mode(plan, truth)
        self._take_shortcuts(plan, truth)
        return plan

    def _take_shortcuts(self, plan: Plan, truth: Truth) -> None:
        """Leave out whatever work turns out to matter neither for the batch's rows nor for gradients."""
        try:
            plain = self._train(plan, truth)
        except Exception:
            plain = None  # it may be used for evaluation all the same; training it will say what is wrong
        for call in plan.calls.values():
            call.shortcuts = call.possible_shortcuts
        plan.short_tail = True
        plan.bare = all(attribute == "n_id" for attribute in self._looks)
        while True:
            culprit, only_gradients = None, False
            try:
                deviation = self._rehearse(plan, truth) or self._sweep(plan, truth)
                if deviation is None and (plain is None or _alike(self._train(plan, truth), plain)):
                    return
                culprit, only_gradients = (None, True) if deviation is None else (deviation.name, False)
            except LayerError as error:
                culprit = error.call
            except Exception:  # noqa: S110
                pass  # somewhere between the layers; what works without shortcuts may fail in any way with them
            blamed = plan.calls.get(culprit or "")
            if blamed is not None and blamed.shortcuts:
                blamed.shortcuts -= {next(name for name in SHORTCUTS if name in blamed.shortcuts)}
            elif only_gradients and any(call.inward for call in plan.calls.values()):
                for call in plan.calls.values():
                    call.inward.clear()
            elif plan.short_tail:
                plan.short_tail = False
            elif plan.bare:
                plan.bare = False
            elif any(call.shortcuts for call in plan.calls.values()):
                for call in plan.calls.values():
                    call.shortcuts = frozenset()
            else:
                return  # the model is not the same from run to run, so that nothing can be compared

    def _train(self, plan: Plan, truth: Truth) -> list[Tensor | None]:
        """Outputs and gradients of training steps on the trial graph, with exact histories and without dropout."""
        weights = [weight for weight in self.model.parameters() if weight.is_floating_point()]
        found: list[Tensor | None] = []
        with _training(self.model), _NoDropout(), torch.enable_grad():
            for batch in self.trial.parts:
                torch.manual_seed(0)
                session = Rehearsal(self.trial, batch, plan, truth, checking=False).step()
                arguments = self.trial.arguments(batch)
                with BatchTensor.watched(self._looks):
                    out = self.hooks.run(session, *arguments)
                out = session.finish(out)
                values = [value for value in tensors_in(out) if value.is_floating_point()]
                found += [value.detach() for value in values]
                # Weighted, so that no row and no column is like another.
                loss = sum(((value * _pattern(value)).sum() for value in values), torch.zeros(()))
                if loss.requires_grad:
                    found += _gradients(loss, weights)
        return found

    def observe(self, inner: set[str], *, everything_needed: bool = False) -> tuple[Plan, Truth]:
        """Run the whole trial graph; note how every layer is called and what each slot is computed from."""
        plan = Plan(inner=inner, explicit=self.explicit)
        batch = next(iter(self.trial.whole))
        seen = Observation(self.trial, batch, plan)
        arguments = self.trial.arguments(batch)
        noting = _watching(self.model, seen.note), BatchTensor.watched(self._looks)
        with torch.enable_grad(), _all_trainable(self.model), noting[0], noting[1]:
            out = self.hooks.run(seen.session, *arguments)
        plan.needs[Plan.OUTPUT] = seen.sources(out)
        seen.note(Plan.OUTPUT, None, out)
        if everything_needed:
            slots = list(plan.needs)
            plan.needs = {slot: frozenset(slots[:number]) for number, slot in enumerate(slots)}
        return plan, seen.truth

    def _rehearse(self, plan: Plan, truth: Truth) -> DeviationError | None:
        """Run the trial graph in batches with exact histories; returns the first deviation."""
        try:
            for batch in self.trial.parts:
                rehearsal = Rehearsal(self.trial, batch, plan, truth)
                session = rehearsal.step()
                with torch.no_grad(), _watching(self.model, rehearsal.check_numbered):
                    out = self.hooks.run(session, *self.trial.arguments(batch))
                rehearsal.check(Plan.OUTPUT, None, out)
                session.finish(out)
        except DeviationError as deviation:
            return deviation
        return None

    def _check_training_mode(self, plan: Plan, truth: Truth) -> None:
        """Refuse layers that change recorded values at random while they train: the record would undo that."""
        batch = next(iter(self.trial.parts))
        seen = []
        for training in (False, True):
            # The layers alone: norms inside of them must not take statistics from the trial graph.
            for module in self.model.modules():
                if isinstance(module, MessagePassing):
                    module.training = training
            # Not checked: dropout inside layers may change their output.
            rehearsal = Rehearsal(self.trial, batch, plan, truth, checking=False)
            with torch.no_grad():
                self.hooks.run(rehearsal.step(), *self.trial.arguments(batch))
            seen.append(rehearsal.local_edges)
        evaluated, trained = seen
        for number, (name, after) in enumerate(trained):
            before = evaluated[number][1] if number < len(evaluated) else None
            if len(evaluated) != len(trained) or before is None or not _equal(before, after):
                raise UnsupportedModelError(
                    f"{name} must hand the same edges and edge weights to propagate in training as in evaluation",
                    got="some that it changes at random while it trains",
                    fix="Set the layer's own dropout to 0 and use autoscale(..., edge_dropout=p).",
                )

    def _sweep(self, plan: Plan, truth: Truth) -> DeviationError | None:
        """Compute each level from the levels below, without the rows that nothing needs if the model runs so."""
        deviation: DeviationError | None = None
        for skip_empty in (True, False):
            plan.skip_empty = skip_empty
            try:
                for batch in self.trial.parts:
                    for level in (*plan.levels, None):
                        rehearsal = Rehearsal(self.trial, batch, plan, truth)
                        session = rehearsal.sweep(level)
                        session.begin()
                        with torch.no_grad():
                            out = run_pass(partial(self.hooks.run, session, *self.trial.arguments(batch)))
                        if level is None:
                            rehearsal.check(Plan.OUTPUT, None, out)
                return None
            except DeviationError as error:
                deviation = error
            except (RuntimeError, ValueError, IndexError):
                if not plan.skip_empty:
                    raise
        return deviation


def _equal(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and torch.equal(before, after)


@contextmanager
def _watching(model: nn.Module, note: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    """Call ``note`` with the output of every module that neither is, nor is in, nor holds a message-passing layer."""
    layers = [name for name, module in model.named_modules() if isinstance(module, MessagePassing)]
    handles = []
    for name, module in model.named_modules():
        related = any(
            name == layer or not layer or not name or name.startswith(f"{layer}.") or layer.startswith(f"{name}.")
            for layer in layers
        )
        if not related:
            handles.append(
                # The blank keeps these names apart from those of layer calls.
                module.register_forward_hook(lambda module, _, out, name=name: note(f"{name} ", module, out))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _NoDropout(TorchFunctionMode):
    """Switches dropout off, so that runs on different numbers of rows can be compared."""

    _DROPOUTS = frozenset(
        {
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            torch.dropout,
            torch.alpha_dropout,
            torch.feature_dropout,
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode with all weights trainable; afterwards nothing of that is left."""
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    attributes = {module: dict(vars(module)) for module in model.modules()}
    with evaluating(model), _all_trainable(model):
        model.train()
        try:
            yield
        finally:
            for module, values in attributes.items():
                vars(module).clear()
                vars(module).update(values)
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Let gradients flow to frozen weights too, since they may be trained later."""
    frozen = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _gradients(loss: Tensor, weights: list[nn.Parameter]) -> list[Tensor | None]:
    """What a backward pass gives the weights; the gradients they have now stay as they are."""
    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [weight.grad for weight in weights]
    finally:
        for weight, grad in zip(weights, kept, strict=True):
            weight.grad = grad


def _pattern(value: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).view_as(value)


def _alike(got: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    """Whether two lists of tensors hold the same values up to rounding."""
    if len(got) != len(wanted):
        return False
    largest = max((_size(value) for value in wanted), default=0.0)
    for one, other in zip(got, wanted, strict=True):
        # A gradient that does not exist is as good as one of zeros.
        if one is None or other is None:
            one = torch.zeros_like(other) if one is None and other is not None else one
            other = torch.zeros_like(one) if other is None and one is not None else other
        if one is None or other is None:
            continue
        tolerance = 1e-3 if one.dtype in (torch.float32, torch.float64) else 5e-2
        # A gradient that cancels out, such as that of a bias before a norm, is nothing but rounding of larger ones.
        bound = tolerance * (_size(other) + 0.1 * largest) + 1e-9
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=bound, equal_nan=True):
            return False
    return True


def _size(value: Tensor | None) -> float:
    return float(value.nan_to_num().abs().amax()) if value is not None and value.numel() else 0.0


@contextmanager
def _stirred(model: nn.Module) -> Iterator[None]:
    """Give weights that are all the same, such as gates that start at zero, values that let nothing hide."""
    originals = {
        weight: weight.data
        for weight in model.parameters()
        if weight.numel() and bool((weight == weight.flatten()[0]).all())
    }
    try:
        for weight, value in originals.items():
            weight.data = value + 0.3 * torch.randn_like(value) if value.is_floating_point() else value
        yield
    finally:
        for weight, value in originals.items():
            weight.data = value
