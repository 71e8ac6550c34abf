"""Reads a user's own graph: NumPy archives, saved PyG data, CSV and Parquet tables.

Reading never runs code: archives are opened without pickle, and a saved object may be nothing but a PyG ``Data`` of
tensors. This module converts types and refuses what it cannot convert. ``Graph`` checks what the values mean, and the
task checks targets and splits.
"""

import csv
import difflib
import importlib
import pickle
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr  # type: ignore[import-untyped]
from torch_geometric.data.storage import AttrType, GlobalStorage  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph

_Array = npt.NDArray[Any]

MASKS = ("train_mask", "val_mask", "test_mask")
EDGE_LEVEL = ("edge_weight", "edge_attr", "edge_type")
PLAIN = ("edge_index", "x", "y", *MASKS, *EDGE_LEVEL, "edge_split", "graph_id", "graph_split")
SPARSE = ("x_indptr", "x_indices", "x_shape")
TRIPLES = ("train", "valid", "test")
ARCHIVE = (*PLAIN, "split", *SPARSE, "x_data", *TRIPLES, "num_nodes", "ptr", "node_tag")
TABLES = (".csv", ".parquet")
NOT_FEATURES = ("id", "y", "label", "split", "graph")
MAY_BE_EMPTY = ("y", "label", "split")
TEXT = (*NOT_FEATURES, "source", "target", "type")

# The parts of a pickled `Data`: PyG registers `Data` itself with `torch.load`, but not these.
DATA_PARTS: list[Any] = [AttrType, DataEdgeAttr, DataTensorAttr, GlobalStorage]


def read_graph(
    path: str | Path,
    *,
    edges: str | Path | None = None,
    features_file: str | Path | None = None,
    undirected: bool = False,
    max_features: int | None = None,
) -> Data:
    """Read a graph and whatever targets and splits stand beside it; see `from_file` for formats and arguments.

    ``x`` is float32 and ``edge_index`` int64; ``y``, masks and edge attributes are there if the file has them.
    """
    path, kind = Path(path), Path(path).suffix.lower()
    some = max_features is None or max_features >= 1
    _need(some, "max_features must be at least 1", str(max_features), "Leave it out to keep all.")
    paired = edges is None if kind not in TABLES else edges is not None and Path(edges).suffix.lower() in TABLES
    rule = "a node table (.csv, .parquet) comes with a table of edges, and no other file does"
    _need(paired, rule, f"{path.name} and edges={edges}", "Pass edges= with a node table, and only then.")
    arrays = read_arrays(path) if edges is None else _tables(read_arrays(path), read_arrays(Path(edges)))
    if features_file is not None:
        given = ", ".join(name for name in arrays if name == "x" or name in SPARSE)
        _need(not given, "x comes from one file", f"features_file and {given} in {path.name}", "Leave one out.")
        arrays["x"] = _mapped(Path(features_file))
    data = _assemble(arrays, max_features)
    return _both_ways(data) if undirected else data


# Readers #############################################################################################################


def read_arrays(path: Path) -> dict[str, _Array]:
    """Read the arrays of a file, or the columns of a table, by name."""
    readers = {".npz": _archive, ".pt": _saved, ".csv": _csv, ".parquet": _parquet}
    kind = path.suffix.lower()
    _need(kind in readers, f"a graph file ends in {', '.join(readers)}", str(path), "Save it as one of these.")
    try:
        return readers[kind](path)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make its reader raise almost anything
        # The first sentence: NumPy goes on to advise unsafe loading.
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0].rstrip(".")
        fix = "Check the path, or write the file again."
        raise InputError(f"{path} must be a readable {kind} file", got=reason, fix=fix) from error


def _mapped(path: Path) -> _Array:
    """Map an array on disk, copy-on-write: pages load as they are used, and writes never reach the file."""
    try:
        array: _Array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        got, fix = f"{path} ({error})", "Write it with numpy.save."
        raise InputError("features_file must be a readable .npy file", got=got, fix=fix) from None
    _need(array.dtype == np.float32, "features_file must hold float32", str(array.dtype), "Convert it once.")
    return array


