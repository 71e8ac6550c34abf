"""The training loop and what it is made of.

Options, strategies, steps (captured on a GPU), batches on the device, optimizer, checkpoints and the journal of a run.
It knows nothing about the command line.
"""

from gnnautoscale.training.captured import Engine
from gnnautoscale.training.checkpoint import latest_checkpoint
from gnnautoscale.training.feed import plain_item
from gnnautoscale.training.journal import describe_machine
from gnnautoscale.training.loggers import BY_NAME as LOGGERS
from gnnautoscale.training.loggers import Logger, MLflow, TensorBoard, WandB, check_package
from gnnautoscale.training.loop import dataset_of, fit
from gnnautoscale.training.optimizer import make_optimizer
from gnnautoscale.training.options import (
    OPTIONS,
    FitOptions,
    HistoryDtype,
    Optimization,
    Output,
    pick_device,
)
from gnnautoscale.training.rank_summary import summary_of
from gnnautoscale.training.resume import open_checkpoint
from gnnautoscale.training.steps import Steps

__all__ = [
    "LOGGERS",
    "OPTIONS",
    "Engine",
    "FitOptions",
    "HistoryDtype",
    "Logger",
    "MLflow",
    "Optimization",
    "Output",
    "Steps",
    "TensorBoard",
    "WandB",
    "check_package",
    "dataset_of",
    "describe_machine",
    "fit",
    "latest_checkpoint",
    "make_optimizer",
    "open_checkpoint",
    "pick_device",
    "plain_item",
    "summary_of",
]
