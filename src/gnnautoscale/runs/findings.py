"""Explains in sentences what limits a training run, from the folder it wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gnnautoscale._util import checked
from gnnautoscale.runs.folder import RunRecord, as_run_wrote

# A tenth of an embedding's norm. Histories in float8 are off by a fortieth, and that already changes some classes.
STALENESS = 0.1
# The output is what counts: if it is off by a fiftieth of its norm, about one node in a hundred changes its class.
OUTPUT_ERROR = 0.02
# Staleness below half of its first value is shrinking: training and its learning rate do that by themselves.
SHRUNK = 0.5
# A gradient that is off by half of its length still points within 30 degrees of the right direction.
GRADIENT_ERROR = 0.5
# Below a cosine of 0.95 the gradient points 18 degrees away from full batch's. Compensation pays if it takes back at
# least half of what the cosine lacks.
BORDER_COSINE, TAKEN_BACK = 0.95, 0.5
# A quarter of a step's time is more than users are likely to gain by changing their model.
WAITING_SHARE = 0.25
# Work besides training; at a third, a run takes half as long again as it has to.
SIDE_SHARE = 0.33
# Partitioning happens once and is expected, so mention it only if it dominates.
PARTITION_SHARE = 0.5
# Launching the kernels of a small model takes a few milliseconds per step, whatever the size of the batch.
TINY_STEP_SECONDS = 0.01
TINY_BATCH_NODES = 1000
MANY_STEPS = 8
# Above 1, a step pulls more rows than it computes.
CONNECTIVITY = 1.0
# In random order, half of the halo comes from batches that were not trained on yet, whatever the partition.
FIRST_HIT_RATIO = 0.6
# In a run this short, the first epoch with its empty histories is a tenth of training or more.
FEW_EPOCHS = 10
# Anything below half of the peak cannot halve it.
MEMORY_SHARE = 0.5
# Smaller peaks limit nobody.
MEMORY_BYTES = 10**9
# Percentage points between training and validation. With few labels, ten of them are normal.
OVERFITTING = 15.0
UNDERFITTING = 2.0
# Below this share of the way from guessing to a perfect training score, the model learned nothing.
LEARNED = 0.1
# Where in the run the best epoch was; a curve says little before it has some epochs.
EARLY, LATE, CURVE = 0.3, 0.95, 20

# The name of the last layer, which has no history, in a run's folder.
OUTPUT = "output"


@dataclass(frozen=True)
class Finding:
    """Something that limits a run.

    Attributes:
        name: The subject, in a word or two.
        sentence: What was found, with the number.
        consequence: What follows from it.
        change: What to do about it, with the option to change.
        times: How many times over its threshold it is; infinite if it has no threshold.
    """

    name: str
    sentence: str
    consequence: str
    change: str
    times: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: ``times`` becomes ``None`` then."""
        return {**asdict(self), "times": self.times if math.isfinite(self.times) else None}


@checked()
def explain(record: RunRecord) -> list[Finding]:
    """What limits a run of :func:`read_run`, furthest over its threshold first; empty if nothing stands out.

    Example:
        >>> from pathlib import Path
        >>> result = {"seconds": {"train": 1.0, "evaluate": 3.0}}
        >>> for finding in explain(RunRecord(Path("runs/a"), {"options": {"evaluate_every": 1}}, result=result)):
        ...     print(finding.sentence, finding.change)
        Evaluation took 75 % of the run's 4.0 seconds. Evaluate less often: --evaluate-every 5.
    """
    with as_run_wrote(record.path):
        found = [finding for check in _CHECKS if (finding := check(record)) is not None]
        return sorted(found, key=lambda finding: -finding.times)


def _unfinished(record: RunRecord) -> Finding | None:
    if record.result is not None:
        return None
    folder = record.option("checkpoint_dir")
    return Finding(
        "unfinished",
        f"The run has no result: it stopped after epoch {record.last('epoch') or 0}, or is still running.",
        "Its scores, total times and peak memory are unknown.",
        f"Continue it with --resume {folder}." if folder else "Train with --checkpoint-dir to be able to resume.",
        math.inf,
    )


def _verification(record: RunRecord) -> Finding | None:
    found = record.verification
    if found is None or found["exact"]:
        return None
    errors = [found[name] for name in ("inference", "training") if found[name] is not None]
    return Finding(
        "not exact",
        f"The trained model is {found['summary']}",
        "With histories it computes something else than on the whole graph, so its scores are not its own.",
        "Let every row depend on its node's neighbours only, without statistics over all nodes or state that changes "
        "between calls; after a change of the model, detach and autoscale it again.",
        max(errors, default=math.inf) / found["tolerance"],
    )


