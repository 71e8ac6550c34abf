"""Reads heterogeneous graphs: NumPy archives, folders of tables, saved ``HeteroData``.

Reading never runs code. ``TypedGraph`` checks what the values mean, and the task checks targets and splits.
"""

from __future__ import annotations

import difflib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]
from torch_geometric.data.storage import BaseStorage, EdgeStorage, NodeStorage  # type: ignore[import-untyped]

from gnnautoscale._util import checked, open_npz, ordinary, reason_of
from gnnautoscale.data import columns, files, tables
from gnnautoscale.errors import InputError
from gnnautoscale.graph import EdgeType

_Arrays = Mapping[str, NDArray[Any]]
# What a type of nodes or edges can have in an archive, as the beginning of an array's name.
_OF_NODES = ("x", "y", "split", *files.MASKS)
_OF_EDGES = ("edges", "edge_weight", "edge_attr")
# The parts of a sparse matrix of features, by the end of an array's name; data may be missing.
_SPARSE = ("indptr", "indices", "shape", "data")
_SEE = "See the documentation of gnnautoscale.data.read_typed_graph."


def is_typed_file(path: str | Path) -> bool:
    """Whether a file or folder holds a heterogeneous graph: by its names of arrays, or what was saved.

    Example:
        >>> is_typed_file("graph.csv")
        False
    """
    path = Path(path)
    try:
        if path.is_dir():
            return True
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(ordinary(path)) as archive:
                return "node_types.npy" in archive.namelist()
        if path.suffix.lower() == ".pt":
            with zipfile.ZipFile(ordinary(path)) as archive:
                pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                return b"torch_geometric.data.hetero_data" in archive.read(pickled)
    except Exception:  # zipfile raises many types; the reader of plain graphs says what is wrong
        return False
    return False


@checked(max_features={"least": 1})
def read_typed_graph(path: str | Path, *, undirected: bool = False, max_features: int | None = None) -> HeteroData:
    """Read a heterogeneous graph.

    **An archive** (``.npz``) has the arrays ``node_types``, ``[types]``, and ``num_nodes``, ``[types]``; edges of each
    type as ``edges_A__R__B``, ``[2, num_edges]``, from nodes of type A by the relation R to nodes of type B, with
    ``edge_weight_A__R__B`` and ``edge_attr_A__R__B`` if they have some; and for any type T features ``x_T``, dense or
    as the parts of a sparse matrix in rows, ``x_T_indptr``, ``x_T_indices``, ``x_T_shape`` and, unless all are 1,
    ``x_T_data``; targets ``y_T``; and ``split_T``, 0 or "train", 1 or "val", 2 or "test", 3, -1 or "none"; or instead
    ``train_mask_T``, ``val_mask_T`` and ``test_mask_T``.

    **A folder** has a table for each type, ``.csv`` or ``.parquet``: ``nodes_T`` with any of the columns ``id``, ``y``
    and ``split``, where all others are features; and ``edges_A__R__B`` with ``source`` and ``target``,
    ids or else numbers of rows, any of ``weight``, and all others are edge features.

    **A saved graph** (``.pt``) is a ``HeteroData``, written by ``torch.save``. Its tensors are read.

    Args:
        path: The file or folder.
        undirected: Add the reverse of each type of edges as a type of its own, ``(B, rev_R, A)``, with the same edge
            attributes.
        max_features: Keep only the first columns of each type's ``x``.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp()) / "papers.npz"
        >>> edges = {"edges_author__writes__paper": [[0, 1], [2, 0]]}
        >>> np.savez(file, node_types=["author", "paper"], num_nodes=[2, 3], x_author=np.eye(2), **edges)
        >>> read_typed_graph(file, undirected=True).edge_types
        [('author', 'writes', 'paper'), ('paper', 'rev_writes', 'author')]
    """
    return read_typed_names(path, undirected=undirected, max_features=max_features)[0]


def read_typed_names(
    path: str | Path, *, undirected: bool = False, max_features: int | None = None
) -> tuple[HeteroData, dict[str, files.Names]]:
    """The graph that :func:`read_typed_graph` reads, and what the file calls the nodes and classes of its types."""
    path = Path(path)
    _need(max_features is None or max_features >= 1, "max_features must be at least 1", str(max_features))
    try:
        readers = {".npz": _archive, ".pt": _saved}
        known = path.is_dir() or path.suffix.lower() in readers
        _need(known, "a heterogeneous graph is a readable folder or a file that ends in .npz or .pt", str(path))
        graph, names = _folder(path) if path.is_dir() else readers[path.suffix.lower()](path)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make its reader raise almost anything
        reason = reason_of(error).partition(". ")[0]
        fix = "Check the path, or write the file again."
        raise InputError(f"{path} must be a readable heterogeneous graph", got=reason, fix=fix) from error
    _need(bool(graph.edge_types), f"{path} must have a type of edges", "none")
    for store in graph.node_stores:
        if max_features is not None and isinstance(store.get("x"), Tensor):
            store.x = store.x[:, :max_features].contiguous()
    return _both_ways(graph) if undirected else graph, names


# Readers #############################################################################################################


