"""Reads tables of nodes and edges, ``.csv`` and ``.parquet``, whose columns may have other common names."""

from __future__ import annotations

import csv
import importlib
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gnnautoscale.data.columns import Array, floats, ids, need
from gnnautoscale.errors import InputError

TABLES = (".csv", ".parquet")
#: Columns with a meaning, and the other names they may have in a file, in small letters.
OF_NODES = {
    "id": ("node_id", "node", "nid"),
    "y": ("label", "labels", "class", "target"),
    "split": (),
    "graph": ("graph_id",),
}
OF_EDGES = {
    "source": ("src", "from", "head", "source_id"),
    "target": ("dst", "dest", "destination", "to", "tail", "target_id"),
    "weight": ("edge_weight",),
    "split": (),
    "type": ("edge_type", "relation"),
}
_MAY_BE_EMPTY = ("y", "split")


def read_table(path: Path, meanings: dict[str, tuple[str, ...]]) -> dict[str, Array]:
    """The columns of a table by name; those with a meaning get the first of their names.

    Args:
        path: The file.
        meanings: ``OF_NODES`` or ``OF_EDGES``.
    """
    return (_csv if path.suffix.lower() == ".csv" else _parquet)(path, meanings)


def _renamed(path: Path, names: Iterable[str], meanings: dict[str, tuple[str, ...]]) -> list[str]:
    """The names of columns, with the first name of each meaning in place of others."""
    first = {other: name for name, others in meanings.items() for other in (name, *others)}
    given = list(names)
    found = [first.get(name.lower(), name) for name in given]
    for name in meanings:
        same = [each for each, meant in zip(given, found, strict=True) if meant == name]
        rule = f"{path} must have at most one column for {name}"
        need(len(same) <= 1, rule, " and ".join(same), "Rename or drop the others.")
    return found


def _csv(path: Path, meanings: dict[str, tuple[str, ...]]) -> dict[str, Array]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        head = file.readline()
        delimiter = max(",;\t", key=head.count)
        names = [name.strip() for name in next(csv.reader([head], delimiter=delimiter), [])]
        distinct = 0 < len(names) == len(set(names))
        need(distinct, f"{path} must start with a line of distinct column names", str(names), "Add it.")
        names, words = _renamed(path, names, meanings), meanings.keys() - {"weight"}
        types = [(name, "O" if name in words else "f8") for name in names]
        with warnings.catch_warnings():
            # An edge table may have no rows; a node table without rows is refused later.
            warnings.filterwarnings("ignore", "loadtxt: input contained no data", UserWarning)
            try:
                table = np.loadtxt(file, types, delimiter=delimiter, quotechar='"', comments=None, ndmin=1)
            except ValueError as error:
                raise _about_column(path, names, meanings, error) from error
    return {name: np.char.strip(table[name].astype(str)) if name in words else table[name] for name in names}


def _about_column(path: Path, names: list[str], meanings: dict[str, tuple[str, ...]], error: ValueError) -> Exception:
    """The error with the name of the column that it is about, if NumPy says its number."""
    told = re.match(r"could not convert string (.*) to float64 at row (\d+), column (\d+)", str(error))
    if told is None:
        return error
    rule = f"column {names[int(told[3]) - 1]!r} of {path} must hold numbers"
    worded = ", ".join(name for name in meanings if name != "weight")
    fix = f"Words are read in {worded}: rename it if it is one of them, else drop it or replace words by numbers."
    return InputError(rule, got=f"{told[1]} in row {int(told[2]) + 1}", fix=fix)


def _parquet(path: Path, meanings: dict[str, tuple[str, ...]]) -> dict[str, Array]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        fix = "Run: pip install pyarrow"
        raise InputError("Parquet files need pyarrow", got="an environment without it", fix=fix) from error
    table = parquet.read_table(path)
    names = dict(zip(table.column_names, _renamed(path, table.column_names, meanings), strict=True))
    missing = sum(table[name].null_count for name, meant in names.items() if meant not in _MAY_BE_EMPTY)
    rule = f"{path} must have a value in every cell, except of {', '.join(_MAY_BE_EMPTY)}"
    need(missing == 0, rule, f"{missing} without", "Fill them in.")
    columns = {meant: _filled(table[name]).to_numpy() for name, meant in names.items()}
    return {name: column.astype(str) if column.dtype.kind == "O" else column for name, column in columns.items()}


