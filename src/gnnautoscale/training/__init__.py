"""The training loop and what it is made of.

Options, strategies, steps (captured on a GPU), batches on the device, optimizer, checkpoints and the journal of a run.
It knows nothing about the command line.
"""

from gnnautoscale.training.captured import Engine
from gnnautoscale.training.checkpoint import latest_checkpoint
from gnnautoscale.training.feed import Feed, Item, Placement, plain_item
from gnnautoscale.training.journal import describe_machine
from gnnautoscale.training.loop import fit
from gnnautoscale.training.optimizer import make_optimizer
from gnnautoscale.training.options import HistoryDtype, Partitioner, Schedule, check_device, check_options
from gnnautoscale.training.resume import open_checkpoint
from gnnautoscale.training.steps import Precision, Steps

__all__ = [
    "Engine",
    "Feed",
    "HistoryDtype",
    "Item",
    "Partitioner",
    "Placement",
    "Precision",
    "Schedule",
    "Steps",
    "check_device",
    "check_options",
    "describe_machine",
    "fit",
    "latest_checkpoint",
    "make_optimizer",
    "open_checkpoint",
    "plain_item",
]