def _archive(path: Path) -> tuple[HeteroData, dict[str, files.Names]]:
    with open_npz(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name in ("node_types", "num_nodes"):
        _need(name in arrays, f"{path} must have the array {name}", ", ".join(arrays) or "none")
    kinds, counts = arrays["node_types"].tolist(), arrays["num_nodes"].tolist()
    fits = isinstance(kinds, list) and isinstance(counts, list) and len(kinds) == len(counts) == len(set(kinds))
    fits = (
        fits
        and all(isinstance(kind, str) for kind in kinds)
        and all(isinstance(count, int) and count >= 0 for count in counts)
    )
    _need(fits, "node_types must be distinct names, and num_nodes a count for each", f"{kinds} and {counts}")
    relations = {name.removeprefix("edges_"): _ends(name, kinds) for name in arrays if name.startswith("edges_")}
    _check_names(path, arrays, kinds, relations)
    graph, names = HeteroData(), dict[str, files.Names]()
    for kind, count in zip(kinds, counts, strict=True):
        found = {name: arrays[f"{name}_{kind}"] for name in _OF_NODES if f"{name}_{kind}" in arrays}
        parts = {f"x_{part}": arrays[f"x_{kind}_{part}"] for part in _SPARSE if f"x_{kind}_{part}" in arrays}
        if parts:
            missing = [f"x_{kind}_{part}" for part in _SPARSE[:3] if f"x_{part}" not in parts]
            whole = not missing and "x" not in found
            got = f"no {', '.join(missing)}" if missing else f"x_{kind} as well"
            _need(whole, f"sparse features of {kind!r} are {', '.join(_SPARSE)}", got)
            found["x"] = files.dense(parts, None, f"x_{kind}")
        names[kind] = _add_nodes(graph, kind, count, found)
    for name, ends in relations.items():
        found = {each: arrays[f"{each}_{name}"] for each in _OF_EDGES if f"{each}_{name}" in arrays}
        _add_edges(graph, ends, found.pop("edges"), found)
    return graph, names


def _folder(path: Path) -> tuple[HeteroData, dict[str, files.Names]]:
    by_name = {file.stem: file for file in sorted(path.iterdir()) if file.suffix.lower() in tables.TABLES}
    rule = f"{path} must have tables nodes_T and edges_A__R__B, .csv or .parquet, one for each type"
    if {"nodes", "edges"} <= by_name.keys():
        fix = f"For one type of nodes, read {by_name['nodes']} with edges= or --edges {by_name['edges']}."
        raise InputError(rule, got="nodes and edges without types", fix=fix)
    strange = [name for name in by_name if not name.startswith(("nodes_", "edges_"))]
    _need(bool(by_name) and not strange, rule, ", ".join(strange) or "none")
    twice = sum(file.suffix.lower() in tables.TABLES for file in path.iterdir()) > len(by_name)
    _need(not twice, rule, "two tables of the same name")
    graph, ids, names = HeteroData(), dict[str, NDArray[Any]](), dict[str, files.Names]()
    for name, file in by_name.items():
        if name.startswith("nodes_"):
            kind, table = name.removeprefix("nodes_"), files.read_arrays(file)
            count = len(next(iter(table.values())))
            ids[kind] = columns.ids(table["id"]) if "id" in table else np.arange(count)
            named = _add_nodes(graph, kind, count, _of_table(table))
            names[kind] = named._replace(nodes=ids[kind] if "id" in table else None)
    for name, file in by_name.items():
        if name.startswith("edges_"):
            ends, table = _ends(name, list(ids)), files.read_arrays(file, tables.OF_EDGES)
            tables.check_ends(file.name, table)
            sides = zip((ends[0], ends[2]), ("source", "target"), strict=True)
            index = [tables.places(ids[kind], columns.ids(table[side]), f"nodes_{kind}") for kind, side in sides]
            others = [columns.floats(each, table[each]) for each in table if each not in ("source", "target", "weight")]
            found = {"edge_weight": table["weight"]} if "weight" in table else {}
            found |= {"edge_attr": np.stack(others, axis=1)} if others else {}
            _add_edges(graph, ends, np.stack(index), found)
    return graph, names


def _of_table(table: _Arrays) -> dict[str, NDArray[Any]]:
    features = [columns.floats(name, table[name]) for name in table if name not in ("id", "y", "split")]
    found = {"x": np.stack(features, axis=1)} if features else {}
    return {**found, **{name: table[name] for name in ("y", "split") if name in table}}


def _saved(path: Path) -> tuple[HeteroData, dict[str, files.Names]]:
    parts = [*files.DATA_PARTS, BaseStorage, NodeStorage, EdgeStorage]
    saved = files.load_saved(path, HeteroData, parts)
    graph = HeteroData()
    for kind, store in (*saved.node_items(), *saved.edge_items()):
        named = {name: value for name, value in store.items() if isinstance(value, Tensor)}
        for name, value in named.items():
            graph[kind][name] = files.plain_tensor(f"{name} of {kind!r}", value)
        if kind in saved.edge_types:
            rule = f"edges of {kind!r} must be edge_index"
            _need("edge_index" in named, rule, ", ".join(store.keys()) or "none")
        else:
            count = store.num_nodes
            _need(
                isinstance(count, int),
                f"{path} must say how many nodes of {kind!r} there are",
                "neither x nor num_nodes",
            )
            graph[kind].num_nodes = count
    return graph, {}


# Assembly ############################################################################################################


def _add_nodes(graph: HeteroData, kind: str, count: int, found: _Arrays) -> files.Names:
    """Add a type of nodes with its features, targets and splits; returns the names of its classes."""
    graph[kind].num_nodes = count
    values: dict[str, NDArray[Any]] = {}
    if "x" in found:
        values["x"] = columns.floats(f"x_{kind}", found["x"])
        form = values["x"].ndim == 2 and values["x"].shape[0] == count
        _need(form, f"x_{kind} must be numbers, [{count}, features]", str(list(values["x"].shape)))
    if "y" in found:
        values["y"] = columns.numbers(f"y_{kind}", found["y"])
        form = values["y"].ndim >= 1 and values["y"].shape[0] == count
        _need(form, f"y_{kind} must have a row for each of {count} nodes", str(list(values["y"].shape)))
    masks = [name for name in files.MASKS if name in found]
    one = len(masks) in (0, 3) and not (masks and "split" in found)
    _need(one, f"a split of {kind!r} is either split or all three masks", ", ".join(found))
    if "split" in found:
        split = columns.splits(f"split_{kind}", found["split"])
        form = split.shape == (count,) and bool(np.isin(split, (-1, 0, 1, 2, 3)).all())
        got = f"{list(split.shape)} with values from {split.min(initial=0)} to {split.max(initial=0)}"
        _need(form, f"split_{kind} must be 0, 1, 2, 3 or -1, [{count}]", got)
        values |= {name: split == number for number, name in enumerate(files.MASKS)}
    for name in masks:
        form = found[name].shape == (count,) and bool(np.isin(found[name], (0, 1)).all())
        _need(form, f"{name}_{kind} must be True or False, [{count}]", f"{found[name].dtype} {list(found[name].shape)}")
        values[name] = found[name].astype(np.bool_)
    for name, value in values.items():
        graph[kind][name] = torch.from_numpy(np.ascontiguousarray(value))
    return files.Names(classes=columns.class_names(f"y_{kind}", found["y"]) if "y" in found else ())


def _add_edges(graph: HeteroData, kind: EdgeType, edges: NDArray[Any], found: _Arrays) -> None:
    """Add a type of edges with their attributes."""
    name = "__".join(kind)
    form = edges.ndim == 2 and edges.shape[0] == 2 and edges.dtype.kind in "iu"
    _need(form, f"edges_{name} must be integers, [2, num_edges]", f"{edges.dtype} {list(edges.shape)}")
    graph[kind].edge_index = torch.from_numpy(edges.astype(np.int64))
    for each, value in found.items():
        values = columns.floats(f"{each}_{name}", value)
        form = values.ndim >= 1 and values.shape[0] == edges.shape[1]
        _need(form, f"{each}_{name} must have a row for each of {edges.shape[1]} edges", str(list(values.shape)))
        graph[kind][each] = torch.from_numpy(np.ascontiguousarray(values))


def _both_ways(graph: HeteroData) -> HeteroData:
    """Add the reverse of each type of edges."""
    for kind in list(graph.edge_types):
        source, relation, target = kind
        back = target, f"rev_{relation}", source
        free = back not in graph.edge_types
        _need(free, "undirected adds reverse types of edges", f"a graph that has {back!r} already; leave it out")
        for name, value in graph[kind].items():
            graph[back][name] = value.flip(0) if name == "edge_index" else value
    return graph


def _ends(name: str, kinds: list[str]) -> EdgeType:
    """The type of edges that an array or a table is named after."""
    ends = name.removeprefix("edges_").split("__")
    known = len(ends) == 3 and ends[0] in kinds and ends[2] in kinds
    _need(known, f"{name} must be edges_A__R__B with types of nodes A and B", ", ".join(kinds) or "no types")
    return ends[0], ends[1], ends[2]


def _check_names(path: Path, found: Iterable[str], kinds: list[str], relations: Iterable[str]) -> None:
    """Refuse arrays that look like those of a type but are of none; others are ignored."""
    known = {"node_types", "num_nodes", *(f"{name}_{kind}" for name in _OF_NODES for kind in kinds)}
    known |= {f"x_{kind}_{part}" for kind in kinds for part in _SPARSE}
    known |= {f"{name}_{kind}" for name in _OF_EDGES for kind in relations}
    begins = tuple(f"{name}_" for name in (*_OF_NODES, *_OF_EDGES))
    wrong = [
        name
        for name in found
        if name not in known and (name.startswith(begins) or difflib.get_close_matches(name, known, n=1, cutoff=0.8))
    ]
    _need(not wrong, f"arrays of {path} must belong to one of the types {', '.join(kinds)}", ", ".join(wrong))


def _need(holds: bool, rule: str, got: str) -> None:
    if not holds:
        raise InputError(rule, got=got, fix=_SEE)
