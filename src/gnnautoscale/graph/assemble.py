"""Builds batches out of a graph: their nodes and halo, their edges, and the rows of all attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]

from gnnautoscale._util import Pinned, for_later, lacks_memory
from gnnautoscale.graph.batch import BatchInfo
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.edges import EdgeCutOnDevice, EdgeTable, RowOrder
from gnnautoscale.graph.graph import Graph, is_start, rows_of
from gnnautoscale.graph.unread import UnreadRows
from gnnautoscale.kernels import Halo, HaloSearch, OwnRows, WordTable, expand_targets, locate_and_count

T = TypeVar("T")
# How many groups of parts a builder remembers.
_MOST_KNOWN = 1 << 14


class BatchBuilder:
    """Assembles batches of a graph, each where it is used: nodes, their halo, and every edge into them.

    Tables are in the order of rows, so a part is a contiguous slice of each. A GPU reads these slices, and the rows of
    attributes, over the bus: nothing of the graph is kept there.

    ``starts`` is the first row of each part and, at its end, the number of rows.
    """

    def __init__(self, graph: Graph, order: RowOrder, starts: list[int], bidirectional: bool) -> None:
        self.graph = graph
        self._starts, self._bidirectional = starts, bidirectional
        plain = order.is_plain
        self.table = graph.incoming if plain else EdgeTable(graph.edge_index, order)
        self._outgoing = None
        if bidirectional:
            self._outgoing = graph.outgoing if plain else EdgeTable(graph.edge_index, order, target_row=0)
        # The rows of groups of parts that come back.
        self._own: dict[PartGroup, OwnRows] = {}
        self._note_attributes()

    def _note_attributes(self) -> None:
        data = self.graph.data
        found = {name: rows_of(data, name) for name, _ in data if name != "edge_index"}
        #: The attributes with rows, and whether these belong to nodes or edges.
        self.levels = {name: level for name, level in found.items() if level is not None}
        self._rows = AttributeRows({name: (data[name], data.__cat_dim__(name, data[name])) for name in self.levels})

    def of(self, graph: Graph) -> BatchBuilder:
        """A builder of the same parts of another graph, or of the same one with other attributes."""
        if graph.edges_id is not self.graph.edges_id:
            return BatchBuilder(graph, self.table.order, self._starts, self._bidirectional)
        made = copy.copy(self)
        made.graph = graph
        made._note_attributes()
        return made

    def own_rows(self, parts: PartGroup) -> OwnRows:
        """The rows of some parts, part by part; neighbouring parts are one piece."""
        known = self._own.get(parts)
        if known is None:
            known = rows_of_parts(self._starts, parts)
            if len(self._own) < _MOST_KNOWN:
                self._own[parts] = known
        return known

    def rows_of(self, nodes: Tensor) -> OwnRows:
        """The rows of distinct nodes, ``[batch_size]``, in their order."""
        return OwnRows.of(self.table.order.rows(nodes).long())

    # The loader may keep a batch for training even if inference asks for it first, so it needs ordinary tensors.
    @for_later
    def start(self, own: OwnRows, device: torch.device, key: Hashable = None) -> Assembly:
        """Start to assemble the batch of some rows; a GPU works on it beside what it does for others."""
        if device.type == "cuda":
            self._rows.pin()
            for table in (self.table, self._outgoing):
                if table is not None:
                    table.pin()
        cut = self.table.cut(own).on(device)
        source = cut.take(self.table.source)
        also = None
        if self._outgoing is not None:
            also = self._outgoing.cut(own).on(device).take(self._outgoing.source)
        return Assembly(self, own, cut, self.table.numbers.find(source, own, also), device, key)

    @for_later
    def start_again(self, own: OwnRows, halo: Tensor, device: torch.device, key: Hashable) -> Assembly:
        """Assemble a batch whose halo's rows are known, ``[num_halo]``, in pinned memory."""
        cut, there = self.table.cut(own).on(device), halo.to(device, non_blocking=True).long()

        def find_source() -> Tensor:
            rows = cut.take(self.table.source)
            return locate_and_count(self.table.numbers, rows, own, there, count=False)[0]

        return Assembly(self, own, cut, HaloSearch(Halo(there, find_source)), device, key)

    def info(self, own: OwnRows, found: Halo, key: Hashable = None) -> BatchInfo:
        """Where a batch lies in the graph, given its halo."""
        info = BatchInfo(self.graph, self.table, own, self.table.cut(own), found, key)
        info.bidirectional = self._bidirectional
        return info

    def rows(self, name: str, info: BatchInfo, n_id: Tensor) -> Tensor:
        """The rows of a node-level tensor for the nodes ``n_id``, ``[num_rows]``, on their device."""
        return self._rows.take(name, n_id, lambda: info.n_id)

    def unread(self, name: str, info: BatchInfo, n_id: Tensor) -> Tensor:
        """See :meth:`rows`; a GPU reads them when they are used, if it reads them over the bus."""
        return self._rows.take(name, n_id, lambda: info.n_id, unread=True)

    def edges(self, name: str, info: BatchInfo, e_id: Tensor) -> Tensor:
        """The rows of an edge-level tensor for the edges ``e_id``, ``[num_edges]``, on their device."""
        return self._rows.take(name, e_id, lambda: info.e_id)


