"""Triton kernels, each beside the plain torch function that defines its result."""

from gnnautoscale.kernels.available import use_triton
from gnnautoscale.kernels.rows import gather_rows, gather_tables, locate_rows, merge_rows, scatter_rows
from gnnautoscale.kernels.spmm import Adjacency, spmm

__all__ = [
    "Adjacency",
    "gather_rows",
    "gather_tables",
    "locate_rows",
    "merge_rows",
    "scatter_rows",
    "spmm",
    "use_triton",
]
