"""Link prediction: which pairs of nodes have an edge.

A batch scores all edges that touch its nodes. The row of an end outside the batch comes from a history of the model's
output and is a constant; the batch of that end sees the pair as well, with the roles exchanged. So over an epoch each
edge contributes the gradients of both of its ends, as in full batch.

Pairs without an edge are scored only where both ends are in the batch, and weighted by how rarely they meet. A constant
row would not do: the model would learn to move away from where all rows have been a moment ago, faster and faster.

The baselines have no histories: joined parts score the pairs inside, and neighbour sampling brings its own pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import ClusterLoader, HaloLoader, SampleLoader
from gnnautoscale.ranks import RankLoader
from gnnautoscale.tasks.decoders import DecoderName, make_decoder
from gnnautoscale.tasks.link_metrics import LinkMetric
from gnnautoscale.tasks.link_rows import PairRows
from gnnautoscale.tasks.link_sampling import LinkSampleLoader
from gnnautoscale.tasks.pairs import EdgeKind, Meetings, Pairs, check_graphs, check_leaks, known_keys
from gnnautoscale.tasks.ranking import KnownEdges, best_partners, check_relations, pair_scores, ranks, with_negatives
from gnnautoscale.tasks.task import ClassWeight, Task

# Edges of the training split that are ranked after an epoch; there may be many, and they decide nothing.
_MOST_RANKED = 2_000
# A batch that does not hold all nodes draws this many times more pairs without an edge, which weigh as much together:
# few pairs with large weights make noisy steps.
_DRAWN_MORE = 5
# Drawn candidates and negatives are the same in every evaluation.
_SEED = 0


class LinkPrediction(Task):
    """Predict which pairs of nodes have an edge.

    It takes graphs as PyG's ``RandomLinkSplit`` makes them, one for each split: ``edge_index`` are the edges that pass
    messages, and pairs to score are ``edge_label_index``, ``[2, num_pairs]``, with ``edge_label``, ``[num_pairs]``,
    above 0 for an edge, 0 for none, all edges if left out; or PyG's triplets ``src_index``, ``dst_pos_index`` and
    ``dst_neg_index``. Typed edges have ``edge_type``, and pairs ``edge_label_type``, ``[num_pairs]``, of triplets
    ``[num_positives]``; the reverse of a relation may be a relation with as many added to its number. No positive may
    be an edge that passes messages.

    The loss is binary cross entropy over pairs. Where the training data hold no negatives, they are drawn in each step:
    two nodes of the batch, or for typed edges a positive with one end replaced; known edges are left out. Weights make
    up for nodes of different parts that meet rarely, so that negatives stand for all pairs of the graph. Batches must
    therefore consist of several parts.

    Args:
        decoder: Scores pairs: ``"dot"``, ``"bilinear"``, ``"distmult"`` for typed edges, or a module that takes rows of
            sources and targets, and relations if there are any, and returns ``[num_pairs]``. It is trained with the
            model.
        metric: ``"ROC-AUC"`` or ``"average-precision"`` of positives against negatives, which are drawn if the data
            hold none; ``"MRR"`` or ``"Hits@k"`` for any ``k``: where the target of a positive stands among nodes that
            are no known targets of its source; of typed edges also the source among sources; of the training split
            2,000 positives at most. All in percent.
        negatives: Number of negatives to draw for each positive in training; by default none if the data hold some,
            else one.
        candidates: Number of nodes to draw for each rank; by default the negatives of triplets, or all nodes.
        reconstruct: Whether training positives may be edges that pass messages, as in graph autoencoders.
        width: Number of outputs of models that are built by name, and of the decoders that need to know it.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> from torch_geometric.transforms import RandomLinkSplit
        >>> import gnnautoscale as gas
        >>> split = RandomLinkSplit(is_undirected=True, disjoint_train_ratio=0.3, add_negative_train_samples=False)
        >>> model, task = GCN(34, 16, num_layers=2), LinkPrediction("bilinear", width=16)
        >>> result = gas.fit(model, split(KarateClub()[0]), task=task, num_parts=8, batch_size=4, epochs=2)
        >>> result.metric
        'ROC-AUC'
    """

    percent = True
    scores_anywhere = True
    separable = False
    least_parts = 2

    @checked(negatives={"least": 1}, candidates={"least": 1}, width={"least": 1})
    def __init__(
        self,
        decoder: DecoderName | nn.Module = "dot",
        *,
        metric: str = "ROC-AUC",
        negatives: int | None = None,
        candidates: int | None = None,
        reconstruct: bool = False,
        width: int = 64,
    ) -> None:
        self.module = decoder if isinstance(decoder, nn.Module) else None
        self._named, self.num_outputs = decoder if isinstance(decoder, str) else "", width
        self._negatives, self._candidates, self.reconstruct = negatives, candidates, reconstruct
        self._choose(metric)
        self._known = self._back = self._trained = KnownEdges(torch.empty(0, dtype=torch.long), 1)
        self._pairs: Pairs | None = None
        self._num_relations: int | None = None
        self._rows: PairRows | None = None
        # Whether batches bring all of their pairs.
        self._sampled = False
        self._measures, self._weight_of_batch = False, torch.empty(0)

    def _choose(self, metric: str) -> None:
        self._measure = LinkMetric.named(metric)
        self.metric = self._measure.name

    # Data ############################################################################################################

    def check_dataset(self, dataset: Dataset) -> None:
        """Refuse graphs without pairs to score, and pairs that a model has seen."""
        check_graphs(dataset)
        for graph, splits in dataset.graphs():
            self.check(graph, splits)
        check_leaks(dataset, _edges_of(dataset), reconstruct=self.reconstruct)

    def check(self, data: Data, splits: Sequence[str]) -> None:
        """Refuse a graph without positives."""
        if not bool(Pairs.of(data).label.any()):
            rule = f"the {splits[0]} split needs at least one pair that is an edge"
            raise InputError(rule, got="none", fix="Set edge_label above 0 for edges.")

    def bound_to(self, dataset: Dataset, *, metric: str | None, class_weight: ClassWeight) -> Task:
        """See :meth:`Task.bound_to`; a decoder that was named is made."""
        if class_weight != "none":
            got, fix = f"class_weight={class_weight!r}", "Change the number of negatives instead."
            raise InputError("link prediction has no classes to weigh", got=got, fix=fix)
        if metric is not None:
            self._choose(metric)
        edges = _edges_of(dataset)
        self._num_relations = edges.num_relations
        if self.module is None:
            self.module = make_decoder(self._named, self._num_relations, self.num_outputs)
        self._pairs = Pairs.of(dataset.train)
        if self._pairs.between is not None:
            self.why_uncaptured = "steps on links between types are not captured"
        count, graphs = self._pairs.num_nodes, [graph for graph, _ in dataset.graphs()]
        self._known, self._back = (
            KnownEdges(torch.cat([known_keys(graph, edges, backwards=way) for graph in graphs]), count)
            for way in (False, True)
        )
        # Training may know the training graph only.
        self._trained = KnownEdges(known_keys(dataset.train, edges), count)
        self._rows, self._sampled = PairRows(self._pairs, self._always()), False
        return self

    @property
    def is_bound(self) -> bool:
        """Whether it knows its data set."""
        return self._pairs is not None

    def identity(self, data: Data) -> tuple[Tensor | None, ...]:
        """The pairs of the graph."""
        pairs = Pairs.of(data)
        return pairs.ends, pairs.label, pairs.relation

    def describe(self, dataset: Dataset) -> dict[str, Any]:
        """Number of positives of each split, and of relations."""
        counts = {
            f"{split} positives": int(Pairs.of(graph).label.sum())
            for graph, splits in dataset.graphs()
            for split in splits
        }
        relations = _edges_of(dataset).num_relations
        return counts if relations is None else {"relations": relations, **counts}

    # Training ########################################################################################################

    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Select the pairs that touch the batch's nodes: source, target, label and relation, ``[num_pairs, 4]``."""
        if "links" in batch:
            return None, batch.links
        pairs, n_id = self._training_pairs, batch.n_id
        nodes = n_id[: batch.batch_size].cpu().as_subclass(Tensor)
        found = pairs.touching(nodes)
        if self._rows_of_step.alone:
            found = found[torch.isin(pairs.ends[:, found], nodes).all(dim=0)]
        relation = torch.zeros_like(found) if pairs.relation is None else pairs.relation[found]
        return None, torch.stack([*pairs.ends[:, found], pairs.label[found].long(), relation], dim=1).to(n_id.device)

    @property
    def _training_pairs(self) -> Pairs:
        if self._pairs is None:
            raise _not_bound()
        return self._pairs

    @property
    def _rows_of_step(self) -> PairRows:
        if self._rows is None:
            raise _not_bound()
        return self._rows

    def _always(self) -> Meetings:
        """All nodes meet in each step."""
        return Meetings(torch.zeros(self._training_pairs.num_nodes, dtype=torch.long), 1.0)

    def prepare(self, loader: HaloLoader | ClusterLoader | SampleLoader) -> None:
        """See :meth:`Task.prepare`."""
        pairs, self._sampled = self._training_pairs, isinstance(loader, SampleLoader)
        if isinstance(loader, RankLoader) and loader.shard is not None:
            self._rows = PairRows.on_ranks(pairs, loader)
        elif isinstance(loader, HaloLoader):
            self._rows = PairRows(pairs, Meetings.of(loader))
        else:
            self._rows = PairRows(pairs, self._always(), alone=True)

    def sampled(self, data: Data, fan_out: Sequence[int], num_batches: int, **options: Any) -> SampleLoader:
        """See :meth:`Task.sampled`; around pairs, with negatives over the whole graph."""
        pairs, draws = self._training_pairs, self._draws
        return LinkSampleLoader(data, pairs, self._trained, draws, fan_out, num_batches, **options)

    def see(self, out: Tensor, nodes: Tensor) -> None:
        """Remember the output of the batch's own nodes, and where they are in it."""
        self._rows_of_step.see(out, nodes, remember=not self._measures)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """See :meth:`Task.measuring`."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """Binary cross entropy of given and drawn pairs, the weighted mean.

        An edge with one end outside is seen by two batches. Each of them counts it half, and its own end double, so
        that a decoder learns from each edge once.
        """
        rows = self._rows_of_step
        if not rows.belong_to(out):
            rule = "the loss of links follows the batch that the model has just seen"
            raise InputError(rule, got="other outputs", fix="Call see(out, nodes) first.")
        source, target, label, relation = targets.unbind(dim=1)
        edge, across = label > 0, ~(rows.inside(source) & rows.inside(target))
        # Pairs in two batches count half in each; those without an edge only where both ends are, for all who do not
        # meet.
        share = torch.where(across, 0.5, 1.0)
        weight, wanted = torch.where(edge, share, share * rows.stand_for(source, target)), label.float()
        scores = self._scores(out, source, target, relation, across)
        if self._draws:
            *drawn, others = self._draw(source, target, relation, weight * edge)
            scores, weight = torch.cat([scores, self._scores(out, *drawn)]), torch.cat([weight, others])
            wanted = F.pad(wanted, (0, weight.numel() - wanted.numel()))
        losses = F.binary_cross_entropy_with_logits(scores.float(), wanted, reduction="none")
        self._weight_of_batch = weight.sum()
        return (losses * weight).sum() / self._weight_of_batch.clamp(min=1e-12)

    def weight(self, targets: Tensor) -> Tensor:
        """See :meth:`Task.weight`: the sum over pairs."""
        return self._weight_of_batch

    def weight_of(self, data: Data) -> float:
        """See :meth:`Task.weight_of`."""
        label = Pairs.of(data).label
        return float(label.numel() + self._draws * int(label.sum()))

    @property
    def _draws(self) -> int:
        """How many negatives to draw for each positive."""
        if self._sampled:
            return 0  # the batch has them
        if self._negatives is not None:
            return self._negatives
        return 1 if self._training_pairs.are_edges else 0

    def _draw(self, source: Tensor, target: Tensor, relation: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Draw negatives inside the batch for pairs with weights: source, target, relation, weight, ``[count]`` each.

        Together they weigh as much as the pairs, times the number of negatives for each. The host reads no value here,
        so that a GPU can capture it: what turns out to be an edge, and what is drawn for pairs without weight, weighs
        nothing.
        """
        rows, total = self._rows_of_step, weight.sum() * self._draws
        draws = self._draws if rows.is_whole else _DRAWN_MORE * self._draws
        source, target, relation, weight = (each.repeat(draws) for each in (source, target, relation, weight))
        if self._num_relations is None:
            first, second = rows.draw(source.numel())
            if not first.numel():  # all nodes of this step are of the type at one end
                return first, second, first, weight[:0]
        else:
            # An end in another rank's batch would not do: that rank does not know the edge, and could not do its half.
            first, second = rows.own[torch.randint(rows.own.numel(), (2, source.numel()), device=source.device)]
            backwards = torch.rand(source.shape, device=source.device) < 0.5
            source_in, target_in = rows.inside(source), rows.inside(target)
            backwards = torch.where(source_in & target_in, backwards, target_in)
            first, second = torch.where(backwards, first, source), torch.where(backwards, target, second)
        kind = None if self._num_relations is None else relation
        real = ~self._trained.contain(first, second, kind) & (first != second) & (weight > 0)
        drawn = rows.stand_for(first, second) * real
        if self._num_relations is not None:
            drawn = drawn * weight  # an edge that two batches see has one negative, not two
        drawn = drawn * (total / drawn.sum().clamp(min=1e-12))
        return first, second, relation, drawn

    def _scores(
        self, out: Tensor, source: Tensor, target: Tensor, relation: Tensor, across: Tensor | None = None
    ) -> Tensor:
        """Scores of pairs inside the batch; or, if some are ``across`` its border, these with twice their gradient."""
        known = self._rows_of_step
        if across is None and known.others.numel():
            across = ~(known.inside(source) & known.inside(target))
        rows = [known.of(out, end, across) for end in (source, target)]
        scores: Tensor = self._made()(*rows, *(() if self._num_relations is None else (relation,)))
        return scores

    # Evaluation ######################################################################################################

    @checked(out={"dims": 2})
    @torch.no_grad()
    def score(self, out: Tensor, data: Data, split: str) -> float:
        """Score the pairs of a graph, in percent; chunks of pairs are in memory at a time."""
        pairs, decoder = Pairs.of(data), self._made().eval()
        if out.size(0) != data.num_nodes:
            rule = f"the output must have one row for each of the {data.num_nodes} nodes"
            raise InputError(rule, got=f"shape {tuple(out.shape)}", fix="Pass what gas.infer returns.")
        positives = pairs.positives
        if not positives.ends.size(1):
            return math.nan
        generator = torch.Generator().manual_seed(_SEED)
        if not self._measure.ranks:
            ends, label, relation = pairs.ends, pairs.label, pairs.relation
            if bool(label.all()):
                ends, label, relation = with_negatives(pairs, self._known, generator)
            return self._measure.of_scores(pair_scores(decoder, out, ends, relation), label)
        others = pairs.others
        if split == "train" and positives.ends.size(1) > _MOST_RANKED:
            chosen = torch.linspace(0, positives.ends.size(1) - 1, _MOST_RANKED).long()
            positives, others = positives.at(chosen), None if others is None else others[chosen]
        shape = (positives.ends.size(1), self._candidates or 0)
        drawn = pairs.draw(shape, generator, 1) if self._candidates else others
        found = [ranks(decoder, out, positives, self._known, drawn)]
        if self._num_relations is not None and pairs.others is None:
            drawn = pairs.draw(shape, generator, 0) if self._candidates else None
            found.append(ranks(decoder, out, positives, self._back, drawn, backwards=True))
        return self._measure.of_ranks(torch.cat(found))

    def _made(self) -> nn.Module:
        if self.module is None:
            fix = "Train with gnnautoscale.fit, or call bound_to first."
            raise InputError("a decoder that is named is made for a data set", got="none", fix=fix)
        return self.module

    @checked(out={"dims": 2})
    @torch.no_grad()
    def scores(self, out: Tensor, pairs: Tensor, relation: Tensor | None = None) -> Tensor:
        """Score any pairs of nodes.

        Args:
            out: The model's output for all nodes, ``[num_nodes, width]``, such as :func:`gnnautoscale.infer` returns.
            pairs: Sources and targets, ``[2, num_pairs]``.
            relation: Their relations, ``[num_pairs]``, if edges are typed.

        Returns:
            Scores, ``[num_pairs]``; above 0 the model believes in an edge.

        Example:
            >>> from gnnautoscale.tasks import Dot
            >>> LinkPrediction(Dot()).scores(torch.eye(3), torch.tensor([[0, 0], [0, 1]]))
            tensor([1., 0.])
        """
        named = {"edge_label_index": pairs, "edge_label_type": relation, "edge_type": relation}
        given = {name: value for name, value in named.items() if value is not None}
        checked = Pairs.of(Data(num_nodes=out.size(0), **given))
        check_relations(checked.relation, self._num_relations)
        return pair_scores(self._made().eval(), out, checked.ends, checked.relation)

    @checked(out={"dims": 2}, node={"least": 0}, count={"least": 1}, relation={"least": 0})
    @torch.no_grad()
    def partners(
        self, out: Tensor, node: int, count: int, *, relation: int | None = None, new: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The nodes that a node has most likely an edge to.

        Args:
            out: The model's output for all nodes, ``[num_nodes, width]``.
            node: The source.
            count: How many targets.
            relation: The type of edges, if they have one.
            new: Whether to leave out edges that the data set has.

        Returns:
            The targets and their scores, best first, both ``[count]``, or fewer if there are no more.

        Example:
            >>> rows = torch.tensor([[1.0], [2.0], [-1.0], [3.0]])
            >>> from gnnautoscale.tasks import Dot
            >>> LinkPrediction(Dot()).partners(rows, node=0, count=2)
            (tensor([3, 1]), tensor([3., 2.]))
        """
        if not 0 <= node < out.size(0):
            fix = "Check the numbering."
            raise InputError(f"node must be from 0 to {out.size(0) - 1}", got=str(node), fix=fix)
        check_relations(None if relation is None else torch.tensor([relation]), self._num_relations)
        among = None if self._pairs is None else self._pairs.range_of(1)
        return best_partners(self._made().eval(), out, node, relation, count, self._known if new else None, among)

    def predictions(self, out: Tensor, data: Data) -> dict[str, Tensor]:
        """The rows that decoders score; see :meth:`scores` and :meth:`partners` for what they make of these."""
        return {"embeddings": out}

    # Checkpoints #####################################################################################################

    def state_dict(self) -> dict[str, Any]:
        """The last known outputs."""
        known = None if self._rows is None else self._rows.known
        return {} if known is None or not known.numel() else {"outputs": known}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from a checkpoint."""
        if "outputs" in state:
            self._rows_of_step.known = state["outputs"].to(device)


def _not_bound() -> InputError:
    fix = "Train with gnnautoscale.fit, or call bound_to first."
    return InputError("link prediction must know its data set", got="none", fix=fix)


def _edges_of(dataset: Dataset) -> EdgeKind:
    return EdgeKind.of([graph for graph, _ in dataset.graphs()])
