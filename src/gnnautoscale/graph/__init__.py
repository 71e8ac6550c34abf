"""The graph and how it is cut.

Partitions, batches of parts with their halo, and the loaders that yield them, those of the baselines included. It knows
nothing about models or histories.
"""

from gnnautoscale.graph.baselines import ClusterLoader, SampleLoader, Subgraphs, check_fan_out, whole_neighbourhood
from gnnautoscale.graph.batch import BatchInfo, BatchTensor, PartOrder
from gnnautoscale.graph.graph import EdgesByTarget, Graph
from gnnautoscale.graph.loader import HaloLoader, ReadyBatch, check_nodes, handed_out
from gnnautoscale.graph.partitioning import connectivity, fingerprint, partition

__all__ = [
    "BatchInfo",
    "BatchTensor",
    "ClusterLoader",
    "EdgesByTarget",
    "Graph",
    "HaloLoader",
    "PartOrder",
    "ReadyBatch",
    "SampleLoader",
    "Subgraphs",
    "check_fan_out",
    "check_nodes",
    "connectivity",
    "fingerprint",
    "handed_out",
    "partition",
    "whole_neighbourhood",
]
