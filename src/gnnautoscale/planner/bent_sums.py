"""Finds the layers that bend the sum of their messages, as GIN's MLP does.

Behind such a layer rows are not linear in the messages any more. A history at the sum itself still is, which makes
gradients beyond the border of a batch exact.
"""

from __future__ import annotations

from gnnautoscale.forward import Plan
from gnnautoscale.planner.comparison import alike
from gnnautoscale.planner.trial import Trial


class BentSums:
    """The layer calls that get their histories at sums of messages; none, unless this is ``wanted``."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        #: The calls found so far.
        self.calls: frozenset[str] = frozenset()

    def find(self, trial: Trial, plan: Plan) -> bool:
        """Look for such calls with a plan that suits the model, once; returns whether there are some."""
        if self._wanted:
            self._wanted = False
            self.calls = bent_calls(trial, plan)
            return bool(self.calls)
        return False

    def give_up(self) -> bool:
        """Take the histories at sums back, since they do not suit the model; returns whether there were some."""
        there = bool(self.calls)
        self.calls = frozenset()
        return there


def bent_calls(trial: Trial, plan: Plan) -> frozenset[str]:
    """The calls whose output is not linear in what they aggregate, apart from those that depend on no slot."""
    known = trial.seen(plan.inner).reference.outputs
    candidates = [
        name
        for name, call in plan.calls.items()
        if plan.needs.get(name) and call.num_propagations and not call.nested and name not in plan.inner
    ]

    def is_bent(name: str) -> bool:
        low, high = (
            trial.observe(plan.inner | {name}, shifted=(name, by)).reference.outputs[name] for by in (-1.0, 1.0)
        )
        return not alike([(low + high) / 2], [known[name]])

    return frozenset(name for name in candidates if is_bent(name))
