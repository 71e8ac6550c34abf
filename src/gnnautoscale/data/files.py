"""A user's own graph from a file: NumPy archives, saved PyG data, CSV and Parquet tables.

Nothing in a file is ever run: archives are opened without pickle, and of saved objects only tensors inside a PyG
``Data`` are accepted. A file that does not fit is refused with what is wrong, before anything is made of it.
"""

import csv
import difflib
import importlib
import pickle
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr  # type: ignore[import-untyped]
from torch_geometric.data.storage import GlobalStorage  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError

_Array = npt.NDArray[Any]

MASKS = ("train_mask", "val_mask", "test_mask")
EDGE_LEVEL = ("edge_weight", "edge_attr", "edge_type")
REQUIRED = ("edge_index", "x", "y")
PLAIN = (*REQUIRED, *MASKS, *EDGE_LEVEL)
SPARSE = ("x_indptr", "x_indices", "x_shape")
ARCHIVE = (*PLAIN, "split", *SPARSE, "x_data")
TABLES = (".csv", ".parquet")
TEXT = ("id", "y", "label", "split", "source", "target")  # columns of a table that are not features

# What a pickled `Data` is made of; PyG lets `torch.load` accept `Data` itself, but not these parts of it.
DATA_PARTS: list[Any] = [DataEdgeAttr, DataTensorAttr, GlobalStorage]


def load_file(
    path: str | Path,
    *,
    edges: str | Path | None = None,
    features_file: str | Path | None = None,
    undirected: bool = False,
    max_features: int | None = None,
) -> Data:
    """Read a graph with N nodes, E edges and F features.

    ``.npz`` holds the arrays ``edge_index`` [2, E] (integers); ``x`` [N, F], or the same as a sparse matrix in
    ``x_indptr`` [N + 1], ``x_indices``, ``x_shape`` (N, F) and ``x_data`` (left out: all ones); ``y`` [N] (classes
    from 0) or [N, C] (0 or 1, multi-label); optionally ``split`` [N] (0 training, 1 validation, 2 test) or
    ``train_mask``, ``val_mask``, ``test_mask`` [N]; optionally ``edge_weight`` [E], ``edge_attr`` [E, D],
    ``edge_type`` [E]. Other names are not read; one that looks like a slip (``edge_weights``) is refused.

    ``.pt`` is a PyG ``Data`` with the same attributes (no sparse ``x``, no ``split``), saved with ``torch.save``.

    ``.csv`` and ``.parquet`` are a table of nodes and need ``edges``, a table of either kind. Nodes: ``id`` (integers
    or strings; left out: the row number), ``y`` or ``label``, optionally ``split`` (train, val, test or 0, 1, 2); all
    other columns are features, in order. Edges: ``source`` and ``target`` (ids), optionally ``weight``; all other
    columns form ``edge_attr``.

    Args:
        path: The file; its ending says which kind it is.
        edges: The table of edges, for a table of nodes.
        features_file: A ``.npy`` file of ``x``, which the other file has none of then. It is memory-mapped, so that it
            may be larger than the memory: pass ``keep=False`` to loaders of it.
        undirected: Add the reverse of every edge, with the same edge attributes, and keep one edge per ordered pair:
            the first in the file.
        max_features: Keep the first columns of ``x`` only.

    Returns:
        ``x`` float32, ``edge_index``, ``y``, and where the file has them the masks and edge attributes.

    Example:
        >>> import numpy as np
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp()) / "tiny.npz"
        >>> np.savez(file, edge_index=[[0, 1], [1, 2]], x=np.eye(3), y=[0, 1, 1])
        >>> load_file(file, undirected=True)
        Data(x=[3, 3], edge_index=[2, 4], y=[3])
    """
    path, kind = Path(path), Path(path).suffix.lower()
    some = max_features is None or max_features >= 1
    _need(some, "max_features must be at least 1", str(max_features), "Leave it out to keep all.")
    paired = edges is None if kind not in TABLES else edges is not None and Path(edges).suffix.lower() in TABLES
    rule = "a node table (.csv, .parquet) comes with a table of edges, and no other file does"
    _need(paired, rule, f"{path.name} and edges={edges}", "Pass edges= with a node table, and only then.")
    arrays = _read(path) if edges is None else _tables(_read(path), _read(Path(edges)))
    if features_file is not None:
        given = ", ".join(name for name in arrays if name == "x" or name in SPARSE)
        _need(not given, "x comes from one file", f"features_file and {given} in {path.name}", "Leave one out.")
        arrays["x"] = _mapped(Path(features_file))
    return _assemble(arrays, undirected, max_features)


