"""What a training run leaves behind: its folder, its result, and sentences about what limited it.

This package does not know how the numbers were measured.
"""

from gnnautoscale.runs.findings import compensation_pays, explain
from gnnautoscale.runs.folder import RESULT, RunFolder, RunRecord, check_run_dir, free_folder, is_run_dir, read_run
from gnnautoscale.runs.result import Epoch, FitResult, jsonable

__all__ = [
    "RESULT",
    "Epoch",
    "FitResult",
    "RunFolder",
    "RunRecord",
    "check_run_dir",
    "compensation_pays",
    "explain",
    "free_folder",
    "is_run_dir",
    "jsonable",
    "read_run",
]