def _staleness(record: RunRecord) -> Finding | None:
    if not record.staleness:
        return None
    first, last = ({layer["layer"]: layer for layer in record.staleness[at]["layers"]} for at in (0, -1))
    layer = max(last, key=lambda name: _relative(last[name]), default="")
    now = _relative(last.get(layer, {}))
    # Those of a heterogeneous graph may be of several types.
    outputs = [layer for name, layer in last.items() if name == OUTPUT or name.startswith(f"{OUTPUT} of ")]
    output = max((_relative(layer, "closeness") for layer in outputs), default=None)
    if now <= STALENESS or (output is not None and output <= OUTPUT_ERROR):
        return None
    theirs = f", and outputs by {output:.2g} of theirs" if output is not None else ""
    before = _relative(first[layer]) if layer in first else now
    if len(record.staleness) < 2:
        trend = "It was measured only once, so there is no trend."
    else:
        trend = f"It {'is shrinking' if now < SHRUNK * before else 'hardly shrinks'}: at first it was {before:.2g}."
    age = (record.last("age") or {}).get("mean")
    old = f" Pulled rows are {age:.0f} steps old on average." if age is not None else ""
    refreshed = record.option("refresh_every") not in (None, "never")
    return Finding(
        "staleness",
        f"Histories of '{layer}' are off by {now:.2g} of the embeddings' norm{theirs}. {trend}{old}",
        "Batches train on halo rows that the current weights would not produce.",
        "Cut into fewer parts (--num-parts), lower --lr, or clip gradients (--grad-norm 1)."
        if refreshed
        else "Refresh histories (--refresh-every epoch), cut into fewer parts, or clip gradients (--grad-norm 1).",
        now / STALENESS,
    )


def _gradients(record: RunRecord) -> Finding | None:
    last = record.gradients[-1] if record.gradients else {}
    if record.option("compensate") == "gradient":
        last = last.get("compensated") or last
    error, cosine = last.get("relative_error"), last.get("cosine")
    if error is None or error <= GRADIENT_ERROR:
        return None
    worst = max(last.get("layers", []), key=lambda layer: layer.get("relative_error") or 0.0, default=None)
    where = f", most in '{worst['layer']}'" if worst is not None else ""
    angle = f" (cosine {cosine:.2f})" if cosine is not None else ""
    return Finding(
        "gradient error",
        f"Gradients are off by {error:.2g} of the full-batch gradient's norm{angle}{where}.",
        "Steps go in another direction than full batch, in part because a batch sees only its own training nodes.",
        "Use larger batches (--batch-size) or fewer parts, and refresh histories (--refresh-every epoch).",
        error / GRADIENT_ERROR,
    )


def compensation_pays(plain: float | None, compensated: float | None) -> bool:
    """Whether a plain step's cosine with the full-batch gradient is clearly below 1, and a compensated one's nearer.

    Example:
        >>> compensation_pays(0.8, 0.95), compensation_pays(0.8, 0.85), compensation_pays(0.97, 1.0)
        (True, False, False)
    """
    if plain is None or compensated is None or not plain < BORDER_COSINE:
        return False
    return 1.0 - compensated <= (1.0 - TAKEN_BACK) * (1.0 - plain)


def _border(record: RunRecord) -> Finding | None:
    last = record.gradients[-1] if record.gradients else {}
    plain, compensated = last.get("cosine"), (last.get("compensated") or {}).get("cosine")
    if plain is None or record.option("compensate") == "gradient" or not compensation_pays(plain, compensated):
        return None
    return Finding(
        "border",
        f"The gradient of plain steps has a cosine of {plain:.3f} to that of full batch; compensated at the border of "
        f"batches it would have {compensated:.3f}.",
        "Steps miss what flows through pulled rows.",
        "Let the gradient go on beyond the border (--compensate gradient); it helps most where weights move slowly.",
        (1.0 - plain) / (1.0 - BORDER_COSINE),
    )


def _transfers(record: RunRecord) -> Finding | None:
    pull, push = record.time_share("pull"), record.time_share("push")
    share = pull + push
    if share <= WAITING_SHARE:
        return None
    storage, dtype = record.option("storage"), record.option("history_dtype")
    if storage == "disk":
        change = "Keep histories in memory if they fit (--storage auto)."
    elif storage == "host" and record.on_gpu:
        change = "Keep histories on the GPU if they fit (--storage device)."
    else:
        change = "Cut into fewer parts, so that halos are smaller (--num-parts)."
    if dtype in (None, "same", "float32") and storage != "device":
        change += " Or move fewer bytes: --history-dtype bfloat16."
    return Finding(
        "transfers",
        f"Pulls and pushes take {100 * share:.0f} % of training ({100 * pull:.0f} and {100 * push:.0f} %).",
        "Steps wait for histories.",
        change,
        share / WAITING_SHARE,
    )


