"""Finds out how to run a model with histories.

It tries the model on a small graph, as a whole and in batches, which must agree. The result is a plan; this package
knows nothing about training.
"""

from gnnautoscale.planner.planning import make_plan

__all__ = ["make_plan"]
