"""What a training run leaves behind: its folder, its result, its progress, and sentences about what limited it.

This package does not know how the numbers were measured.
"""

from gnnautoscale.runs.findings import compensation_pays, explain
from gnnautoscale.runs.folder import (
    RESULT,
    RunFolder,
    RunRecord,
    as_run_wrote,
    check_run_dir,
    free_folder,
    is_run_dir,
    read_run,
)
from gnnautoscale.runs.progress import Phases, epochs_shown, print_line, score_text, terminal
from gnnautoscale.runs.result import Epoch, FitResult, jsonable

__all__ = [
    "RESULT",
    "Epoch",
    "FitResult",
    "Phases",
    "RunFolder",
    "RunRecord",
    "as_run_wrote",
    "check_run_dir",
    "compensation_pays",
    "epochs_shown",
    "explain",
    "free_folder",
    "is_run_dir",
    "jsonable",
    "print_line",
    "read_run",
    "score_text",
    "terminal",
]
