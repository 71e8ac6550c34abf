"""Proposes how to train on a graph: parts, storage and precision of histories, refresh, and compensation.

``docs/tune.md`` has the rules, and compares estimates with measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import check_argument, checked, options_of, undisturbed
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.history import Medium
from gnnautoscale.models import build_model
from gnnautoscale.runs import compensation_pays
from gnnautoscale.tasks import Task, TaskName, task_for
from gnnautoscale.training import OPTIONS, FitOptions, HistoryDtype, Output, dataset_of
from gnnautoscale.tuning.trials import JOINED, SECONDS, Place, Trials, with_margin

# Fewer parts have smaller halos, so more parts must be faster by more than this.
FASTER = 0.2
# Smaller batches leave a processor little to do.
LEAST_NODES = 50
MOST_COUNTS = 10
# Parts are joined into a batch if that brings its classes closer to the graph's by SKEW (0.24 on WordNet); a GPU draws
# them so often, since it captures recurring batches.
SKEW, DRAWINGS = 0.1, 4
# Halo nodes per batch node, times the histories on top of each other: errors enter with each halo row and each layer.
# At 1, a batch of a 2-layer model pulls as many rows as it computes.
RISK = 1.0
# Share that a refresh in every epoch may add to the time of an epoch with its evaluation.
REFRESH_COST = 0.25
# Passes over all batches, forward and backward, that it may take to compare gradients with full batch's.
MOST_SWEEPS = 30

_DECIDED = {
    *("mode", "num_parts", "batch_size", "partition", "drawings", "fan_out", "steps_per_epoch"),
    *("compensate", "refresh_every", "storage", "history_dtype", "evaluation", *options_of(Output)),
}
#: Options of ``fit`` that ``tune`` leaves to the user.
PASSED = tuple(name for name in OPTIONS if name not in _DECIDED)


@dataclass(frozen=True)
class Candidate:
    """A number of parts, and what training with it takes.

    Attributes:
        num_parts: Number of parts; 1 is full batch.
        connectivity: Halo nodes per batch node, the mean over the parts.
        rows: Nodes and halo of the largest batch.
        storage: Where its histories live.
        history_dtype: Their type.
        keep: Whether batches are kept in the memory that is counted.
        memory: Bytes at the peak, as ``FitResult.peak_memory`` counts them.
        step_seconds: Seconds of a training step.
        epoch_seconds: Seconds of the steps of an epoch.
        measured: Whether memory and times come from a trial rather than an estimate.
        fits: Whether the memory suffices, with a margin.
        slower_than: A larger number of parts that is faster and needs no more memory, if there is one.
    """

    num_parts: int
    connectivity: float
    rows: int
    storage: Medium
    history_dtype: HistoryDtype
    keep: bool
    memory: int
    step_seconds: float
    epoch_seconds: float
    measured: bool
    fits: bool
    slower_than: int | None = None


@dataclass(frozen=True)
class Advice:
    """How to train.

    Attributes:
        options: Options for :func:`gnnautoscale.fit`.
        reasons: The reason for each of them.
        chosen: What training takes with them.
        candidates: All numbers of parts that were considered.
        budget: Bytes of memory to train in.
    """

    options: dict[str, Any]
    reasons: dict[str, str]
    chosen: Candidate
    candidates: list[Candidate]
    budget: int

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)


@checked(memory={"least": 1})
def tune(
    model: str | Callable[[], nn.Module],
    data: Data | HeteroData | Dataset | tuple[Data, Data, Data] | tuple[list[Data], list[Data], list[Data]],
    *,
    task: Task | TaskName | None = None,
    memory: int | None = None,
    model_options: dict[str, Any] | None = None,
    **options: Any,
) -> Advice:
    """Propose how to train a model on a graph, on this machine.

    Args:
        model: The name of one of the library's models, or a function that builds a model of your own.
        data: The graph to train on, or a data set, as :func:`gnnautoscale.fit` takes them.
        task: What to learn, likewise; by default the task that fits the data.
        memory: Bytes to train in, of the GPU's memory where there is one; by default all that is free.
        model_options: Options of the named model.
        options: Other options of :func:`gnnautoscale.fit`, such as ``device`` or ``grad_norm``.

    Raises:
        InputError: If nothing fits into the memory; the message says how much it takes.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> data = KarateClub()[0]
        >>> data.val_mask = data.test_mask = ~data.train_mask
        >>> advice = tune("gcn", data, model_options={"hidden": 8})
        >>> [candidate.num_parts for candidate in advice.candidates]
        [1, 2]
    """
    given = FitOptions.of(options)
    proposed = sorted(set(options) & _DECIDED)
    if proposed:
        raise InputError(
            f"tune takes the options {', '.join(PASSED)}",
            got=f"{', '.join(proposed)}, which it decides itself",
            fix="Leave these out.",
        )
    dataset = dataset_of(data)
    dataset.check()
    learned = task_for(dataset, task) if task is None or isinstance(task, str) else task
    learned.check_dataset(dataset)
    learned = learned.bound_to(dataset, metric=given.metric, class_weight=given.class_weight)
    graph = dataset.passing()
    if graph.num_nodes < 2:
        raise InputError("a graph to cut has at least two nodes", got="fewer", fix="Train on it as it is.")

    def build() -> nn.Module:
        if isinstance(model, str):
            return build_model(model, graph, learned.num_outputs, dataset.targets, **(model_options or {}))
        made: nn.Module = check_argument("what model() returns", model(), nn.Module, "Let it return a model.")
        return made

    with undisturbed(torch.device(given.device)):
        return _advise(Trials(build, dataset, learned, part_counts(graph.num_nodes), memory, given))


def part_counts(num_nodes: int) -> list[int]:
    """Numbers of parts worth considering: powers of two, or of four on large graphs."""
    most = max(2, num_nodes // LEAST_NODES)
    doublings = [2**power for power in range(most.bit_length())]
    return doublings if len(doublings) <= MOST_COUNTS else doublings[::2][:MOST_COUNTS]


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the fewest parts that fits and is not slower than one with more parts, if anything fits.

    A candidate that is slower than another one needs at least as much memory, so the other one fits too. With less
    memory there are never fewer parts.
    """
    fitting = (each for each in candidates if each.fits and each.slower_than is None)
    return min(fitting, key=lambda each: each.num_parts, default=None)


