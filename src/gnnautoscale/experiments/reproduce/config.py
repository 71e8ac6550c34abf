"""Reads the configuration file of an experiment and lists its jobs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import resources
from typing import Any

from gnnautoscale._util import did_you_mean
from gnnautoscale.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Number of names of a cell, by kind of experiment.
_DEPTH = {"train": 2, "connectivity": 1, "neighbourhood": 1, "step": 1}
# Kinds whose results are times, which depend on the machine.
_TIMED = ("neighbourhood", "step")
_KEYS = {"kind", "seeds", "cells", "cells_of", "models", "graphs", "only", "variants", "on_request", "train"}
# How often a run is evaluated whose length is given in steps, unless it says so.
_EVALUATIONS = 20


@dataclass(frozen=True)
class Job:
    """One piece of work of an experiment: a cell such as ``"gcn.cora"`` in a variant such as ``"full"``.

    ``work`` is everything that its result depends on, as plain values.
    """

    cell: str
    variant: str
    seed: int
    work: Mapping[str, Any] = field(hash=False)

    @cached_property
    def key(self) -> str:
        """Hash of the work."""
        text = json.dumps(self.work, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_timed(self) -> bool:
        """Whether the result is a time, so that nothing else may run meanwhile."""
        return self.work["kind"] in _TIMED

    def __str__(self) -> str:
        return f"{self.cell} {self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper, as in its configuration file.

    A job has the options ``train``, those of its cell, which may also set the number of seeds, those of its variant,
    and those that the cell has for this variant (``train_of``); later ones win. Options of a model are in a table of
    their own, ``model``, and so are those of link prediction, ``task``. A number of ``steps`` in place of epochs is the
    same for all modes. Variants ``on_request`` run only if they are named.
    """

    name: str
    kind: str
    seeds: int
    cells: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]
    train: dict[str, Any]
    on_request: Sequence[str] = ()

    def jobs(
        self,
        *,
        only: Sequence[str] = (),
        seeds: int | None = None,
        steps: int | None = None,
        device: str = "cpu",
    ) -> list[Job]:
        """All jobs, variant by variant of each cell.

        Args:
            only: Patterns such as ``"gcn.*"`` or ``"*.cora/full"`` for cells, or cells and variants; none for all.
            seeds: Number of seeds instead of the configuration's.
            steps: Number of steps instead of the configuration's, which must have one.
            device: What computes, in words. It is part of the work where times are measured.
        """
        chosen = [
            Job(cell, variant, seed, self._work(cell, variant, seed, device, steps))
            for cell, options in self.cells.items()
            for variant in self.variants
            if _matches(cell, variant, only, by_name=variant in self.on_request)
            for seed in range(seeds if seeds is not None else options.get("seeds", self.seeds))
        ]
        if not chosen:
            cell, variant = next(iter(self.cells)), next(iter(self.variants))
            rule = f"--only names cells of {self.name}, such as {cell}, or cells and variants, such as {cell}/{variant}"
            raise InputError(rule, got=", ".join(only) or f"{seeds} seeds", fix="Use * for any part of a name.")
        return chosen

    def _work(self, cell: str, variant: str, seed: int, device: str, steps: int | None) -> dict[str, Any]:
        options = {name: value for name, value in self.cells[cell].items() if name != "seeds"}
        changes = dict(self.variants[variant])
        if self.kind != "train":
            where = {"device": device} if self.kind in _TIMED else {}
            return {"kind": self.kind, "cell": cell, **self.train, **options, **changes, "seed": seed, **where}
        model, dataset = cell.split(".")
        model_options = {**options.get("model", {}), **changes.pop("model", {})}
        train = {**self.train, **options.get("train", {}), **changes, **options.get("train_of", {}).get(variant, {})}
        train = self._with_epochs(train, steps)
        unused = [name for name, modes in _OF_MODES.items() if train["mode"] not in modes]
        return {
            "kind": "train",
            "dataset": dataset,
            "data": options.get("data", {}),
            "model": model,
            "options": model_options,
            "train": {name: None if value == "none" else value for name, value in train.items() if name not in unused},
            "seed": seed,
            **({"task": options["task"]} if "task" in options else {}),
        }

    def _with_epochs(self, train: dict[str, Any], steps: int | None) -> dict[str, Any]:
        """The options with as many epochs as make up a number of steps, if they have one."""
        train = dict(train)
        given, evaluations = train.pop("steps", None), train.pop("evaluations", _EVALUATIONS)
        if given is None and steps is not None:
            rule = "--steps belongs to experiments whose runs all take the same number of steps"
            raise InputError(rule, got=self.name, fix="Leave it out.")
        if given is None:
            return train
        at_once = train["mode"] in ("full", "exact")
        batches = 1 if at_once else -(-train["num_parts"] // train["batch_size"])
        if not at_once:
            batches = -(-batches // train.get("accumulate", 1))
        epochs = max(1, (given if steps is None else steps) // batches)
        return {**train, "epochs": epochs, "evaluate_every": max(1, epochs // evaluations)}


# Options that only these modes have or depend on. Other modes leave them out, so that jobs that differ in nothing else
# are the same.
_BATCHED = ("gas", "history", "cluster", "sage")
_OF_MODES = {
    **dict.fromkeys(("num_parts", "batch_size", "partition", "storage"), (*_BATCHED, "exact")),
    **dict.fromkeys(("steps_per_epoch", "refresh_every", "accumulate"), _BATCHED),
    "drawings": ("gas", "history"),
    "edge_dropout": ("gas", "history", "full"),
    "fan_out": ("sage",),
}


def experiment_names() -> tuple[str, ...]:
    """The experiments with a configuration."""
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml")))


def load_experiment(name: str) -> Experiment:
    """Read an experiment's configuration."""
    if name not in experiment_names():
        names = experiment_names()
        fix = did_you_mean(name, names, "Choose one of these.")
        raise InputError(f"an experiment is one of {', '.join(names)}", got=name, fix=fix)
    read = _read(name)
    unknown = sorted(read.keys() - _KEYS)
    if unknown:
        rule = f"{name}.toml may hold {', '.join(sorted(_KEYS))}"
        raise InputError(rule, got=", ".join(unknown), fix="Check the spelling.")
    if "models" in read:
        flat = _grid(read["models"], read["graphs"])
    else:
        cells = read["cells"] if "cells" in read else _read(read["cells_of"])["cells"]
        flat = _leaves(cells, _DEPTH[read["kind"]])
    pattern = read.get("only", "*")
    chosen = {cell: dict(options) for cell, options in flat if fnmatchcase(cell, pattern)}
    settings = chosen, read["variants"], read.get("train", {}), read.get("on_request", ())
    return Experiment(name, read["kind"], read["seeds"], *settings)


def published() -> dict[str, Any]:
    """The paper's own results, by table."""
    return tomllib.loads(resources.files(__package__).joinpath("published.toml").read_text())


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(_folder().joinpath(f"{name}.toml").read_text())


def _folder() -> Any:
    return resources.files(__package__).joinpath("configs")


def _leaves(tables: Mapping[str, Any], depth: int, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in tables.items():
        if depth == 1:
            yield prefix + name, value
        else:
            yield from _leaves(value, depth - 1, f"{prefix}{name}.")


def _grid(
    models: Mapping[str, Mapping[str, Any]], graphs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A cell for every model on every graph; options of the model win."""
    for graph, below in graphs.items():
        for model, above in models.items():
            tables = dict.fromkeys([*below, *above])
            yield f"{model}.{graph}", {name: {**below.get(name, {}), **above.get(name, {})} for name in tables}


def _matches(cell: str, variant: str, patterns: Sequence[str], *, by_name: bool = False) -> bool:
    """Whether a pattern chooses a variant of a cell; with ``by_name`` only one that names a variant without ``*``."""
    if by_name:
        patterns = [pattern for pattern in patterns if pattern.rpartition("/")[2] == variant]
    elif not patterns:
        return True
    names = (f"{cell}/{variant}" if "/" in pattern else cell for pattern in patterns)
    parts = cell.split(".")  # a pattern may also name a model or a graph alone
    return any(map(fnmatchcase, names, patterns)) or any(pattern in parts for pattern in patterns)
