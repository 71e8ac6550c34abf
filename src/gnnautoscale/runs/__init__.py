"""What a training run leaves behind.

Its folder, its result, and in sentences what limited it. How the numbers were measured is not known here.
"""

from gnnautoscale.runs.findings import explain
from gnnautoscale.runs.folder import RUN, RunFolder, RunRecord, check_run_dir, free_folder, read_run
from gnnautoscale.runs.result import Epoch, FitResult, jsonable

__all__ = [
    "RUN",
    "Epoch",
    "FitResult",
    "RunFolder",
    "RunRecord",
    "check_run_dir",
    "explain",
    "free_folder",
    "jsonable",
    "read_run",
]