def check_data(data: Data, *, splits: Iterable[str] = ("train",)) -> None:
    """Refuse data that cannot be trained on, before any work is done.

    Args:
        data: N nodes and E edges: ``edge_index`` [2, E] int64 within range; ``x`` [N, F] floating and finite; ``y`` [N]
            integer from 0, or [N, C] bool or floating, 0 or 1; masks [N] bool; edge attributes of E finite rows.
        splits: Those of "train", "val" and "test" that need at least one node.

    Example:
        >>> x, y = torch.ones(2, 1), torch.tensor([0, 1])
        >>> check_data(Data(x=x, y=y, edge_index=torch.tensor([[0], [5]])))
        Traceback (most recent call last):
        ...
        gnnautoscale.errors.InputError: edge_index must name nodes 0 to 1, but got 0 to 5. Number the nodes from 0.
    """
    _check_graph(data)
    for split in splits:
        mask = getattr(data, f"{split}_mask", None)
        fix = f"Set data.{split}_mask to a bool tensor that is True for the {split} nodes."
        _need(mask is not None and bool(mask.any()), f"{split}_mask must hold at least one node", "none", fix)


def _check_graph(data: Data) -> None:
    """All of `check_data` that does not need a split."""
    values: dict[str, Any] = {name: getattr(data, name, None) for name in PLAIN}
    for name, value in values.items():
        dense = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0
        optional = value is None and name not in REQUIRED
        _need(dense or optional, f"{name} must be a dense tensor", _form(value), f"Set data.{name} to one.")
    edge_index, x, y = (values[name] for name in REQUIRED)
    n, num_edges = x.size(0), edge_index.size(-1)
    floating = x.dim() == 2 and x.is_floating_point()
    _need(floating, "x must be floating, [nodes, features]", _form(x), "Use x.float(), one row per node.")
    _check_finite("x", x)
    pairs = edge_index.shape == (2, num_edges) and edge_index.dtype == torch.int64
    _need(pairs, "edge_index must be int64, [2, edges]", _form(edge_index), "Row 0 is the sources, row 1 the targets.")
    if num_edges > 0:
        low, high = (int(end) for end in torch.aminmax(edge_index))
        rule = f"edge_index must name nodes 0 to {n - 1}"
        _need(low >= 0 and high < n, rule, f"{low} to {high}", "Number the nodes from 0.")
    whole = not y.is_floating_point() and y.dtype != torch.bool
    classes = y.shape == (n,) and whole and bool((y >= 0).all())
    labels = y.dim() == 2 and y.size(0) == n and not whole and bool(((y == 0) | (y == 1)).all())
    rule = f"y must be integers from 0, [{n}], or 0 and 1 as bool or float, [{n}, labels]"
    got = _form(y) if y.numel() == 0 else f"{_form(y)} from {y.min().item()} to {y.max().item()}"
    _need(classes or labels, rule, got, "Give one row per node, classes from 0; use y.squeeze(1) if y is [nodes, 1].")
    present = {name: value for name, value in values.items() if value is not None}
    for name, mask in ((name, present[name]) for name in MASKS if name in present):
        fits = mask.dtype == torch.bool and mask.shape == (n,)
        _need(fits, f"{name} must be bool, [{n}]", _form(mask), "Give one True or False per node.")
    for name, value in ((name, present[name]) for name in EDGE_LEVEL if name in present):
        rule = f"{name} must have one row for each of the {num_edges} edges"
        _need(value.size(0) == num_edges, rule, _form(value), "Keep the order of edge_index.")
        _check_finite(name, value)


def _check_finite(name: str, value: Tensor) -> None:
    if value.numel() > 0 and not bool(torch.isfinite(torch.stack(torch.aminmax(value))).all()):
        bad = ~torch.isfinite(value)
        got = f"{int(bad.sum())} values that are NaN or infinite, the first in row {int(bad.nonzero()[0, 0])}"
        raise InputError(f"{name} must be finite", got=got, fix="Fill in or remove them.")


def _need(holds: bool, rule: str, got: str, fix: str) -> None:
    if not holds:
        raise InputError(rule, got=got, fix=fix)


def _form(value: object) -> str:
    return f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _read(path: Path) -> dict[str, _Array]:
    """The arrays of a file, or the columns of a table, by name."""
    readers = {".npz": _archive, ".pt": _saved, ".csv": _csv, ".parquet": _parquet}
    kind = path.suffix.lower()
    _need(kind in readers, f"a graph file ends in {', '.join(readers)}", str(path), "Save it as one of these.")
    try:
        return readers[kind](path)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make its reader raise almost anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "Check the path, or write the file again."
        raise InputError(f"{path} must be a readable {kind} file", got=reason, fix=fix) from error


