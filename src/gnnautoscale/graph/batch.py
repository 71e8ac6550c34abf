"""Where a batch lies in its graph, and tensors that know which batch they belong to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from gnnautoscale._util import for_later
from gnnautoscale.graph.edges import EdgeCut, EdgeTable, RowOrder
from gnnautoscale.graph.graph import Graph
from gnnautoscale.kernels import Halo, OwnRows

if TYPE_CHECKING:
    from gnnautoscale.graph.typed_batch import TypedInfo

T = TypeVar("T")


@dataclass(eq=False)
class BatchInfo:
    """Where a batch lies in its graph, and what is known about it.

    Attributes:
        graph: The whole graph.
        table: The edges of the graph, in the order of the loader's rows.
        own: The batch's own rows.
        edges: The batch's edges in the table.
        found: Its halo, and its edges between its own rows and those of the halo, where it was assembled.
        key: What tells the batch from others of its loader, and is the same whenever it comes back.
    """

    graph: Graph
    table: EdgeTable
    own: OwnRows
    edges: EdgeCut
    found: Halo
    key: Hashable = None
    #: Makes the loader yield this batch whenever it comes back, instead of assembling it; ``None`` if it does not.
    keeper: Callable[[Any], None] | None = field(default=None, init=False, repr=False)
    #: When a GPU has assembled the batch; ``None`` if the host did.
    ready: torch.cuda.Event | None = field(default=None, init=False, repr=False)
    #: When a GPU has prepared the recorded edges of the batch ahead; ``None`` if it has not.
    edges_ready: torch.cuda.Event | None = field(default=None, init=False, repr=False)
    #: Whether the halo also holds the nodes that edges from the batch point to.
    bidirectional: bool = field(default=False, init=False)
    #: How many batches of the loader come back; 0 if this one does not.
    recurring: int = field(default=0, init=False)
    #: The rows that edges come from, if these are of another type of nodes than the batch's own.
    sources: BatchInfo | None = field(default=None, init=False, repr=False)
    _derived: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary, init=False, repr=False)
    _placed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _upcoming: BatchInfo | None = field(default=None, init=False, repr=False)
    # When the copy of the rows that replaced those found is there.
    _copied: torch.cuda.Event | None = field(default=None, init=False, repr=False)
    # Not held by its own types: in a cycle, a batch would stay on a GPU until Python looks for such cycles.
    _typed: ref[TypedInfo] | None = field(default=None, init=False, repr=False)

    @property
    def typed(self) -> TypedInfo | None:
        """The batch of several types that this one is a type of, as long as that is used; ``None`` in a plain graph."""
        return None if self._typed is None else self._typed()

    @typed.setter
    def typed(self, whole: TypedInfo) -> None:
        self._typed = ref(whole)

    @property
    def order(self) -> RowOrder:
        """The order of rows in the loader's tables."""
        return self.table.order

    @property
    def device(self) -> torch.device:
        """Where the batch was assembled."""
        return self.found.rows.device

    @property
    def batch_size(self) -> int:
        """Number of rows that are the batch's own nodes."""
        return self.own.size

    @property
    def holds_all_nodes(self) -> bool:
        """Whether the batch is the whole graph."""
        return self.batch_size == self.graph.num_nodes

    @property
    def num_halo(self) -> int:
        """Number of nodes of the halo."""
        return self.found.rows.numel()

    @property
    def num_rows(self) -> int:
        """Number of nodes of batch and halo together."""
        return self.batch_size + self.num_halo

    @property
    def num_sources(self) -> int:
        """Number of rows that edges may come from."""
        return self.num_rows if self.sources is None else self.sources.num_rows

    @property
    def has_loops(self) -> bool:
        """Whether an edge from a row to the row of the same number is a self-loop."""
        return self.sources is None or self.sources.order is self.order

    @property
    def incoming(self) -> list[BatchInfo]:
        """The batch's edges: these, or in a heterogeneous graph those of each type into nodes of this type."""
        if self.typed is None:
            return [self]
        return [edges for edges in self.typed.edges.values() if edges.order is self.order]

    @property
    def num_edges(self) -> int:
        """Number of edges into the batch."""
        return self.edges.count

    @cached_property
    @for_later
    def rows(self) -> Tensor:
        """The rows of batch and halo, ``[num_rows]``, where the batch was assembled."""
        return torch.cat([self.own.on(self.device), self.found.rows])

    @property
    def rows_ready(self) -> torch.cuda.Event | None:
        """When a GPU has the rows of batch and halo, for other streams and threads; ``None`` if they are there."""
        return self.ready if self._copied is None else self._copied

    @cached_property
    @for_later
    def nodes(self) -> Tensor:
        """The batch's own nodes, ``[batch_size]``, in host memory."""
        return self.order.nodes[self.own.index].long()

    @cached_property
    @for_later
    def halo(self) -> Tensor:
        """The halo's nodes, ``[num_halo]``, in host memory; on a GPU the host waits for them."""
        if self.rows_ready is not None:
            self.rows_ready.synchronize()  # the current stream may not have waited for the one that finds them
        return self.order.nodes[self.found.rows.cpu()].long()

    @cached_property
    @for_later
    def n_id(self) -> Tensor:
        """The node of each row, the batch's nodes first, then the halo, ``[num_rows]``, in host memory."""
        return torch.cat([self.nodes, self.halo])

    @cached_property
    @for_later
    def e_id(self) -> Tensor:
        """The edge of the graph that each edge of the batch is, ``[num_edges]``, in host memory."""
        return self.edges.on(torch.device("cpu")).take(self.table.edge).long()

    def derive(self, owner: Any, compute: Callable[[], T]) -> T:
        """What an owner needs to know about the batch: computed once, and dropped with the owner."""
        if owner not in self._derived:
            self._derived[owner] = compute()
        return cast(T, self._derived[owner])

    def wait(self) -> None:
        """Let the host wait until a GPU has it ready, so that nothing else needs to."""
        for event in (self.ready, self.edges_ready):
            if event is not None:
                event.synchronize()
        self.ready = self.edges_ready = None

    def shrink(self, rows: Tensor) -> None:
        """Forget what can be found again; ``rows`` are a copy of those of batch and halo, ``[num_rows]``.

        The current stream has just made it.
        """
        self.rows = rows
        self._copied = torch.cuda.current_stream(rows.device).record_event() if rows.is_cuda else None
        self.found = Halo.of(rows[self.batch_size :], self.found.source)
        self.ready = self.edges_ready = None
        self._derived.clear()

    def place(self, key: Any, value: Any) -> None:
        """Keep a piece of the batch that is on the compute device until :meth:`displace`."""
        self._placed[key] = value

    def placed(self, key: Any) -> Any:
        """The piece that was placed under a key, or ``None``."""
        return self._placed.get(key)

    def displace(self) -> None:
        """Forget all placed pieces, whose memory may change from now on."""
        self._placed.clear()

    @property
    def upcoming(self) -> BatchInfo | None:
        """The batch that is likely to follow, a hint to pull its rows ahead."""
        return self._upcoming

    @contextmanager
    def followed_by(self, other: BatchInfo | None) -> Iterator[None]:
        """Announce the batch that is likely to follow while this one is used."""
        before, self._upcoming = self._upcoming, other
        try:
            yield
        finally:
            self._upcoming = before


