"""Finds out how to run a model with histories.

It tries a copy of the model on small graphs, as a whole and in batches, which must agree. The result is a plan; this
package knows nothing about training.
"""

from gnnautoscale.planner.planning import make_plan, skips_at_random, still_holds
from gnnautoscale.planner.randomness import expected_randomness
from gnnautoscale.planner.trial_graph import graph_form

__all__ = ["expected_randomness", "graph_form", "make_plan", "skips_at_random", "still_holds"]
