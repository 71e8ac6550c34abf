"""Kernels for rows, halos and sums over neighbours: Triton on a GPU, and the plain torch code that defines the result.

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
from gnnautoscale.kernels.available import triton_is_installed, use_triton
from gnnautoscale.kernels.halo import (
    Count,
    Halo,
    HaloSearch,
    OwnRows,
    RowNumbers,
    Runs,
    expand_targets,
    locate_and_count,
    locate_own,
)
from gnnautoscale.kernels.rows import (
    WordTable,
    accumulate_rows,
    gather_rows,
    gather_sums,
    gather_tables,
    merge_rows,
    scatter_rows,
)
from gnnautoscale.kernels.spmm import Adjacency, spmm

__all__ = [
    "Adjacency",
    "Count",
    "Halo",
    "HaloSearch",
    "OwnRows",
    "RowNumbers",
    "Runs",
    "Side",
    "WordTable",
    "accumulate_rows",
    "additive_scores",
    "edge_dots",
    "expand_targets",
    "gather_rows",
    "gather_sums",
    "gather_tables",
    "locate_and_count",
    "locate_own",
    "max_at_targets",
    "merge_rows",
    "rows_at_edges",
    "scatter_rows",
    "spmm",
    "sum_at_nodes",
    "triton_is_installed",
    "use_triton",
    "weighted_sum",
]
