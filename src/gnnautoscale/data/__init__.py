"""Graphs to train on.

The paper's data sets by name, a user's own files, and generated graphs. It knows nothing about models or training.
"""

from gnnautoscale.data.datasets import Dataset, load
from gnnautoscale.data.files import Names
from gnnautoscale.data.hetero import TypedDataset, nodes_of_type, open_file
from gnnautoscale.data.hetero_files import is_typed_file, read_typed_graph
from gnnautoscale.data.hetero_links import TypedLinks
from gnnautoscale.data.many_graphs import folds, holds_graphs, is_collection, join_graphs, take_graphs

__all__ = [
    "Dataset",
    "Names",
    "TypedDataset",
    "TypedLinks",
    "folds",
    "holds_graphs",
    "is_collection",
    "is_typed_file",
    "join_graphs",
    "load",
    "nodes_of_type",
    "open_file",
    "read_typed_graph",
    "take_graphs",
]
