"""The contract of a task: everything that training asks about targets, loss and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset


class Task(ABC):
    """What a model learns and how it is judged. A task of your own needs ``targets``, ``loss`` and ``score``.

    Example:
        >>> class Regression(Task):
        ...     metric = "negative error"
        ...
        ...     def targets(self, batch):
        ...         rows = batch.train_mask[: batch.batch_size].nonzero().squeeze(1)
        ...         return rows, batch.y[rows]
        ...
        ...     def loss(self, out, targets):
        ...         return (out.squeeze(1) - targets).square().mean()
        ...
        ...     def score(self, out, data, split):
        ...         mask = data[f"{split}_mask"]
        ...         return -float((out.squeeze(1) - data.y)[mask].abs().mean())
        >>> mask = torch.tensor([True, False])
        >>> Regression().targets_of_graph(Data(x=torch.ones(2, 1), y=torch.tensor([0.5, 2.0]), train_mask=mask))
        (tensor([0]), tensor([0.5000]))
    """

    #: Name of the score. Larger scores are better.
    metric: str = "score"
    #: Number of outputs per node that a model needs.
    num_outputs: int = 1
    #: Whether :meth:`score` also takes outputs on a GPU, which saves the time to copy them.
    scores_anywhere: bool = False

    @abstractmethod
    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select what to train on.

        Args:
            batch: A batch: the first ``batch.batch_size`` rows are its own nodes, the others its halo. ``batch.n_id``
                says which nodes of the graph they are.

        Returns:
            The rows of the model's output that the loss takes, ``[num_rows]``, or ``None`` for all of the batch's own
            nodes, and their targets, ``[num_targets, ...]``. A batch without targets has ``num_targets = 0``.
        """

    @abstractmethod
    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """Compute the mean loss.

        Args:
            out: The model's output for the selected rows, ``[num_rows, num_outputs]``.
            targets: Their targets, ``[num_targets, ...]``.
        """

    @abstractmethod
    def score(self, out: Tensor, data: Data, split: str) -> float:
        """Score the model's output for a whole graph.

        Args:
            out: Outputs of all nodes, ``[num_nodes, num_outputs]``, in host memory unless the task
                :attr:`scores_anywhere`.
            data: The graph.
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            The score, or NaN if the split is empty.
        """

    def targets_of_graph(self, data: Data) -> tuple[Tensor | None, Tensor]:
        """Select what to train on in a whole graph, as :meth:`targets` does in a batch."""
        whole = Data.from_dict(dict(data))
        whole.num_nodes = whole.batch_size = data.num_nodes
        whole.n_id = torch.arange(data.num_nodes)
        return self.targets(whole)

    def check(self, data: Data, splits: Sequence[str]) -> None:  # noqa: B027 - a task may need nothing
        """Refuse a graph that lacks what the task needs, such as targets in each of the ``splits``."""

    def check_dataset(self, dataset: Dataset) -> None:
        """Refuse a data set that cannot be trained on, before any work is done.

        Training and validation need targets. Test targets are optional, unless they have a graph of their own.
        """
        for graph, splits in dataset.graphs():
            self.check(graph, [split for split in splits if split != "test"] or splits)

    def identity(self, data: Data) -> tuple[Tensor | None, ...]:
        """Return the tensors that training depends on besides the graph: a resumed run must have the same."""
        return self.targets_of_graph(data)

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """Describe the targets of a data set as plain values, for run folders and ``gas data``."""
        return {}

    def predictions(self, out: Tensor) -> dict[str, Tensor]:
        """Turn the model's output into named tensors for a file."""
        return {"scores": out}

    def skew(self, data: Data, parts: Tensor) -> float:
        """Measure how far the targets of ``parts``, ``[num_nodes]``, are from the graph's, from 0 (not at all) to 1."""
        return 0.0

    def evaluate(self, dataset: Dataset, output: Callable[[str], Tensor]) -> dict[str, float]:
        """Score all splits; ``output`` returns the model's output for all nodes of a split's graph, once per graph."""
        scores: dict[str, float] = {}
        for graph, splits in dataset.graphs():
            out = output(splits[0])
            if not bool(torch.isfinite(out).all()):
                raise FloatingPointError("the model's outputs are not finite any more")
            scores |= {split: self.score(out, graph, split) for split in splits}
        return scores
