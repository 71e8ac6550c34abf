"""Where the data sets come from that have a name: PyG's and OGB's files, with the paper's splits, and generators."""

from __future__ import annotations

import importlib
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_geometric import datasets as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.utils import index_to_mask, to_undirected  # type: ignore[import-untyped]

from gnnautoscale.data import files, generate
from gnnautoscale.errors import InputError

# Where a module's package has another name.
_PACKAGES = {"sklearn": "scikit-learn", "yaml": "pyyaml", "PIL": "pillow", "cv2": "opencv-python"}


def _read(make: Callable[[], Any], folder: Path) -> Any:
    """Call ``make``, which reads or downloads a data set below ``folder``, and explain its errors."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        return make()
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        fix = f"Run: pip install {_PACKAGES.get(module, module)}" if module else "Install it."
        raise InputError("PyG needs a package to read this data set", got=str(error), fix=fix) from error
    except (OSError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        if missing:  # folders made for a download that failed
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise InputError(
            f"the files of this data set must lie in {folder} or be available for download",
            got=f"{type(error).__name__}: {error}",
            fix="Put the complete raw files there, in the layout of PyG or OGB, or run this once with a network.",
        ) from error


def _planetoid(root: Path, split: int, seed: int, *, title: str) -> list[Data]:
    folder = root / "Planetoid"
    data = _read(lambda: pyg.Planetoid(str(folder), title)[0], folder / title)
    data.x = data.x / data.x.sum(dim=1, keepdim=True).clamp_min(torch.finfo(data.x.dtype).tiny)
    return [data]


def _few_labels(root: Path, split: int, seed: int, *, source: str, title: str) -> list[Data]:
    """Coauthor and Amazon: 20 training and 30 validation nodes per class, the rest for testing."""
    folder = root / source
    data = _read(lambda: getattr(pyg, source)(str(folder), title)[0], folder / title)
    order = torch.randperm(data.y.numel(), generator=torch.Generator().manual_seed(split))
    order = order[data.y[order].argsort(stable=True)]  # by class, in random order within each
    count = data.y.bincount()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel()) - (count.cumsum(0) - count)[data.y[order]]
    data.train_mask, data.val_mask, data.test_mask = rank < 20, (rank >= 20) & (rank < 50), rank >= 50
    return [data]


def _wiki_cs(root: Path, split: int, seed: int) -> list[Data]:
    folder = root / "WikiCS"
    data = _read(lambda: pyg.WikiCS(str(folder), is_undirected=True)[0], folder)
    if split >= data.train_mask.size(1):
        rule = f"wiki-cs has {data.train_mask.size(1)} splits"
        raise InputError(rule, got=f"split {split}", fix="Count splits from 0.")
    data.train_mask, data.val_mask = data.train_mask[:, split], data.val_mask[:, split]
    return [data]


def _own_split(root: Path, split: int, seed: int, *, source: str, standardize: bool) -> list[Data]:
    """Reddit, Flickr and Yelp, which come with masks."""
    folder = root / source
    data = _read(lambda: getattr(pyg, source)(str(folder))[0], folder)
    if standardize:  # mean 0 and deviation 1 on the training nodes; constant columns are only centred
        std, mean = torch.std_mean(data.x[data.train_mask], dim=0, correction=0)
        data.x = (data.x - mean) / torch.where(std > 0, std, torch.ones_like(std))
    return [data]


def _ppi(root: Path, split: int, seed: int) -> list[Data]:
    folder = root / "PPI"
    parts = ("train", "val", "test")
    return _inductive(_join(_read(partial(pyg.PPI, str(folder), split=part), folder)) for part in parts)


def _join(graphs: Iterable[Data]) -> Data:
    """Put several graphs side by side as one; ``graph_id`` [N] is the graph of each node."""
    batch = Batch.from_data_list(list(graphs))
    return Data(x=batch.x, edge_index=batch.edge_index, y=batch.y, graph_id=batch.batch)


def _inductive(graphs: Iterable[Data]) -> list[Data]:
    """Graphs for training, validation and test: each uses all of its nodes."""
    made = list(graphs)
    for data, mask in zip(made, files.MASKS, strict=True):
        data[mask] = torch.ones(data.x.size(0), dtype=torch.bool)
    return made


def _cluster(root: Path, split: int, seed: int, *, graphs: int = 10_000) -> list[Data]:
    counts = (graphs, max(1, graphs // 10), max(1, graphs // 10))
    return _inductive(generate.cluster(count, seed=3 * seed + part) for part, count in enumerate(counts))


def _pattern(root: Path, split: int, seed: int, *, graphs: int = 10_000) -> list[Data]:
    parts = enumerate((graphs, max(1, graphs // 5), max(1, graphs // 5)))
    return _inductive(generate.pattern(count, seed=3 * seed + part, pattern_seed=seed) for part, count in parts)


def _echoes(root: Path, split: int, seed: int, *, graphs: int = 16, nodes: int = 50_000) -> list[Data]:
    counts = enumerate((graphs, graphs, 2 * graphs))
    return [generate.echoes(count, num_nodes=nodes, seed=3 * seed + part) for part, count in counts]


def _communities(
    root: Path,
    split: int,
    seed: int,
    *,
    nodes: int = 10_000,
    degree: float = 10.0,
    features: int = 64,
    classes: int = 10,
    homophily: float = 0.8,
) -> list[Data]:
    sizes = {"num_features": features, "num_classes": classes}
    return [generate.communities(nodes, degree=degree, **sizes, homophily=homophily, seed=seed)]


def _districts(
    root: Path, split: int, seed: int, *, nodes: int = 100_000, degree: float = 8, features: int = 32, classes: int = 8
) -> list[Data]:
    if degree != int(degree):
        raise InputError("the degree of districts must be an integer", got=str(degree), fix="Round it.")
    return [generate.districts(nodes, degree=int(degree), num_features=features, num_classes=classes, seed=seed)]


def _ogbn(root: Path, split: int, seed: int, *, title: str) -> list[Data]:
    folder = root / "ogb"
    try:
        ogb = importlib.import_module("ogb.nodeproppred")
    except ImportError as error:
        fix = "Run: pip install ogb"
        raise InputError(f"{title} needs the package ogb", got="an environment without it", fix=fix) from error
    # OGB opens a saved `Data` with torch's defaults, and makes tensors of read-only pandas arrays.
    with torch.serialization.safe_globals(files.DATA_PARTS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        source = _read(lambda: ogb.PygNodePropPredDataset(title, root=str(folder)), folder / title.replace("-", "_"))
        data, index = source[0], source.get_idx_split()
    data.y = data.y.squeeze(1)
    for name, part in zip(files.MASKS, ("train", "valid", "test"), strict=True):
        data[name] = index_to_mask(index[part], size=data.y.numel())
    if title == "ogbn-arxiv":  # published in one direction only
        data.edge_index = to_undirected(data.edge_index, num_nodes=data.y.numel())
    return [data]


#: How to make the graphs of each data set, one or one for each split, from the root folder, a split and a seed.
SOURCES: dict[str, Callable[..., list[Data]]] = {
    "cora": partial(_planetoid, title="Cora"),
    "citeseer": partial(_planetoid, title="CiteSeer"),
    "pubmed": partial(_planetoid, title="PubMed"),
    "coauthor-cs": partial(_few_labels, source="Coauthor", title="CS"),
    "coauthor-physics": partial(_few_labels, source="Coauthor", title="Physics"),
    "amazon-computers": partial(_few_labels, source="Amazon", title="Computers"),
    "amazon-photo": partial(_few_labels, source="Amazon", title="Photo"),
    "wiki-cs": _wiki_cs,
    "cluster": _cluster,
    "pattern": _pattern,
    "reddit": partial(_own_split, source="Reddit", standardize=True),
    "ppi": _ppi,
    "flickr": partial(_own_split, source="Flickr", standardize=False),
    "yelp": partial(_own_split, source="Yelp", standardize=True),
    "ogbn-arxiv": partial(_ogbn, title="ogbn-arxiv"),
    "ogbn-products": partial(_ogbn, title="ogbn-products"),
    "communities": _communities,
    "districts": _districts,
    "echoes": _echoes,
}
