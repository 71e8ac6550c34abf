"""The edges into a batch that layers run on, in the forms that layers take: plain, or grouped for layers that fuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnautoscale._util import for_later
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.fused import FusedEdges
from gnnautoscale.kernels import Adjacency, Count, expand_targets


class EdgeForm(NamedTuple):
    """The row of an ``edge_index`` with the targets; numbers of rows: own targets, all targets, and sources."""

    target_row: int
    num_targets: int
    num_rows: int
    num_sources: int


class BatchEdges:
    """A record, cut to the edges into a batch: between rows of the batch, grouped by target.

    Args:
        constants: Edge-level values by argument name, each ``[num_edges, ...]``.
        form: Their direction, and how many rows they are between.
        grouped: First edge of each of the batch's own rows and the source of each edge, if these are known.
        edge_index: The edges, ``[2, num_edges]``, if these are known; ``None`` if only fused edges are needed.
        adjacencies: The edges for layers that fuse, by the name of the constant that holds their weights, if known.
        kept: Positions of these edges before edge dropout; ``None`` without.
    """

    def __init__(
        self,
        constants: dict[str, Tensor],
        form: EdgeForm,
        *,
        grouped: GroupedEdges | None = None,
        edge_index: Tensor | None = None,
        adjacencies: dict[str | None, Adjacency] | None = None,
        kept: Tensor | None = None,
    ) -> None:
        self.constants, self.kept = constants, kept
        self._grouped, self._edge_index = grouped, edge_index
        self._form = form
        self._adjacencies = adjacencies or {}
        self._fused: dict[Any, FusedEdges] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchEdges:
        # Copies of a model share it: nothing changes it, and PyG's copies of fused edges break the original.
        return self

    def to(self, device: torch.device) -> BatchEdges:
        """The same edges on another device, or these."""
        if self._grouped is None or self._grouped.source.device == device:
            return self
        constants = {name: value.to(device) for name, value in self.constants.items()}
        grouped = self._grouped.to(device)
        return BatchEdges(constants, self._form, grouped=grouped)

    def take(self, kept: Tensor) -> BatchEdges:
        """Keep some of the edges."""
        constants = {name: value[kept] for name, value in self.constants.items()}
        return BatchEdges(constants, self._form, edge_index=self.edges[:, kept], kept=kept)

    @property
    @for_later
    def edges(self) -> Tensor:
        """The edges, ``[2, num_edges]``, int64."""
        if self._edge_index is None:
            if self._grouped is None:
                raise RuntimeError("these edges were prepared for layers that fuse only")
            ends = [self._grouped.checked().long(), self._grouped.target]
            self._edge_index = torch.stack(ends if self._form.target_row == 1 else ends[::-1])
        return self._edge_index

    @for_later
    def adjacency(self, weight: str | None) -> Adjacency:
        """The edges for layers that fuse, weighted by one of the constants or unweighted."""
        if weight not in self._adjacencies:
            values = None if weight is None else self.constants[weight]
            if self._grouped is not None:
                self._adjacencies[weight] = self._grouped.adjacency(values, self._form.num_sources)
            else:
                row, num_targets, _, num_sources = self._form
                target, source = self.edges[row], self.edges[1 - row]
                self._adjacencies[weight] = Adjacency.build(target, source, num_targets, num_sources, values)
        return self._adjacencies[weight]

    def fuse(self, adjacency: Adjacency, *, widened: bool, grad_rows: int | None) -> FusedEdges:
        """Wrap one of the adjacencies for a layer; see :meth:`FusedEdges.of`."""
        key = id(adjacency), widened, grad_rows
        if key not in self._fused:
            num_targets = self._form.num_rows if widened else None
            self._fused[key] = FusedEdges.of(adjacency, num_targets, grad_rows=grad_rows)
        return self._fused[key]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are there so far."""
        yield from self.constants.values()
        if self._grouped is not None:
            yield from self._grouped.tensors()
        for adjacency in self._adjacencies.values():
            yield from adjacency.tensors_so_far()


class GroupedEdges:
    """Edges between rows of a batch, grouped by target.

    Attributes:
        ptr: First edge of each of the batch's own rows, ``[batch_size + 1]``.
        source: The row of the batch that each edge comes from, ``[num_edges]``, int32.
        longest: The largest number of edges into a row.
        by_source: The positions of the edges grouped by source, and these sources, if known.
        missing: The number of edges whose source is no row of the batch, perhaps still on its way to the host.
        layer: Whose edges they are, in words.
    """

    def __init__(
        self,
        ptr: Tensor,
        source: Tensor,
        longest: int,
        by_source: tuple[Tensor, Tensor] | None = None,
        missing: Count | None = None,
        layer: str = "a layer",
    ) -> None:
        self.ptr, self.source, self._longest = ptr, source, longest
        self._by_source, self._missing, self._layer = by_source, missing, layer
        #: Called once no source is missing.
        self.when_checked: Callable[[], None] | None = None

    def to(self, device: torch.device) -> GroupedEdges:
        """A copy on another device."""
        return GroupedEdges(self.ptr.to(device), self.checked().to(device), self._longest)

    @property
    def target(self) -> Tensor:
        """The row of the batch that each edge points to, ``[num_edges]``, int64."""
        return expand_targets(self.ptr, self.source.numel())

    def checked(self) -> Tensor:
        """The sources; refuses edges from outside the batch and its halo."""
        if self._missing is not None and int(self._missing):
            raise UnsupportedModelError(
                f"{self._layer} reverses edges, so the halo must contain neighbours in both directions",
                got="a graph that is not symmetric, and a halo of nodes with edges into the batch only",
                fix="Build the loader with HaloLoader(..., bidirectional=True).",
            )
        if self.when_checked is not None:
            self.when_checked()
        self._missing = self.when_checked = None
        return self.source

    def adjacency(self, weight: Tensor | None, num_sources: int) -> Adjacency:
        """These edges with weights, ``[num_edges]``, or without."""
        return Adjacency(self.ptr, self.checked(), weight, num_sources, self._by_source, self._longest)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        yield from (self.ptr, self.source, *(self._by_source or ()))
