"""The contract of a task: everything that training asks about targets, loss and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import ClusterLoader, HaloLoader, SampleLoader

#: Whether classes count as often as they occur, or all the same.
ClassWeight = Literal["none", "balanced"]


class Task(ABC):
    """What a model learns and how it is judged. A task of your own needs ``targets``, ``loss`` and ``score``.

    Example:
        >>> class Deviation(Task):
        ...     metric, higher_is_better = "largest error", False
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
        ...         return float((out.squeeze(1) - data.y)[mask].abs().max())
        >>> mask = torch.tensor([True, False])
        >>> Deviation().targets_of_graph(Data(x=torch.ones(2, 1), y=torch.tensor([0.5, 2.0]), train_mask=mask))
        (tensor([0]), tensor([0.5000]))
    """

    #: Name of the score.
    metric: str = "score"
    #: Whether larger scores are better; it decides about the best epoch.
    higher_is_better: bool = True
    #: Whether scores are in percent.
    percent: bool = False
    #: Number of outputs per node that a model needs.
    num_outputs: int = 1
    #: What is trained besides the model, such as a decoder of links.
    module: nn.Module | None = None
    #: Whether the loss of a batch needs nothing but the batch, so that the mean over batches is that of the graph.
    separable: bool = True
    #: Number of parts that a batch has at least.
    least_parts: int = 1
    #: Why a GPU must not capture steps, in words; ``None`` if it may.
    why_uncaptured: str | None = None
    #: Whether :meth:`score` also takes outputs on a GPU, which saves the time to copy them.
    scores_anywhere: bool = False

    @property
    def knows_rows_only(self) -> bool:
        """Whether it looks at nothing but ``y`` and masks of the nodes at hand, whatever their numbers."""
        return False

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

    def prepare(self, loader: HaloLoader | ClusterLoader | SampleLoader) -> None:  # noqa: B027 - likewise
        """Meet the loader of the training graph before the first step; refuse batches that do not serve the task."""

    def sampled(self, data: Data, fan_out: Sequence[int], num_batches: int, **options: Any) -> SampleLoader:
        """The batches that neighbour sampling trains on: by default around the nodes that have targets.

        Args:
            data: The training graph.
            fan_out: Number of neighbours per layer.
            num_batches: Number of batches per epoch.
            options: Further arguments of the loader.
        """
        rows, _ = self.targets_of_graph(data)
        nodes = torch.arange(data.num_nodes) if rows is None else rows
        return SampleLoader(data, nodes, fan_out, num_batches, **options)

    def cut(self, data: Data, num_parts: int, batch_size: int, **how: Any) -> Tensor | None:
        """The part of each node of a graph, ``[num_nodes]``, if the task has its own way to cut it.

        ``how`` are the further arguments of :func:`gnnautoscale.graph.partition`.
        """
        return None

    def see(self, out: Any, nodes: Tensor) -> None:  # noqa: B027 - a task may need nothing
        """Take note of a training step's output before its loss.

        Args:
            out: The model's output for the batch's own nodes, ``[batch_size, num_outputs]``.
            nodes: Which nodes of the graph they are, ``[batch_size]``.
        """

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which the task remembers nothing of what it sees, since it is no training."""
        yield

    def weight(self, targets: Tensor) -> Tensor | int:
        """What the batch whose loss was just computed counts in the mean over batches: its number of targets.

        What all batches of a graph count together is :meth:`weight_of`.
        """
        return targets.size(0)

    def weight_of(self, data: Data) -> float:
        """What all batches of a graph count together; see :meth:`weight`."""
        return float(self.targets_of_graph(data)[1].size(0))

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

    def predictions(self, out: Tensor, data: Data) -> dict[str, Tensor]:
        """Turn the model's output for all nodes of a graph into named tensors for a file."""
        return {"scores": out}

    def skew(self, data: Data, parts: Tensor) -> float:
        """Measure how far the targets of ``parts``, ``[num_nodes]``, are from the graph's, from 0 (not at all) to 1."""
        return 0.0

    def bound_to(self, dataset: Dataset, *, metric: str | None, class_weight: ClassWeight) -> Task:
        """The task as a data set poses it, with these options of :func:`gnnautoscale.fit`.

        A task of your own refuses the options. What it has to know about all splits, it can learn here.
        """
        if metric is not None or class_weight != "none":
            raise InputError(
                "metric and class_weight belong to tasks that know them",
                got=f"one of them with a {type(self).__name__}",
                fix="Leave them out: the task has its own score and its own loss.",
            )
        return self

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for training to go on with the same numbers, besides :attr:`module`."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:  # noqa: B027 - likewise
        """Continue from a checkpoint, on a device."""

    def evaluate(self, dataset: Dataset, output: Callable[[str], Tensor]) -> dict[str, float]:
        """Score all splits; ``output`` returns the model's output for all nodes of a split's graph, once per graph."""
        scores: dict[str, float] = {}
        for graph, splits in dataset.graphs():
            out = output(splits[0])
            if not bool(torch.isfinite(out).all()):
                raise FloatingPointError("the model's outputs are not finite any more")
            scores |= {split: self._checked_score(self.score(out, graph, split)) for split in splits}
        return scores

    def _checked_score(self, score: object) -> float:
        if isinstance(score, (int, float)) or (isinstance(score, Tensor) and score.numel() == 1):
            return float(score)
        got = f"a tensor of shape {tuple(score.shape)}" if isinstance(score, Tensor) else f"a {type(score).__name__}"
        raise InputError(f"{type(self).__name__}.score must return a number", got=got, fix="Return a float.")


def trained_rows(out: Any, rows: Tensor | None) -> Any:
    """Some rows of a model's output, ``[count]``, or all of it; an output without rows is refused."""
    if rows is None:
        return out
    if not isinstance(out, Tensor) or out.dim() == 0 or out.is_complex():
        got = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        rule = "a model must return a tensor of real numbers with a row for each node"
        raise InputError(rule, got=got, fix="Return such a tensor.")
    return out[rows]


def check_task(task: object, data: Data) -> Task:
    """Refuse what is no task, and a task whose selection of rows and targets does not fit the graph."""
    if not isinstance(task, Task):
        raise InputError(
            "task must be a name or an object of a class derived from gnnautoscale.tasks.Task",
            got=f"a {type(task).__name__}",
            fix="Derive it, with the methods targets, loss and score.",
        )
    name = f"{type(task).__name__}.targets"
    selected = task.targets_of_graph(data)
    fix = "Return the rows of nodes (or None for all) and a tensor with their targets."
    if not (isinstance(selected, tuple) and len(selected) == 2 and isinstance(selected[1], Tensor)):
        raise InputError(f"{name} must return rows and targets", got=f"a {type(selected).__name__}", fix=fix)
    rows, targets = selected
    form = rows is None or (isinstance(rows, Tensor) and rows.dtype == torch.long and rows.dim() == 1)
    if not form or (rows is not None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < data.num_nodes):
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise InputError(f"rows of {name} must be indices of the batch's own nodes, int64", got=got, fix=fix)
    if targets.dim() == 0:
        raise InputError(f"targets of {name} must have a row each", got="a single number", fix=fix)
    return task
