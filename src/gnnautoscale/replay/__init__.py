"""Work on batches that a GPU captures once and replays.

Batches at fixed addresses, CUDA graphs of any work on them, and a user's own training step. It knows nothing about
training loops.
"""

from gnnautoscale.replay.own_step import OwnStep, capture
from gnnautoscale.replay.packing import Packer, Placement
from gnnautoscale.replay.replayer import WARM_UP, Replayer, on_training_stream

__all__ = [
    "WARM_UP",
    "OwnStep",
    "Packer",
    "Placement",
    "Replayer",
    "capture",
    "on_training_stream",
]
