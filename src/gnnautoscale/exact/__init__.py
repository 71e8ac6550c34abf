"""Full-batch training in constant memory: exact gradients of any loss, one batch at a time.

Passes over all batches that make up one pass over the whole graph, forward and backward; on a GPU they are captured. It
knows nothing about training loops.
"""

from gnnautoscale.exact.passes import ExactPasses, Loss, exact_forward, forget_captured

__all__ = ["ExactPasses", "Loss", "exact_forward", "forget_captured"]
