"""Pairs on several ranks: each scores those that touch its batches, and over all drawings nothing is missing."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale.data import Dataset
from gnnautoscale.tasks import Bilinear, LinkPrediction
from support.links import Splits, splits
from support.ranks import outcomes, run_ranks

# Every rank has four parts, of which two are in a batch: these, with the same chance each.
GROUPS = list(combinations(range(4), 2))


def bound(parts: Splits, **options: object) -> tuple[LinkPrediction, ranks.RankLoader]:
    """A task that has met its data and the loader of a rank."""
    graph = Data(x=parts[0].x, edge_index=parts[0].edge_index)
    labels = torch.arange(graph.num_nodes) % (4 * ranks.current().size)
    loader = ranks.RankLoader(graph, partition=labels, batch_size=2, shuffle=True)
    task = LinkPrediction(Bilinear(5).double(), **options)  # type: ignore[arg-type]
    task.bound_to(Dataset("links", *parts), metric=None, class_weight="none")
    task.prepare(loader)
    return task, loader


def rows_of_all(num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_nodes, 5, generator=generator, dtype=torch.double)


def sums_of_a_rank(parts: Splits) -> tuple[float, Tensor, Tensor]:
    """Loss and gradients of this rank's batches, the mean over all drawings of an epoch."""
    torch.manual_seed(7)
    task, loader = bound(parts)
    rows = rows_of_all(parts[0].num_nodes).requires_grad_()
    task.load_state_dict({"outputs": rows.detach().clone()}, torch.device("cpu"))  # no other row is stale
    decoder = task.module
    assert decoder is not None
    total, sums = 0.0, [torch.zeros_like(rows), *map(torch.zeros_like, decoder.parameters())]
    drawings = list(product(GROUPS, repeat=loader.world.size))
    for groups in drawings:
        own = loader.nodes[loader.nodes_of(groups[loader.world.rank])]
        out = rows[own]
        task.see(out, own)
        _, targets = task.targets(Data(n_id=own, batch_size=own.numel(), num_nodes=own.numel()))
        loss = task.loss(out, targets)
        loss = loss * float(task.weight(targets)) * 2 / len(drawings)  # an epoch has two steps
        total += float(loss.detach())
        for each, piece in zip(sums, torch.autograd.grad(loss, [rows, *decoder.parameters()]), strict=True):
            each += piece
    return total, *sums  # type: ignore[return-value]


@pytest.mark.parametrize("size", [2, 3])
def test_the_batches_of_all_ranks_add_up_to_the_gradient_of_full_batch(size: int) -> None:
    parts = splits()
    torch.manual_seed(7)
    rows, decoder = rows_of_all(48).requires_grad_(), Bilinear(5).double()
    source, target = parts[0].edge_label_index
    scores, label = decoder(rows[source], rows[target]).float(), (parts[0].edge_label > 0).float()
    loss = F.binary_cross_entropy_with_logits(scores, label, reduction="sum")
    expected = torch.autograd.grad(loss, [rows, decoder.weight])
    found = run_ranks(size, sums_of_a_rank, parts)
    assert sum(total for total, *_ in found) == pytest.approx(float(loss.detach()), rel=1e-5)
    for wanted, pieces in zip(expected, zip(*(sums for _, *sums in found), strict=True), strict=True):
        torch.testing.assert_close(torch.stack(pieces).sum(0), wanted, rtol=1e-4, atol=1e-5)


def known_to_a_rank(parts: Splits) -> tuple[Tensor, Tensor]:
    """What a rank knows of all nodes after a step, and the nodes of its batch."""
    task, loader = bound(parts)
    own = loader.nodes[loader.nodes_of((0, 1))]
    task.see(rows_of_all(48)[own], own)
    return task.state_dict()["outputs"], own


def test_all_ranks_know_what_each_of_them_computed() -> None:
    found = run_ranks(3, known_to_a_rank, splits())
    step = torch.cat([own for _, own in found])
    expected = torch.zeros(48, 5, dtype=torch.double).index_copy_(0, step, rows_of_all(48)[step])
    assert torch.unique(step).numel() == step.numel() == 24
    assert all(torch.equal(known, expected) for known, _ in found)


