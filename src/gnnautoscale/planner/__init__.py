"""Finds out how a model must be run with histories.

A model is tried on a small graph, as a whole and in batches, and the two must agree. The result is a plan; what
it is used for is not known here.
"""

from gnnautoscale.planner.planning import make_plan

__all__ = ["make_plan"]