def _archive(path: Path) -> dict[str, _Array]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        fix = "Read it with gnnautoscale.data.open_file."
        _need("node_types" not in archive.files, f"{path} must hold a plain graph", "a heterogeneous one", fix)
        return {name: archive[name] for name in _known(path, archive.files, ARCHIVE)}


def _saved(path: Path) -> dict[str, _Array]:
    saved = load_saved(path, Data, DATA_PARTS)
    values = {name: saved[name] for name in _known(path, saved.keys(), PLAIN)}
    return {name: plain_tensor(name, value).numpy() for name, value in values.items()}


def load_saved(path: Path, kind: type[Any], parts: list[Any]) -> Any:
    """Open a saved PyG object of a class without running code; its pickle may hold ``parts`` besides tensors."""
    fix = f"Save a torch_geometric.data.{kind.__name__} with torch.save(data, path)."
    try:
        with _allowing(parts):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        needs = re.search(r"GLOBAL (\S+)", str(error))
        if needs is None:
            raise
        raise InputError(f"{path} must open without running code", got=f"a pickled {needs[1]}", fix=fix) from error
    _need(isinstance(saved, kind), f"{path} must hold a PyG {kind.__name__}", f"a {type(saved).__name__}", fix)
    return saved


@contextmanager
def _allowing(parts: list[Any]) -> Iterator[None]:
    """Let ``torch.load`` make these parts besides what PyG allows; stores that were used hold a ``defaultdict``."""
    before = torch.serialization.get_safe_globals()
    others = [part for part in before if part is not defaultdict]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *parts, set, (_ordered, "collections.defaultdict")])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _ordered(*_: Any) -> OrderedDict[Any, Any]:
    """Stands for a ``defaultdict``, which ``torch.load`` refuses to fill."""
    return OrderedDict()


