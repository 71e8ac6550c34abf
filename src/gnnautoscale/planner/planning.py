"""Makes a model's plan, and checks it on a trial graph.

The model runs on a small graph twice: as a whole, and in batches whose histories hold the exact rows. Every layer,
norm and output must then agree, so no table of layer types is needed. A layer that deviates, because it looks beyond
its neighbours, gets a history at each of its propagations. If that does not help, or if something outside the layers
mixes nodes, the model is refused and the message names the culprit.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from gnnautoscale.planner.rehearsal import (
    DeviationError,
    LayerError,
    Observation,
    Reference,
    Rehearsal,
    tolerance,
    watching,
)
from gnnautoscale.planner.trial_graph import TrialGraph


def make_plan(model: nn.Module, hooks: Hooks, info: BatchInfo, arguments: BoundArguments, *, explicit: bool) -> Plan:
    """Make a model's plan from a call with a batch, and check that batches agree with the whole graph.

    An ``explicit`` model names its own slots. If no placement of histories makes the model exact, an
    :class:`UnsupportedModelError` names the layer.
    """
    device = next((value.device for value in model.parameters()), info.n_id.device)
    with evaluating(model), torch.autocast(device.type, enabled=False), torch.inference_mode(False):
        with undisturbed(device):
            torch.manual_seed(0)
            trial = TrialGraph(info, arguments, device)
        rehearsals = _Rehearsals(model, hooks, trial, explicit)
        if any(is_lazy(parameter) for parameter in model.parameters()):
            # Lazy weights are drawn now, from the user's own random state.
            rehearsals.observe(set())
        with undisturbed(device), _perturbed(model):
            return rehearsals.plan()


class _Rehearsals:
    """The runs on the trial graph that lead to a plan."""

    def __init__(self, model: nn.Module, hooks: Hooks, trial: TrialGraph, explicit: bool) -> None:
        self.model, self.hooks, self.trial, self.explicit = model, hooks, trial, explicit
        # The batch attributes that the model uses outside its layers.
        self._used_attributes: list[str] = []
        self._other_modules = _other_modules(model)

    def plan(self) -> Plan:
        """Try histories at the outputs of layers, and at the propagations of layers that deviate."""
        inner: set[str] = set()
        everything_needed = False
        while True:
            plan, reference = self.observe(inner, everything_needed=everything_needed)
            deviation = self._rehearse(plan, reference) or self._sweep(plan, reference)
            if deviation is None:
                break
            call = plan.calls.get(deviation.name)
            if call is not None and call.num_propagations > 1 and deviation.name not in inner:
                inner = inner | {deviation.name}
            elif not everything_needed:
                # Autograd may have missed what a slot is computed from, for example under no_grad.
                everything_needed = True
            else:
                raise deviation.error()
        with evaluating(self.model):
            self._check_training_mode(plan, reference)
        self._take_shortcuts(plan, reference)
        return plan

    def _take_shortcuts(self, plan: Plan, reference: Reference) -> None:
        """Take all shortcuts that change neither the batch's rows nor gradients."""
        try:
            plain = self._train(plan, reference)
        except Exception:
            plain = None  # The model may still be evaluated; training it will raise this error.
        for call in plan.calls.values():
            call.shortcuts = call.possible_shortcuts
        plan.short_tail = True
        plan.ignores_edges = all(attribute == "n_id" for attribute in self._used_attributes)
        while True:
            culprit, only_gradients = None, False
            try:
                deviation = self._rehearse(plan, reference) or self._sweep(plan, reference)
                if deviation is None and (plain is None or _alike(self._train(plan, reference), plain)):
                    return
                culprit, only_gradients = (None, True) if deviation is None else (deviation.name, False)
            except LayerError as error:
                culprit = error.call
            except Exception:  # noqa: S110
                pass  # Something between the layers; shortcuts may make it fail in any way.
            blamed = plan.calls.get(culprit or "")
            if blamed is not None and blamed.shortcuts:
                blamed.shortcuts -= {next(name for name in SHORTCUTS if name in blamed.shortcuts)}
            elif only_gradients and any(call.constant_halo for call in plan.calls.values()):
                for call in plan.calls.values():
                    call.constant_halo.clear()
            elif plan.short_tail:
                plan.short_tail = False
            elif plan.ignores_edges:
                plan.ignores_edges = False
            elif any(call.shortcuts for call in plan.calls.values()):
                for call in plan.calls.values():
                    call.shortcuts = frozenset()
            else:
                return  # The model differs from run to run, so nothing can be compared.

    def _train(self, plan: Plan, reference: Reference) -> list[Tensor | None]:
        """Outputs and gradients of training steps on the trial graph, with exact histories and without dropout."""
        weights = [weight for weight in self.model.parameters() if weight.is_floating_point()]
        found: list[Tensor | None] = []
        with _training(self.model), _NoDropout(), torch.enable_grad():
            for batch in self.trial.parts:
                torch.manual_seed(0)
                session = Rehearsal(self.trial, batch, plan, reference, checking=False).step()
                arguments = self.trial.arguments(batch)
                with BatchTensor.watched(self._used_attributes):
                    out = self.hooks.run(session, arguments)
                values = [value for value in tensors_in(session.finish(out)) if value.is_floating_point()]
                found += [value.detach() for value in values]
                # Every entry has its own factor, so that no two of them can be mixed up.
                loss = torch.zeros(())
                for value in values:
                    factors = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
                    loss = loss + (value * factors.view_as(value)).sum()
                if loss.requires_grad:
                    found += _gradients(loss, weights)
        return found

    def observe(self, inner: set[str], *, everything_needed: bool = False) -> tuple[Plan, Reference]:
        """Run the whole trial graph, and note how layers are called and what each slot is computed from."""
        plan = Plan(inner=inner, explicit=self.explicit)
        batch = next(iter(self.trial.whole))
        seen = Observation(self.trial, batch, plan)
        arguments = self.trial.arguments(batch)
        watched = watching(self._other_modules, seen.note), BatchTensor.watched(self._used_attributes)
        with torch.enable_grad(), _all_trainable(self.model), watched[0], watched[1]:
            out = self.hooks.run(seen.session, arguments)
        plan.needs[Plan.OUTPUT] = seen.sources(out)
        seen.note(Plan.OUTPUT, None, out)
        if everything_needed:
            slots = list(plan.needs)
            plan.needs = {slot: frozenset(slots[:number]) for number, slot in enumerate(slots)}
        return plan, seen.reference

    def _rehearse(self, plan: Plan, reference: Reference) -> DeviationError | None:
        """Run the trial graph in batches with exact histories; returns the first deviation."""
        try:
            for batch in self.trial.parts:
                rehearsal = Rehearsal(self.trial, batch, plan, reference)
                session = rehearsal.step()
                with torch.no_grad(), watching(self._other_modules, rehearsal.check):
                    out = self.hooks.run(session, self.trial.arguments(batch))
                rehearsal.check(Plan.OUTPUT, None, out)
                session.finish(out)
        except DeviationError as deviation:
            return deviation
        return None

    def _check_training_mode(self, plan: Plan, reference: Reference) -> None:
        """Refuse layers that change recorded values at random in training: the record would undo that."""
        batch = next(iter(self.trial.parts))
        seen = []
        for training in (False, True):
            # Only the layers themselves: their norms must not update running averages.
            for module in self.model.modules():
                if isinstance(module, MessagePassing):
                    module.training = training
            # Not checked, because dropout in layers may change their output.
            rehearsal = Rehearsal(self.trial, batch, plan, reference, checking=False)
            with torch.no_grad():
                self.hooks.run(rehearsal.step(), self.trial.arguments(batch))
            seen.append(rehearsal.local_edges)
        evaluated, trained = seen
        if [name for name, _ in evaluated] != [name for name, _ in trained]:
            raise UnsupportedModelError(
                "layers must call propagate in training as often as in evaluation",
                got=f"{len(trained)} edges and edge weights passed to it in training, {len(evaluated)} in evaluation",
                fix="Make the number of propagations independent of the mode.",
            )
        for (name, before), (_, after) in zip(evaluated, trained, strict=True):
            if not torch.equal(before, after):
                raise UnsupportedModelError(
                    f"{name} must pass the same edges and edge weights to propagate in training as in evaluation",
                    got="edges or edge weights that it changes at random in training",
                    fix="Set the layer's own dropout to 0 and use autoscale(..., edge_dropout=p).",
                )

    def _sweep(self, plan: Plan, reference: Reference) -> DeviationError | None:
        """Compute each level from the levels below; first try to skip the rows that nothing needs."""
        deviation: DeviationError | None = None
        for skip_empty in (True, False):
            plan.skip_empty = skip_empty
            try:
                for batch in self.trial.parts:
                    for level in (*plan.levels, None):
                        rehearsal = Rehearsal(self.trial, batch, plan, reference)
                        session = rehearsal.sweep(level)
                        session.begin()
                        with torch.no_grad():
                            out = run_pass(partial(self.hooks.run, session, self.trial.arguments(batch)))
                        if level is None:
                            rehearsal.check(Plan.OUTPUT, None, out)
                return None
            except DeviationError as error:
                deviation = error
            except (RuntimeError, ValueError, IndexError):
                if not plan.skip_empty:
                    raise
        return deviation


