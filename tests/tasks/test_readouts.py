"""Readouts: merged from parts, values and gradients are those of PyG's aggregations over whole graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP, aggr  # type: ignore[import-untyped]

from gnnautoscale import ranks
from gnnautoscale.errors import InputError
from gnnautoscale.tasks.pooling import PooledParts, pool_exactly
from gnnautoscale.tasks.readouts import make_readout
from support.ranks import run_ranks

WIDTH = 4
READOUTS: dict[str, Callable[[], Any]] = {
    "sum": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "min": aggr.MinAggregation,
    "softmax": lambda: aggr.SoftmaxAggregation(t=0.7),
    "learned softmax": lambda: aggr.SoftmaxAggregation(t=0.7, learn=True, channels=WIDTH),
    "semi-gradient": lambda: aggr.SoftmaxAggregation(t=0.7, semi_grad=True),
    "attention": lambda: aggr.AttentionalAggregation(nn.Linear(WIDTH, 1)),
    "attention of features": lambda: aggr.AttentionalAggregation(nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)),
    "attention by MLPs": lambda: aggr.AttentionalAggregation(
        MLP([WIDTH, 5, 1], norm=None), MLP([WIDTH, 5, 3], norm=None)
    ),
}
GRAPH_ID = torch.tensor([0, 1, 0, 2, 1, 0, 0, 2, 3, 0, 1])
PARTS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1])


def rows_with_ties() -> Tensor:
    torch.manual_seed(1)
    rows = torch.randn(GRAPH_ID.numel(), WIDTH, dtype=torch.double)
    rows[:, 1] = rows[:, 1].round()
    rows[:, 2] = rows[:, 2].relu() + 0.25
    rows[:, 3] = 0.5
    # Not 0: there PyTorch counts one row too many among those that share the largest value.
    rows[rows == 0] = 1.0
    return rows


def head_loss(head: nn.Module, pooled: Tensor) -> Tensor:
    losses: Tensor = head(pooled).tanh().sum(dim=1)
    return losses


@pytest.fixture(params=READOUTS)
def aggregation(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return READOUTS[request.param]().double()


def full(aggregation: Any, head: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Loss of all graphs and the gradients of rows and weights, by PyG alone."""
    rows = rows_with_ties().requires_grad_()
    loss = head_loss(head, aggregation(rows, GRAPH_ID, dim_size=4)).mean()
    weights = [*aggregation.parameters(), *head.parameters()]
    return loss, list(torch.autograd.grad(loss, [rows, *weights]))


def make_head(aggregation: Any) -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(aggregation(rows_with_ties(), GRAPH_ID).size(1), 3).double()


