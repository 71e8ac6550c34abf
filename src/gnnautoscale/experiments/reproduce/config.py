"""Reads an experiment's configuration file and lists the runs it consists of."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
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

# How many names a cell has, and which tables of options a configuration may hold, by kind of experiment.
_DEPTH = {"train": 2, "connectivity": 1, "neighbourhood": 1, "step": 1}
# The kinds whose results are times, which belong to what they were taken on.
_TIMED = ("neighbourhood", "step")
_KEYS = {"kind", "seeds", "cells", "cells_of", "only", "variants", "train"}


@dataclass(frozen=True)
class Run:
    """One piece of work of an experiment.

    Attributes:
        cell: What is run, such as ``"gcn.cora"``.
        variant: In which way, such as ``"full"``.
        seed: With which seed.
        work: Everything that decides about its result, as plain values.
    """

    cell: str
    variant: str
    seed: int
    work: Mapping[str, Any] = field(hash=False)

    @cached_property
    def key(self) -> str:
        """A name for the work, the same wherever it occurs.

        Example:
            >>> Run("a", "b", 0, {"x": 1}).key == Run("c", "d", 0, {"x": 1}).key
            True
        """
        text = json.dumps(self.work, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_timed(self) -> bool:
        """Whether the result is a time, so that nothing else should run meanwhile."""
        return self.work["kind"] in _TIMED

    def __str__(self) -> str:
        return f"{self.cell} {self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper as its configuration file describes it.

    Attributes:
        name: Its name, such as ``"table1"``.
        kind: What a run does: ``"train"``, ``"connectivity"``, ``"neighbourhood"`` or ``"step"``.
        seeds: Number of seeds, unless a cell says otherwise.
        cells: Options by cell.
        variants: Options by variant; they win over a cell's. Where a model is trained, options of the model are in a
            table of their own, ``model``.
        train: Options of every run.
    """

    name: str
    kind: str
    seeds: int
    cells: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]
    train: dict[str, Any]

    def runs(self, *, only: Iterable[str] = (), seeds: int | None = None, device: str = "cpu") -> list[Run]:
        """All runs, variant by variant of each cell.

        Args:
            only: Patterns such as ``"gcn.*"`` or ``"*.cora/full"`` for cells, or cells and variants; none for all.
            seeds: Number of seeds instead of the configuration's.
            device: What computes, in words. Where times are measured, it is part of the work.

        Example:
            >>> runs = load("table1").runs(only=["gcn.cora/full"], seeds=2)
            >>> [str(run) for run in runs]
            ['gcn.cora full seed 0', 'gcn.cora full seed 1']
        """
        chosen = [
            Run(cell, variant, seed, self._work(cell, variant, seed, device))
            for cell, options in self.cells.items()
            for variant in self.variants
            if _matches(cell, variant, only)
            for seed in range(seeds if seeds is not None else options.get("seeds", self.seeds))
        ]
        if not chosen:
            raise InputError(
                f"--only names cells of {self.name}, such as {next(iter(self.cells))}, or cells and variants, such as "
                f"{next(iter(self.cells))}/{next(iter(self.variants))}",
                got=", ".join(only) or f"{seeds} seeds",
                fix="Use * for any part of a name.",
            )
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


# What is left out in other modes than these, whatever a cell says: full batch does not depend on it, so that runs that
# differ in nothing else are one, or the mode does not take it.
_IN_BATCHES = ("gas", "history", "cluster", "sage")
_OF_MODES = {
    **dict.fromkeys(
        ("num_parts", "batch_size", "partition", "steps_per_epoch", "refresh_every", "storage"), _IN_BATCHES
    ),
    "drawings": ("gas", "history"),
    "fan_out": ("sage",),
}


def names() -> tuple[str, ...]:
    """The experiments that there are configurations for.

    Example:
        >>> "table1" in names()
        True
    """
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml")))


def load(name: str) -> Experiment:
    """Read an experiment's configuration.

    Example:
        >>> load("table1").seeds
        10
    """
    if name not in names():
        raise InputError(f"an experiment is one of {', '.join(names())}", got=name, fix="Choose one of these.")
    read = _read(name)
    unknown = sorted(read.keys() - _KEYS)
    if unknown:
        raise InputError(
            f"{name}.toml may hold {', '.join(sorted(_KEYS))}", got=", ".join(unknown), fix="Check the spelling."
        )
    cells = read.get("cells", {})
    if "cells_of" in read:
        cells = _read(read["cells_of"])["cells"]
    flat = dict(_leaves(cells, _DEPTH[read["kind"]]))
    pattern = read.get("only", "*")
    return Experiment(
        name,
        read["kind"],
        read["seeds"],
        {cell: options for cell, options in flat.items() if fnmatchcase(cell, pattern)},
        read["variants"],
        read.get("train", {}),
    )


def published() -> dict[str, Any]:
    """The paper's own results, by table.

    Example:
        >>> published()["table1"]["gcn"]["cora"]
        [81.88, 0.75, 82.29, 0.76]
    """
    return tomllib.loads(resources.files(__package__).joinpath("published.toml").read_text())


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(_folder().joinpath(f"{name}.toml").read_text())


def _folder() -> Any:
    return resources.files(__package__).joinpath("configs")


def _leaves(tables: Mapping[str, Any], depth: int, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in tables.items():
        if depth == 1:
            yield prefix + name, dict(value)
        else:
            yield from _leaves(value, depth - 1, f"{prefix}{name}.")


def _matches(cell: str, variant: str, patterns: Iterable[str]) -> bool:
    patterns = list(patterns)
    return not patterns or any(
        fnmatchcase(f"{cell}/{variant}" if "/" in pattern else cell, pattern) for pattern in patterns
    )