class AttributeRows:
    """Attributes with a row for each node or edge, of which batches take some; a GPU reads them over the bus.

    ``values`` are the tensors by name, each with the dimension that rows lie along.
    """

    def __init__(self, values: Mapping[str, tuple[Tensor, int]]) -> None:
        self._values = values
        self._pinned: Pinned | None = None
        self._tables: dict[str, WordTable] = {}

    def take(self, name: str, index: Tensor, on_host: Callable[[], Tensor], *, unread: bool = False) -> Tensor:
        """The rows of an index, ``[count]``, on its device; ``on_host`` gives the same index in host memory.

        If ``unread``, a GPU reads them when they are used, if it reads them over the bus.
        """
        value, dim = self._values[name]
        if value.device == index.device:
            return value.index_select(dim, index)
        if dim == 0 and name in self._tables:
            gather = self._tables[name].gather
            if unread:
                return UnreadRows.of(torch.Size([index.numel(), *value.shape[1:]]), value.dtype, index, gather)
            return gather(index)
        return value.index_select(dim, on_host().to(value.device)).to(index.device, non_blocking=True)

    def pin(self) -> None:
        """Let a GPU read all of them."""
        if self._pinned is None:
            self._pinned = Pinned()
            pinned = {name: self._pinned.pin(value) for name, (value, _) in self._values.items()}
            self._tables = {name: WordTable(value) for name, value in pinned.items() if value is not None}


class Assembly:
    """A batch on its way."""

    def __init__(
        self,
        builder: BatchBuilder,
        own: OwnRows,
        cut: EdgeCutOnDevice,
        search: HaloSearch,
        device: torch.device,
        key: Hashable,
    ) -> None:
        self._builder, self._own, self._cut, self._search = builder, own, cut, search
        self._device, self._key = device, key

    @for_later
    def finish(self, only: Collection[str] | None = None, *, unread: bool = False) -> tuple[Data, BatchInfo]:
        """The batch, once its halo is known, with all attributes or ``only`` some of them.

        If ``edge_index`` is not among these, it has no edges. If ``unread``, rows of nodes are read on first use.
        """
        edges = only is None or "edge_index" in only
        builder, cut, device = self._builder, self._cut, self._device
        graph, table = builder.graph, builder.table
        info = builder.info(self._own, self._search.result(), self._key)
        n_id = table.order.nodes_at(info.rows)
        e_id = cut.take(table.edge).to(torch.long, copy=True) if edges else n_id[:0]
        batch = _as_one_graph(graph.data)
        for name, level in builder.levels.items():
            if only is not None and name not in only:
                del batch[name]
            elif level == "node":
                batch[name] = (builder.unread if unread else builder.rows)(name, info, n_id)
            elif edges:
                batch[name] = builder.edges(name, info, e_id)
            else:
                batch[name] = batch[name][:0].to(device)
        batch.edge_index = self._edge_index(info) if edges else n_id.new_empty(2, 0)
        # Copies, since a user may write into them.
        batch.n_id, batch.e_id = n_id.clone() if n_id is info.rows else n_id, e_id
        batch.num_nodes, batch.batch_size = info.num_rows, self._own.size
        return batch, info

    def _edge_index(self, info: BatchInfo) -> Tensor:
        edge_index = torch.empty(2, info.num_edges, dtype=torch.long, device=self._device)
        edge_index[0] = info.found.source
        expand_targets(self._cut.ptr, info.num_edges, out=edge_index[1])
        return edge_index