def _filled(column: Any) -> Any:
    """A column in which empty cells read as unknown: -1 beside integers, no text beside text, else NaN."""
    kind = str(column.type)
    if not column.null_count or kind == "double":
        return column
    return column.fill_null(-1 if "int" in kind else "" if "string" in kind else float("nan"))


def join_tables(nodes: dict[str, Array], edges: dict[str, Array]) -> dict[str, Array]:
    """Turn a node table and an edge table into the arrays of a graph."""
    features = [name for name in nodes if name not in OF_NODES]
    need(len(features) > 0, "a table of nodes needs features", f"the columns {', '.join(nodes)}", "Add some numbers.")
    check_ends("a table of edges", edges)
    known = ids(nodes["id"]) if "id" in nodes else np.arange(nodes[features[0]].size)
    arrays = {"edge_index": np.stack([places(known, ids(edges[end])) for end in ("source", "target")])}
    arrays["x"] = np.stack([floats(name, nodes[name]) for name in features], axis=1)
    arrays |= {"y": nodes["y"]} if "y" in nodes else {}
    arrays |= {"id": known} if "id" in nodes else {}
    arrays |= {
        name: table["split"].astype(str)
        for name, table in (("split", nodes), ("edge_split", edges))
        if "split" in table
    }
    if "graph" in nodes:
        _, arrays["graph_id"] = np.unique(ids(nodes["graph"]), return_inverse=True)
        arrays |= {name: _of_each_graph(name, arrays) for name in ("y", "split") if name in arrays}
    if "weight" in edges:
        arrays["edge_weight"] = edges["weight"]
    if "type" in edges:
        kinds = ids(edges["type"])  # words are numbered in the order of the alphabet
        arrays["edge_type"] = kinds if kinds.dtype.kind in "iu" else np.unique(kinds, return_inverse=True)[1]
    attributes = [floats(name, edges[name]) for name in edges if name not in OF_EDGES]
    if attributes:
        arrays["edge_attr"] = np.stack(attributes, axis=1)
    return arrays


def check_ends(table: str, columns: Iterable[str]) -> None:
    """Refuse a table of edges without its two ends, and say which is missing and what it may be called."""
    names = list(columns)
    for end in ("source", "target"):
        rule = f"{table} must have the column {end} (or {', '.join(OF_EDGES[end])})"
        need(end in names, rule, f"the columns {', '.join(names)}", "Rename the column that holds it.")


def _of_each_graph(name: str, arrays: dict[str, Array]) -> Array:
    """The value of each graph, which all of its nodes must have."""
    number, values = arrays["graph_id"], arrays[name]
    found: Array = values[np.unique(number, return_index=True)[1]]
    same = bool(((found[number] == values) | (values != values)).all())
    need(same, f"all nodes of a graph must have the same {name}", "others", f"Repeat the graph's {name} in each row.")
    return found


def places(ids: Array, wanted: Array, table: str = "the node table") -> Array:
    """Find the row of each wanted id in a table of nodes."""
    if ids.dtype.kind != wanted.dtype.kind:
        ids, wanted = ids.astype(str), wanted.astype(str)
    order = np.argsort(ids, kind="stable")
    known = ids[order]
    need(known.size > 0, f"{table} needs at least one row", "none", "Check that the file is complete.")
    twice = known[1:][known[1:] == known[:-1]]
    need(twice.size == 0, f"ids of {table} must be distinct", f"twice {twice[:1]}", "Give every node its own.")
    place = np.minimum(np.searchsorted(known, wanted), known.size - 1)
    unknown = wanted[known[place] != wanted]
    got = f"{unknown.size} unknown ids, the first {unknown[:1]}"
    need(unknown.size == 0, f"edges must name ids of {table}", got, "Add the nodes or drop the edges.")
    return order[place]
