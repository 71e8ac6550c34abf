"""Graph-level prediction: something for each of many graphs, or of a few large ones.

The model gives rows of nodes; a readout pools them to one row for each graph, and a head predicts from that. Parts of a
graph that are not in a batch are pooled as they were last known, see :mod:`gnnautoscale.tasks.pooling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.forward import evaluating
from gnnautoscale.graph import ClusterLoader, HaloLoader, SampleLoader, partition_graphs
from gnnautoscale.tasks.node import NodeClassification, NodeRegression, NodeTask, kind_of, known_rows
from gnnautoscale.tasks.pooling import PooledParts, device_of, pool_exactly
from gnnautoscale.tasks.readouts import Readout, ReadoutName, make_readout
from gnnautoscale.tasks.task import ClassWeight, Task

#: Names of heads.
HeadName = Literal["linear", "mlp"]


class GraphPrediction(Task):
    """Predict something for each graph.

    It takes a data set of many graphs, see :meth:`gnnautoscale.Dataset.of_graphs`; :func:`gnnautoscale.fit` makes one
    out of three lists of graphs. Targets are those of :class:`NodeClassification` and :class:`NodeRegression`, with a
    row for each graph: integers are classes, 0 and 1 as bool or float are labels, other floats are numbers.

    Parts are groups of whole graphs as far as possible, see :func:`gnnautoscale.graph.partition_graphs`; a step on a
    batch of whole graphs is then PyG's. Of a graph that is larger than that, a batch has some parts, with their halo,
    and pools the others as they were last known.

    Args:
        readout: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"softmax"``, ``"attention"``, or one of PyG's
            aggregations of these kinds. Its weights are trained with the model.
        head: Predicts from pooled rows ``[num_graphs, width]``: ``"linear"``, ``"mlp"`` with one hidden layer, or a
            module.
        metric: The score, as for nodes; by default accuracy of classes, micro-F1 of labels, RMSE of numbers.
        width: Number of outputs of the model for each node.
        stale_dropout: Share of the last known parts that a training step leaves out (Cao et al., 2023).

    Example:
        >>> from torch_geometric.nn import GIN
        >>> import gnnautoscale as gas
        >>> ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
        >>> kinds = [Data(x=torch.ones(6, 1), edge_index=ring[:, : 6 - i], y=torch.tensor([i])) for i in (0, 1)]
        >>> task = GraphPrediction("mean", width=8)
        >>> data = gas.Dataset.of_graphs(kinds * 20)
        >>> result = gas.fit(GIN(1, 8, num_layers=2), data, task=task, num_parts=6, epochs=2)
        >>> result.metric
        'accuracy'
    """

    separable = False
    scores_anywhere = True

    @checked(width={"least": 1}, stale_dropout={"least": 0, "below": 1})
    def __init__(
        self,
        readout: ReadoutName | nn.Module = "sum",
        head: HeadName | nn.Module = "linear",
        *,
        metric: str | None = None,
        width: int = 64,
        stale_dropout: float = 0.0,
    ) -> None:
        if not isinstance(width, int) or width < 1:
            raise InputError("width must be an integer of at least 1", got=repr(width), fix="Change it.")
        if not isinstance(stale_dropout, (int, float)) or not 0 <= stale_dropout < 1:
            got, fix = repr(stale_dropout), "Change it."
            raise InputError("stale_dropout must be at least 0 and below 1", got=got, fix=fix)
        if not isinstance(head, nn.Module) and head not in ("linear", "mlp"):
            raise InputError("a head is linear, mlp or a module", got=repr(head), fix="Choose one of these.")
        self.num_outputs, self._head, self._named_metric = width, head, metric
        self._dropout = stale_dropout
        self.readout: Readout = make_readout(readout, width)
        self._of_graphs: NodeTask | None = None
        self._pooled: PooledParts | None = None
        self._train: Data | None = None
        # The targets of training graphs, on each device once, since a captured step cannot wait for a copy.
        self._y: dict[torch.device, Tensor] = {}
        self._own = self._weight_of_batch = torch.empty(0)
        self._seen: ref[Tensor] | None = None

    # Data ############################################################################################################

    def check_dataset(self, dataset: Dataset) -> None:
        """Refuse a data set that is not one of many graphs, or whose targets do not fit."""
        for graph, splits in dataset.graphs():
            self.check(graph, splits)
        if not dataset.train is not dataset.val is not dataset.test is not dataset.train:
            got, fix = "one for several", "Make the data set with gas.Dataset.of_graphs."
            raise InputError("each split has its own graphs", got=got, fix=fix)

    def check(self, data: Data, splits: Sequence[str]) -> None:
        """Refuse data without graphs and their targets."""
        y, number = data.get("graph_y"), data.get("graph_id")
        if not isinstance(y, Tensor) or not isinstance(number, Tensor):
            raise InputError(
                "graph-level prediction needs graphs with a target each",
                got=", ".join(data.keys()),
                fix="Make the data set with gas.Dataset.of_graphs, or pass three lists of graphs to fit.",
            )
        if not bool(known_rows(y).any()):
            rule = f"the {splits[0]} split needs at least one graph whose target is known"
            raise InputError(rule, got="only unknown ones", fix="Fill them in.")

    def bound_to(self, dataset: Dataset, *, metric: str | None, class_weight: ClassWeight) -> Task:
        """See :meth:`Task.bound_to`; a head that was named is made."""
        self.check_dataset(dataset)
        graphs = _as_nodes(dataset)
        numbers = kind_of(dataset.train.graph_y) == "numbers"
        of_graphs = NodeRegression.of(graphs) if numbers else NodeClassification.of(graphs)
        of_graphs.check_dataset(graphs)
        bound = of_graphs.bound_to(graphs, metric=metric or self._named_metric, class_weight=class_weight)
        self._of_graphs = bound
        self.metric, self.higher_is_better, self.percent = bound.metric, bound.higher_is_better, bound.percent
        if self.module is None:
            head = self._head if isinstance(self._head, nn.Module) else self._make_head(bound.num_outputs)
            self.module = nn.ModuleDict({"readout": self.readout, "head": head})
        self._train, self._y = dataset.train, {}
        self._arrange(torch.zeros(dataset.train.num_nodes, dtype=torch.long))
        return self

    def _make_head(self, outputs: int) -> nn.Module:
        weight = next(self.readout.parameters(), torch.empty(0))
        with torch.no_grad(), evaluating(self.readout):
            one = weight.new_zeros(1, self.num_outputs)
            found = self.readout.partial(one, torch.zeros(1, dtype=torch.long, device=one.device), 1)
            width = self.readout.finish(found, torch.ones(1, device=one.device)).size(1)
        if self._head == "linear":
            return nn.Linear(width, outputs)
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))

    def _arrange(self, labels: Tensor) -> None:
        graph_id = self._training_graphs.graph_id.cpu()
        self._pooled, self._seen = PooledParts(self.readout, graph_id, labels, self._dropout), None

    @property
    def _training_graphs(self) -> Data:
        if self._train is None:
            raise _not_bound()
        return self._train

    def identity(self, data: Data) -> tuple[Tensor | None, ...]:
        """The targets of the graphs."""
        return (data.graph_y,)

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """What is predicted, and the number of graphs in each split."""
        graphs = {f"{split} graphs": graph.graph_y.size(0) for graph, splits in dataset.graphs() for split in splits}
        found = {} if self._of_graphs is None else self._of_graphs.describe(_as_nodes(dataset))
        return {**{name: value for name, value in found.items() if "nodes in split" not in name}, **graphs}

    def cut(self, data: Data, num_parts: int, batch_size: int, **how: Any) -> Tensor | None:
        """Parts that are groups of whole graphs, or pieces of a large one."""
        return partition_graphs(data.edge_index.cpu(), data.graph_id.cpu(), num_parts, batch_size=batch_size, **how)

    def skew(self, data: Data, parts: Tensor) -> float:
        """See :meth:`Task.skew`; each piece that a part has of a graph counts once."""
        count = int(parts.max()) + 1
        pieces = torch.unique(data.graph_id.cpu() * count + parts)
        targets = _graphs_as_nodes(Data(graph_y=data.graph_y.cpu()[pieces // count]))
        return self._bound.skew(targets, pieces % count)

    # Training ########################################################################################################

    def prepare(self, loader: HaloLoader | ClusterLoader | SampleLoader) -> None:
        """See :meth:`Task.prepare`."""
        if isinstance(loader, SampleLoader):
            fix = "Use another mode: gas, full, exact, history or cluster."
            raise InputError("a graph is pooled from all of its nodes", got="neighbour sampling, mode 'sage'", fix=fix)
        self._arrange((loader.parts if isinstance(loader, ClusterLoader) else loader).labels)

    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select the graphs that the batch has nodes of, with all of their pieces, see ``PooledParts.graphs_of``."""
        n_id = batch.n_id
        table = self._pieces.graphs_of(n_id[: batch["batch_size"]].cpu().as_subclass(Tensor))
        known = known_rows(self._training_graphs.graph_y.cpu())
        return None, table[known[table[:, 0]]].to(n_id.device)

    @property
    def _pieces(self) -> PooledParts:
        if self._pooled is None:
            raise _not_bound()
        return self._pooled

    def see(self, out: Any, nodes: Tensor) -> None:
        """Remember which nodes the output belongs to."""
        self._check_width(out)
        self._own, self._seen = nodes.as_subclass(Tensor).long(), ref(out)

    def _check_width(self, out: Any) -> None:
        if not isinstance(out, Tensor) or out.dim() != 2 or out.size(1) != self.num_outputs:
            raise InputError(
                f"the model must return a tensor of {self.num_outputs} columns, a row for each node",
                got=f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
                fix="Give GraphPrediction the number of the model's outputs as width.",
            )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """See :meth:`Task.measuring`."""
        with self._pieces.measuring():
            yield

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """The mean loss over graphs, each weighted by the share of its nodes that the batch has."""
        if self._seen is None or self._seen() is not out or not isinstance(out, Tensor):
            rule = "the loss of graphs follows the batch that the model has just seen"
            raise InputError(rule, got="other outputs", fix="Call see(out, nodes) first.")
        pooled, share = self._pieces.pool(out, self._own, targets)
        losses = self._bound.losses(self._predicted(pooled), self._targets_on(out.device)[targets[:, 0]])
        self._weight_of_batch = share.sum().to(losses.dtype)
        return (losses * share.to(losses.dtype)).sum() / self._weight_of_batch

    def weight(self, targets: Tensor) -> Tensor:
        """See :meth:`Task.weight`: the sum of its shares of graphs."""
        return self._weight_of_batch

    def _targets_on(self, device: torch.device) -> Tensor:
        if device not in self._y:
            self._y[device] = self._bound.typed(self._training_graphs.graph_y).to(device)
        return self._y[device]

    @property
    def _bound(self) -> NodeTask:
        if self._of_graphs is None:
            raise _not_bound()
        return self._of_graphs

    def _predicted(self, pooled: Tensor) -> Tensor:
        head, wanted = self._trained["head"], self._bound.num_outputs
        scores: Tensor = head(pooled)
        if not isinstance(scores, Tensor) or scores.shape != (pooled.size(0), wanted):
            got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            fix = "Change its last layer."
            raise InputError(f"the head must return {wanted} columns, a row for each graph", got=got, fix=fix)
        return scores

    @property
    def _trained(self) -> nn.ModuleDict:
        if not isinstance(self.module, nn.ModuleDict):
            raise _not_bound()
        return self.module

    # Evaluation ######################################################################################################

    @checked(out={"dims": 2})
    @torch.no_grad()
    def predict(self, out: Tensor, data: Data) -> Tensor:
        """What the head makes of graphs, exactly, in evaluation mode.

        Args:
            out: The model's output for all nodes, ``[num_nodes, width]``, such as :func:`gnnautoscale.infer` returns.
            data: The joined graphs, see :func:`gnnautoscale.data.join_graphs`.

        Returns:
            Scores of classes or labels, or numbers, ``[num_graphs, num_outputs]``, in host memory.
        """
        self._check_width(out)
        module = self._trained
        module.eval()
        pooled = pool_exactly(self.readout, out, data.graph_id.cpu())
        return self._predicted(pooled.to(device_of(module, out.device))).cpu()

    @checked(out={"dims": 2}, epochs={"least": 1}, lr={"above": 0})
    def fit_head(self, out: Tensor, data: Data, *, epochs: int = 100, lr: float = 0.01) -> list[float]:
        """Fit the head alone to exact pooled rows, as graph segment training does at its end (Cao et al., 2023).

        Args:
            out: The model's output for all nodes, ``[num_nodes, width]``, such as :func:`gnnautoscale.infer` returns.
            data: The joined training graphs.
            epochs: Number of steps of Adam, each on all graphs.
            lr: Learning rate.

        Returns:
            The loss before each step.
        """
        self._check_width(out)
        module = self._trained.eval()
        pooled = pool_exactly(self.readout, out, data.graph_id.cpu()).to(device_of(module, out.device))
        known = known_rows(data.graph_y.cpu()).nonzero().squeeze(1)
        pooled = pooled[known.to(pooled.device)]
        targets = self._bound.typed(data.graph_y.cpu()[known]).to(pooled.device)
        optimizer = torch.optim.Adam(module["head"].parameters(), lr=lr)
        losses = []
        module["head"].train()
        for _ in range(epochs):
            optimizer.zero_grad()
            loss = self._bound.losses(self._predicted(pooled), targets).mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        module["head"].eval()
        return losses

    @checked(out={"dims": 2})
    def score(self, out: Tensor, data: Data, split: str) -> float:
        """Score the graphs of a split."""
        return self._bound.score(self.predict(out, data), _graphs_as_nodes(data), split)

    def predictions(self, out: Tensor, data: Data) -> dict[str, Tensor]:
        """A row for each graph: scores and classes, or numbers."""
        return self._bound.predictions(self.predict(out, data), data)

    # Checkpoints #####################################################################################################

    def state_dict(self) -> dict[str, Any]:
        """The last known pooled rows of parts."""
        return self._pieces.state_dict()

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from a checkpoint."""
        self._pieces.load_state_dict(state, device)


def _not_bound() -> InputError:
    fix = "Train with gnnautoscale.fit, or call bound_to first."
    return InputError("graph-level prediction must know its data set", got="none", fix=fix)


def _as_nodes(dataset: Dataset) -> Dataset:
    """The targets of graphs as those of nodes."""
    return Dataset(dataset.name, *(_graphs_as_nodes(graph) for graph in (dataset.train, dataset.val, dataset.test)))


def _graphs_as_nodes(data: Data) -> Data:
    everywhere = torch.ones(data.graph_y.size(0), dtype=torch.bool)
    masks = {f"{split}_mask": everywhere for split in ("train", "val", "test")}
    return Data(y=data.graph_y, num_nodes=data.graph_y.size(0), **masks)
