"""The options of training, each declared once.

The arguments of :func:`gnnautoscale.fit`, the flags of ``gas train``, configuration files, run folders and checkpoints
all follow from these dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gnnautoscale._util import Option, OptionGroup, check_names, option, options_of, usable_device
from gnnautoscale.analysis import Diagnostic
from gnnautoscale.errors import InputError
from gnnautoscale.forward import Compensation
from gnnautoscale.graph import Partitioner, check_fan_out
from gnnautoscale.history import Storage, check_storage
from gnnautoscale.replay import Placement
from gnnautoscale.tasks import METRICS, ClassWeight
from gnnautoscale.training.steps import Precision

Mode = Literal["gas", "full", "exact", "history", "cluster", "sage"]
Schedule = Literal["constant", "plateau", "cosine"]
HowToEvaluate = Literal["exact", "histories"]
HistoryDtype = Literal["same", "float32", "bfloat16", "float16", "int8", "float8"]


@dataclass(frozen=True, kw_only=True)
class Batches(OptionGroup):
    """What a step trains on."""

    mode: Mode = option(
        "gas",
        '"gas"; "full" for full batch (one part, no penalty); "exact" for full batch in the memory of one batch, where '
        'an epoch is one step with the gradient of the whole graph; "history" for the naive baseline (random parts, no '
        'penalty, no clipping); "cluster" for Cluster-GCN (parts without edges between batches); "sage" for '
        "GraphSAGE's neighbour sampling. The last two have no histories, ignore storage, history_dtype, batches_on and "
        "capture, and evaluate on the whole graph at once.",
    )
    num_parts: int = option(8, "Number of parts to cut the graph into.", least=1)
    batch_size: int = option(1, 'Number of parts in a batch; mode "sage" has as many batches.', least=1)
    partition: Partitioner = option(
        "metis", 'How to cut the graph: "metis"; "kaminpar", on all cores (extra "partition"); or "random".'
    )
    balance: bool = option(
        False,
        "Let each part have about as many training nodes, and of a heterogeneous graph nodes of each type, as any "
        "other, which cuts more edges.",
    )
    drawings: int | None = option(
        None,
        "Draw parts into batches this many times, then reuse these drawings in random order, so that batches are kept "
        "and a GPU captures their steps. By default every epoch draws anew.",
        least=1,
        needs_histories=True,
    )
    fan_out: tuple[int, ...] | None = option(
        None, 'Number of neighbours that mode "sage" draws, per layer, from the training nodes outwards; -1 takes all.'
    )
    batches_on: Placement = option(
        "auto",
        'Where batches for a GPU live: on the "device", in "host" memory (copied ahead of their step), or "auto": on '
        "the device if they fit. Batches drawn anew every epoch are always copied.",
        may_change=True,
    )
    keep_batches: bool = option(
        True,
        "Whether to keep recurring batches in host memory. Without it, memory-mapped features may exceed the memory, "
        "and steps are not captured.",
        may_change=True,
    )
    num_workers: int = option(0, "Number of processes that prepare batches.", least=0, below=1025, may_change=True)
    cache_dir: str | None = option(None, "Folder that keeps partitions between runs.", path=True, may_change=True)


@dataclass(frozen=True, kw_only=True)
class Optimization(OptionGroup):
    """How weights are updated."""

    epochs: int = option(200, "Number of passes over the training graph.", least=1, may_change=True)
    exact_epochs: int = option(
        0,
        'Number of last epochs of mode "gas" that are each one step with the gradient of the whole graph, as in mode '
        '"exact".',
        least=0,
        needs_histories=True,
    )
    accumulate: int = option(1, "Number of batches whose mean gradient makes up one step of the optimizer.", least=1)
    steps_per_epoch: int | None = option(None, "Number of batches after which an epoch ends early.", least=1)
    lr: float = option(0.01, "Learning rate of Adam.", above=0)
    schedule: Schedule = option(
        "constant",
        'Learning rate schedule: "constant"; "plateau" halves the rate after 10 evaluations without a better '
        'validation score; "cosine" lowers it to zero over all epochs.',
    )
    weight_decay: float = option(0.0, "Weight decay of all weights.", least=0)
    weight_decay_conv: float | None = option(
        None,
        "Weight decay of the message-passing layers, or of what the model's decayed_modules() returns, in place of "
        "weight_decay.",
        least=0,
    )
    weight_decay_other: float | None = option(None, "Weight decay of the other weights, likewise.", least=0)
    grad_norm: float | None = option(None, "Norm to clip gradients to.", above=0)
    lipschitz: float = option(0.0, "Weight of the local Lipschitz penalty.", least=0, needs_histories=True)
    lipschitz_radius: float = option(0.1, "Radius of the penalty's perturbations.", above=0)
    compensate: Compensation = option(
        "none",
        'How steps make up for the border of a batch: "none", where the gradient ends there, as in the paper; '
        '"gradient", where it goes on with the help of histories of gradients, and batches are weighted by their '
        'targets; or "momentum", where histories of the halo move towards what the batch knows of them.',
        needs_histories=True,
    )
    class_weight: ClassWeight = option(
        "none",
        'How classes count in the loss of a classification: "none", as often as they occur, or "balanced", all alike.',
    )
    sync_norms: bool = option(
        False,
        "On several ranks: whether batch norms take their statistics over the batches of all ranks.",
        needs_histories=True,
    )
    edge_dropout: float = option(0.0, "Share of edges dropped in each step.", least=0, below=1, needs_histories=True)
    seed: int = option(0, "Seed of everything random.", least=0, below=2**32)


@dataclass(frozen=True, kw_only=True)
class Histories(OptionGroup):
    """How histories are stored and refreshed."""

    refresh: int = option(
        0,
        "Number of batches to refresh before each step: fresh rows of the parts whose histories are oldest are pushed, "
        'without training on them, and with compensate="gradient" fresh gradients of these rows.',
        least=0,
        needs_histories=True,
    )
    refresh_every: Literal["never", "epoch"] | int = option(
        "never",
        'When to recompute all histories with the current weights: "never", after each "epoch", or after a number of '
        "steps.",
        least=1,
        needs_histories=True,
    )
    storage: Storage = option(
        "device",
        'Where histories live: in "device" or "host" memory, on "disk", or "auto": the first of these with room.',
        may_change=True,
    )
    history_dir: str | None = option(
        None, "Folder for histories on disk; one run at a time uses it.", path=True, may_change=True
    )
    lag: int = option(
        0,
        "On several ranks: how many steps more the rows of other ranks may take to arrive, 0 or 1. With 1 a pull sees "
        "their pushes up to the step before the last, and slow networks hide behind a whole step.",
        least=0,
        below=2,
        needs_histories=True,
    )
    history_dtype: HistoryDtype = option(
        "same",
        'Type of stored histories: the "same" as the embeddings, "float32", "bfloat16" or "float16"; or "int8" or '
        '"float8" with one scale per row.',
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation(OptionGroup):
    """When and how scores are computed."""

    evaluation: HowToEvaluate = option(
        "exact",
        '"exact" inference, which leaves the histories alone, or "histories": the last layer on top of the histories.',
        needs_histories=True,
    )
    metric: str | None = option(
        None,
        f"The score: {', '.join(each.name for each in METRICS)}; of links also MRR or Hits@k for any k. By default the "
        "one that the task prefers.",
    )
    evaluate_every: int = option(1, "Number of epochs between evaluations.", least=1)
    evaluate_parts: int | None = option(
        None,
        "Number of batches to evaluate and refresh in; fewer are faster and take more memory. By default those of "
        "training.",
        least=1,
    )
    patience: int | None = option(
        None, "Stop after this many evaluations without a better validation score.", least=1, may_change=True
    )


@dataclass(frozen=True, kw_only=True)
class Execution(OptionGroup):
    """What computes, and how."""

    device: str = option(
        "auto", 'Device to compute on, such as "cpu" or "cuda"; "auto" takes a GPU if there is one.', may_change=True
    )
    precision: Precision = option(
        "float32", 'Precision of matrix products: "float32", "tf32" (on a GPU) or "bfloat16" (autocast).'
    )
    capture: bool = option(True, "Whether to capture steps on a GPU as CUDA graphs if possible.", may_change=True)


@dataclass(frozen=True, kw_only=True)
class Output(OptionGroup):
    """What a run leaves behind. Nothing of it changes the training itself."""

    checkpoint_dir: str | None = option(
        None,
        "Folder for checkpoints; the newest two are kept. With it, Ctrl-C ends training after the current step and a "
        "last checkpoint.",
        path=True,
        may_change=True,
        needs_histories=True,
    )
    checkpoint_every: Literal["epoch"] | int = option(
        "epoch", 'When to write one: after each "epoch", or after a number of steps.', least=1, may_change=True
    )
    resume: str | None = option(
        None,
        "Checkpoint, or folder with checkpoints, to continue from as if training had never stopped.",
        path=True,
        may_change=True,
        needs_histories=True,
    )
    run_dir: str | None = option(
        None,
        "New folder for the run's settings and measurements, epoch by epoch; a resumed run continues its old one. The "
        'command line makes one below ./runs unless this is "none".',
        path=True,
        may_change=True,
    )
    diagnose: tuple[Diagnostic, ...] = option(
        ("staleness",),
        'What else to measure for that folder: "staleness" of histories, error of "gradients", and constants of layers '
        '("lipschitz"). The last one runs the model on the whole graph at once.',
        may_change=True,
    )
    diagnose_every: Literal["auto", "never"] | int = option(
        "auto",
        'When to measure it: "auto" after the first and the last epoch, and in between for at most about 2 % of the '
        'training time; "never"; or a number of epochs.',
        least=1,
        may_change=True,
    )
    tensorboard: bool = option(False, "Whether to write the folder's numbers for TensorBoard as well.", may_change=True)
    verify: bool = option(
        False,
        "Whether to check the trained model at the end: 100 nodes are recomputed without histories and compared with "
        "inference and with training steps (gnnautoscale.verify).",
        may_change=True,
        needs_histories=True,
    )


GROUPS = (Batches, Optimization, Histories, Evaluation, Execution, Output)
#: All options of training by name, in the order in which they are shown.
OPTIONS: Mapping[str, Option] = {name: each for group in GROUPS for name, each in options_of(group).items()}


@dataclass(frozen=True, kw_only=True)
class FitOptions(Batches, Optimization, Histories, Evaluation, Execution, Output):
    """All options of one training run, checked; ``device`` is a real one."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FitOptions:
        """Make options from values by name; the others keep their defaults."""
        check_names(given, OPTIONS, "options of training have the names in the documentation of gnnautoscale.fit")
        return cls(**given)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_storage(self.storage, self.history_dir)
        if self.tensorboard and self.run_dir is None:
            raise InputError("tensorboard needs a run_dir", got="none", fix="Pass run_dir, or leave tensorboard out.")
        if self.mode != "full" and self.batch_size > self.num_parts:
            raise InputError(
                f"batch_size must be at most num_parts, {self.num_parts}", got=str(self.batch_size), fix="Lower it."
            )
        for name, each in OPTIONS.items():
            if each.needs_histories and not self.has_histories and getattr(self, name) != each.default:
                raise InputError(
                    f"{name} must be {each.default!r} with mode {self.mode!r}, which has no histories",
                    got=repr(getattr(self, name)),
                    fix="Leave it out, or choose another mode.",
                )
        self._check_exact()
        self._check_compensation()
        self._check_refresh()
        if self.mode == "sage":
            check_fan_out(self.fan_out)
        elif self.fan_out is not None:
            raise InputError("fan_out belongs to mode 'sage'", got=f"it with mode {self.mode!r}", fix="Leave it out.")
        object.__setattr__(self, "device", pick_device(self.device))
        if self.num_workers and self.has_histories and torch.device(self.device).type == "cuda":
            got = f"num_workers={self.num_workers} and device={self.device!r}"
            raise InputError("a GPU assembles batches itself", got=got, fix="Leave num_workers out.")

    def _check_exact(self) -> None:
        if self.exact_epochs and self.mode != "gas":
            got, fix = f"it with mode {self.mode!r}", "Leave it out."
            raise InputError("exact_epochs belongs to mode 'gas'", got=got, fix=fix)
        if self.exact_epochs > self.epochs:
            rule = f"exact_epochs must be at most epochs, {self.epochs}"
            raise InputError(rule, got=str(self.exact_epochs), fix="Lower it, or use mode 'exact'.")
        if not (self.mode == "exact" or self.exact_epochs):
            return
        if self.edge_dropout:
            got, fix = f"edge_dropout={self.edge_dropout}", "Leave it out, or use mode 'gas'."
            raise InputError("exact steps take all edges", got=got, fix=fix)
        if self.mode == "exact" and (self.steps_per_epoch is not None or self.accumulate > 1):
            got = f"steps_per_epoch={self.steps_per_epoch} and accumulate={self.accumulate}"
            raise InputError("an epoch of mode 'exact' is one step", got=got, fix="Leave both out.")

    def _check_compensation(self) -> None:
        if self.compensate == "none":
            return
        if self.mode == "exact":
            got, fix = f"compensate={self.compensate!r}", "Leave it out."
            raise InputError("steps of mode 'exact' have no border to make up for", got=got, fix=fix)
        if self.compensate == "gradient" and self.lipschitz:
            got = f"lipschitz={self.lipschitz}"
            raise InputError("compensated steps run each layer once", got=got, fix="Leave the penalty out.")

    def _check_refresh(self) -> None:
        if not self.refresh:
            return
        if self.mode in ("full", "exact"):
            got, fix = f"refresh={self.refresh}", "Leave it out, or choose another mode."
            raise InputError(f"steps of mode {self.mode!r} find all rows fresh", got=got, fix=fix)
        batches = -(-self.num_parts // self.batch_size)
        if self.refresh > batches:
            fix = "Lower it."
            rule = f"refresh must be at most the number of batches, {batches}"
            raise InputError(rule, got=str(self.refresh), fix=fix)
        if self.batch_size == self.num_parts:
            got = f"refresh={self.refresh} and all {self.num_parts} parts in one batch"
            raise InputError("refresh needs several batches", got=got, fix="Leave it out, or lower batch_size.")

    @property
    def exact_after(self) -> int:
        """The epoch after which steps have the gradient of the whole graph."""
        return 0 if self.mode == "exact" else self.epochs - self.exact_epochs

    @property
    def has_histories(self) -> bool:
        """Whether the mode trains with histories."""
        return self.mode not in ("cluster", "sage")

    def in_effect(self) -> FitOptions:
        """The options with what the mode decides."""
        if self.mode == "full":
            return replace(self, num_parts=1, batch_size=1, lipschitz=0.0)
        if self.mode == "history":
            return replace(self, partition="random", lipschitz=0.0, grad_norm=None)
        return self

    def may_change(self) -> set[str]:
        """Names of the options that may have another value when the run resumes."""
        names = {name for name, each in OPTIONS.items() if each.may_change}
        # The schedule, and when exact steps begin, depend on the last epoch.
        return names - {"epochs"} if self.schedule == "cosine" or self.exact_epochs else names

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values, for JSON."""
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def default_device() -> str:
    """A GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_device(device: str) -> str:
    """Check the name of a device; ``"auto"`` becomes a real one."""
    if device == "auto":
        device = default_device()
    usable_device(device)
    return device