def between_halves(parts: Splits) -> Splits:
    """The same with pairs from the first half of the nodes to the second one only, as between two types."""
    found = [part.clone() for part in parts]
    for part in found:
        source, target = part.edge_label_index
        fits = (source < 24) & (target >= 24)
        part.edge_label_index, part.edge_label = part.edge_label_index[:, fits], part.edge_label[fits]
        part.between = ((0, 24), (24, 48))
    return found[0], found[1], found[2]


def negatives_of_a_rank(parts: Splits) -> tuple[Tensor, Tensor, float, Tensor]:
    """Many drawn pairs without an edge, with weights, and the nodes of the rank's batch."""
    torch.manual_seed(ranks.current().rank)
    task, loader = bound(parts, negatives=20)
    own = loader.nodes[loader.nodes_of((0, 1))]
    task.see(rows_of_all(48)[own], own)
    _, targets = task.targets(Data(n_id=own, batch_size=own.numel(), num_nodes=own.numel()))
    source, target, label, relation = targets.unbind(dim=1)
    first, second, _, weight = task._draw(source, target, relation, label.float())
    return torch.stack([first, second]), weight, 20 * float(label.sum()), own


@pytest.mark.parametrize("typed", [False, True])
def test_negatives_lie_between_all_nodes_of_a_step(typed: bool) -> None:
    parts = between_halves(splits(negatives=False)) if typed else splits(negatives=False)
    known = torch.cat([parts[0].edge_index, parts[0].edge_label_index, parts[0].edge_label_index.flip(0)], dim=1)
    edges = set(map(tuple, known.t().tolist()))
    found = run_ranks(2, negatives_of_a_rank, parts)
    for rank, (ends, weight, total, own) in enumerate(found):
        others, real = found[1 - rank][3], weight > 0
        here = torch.isin(ends, own)
        assert not typed or bool(((ends[0] < 24) & (ends[1] >= 24)).all())
        assert bool(here.any(dim=0).all())
        assert bool((here | torch.isin(ends, others)).all())
        for end in (0, 1):  # of a pair between ranks, either end may be the other rank's
            share = float((~here[end] & real).sum() / real.sum())
            assert 0.15 < share < 0.35
        assert not edges & set(map(tuple, ends[:, real].t().tolist()))
        assert float(weight.sum()) == pytest.approx(total, rel=1e-5)
        labels = torch.arange(48) % 8
        same, inside = labels[ends[0]] == labels[ends[1]], here.all(dim=0)
        unit = weight[real & same].unique()
        assert unit.numel() == 1
        # Two of four parts are in each batch: those of a rank meet in one drawing of three, those of two ranks in two.
        assert weight[real & inside & ~same].unique() == pytest.approx(float(3 * unit))
        assert weight[real & ~inside].unique() == pytest.approx(float(2 * unit))


def test_what_is_only_measured_is_told_nobody() -> None:
    for before, after in run_ranks(2, measure, splits()):
        assert torch.equal(before, after)


def measure(parts: Splits) -> tuple[Tensor, Tensor]:
    task, loader = bound(parts)
    own = loader.nodes[loader.nodes_of((0, 1))]
    task.see(rows_of_all(48)[own], own)
    before = task.state_dict()["outputs"].clone()
    if loader.world.is_first:  # the other rank would wait for it
        with task.measuring():
            out = 2 * rows_of_all(48)[own]
            task.see(out, own)
            _, targets = task.targets(Data(n_id=own, batch_size=own.numel(), num_nodes=own.numel()))
            assert bool(torch.isfinite(task.loss(out, targets)))
    return before, task.state_dict()["outputs"]


def single_parts() -> None:
    parts = splits()
    labels = torch.arange(48) % 5  # three for one rank, two for the other
    loader = ranks.RankLoader(
        Data(x=parts[0].x, edge_index=parts[0].edge_index), partition=labels, batch_size=2, shuffle=True
    )
    task = LinkPrediction().bound_to(Dataset("links", *parts), metric=None, class_weight="none")
    task.prepare(loader)


def test_batches_of_one_part_are_refused_on_all_ranks() -> None:
    for error in outcomes(2, single_parts):
        assert isinstance(error, gas.InputError)
        assert "2 parts, 1 in a batch" in str(error)