def plain_tensor(name: str, value: Any) -> Tensor:
    """A dense tensor of a saved object, floating ones as float32; anything else is refused."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    _need(is_dense, f"{name} must be a dense tensor", f"a {type(value).__name__}", "Save it as one.")
    plain: Tensor = value.detach().as_subclass(Tensor)
    return plain.float() if plain.is_floating_point() else plain


def _csv(path: Path) -> dict[str, _Array]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        names = [name.strip() for name in next(csv.reader([file.readline()]), [])]
        distinct = 0 < len(names) == len(set(names))
        _need(distinct, f"{path} must start with a line of distinct column names", str(names), "Add it.")
        types = [(name, "O" if name in TEXT else "f8") for name in names]
        with warnings.catch_warnings():
            # An edge table may have no rows; a node table without rows is refused later.
            warnings.filterwarnings("ignore", "loadtxt: input contained no data", UserWarning)
            table = np.loadtxt(file, types, delimiter=",", quotechar='"', comments=None, ndmin=1)
    return {name: np.char.strip(table[name].astype(str)) if name in TEXT else table[name] for name in names}


def _parquet(path: Path) -> dict[str, _Array]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        fix = "Run: pip install 'gnnautoscale[parquet]'"
        raise InputError("Parquet files need pyarrow", got="an environment without it", fix=fix) from error
    table = parquet.read_table(path)
    missing = sum(table[name].null_count for name in table.column_names if name not in MAY_BE_EMPTY)
    rule = f"{path} must have a value in every cell, except of {', '.join(MAY_BE_EMPTY)}"
    _need(missing == 0, rule, f"{missing} without", "Fill them in.")
    columns = {name: _filled(table[name]).to_numpy() for name in table.column_names}
    return {name: column.astype(str) if column.dtype.kind == "O" else column for name, column in columns.items()}


def _filled(column: Any) -> Any:
    """A column in which empty cells read as unknown: -1 beside integers, no text beside text, else NaN."""
    kind = str(column.type)
    if not column.null_count or kind == "double":
        return column
    return column.fill_null(-1 if "int" in kind else "" if "string" in kind else float("nan"))


def _known(path: Path, found: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """Select the names to read. Unknown names are ignored unless they look like a misspelt one."""
    typos = [name for name in found if name not in known and difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
    _need(not typos, f"{path} is read for {', '.join(known)}", ", ".join(typos), "Rename or remove it.")
    return [name for name in found if name in known]


# Tables ##############################################################################################################


def _tables(nodes: dict[str, _Array], edges: dict[str, _Array]) -> dict[str, _Array]:
    """Turn a node table and an edge table into the arrays of a graph."""
    targets = [name for name in nodes if name in ("y", "label")]
    features = [name for name in nodes if name not in NOT_FEATURES]
    complete = len(targets) <= 1 and len(features) > 0 and {"source", "target"} <= edges.keys()
    rule = "nodes need features and at most one of y and label, and edges need source and target"
    _need(complete, rule, f"{', '.join(nodes)}, and {', '.join(edges)}", "Rename the columns.")
    known = ids(nodes["id"]) if "id" in nodes else np.arange(nodes[features[0]].size)
    arrays = {"edge_index": np.stack([places(known, ids(edges[end])) for end in ("source", "target")])}
    arrays["x"] = np.stack([floats(name, nodes[name]) for name in features], axis=1)
    if targets:
        arrays["y"] = numbers(targets[0], nodes[targets[0]])
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
    others = ("source", "target", "weight", "split", "type")
    attributes = [floats(name, edges[name]) for name in edges if name not in others]
    if attributes:
        arrays["edge_attr"] = np.stack(attributes, axis=1)
    return arrays


def _of_each_graph(name: str, arrays: dict[str, _Array]) -> _Array:
    """The value of each graph, which all of its nodes must have."""
    number, values = arrays["graph_id"], arrays[name]
    found: _Array = values[np.unique(number, return_index=True)[1]]
    same = bool(((found[number] == values) | (values != values)).all())
    _need(same, f"all nodes of a graph must have the same {name}", "others", f"Repeat the graph's {name} in each row.")
    return found


def ids(column: _Array) -> _Array:
    """Convert ids to integers if all of them are, else leave them as text."""
    try:
        return integers("id, source and target", column)
    except InputError:
        if column.dtype.kind == "U":
            return column
        raise


def places(ids: _Array, wanted: _Array, table: str = "the node table") -> _Array:
    """Find the row of each wanted id in a table of nodes."""
    if ids.dtype.kind != wanted.dtype.kind:
        ids, wanted = ids.astype(str), wanted.astype(str)
    order = np.argsort(ids, kind="stable")
    known = ids[order]
    _need(known.size > 0, f"{table} needs at least one row", "none", "Check that the file is complete.")
    twice = known[1:][known[1:] == known[:-1]]
    _need(twice.size == 0, f"ids of {table} must be distinct", f"twice {twice[:1]}", "Give every node its own.")
    place = np.minimum(np.searchsorted(known, wanted), known.size - 1)
    unknown = wanted[known[place] != wanted]
    got = f"{unknown.size} unknown ids, the first {unknown[:1]}"
    _need(unknown.size == 0, f"edges must name ids of {table}", got, "Add the nodes or drop the edges.")
    return order[place]


# Assembly ############################################################################################################


def _assemble(arrays: dict[str, _Array], max_features: int | None) -> Data:
    """Convert arrays to a ``Data`` of the library's types."""
    if any(name in arrays for name in TRIPLES):
        arrays = _of_triples(arrays)
    if any(name in arrays for name in (*SPARSE, "x_data")):
        complete = all(name in arrays for name in SPARSE) and "x" not in arrays
        _need(complete, f"sparse x is {', '.join(SPARSE)}", ", ".join(arrays), "Give all three, and no x.")
        arrays["x"] = dense(arrays, max_features)
    _mark_graphs(arrays)
    missing = ", ".join(name for name in ("edge_index", "x") if name not in arrays)
    _need(not missing, f"a graph file needs {missing}", ", ".join(arrays) or "nothing", "Add it.")
    masks = [name for name in MASKS if name in arrays]
    one = len(masks) == 0 or (len(masks) == 3 and "split" not in arrays)
    _need(one, "a split is either split or all three masks", ", ".join(arrays), "Give one of them, or none.")
    convert = {"edge_index": integers, "edge_type": integers, "y": numbers, "split": splits, "edge_split": splits}
    convert |= {"graph_id": integers, "graph_split": splits, "graph_y": numbers}
    convert |= {"x": floats, "edge_weight": floats, "edge_attr": floats}
    values = {name: to(name, arrays[name]) for name, to in convert.items() if name in arrays}
    values["x"] = values["x"][..., :max_features]
    for name in masks:
        _need(bool(np.isin(arrays[name], (0, 1)).all()), f"{name} must be True or False", "others", "Save it as bool.")
        values[name] = arrays[name].astype(np.bool_)
    for name in ("split", "edge_split", "graph_split"):
        if name in values:
            rule = f"{name} must be 0 (training), 1 (validation), 2 (test), or 3 or -1 (none)"
            others = np.unique(values[name][~np.isin(values[name], (-1, 0, 1, 2, 3))])
            _need(others.size == 0, rule, ", ".join(map(str, others[:3])), "Use one of these.")
    if "split" in values:
        split = values.pop("split")
        values |= {name: split == number for number, name in enumerate(MASKS)}
    return Data(**{name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()})


