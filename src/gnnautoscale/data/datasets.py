"""Data sets by name, with the paper's splits and preparation of features, and a user's own graph from a file.

Every graph that leaves this module is a plain ``Data`` with ``x`` [N, F] float32, ``edge_index`` [2, E], ``y`` ([N]
int64, or [N, C] float32 if a node has several labels) and ``train_mask``, ``val_mask``, ``test_mask`` [N]. Only a
user's file may lack ``y``, or hold other targets in it; many graphs have ``graph_id`` and ``graph_y`` instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import Option, checked, did_you_mean
from gnnautoscale.data import files, links
from gnnautoscale.data.many_graphs import split_graphs
from gnnautoscale.data.sources import SOURCES
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph


@checked()
@dataclass(frozen=True)
class Dataset:
    """What to train, validate and test on.

    Args:
        name: As given to `load`, or the name of the user's file.
        train: The graph to train on.
        val: The graph to validate on: the same object unless the data set is inductive.
        test: The graph to test on: likewise.
        names: What a file calls the nodes and classes.
        note: A sentence about what was done to a file's graph that its user should know; empty if nothing was.
        made_from: The options that it was made with, by name, as far as they are known; a run resumes on data that was
            made with the same ones.
    """

    name: str
    train: Data
    val: Data
    test: Data
    names: files.Names = field(default=files.Names(), kw_only=True, repr=False)
    note: str = field(default="", kw_only=True, repr=False)
    made_from: Mapping[str, Any] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    @staticmethod
    @checked()
    def of(data: Data, name: str = "data") -> Dataset:
        """Make a data set of a single graph.

        Example:
            >>> edges = torch.tensor([[0, 1], [1, 0]])
            >>> dataset = Dataset.of(Data(x=torch.eye(2), edge_index=edges, y=torch.tensor([0, 2])))
            >>> dataset.num_features, dataset.num_classes
            (2, 3)
        """
        return Dataset(name, data, data, data)

    @staticmethod
    @checked(seed={"least": 0})
    def of_graphs(graphs: Any, *, split: Tensor | None = None, seed: int = 0, name: str = "graphs") -> Dataset:
        """Make a data set of many graphs with a target each; those of a split are put side by side as one.

        Args:
            graphs: A list of ``Data``, one of PyG's data sets, or joined graphs: see
                :func:`~gnnautoscale.data.join_graphs`; or three lists for training, validation and test.
            split: The split of each graph, ``[num_graphs]``: 0, 1, 2, or 3 or -1 for none. By default that of joined
                graphs, ``graph_split`` or a mask for each split; else fold ``seed`` of ten, of which each has the same
                share of each class, is for tests, and the next one for validation.
            seed: Number of the fold.
            name: Name of the data set.

        Example:
            >>> pair = {"x": torch.ones(2, 1), "edge_index": torch.tensor([[0], [1]])}
            >>> graphs = [Data(**pair, y=torch.tensor([i % 2])) for i in range(20)]
            >>> [int(graph.graph_y.numel()) for graph, _ in Dataset.of_graphs(graphs).graphs()]
            [16, 2, 2]
        """
        dataset = Dataset(name, *split_graphs(graphs, split, seed))
        dataset.check()
        return dataset

    @property
    def inductive(self) -> bool:
        """Whether validation and test nodes are unseen in training."""
        return not self.train is self.val is self.test

    def passing(self, split: str = "train") -> Any:
        """The graph whose edges pass messages in a split, a ``Data`` or ``HeteroData``."""
        return {"train": self.train, "val": self.val, "test": self.test}[split]

    @property
    def targets(self) -> tuple[str, ...]:
        """The types of nodes that a model computes outputs for, of a heterogeneous graph."""
        return ()

    @property
    def num_features(self) -> int:
        """Columns of ``x``."""
        return int(self.train.x.size(1))

    @cached_property
    def num_classes(self) -> int:
        """Number of classes if ``y`` [N] holds classes from 0, or of columns if it is [N, C]."""
        if self.train.y.dim() == 2:
            return int(self.train.y.size(1))
        return max(int(graph.y.max()) for graph, _ in self.graphs()) + 1

    def graphs(self) -> list[tuple[Data, tuple[str, ...]]]:
        """Each graph once, with its splits: all three, or one if the data set is inductive."""
        found: dict[int, tuple[Data, tuple[str, ...]]] = {}
        for split, graph in (("train", self.train), ("val", self.val), ("test", self.test)):
            found[id(graph)] = graph, (*found.get(id(graph), (graph, ()))[1], split)
        return list(found.values())

    @checked(seed={"least": 0}, disjoint={"least": 0, "below": 1})
    def split_links(self, seed: int = 0, *, disjoint: float = 0.3, typed: bool = False) -> Dataset:
        """Hold edges of the only graph back, to predict them: 5 % for validation and 10 % for tests.

        If the graph has ``edge_split``, ``[num_edges]``, that says which: 0 for training, 1 for validation, 2 for
        tests, and 3 or -1 for edges that only pass messages.

        Of the training edges, a share of ``disjoint`` is trained on, and the rest passes messages; if some only pass
        messages, all others are trained on. All do both if ``disjoint`` is 0. Pairs have PyG's names,
        ``edge_label_index`` and ``edge_label``.

        Edges of any type count as the same, unless they are ``typed``: then their types are predicted as well, and
        messages also go backwards, as relations of their own, whose numbers follow.

        Example:
            >>> ring = torch.arange(100)
            >>> data = Data(x=torch.ones(100, 1), edge_index=torch.stack([ring, (ring + 1) % 100]))
            >>> dataset = Dataset.of(data).split_links()
            >>> dataset.train.edge_label.numel(), dataset.train.num_edges, dataset.test.num_edges
            (25, 60, 90)
        """
        if self.inductive:
            fix = "Split it yourself: pass three graphs to fit."
            raise InputError("links are split in one graph", got="several graphs", fix=fix)
        split = links.split_edges(self.train, seed, disjoint=disjoint, typed=typed)
        return Dataset(self.name, *split, made_from=self.made_from)

    def check(self) -> None:
        """Refuse graphs that no model can be trained on; targets and splits are checked by the task.

        Example:
            >>> Dataset.of(Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [5]]))).check()
            Traceback (most recent call last):
            ...
            gnnautoscale.errors.InputError: edge_index must hold indices from 0 to 1, but got values from 0 to 5...
        """
        for graph, splits in self.graphs():
            x = getattr(graph, "x", None)
            if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
                raise InputError(
                    "x must be floating, [nodes, features]",
                    got=f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}",
                    fix="Use x.float(), one row per node.",
                )
            Graph.of(graph)
            if x.size(1) != self.num_features:
                raise InputError(
                    f"all graphs of a data set must have {self.num_features} features",
                    got=f"{x.size(1)} in the {splits[0]} graph",
                    fix="Prepare all graphs in the same way.",
                )


@checked(split={"least": 0}, seed={"least": 0, "below": 2**32})
def load(name: str, root: str | Path = "data", *, split: int = 0, seed: int = 0, **options: Any) -> Dataset:
    """Load or generate a data set by name.

    Files are looked up below ``root`` where PyG and OGB put them (``root/Planetoid``, ``root/Amazon``, ``root/ogb``,
    ...), and downloaded if they are missing.

    Args:
        name: One of `names`, in upper or lower case.
        root: The folder of all data sets.
        split: Which of several splits: a random one with this seed for Coauthor and Amazon (20 training and 30
            validation nodes per class); one of the 20 published ones for Wiki-CS. All others have one split and ignore
            it.
        seed: For generated data: ``cluster``, ``pattern``, ``communities``, ``districts``, ``echoes``.
        options: ``graphs`` (training graphs) for ``cluster``, ``pattern`` and ``echoes``; ``nodes`` (of each graph) for
            ``echoes``; ``nodes``, ``degree``, ``features``, ``classes`` and ``homophily`` for ``communities``;
            ``nodes``, ``degree``, ``features`` and ``classes`` for ``districts``.

    Example:
        >>> dataset = load("cluster", graphs=10)
        >>> dataset.inductive, dataset.num_features, dataset.num_classes, int(dataset.val.graph_id.max()) + 1
        (True, 7, 6, 1)
    """
    key = name.lower()
    if key not in SOURCES:
        fix = did_you_mean(key, SOURCES, "For a graph of your own, name its file (--data graph.npz), or use from_file.")
        raise InputError(f"a data set is one of {', '.join(SOURCES)}", got=name, fix=fix)
    known = getattr(SOURCES[key], "__kwdefaults__", None) or {}  # those of generators
    unknown = [option for option in options if option not in known]
    if unknown:
        fix = f"Choose from {', '.join(known)}." if known else "Leave it out."
        raise InputError(f"{key} has {len(known) or 'no'} options", got=", ".join(unknown), fix=fix)
    for option, default in known.items():
        if option in options:
            options[option] = Option(option, type(default), least=1 if isinstance(default, int) else 0).check(
                options[option]
            )
    graphs = [_plain(data) for data in SOURCES[key](root=Path(root), split=split, seed=seed, **options)]
    return Dataset(key, graphs[0], graphs[len(graphs) // 2], graphs[-1])


def names() -> tuple[str, ...]:
    """All names that `load` knows.

    Example:
        >>> "cora" in names()
        True
    """
    return tuple(SOURCES)


@checked(split={"least": 0}, max_features={"least": 1, "fix": "Leave it out to keep all."})
def from_file(
    path: str | Path,
    *,
    edges: str | Path | None = None,
    features_file: str | Path | None = None,
    undirected: bool = False,
    max_features: int | None = None,
    split: int = 0,
    split_ratio: Sequence[float] | None = None,
) -> Dataset:
    """Read a graph of N nodes, E edges and F features from a user's file, to train, validate and test on.

    ``.npz`` holds the arrays ``edge_index`` [2, E] (integers) and ``x`` [N, F], which may be a sparse matrix instead:
    ``x_indptr`` [N + 1], ``x_indices``, ``x_shape`` (N, F) and ``x_data`` (all ones if left out). Edges may have
    ``edge_weight`` [E], ``edge_attr`` [E, D] and ``edge_type`` [E]. The task says what else it needs; for nodes that
    is ``y``: classes [N] (integers from 0, -1 if unknown), labels [N] or [N, C] (0 or 1 as bool or float, NaN if
    unknown) or numbers [N] or [N, T] (floats, NaN if unknown); and optionally a split: ``split`` [N] (0 training, 1
    validation, 2 test, 3 or -1 none of them; or the words train, val, test, none), or ``train_mask``, ``val_mask`` and
    ``test_mask`` [N]. To predict edges, ``edge_split`` [E] says the same of them, where 3 and -1 are edges that only
    pass messages. Several graphs have ``graph_id`` [N], or ``ptr`` [G + 1], the first node of each; then ``y`` and
    ``split`` may be theirs, of G rows. ``node_tag`` [N] (integers) stands for ``x``, a column for each value. Other
    names are ignored; one that looks like a typo (``edge_weights``) is refused. A knowledge graph may be ``train``,
    ``valid`` and ``test`` [n, 3] instead (source, relation, target), and ``num_nodes``; its nodes have no features but
    a one.

    ``.pt`` is a PyG ``Data`` with the same attributes (no sparse ``x``, no ``split``), saved with ``torch.save``.

    ``.csv`` and ``.parquet`` are a table of nodes and need ``edges``, a table of either kind. Nodes: ``id`` (integers
    or strings; the row number if left out), ``y`` (empty if unknown; also called label, labels, class or target),
    ``split`` (train, val, test, none or empty, or numbers as above), ``graph`` (ids; then ``y`` and ``split`` are those
    of the node's graph); all other columns are features, in order. Edges: ``source`` and ``target`` (ids; also called
    src, from or head, and dst, dest, destination, to or tail), ``weight``, ``split`` as for nodes; all other columns
    form ``edge_attr``.

    Classes may be words: they are numbered in the order of the alphabet, and `Dataset.names` keeps them.

    Args:
        path: The file; its suffix says which kind it is.
        edges: The table of edges, for a table of nodes.
        features_file: A ``.npy`` file of ``x``, if the other file has none. It is memory-mapped and may be larger than
            the memory: train with ``keep_batches=False``, or pass ``keep=False`` to loaders.
        undirected: Add the reverse of every edge, with the same edge attributes, and keep one edge per ordered pair of
            nodes: the first in the file.
        max_features: Keep only the first columns of ``x``.
        split: Seed of a random split, if the file has none; of graphs the fold, see :meth:`Dataset.of_graphs`.
        split_ratio: Shares of training, validation and test nodes in a random split; 60, 20 and 20 by default.

    Example:
        >>> import numpy as np
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp()) / "ring.npz"
        >>> np.savez(file, edge_index=[range(5), [1, 2, 3, 4, 0]], x=np.eye(5), y=[0, 1, 0, 1, 0])
        >>> dataset = from_file(file, undirected=True)
        >>> dataset.name, dataset.num_classes, int(dataset.train.train_mask.sum())
        ('ring', 2, 3)
    """
    data, names = files.read_named_graph(
        path, edges=edges, features_file=features_file, undirected=undirected, max_features=max_features
    )
    dataset, note = Dataset.of(data, Path(path).stem), ""
    if "graph_y" in data or "train_mask" in data:
        refuse_ratio(path, split_ratio)
    elif "y" in data:
        note = split_at_random(data, split, split_ratio, Path(path).name)
    else:  # links have splits of their own, and nothing else can be trained
        split_at_random(data, split, split_ratio)
    if "graph_y" in data:
        dataset = Dataset.of_graphs(data, seed=split, name=dataset.name)
    dataset.check()
    return replace(dataset, names=names, note=note)


def split_at_random(data: Data, seed: int = 0, ratio: Sequence[float] | None = None, name: str = "the graph") -> str:
    """Give a graph a random split in place: by default 60% training, 20% validation, 20% test nodes.

    Returns a sentence about it that calls the graph by a name.

    Example:
        >>> data = Data(num_nodes=10)
        >>> split_at_random(data, ratio=(3, 1, 1))
        'the graph has no split: 6 nodes were drawn for training, 2 for validation and 2 for tests...'
    """
    shares = (60, 20, 20) if ratio is None else tuple(ratio)
    valid = all(isinstance(share, (int, float)) and math.isfinite(share) and share >= 0 for share in shares)
    if len(shares) != 3 or not valid or not shares[0] > 0:
        rule = "split_ratio must be three numbers of at least 0, for training (more than 0), validation and test"
        raise InputError(rule, got=str(ratio), fix="Pass something like 60, 20, 20.")
    # Fractions, so that 0.7, 0.2 and 0.1 draw as many nodes as 70, 20 and 10.
    training, validation, tests = (Fraction(str(float(share))) for share in shares)
    unit = data.num_nodes / (training + validation + tests)
    place = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed))
    data.train_mask = place < math.ceil(training * unit)
    data.test_mask = place >= math.ceil((training + validation) * unit)
    data.val_mask = ~(data.train_mask | data.test_mask)
    sizes = [int(data[mask].sum()) for mask in files.MASKS]
    drawn = "{:,} nodes were drawn for training, {:,} for validation and {:,} for tests".format(*sizes)
    return f"{name} has no split: {drawn} (--split, --split-ratio)"


def refuse_ratio(path: str | Path, ratio: Sequence[float] | None) -> None:
    """Refuse shares of a random split for a file that has a split."""
    if ratio is not None:
        rule = "split_ratio belongs to files of nodes without a split"
        raise InputError(rule, got=f"it and {path}, which has one", fix="Leave it out.")


def _plain(data: Data) -> Data:
    """Keep only what the library uses, in its types; add empty masks where there are none."""
    if "graph_y" in data:
        return data
    kept = {name: data[name] for name in ("graph_id", *files.EDGE_LEVEL) if name in data}
    nothing = torch.zeros(data.x.size(0), dtype=torch.bool)
    masks = {name: data[name] if name in data else nothing.clone() for name in files.MASKS}
    y = data.y.float() if data.y.dim() == 2 else data.y.long()
    values = {"x": data.x.float(), "edge_index": data.edge_index, "y": y, **masks, **kept}
    return Data(**{name: value.contiguous() for name, value in values.items()})