def consider(trials: Trials) -> list[Candidate]:
    """All numbers of parts, each with its histories at the first place where they fit."""
    usual = {parts: trials.expect(parts, trials.places[0]) for parts in trials.cuts}
    candidates = []
    for parts, cut in trials.cuts.items():
        # Compared at the usual place of histories, so that the result does not depend on the memory to train in.
        faster = (
            other
            for other, expected in usual.items()
            if other > parts
            and expected.memory <= usual[parts].memory
            and (1 + FASTER) * other * expected.step_seconds < parts * usual[parts].step_seconds
        )
        places = [place for place in trials.places if trials.fits(trials.expect(parts, place).memory)]
        place = next(iter(places), trials.places[0])
        expected = trials.expect(parts, place)
        candidates.append(
            Candidate(
                num_parts=parts,
                connectivity=cut.connectivity,
                rows=cut.rows,
                storage=place.storage,
                history_dtype=place.history_dtype,
                keep=place.keep,
                memory=expected.memory,
                step_seconds=expected.step_seconds,
                epoch_seconds=parts * expected.step_seconds,
                measured=(parts, place) in trials.done,
                fits=bool(places),
                slower_than=next(faster, None),
            )
        )
    return candidates


def _advise(trials: Trials) -> Advice:
    """Try some numbers of parts, choose one, and try that one too."""
    counts = list(trials.cuts)
    room = (place for place in trials.places if trials.fits(trials.known_bytes(counts[-1], place)))
    first = next(room, trials.places[-1])
    # The smallest batches first: they tell whether larger ones may be tried.
    for parts in dict.fromkeys([counts[-1], counts[len(counts) // 2], counts[0]]):
        trials.attempt(parts, first)
    while True:
        candidates = consider(trials)
        chosen = choose(candidates)
        if chosen is None:
            raise _nothing_fits(trials)
        place = _place_of(chosen, trials)
        if chosen.measured or not trials.attempt(chosen.num_parts, place):
            break
    why = _why_parts(chosen, candidates, trials)
    if chosen.num_parts == 1:
        return Advice({"mode": "full"}, {"mode": why}, chosen, candidates, trials.budget)
    joined, why_joined = _join(chosen, place, trials)
    if "num_parts" in joined:
        why = f"{JOINED} of them are as large as one of {chosen.num_parts} parts, {why}"
    why_dtype = "half of the bytes fit where all of them do not, at hardly any loss"
    options = {"num_parts": chosen.num_parts, **joined, "storage": place.storage, "history_dtype": place.history_dtype}
    options |= trials.batch_options(place)
    too_much = f"all batches together take {amount(trials.cuts[chosen.num_parts].kept)}, too much to keep"
    reasons = {
        "num_parts": why,
        "batch_size": why_joined,
        "drawings": "batches that come back are captured as CUDA graphs",
        "storage": place.why,
        "history_dtype": "there is room for histories as they are" if place.history_dtype == "same" else why_dtype,
        **dict.fromkeys(trials.batch_options(place), too_much),
    }
    options["refresh_every"], reasons["refresh_every"] = _refresh(chosen, place, trials)
    options["compensate"], reasons["compensate"] = _compensate(options, chosen, place, trials)
    return Advice(options, {name: reasons[name] for name in options}, chosen, candidates, trials.budget)


def _place_of(chosen: Candidate, trials: Trials) -> Place:
    wanted = (chosen.storage, chosen.history_dtype, chosen.keep)
    return next(each for each in trials.places if (each.storage, each.history_dtype, each.keep) == wanted)


def _nothing_fits(trials: Trials) -> InputError:
    needed = {
        with_margin(trials.expect(parts, place).memory): parts for parts in trials.cuts for place in trials.places
    }
    least = min(needed)
    return InputError(
        "some number of parts must fit into memory",
        got=amount(trials.budget),
        fix=f"Pass at least {amount(least)} as memory, which {needed[least]} parts should take, with a margin.",
    )


def _why_parts(chosen: Candidate, candidates: Sequence[Candidate], trials: Trials) -> str:
    how = "measured" if chosen.measured else "estimated"
    larger = [each for each in candidates if each.num_parts < chosen.num_parts]
    what = "the fewest that fit" + " and are not slow" * any(each.fits for each in larger) + ": they take"
    if chosen.num_parts == 1:
        what = "it needs no histories, so nothing is stale, and the whole graph at once takes"
    memory, needed = amount(chosen.memory), amount(with_margin(chosen.memory))
    reasons = [f"{what} {memory} ({how}), {needed} with a margin, and there are {amount(trials.budget)}"]
    for each in larger[-1:]:
        name = "full batch" if each.num_parts == 1 else f"{each.num_parts} parts"
        if not each.fits:
            known = "measured" if each.measured else "estimated"
            reasons.append(f"{name} would take {amount(each.memory)} ({known})")
        else:
            reasons.append(
                f"an epoch of {name} would take {1000 * each.epoch_seconds:.0f} ms, with these it takes "
                f"{1000 * chosen.epoch_seconds:.0f} ms"
            )
    return "; ".join(reasons)


def _join(chosen: Candidate, place: Place, trials: Trials) -> tuple[dict[str, Any], str]:
    """Whether batches of several small parts fit, and are better samples of the graph than larger parts."""
    parts = JOINED * chosen.num_parts
    if trials.together > 1:
        return {"num_parts": parts, "batch_size": JOINED}, "this task needs several parts in a batch"
    if parts > max(trials.cuts):
        return {"batch_size": 1}, f"{parts} parts, to join {JOINED} of them into a batch, would be too small"
    single, joined = trials.cuts[chosen.num_parts], trials.joined(parts, JOINED)
    compared = (
        f"the targets of a part are off from the graph's by {single.skew:.2f} (total variation), those of {JOINED} out "
        f"of {parts} parts by {joined.skew:.2f}, with {joined.connectivity:.2f} halo nodes per node instead of "
        f"{single.connectivity:.2f}"
    )
    if single.skew - joined.skew < SKEW:
        return {"batch_size": 1}, compared
    options: dict[str, Any] = {"num_parts": parts, "batch_size": JOINED}
    # Everything but the batches themselves grows with the rows of a batch.
    before = trials.known_bytes(chosen.num_parts, place)
    memory = before + int((chosen.memory - before) * max(joined.rows / single.rows, 1.0))
    if trials.on_gpu:
        options["drawings"] = DRAWINGS
        memory += DRAWINGS * joined.kept - single.kept if place.keep else 0
    if not trials.fits(memory):
        return {"batch_size": 1}, f"{compared}, which would be better, but should take {amount(memory)}"
    return options, compared


def _refresh(chosen: Candidate, place: Place, trials: Trials) -> tuple[str, str]:
    """Whether to refresh histories in every epoch: if they risk being stale, and if it costs little."""
    risk = chosen.connectivity * trials.levels
    histories = "1 history" if trials.levels == 1 else f"{trials.levels} histories on top of each other"
    at_risk = f"{chosen.connectivity:.2f} halo nodes per batch node and {histories} make {risk:.2f}"
    if risk < RISK:
        return "never", f"{at_risk}, less than {RISK:g}: histories are hardly stale"
    if not chosen.measured:
        return "never", f"{at_risk}, {RISK:g} or more, but the cost of a refresh could not be measured"
    plain = trials.expect(chosen.num_parts, place)
    fresh = trials.run(chosen.num_parts, place, refresh_every="epoch")
    before = chosen.epoch_seconds + plain.other_seconds
    cost = (fresh.other_seconds - plain.other_seconds) / before
    measured = (
        f"and a refresh in every epoch adds {max(100 * cost, 0):.0f} % to an epoch with its evaluation (measured)"
    )
    if cost > REFRESH_COST:
        return "never", f"{at_risk}, {RISK:g} or more, {measured}, more than {100 * REFRESH_COST:.0f} %"
    return "epoch", f"{at_risk}, {RISK:g} or more, {measured}"


def _compensate(options: dict[str, Any], chosen: Candidate, place: Place, trials: Trials) -> tuple[str, str]:
    """Whether to let gradients go on beyond the border of batches: if measurements say that they come closer."""
    if trials.has_penalty:
        return "none", "the local Lipschitz penalty runs layers twice, which compensated steps do not"
    if not trials.compares_gradients:
        return "none", "gradients of links of a heterogeneous graph are not compared with full batch's"
    if not chosen.measured or MOST_SWEEPS * chosen.epoch_seconds > SECONDS:
        return "none", "how gradients agree with full batch's would take too long to measure"
    found = trials.agreement(options["num_parts"], options["batch_size"], place)
    plain, compensated = found["cosine"], found["compensated"]
    measured = f"the gradient of plain steps has a cosine of {plain:.3f} to full batch's (measured)"
    if compensated is None:
        return "none", f"{measured}, and compensated steps are refused: {found['why_not']}".rstrip(".")
    measured += f", and compensated {compensated['cosine']:.3f}"
    if not compensation_pays(plain, compensated["cosine"]):
        return "none", measured
    trial = trials.run(chosen.num_parts, place, compensate="gradient")
    cost = f"{measured}; a step takes {trial.step_seconds / chosen.step_seconds:.1f} times as long (measured)"
    if not trials.fits(trial.memory):
        return "none", f"{cost}, and {amount(trial.memory)}, too much"
    return "gradient", cost


def amount(num_bytes: float) -> str:
    """An amount of memory in words, such as ``41.3 MB`` or ``2 GB``."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
