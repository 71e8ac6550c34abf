"""Reads a user's own graph: NumPy archives, saved PyG data, CSV and Parquet tables.

Reading never runs code: archives are opened without pickle, and a saved object may be nothing but a PyG ``Data`` of
tensors. This module converts types and refuses what it cannot convert. ``Graph`` checks what the values mean, and the
task checks targets and splits.
"""

import difflib
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr  # type: ignore[import-untyped]
from torch_geometric.data.storage import AttrType, GlobalStorage  # type: ignore[import-untyped]

from gnnautoscale._util import checked, damage_in, open_npz, ordinary, reason_of
from gnnautoscale.data.columns import Array, class_names, floats, integers, need, numbers, splits
from gnnautoscale.data.tables import OF_EDGES, OF_NODES, TABLES, join_tables, read_table
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph

MASKS = ("train_mask", "val_mask", "test_mask")
EDGE_LEVEL = ("edge_weight", "edge_attr", "edge_type")
PLAIN = ("edge_index", "x", "y", *MASKS, *EDGE_LEVEL, "edge_split", "graph_id", "graph_split")
SPARSE = ("x_indptr", "x_indices", "x_shape")
TRIPLES = ("train", "valid", "test")
ARCHIVE = (*PLAIN, "split", *SPARSE, "x_data", *TRIPLES, "num_nodes", "ptr", "node_tag")

# The parts of a pickled `Data`: PyG registers `Data` itself with `torch.load`, but not these.
DATA_PARTS: list[Any] = [AttrType, DataEdgeAttr, DataTensorAttr, GlobalStorage]


class Names(NamedTuple):
    """What a file calls the nodes and the classes of a graph."""

    nodes: Array | None = None
    """The id of each node; ``None`` if these are its numbers."""
    classes: tuple[str, ...] = ()
    """The name of each class; none if these are its numbers."""


def read_graph(path: str | Path, **options: Any) -> Data:
    """The graph that :func:`read_named_graph` reads, without names."""
    return read_named_graph(path, **options)[0]


@checked(max_features={"least": 1, "fix": "Leave it out to keep all."})
def read_named_graph(
    path: str | Path,
    *,
    edges: str | Path | None = None,
    features_file: str | Path | None = None,
    undirected: bool = False,
    max_features: int | None = None,
) -> tuple[Data, Names]:
    """Read a graph and whatever targets, splits and names stand beside it; see `from_file` for formats and arguments.

    ``x`` is float32 and ``edge_index`` int64; ``y``, masks and edge attributes are there if the file has them.
    """
    path, kind = Path(path), Path(path).suffix.lower()
    some = max_features is None or max_features >= 1
    need(some, "max_features must be at least 1", str(max_features), "Leave it out to keep all.")
    paired = edges is None if kind not in TABLES else edges is not None and Path(edges).suffix.lower() in TABLES
    rule = "a table of nodes (.csv, .parquet) comes with a table of edges, and no other file does"
    got = f"{path.name} and {'no edges' if edges is None else edges}"
    need(paired, rule, got, "Pass it as edges= or --edges; other files hold their edges.")
    arrays = read_arrays(path)
    if edges is not None:
        arrays = join_tables(arrays, read_arrays(Path(edges), OF_EDGES))
    if features_file is not None:
        given = ", ".join(name for name in arrays if name == "x" or name in SPARSE)
        need(not given, "x comes from one file", f"features_file and {given} in {path.name}", "Leave one out.")
        arrays["x"] = _mapped(Path(features_file))
    names = Names(arrays.pop("id", None), class_names("y", arrays["y"]) if "y" in arrays else ())
    data = _assemble(arrays, max_features)
    return _both_ways(data) if undirected else data, names


# Readers #############################################################################################################


