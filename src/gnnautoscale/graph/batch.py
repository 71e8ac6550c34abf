"""Where a batch lies in its graph and in histories, and tensors that know which batch they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gnnautoscale.graph.graph import Graph


@dataclass(eq=False)
class BatchInfo:
    """Where a batch lies in its graph.

    Attributes:
        graph: The whole graph.
        n_id: Node index of each row, the batch's nodes first, then the halo, ``[num_rows]``, in host memory.
        batch_size: How many of the rows are the batch's own nodes.
        e_id: Edge index of each edge of the batch, ``[num_edges]``, in host memory.
        order: The order in which the batch's loader would keep rows of histories.
        memo: What was computed for this batch alone, for as long as what it was computed from is in use.
        placed: Pieces of the batch that are on the compute device already, by what they are pieces of.
        upcoming: The batch that is likely to follow, so that its rows can be pulled ahead; a hint.
    """

    graph: Graph
    n_id: Tensor
    batch_size: int
    e_id: Tensor
    order: RowOrder
    memo: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)
    placed: dict[Any, Any] = field(default_factory=dict)
    upcoming: BatchInfo | None = None

    @property
    def num_rows(self) -> int:
        """Number of nodes of batch and halo together."""
        return self.n_id.numel()

    @property
    def num_halo(self) -> int:
        """Number of nodes of the halo."""
        return self.num_rows - self.batch_size

    @cached_property
    def nodes(self) -> Tensor:
        """The batch's own nodes, ``[batch_size]``."""
        return self.n_id[: self.batch_size]

    @cached_property
    def halo(self) -> Tensor:
        """The halo's nodes, ``[num_rows - batch_size]``."""
        return self.n_id[self.batch_size :]


@dataclass(eq=False)
class HistoryRows:
    """Where a batch's rows lie in a history.

    Attributes:
        index: The row of each node of batch and halo, ``[num_rows]``, in host memory.
        runs: The batch's own rows as few, long pieces: each with its first row in the history, its first row in the
            batch, and its length.
    """

    index: Tensor
    runs: list[tuple[int, int, int]]

    def on(self, device: torch.device) -> Tensor:
        """The index on a device, without waiting for work that is under way there."""
        return self.index if device.type == "cpu" else self._pinned.to(device, non_blocking=True)

    @cached_property
    def _pinned(self) -> Tensor:
        return self.index.pin_memory()


@dataclass(eq=False)
class RowOrder:
    """The order of the rows in histories: part by part, so that a batch is written in few, long pieces.

    Attributes:
        row_of: The row of each node, ``[num_nodes]``.
    """

    row_of: Tensor

    @staticmethod
    def of(nodes: Tensor) -> RowOrder:
        """The order that keeps the given nodes, which are all of a graph, one after another."""
        row_of = torch.empty_like(nodes)
        row_of[nodes] = torch.arange(nodes.numel())
        return RowOrder(row_of)

    @torch.inference_mode(False)  # kept for training too
    def rows(self, info: BatchInfo) -> HistoryRows:
        """Where a batch's rows are in this order."""
        if self not in info.memo:
            index = self.row_of[info.n_id]
            own = index[: info.batch_size]
            breaks = (own[1:] != own[:-1] + 1).nonzero().squeeze(1) + 1
            starts = [0, *breaks.tolist()] if own.numel() else []
            ends = [*starts, own.numel()][1:]
            runs = [(int(own[start]), start, end - start) for start, end in zip(starts, ends, strict=True)]
            info.memo[self] = HistoryRows(index, runs)
        return cast(HistoryRows, info.memo[self])


# Layers that pass messages both ways flip the edges; a flipped edge_index is still known to be the batch's own.
_REVERSED = {"edge_index": "reversed edge_index", "reversed edge_index": "edge_index"}


# What may be asked of a tensor without looking at its values or its size.
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

    It stays what it is when it is moved between devices; everything computed from it is a plain tensor. So the
    library can tell a batch's own edges and edge weights from ones that a model derived.
    """

    info: BatchInfo
    attribute: str
    _tagged_version: int

    # The attributes that something was computed from, as long as somebody wants to know.
    _looks: ClassVar[list[str] | None] = None

    @classmethod
    @contextmanager
    def watched(cls, looks: list[str] | None) -> Iterator[None]:
        """Note in a list which attributes of batches something is computed from; ``None`` to note nothing."""
        before, cls._looks = cls._looks, looks
        try:
            yield
        finally:
            cls._looks = before

    # What PyTorch calls on every operation; these leave the values as they are and so keep the tag.
    _KEEPING = frozenset(
        {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, Tensor.detach, Tensor.contiguous, Tensor.pin_memory}
    )

    @staticmethod
    def tag(value: Tensor, info: BatchInfo, attribute: str) -> BatchTensor:
        """Return the tensor, tagged with its batch and its name."""
        tagged = value.as_subclass(BatchTensor)
        tagged.info, tagged.attribute, tagged._tagged_version = info, attribute, value._version
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

        It is in host memory: what a layer computes from it is not used, and on a GPU some of that would have to wait.
        """
        # Edges lie along the last dimension of an edge_index and along the first of everything else.
        shape = (2, 0) if self.attribute.endswith("edge_index") else (0, *self.shape[1:])
        with torch.inference_mode(False):
            return BatchTensor.tag(torch.empty(shape, dtype=self.dtype), self.info, self.attribute)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.plain.clone()
        return BatchTensor.tag(copied, self.info, self.attribute) if self.is_original else copied

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
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