def _mapped(path: Path) -> _Array:
    """An array on disk, of which the system reads what is used; writing to it changes a copy in memory."""
    try:
        array: _Array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            "features_file must be a readable .npy file", got=f"{path} ({error})", fix="Write it with numpy.save."
        ) from None
    _need(array.dtype == np.float32, "features_file must hold float32", str(array.dtype), "Convert it once.")
    return array


def _archive(path: Path) -> dict[str, _Array]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in _known(path, archive.files, ARCHIVE)}


def _saved(path: Path) -> dict[str, _Array]:
    fix = "Save a torch_geometric.data.Data with torch.save(data, path)."
    try:
        with torch.serialization.safe_globals(DATA_PARTS):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        needs = re.search(r"GLOBAL (\S+)", str(error))
        if needs is None:
            raise
        rule = f"{path} must not need code to be run when it is opened"
        raise InputError(rule, got=f"a pickled {needs[1]}", fix=fix) from error
    _need(isinstance(saved, Data), f"{path} must hold a PyG Data", f"a {type(saved).__name__}", fix)
    values = {name: saved[name] for name in _known(path, saved.keys(), PLAIN)}
    for name, value in values.items():
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        _need(dense, f"{name} must be a dense tensor", f"a {type(value).__name__}", fix)
        plain = value.detach().as_subclass(Tensor)
        values[name] = (plain.float() if plain.is_floating_point() else plain).numpy()
    return values


def _csv(path: Path) -> dict[str, _Array]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        names = [name.strip() for name in next(csv.reader([file.readline()]), [])]
        distinct = 0 < len(names) == len(set(names))
        _need(distinct, f"{path} must start with a line of distinct column names", str(names), "Add it.")
        types = [(name, "O" if name in TEXT else "f8") for name in names]
        with warnings.catch_warnings():
            # A table without rows is judged later: it is no graph, but it can be an edge table.
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
    missing = sum(table[name].null_count for name in table.column_names)
    _need(missing == 0, f"{path} must have a value in every cell", f"{missing} without", "Fill them in.")
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return {name: column.astype(str) if column.dtype.kind == "O" else column for name, column in columns.items()}


def _tables(nodes: dict[str, _Array], edges: dict[str, _Array]) -> dict[str, _Array]:
    """A node table and an edge table as arrays of a graph."""
    labels = [name for name in nodes if name in ("y", "label")]
    features = [name for name in nodes if name not in ("id", "y", "label", "split")]
    whole = len(labels) == 1 and len(features) > 0 and {"source", "target"} <= edges.keys()
    rule = "nodes need one of y and label, and features, and edges need source and target"
    _need(whole, rule, f"{', '.join(nodes)}, and {', '.join(edges)}", "Name the columns so.")
    ids = _ids(nodes["id"]) if "id" in nodes else np.arange(nodes[labels[0]].size)
    arrays = {"edge_index": np.stack([_places(ids, _ids(edges[end])) for end in ("source", "target")])}
    arrays["x"] = np.stack([_floats(name, nodes[name]) for name in features], axis=1)
    arrays["y"] = _integers(labels[0], nodes[labels[0]])
    if "split" in nodes:
        split = nodes["split"].astype(str)
        names = [split == name for name in ("train", "val", "test")]
        arrays["split"] = _integers("split", np.select(names, ["0", "1", "2"], split))
    if "weight" in edges:
        arrays["edge_weight"] = edges["weight"]
    attributes = [_floats(name, edges[name]) for name in edges if name not in ("source", "target", "weight")]
    if attributes:
        arrays["edge_attr"] = np.stack(attributes, axis=1)
    return arrays


def _ids(column: _Array) -> _Array:
    """Ids as integers where all of them are, else as text."""
    try:
        return _integers("id, source and target", column)
    except InputError:
        if column.dtype.kind == "U":
            return column
        raise


def _places(ids: _Array, wanted: _Array) -> _Array:
    """The row of each wanted id in the node table."""
    if ids.dtype.kind != wanted.dtype.kind:
        ids, wanted = ids.astype(str), wanted.astype(str)
    order = np.argsort(ids, kind="stable")
    known = ids[order]
    _need(known.size > 0, "a node table needs at least one row", "none", "Check that the file is complete.")
    twice = known[1:][known[1:] == known[:-1]]
    _need(twice.size == 0, "node ids must be distinct", f"twice {twice[:1]}", "Give every node its own.")
    place = np.minimum(np.searchsorted(known, wanted), known.size - 1)
    unknown = wanted[known[place] != wanted]
    got = f"{unknown.size} unknown ids, the first {unknown[:1]}"
    _need(unknown.size == 0, "edges must name ids of the node table", got, "Add the nodes or drop the edges.")
    return order[place]