def _other_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that neither are, nor belong to, nor contain a message-passing layer."""
    modules = {f".{name}." if name else ".": module for name, module in model.named_modules()}
    layers = [path for path, module in modules.items() if isinstance(module, MessagePassing)]
    return {
        f"{path[1:-1]} ": module  # The blank keeps these names apart from those of layer calls.
        for path, module in modules.items()
        if not any(path.startswith(layer) or layer.startswith(path) for layer in layers)
    }


class _NoDropout(TorchFunctionMode):
    """Switches dropout off, so that runs on different numbers of rows can be compared."""

    _DROPOUTS = frozenset(
        {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
        | {torch.dropout, torch.alpha_dropout, torch.feature_dropout}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode with all weights trainable; afterwards it is as before."""
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
    """Let gradients flow to frozen weights too, because they may be trained later."""
    frozen = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


@contextmanager
def _perturbed(model: nn.Module) -> Iterator[None]:
    """Perturb weights whose entries are all equal, such as gates that start at zero and would hide a deviation."""
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


def _gradients(loss: Tensor, weights: list[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of some weights; their ``grad`` stays as it is."""
    # Not torch.autograd.grad, which reentrant checkpointing does not support.
    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [weight.grad for weight in weights]
    finally:
        for weight, grad in zip(weights, kept, strict=True):
            weight.grad = grad


def _alike(got: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    """Whether two lists of tensors are equal up to rounding; a missing gradient counts as zeros."""
    if len(got) != len(wanted):
        return False
    sizes = [0.0 if value is None or not value.numel() else float(value.nan_to_num().abs().amax()) for value in wanted]
    for one, other, size in zip(got, wanted, sizes, strict=True):
        one = torch.zeros_like(other) if one is None and other is not None else one
        other = torch.zeros_like(one) if other is None and one is not None else other
        if one is None or other is None:
            continue
        # A gradient that cancels out, such as that of a bias before a norm, is only the rounding of larger ones.
        bound = tolerance(one.dtype) * (size + 0.1 * max(sizes)) + 1e-9
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=bound, equal_nan=True):
            return False
    return True
