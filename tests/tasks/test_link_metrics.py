"""Metrics of links: names, and values of hand-made scores and ranks."""

import pytest
import torch

from gnnautoscale.errors import InputError
from gnnautoscale.tasks.link_metrics import LinkMetric


def test_names_may_be_spelled_in_several_ways() -> None:
    spelled = {"auc": "ROC-AUC", "ROC_AUC": "ROC-AUC", "Average Precision": "average-precision", "mrr": "MRR"}
    assert {name: LinkMetric.named(name).name for name in spelled} == spelled
    assert LinkMetric.named("hits@20") == LinkMetric("Hits@20", 20)
    for name in ("accuracy", "hits@0", "hits@", "hits"):
        with pytest.raises(InputError, match="a metric of links is ROC-AUC, average-precision, MRR or Hits@k"):
            LinkMetric.named(name)


def test_values() -> None:
    scores, label = torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([True, False, True, False])
    assert not LinkMetric.named("auc").ranks
    assert LinkMetric.named("auc").of_scores(scores, label) == 75
    assert LinkMetric.named("average-precision").of_scores(scores, label) == pytest.approx(100 * (1 + 2 / 3) / 2)
    places = torch.tensor([1.0, 2.5, 4.0])
    assert LinkMetric.named("MRR").ranks
    assert LinkMetric.named("MRR").of_ranks(places) == pytest.approx(100 * (1 + 0.4 + 0.25) / 3)
    assert [LinkMetric(f"Hits@{k}", k).of_ranks(places) for k in (1, 2, 3, 4)] == pytest.approx(
        [100 / 3, 100 / 3, 200 / 3, 100]
    )
