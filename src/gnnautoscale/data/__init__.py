"""Graphs to train on.

The paper's data sets by name, a user's own files, and generated graphs. It knows nothing about models or training.
"""

from gnnautoscale.data.datasets import Dataset, load

__all__ = ["Dataset", "load"]
