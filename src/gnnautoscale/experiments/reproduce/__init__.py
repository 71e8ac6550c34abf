"""The paper's experiments: each has a configuration file, and its results appear beside the published numbers."""

from gnnautoscale.experiments.reproduce.config import Experiment, Run, load, names, published
from gnnautoscale.experiments.reproduce.pool import run_all
from gnnautoscale.experiments.reproduce.report import Report, write_report
from gnnautoscale.experiments.reproduce.store import Store
from gnnautoscale.experiments.reproduce.tables import make_report

__all__ = [
    "Experiment",
    "Report",
    "Run",
    "Store",
    "load",
    "make_report",
    "names",
    "published",
    "run_all",
    "write_report",
]
