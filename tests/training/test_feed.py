"""Training batches come with what the loss needs of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gnnautoscale as gas
from conftest import undirected_graph
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training.feed import Feed, plain_item

CPU = torch.device("cpu")
TASK = NodeClassification(4)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_rows_to_train_on(share: float) -> None:
    data = undirected_graph()
    data.train_mask = torch.arange(40) < 40 * share
    batch = next(iter(gas.HaloLoader(data, num_parts=1)))
    item = plain_item(batch, TASK, CPU)
    mask = batch.train_mask[: batch.batch_size]
    assert torch.equal(item.targets, batch.y[mask])
    assert (item.rows is None) == (share == 1.0)
    if item.rows is not None:
        assert torch.equal(item.rows, mask.nonzero().squeeze(1))


def test_on_a_cpu_batches_are_passed_through() -> None:
    loader = gas.HaloLoader(undirected_graph(), num_parts=4)
    batches = list(loader.ready_batches())
    upcoming = []
    for item, ready in zip(Feed(TASK, CPU).items(batches, lambda: batches[0]), batches, strict=True):
        assert item.info is ready.info
        upcoming.append(item.info.upcoming)
    assert upcoming == [ready.info for ready in [*batches[1:], batches[0]]]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "shuffle": True}], ids=["fixed", "drawn"])
def test_on_a_gpu_the_same_is_selected(options: dict[str, Any]) -> None:
    data = undirected_graph()
    there = gas.HaloLoader(data, 6, partition="random", device="cuda", **options)
    here = gas.HaloLoader(data, 6, partition="random", **options)
    feed = Feed(TASK, there.device)
    for _ in range(3):
        for item, batch in zip(feed.items(there.ready_batches()), here, strict=True):
            expected = plain_item(batch, TASK, CPU)
            assert item.targets.is_cuda
            assert torch.equal(item.targets.cpu(), expected.targets)
            assert (item.rows is None) == (expected.rows is None)
            if item.rows is not None and expected.rows is not None:
                assert torch.equal(item.rows.cpu(), expected.rows)
    assert len(feed._selected) == (0 if options else 6)
    feed.clear()
    assert not feed._selected
