"""Runs of one copy of a model on one trial graph: as a whole, in batches as steps and sweeps, and with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in, weights_of
from gnnautoscale.forward import Arguments, Plan, Session, check_layout, run_pass
from gnnautoscale.graph import BatchTensor
from gnnautoscale.planner.blame import DeviationError
from gnnautoscale.planner.comparison import gradients
from gnnautoscale.planner.rehearsal import Observation, Reference, Rehearsal, watching
from gnnautoscale.planner.trial_graph import TrialGraph
from gnnautoscale.planner.understudy import MOST_COPIED, Understudy


class Attempt(NamedTuple):
    """A way to try a model; see :class:`TrialGraph` and :class:`Understudy`."""

    dtype: torch.dtype | None
    by_size: bool
    disturbed: bool


@dataclass
class Trial:
    """A trial graph and the copy of the model that runs on it.

    Attributes:
        graph: The trial graph.
        actor: The copy of the model.
        attempt: How both were made.
        explicit: Whether the model names its own slots.
        used_attributes: Collects the batch attributes that the model uses outside its layers.
        by_chance: Whether random numbers need not be replaced, because there are none.
        seed: The seed of all runs.
        last: What was last observed without histories inside of layers.
    """

    graph: TrialGraph
    actor: Understudy
    attempt: Attempt
    explicit: bool
    used_attributes: list[str]
    by_chance: bool = False
    seed: int = 0
    last: Observation | None = None

    def seen(self, inner: set[str]) -> Observation:
        """What was last observed, if there are no histories inside of layers, or another observation."""
        return self.last if self.last is not None and not inner else self.observe(inner)

    def observe(
        self,
        inner: set[str],
        *,
        by_chance: bool = False,
        reset: bool = True,
        shifted: tuple[str, float] | None = None,
    ) -> Observation:
        """Run the whole trial graph, and note how layers are called and what each slot is computed from.

        The slots inside of one call can be ``shifted``, by so much.
        """
        if reset:
            self.actor.reset()
        batch = next(iter(self.graph.whole))
        seen = Observation(self.graph, batch, Plan(inner=inner, explicit=self.explicit), shifted)
        arguments = self.graph.arguments(batch)
        watched = watching(other_modules(self.actor.model), seen.note), BatchTensor.watched(self.used_attributes)
        with torch.enable_grad(), watched[0], watched[1], seen.noting_reads(self.actor.model):
            out = self.actor.run(seen.session, arguments, seed=self.seed, by_chance=by_chance or self.by_chance)
        for value in tensors_in(out):
            check_layout(value)
        seen.plan.needs[Plan.OUTPUT] = seen.sources(out)
        seen.note(Plan.OUTPUT, None, None, out)
        return seen

    def run(self, session: Session, arguments: Arguments) -> Any:
        """Run the model in a session."""
        return self.actor.run(session, arguments, seed=self.seed, by_chance=self.by_chance)

    def rehearse(self, plan: Plan, reference: Reference) -> DeviationError | None:
        """Run a trial graph in batches with exact histories; returns the first deviation."""
        try:
            for batch in self.graph.parts:
                self.actor.reset()
                self.step(batch, plan, reference)
        except DeviationError as deviation:
            return deviation.with_traceback(None)  # which would keep the running pass alive
        return None

    def step(self, batch: Data, plan: Plan, reference: Reference) -> None:
        """Run a batch with exact histories; raises a :class:`DeviationError`."""
        rehearsal = Rehearsal(self.graph, batch, plan, reference)
        session = rehearsal.step()
        with torch.no_grad(), watching(other_modules(self.actor.model), rehearsal.check):
            out = self.run(session, self.graph.arguments(batch))
        session.finish(out)
        rehearsal.check(Plan.OUTPUT, None, None, out)

    def sweep(self, plan: Plan, reference: Reference) -> DeviationError | None:
        """Compute each level from the levels below; first try to skip the rows that nothing needs."""
        deviation: DeviationError | None = None
        for skip_empty in (True, False):
            plan.skip_empty = skip_empty
            try:
                for batch in self.graph.parts:
                    for level in (*plan.levels, None):
                        self._sweep_batch(batch, plan, reference, level)
                return None
            except DeviationError as error:
                deviation = error.with_traceback(None)
            except (RuntimeError, ValueError, IndexError):
                if not plan.skip_empty:
                    raise
        return deviation

    def _sweep_batch(self, batch: Data, plan: Plan, reference: Reference, level: frozenset[str] | None) -> None:
        self.actor.reset()
        rehearsal = Rehearsal(self.graph, batch, plan, reference)
        session = rehearsal.sweep(level)
        session.begin()
        with torch.no_grad():
            arguments = self.graph.arguments(batch)
            out = run_pass(partial(self.run, session, arguments))
        if level is None:
            rehearsal.check(Plan.OUTPUT, None, None, out)

    def train(self, plan: Plan, reference: Reference) -> list[Tensor | None]:
        """Outputs, what the model keeps, and gradients of steps on a trial graph, with exact histories."""
        found: list[Tensor | None] = []
        for batch in self.graph.parts:
            self.actor.reset()
            weights = [weight for weight in weights_of(self.actor.model) if weight.is_floating_point()]
            session = Rehearsal(self.graph, batch, plan, reference, checking=False).step()
            arguments = self.graph.arguments(batch)
            with torch.enable_grad(), BatchTensor.watched(self.used_attributes):
                out = self.run(session, arguments)
                values = [value for value in tensors_in(session.finish(out)) if value.is_floating_point()]
                found += [value.detach() for value in (*values, *self.actor.kept_tensors())]
                # Every entry has its own factor, so that no two of them can be mixed up.
                loss = torch.zeros(())
                for value in values:
                    factors = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
                    loss = loss + (value * factors.view_as(value)).sum()
                if loss.requires_grad:
                    found += gradients(loss, weights, MOST_COPIED)
        return found


def other_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that neither are, nor belong to, nor contain a message-passing layer."""
    modules = {f".{name}." if name else ".": module for name, module in model.named_modules()}
    layers = [path for path, module in modules.items() if isinstance(module, MessagePassing)]
    return {
        f"{path[1:-1]} ": module  # The blank keeps these names apart from those of layer calls.
        for path, module in modules.items()
        if not any(path.startswith(layer) or layer.startswith(path) for layer in layers)
    }
