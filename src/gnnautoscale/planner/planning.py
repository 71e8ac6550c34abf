"""Makes a model's plan, and checks it on trial graphs.

A copy of the model runs on small graphs, in the mode it was called in: as a whole, and in batches whose histories hold
the exact rows. Every layer, norm and output must then agree, so no table of layer types is needed. A layer that
deviates, because it looks beyond its neighbours, gets a history at each of its propagations. If that does not help, or
if something outside the layers mixes nodes, the model is refused and the message names the culprit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import BoundArguments
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import RandomState, tensors_in, undisturbed
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import (
    SHORTCUTS,
    Hooks,
    Plan,
    describe,
    evaluating,
)
from gnnautoscale.graph import BatchInfo, TypedInfo
from gnnautoscale.planner.bent_sums import BentSums
from gnnautoscale.planner.blame import DeviationError, LayerError, explained, keeps_state, random_evaluation
from gnnautoscale.planner.comparison import alike
from gnnautoscale.planner.lazy_weights import initialize_lazy_weights
from gnnautoscale.planner.merging import merged
from gnnautoscale.planner.rehearsal import Reference, Rehearsal
from gnnautoscale.planner.trial import Attempt, Trial
from gnnautoscale.planner.trial_graph import TrialGraph, TrialSetup, setups_for
from gnnautoscale.planner.typed_planning import make_typed_plan
from gnnautoscale.planner.understudy import MOST_COPIED, Understudy, seed_everything

# How often a model that skips layers at random is tried, to see all of them.
_MOST_SEEDS = 32


def make_plan(
    hooks: Hooks, info: BatchInfo | TypedInfo, arguments: BoundArguments, *, explicit: bool, at_sums: bool = False
) -> Plan:
    """Make the plan of a model with hooks from a call with a batch, and check that batches agree with the whole graph.

    The plan holds for the mode that the model is in. An ``explicit`` model names its own slots. If ``at_sums``, a layer
    that bends the sum of its messages, as GIN does, has its histories at these sums. If no placement of histories makes
    the model exact, an :class:`UnsupportedModelError` names the culprit.
    """
    with hooks.lifted() as model:
        if any(is_lazy(weight) for weight in model.parameters()):
            initialize_lazy_weights(model, info, arguments, _device_of(model, info), explicit=explicit)
    if isinstance(info, TypedInfo):
        with _undisturbed_trial(hooks, info) as device:
            return make_typed_plan(hooks.bare_copy(share_above=MOST_COPIED), info, arguments, device)
    with _undisturbed_trial(hooks, info) as device:
        return _Tryout(hooks.bare_copy(share_above=MOST_COPIED), info, arguments, device, explicit).plan(at_sums)


def still_holds(plan: Plan, hooks: Hooks, info: BatchInfo, arguments: BoundArguments) -> bool:
    """Whether the copy of a plan holds after a number in the model or in its arguments has changed."""
    with _undisturbed_trial(hooks, info) as device:
        return _Tryout(hooks.bare_copy(share_above=MOST_COPIED), info, arguments, device, plan.explicit).confirms(plan)


def skips_at_random(plan: Plan, calls: list[str], hooks: Hooks, info: BatchInfo, arguments: BoundArguments) -> bool:
    """Whether the model leaves out these layer calls at random, whatever the graph."""
    with _undisturbed_trial(hooks, info) as device:
        return _Tryout(hooks.bare_copy(share_above=MOST_COPIED), info, arguments, device, plan.explicit).skips(
            plan, set(calls)
        )


def _device_of(model: nn.Module, info: BatchInfo | TypedInfo) -> torch.device:
    """Where the model runs."""
    return next((value.device for value in model.parameters()), info.device)


@contextmanager
def _undisturbed_trial(hooks: Hooks, info: BatchInfo | TypedInfo) -> Iterator[torch.device]:
    with hooks.lifted() as model:
        device = _device_of(model, info)
    with (
        undisturbed(device),
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        _disable_current_modes(),
    ):
        seed_everything(0, device)
        yield device


class _Tryout:
    """The runs on trial graphs that lead to a plan."""

    def __init__(
        self, model: nn.Module, info: BatchInfo, arguments: BoundArguments, device: torch.device, explicit: bool
    ) -> None:
        self._info, self._arguments, self._device, self._explicit = info, arguments, device, explicit
        self._training = any(module.training for module in model.modules())
        self._model, self._setups = model, setups_for(info.graph)
        self._actors: dict[tuple[torch.dtype | None, bool], Understudy] = {}
        # How to try the model, the best way first.
        self._attempts = [
            Attempt(dtype, by_size, disturbed)
            for by_size in (True, False)
            for disturbed in (True, False)
            for dtype in (torch.float64, None)
        ]
        # The batch attributes that the model uses outside its layers.
        self._used_attributes: list[str] = []
        # The tensors that the model branches on, and rows of slots like those that the model itself computes.
        self._spared: frozenset[str] = frozenset()
        self._own_rows: dict[str, Tensor] = {}
        # Whether random numbers need not be replaced, because there are none.
        self._by_chance = False

    # What others ask #################################################################################################

    def plan(self, at_sums: bool) -> Plan:
        """Try histories at the outputs of layers, and at the propagations of layers that deviate; see make_plan."""
        trials = self._trials(self._setups)
        if self._training:
            self._choose_seed(trials)
        else:
            self._check_determinism(trials[0])
        inner: set[str] = set()
        sums = BentSums(wanted=at_sums)
        everything_needed = False
        while True:
            placed = inner | sums.calls
            observations = [trial.seen(placed) for trial in trials]
            plan = merged(observations, placed, self._explicit, everything_needed=everything_needed)
            references = [seen.reference for seen in observations]
            try:
                deviation = self._rehearse_all(trials, plan, references)
            except Exception:
                if sums.give_up():
                    continue
                kept = self._without_failing(trials, plan, references)
                if len(kept) == len(trials):
                    raise
                trials = kept
                continue
            if deviation is None:
                if sums.find(trials[0], plan):
                    continue
                break
            if sums.give_up():
                continue
            call = plan.calls.get(deviation.name)
            if call is not None and call.num_propagations > 1 and deviation.name not in inner:
                inner = inner | {deviation.name}
            elif not everything_needed:
                # Autograd may have missed what a slot is computed from, for example under no_grad.
                everything_needed = True
            else:
                raise deviation.error(plan, self._used_attributes, training=self._training)
        self._check_succession(trials[0], plan, references[0])
        if self._training and not self._by_chance:
            self._check_recorded_values(trials[0], plan, references[0])
        # Whether shortcuts and sweeps change something depends on the model alone, so that one graph shows it.
        self._take_shortcuts(trials[:1], plan, references[:1])
        self._note_types(trials[0], plan)
        _note_equal_records(trials, plan)
        plan.end_trial()
        return plan

    def confirms(self, plan: Plan) -> bool:
        """Whether batches agree with the whole graph by a plan that is there already."""
        try:
            trial = self._trials(self._setups[:1])[0]
            seen = trial.seen(plan.inner)
            found = merged([seen], plan.inner, plan.explicit)
            same_calls = found.calls.keys() == plan.calls.keys() and all(
                (call.num_propagations, call.attributes, len(call.edge_names))
                == (plan.calls[name].num_propagations, plan.calls[name].attributes, len(plan.calls[name].edge_names))
                for name, call in found.calls.items()
            )
            same_slots = found.needs.keys() == plan.needs.keys() and all(
                needed <= plan.needs[slot] for slot, needed in found.needs.items()
            )
            holds = same_calls and same_slots and trial.rehearse(plan, seen.reference) is None
            plan.end_trial()
            return holds
        except Exception:
            return False  # A new plan says why, if it fails as well.

    def skips(self, plan: Plan, calls: set[str]) -> bool:
        """Whether these calls are left out at random on the whole of a trial graph."""
        trial, skipped = self._trials(self._setups[:1])[0], set[str]()
        for seed in range(_MOST_SEEDS):
            trial.seed = seed
            skipped |= calls - trial.observe(plan.inner, by_chance=True).plan.calls.keys()
        return skipped == calls

    # Trials ##########################################################################################################

    def _trials(self, setups: Iterable[TrialSetup]) -> list[Trial]:
        """A trial for each setup that the model runs on as a whole; the first one has to.

        In double precision, where rounding hides nothing, if the model runs in it.
        """
        trials: list[Trial] = []
        self._spare_what_is_read()
        for setup in setups:
            failures: dict[Attempt, Exception] = {}
            # The model may not run on features unlike the user's.
            for features, attempt in product(dict.fromkeys([setup.features, "own"]), self._attempts):
                try:
                    trial = self._trial(replace(setup, features=features), attempt)
                    trial.last = trial.observe(set())
                except Exception as error:
                    failures[attempt] = error
                    continue
                if trials and not trial.last.reference.is_finite:
                    continue
                trials.append(trial)
                self._attempts = [other for other in self._attempts if other.by_size is attempt.by_size]
                break
            if not trials:
                plainest = failures[Attempt(None, by_size=True, disturbed=False)]
                raise explained(plainest, self._info, self._arguments, self._model) from plainest
            failures.clear()  # Tracebacks would keep the running pass alive.
        return trials

    def _spare_what_is_read(self) -> None:
        """Find out which tensors the model branches on: other values would show another branch than the user's."""
        try:
            trial = self._trial(self._setups[0], Attempt(None, by_size=True, disturbed=False))
            seed_everything(0, self._device)  # as the run does
            state = RandomState(self._device)
            seen = trial.observe(set(), by_chance=True).plan
            self._by_chance = not state.has_moved
            self._spared |= seen.reads
            self._own_rows = seen.rows
        except Exception:
            return  # Another attempt may run, or says why not.

    def _trial(self, setup: TrialSetup, attempt: Attempt) -> Trial:
        dtype, by_size, disturbed = attempt
        graph = TrialGraph(
            self._info, self._arguments, self._device, setup, dtype, by_size=by_size, disturbed=disturbed
        )
        key = dtype, disturbed
        if key not in self._actors:
            self._actors[key] = Understudy(self._model, dtype, disturbed=disturbed, spared=self._spared)
        return Trial(graph, self._actors[key], attempt, self._explicit, self._used_attributes, self._by_chance)

    def _choose_seed(self, trials: list[Trial]) -> None:
        """Choose a seed that skips none of the layers of evaluation mode, if training skips some at random."""
        first = trials[0]
        layers = {name for name, module in self._model.named_modules() if isinstance(module, MessagePassing) and name}
        if first.last is not None and layers <= {_path_of(call) for call in first.last.plan.calls}:
            return
        with evaluating(self._model):
            evaluated = Understudy(self._model, first.attempt.dtype)
        try:
            wanted = replace(first, actor=evaluated).observe(set()).plan.calls.keys()
        except Exception:
            return  # A model may run in training mode only.
        for seed in range(_MOST_SEEDS):
            seen = replace(first, seed=seed).observe(set()) if seed else first.last
            if seen is not None and wanted <= seen.plan.calls.keys():
                for trial in trials if seed else ():
                    trial.seed, trial.last = seed, None
                return

    # Runs ############################################################################################################

    def _rehearse_all(self, trials: list[Trial], plan: Plan, references: list[Reference]) -> DeviationError | None:
        """Run all trial graphs in batches, as steps and as sweeps; returns the first deviation."""
        for trial, reference in zip(trials, references, strict=True):
            deviation = trial.rehearse(plan, reference)
            if deviation is not None:
                return deviation
        return trials[0].sweep(plan, references[0])

    def _without_failing(self, trials: list[Trial], plan: Plan, references: list[Reference]) -> list[Trial]:
        """Leave out trials that fail in batches otherwise than by a deviation.

        They say nothing about the user's graph, except for the first one.
        """
        kept = trials[:1]
        for trial, reference in list(zip(trials, references, strict=True))[1:]:
            try:
                trial.rehearse(plan, reference)
            except Exception as error:
                if isinstance(error, UnsupportedModelError) and not isinstance(error, LayerError):
                    raise
                continue
            kept.append(trial)
        return kept

    # Checks ##########################################################################################################

    def _check_determinism(self, trial: Trial) -> None:
        """Refuse a model that is random in evaluation mode."""
        drawn = replace(trial, seed=1).observe(set(), by_chance=True).reference.outputs[Plan.OUTPUT]
        before = trial.seen(set()).reference.outputs[Plan.OUTPUT]
        if not alike([*tensors_in(drawn)], [*tensors_in(before)]):
            raise random_evaluation()

    def _check_succession(self, trial: Trial, plan: Plan, reference: Reference) -> None:
        """Refuse a model that keeps something of one batch for the next; note what it may change."""
        again = trial.observe(plan.inner).reference.outputs[Plan.OUTPUT]
        touched = trial.actor.touched()
        if not alike([*tensors_in(again)], [*tensors_in(reference.outputs[Plan.OUTPUT])]):
            raise keeps_state(touched or ["something outside of the model"])
        if not touched:
            return
        attributes = trial.actor.changed_attributes()
        trial.actor.reset()
        try:
            references = [trial.observe(plan.inner, reset=False).reference for _ in trial.graph.parts]
            trial.actor.reset()
            for batch, reference in zip(trial.graph.parts, references, strict=True):
                trial.step(batch, plan, reference)
        except (DeviationError, UnsupportedModelError, RuntimeError, ValueError, LookupError, TypeError) as error:
            raise keeps_state(touched) from error
        plan.harmless = {attribute for attribute in attributes if self._is_idle(trial, plan, attribute)}

    def _is_idle(self, trial: Trial, plan: Plan, attribute: tuple[str, str]) -> bool:
        """Whether the value of an attribute that the model changes itself makes no difference."""
        path, name = attribute
        trial.actor.reset()
        modules = dict(trial.actor.model.named_modules())
        value = getattr(modules.get(path), name, None)
        if path not in modules:
            return False  # something that all models of a class share
        if isinstance(value, (bool, str)):
            return False
        if not isinstance(value, (int, float)):
            return True  # Runs in succession have shown that.
        wanted = trial.observe(plan.inner).reference.outputs[Plan.OUTPUT]
        for other in (value + 1, value + 1000, 2 * value + 3):
            trial.actor.reset()
            setattr(trial.actor.model.get_submodule(path), name, other)
            try:
                found = trial.observe(plan.inner, reset=False).reference.outputs[Plan.OUTPUT]
            except Exception:
                return False
            if not alike([*tensors_in(found)], [*tensors_in(wanted)]):
                return False
        return True

    def _check_recorded_values(self, trial: Trial, plan: Plan, reference: Reference) -> None:
        """Refuse layers that change recorded values at random in training: the record would undo that."""
        batch = next(iter(trial.graph.parts))
        seen = []
        for by_chance in (False, True):
            trial.actor.reset()
            # Not checked, because dropout may change the output.
            rehearsal = Rehearsal(trial.graph, batch, plan, reference, checking=False)
            with torch.no_grad():
                arguments = trial.graph.arguments(batch)
                trial.actor.run(rehearsal.step(), arguments, seed=trial.seed, by_chance=by_chance)
            seen.append(rehearsal.local_edges)
        expected, drawn = seen
        if [name for name, _ in expected] != [name for name, _ in drawn]:
            return  # Layers are skipped at random.
        for (name, before), (_, after) in zip(expected, drawn, strict=True):
            if not torch.equal(before, after):
                layer = dict(trial.actor.model.named_modules()).get(_path_of(name), trial.actor.model)
                raise UnsupportedModelError(
                    f"{describe(name, layer)} must pass the same edges and edge weights to propagate in every training "
                    "step",
                    got="edges or edge weights that it changes at random in training",
                    fix="Set the layer's own dropout to 0 and use autoscale(..., edge_dropout=p).",
                )

    # Shortcuts #######################################################################################################

    def _take_shortcuts(self, trials: list[Trial], plan: Plan, references: list[Reference]) -> None:
        """Take all shortcuts that change neither the batch's rows nor gradients."""
        try:
            plain = trials[0].train(plan, references[0])
        except Exception:
            plain = None  # The model may still be evaluated; training it will raise this error.
        for call in plan.calls.values():
            call.shortcuts = call.possible_shortcuts
        plan.short_tail = True
        plan.ignores_edges = all(attribute == "n_id" for attribute in self._used_attributes)
        while True:
            culprit, only_gradients = None, False
            try:
                deviation = self._rehearse_all(trials, plan, references)
                if deviation is None and (plain is None or alike(trials[0].train(plan, references[0]), plain)):
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

    def _note_types(self, trial: Trial, plan: Plan) -> None:
        """Give the plan the types of rows that the model itself computes, not those of a copy in another precision."""
        if trial.attempt.dtype is None:
            return
        if not plan.rows.keys() <= self._own_rows.keys():
            own = self._trial(self._setups[0], trial.attempt._replace(dtype=None))
            self._own_rows = replace(own, seed=trial.seed).observe(plan.inner).plan.rows
        plan.rows = self._own_rows


def _note_equal_records(trials: list[Trial], plan: Plan) -> None:
    """Note which calls have the records of an earlier one, so that on the whole graph they are made only once."""
    known = [trial.graph.memory.records for trial in trials]
    leaders: list[str] = []
    for name, call in plan.calls.items():
        equal = (leader for leader in leaders if all(made.get(name) == made[leader] for made in known))
        leader = next(equal, None)
        if leader is not None:
            call.like = leader, plan.calls[leader]
        elif all(made.get(name) for made in known):
            leaders.append(name)


def _path_of(call: str) -> str:
    """The path of the layer that a call is of."""
    return call.split(">")[-1].split("#")[0]
