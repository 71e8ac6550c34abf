"""The paper's experiments: one configuration file each, run, continued, and shown beside the published numbers."""

from gnnautoscale.reproduce.config import Experiment, Run, load, names, published
from gnnautoscale.reproduce.pool import run_all
from gnnautoscale.reproduce.report import Report, make_report, write_report
from gnnautoscale.reproduce.store import Store

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
