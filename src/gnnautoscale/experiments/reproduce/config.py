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

from gnnautoscale.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Number of names of a cell, by kind of experiment.
_DEPTH = {"train": 2, "connectivity": 1, "neighbourhood": 1, "step": 1}
# Kinds whose results are times, which depend on the machine.
_TIMED = ("neighbourhood", "step")
_KEYS = {"kind", "seeds", "cells", "cells_of", "only", "variants", "train"}


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

    A job has the options ``train``, those of its cell, which may also set the number of seeds, and those of its
    variant; later ones win. Options of a model are in a table of their own, ``model``.
    """

    name: str
    kind: str
    seeds: int
    cells: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]
    train: dict[str, Any]

    def jobs(self, *, only: Sequence[str] = (), seeds: int | None = None, device: str = "cpu") -> list[Job]:
        """All jobs, variant by variant of each cell.

        Args:
            only: Patterns such as ``"gcn.*"`` or ``"*.cora/full"`` for cells, or cells and variants; none for all.
            seeds: Number of seeds instead of the configuration's.
            device: What computes, in words. It is part of the work where times are measured.
        """
        chosen = [
            Job(cell, variant, seed, self._work(cell, variant, seed, device))
            for cell, options in self.cells.items()
            for variant in self.variants
            if _matches(cell, variant, only)
            for seed in range(seeds if seeds is not None else options.get("seeds", self.seeds))
        ]
        if not chosen:
            cell, variant = next(iter(self.cells)), next(iter(self.variants))
            rule = f"--only names cells of {self.name}, such as {cell}, or cells and variants, such as {cell}/{variant}"
            raise InputError(rule, got=", ".join(only) or f"{seeds} seeds", fix="Use * for any part of a name.")
        return chosen

    def _work(self, cell: str, variant: str, seed: int, device: str) -> dict[str, Any]:
        options = {name: value for name, value in self.cells[cell].items() if name != "seeds"}
        changes = dict(self.variants[variant])
        if self.kind != "train":
            where = {"device": device} if self.kind in _TIMED else {}
            return {"kind": self.kind, "cell": cell, **self.train, **options, **changes, "seed": seed, **where}
        model, dataset = cell.split(".")
        model_options = {**options.get("model", {}), **changes.pop("model", {})}
        train = {**self.train, **options.get("train", {}), **changes}
        unused = [name for name, modes in _OF_MODES.items() if train["mode"] not in modes]
        return {
            "kind": "train",
            "dataset": dataset,
            "data": options.get("data", {}),
            "model": model,
            "options": model_options,
            "train": {name: None if value == "none" else value for name, value in train.items() if name not in unused},
            "seed": seed,
        }


# Options that only these modes have or depend on. Other modes leave them out, so that jobs that differ in nothing else
# are the same.
_OF_BATCHES = ("num_parts", "batch_size", "partition", "steps_per_epoch", "refresh_every", "storage")
_OF_MODES = {
    **dict.fromkeys(_OF_BATCHES, ("gas", "history", "cluster", "sage")),
    "drawings": ("gas", "history"),
    "fan_out": ("sage",),
}


def experiment_names() -> tuple[str, ...]:
    """The experiments with a configuration."""
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml")))


def load_experiment(name: str) -> Experiment:
    """Read an experiment's configuration."""
    if name not in experiment_names():
        raise InputError(
            f"an experiment is one of {', '.join(experiment_names())}", got=name, fix="Choose one of these."
        )
    read = _read(name)
    unknown = sorted(read.keys() - _KEYS)
    if unknown:
        rule = f"{name}.toml may hold {', '.join(sorted(_KEYS))}"
        raise InputError(rule, got=", ".join(unknown), fix="Check the spelling.")
    cells = read["cells"] if "cells" in read else _read(read["cells_of"])["cells"]
    flat, pattern = _leaves(cells, _DEPTH[read["kind"]]), read.get("only", "*")
    chosen = {cell: dict(options) for cell, options in flat if fnmatchcase(cell, pattern)}
    return Experiment(name, read["kind"], read["seeds"], chosen, read["variants"], read.get("train", {}))


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


def _matches(cell: str, variant: str, patterns: Sequence[str]) -> bool:
    names = (f"{cell}/{variant}" if "/" in pattern else cell for pattern in patterns)
    return not patterns or any(map(fnmatchcase, names, patterns))