def _assemble(arrays: dict[str, _Array], undirected: bool, max_features: int | None) -> Data:
    """The arrays as checked ``Data`` of the library's types."""
    if any(name in arrays for name in (*SPARSE, "x_data")):
        whole = all(name in arrays for name in SPARSE) and "x" not in arrays
        _need(whole, f"sparse x is {', '.join(SPARSE)}", ", ".join(arrays), "Give all three, and no x.")
        arrays["x"] = _dense(arrays, max_features)
    missing = ", ".join(name for name in REQUIRED if name not in arrays)
    _need(not missing, f"a graph file needs {missing}", ", ".join(arrays) or "nothing", "Add it.")
    masks = [name for name in MASKS if name in arrays]
    one = len(masks) == 0 or (len(masks) == 3 and "split" not in arrays)
    _need(one, "a split is either split or all three masks", ", ".join(arrays), "Give one of them, or none.")
    convert = {"edge_index": _integers, "edge_type": _integers, "x": _floats, "edge_weight": _floats}
    convert |= {"edge_attr": _floats, "split": _integers, "y": _floats if arrays["y"].ndim == 2 else _integers}
    values = {name: to(name, arrays[name]) for name, to in convert.items() if name in arrays}
    values["x"] = values["x"][..., :max_features]
    for name in masks:
        _need(bool(np.isin(arrays[name], (0, 1)).all()), f"{name} must be True or False", "others", "Save it as bool.")
        values[name] = arrays[name].astype(np.bool_)
    if "split" in values:
        split = values.pop("split")
        _need(bool(np.isin(split, (0, 1, 2)).all()), "split must be 0, 1 or 2", "other values", "0 is for training.")
        values |= {name: split == number for number, name in enumerate(MASKS)}
    data = Data(**{name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()})
    _check_graph(data)
    _need(data.x.size(0) > 0, "a graph needs at least one node", "none", "Check that the file is complete.")
    return _both_ways(data) if undirected else data


def _dense(arrays: dict[str, _Array], max_features: int | None) -> _Array:
    """The sparse rows as a dense matrix, cut to ``max_features`` columns before it is made."""
    indptr, indices, shape = (_integers(name, arrays[name]) for name in SPARSE)
    data = arrays.get("x_data")
    fits = shape.shape == (2,) and indptr.shape == (shape[0] + 1,) and indices.shape == (indptr[-1],)
    fits = bool(fits and indptr[0] == 0 and (np.diff(indptr) >= 0).all())
    fits = bool(fits and ((indices >= 0) & (indices < shape[1])).all() and (data is None or data.size == indices.size))
    fix = "Save the parts of a scipy.sparse.csr_array."
    _need(fits, "sparse x must be a compressed sparse row matrix", "arrays that contradict each other", fix)
    keep = indices < (shape[1] if max_features is None else max_features)
    row = np.repeat(np.arange(shape[0]), np.diff(indptr))[keep]
    value = np.ones(row.size, dtype=np.float32) if data is None else _floats("x_data", data)[keep]
    x = torch.zeros(int(shape[0]), min(int(shape[1]), max_features or int(shape[1])))
    where = (torch.from_numpy(row), torch.from_numpy(indices[keep]))
    return x.index_put_(where, torch.from_numpy(value), accumulate=data is not None).numpy()


def _both_ways(data: Data) -> Data:
    """Add reverse edges; of several edges between an ordered pair of nodes, the first stays."""
    edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
    key = edge_index[0] * data.num_nodes + edge_index[1]
    first = torch.from_numpy(np.unique(key.numpy(), return_index=True)[1])
    for name in EDGE_LEVEL:
        if name in data:
            data[name] = torch.cat([data[name], data[name]])[first]
    data.edge_index = edge_index[:, first].contiguous()
    return data


def _known(path: Path, found: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """The names to read; others may stand beside them, but not such as look like a slip of the pen."""
    slips = [name for name in found if name not in known and difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
    _need(not slips, f"{path} is read for {', '.join(known)}", ", ".join(slips), "Rename or remove it.")
    return [name for name in found if name in known]


def _integers(name: str, column: _Array) -> _Array:
    try:
        if column.dtype.kind in "iuU":
            return column.astype(np.int64)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name} must be integers", got=str(error), fix="Number them from 0.") from error
    raise InputError(f"{name} must be integers", got=f"type {column.dtype}", fix="Save them as int64.")


def _floats(name: str, column: _Array) -> _Array:
    _need(column.dtype.kind in "fiub", f"{name} must be numbers", f"type {column.dtype}", "Convert or drop it.")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and that is refused
        return column.astype(np.float32, copy=False)
