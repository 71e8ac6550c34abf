"""What a training run leaves behind: its folder, its result, and sentences about what limited it.

This package does not know how the numbers were measured.
"""

from gnnautoscale.runs.findings import compensation_pays, explain
from gnnautoscale.runs.folder import RUN, RunFolder, RunRecord, check_run_dir, free_folder, read_run
from gnnautoscale.runs.result import Epoch, FitResult, jsonable

__all__ = [
    "RUN",
    "Epoch",
    "FitResult",
    "RunFolder",
    "RunRecord",
    "check_run_dir",
    "compensation_pays",
    "explain",
    "free_folder",
    "jsonable",
    "read_run",
]
