"""Writes predictions in the format that the ending of a file names, with ids, classes by name and probabilities."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gnnautoscale._util import write_atomically
from gnnautoscale.data import Names
from gnnautoscale.errors import InputError

Array = npt.NDArray[Any]
_ENDINGS = (".csv", ".parquet", ".npz")
_SINGULAR = {"probabilities": "probability", "values": "value", "embeddings": "embedding"}


def check_ending(path: Path) -> None:
    """Refuse a file for predictions whose format is unknown, or cannot be written here."""
    if path.suffix.lower() not in _ENDINGS:
        fix = "Choose one of these endings."
        raise InputError(f"--output ends in {', '.join(_ENDINGS)}", got=path.name, fix=fix)
    if path.suffix.lower() == ".parquet":
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError:
            fix = "Run: pip install pyarrow"
            raise InputError("Parquet files need pyarrow", got="an environment without it", fix=fix) from None


def write_predictions(path: Path, predicted: Mapping[str, Tensor], asked: Mapping[str, Tensor], names: Names) -> str:
    """Write what a task predicts for each row, and what was asked about links; says what the file holds.

    A table holds what was asked, or else a row for each node or graph. An archive (``.npz``) holds all of it.
    """
    arrays = {name: value.numpy() for name, value in predicted.items()}
    questions = {name: value.numpy() for name, value in asked.items()}
    if path.suffix.lower() == ".npz":
        archive: dict[str, Any] = _archive(arrays, names) | questions
        write_atomically(path, lambda stream: np.savez(stream, **archive), rule="--output must be writable")
        return f"{path}: " + ", ".join(f"{name} {list(value.shape)}" for name, value in archive.items())
    columns = _answers(questions) if questions else _columns(arrays, names)
    write = _write_csv if path.suffix.lower() == ".csv" else _write_parquet
    write_atomically(path, lambda stream: write(stream, columns), rule="--output must be writable")
    count, heads = next(iter(columns.values())).size, list(columns)
    shown = ", ".join(heads if len(heads) <= 6 else [*heads[:5], "...", heads[-1]])
    return f"{path}: {count:,} rows of {shown}"


def _archive(arrays: dict[str, Array], names: Names) -> dict[str, Array]:
    """The arrays by name, with the ids of nodes and the names of classes."""
    several = any(name.startswith("embeddings_") for name in arrays)
    ids = {} if several and names.nodes is None else {"id": _ids(arrays, names)}
    if not names.classes or "classes" not in arrays:
        return {**ids, **arrays}
    words = np.array(names.classes)
    return {**ids, **arrays, "classes": words[arrays["classes"]], "class_names": words}


def _columns(arrays: dict[str, Array], names: Names) -> dict[str, Array]:
    """A column for each number of a row: the id, the class, its probability, and those of all classes."""
    if any(name.startswith("embeddings_") for name in arrays):
        fix = "Write them as .npz, or ask for pairs or partners."
        raise InputError("a table holds nodes of one type", got="outputs of several", fix=fix)
    columns = {"id": _ids(arrays, names)}
    for name, value in arrays.items():
        if name == "logits":  # for an archive
            continue
        if name == "classes" and value.ndim == 1:
            columns["class"] = np.array(names.classes)[value] if names.classes else value
            continue
        if name == "probabilities" and value.ndim == 2 and arrays["classes"].ndim == 1:
            columns["probability"] = value.max(axis=1)
        name = _SINGULAR.get(name, "label" if name == "classes" else name)
        if value.ndim == 1:
            columns[name] = value
        else:
            ends = names.classes if len(names.classes) == value.shape[1] else range(value.shape[1])
            columns |= {f"{name}_{end}": value[:, number] for number, end in enumerate(ends)}
    return columns


def _ids(arrays: dict[str, Array], names: Names) -> Array:
    """What the rows are called: by the table of nodes, or else by their numbers."""
    return np.arange(len(next(iter(arrays.values())))) if names.nodes is None else names.nodes


def _answers(asked: dict[str, Array]) -> dict[str, Array]:
    """What was asked about links, one answer in each row."""
    if "pair_scores" in asked and "partners" in asked:
        fix = "Ask for one of them, or write .npz."
        raise InputError("a table answers --pairs or --partners-of", got="both", fix=fix)
    if "pair_scores" in asked:
        source, target = asked["pairs"].T
        return {"source": source, "target": target, "score": asked["pair_scores"]}
    found = asked["partners"] >= 0
    row, rank = np.nonzero(found)
    best = {"node": asked["nodes"][row], "rank": rank + 1, "partner": asked["partners"][found]}
    return {**best, "score": asked["partner_scores"][found]}


def _write_csv(stream: IO[bytes], columns: dict[str, Array]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # As text, a number of single precision has no more digits than it knows.
    cells = ((column.astype(str) if column.dtype.kind == "f" else column).tolist() for column in columns.values())
    writer.writerows(zip(*cells, strict=True))
    text.detach()  # the stream is not ours to close


def _write_parquet(stream: IO[bytes], columns: dict[str, Array]) -> None:
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(arrow.table(dict(columns)), stream)
