"""Work on batches that a GPU captures once and replays.

Batches at fixed addresses, CUDA graphs of any work on them, and a user's own training step. It knows nothing about
training loops.
"""

from gnnautoscale.replay.graphs import GraphPool, on_training_stream, watching
from gnnautoscale.replay.own_step import OwnStep, capture
from gnnautoscale.replay.packing import Contents, Package, Packer, Placement, layout_of, view_in
from gnnautoscale.replay.replayer import WARM_UP, Replayer

__all__ = [
    "WARM_UP",
    "Contents",
    "GraphPool",
    "OwnStep",
    "Package",
    "Packer",
    "Placement",
    "Replayer",
    "capture",
    "layout_of",
    "on_training_stream",
    "view_in",
    "watching",
]
