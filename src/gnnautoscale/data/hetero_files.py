"""Reads heterogeneous graphs from ``.npz`` files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError

_Arrays = Mapping[str, NDArray[Any]]
_SPLITS = ("train", "val", "test")
_SPARSE = ("indptr", "indices", "data", "shape")


def read_typed_graph(path: str | Path, *, undirected: bool = False) -> HeteroData:
    """Read a heterogeneous graph.

    Arrays of the file: ``node_types``, ``[types]``, and ``num_nodes``, ``[types]``; edges of each type as
    ``edges_A__R__B``, ``[2, num_edges]``, from nodes of type A by the relation R to nodes of type B; and for any type T
    features ``x_T``, dense or as the parts of a sparse matrix in rows, ``x_T_indptr``, ``x_T_indices``, ``x_T_data``,
    ``x_T_shape``; targets ``y_T``; and ``split_T``, 0 for training, 1 for validation, 2 for tests, 3 or -1 for none.

    Args:
        path: The file.
        undirected: Add the reverse of each type of edges as a type of its own, ``(B, rev_R, A)``.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp()) / "papers.npz"
        >>> edges = {"edges_author__writes__paper": [[0, 1], [2, 0]]}
        >>> np.savez(file, node_types=["author", "paper"], num_nodes=[2, 3], x_author=np.eye(2), **edges)
        >>> read_typed_graph(file, undirected=True).edge_types
        [('author', 'writes', 'paper'), ('paper', 'rev_writes', 'author')]
    """
    arrays = _opened(Path(path))
    for name in ("node_types", "num_nodes"):
        _need(name in arrays, f"{path} must have the array {name}", ", ".join(arrays) or "none")
    kinds, counts = arrays["node_types"].tolist(), arrays["num_nodes"].tolist()
    fits = isinstance(kinds, list) and isinstance(counts, list) and len(kinds) == len(counts) == len(set(kinds))
    fits = fits and all(isinstance(kind, str) for kind in kinds) and all(isinstance(count, int) for count in counts)
    _need(fits, "node_types must be distinct names, and num_nodes an integer for each", f"{kinds} and {counts}")
    graph, used = HeteroData(), {"node_types", "num_nodes"}
    for kind, count in zip(kinds, counts, strict=True):
        graph[kind].num_nodes = count
        for name, value in _of_nodes(arrays, kind, count).items():
            graph[kind][name] = value
        used |= {f"{name}_{kind}" for name in ("x", "y", "split")} | {f"x_{kind}_{part}" for part in _SPARSE}
    for name in (each for each in arrays if each.startswith("edges_")):
        ends = tuple(name.removeprefix("edges_").split("__"))
        known = len(ends) == 3 and ends[0] in kinds and ends[2] in kinds
        _need(known, f"{name} must be edges_A__R__B with types of nodes A and B", ", ".join(kinds))
        edges = arrays[name]
        form = edges.ndim == 2 and edges.shape[0] == 2 and edges.dtype.kind in "iu"
        _need(form, f"{name} must be integers, [2, num_edges]", f"{edges.dtype} {list(edges.shape)}")
        edge_index = torch.from_numpy(edges.astype(np.int64))
        graph[ends].edge_index = edge_index
        if undirected:
            graph[ends[2], f"rev_{ends[1]}", ends[0]].edge_index = edge_index.flip(0)
        used.add(name)
    unknown = sorted(arrays.keys() - used)
    _need(not unknown, f"{path} must have arrays of nodes and edges only", ", ".join(unknown))
    return graph


def _opened(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        fix = "Write it with numpy.savez."
        raise InputError(
            "a heterogeneous graph comes as a readable .npz file", got=f"{path} ({error})", fix=fix
        ) from None


def _of_nodes(arrays: _Arrays, kind: str, count: int) -> dict[str, Tensor]:
    """The attributes of a type of nodes."""
    found: dict[str, Tensor] = {}
    x = arrays.get(f"x_{kind}")
    if f"x_{kind}_indptr" in arrays:
        x = _dense(arrays, kind)
    if x is not None:
        form = x.ndim == 2 and x.shape[0] == count and x.dtype.kind in "fiub"
        _need(form, f"x_{kind} must be numbers, [{count}, features]", f"{x.dtype} {list(x.shape)}")
        found["x"] = torch.from_numpy(x.astype(np.float32))
    y = arrays.get(f"y_{kind}")
    if y is not None:
        form = y.ndim >= 1 and y.shape[0] == count and y.dtype.kind in "fiub"
        _need(form, f"y_{kind} must have a row for each of {count} nodes", f"{y.dtype} {list(y.shape)}")
        found["y"] = torch.from_numpy(y.astype(np.int64) if y.dtype.kind in "iu" else y.astype(np.float32))
    split = arrays.get(f"split_{kind}")
    if split is not None:
        form = split.shape == (count,) and split.dtype.kind in "iu" and bool(np.isin(split, (-1, 0, 1, 2, 3)).all())
        _need(form, f"split_{kind} must be 0, 1, 2, 3 or -1, [{count}]", f"{split.dtype} {list(split.shape)}")
        for number, name in enumerate(_SPLITS):
            found[f"{name}_mask"] = torch.from_numpy(split == number)
    return found


def _dense(arrays: _Arrays, kind: str) -> NDArray[Any]:
    parts = [arrays.get(f"x_{kind}_{part}") for part in _SPARSE]
    missing = [f"x_{kind}_{name}" for name, part in zip(_SPARSE, parts, strict=True) if part is None]
    _need(not missing, f"sparse features of {kind!r} need four arrays", f"no {', '.join(missing)}")
    indptr, indices, data, shape = parts
    try:
        matrix = csr_matrix((np.asarray(data, dtype=np.float32), indices, indptr), shape=np.asarray(shape).tolist())
        matrix.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        _need(False, f"sparse features of {kind!r} must be a matrix in rows", str(error))
    dense: NDArray[Any] = matrix.toarray()
    return dense


def _need(holds: bool, rule: str, got: str) -> None:
    if not holds:
        raise InputError(rule, got=got, fix="See the documentation of read_typed_graph.")