def _mark_graphs(arrays: dict[str, _Array]) -> None:
    """Name what belongs to whole graphs, if the file holds several with a target for each; tags become features."""
    if "node_tag" in arrays:
        tag = integers("node_tag", arrays.pop("node_tag"))
        _need(
            "x" not in arrays and tag.ndim == 1 and tag.min(initial=0) >= 0, "node_tag stands for x", "both", "Drop x."
        )
        arrays["x"] = np.eye(int(tag.max(initial=0)) + 1, dtype=np.float32)[tag]
    if "ptr" in arrays:
        first = integers("ptr", arrays.pop("ptr"))
        fits = first.ndim == 1 and first.size > 1 and first[0] == 0 and bool((np.diff(first) > 0).all())
        _need(
            fits, "ptr must be the first node of each graph and the number of nodes", "others", "Let it ascend from 0."
        )
        arrays["graph_id"] = np.repeat(np.arange(first.size - 1), np.diff(first))
    if "graph_id" in arrays and "y" in arrays:
        number = integers("graph_id", arrays["graph_id"])
        nodes = number.size
        if arrays["y"].shape[:1] == (number.max(initial=-1) + 1,) != (nodes,):
            arrays["graph_y"] = arrays.pop("y")
            if arrays.get("split", number).shape[:1] == arrays["graph_y"].shape[:1]:
                arrays["graph_split"] = arrays.pop("split")


def _of_triples(arrays: dict[str, _Array]) -> dict[str, _Array]:
    """A knowledge graph, whose edges have types and splits, as the arrays of a graph; nodes have no features but 1."""
    complete = set(TRIPLES) <= arrays.keys() and "num_nodes" in arrays and "edge_index" not in arrays
    rule = f"a knowledge graph is {', '.join(TRIPLES)} and num_nodes"
    _need(complete, rule, ", ".join(arrays), "Give all of them, and no edge_index.")
    triples = [integers(name, arrays.pop(name)) for name in TRIPLES]
    form = all(each.ndim == 2 and each.shape[1] == 3 for each in triples)
    shapes = ", ".join(str(list(each.shape)) for each in triples)
    _need(form, "triples must be [n, 3]: source, relation, target", shapes, "Transpose them.")
    source, relation, target = np.concatenate(triples).T
    made = {"edge_index": np.stack([source, target]), "edge_type": relation}
    made["edge_split"] = np.repeat([0, 1, 2], [len(each) for each in triples])
    count = int(integers("num_nodes", arrays.pop("num_nodes")))
    return {"x": np.ones((count, 1), dtype=np.float32), **made, **arrays}


