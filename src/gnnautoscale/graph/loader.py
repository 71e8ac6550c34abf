"""``HaloLoader``: batches of parts with their halo, in the conventions of PyG's loaders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked, html_table, shown
from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import BatchBuilder
from gnnautoscale.graph.batch_source import BatchSource
from gnnautoscale.graph.drawing import PartDrawing, PartGroup
from gnnautoscale.graph.edges import RowOrder
from gnnautoscale.graph.graph import Graph, check_distinct_nodes
from gnnautoscale.graph.partitioning import PARTITIONERS, Partitioner, check_labels, connectivity
from gnnautoscale.graph.partitioning import partition as cut
from gnnautoscale.graph.ready import ReadyBatch, tagged_copies
from gnnautoscale.graph.typed_batch import TypedBuilder
from gnnautoscale.graph.typed_graph import TypedGraph, joined_labels
from gnnautoscale.graph.typed_parts import groups_to_balance


class HaloLoader:
    """Iterates over a graph in batches of whole parts, each with its halo.

    The loader splits the graph into parts. A batch holds the nodes of ``batch_size`` parts and their halo: every other
    node with an edge into them. Batches look like those of PyG's ``NeighborLoader``: the first ``batch.batch_size``
    rows of every node-level attribute belong to the batch's own nodes, the rest to the halo; ``batch.n_id`` and
    ``batch.e_id`` are indices into the whole graph. A batch has every edge into its own nodes, and no other edge.

    Args:
        data: The whole graph. A batch gets its rows of all node- and edge-level tensors, and everything else as it is.
            Every epoch takes ``data`` as it is when the epoch begins; its number of nodes must stay the same. Changes
            behind PyTorch's back, through numpy or ``tensor.data``, go unnoticed.
        num_parts: Number of parts to cut into. Not needed when ``partition`` gives the labels.
        partition: How to cut: ``"metis"``, ``"kaminpar"`` or ``"random"``, as :func:`gnnautoscale.partition` does, or
            the part of each node as integers ``[num_nodes]``, in a dictionary by type for a heterogeneous graph.
        balance: Let each part have about as many training nodes, and of a heterogeneous graph nodes of each type, as
            any other. This cuts more edges.
        batch_size: Number of parts in a batch.
        shuffle: Draw parts into batches at random, anew for each epoch.
        drawings: Draw this many times only, then reuse these drawings at random. Their batches recur, so the loader
            can keep them and a GPU can replay their steps. ``None`` draws for every epoch.
        seed: Makes partition and order reproducible.
        device: Where batches are assembled. A GPU assembles the next batch while it works on this one, out of tables in
            host memory, which it reads over the bus; there is no ``batch.to(device)``, and nothing of the graph stays
            there. By default host memory.
        num_workers: Number of processes that build batches in host memory.
        bidirectional: Also put the nodes that edges from the batch point to into the halo. Layers that pass messages
            against the edges of a directed graph need it.
        keep: Build recurring batches (one part each, no shuffling, all parts at once, or few drawings) once and keep
            them in host memory until ``data`` changes. ``False`` builds them every time, so memory-mapped features
            may be larger than the memory. A GPU assembles batches so fast that none are kept there.
        cache_dir: Where partitions are kept between runs.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> loader = HaloLoader(KarateClub()[0], num_parts=4, batch_size=2, shuffle=True)
        >>> sum(batch.batch_size for batch in loader)
        34
    """

    @checked(
        data={"fix": "Join several graphs with Batch.from_data_list."},
        num_parts={"least": 1},
        batch_size={"least": 1, "fix": "batch_size counts parts, not nodes."},
        drawings={"least": 1, "fix": "Leave drawings out to draw anew for every epoch."},
        seed={"least": 0, "below": 2**32},
        num_workers={"least": 0, "below": 1025},
        cache_dir={"path": True},
    )
    def __init__(
        self,
        data: Data | HeteroData,
        num_parts: int | None = None,
        *,
        partition: Partitioner | Tensor | dict[str, Tensor] = "metis",
        balance: bool = False,
        batch_size: int = 1,
        shuffle: bool = False,
        drawings: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        num_workers: int = 0,
        bidirectional: bool = False,
        keep: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        if drawings is not None and not shuffle:
            fix = "Leave drawings out to draw anew for every epoch."
            raise InputError("drawings needs shuffle=True", got=f"{drawings=}, {shuffle=}", fix=fix)
        self.device = _device(device)
        if self.device.type == "cuda" and num_workers:
            rule = "workers build batches in host memory"
            raise InputError(rule, got=f"{num_workers=} and {device=}", fix="Leave one of the two out.")
        typed = isinstance(data, HeteroData)
        if typed and num_workers:
            rule, fix = "workers build batches of plain graphs", "Leave it out; a GPU assembles batches itself."
            raise InputError(rule, got=f"{num_workers=} with a HeteroData", fix=fix)
        self.data = data
        #: The graph as it was when batches were last asked for.
        self.graph: Any = TypedGraph.of(data) if typed else Graph.of(data)
        self.labels = labels_for(self.graph, num_parts, partition, balance, seed, cache_dir)
        self.num_parts = self._parts_to_draw()
        if batch_size > self.num_parts:
            rule = f"batch_size must be at most the number of parts, {self.num_parts}"
            raise InputError(rule, got=f"{batch_size}", fix="Lower batch_size, or cut the graph into more parts.")
        self.batch_size, self.shuffle, self.drawings = batch_size, shuffle, drawings
        self.num_workers, self.keep, self.bidirectional, self.seed = num_workers, keep, bidirectional, seed
        order = self.labels.argsort(stable=True)
        starts = [0, *torch.bincount(self.labels).cumsum(0).tolist()]
        build: Any = TypedBuilder if typed else BatchBuilder
        builder = build(self.graph, RowOrder(order), starts, bidirectional)
        self._drawing = PartDrawing(
            self.num_parts, batch_size, self._spread, shuffle=shuffle, drawings=drawings, seed=self._drawing_seed()
        )
        # Seeds the workers, so that they do not touch the user's random state.
        self._worker_seeds = torch.Generator().manual_seed(seed)
        self._source = BatchSource(builder, self.num_batches, self._worker_seeds)

    def __len__(self) -> int:
        return -(-self.num_parts // self.batch_size)

    def _summary(self) -> dict[str, str]:
        """What to tell people, by name."""
        parts = "1 part" if self.batch_size == 1 else f"{self.batch_size} parts"
        again = "" if self.drawings is None else f", {self.drawings} drawings"
        return {
            "nodes": f"{self.graph.num_nodes:,}",
            "edges": f"{self.data.num_edges:,}",
            "parts": f"{self.num_parts:,}",
            "batches": f"{len(self):,} of {parts}{', shuffled' if self.shuffle else ''}{again}",
            "assembled": f"on {self.device}",
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self._summary().items())})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._summary())

    def _parts_to_draw(self) -> int:
        """The number of parts that batches are made of, the first ones."""
        return int(self.labels.max()) + 1

    @property
    def _spread(self) -> int | None:
        """The number of batches that parts are spread over evenly; ``None`` fills all but the last."""
        return None

    def _drawing_seed(self) -> int:
        return self.seed

    def __iter__(self) -> Iterator[Data]:
        return tagged_copies(self.ready_batches())

    def follow(self) -> Any:
        """Take over what changed in ``data`` since batches were last asked for; returns the graph of those to come.

        Every epoch begins with it. An epoch that is under way goes on with the tensors that it began with.
        """
        graph = self.graph.follow(self.data)
        if graph is not self.graph:
            self.graph, self._source = graph, self._source.of(graph)
            vars(self).pop("connectivity", None)
        return graph

    def ready_batches(self, kept_with: Collection[str] | None = None) -> Iterator[ReadyBatch]:
        """The next epoch's batches as the loader keeps them; ``iter(loader)`` yields copies of these.

        Kept batches need to have these attributes only, by default all.
        """
        self.follow()
        how: dict[str, Any] = {"keep": self.is_fixed, "num_workers": self.num_workers, "kept_with": kept_with}
        return self._source.batches(self._next_groups(), self.device, **how)

    def _next_groups(self) -> list[PartGroup]:
        """The parts of the batches of the next epoch."""
        return self._drawing.epoch()

    def first_of_next_epoch(self) -> ReadyBatch | None:
        """The batch that the next epoch begins with, if it is built already."""
        self.follow()
        return self._source.kept(self._drawing.first_of_next_epoch())

    @checked(done={"least": 0})
    def state_dict(self, done: int = 0) -> dict[str, Any]:
        """State for a checkpoint, which makes a loader continue with the same batches.

        Args:
            done: How many batches of the current epoch were trained on; 0 between two epochs.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=4, shuffle=True)
            >>> state = loader.state_dict()
            >>> order = [batch.n_id[0] for batch in loader]
            >>> loader.load_state_dict(state)
            >>> order == [batch.n_id[0] for batch in loader]
            True
        """
        return {**self._drawing.state_dict(done), "worker_seeds": self._worker_seeds.get_state()}

    @checked()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that would have come next when the state was taken."""
        try:
            self._drawing.load_state_dict(state)
            self._worker_seeds.set_state(state["worker_seeds"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            rule, fix = "the state of a loader is what state_dict returns", "Pass it unchanged."
            raise InputError(rule, got=f"another one ({type(error).__name__}: {error})", fix=fix) from error

    def draw(self) -> list[PartGroup]:
        """Draw the parts into an epoch's batches; returns the parts of each batch."""
        return self._drawing.draw()

    def nodes_of(self, parts: PartGroup) -> Tensor:
        """The nodes of some parts, part by part, ``[num_nodes_in_parts]``."""
        builder = self._source.builder
        nodes: Tensor = builder.table.order.nodes_at(builder.own_rows(parts).index)
        return nodes

    @property
    def is_fixed(self) -> bool:
        """Whether the same batches recur, in any order, and are kept."""
        same = not self.shuffle or self.drawings is not None or len(self) in (1, self.num_parts)
        return same and self.keep

    @property
    def sharing(self) -> Any:
        """What shares rows of this graph's histories with other processes; ``None`` if there are none."""
        return None

    @property
    def parts_in_batches(self) -> list[int]:
        """The number of parts in each batch of an epoch."""
        return [len(group) for group in self._drawing.in_order()]

    @property
    def num_own(self) -> int:
        """Number of nodes that are in some batch: all, unless other processes have some. They have the first rows."""
        return int(self.graph.num_nodes)

    @property
    def own_counts(self) -> dict[str, int]:
        """See :attr:`num_own`, of each type of nodes of a heterogeneous graph."""
        return dict(self.graph.counts)

    @property
    def is_own(self) -> Tensor:
        """Which nodes are in some batch, ``[num_nodes]``; of a heterogeneous graph those of the joined one."""
        return torch.ones(self.graph.num_nodes, dtype=torch.bool)

    @property
    def is_whole(self) -> bool:
        """Whether one batch holds the whole graph."""
        return len(self) == 1

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes that share the graph, each of which calls this: here there is only one."""
        return [value]

    def graph_around(self, nodes: Tensor, hops: int) -> tuple[Any, Tensor]:
        """A graph with everything at most so many hops from some nodes, ``[count]``, and which nodes they are in it.

        Here that is the whole graph; of several processes none may have it.
        """
        return self.graph, nodes

    @property
    def parts(self) -> Tensor:
        """The part of each node among those of all processes that share the graph, ``[num_nodes]``."""
        return self.labels

    @property
    def pulled_elsewhere(self) -> Tensor:
        """The nodes of this loader that are in halos of other processes, ``[count]``."""
        return torch.empty(0, dtype=torch.long)

    def in_batches(self, count: int) -> HaloLoader:
        """A loader of the same graph for sweeps in so many batches."""
        return HaloLoader(self.data, count, keep=self.keep, device=self.device)

    @property
    def num_batches(self) -> int:
        """Number of different batches: of all drawings if the loader reuses drawings, else of one epoch."""
        few = self.drawings is None or len(self) in (1, self.num_parts)
        return len(self) * (1 if few else self.drawings or 1)

    @property
    def row_order(self) -> RowOrder:
        """The order in which tables and histories keep the rows of this loader's nodes."""
        order: RowOrder = self._source.builder.table.order
        return order

    @property
    def row_orders(self) -> dict[str, RowOrder]:
        """The order of the rows of each type of nodes of a heterogeneous graph."""
        orders: dict[str, RowOrder] = self._source.builder.orders
        return orders

    @checked(together={"least": 1})
    def in_order(
        self,
        device: torch.device | None = None,
        *,
        only: Collection[str] | None = None,
        together: int = 1,
        unread: bool = False,
    ) -> Iterator[Data]:
        """The batches of a sweep: every part once, always in the same order and groups.

        They are assembled on the given device, by default on that of the loader. On a GPU they can have ``only`` some
        of the attributes, and rows of nodes that are ``unread`` until they are used. So many of them make one batch
        ``together``.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=4, batch_size=2, shuffle=True)
            >>> len(list(loader.in_order()))
            2
        """
        self.follow()
        groups = self._drawing.in_order(together)
        how: dict[str, Any] = {"keep": self.keep, "num_workers": self.num_workers, "unread": unread}
        return tagged_copies(self._source.batches(groups, device or self.device, only=only, kept_with=only, **how))

    def any_batch(self, device: torch.device | None = None) -> Data:
        """One of the batches of a sweep, on the given device, by default on that of the loader."""
        self.follow()
        first = self._drawing.in_order()[:1]
        return next(tagged_copies(self._source.batches(first, device or self.device, keep=self.keep)))

    @checked()
    def batch_of(self, parts: Iterable[int]) -> Data:
        """The batch of some parts, with their halo.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=4)
            >>> bool((loader.labels[loader.batch_of([2, 0]).n_id[:3]] == 0).all())
            True
        """
        self.follow()
        # Parts that are batches of their own come back; other groups may not.
        keep = self.is_fixed and self.batch_size == 1
        group = tuple(sorted(parts))
        if not group or len({*group}) < len(group) or not all(0 <= part < self.num_parts for part in group):
            rule = f"a batch is of different parts from 0 to {self.num_parts - 1}, at least one"
            raise InputError(rule, got=shown(parts), fix="Check the numbers of the parts.")
        return next(tagged_copies(self._source.batches([group], self.device, keep=keep)))

    @cached_property
    def connectivity(self) -> float:
        """Halo nodes per batch node, averaged over the parts (the paper's inter-/intra-connectivity ratio)."""
        return float(connectivity(self.graph.edge_index, self.labels)[: self.num_parts].mean())

    def batch_for(self, nodes: Any) -> Any:
        """The batch of the given nodes, in their order, with their halo.

        Args:
            nodes: Distinct node indices, ``[batch_size]``; of a heterogeneous graph a dictionary of them, by type.

        Example:
            >>> from torch_geometric.datasets import KarateClub
            >>> loader = HaloLoader(KarateClub()[0], num_parts=2)
            >>> loader.batch_for(torch.tensor([3, 0])).n_id[:2]
            tensor([3, 0])
        """
        graph = self.follow()
        if isinstance(graph, TypedGraph):
            nodes = {kind: check_distinct_nodes(given, graph.counts[kind]) for kind, given in nodes.items()}
        else:
            nodes = check_distinct_nodes(nodes, graph.num_nodes)
        return self._source.around(nodes).tagged_copy()

    def with_data(self, data: Data, labels: Tensor) -> HaloLoader:
        """A loader of another graph, given the part of each node, ``[num_nodes]``, with the settings of this one."""
        names = ("batch_size", "shuffle", "drawings", "seed", "device", "num_workers", "bidirectional", "keep")
        return HaloLoader(data, partition=labels, **{name: getattr(self, name) for name in names})


def _device(device: torch.device | str | None) -> torch.device:
    try:
        made = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InputError("device must be one of PyTorch's", got=repr(device), fix="Use 'cpu' or 'cuda'.") from error
    if made.type not in ("cpu", "cuda") or (made.type == "cuda" and not torch.cuda.is_available()):
        fix = "Leave it out, and move batches yourself."
        raise InputError("batches are assembled in host memory or on a GPU", got=f"{str(made)!r}", fix=fix)
    if made.type == "cuda" and made.index is None:
        made = torch.device("cuda", torch.cuda.current_device())
    return made


def labels_for(
    graph: Graph | TypedGraph,
    num_parts: int | None,
    partition: Any = "metis",
    balance: bool = False,
    seed: int = 0,
    cache_dir: str | None = None,
) -> Tensor:
    """The part of each node of a graph, ``[num_nodes]``; see :class:`HaloLoader` for the arguments."""
    if isinstance(partition, dict) and isinstance(graph, TypedGraph):
        partition = joined_labels(graph, partition)
    if isinstance(partition, Tensor):
        labels = check_labels(partition, graph.num_nodes)
        if num_parts is not None and num_parts != int(labels.max()) + 1:
            rule = f"num_parts must match the given labels, which name {int(labels.max()) + 1} parts"
            raise InputError(rule, got=f"num_parts={num_parts}", fix="Leave num_parts out.")
        return labels
    if num_parts is None:
        fix = "Pass num_parts, or the labels as partition."
        raise InputError("HaloLoader needs the number of parts", got="num_parts=None", fix=fix)
    if partition not in PARTITIONERS:
        rule = f"partition must be one of {PARTITIONERS} or a tensor of labels"
        raise InputError(rule, got=repr(partition), fix="Choose one of these.")
    how: dict[str, Any] = {"method": partition, "seed": seed, "cache_dir": cache_dir}
    if balance:
        how["groups"] = groups_to_balance(graph)
    return cut(graph.edge_index, graph.num_nodes, num_parts, **how)