def _loader(record: RunRecord) -> Finding | None:
    share = record.time_share("loader")
    if share <= WAITING_SHARE:
        return None
    drawn_anew = (record.option("batch_size") or 1) > 1 and record.option("drawings") is None
    return Finding(
        "loader",
        f"Training waits for batches {100 * share:.0f} % of the time.",
        "Meanwhile the device is idle.",
        "Reuse a few drawings, so that their batches are built only once: --drawings 10."
        if drawn_anew
        else "Build batches in other processes (--num-workers 2), and keep them (--keep-batches).",
        share / WAITING_SHARE,
    )


def _tiny_batches(record: RunRecord) -> Finding | None:
    parts = record.run.get("parts") or {}
    nodes = parts.get("batches", {}).get("nodes", [])
    epochs = record.settled_epochs
    if not nodes or not epochs:
        return None
    # The folder lists parts one by one, however many make a batch.
    together = record.option("batch_size") or 1
    size = together * sum(nodes) / len(nodes)
    steps = math.ceil(parts.get("count", len(nodes)) / together)
    seconds = sum(epoch["seconds"] for epoch in epochs) / len(epochs) / steps
    if size >= TINY_BATCH_NODES or steps < MANY_STEPS or seconds >= TINY_STEP_SECONDS:
        return None
    return Finding(
        "tiny batches",
        f"An epoch has {steps} steps of {size:.0f} nodes, and a step takes {1000 * seconds:.1f} ms.",
        "Launching the kernels takes about that long, so the device is mostly idle.",
        f"Use larger batches (--batch-size {2 * together}) or fewer parts (--num-parts {parts.get('count', 2) // 2}).",
        TINY_BATCH_NODES / max(size, 1.0),
    )


def _hits(record: RunRecord) -> Finding | None:
    first = next((epoch.get("hit_ratio") for epoch in record.epochs if epoch.get("epoch") == 1), None)
    count = len(record.epochs)
    if first is None or first >= FIRST_HIT_RATIO or count > FEW_EPOCHS:
        return None
    return Finding(
        "empty histories",
        f"In the first of {count} epochs, {100 * (1 - first):.0f} % of the pulled rows had never been written.",
        "A large part of training saw zeros instead of embeddings.",
        "Train for more epochs (--epochs), or refresh early and often (--refresh-every with a number of steps).",
        FIRST_HIT_RATIO / max(first, 1e-3),
    )


def _memory(record: RunRecord) -> Finding | None:
    result = record.result or {}
    peak, histories = result.get("peak_memory"), result.get("history_bytes") or 0
    if peak is None or peak < MEMORY_BYTES:
        return None
    storage = record.option("storage")
    if storage == "auto":  # the result starts with the choice, and gives its reason after a colon
        storage = str(result.get("storage", "")).partition(":")[0]
    counted = storage == "device" or (storage == "host" and not record.on_gpu)
    share = histories / peak if counted else 0.0
    if share > MEMORY_SHARE:
        return Finding(
            "memory of histories",
            f"Histories take {histories / 1e9:.2g} GB, {100 * share:.0f} % of the peak of {peak / 1e9:.2g} GB.",
            "Smaller batches would hardly help.",
            ("Keep them in host memory (--storage host)" if record.on_gpu else "Keep them on disk (--storage disk)")
            + ", or in half the bytes (--history-dtype bfloat16).",
            share / MEMORY_SHARE,
        )
    if record.option("mode") == "full":
        change = "Train in batches: --mode gas; `gas tune` proposes how many parts."
    else:
        count = record.option("num_parts")
        change = f"Cut into more parts: --num-parts {2 * count}." if count else "Cut into more parts (--num-parts)."
    return Finding(
        "memory of batches",
        f"Batches and activations take {100 * (1 - share):.0f} % of the peak of {peak / 1e9:.2g} GB.",
        "Moving the histories elsewhere would hardly help.",
        change,
        (1 - share) / MEMORY_SHARE,
    )


def _connectivity(record: RunRecord) -> Finding | None:
    ratio = (record.result or {}).get("connectivity")
    if ratio is None:
        batches = (record.run.get("parts") or {}).get("batches", {})
        ratio = sum(batches.get("halo", [])) / max(sum(batches.get("nodes", [])), 1)
    if ratio <= CONNECTIVITY:
        return None
    count = record.option("num_parts")
    if record.option("mode") == "history":
        change = "Cut with METIS: --partition metis and --mode gas."
    elif record.option("partition") == "random":
        change = "Cut with METIS: --partition metis."
    else:
        fewer = f": --num-parts {max(1, count // 2)}" if count else " (--num-parts)"
        change = f"Cut into fewer parts{fewer}."
    return Finding(
        "connectivity",
        f"A part has {ratio:.1f} halo nodes for each of its own.",
        "Most rows of a step are pulled, and therefore stale.",
        change,
        ratio / CONNECTIVITY,
    )


