"""Full-batch training in constant memory: exact gradients of any loss, one batch at a time.

Passes over all batches that make up one pass over the whole graph, forward and backward; on a GPU they are captured. It
knows nothing about training loops.
"""

from gnnautoscale.exact.kinds import forget_captured
from gnnautoscale.exact.loss import Loss, check_gradient
from gnnautoscale.exact.passes import ExactPasses
from gnnautoscale.exact.whole_graph import exact_forward

__all__ = ["ExactPasses", "Loss", "check_gradient", "exact_forward", "forget_captured"]
