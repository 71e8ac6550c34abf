"""The paper's experiments: one configuration file each, run, continued, and shown beside the published numbers."""

from gnnautoscale.journal import describe_machine
from gnnautoscale.reproduce.config import Experiment, Run, load, names, published
from gnnautoscale.reproduce.pool import run_all
from gnnautoscale.reproduce.report import Report, write_report
from gnnautoscale.reproduce.store import Store
from gnnautoscale.reproduce.tables import make_report

__all__ = [
    "Experiment",
    "Report",
    "Run",
    "Store",
    "describe_machine",
    "load",
    "make_report",
    "names",
    "published",
    "run_all",
    "write_report",
]
