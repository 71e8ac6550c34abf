"""Kernels for rows and for sums over neighbours: Triton on a GPU, and the plain torch code that defines the result.

They know tensors and edges, but no models and no histories.
"""

from gnnautoscale.kernels.attention import (
    Side,
    additive_scores,
    edge_dots,
    max_at_targets,
    rows_at_edges,
    sum_at_nodes,
    weighted_sum,
)
from gnnautoscale.kernels.available import use_triton
from gnnautoscale.kernels.rows import gather_rows, gather_tables, locate_rows, merge_rows, scatter_rows
from gnnautoscale.kernels.spmm import Adjacency, spmm

__all__ = [
    "Adjacency",
    "Side",
    "additive_scores",
    "edge_dots",
    "gather_rows",
    "gather_tables",
    "locate_rows",
    "max_at_targets",
    "merge_rows",
    "rows_at_edges",
    "scatter_rows",
    "spmm",
    "sum_at_nodes",
    "use_triton",
    "weighted_sum",
]