def rows_of_parts(starts: Sequence[int], parts: PartGroup) -> OwnRows:
    """The rows of some parts, part by part, given the first row of each; neighbouring parts are one piece."""
    runs: list[tuple[int, int, int]] = []
    first = 0
    for part in parts:
        start, length = starts[part], starts[part + 1] - starts[part]
        if runs and runs[-1][0] + runs[-1][2] == start:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + length)
        else:
            runs.append((start, first, length))
        first += length
    return OwnRows(runs)


def select_attributes(data: Data, n_id: Tensor, batch_size: int, e_id: Tensor, edge_index: Tensor) -> Data:
    """A subgraph with its rows of all node- and edge-level tensors; other attributes and the class stay as they are.

    The first ``batch_size`` of its nodes ``n_id``, ``[num_rows]``, are the batch's own. ``edge_index`` has its edges
    ``e_id``, ``[num_edges]``, as positions in ``n_id``.
    """
    subgraph = _as_one_graph(data)
    for name, value in data:
        level = rows_of(data, name)
        if level is not None and name != "edge_index":
            index = n_id if level == "node" else e_id
            subgraph[name] = value.index_select(data.__cat_dim__(name, value), index.to(value.device))
    subgraph.edge_index, subgraph.num_nodes = edge_index, n_id.numel()
    subgraph.n_id, subgraph.e_id, subgraph.batch_size = n_id, e_id, batch_size
    return subgraph


def _as_one_graph(data: Data) -> Data:
    """A copy that shares all attributes, of the same class.

    Only a ``Batch`` becomes the class of its graphs: its ``batch_size`` would hide that of a subgraph, and where each
    graph begins says nothing about nodes in another order.
    """
    single = copy.copy(data)
    if isinstance(data, Batch):
        object.__setattr__(single, "__class__", type(data).__bases__[-1])
        starts = [name for name, _ in data if is_start(data, name)]
        notes = [name for name in ("_num_graphs", "_slice_dict", "_inc_dict") if hasattr(data, name)]
        for name in (*starts, *notes):
            delattr(single, name)
    return single


def without_tensors(batch: Data) -> Data:
    """A copy of a batch that lacks its tensors: of the same class and with all other attributes."""
    bare = copy.copy(batch)
    for name, value in batch:
        if isinstance(value, Tensor):
            del bare[name]
    return bare


def write_counts(data: Any) -> list[int]:
    """Counters of in-place writes, one per tensor: equal lists mean unchanged data."""
    values = [value for store in data.stores for value in store.values() if isinstance(value, Tensor)]
    return [value._version for value in values if not value.is_inference()]


def build_each(
    build: Callable[[Any], T], jobs: Iterable[Any], num_workers: int, worker_seeds: torch.Generator
) -> Iterator[T]:
    """Build one batch per job, in order, in worker processes or, if there are none, here.

    ``worker_seeds`` seeds the workers, so that they leave the global random state alone.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "generator": worker_seeds}
    loader = DataLoader(_Jobs(build), sampler=list(jobs), batch_size=None, collate_fn=_unchanged, **options)
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).strip().splitlines()[-1]  # after the traceback of the process
        if lacks_memory(error):
            raise MemoryError(f"in a process that prepares batches: {reason}") from error
        raise ChildProcessError(
            f"a process that prepares batches died ({reason}). The system may have ended it for lack of memory: lower "
            "num_workers."
        ) from error


class _Jobs(Dataset[T]):
    def __init__(self, build: Callable[[Any], T]) -> None:
        self._build = build

    def __getitem__(self, job: Any) -> T:
        built = self._build(job)
        if get_worker_info() is not None:
            # What is sent must be in shared memory. If that failed later, nobody would be told, and the reader would
            # wait forever.
            parts: Any = built if isinstance(built, tuple) else (built,)
            for each in parts:
                each.share_memory_()
        return built


def _unchanged(batch: T) -> T:
    return batch