def test_one_part_is_full_batch(aggregation: Any) -> None:
    head = make_head(aggregation)
    loss, gradients = full(aggregation, head)
    readout = make_readout(copy.deepcopy(aggregation), WIDTH)
    pooled = PooledParts(readout, GRAPH_ID, torch.zeros_like(GRAPH_ID))
    rows, nodes = rows_with_ties().requires_grad_(), torch.arange(GRAPH_ID.numel())
    found, share = pooled.pool(rows, nodes, pooled.graphs_of(nodes))
    assert share.tolist() == [1.0] * 4
    ours = head_loss(head, found).mean()
    torch.testing.assert_close(ours, loss, rtol=1e-12, atol=1e-12)
    weights = [*readout.parameters(), *head.parameters()]
    for mine, wanted in zip(torch.autograd.grad(ours, [rows, *weights]), gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def sums_of_an_epoch(
    aggregation: Any, head: nn.Module, groups: list[list[int]], world: ranks.World | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of batches of some parts, added up over an epoch in which nothing is stale."""
    readout = make_readout(copy.deepcopy(aggregation), WIDTH)
    pooled, rows = PooledParts(readout, GRAPH_ID, PARTS, world=world), rows_with_ties()
    weights = [*readout.parameters(), *head.parameters()]
    for _ in range(2):  # nothing is stale in the second round
        total, sums = torch.zeros((), dtype=torch.double), [torch.zeros_like(each) for each in (rows, *weights)]
        for group in groups:
            nodes = torch.isin(PARTS, torch.tensor(group)).nonzero().squeeze(1)
            own = rows[nodes].requires_grad_()
            pooled.tell(own, nodes)
            found, share = pooled.pool(own, nodes, (table := pooled.graphs_of(nodes)))
            sizes = torch.bincount(GRAPH_ID)[table[:, 0]]
            torch.testing.assert_close(
                share, torch.bincount(GRAPH_ID[nodes], minlength=4)[table[:, 0]] / sizes.double()
            )
            part = (head_loss(head, found) * share).sum() / 4
            of_rows, *of_weights = torch.autograd.grad(part, [own, *weights])
            total = total + part.detach()
            sums[0][nodes] = of_rows
            for kept, new in zip(sums[1:], of_weights, strict=True):
                kept += new
    return total, sums


@pytest.mark.parametrize("groups", [[[0], [1], [2], [3]], [[0, 2], [1, 3]], [[3], [0, 1, 2]]])
def test_batches_of_an_epoch_add_up_to_full_batch(aggregation: Any, groups: list[list[int]]) -> None:
    head = make_head(aggregation)
    loss, gradients = full(aggregation, head)
    total, sums = sums_of_an_epoch(aggregation, head, groups)
    torch.testing.assert_close(total, loss.detach(), rtol=1e-12, atol=1e-12)
    for mine, wanted in zip(sums, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def sums_of_a_rank(heads: list[tuple[Any, nn.Module]]) -> list[tuple[Tensor, list[Tensor]]]:
    world = ranks.current()
    groups = [[[0], [2]], [[3], [1]]][world.rank]
    return [sums_of_an_epoch(*each, groups, world) for each in heads]


def test_batches_of_ranks_that_share_graphs_add_up_to_full_batch() -> None:
    made = [make().double() for make in READOUTS.values()]
    heads = [(aggregation, make_head(aggregation)) for aggregation in made]
    first, second = run_ranks(2, sums_of_a_rank, heads)
    for given, one, other in zip(heads, first, second, strict=True):
        loss, gradients = full(*given)
        torch.testing.assert_close(one[0] + other[0], loss.detach(), rtol=1e-12, atol=1e-12)
        for mine, theirs, wanted in zip(one[1], other[1], gradients, strict=True):
            torch.testing.assert_close(mine + theirs, wanted, rtol=1e-12, atol=1e-12)


def test_pooling_in_chunks_is_exact(aggregation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnautoscale.tasks.pooling._CHUNK", 3)
    wanted = aggregation(rows_with_ties(), GRAPH_ID, dim_size=4)
    found = pool_exactly(make_readout(aggregation, WIDTH), rows_with_ties(), GRAPH_ID)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "wanted"), [("sum", [4.0, 6.0]), ("mean", [2.0, 3.0]), ("max", [2.0, 3.0])])
def test_parts_that_are_not_known_yet_are_extrapolated(name: str, wanted: list[float]) -> None:
    pooled = PooledParts(make_readout(name, 2), torch.tensor([0, 0]), torch.tensor([0, 1]))
    nodes = torch.tensor([0])
    found, share = pooled.pool(torch.tensor([[2.0, 3.0]]), nodes, pooled.graphs_of(nodes))
    assert (found.tolist(), share.tolist()) == ([wanted], [0.5])


def test_stale_parts_are_dropped_in_training_only() -> None:
    readout = make_readout("mean", 1)
    pooled = PooledParts(readout, torch.zeros(2, dtype=torch.long), torch.tensor([0, 1]), stale_dropout=0.5)
    first, second = (torch.tensor([node]) for node in (0, 1))
    table = pooled.graphs_of(first)
    pooled.pool(torch.tensor([[1.0]]), first, table)
    torch.manual_seed(0)
    found = {float(pooled.pool(torch.tensor([[3.0]]), second, table)[0]) for _ in range(20)}
    assert found == {2.0, 3.0}
    readout.eval()
    assert {float(pooled.pool(torch.tensor([[3.0]]), second, table)[0]) for _ in range(20)} == {2.0}


def test_graphs_that_are_not_asked_for_are_left_out() -> None:
    pooled = PooledParts(make_readout("sum", 1), torch.tensor([0, 1, 1]), torch.zeros(3, dtype=torch.long))
    nodes = torch.arange(3)
    table = pooled.graphs_of(nodes)
    assert table.tolist() == [[0, 0], [1, 1]]
    found, share = pooled.pool(torch.tensor([[1.0], [2.0], [3.0]]), nodes, table[1:])
    assert (found.tolist(), share.tolist()) == ([[5.0]], [1.0])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("median", "'median'"),
        (aggr.MedianAggregation(), "a MedianAggregation"),
        (aggr.Set2Set(4, 2), "a Set2Set"),
        (aggr.SortAggregation(3), "a SortAggregation"),
        (nn.Linear(2, 2), "a Linear"),
        (None, "a NoneType"),
    ],
)
def test_others_are_refused_by_name(given: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"can be merged from parts of a graph, but got {name}"):
        make_readout(given, 4)


def test_attention_that_mixes_nodes_is_refused() -> None:
    mixing = aggr.AttentionalAggregation(MLP([4, 4, 1], norm="graph_norm"))
    with pytest.raises(InputError, match="take each node by itself"):
        make_readout(mixing, 4)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_what_is_known_moves_on_with_the_rest(name: str) -> None:
    """If all rows move by the same in each step, nothing is stale, although each batch has one part of four."""
    torch.manual_seed(0)
    rows, step = torch.randn(8, WIDTH, dtype=torch.double), torch.randn(WIDTH, dtype=torch.double)
    graph_id, parts = torch.arange(8) // 4, torch.arange(8) % 4
    pooled = PooledParts(make_readout(name, WIDTH), graph_id, parts)
    exactly = {"sum": aggr.SumAggregation, "mean": aggr.MeanAggregation}
    exactly |= {"max": aggr.MaxAggregation, "min": aggr.MinAggregation}
    for number in range(12):
        nodes = (parts == number % 4).nonzero().squeeze(1)
        now = rows + number * step
        found, _ = pooled.pool(now[nodes], nodes, pooled.graphs_of(nodes))
        if number >= 4:
            torch.testing.assert_close(found, exactly[name]()(now, graph_id), rtol=1e-12, atol=1e-12)


def test_attention_moves_on_with_the_rest() -> None:
    torch.manual_seed(0)
    rows, step = torch.randn(8, WIDTH, dtype=torch.double), torch.randn(WIDTH, dtype=torch.double)
    graph_id, parts = torch.arange(8) // 4, torch.arange(8) % 4
    attention = aggr.AttentionalAggregation(nn.Linear(WIDTH, 1)).double()
    pooled = PooledParts(make_readout(attention, WIDTH), graph_id, parts)
    for number in range(12):
        nodes = (parts == number % 4).nonzero().squeeze(1)
        now = rows + number * step
        found, _ = pooled.pool(now[nodes], nodes, pooled.graphs_of(nodes))
    torch.testing.assert_close(found, attention(now, graph_id), rtol=1e-12, atol=1e-12)