def dense(arrays: dict[str, _Array], max_features: int | None, name: str = "x") -> _Array:
    """Convert sparse rows to a dense matrix of at most ``max_features`` columns."""
    indptr, indices, shape = (integers(name, arrays[name]) for name in SPARSE)
    data = arrays.get("x_data")
    fits = shape.shape == (2,) and indptr.shape == (shape[0] + 1,) and indices.shape == (indptr[-1],)
    fits = bool(fits and indptr[0] == 0 and (np.diff(indptr) >= 0).all())
    fits = bool(fits and ((indices >= 0) & (indices < shape[1])).all() and (data is None or data.size == indices.size))
    fix = "Save the parts of a scipy.sparse.csr_array."
    _need(fits, f"sparse {name} must be a compressed sparse row matrix", "arrays that contradict each other", fix)
    keep = indices < (shape[1] if max_features is None else max_features)
    row = np.repeat(np.arange(shape[0]), np.diff(indptr))[keep]
    value = np.ones(row.size, dtype=np.float32) if data is None else floats("x_data", data)[keep]
    x = torch.zeros(int(shape[0]), min(int(shape[1]), max_features or int(shape[1])))
    where = (torch.from_numpy(row), torch.from_numpy(indices[keep]))
    return x.index_put_(where, torch.from_numpy(value), accumulate=data is not None).numpy()


def _both_ways(data: Data) -> Data:
    """Add the reverse of every edge; of several edges from one node to another, keep the first."""
    attributes = {name: data[name] for name in (*EDGE_LEVEL, "edge_split") if name in data}
    # Checked without x, which is read only once, when all is assembled.
    Graph(Data(edge_index=data.edge_index, num_nodes=data.x.size(0) if data.x.dim() else 0, **attributes))
    edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
    key = edge_index[0] * data.num_nodes + edge_index[1]
    first = torch.from_numpy(np.unique(key.numpy(), return_index=True)[1])
    for name, value in attributes.items():
        data[name] = torch.cat([value, value])[first]
    data.edge_index = edge_index[:, first].contiguous()
    return data


def integers(name: str, column: _Array) -> _Array:
    """Convert to int64; anything but integers is refused."""
    try:
        if column.dtype.kind in "iuU":
            return column.astype(np.int64)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name} must be integers", got=_reason(error), fix="Number them from 0.") from error
    raise InputError(f"{name} must be integers", got=f"type {column.dtype}", fix="Save them as int64.")


def splits(name: str, column: _Array) -> _Array:
    """Convert splits to their numbers, if they are words."""
    if column.dtype.kind != "U":
        return integers(name, column)
    words = [column == word for word in ("train", "val", "test", "none", "")]
    try:
        return integers(name, np.select(words, ["0", "1", "2", "-1", "-1"], column))
    except InputError as error:
        rule, fix = f"{name} must be integers, or train, val, test and none", "Rename them."
        raise InputError(rule, got=_reason(error.__cause__ or error), fix=fix) from error


def floats(name: str, column: _Array) -> _Array:
    """Convert to float32; anything but numbers is refused."""
    _need(column.dtype.kind in "fiub", f"{name} must be numbers", f"type {column.dtype}", "Convert or drop it.")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which the checks refuse
        return column.astype(np.float32, copy=False)


def numbers(name: str, column: _Array) -> _Array:
    """Convert targets: integers to int64, yes or no to bool, everything else to float32; several 0 and 1 as well.

    What is empty in a table is unknown: -1 beside integers, else NaN.
    """
    if column.dtype.kind == "U":
        empty = np.isin(np.char.lower(column), ("", "nan"))
        try:
            return integers(name, np.where(empty, "-1", column))
        except InputError:
            try:
                column = np.where(empty, "nan", column).astype(np.float64)
            except ValueError as error:
                rule, fix = f"{name} must be numbers", "Number the classes from 0."
                raise InputError(rule, got=_reason(error), fix=fix) from error
    if column.dtype.kind == "b":
        return column
    labels = column.ndim > 1 and bool(np.isin(column, (0, 1)).all())
    return column.astype(np.int64) if column.dtype.kind in "iu" and not labels else floats(name, column)


def _reason(error: BaseException) -> str:
    """What NumPy says, with words as they are in the file."""
    return re.sub(r"np\.str_\((.*)\)", r"\1", str(error))


def _need(holds: bool, rule: str, got: str, fix: str) -> None:
    if not holds:
        raise InputError(rule, got=got, fix=fix)
