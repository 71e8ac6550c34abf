"""Edges that PyG's layers aggregate over in one kernel, without a row per edge."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import EdgeIndex  # type: ignore[import-untyped]

from gnnautoscale.kernels import Adjacency, spmm


class FusedEdges(EdgeIndex):  # type: ignore[misc]
    """An adjacency that PyG takes for edges sorted by target; layers that fuse their messages multiply with it.

    It holds no edges, so anything but multiplication fails instead of being slow.
    """

    adjacency: Adjacency
    num_targets: int
    grad_rows: int | None

    @staticmethod
    def of(adjacency: Adjacency, num_targets: int | None = None, *, grad_rows: int | None = None) -> FusedEdges:
        """Wrap an adjacency.

        Products have ``num_targets`` rows, by default one for each of its targets; rows beyond these are zero. Only the
        first ``grad_rows`` sources need a gradient, by default all.
        """
        none = torch.empty(2, 0, dtype=torch.long, device=adjacency.ptr.device)
        num_targets = adjacency.num_targets if num_targets is None else num_targets
        edges: FusedEdges = FusedEdges(none, sparse_size=(adjacency.num_sources, num_targets), sort_order="col")
        edges.adjacency, edges.num_targets, edges.grad_rows = adjacency, num_targets, grad_rows
        return edges

    def matmul(
        self,
        other: Any,
        input_value: Tensor | None = None,
        other_value: Tensor | None = None,
        reduce: str = "sum",
        transpose: bool = False,
    ) -> Tensor:
        """Aggregate the rows of ``other``, ``[num_sources, width]``, into ``[num_targets, width]``."""
        if not isinstance(other, Tensor) or other.dim() != 2 or other_value is not None:
            raise RuntimeError("fused edges multiply with a matrix only")
        if input_value is not None and input_value is not self.adjacency.weight:
            raise RuntimeError("fused edges have their own weights")
        out = spmm(self.adjacency, other, "sum" if reduce == "add" else reduce, grad_rows=self.grad_rows)
        missing = self.num_targets - out.size(0)
        return F.pad(out, (0, 0, 0, missing)) if missing else out
