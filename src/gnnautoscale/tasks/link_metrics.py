"""The metrics of links, in percent: how well scores tell edges from other pairs, or where edges rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.tasks.metrics import average_precision, roc_auc

_OF_SCORES = {"ROC-AUC": roc_auc, "average-precision": average_precision}
_NAMES = {"roc-auc": "ROC-AUC", "auc": "ROC-AUC", "average-precision": "average-precision", "mrr": "MRR"}


@dataclass(frozen=True)
class LinkMetric:
    """A metric by its full name; ``most`` is the ``k`` of ``Hits@k``."""

    name: str
    most: int | None = None

    @staticmethod
    def named(name: str) -> LinkMetric:
        """The metric of a name, however it is spelled.

        Example:
            >>> LinkMetric.named("auc").name, LinkMetric.named("HITS@10")
            ('ROC-AUC', LinkMetric(name='Hits@10', most=10))
        """
        plain = name.lower().replace("_", "-").replace(" ", "-")
        hits = re.fullmatch(r"hits@([1-9]\d*)", plain)
        if hits is not None:
            return LinkMetric(f"Hits@{int(hits[1])}", int(hits[1]))
        if plain not in _NAMES:
            rule = "a metric of links is ROC-AUC, average-precision, MRR or Hits@k"
            raise InputError(rule, got=repr(name), fix="Choose one of these.")
        return LinkMetric(_NAMES[plain])

    @property
    def ranks(self) -> bool:
        """Whether it is one of ranks, not of scores."""
        return self.name not in _OF_SCORES

    def of_scores(self, scores: Tensor, label: Tensor) -> float:
        """Measure scores of pairs, given which are edges; both ``[num_pairs]``."""
        return 100.0 * _OF_SCORES[self.name](scores, label)

    def of_ranks(self, places: Tensor) -> float:
        """Measure the ranks of edges, from 1, ``[num_edges]``.

        Example:
            >>> import torch
            >>> places = torch.tensor([1.0, 2.0, 4.0, 4.0])
            >>> LinkMetric.named("MRR").of_ranks(places), LinkMetric.named("Hits@2").of_ranks(places)
            (50.0, 50.0)
        """
        good = 1 / places if self.most is None else (places <= self.most).double()
        return 100.0 * float(good.mean())
