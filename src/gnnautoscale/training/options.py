"""What the options of training may be, checked before any work is done."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from gnnautoscale.errors import InputError
from gnnautoscale.graph import check_fan_out
from gnnautoscale.history import Storage, check_storage
from gnnautoscale.training.feed import Placement
from gnnautoscale.training.steps import Precision

Mode = Literal["gas", "full", "history", "cluster", "sage"]
Schedule = Literal["constant", "plateau", "cosine"]
Evaluation = Literal["exact", "histories"]
Partitioner = Literal["metis", "random"]
HistoryDtype = Literal["same", "float32", "bfloat16", "float16", "int8", "float8"]

#: The modes that train a plain model on subgraphs, without histories.
ON_SUBGRAPHS: tuple[Mode, ...] = ("cluster", "sage")
# What these modes have no use for, and what it must be left at.
_WITH_HISTORIES = {
    "lipschitz": 0.0,
    "edge_dropout": 0.0,
    "refresh_every": "never",
    "evaluation": "exact",
    "drawings": None,
    "checkpoint_dir": None,
    "resume": None,
}

_CHOICES = {
    "mode": get_args(Mode),
    "partition": get_args(Partitioner),
    "schedule": get_args(Schedule),
    "evaluation": get_args(Evaluation),
    "storage": get_args(Storage),
    "history_dtype": get_args(HistoryDtype),
    "precision": get_args(Precision),
    "batches_on": get_args(Placement),
}


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that cannot work, before any work is done."""

    def need(holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise InputError(f"{name} must be {rule}", got=repr(options[name]), fix="Change this option.")

    def whole(name: str, least: int) -> None:
        value = options[name]
        need(
            isinstance(value, int) and not isinstance(value, bool) and value >= least, name, f"an integer from {least}"
        )

    def real(name: str, *, positive: bool = False) -> None:
        value = options[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        need(number and (value > 0 if positive else value >= 0), name, "positive" if positive else "at least 0")

    for name, choices in _CHOICES.items():
        need(options[name] in choices, name, f"one of {', '.join(choices)}")
    for name in ("num_parts", "batch_size", "epochs", "evaluate_every"):
        whole(name, 1)
    for name in ("num_workers", "seed"):
        whole(name, 0)
    for name in ("steps_per_epoch", "patience", "evaluate_parts", "drawings"):
        if options[name] is not None:
            whole(name, 1)
    for name in ("lr", "lipschitz_radius"):
        real(name, positive=True)
    for name in ("weight_decay_conv", "weight_decay_other", "lipschitz", "edge_dropout"):
        real(name)
    if options["grad_norm"] is not None:
        real("grad_norm", positive=True)
    need(options["edge_dropout"] < 1, "edge_dropout", "at least 0 and below 1")
    for name, words, unit in (
        ("refresh_every", ("never", "epoch"), "steps"),
        ("checkpoint_every", ("epoch",), "steps"),
        ("diagnose_every", ("auto", "never"), "epochs"),
    ):
        every = str(options[name])
        # Other characters than these may be decimal digits too, but no integers.
        count = every.isascii() and every.isdecimal() and int(every) > 0
        need(every in words or count, name, f"{', '.join(words)}, or a number of {unit}")
    need(not options["tensorboard"] or options["run_dir"] is not None, "tensorboard", "off without a run_dir")
    check_storage(options["storage"], options["history_dir"])
    need(options["mode"] == "full" or options["batch_size"] <= options["num_parts"], "batch_size", "at most num_parts")
    _check_mode(options)
    check_device(options["device"])


def _check_mode(options: dict[str, Any]) -> None:
    """Refuse options that belong to other modes."""
    mode, fan_out = options["mode"], options["fan_out"]
    if mode in ON_SUBGRAPHS:
        for name, default in _WITH_HISTORIES.items():
            if options[name] != default:
                raise InputError(
                    f"{name} must be {default!r} with mode {mode!r}, which has no histories",
                    got=repr(options[name]),
                    fix="Leave it out, or choose another mode.",
                )
    if mode == "sage":
        check_fan_out(fan_out)
    elif fan_out is not None:
        raise InputError("fan_out belongs to mode 'sage'", got=f"it with mode {mode!r}", fix="Leave it out.")


def check_device(device: str) -> None:
    """Refuse a device that PyTorch does not know or cannot use here."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            "device must be one that PyTorch can use here", got=f"{device!r} ({reason})", fix="Use 'cpu'."
        ) from None
