"""What is predicted and scored.

A task is one object: targets, loss, score, evaluation, and what the data must hold. It knows nothing about how
steps run.
"""

from gnnautoscale.tasks.decoders import Bilinear, Decoder, DecoderName, DistMult, Dot
from gnnautoscale.tasks.graph import GraphPrediction, HeadName
from gnnautoscale.tasks.graph_loader import GraphLoader
from gnnautoscale.tasks.link import LinkPrediction
from gnnautoscale.tasks.link_loader import LinkLoader
from gnnautoscale.tasks.metrics import METRICS
from gnnautoscale.tasks.naming import TaskName, task_for
from gnnautoscale.tasks.node import NodeClassification, NodeRegression, NodeTask, known_rows
from gnnautoscale.tasks.readouts import ReadoutName
from gnnautoscale.tasks.task import ClassWeight, Task, check_task, trained_rows

__all__ = [
    "METRICS",
    "Bilinear",
    "ClassWeight",
    "Decoder",
    "DecoderName",
    "DistMult",
    "Dot",
    "GraphLoader",
    "GraphPrediction",
    "HeadName",
    "LinkLoader",
    "LinkPrediction",
    "NodeClassification",
    "NodeRegression",
    "NodeTask",
    "ReadoutName",
    "Task",
    "TaskName",
    "check_task",
    "known_rows",
    "task_for",
    "trained_rows",
]
