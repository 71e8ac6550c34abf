"""The paper's experiments: each has a configuration file, and its results appear beside the published numbers."""

from gnnautoscale.experiments.reproduce.config import Experiment, Job, experiment_names, load_experiment, published
from gnnautoscale.experiments.reproduce.pool import run_all
from gnnautoscale.experiments.reproduce.report import Report, write_files
from gnnautoscale.experiments.reproduce.store import Store
from gnnautoscale.experiments.reproduce.tables import make_report

__all__ = [
    "Experiment",
    "Job",
    "Report",
    "Store",
    "experiment_names",
    "load_experiment",
    "make_report",
    "published",
    "run_all",
    "write_files",
]
