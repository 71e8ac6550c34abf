"""What is predicted and scored.

A task is one object: targets, loss, score, evaluation, and what the data must hold. It knows nothing about how
steps run.
"""

from gnnautoscale.tasks.node import Objective, class_loss, evaluate, score

__all__ = ["Objective", "class_loss", "evaluate", "score"]