def read_arrays(path: Path, meanings: dict[str, tuple[str, ...]] = OF_NODES) -> dict[str, Array]:
    """Read the arrays of a file, or the columns of a table, whose names have ``meanings``, by name."""
    readers: dict[str, Callable[[Path], dict[str, Array]]] = {".npz": _archive, ".pt": _saved}
    readers |= dict.fromkeys(TABLES, partial(read_table, meanings=meanings))
    kind = path.suffix.lower()
    need(kind in readers, f"a graph file ends in {', '.join(readers)}", str(path), "Save it as one of these.")
    try:
        return readers[kind](ordinary(path))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make its reader raise almost anything
        # The first sentence: NumPy goes on to advise unsafe loading.
        reason = reason_of(error).partition(". ")[0].rstrip(".")
        fix = "Check the path, or write the file again."
        raise InputError(f"{path} must be a readable {kind} file", got=reason, fix=fix) from error


def _mapped(path: Path) -> Array:
    """Map an array on disk, copy-on-write: pages load as they are used, and writes never reach the file."""
    try:
        array: Array = np.load(ordinary(path), mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        got, fix = f"{path} ({reason_of(error)})", "Write it with numpy.save."
        raise InputError("features_file must be a readable .npy file", got=got, fix=fix) from None
    need(array.dtype == np.float32, "features_file must hold float32", str(array.dtype), "Convert it once.")
    return array


def _archive(path: Path) -> dict[str, Array]:
    with open_npz(path) as archive:
        fix = "Read it with gnnautoscale.data.open_file."
        need("node_types" not in archive.files, f"{path} must hold a plain graph", "a heterogeneous one", fix)
        return {name: archive[name] for name in _known(path, archive.files, ARCHIVE)}


def _saved(path: Path) -> dict[str, Array]:
    saved = load_saved(path, Data, DATA_PARTS)
    values = {name: saved[name] for name in _known(path, saved.keys(), PLAIN)}
    return {name: plain_tensor(name, value).numpy() for name, value in values.items()}


def load_saved(path: Path, kind: type[Any], parts: list[Any]) -> Any:
    """Open a saved PyG object of a class without running code; its pickle may hold ``parts`` besides tensors."""
    fix = f"Save a torch_geometric.data.{kind.__name__} with torch.save(data, path)."
    rule, damage = f"{path} must be as it was saved", damage_in(path)
    need(damage is None, rule, damage or "", fix)
    try:
        with _allowing(parts):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        needs = re.search(r"GLOBAL (\S+)", str(error))
        if needs is None:
            raise InputError(rule, got="no file of torch.save", fix=fix) from error
        raise InputError(f"{path} must open without running code", got=f"a pickled {needs[1]}", fix=fix) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what PyTorch raises for files of others says nothing to their owners
        raise InputError(rule, got="no file of torch.save", fix=fix) from error
    need(isinstance(saved, kind), f"{path} must hold a PyG {kind.__name__}", f"a {type(saved).__name__}", fix)
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
    need(is_dense, f"{name} must be a dense tensor", f"a {type(value).__name__}", "Save it as one.")
    plain: Tensor = value.detach().as_subclass(Tensor)
    return plain.float() if plain.is_floating_point() else plain


def _known(path: Path, found: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """Select the names to read. Unknown names are ignored unless they look like a misspelt one."""
    typos = [name for name in found if name not in known and difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
    need(not typos, f"{path} is read for {', '.join(known)}", ", ".join(typos), "Rename or remove it.")
    return [name for name in found if name in known]


# Assembly ############################################################################################################


def _assemble(arrays: dict[str, Array], max_features: int | None) -> Data:
    """Convert arrays to a ``Data`` of the library's types."""
    if any(name in arrays for name in TRIPLES):
        arrays = _of_triples(arrays)
    if any(name in arrays for name in (*SPARSE, "x_data")):
        complete = all(name in arrays for name in SPARSE) and "x" not in arrays
        need(complete, f"sparse x is {', '.join(SPARSE)}", ", ".join(arrays), "Give all three, and no x.")
        arrays["x"] = dense(arrays, max_features)
    _mark_graphs(arrays)
    missing = ", ".join(name for name in ("edge_index", "x") if name not in arrays)
    need(not missing, f"a graph file needs {missing}", ", ".join(arrays) or "nothing", "Add it.")
    masks = [name for name in MASKS if name in arrays]
    one = len(masks) == 0 or (len(masks) == 3 and "split" not in arrays)
    need(one, "a split is either split or all three masks", ", ".join(arrays), "Give one of them, or none.")
    convert = {"edge_index": integers, "edge_type": integers, "y": numbers, "split": splits, "edge_split": splits}
    convert |= {"graph_id": integers, "graph_split": splits, "graph_y": numbers}
    convert |= {"x": floats, "edge_weight": floats, "edge_attr": floats}
    values = {name: to(name, arrays[name]) for name, to in convert.items() if name in arrays}
    need(values["x"].ndim > 0, "x must have a row for each node", "one number", "Save an array of rows.")
    values["x"] = values["x"][..., :max_features]
    for name in masks:
        need(bool(np.isin(arrays[name], (0, 1)).all()), f"{name} must be True or False", "others", "Save it as bool.")
        values[name] = arrays[name].astype(np.bool_)
    for name in ("split", "edge_split", "graph_split"):
        if name in values:
            rule = f"{name} must be 0 (training), 1 (validation), 2 (test), or 3 or -1 (none)"
            others = np.unique(values[name][~np.isin(values[name], (-1, 0, 1, 2, 3))])
            need(others.size == 0, rule, ", ".join(map(str, others[:3])), "Use one of these.")
    if "split" in values:
        split = values.pop("split")
        values |= {name: split == number for number, name in enumerate(MASKS)}
    return Data(**{name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()})


def _mark_graphs(arrays: dict[str, Array]) -> None:
    """Name what belongs to whole graphs, if the file holds several with a target for each; tags become features."""
    if "node_tag" in arrays:
        tag = integers("node_tag", arrays.pop("node_tag"))
        need(
            "x" not in arrays and tag.ndim == 1 and tag.min(initial=0) >= 0, "node_tag stands for x", "both", "Drop x."
        )
        arrays["x"] = np.eye(int(tag.max(initial=0)) + 1, dtype=np.float32)[tag]
    if "ptr" in arrays:
        first = integers("ptr", arrays.pop("ptr"))
        fits = first.ndim == 1 and first.size > 1 and first[0] == 0 and bool((np.diff(first) > 0).all())
        need(
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


def _of_triples(arrays: dict[str, Array]) -> dict[str, Array]:
    """A knowledge graph, whose edges have types and splits, as the arrays of a graph; nodes have no features but 1."""
    complete = set(TRIPLES) <= arrays.keys() and "num_nodes" in arrays and "edge_index" not in arrays
    rule = f"a knowledge graph is {', '.join(TRIPLES)} and num_nodes"
    need(complete, rule, ", ".join(arrays), "Give all of them, and no edge_index.")
    triples = [integers(name, arrays.pop(name)) for name in TRIPLES]
    form = all(each.ndim == 2 and each.shape[1] == 3 for each in triples)
    shapes = ", ".join(str(list(each.shape)) for each in triples)
    need(form, "triples must be [n, 3]: source, relation, target", shapes, "Transpose them.")
    source, relation, target = np.concatenate(triples).T
    made = {"edge_index": np.stack([source, target]), "edge_type": relation}
    made["edge_split"] = np.repeat([0, 1, 2], [len(each) for each in triples])
    count = int(integers("num_nodes", arrays.pop("num_nodes")))
    return {"x": np.ones((count, 1), dtype=np.float32), **made, **arrays}


def dense(arrays: dict[str, Array], max_features: int | None, name: str = "x") -> Array:
    """Convert sparse rows to a dense matrix of at most ``max_features`` columns."""
    indptr, indices, shape = (integers(name, arrays[name]) for name in SPARSE)
    data = arrays.get("x_data")
    fits = shape.shape == (2,) and indptr.shape == (shape[0] + 1,) and indices.shape == (indptr[-1],)
    fits = bool(fits and indptr[0] == 0 and (np.diff(indptr) >= 0).all())
    fits = bool(fits and ((indices >= 0) & (indices < shape[1])).all() and (data is None or data.size == indices.size))
    fix = "Save the parts of a scipy.sparse.csr_array."
    need(fits, f"sparse {name} must be a compressed sparse row matrix", "arrays that contradict each other", fix)
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
