"""What is predicted and scored.

A task is one object: targets, loss, score, evaluation, and what the data must hold. It knows nothing about how
steps run.
"""

from gnnautoscale.tasks.node import NodeClassification, task_for
from gnnautoscale.tasks.task import Task

__all__ = ["NodeClassification", "Task", "task_for"]
