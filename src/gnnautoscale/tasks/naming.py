"""Which task: by its name, or the one that fits the data."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from gnnautoscale._util import checked
from gnnautoscale.data import Dataset, TypedLinks
from gnnautoscale.errors import InputError
from gnnautoscale.tasks.graph import GraphPrediction
from gnnautoscale.tasks.link import LinkPrediction
from gnnautoscale.tasks.node import NodeClassification, NodeRegression, kind_of
from gnnautoscale.tasks.task import Task

#: Names of tasks.
TaskName = Literal["classification", "regression", "link", "graph"]


@checked()
def task_for(dataset: Dataset, name: str | None = None) -> Task:
    """The task of a name, or by default the one that fits the targets of a data set.

    Integers are classes, 0 and 1 as bool or float are labels, and other floats are numbers to regress on. Graphs with
    a target each pose a task of graphs.

    Example:
        >>> from torch_geometric.data import Data
        >>> task_for(Dataset.of(Data(x=torch.eye(2), y=torch.tensor([0, 1])))).metric
        'accuracy'
        >>> task_for(Dataset.of(Data(x=torch.eye(2), y=torch.tensor([0.5, 1])))).metric
        'RMSE'
    """
    if name is None and isinstance(dataset, TypedLinks):
        name = "link"
    if name is None:
        y = dataset.train.get("y")
        numbers = isinstance(y, Tensor) and y.layout == torch.strided and not y.is_complex() and kind_of(y) == "numbers"
        name = "graph" if "graph_y" in dataset.train else "regression" if numbers else "classification"
    if name == "classification":
        return NodeClassification.of(dataset)
    if name == "regression":
        return NodeRegression.of(dataset)
    if name == "link":
        return LinkPrediction()
    if name == "graph":
        return GraphPrediction()
    raise InputError(f"a task is one of {', '.join(get_args(TaskName))}", got=repr(name), fix="Choose one of these.")