def _fit_to_training_nodes(record: RunRecord) -> Finding | None:
    scores = (record.result or {}).get("scores") or {}
    train, val = scores.get("train"), scores.get("val")
    if train is None or val is None or not (record.run.get("score") or {}).get("percent", True):
        return None
    gap, (best, count) = train - val, record.best_of
    if gap > OVERFITTING:
        return Finding(
            "overfitting",
            f"The training score is {train:.1f}, but the validation score only {val:.1f}, {gap:.1f} points less.",
            "The model memorized its training nodes.",
            "Regularize more: a higher --dropout, --weight-decay-conv 5e-4, or a smaller --hidden.",
            gap / OVERFITTING,
        )
    if gap < UNDERFITTING and count >= CURVE and best >= LATE * count:
        return Finding(
            "underfitting",
            f"The best epoch was {best} of {count}, and the training score ({train:.1f}) is only {gap:.1f} points "
            "above validation.",
            "The model was still improving when training stopped.",
            f"Train for longer (--epochs {2 * count}), or with a larger --hidden, a higher --lr or less dropout.",
            best / (LATE * count),
        )
    return None


def _learned(record: RunRecord) -> Finding | None:
    classes = (record.run.get("data") or {}).get("classes")
    train = next((each["scores"].get("train") for each in reversed(record.epochs) if each.get("scores")), None)
    if (record.result or {}).get("metric") != "accuracy" or not classes or classes < 2 or train is None:
        return None
    guessing = 100.0 / classes
    share = (train - guessing) / (100.0 - guessing)
    if share >= LEARNED:
        return None
    return Finding(
        "nothing learned",
        f"The last training score is {train:.1f}; guessing one of {classes} classes gives {guessing:.1f}.",
        "The model learned nothing, or lost it again.",
        "Lower --lr, clip gradients (--grad-norm 1), or lower --dropout.",
        LEARNED / max(share, 0.01),
    )


def _early_best(record: RunRecord) -> Finding | None:
    best, count = record.best_of
    if count < CURVE or not 0 < best <= EARLY * count:
        return None
    return Finding(
        "early best epoch",
        f"The best epoch was {best} of {count}.",
        f"The remaining {count - best} epochs gained nothing.",
        f"Train for fewer epochs (--epochs {2 * best}), stop early (--patience {max(10, best // 2)}), or lower --lr.",
        EARLY * count / best,
    )


def _side_work(name: str, noun: str, change: Callable[[RunRecord], str], threshold: float = SIDE_SHARE) -> _Check:
    """A check of the time that a run spent on something other than training."""

    def check(record: RunRecord) -> Finding | None:
        seconds = (record.result or {}).get("seconds") or {}
        total = sum(seconds.values())
        share = seconds.get(name, 0.0) / total if total else 0.0
        if share <= threshold:
            return None
        return Finding(
            f"time of {name}",
            f"{noun} took {100 * share:.0f} % of the run's {total:.1f} seconds.",
            f"Without it the run would take {total - seconds[name]:.1f} seconds.",
            change(record),
            share / threshold,
        )

    return check


def _refresh_less(record: RunRecord) -> str:
    every = record.option("refresh_every")
    if str(every).isdecimal():
        return f"Refresh less often: --refresh-every {2 * int(every)}."
    return "Refresh in fewer and larger batches (--evaluate-parts), or not at all (--refresh-every never)."


def _evaluate_less(record: RunRecord) -> str:
    return f"Evaluate less often: --evaluate-every {5 * (record.option('evaluate_every') or 1)}."


_Check = Callable[[RunRecord], Finding | None]
_CHECKS: tuple[_Check, ...] = (
    _unfinished,
    _verification,
    _staleness,
    _gradients,
    _border,
    _transfers,
    _loader,
    _tiny_batches,
    _hits,
    _memory,
    _connectivity,
    _fit_to_training_nodes,
    _learned,
    _early_best,
    _side_work("refresh", "Refreshing histories", _refresh_less),
    _side_work("evaluate", "Evaluation", _evaluate_less),
    _side_work("diagnose", "Measuring errors", lambda _: "Measure less often: --diagnose-every."),
    _side_work("checkpoint", "Writing checkpoints", lambda _: "Write fewer of them: --checkpoint-every."),
    _side_work("partition", "Partitioning", lambda _: "Keep the parts for the next run: --cache-dir.", PARTITION_SHARE),
)


def _relative(layer: dict[str, Any], error: str = "staleness") -> float:
    return float((layer.get(error) or {}).get("relative") or 0.0)