@cache
def assembly_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU that assembles batches ahead of those that use them.

    It precedes all others: its kernels are short, and the host waits for the numbers of halo rows that they find.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call]
    return stream


def hand_over(tensors: Iterable[Tensor], ready: torch.cuda.Event) -> None:
    """Let the current stream of a GPU use tensors that another stream has filled by the time of an event."""
    current: torch.cuda.Stream | None = None
    for tensor in tensors:
        if current is None:
            current = torch.cuda.current_stream(tensor.get_device())
            current.wait_event(ready)
        tensor.record_stream(current)  # once freed, not used again before this stream is done with it


# Layers that pass messages both ways flip the edges; a flipped edge_index is still known to be the batch's own.
_REVERSED = {"edge_index": "reversed edge_index", "reversed edge_index": "edge_index"}


# Questions to a tensor that do not look at its values or its size.
_NEUTRAL = {
    Tensor.dim,
    Tensor.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "is_cuda", "is_sparse", "layout", "ndim", "requires_grad", "_version")
    ),
}


class BatchTensor(Tensor):
    """A batch's ``n_id``, or an edge-level tensor of it, that knows which batch and which attribute it is.

    Moving or copying it keeps the tag; everything computed from it, or loaded from a file, is a plain tensor. So the
    library can tell a batch's own edges and edge weights from those that a model derived.
    """

    info: BatchInfo
    attribute: str
    _tagged_version: int
    # Keeps the batch of several types that the info belongs to.
    _typed: TypedInfo | None

    # Collects the attributes that something is computed from, while somebody watches.
    _looks: ClassVar[list[str] | None] = None

    @classmethod
    @contextmanager
    def watched(cls, looks: list[str] | None) -> Iterator[None]:
        """Collect the attributes of batches that something is computed from; ``None`` collects nothing."""
        before, cls._looks = cls._looks, looks
        try:
            yield
        finally:
            cls._looks = before

    # Operations that leave the values as they are and so keep the tag.
    _KEEPING = frozenset(
        {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, Tensor.detach, Tensor.contiguous, Tensor.pin_memory}
    )

    @staticmethod
    def tag(value: Tensor, info: BatchInfo, attribute: str) -> BatchTensor:
        """Return the tensor, tagged with its batch and its name."""
        tagged = value.as_subclass(BatchTensor)
        tagged.info, tagged.attribute, tagged._tagged_version = info, attribute, value._version
        tagged._typed = info.typed
        return tagged

    @property
    def is_original(self) -> bool:
        """Whether nothing was written into the tensor since it left the loader."""
        return self._version == self._tagged_version

    @property
    def plain(self) -> Tensor:
        """The same values without the tag."""
        return self.as_subclass(Tensor)

    @property
    def is_own_edges(self) -> bool:
        """Whether these are the batch's own edges or edge attributes, as constants."""
        return self.attribute != "n_id" and self.is_original and not self.requires_grad

    def emptied(self) -> BatchTensor:
        """The same attribute of the same batch with no edges in it.

        It is in host memory: nothing uses what a layer computes from it, and on a GPU some of that would wait.
        """
        # Edges lie along the last dimension of an edge_index and along the first of everything else.
        shape = (2, 0) if self.attribute.endswith("edge_index") else (0, *self.shape[1:])
        with torch.inference_mode(False):
            return BatchTensor.tag(torch.empty(shape, dtype=self.dtype), self.info, self.attribute)

    def __copy__(self) -> Tensor:
        return BatchTensor.tag(self.plain, self.info, self.attribute) if self.is_original else self.plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.plain.clone()
        return BatchTensor.tag(copied, self.info, self.attribute) if self.is_original else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In a file or another process there is no graph that the tensor could belong to.
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if cls._looks is not None and func not in _NEUTRAL:
            given = [*args, *(kwargs or {}).values()]
            given += [item for group in args if isinstance(group, (list, tuple)) for item in group]
            cls._looks += [value.attribute for value in given if isinstance(value, BatchTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if not isinstance(result, Tensor) or result is source or not isinstance(source, BatchTensor):
            return result
        if source.is_original:
            if func in cls._KEEPING and source.dtype == result.dtype:
                return cls.tag(result, source.info, source.attribute)
            if func is Tensor.flip and source.attribute in _REVERSED and args[1:] in (([0],), ((0,),), (0,)):
                return cls.tag(result, source.info, _REVERSED[source.attribute])
        return result.as_subclass(Tensor)


def untagged(value: Tensor) -> Tensor:
    """A tensor without its tag, if it has one."""
    return value.plain if isinstance(value, BatchTensor) else value
