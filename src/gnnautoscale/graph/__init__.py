"""The graph, its parts and its batches.

Partitions, batches of parts with their halo, and the loaders that yield them, also those of the baselines. It knows
nothing about models or histories.
"""

from gnnautoscale.graph.assemble import without_tensors
from gnnautoscale.graph.baselines import ClusterLoader, SampleLoader
from gnnautoscale.graph.batch import BatchInfo, BatchTensor, assembly_stream, hand_over, untagged
from gnnautoscale.graph.drawing import PartGroup
from gnnautoscale.graph.edges import EdgeCut, EdgeTable, RowOrder
from gnnautoscale.graph.graph import Graph, check_nodes, is_label, is_target, rows_of, without_targets
from gnnautoscale.graph.hashing import fingerprint
from gnnautoscale.graph.loader import HaloLoader, labels_for
from gnnautoscale.graph.partitioning import Partitioner, check_labels, connectivity, partition
from gnnautoscale.graph.ready import ReadyBatch, tagged_copies
from gnnautoscale.graph.subgraphs import Subgraphs, check_fan_out, whole_neighbourhood
from gnnautoscale.graph.typed_batch import TypedBatch, TypedInfo
from gnnautoscale.graph.typed_graph import WHOLE_ID, EdgeType, TypedGraph, joined_labels
from gnnautoscale.graph.typed_parts import connectivity_by_type, groups_to_balance
from gnnautoscale.graph.unread import UnreadRows
from gnnautoscale.graph.whole_graphs import partition_graphs

__all__ = [
    "WHOLE_ID",
    "BatchInfo",
    "BatchTensor",
    "ClusterLoader",
    "EdgeCut",
    "EdgeTable",
    "EdgeType",
    "Graph",
    "HaloLoader",
    "PartGroup",
    "Partitioner",
    "ReadyBatch",
    "RowOrder",
    "SampleLoader",
    "Subgraphs",
    "TypedBatch",
    "TypedGraph",
    "TypedInfo",
    "UnreadRows",
    "assembly_stream",
    "check_fan_out",
    "check_labels",
    "check_nodes",
    "connectivity",
    "connectivity_by_type",
    "fingerprint",
    "groups_to_balance",
    "hand_over",
    "is_label",
    "is_target",
    "joined_labels",
    "labels_for",
    "partition",
    "partition_graphs",
    "rows_of",
    "tagged_copies",
    "untagged",
    "whole_neighbourhood",
    "without_targets",
    "without_tensors",
]
