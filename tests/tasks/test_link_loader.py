"""Link prediction in a loop of one's own."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]
from torch_geometric.transforms import RandomLinkSplit  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale.errors import InputError
from gnnautoscale.tasks import Bilinear
from support.communities import FEATURES, community_graph
from support.ranks import run_ranks


def links(**options: Any) -> Data:
    torch.manual_seed(3)
    graph = community_graph()
    split = RandomLinkSplit(is_undirected=True, **{"disjoint_train_ratio": 0.4, **options})
    data: Data = split(Data(x=graph.x, edge_index=graph.edge_index))[0]
    return data


def encoder() -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, 16, num_layers=2, out_channels=8)


def global_ends(batch: Data) -> Tensor:
    nodes = torch.cat([batch.n_id[: batch.batch_size].as_subclass(Tensor), batch.outside])
    return nodes[batch.edge_label_index]


def dot_loss(rows: Tensor, pairs: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
    source, target = rows[pairs]
    return F.binary_cross_entropy_with_logits((source * target).sum(dim=1), label, reduction=reduction)


FEW: dict[str, Any] = {"num_parts": 4, "batch_size": 2, "shuffle": True}


@pytest.mark.parametrize("options", [{"num_parts": 1}, FEW])
def test_a_batch_has_all_edges_that_touch_it_and_other_pairs_inside(options: dict[str, Any]) -> None:
    data = links()
    loader = gas.LinkLoader(data, **options)
    for batch in loader:
        own = batch.n_id[: batch.batch_size].as_subclass(Tensor)
        ends = torch.isin(data.edge_label_index, own)
        there = torch.where(data.edge_label > 0, ends.any(dim=0), ends.all(dim=0))
        assert torch.equal(global_ends(batch), data.edge_label_index[:, there])
        assert torch.equal(batch.edge_label, data.edge_label[there].float())
        first, second = loader.labels[global_ends(batch)]
        rare = (batch.edge_label == 0) & (first != second)
        expected = torch.where(rare, 1.0 if loader.num_parts == 1 else 3.0, 1.0)
        torch.testing.assert_close(batch.edge_label_weight, expected)


def test_one_part_has_the_loss_and_gradient_of_plain_pyg() -> None:
    data, model, plain = links(), encoder(), encoder()
    expected = dot_loss(plain(data.x, data.edge_index), data.edge_label_index, data.edge_label.float())
    expected.backward()  # type: ignore[no-untyped-call]
    loader = gas.LinkLoader(data, num_parts=1)
    gas.autoscale(model, data)
    (batch,) = loader
    loss = dot_loss(loader.rows(batch, model(batch.x, batch.edge_index)), batch.edge_label_index, batch.edge_label)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("storage", ["device", "host"])
def test_ends_outside_are_the_last_known_outputs_and_constants(storage: Any) -> None:
    data, model = links(), encoder()
    gas.autoscale(model, data)
    loader = gas.LinkLoader(data, **FEW, storage=storage)
    exact = gas.infer(model, loader)
    model.eval()
    for _ in range(2):
        for batch in loader:
            out = model(batch.x, batch.edge_index)
            rows = loader.rows(batch, out)
            nodes = torch.cat([batch.n_id[: batch.batch_size].as_subclass(Tensor), batch.outside])
            assert rows.size(0) == nodes.numel()
    torch.testing.assert_close(rows, exact[nodes])  # in the second epoch all are known, and weights are fixed
    (slope,) = torch.autograd.grad(rows[batch.batch_size :].sum() + 0 * out.sum(), out)
    assert not slope.any()


def test_the_gradients_of_an_epoch_are_those_of_full_batch_with_respect_to_outputs() -> None:
    data = links(add_negative_train_samples=False)
    loader, rows = gas.LinkLoader(data, num_parts=4, negatives=0), torch.randn(48, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(dot_loss(rows, data.edge_label_index, data.edge_label.float(), "sum"), rows)
    total = torch.zeros_like(expected)
    for epoch in range(2):
        for batch in loader:
            out = rows[batch.n_id[: batch.batch_size].as_subclass(Tensor)]
            known = loader.rows(batch, out)
            if epoch:
                loss = dot_loss(known, batch.edge_label_index, batch.edge_label, "sum")
                total += torch.autograd.grad(loss, rows)[0]
    torch.testing.assert_close(total, expected)


def test_negatives_are_drawn_and_stand_for_the_whole_graph() -> None:
    data = links(add_negative_train_samples=False)
    loader = gas.LinkLoader(data, **FEW, negatives=60)
    edges = {(a, b) for a, b in torch.cat([data.edge_index, data.edge_label_index], dim=1).t().tolist()}
    for batch in loader:
        drawn = batch.edge_label == 0
        ends, own = global_ends(batch)[:, drawn], batch.n_id[: batch.batch_size].as_subclass(Tensor)
        assert set(ends.flatten().tolist()) == set(own.tolist())
        assert not edges & {(a, b) for a, b in torch.cat([ends, ends.flip(0)], dim=1).t().tolist()}
        weight = batch.edge_label_weight
        assert float(weight[drawn].sum()) == pytest.approx(60 * float((~drawn).sum()), rel=1e-4)
        first, second = loader.labels[ends]
        assert float(weight[drawn][first != second][0] / weight[drawn][first == second][0]) == pytest.approx(3.0)


def test_the_same_seed_draws_the_same_and_a_state_goes_on() -> None:
    data = links(add_negative_train_samples=False)
    first, second = (gas.LinkLoader(data, **FEW, seed=7) for _ in range(2))

    def drawn(loader: gas.LinkLoader) -> list[list[list[int]]]:
        return [global_ends(batch).tolist() for batch in loader]

    assert drawn(first) == drawn(second)
    for batch in first:
        first.rows(batch, torch.full((batch.batch_size, 2), 3.0))
    state, third = first.state_dict(), gas.LinkLoader(data, **FEW, seed=7)
    third.load_state_dict(state)
    assert drawn(first) == drawn(third)
    batch = next(iter(third))
    outside = third.rows(batch, torch.zeros(batch.batch_size, 2))[batch.batch_size :]
    assert set(outside.flatten().tolist()) == {3.0}


def test_typed_edges_replace_an_end() -> None:
    data = links(add_negative_train_samples=False)
    data.edge_type, data.edge_label_type = (
        torch.zeros(n, dtype=torch.long) for n in (data.num_edges, data.edge_label.numel())
    )
    data.edge_label_type[::2] = 1
    batch = next(iter(gas.LinkLoader(data, **FEW, negatives=3)))
    assert batch.edge_label_type.shape == batch.edge_label.shape
    assert set(batch.edge_label_type.tolist()) == {0, 1}


def test_the_way_back_of_a_directed_edge_is_another_edge() -> None:
    data = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    data.edge_label_index = torch.tensor([[1, 3], [0, 0]])
    gas.LinkLoader(data, num_parts=2, negatives=0)
    data.edge_label_index = torch.tensor([[0, 3], [1, 0]])
    with pytest.raises(InputError, match="but got 1 of 2 that are"):
        gas.LinkLoader(data, num_parts=2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="positives of the train split must not be edges that pass messages"):
        gas.LinkLoader(links(disjoint_train_ratio=0.0), num_parts=4)
    gas.LinkLoader(links(disjoint_train_ratio=0.0), **FEW, reconstruct=True)
    with pytest.raises(InputError, match="link prediction needs labelled pairs"):
        gas.LinkLoader(community_graph(), num_parts=4)
    with pytest.raises(InputError, match="negatives must be an integer"):
        gas.LinkLoader(links(), num_parts=4, negatives=-1)
    with pytest.raises(InputError, match="storage must be one of device, host"):
        gas.LinkLoader(links(), num_parts=4, storage="disk")  # type: ignore[arg-type]
    for options in ({"num_parts": 4, "shuffle": True}, {"num_parts": 4, "batch_size": 2}):
        with pytest.raises(InputError, match="batches must consist of several parts, drawn anew"):
            gas.LinkLoader(links(), **options)  # type: ignore[arg-type]
    loader = gas.LinkLoader(links(), **FEW)
    with pytest.raises(InputError, match="one row for each of the batch's"):
        loader.rows(next(iter(loader)), torch.zeros(3, 2))


PARTS = 8  # four of each rank, two in a batch


def steps_of_a_rank(data: Data, options: dict[str, Any]) -> list[list[Tensor]]:
    """Train on a rank: of each step the own nodes, their outputs, and of each pair ends, label, weight and rows."""
    labels = torch.arange(data.num_nodes) % PARTS
    loader = gas.LinkLoader(data, partition=labels, batch_size=2, shuffle=True, **options)
    decoder = Bilinear(8)
    model = ranks.autoscale(encoder(), loader, also=[decoder])
    optimizer = torch.optim.Adam([*model.parameters(), *decoder.parameters()], lr=0.01)
    found = []
    for batch in chain(loader, loader):
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)
        rows = loader.rows(batch, out)
        source, target = batch.edge_label_index
        scores = decoder(rows[source], rows[target])
        F.binary_cross_entropy_with_logits(scores, batch.edge_label, batch.edge_label_weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        own = loader.nodes[batch.n_id[: batch.batch_size].as_subclass(Tensor)]
        ends = torch.cat([own, batch.outside])[batch.edge_label_index]
        pairs = [ends, batch.edge_label, batch.edge_label_weight, rows[batch.edge_label_index].detach()]
        found.append([own, out.detach(), *pairs])
    found.append([weight.detach() for weight in [*model.parameters(), *decoder.parameters()]])
    return found


def chance_weights(ends: Tensor, own: Tensor) -> Tensor:
    """What pairs stand for: two of four parts are in a rank's batch, so parts of one rank meet in a step of six."""
    labels = ends % PARTS
    inside = torch.isin(ends, own).all(dim=0)
    return torch.where(labels[0] == labels[1], 1.0, torch.where(inside, 3.0, 2.0))


def test_ranks_score_the_pairs_between_the_nodes_of_a_step() -> None:
    data = links()
    *steps, weights = zip(*run_ranks(2, steps_of_a_rank, data, {}), strict=True)
    assert all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
    known = torch.zeros(data.num_nodes, 8)
    for step in steps:
        for own, out, *_ in step:
            known[own] = out
        there = torch.cat([own for own, *_ in step])
        for own, _, ends, label, weight, rows in step:
            touches, meets = (torch.isin(data.edge_label_index, nodes) for nodes in (own, there))
            expected = torch.where(data.edge_label > 0, touches.any(0), touches.any(0) & meets.all(0))
            assert torch.equal(ends, data.edge_label_index[:, expected])
            torch.testing.assert_close(weight, torch.where(label > 0, 1.0, chance_weights(ends, own)))
            assert torch.equal(rows, known[ends])


def test_ranks_draw_pairs_between_the_nodes_of_a_step() -> None:
    data = links(add_negative_train_samples=False)
    *steps, _ = zip(*run_ranks(2, steps_of_a_rank, data, {"negatives": 9}), strict=True)
    for step in steps:
        there = torch.cat([own for own, *_ in step])
        for own, _, ends, label, weight, _ in step:
            drawn, stand_for = ends[:, label == 0], weight[label == 0]
            here = torch.isin(drawn, own)
            assert bool(torch.isin(drawn, there).all())
            assert bool(here.any(dim=0).all())
            assert 0.1 < float((~here[0]).float().mean()) < 0.4  # either end may be the other rank's
            assert 0.1 < float((~here[1]).float().mean()) < 0.4
            # A pair of two ranks is drawn by both, and each learns half of it.
            expected = torch.where(here.all(dim=0), 1.0, 2.0) * chance_weights(drawn, own)
            torch.testing.assert_close(stand_for / stand_for.sum(), expected / expected.sum())
            assert float(stand_for.sum()) == pytest.approx(9 * float((label > 0).sum()))


def forget_a_batch(data: Data, calls: int) -> None:
    loader = gas.LinkLoader(data, num_parts=PARTS, batch_size=2, shuffle=True)
    for batch in loader:
        for _ in range(calls):
            loader.rows(batch, batch.x[: batch.batch_size])


@pytest.mark.parametrize("calls", [0, 2])
def test_loops_of_ranks_that_do_not_answer_each_batch_once_are_refused(calls: int) -> None:
    with pytest.raises(InputError, match=r"calls loader\.rows"):
        run_ranks(2, forget_a_batch, links(), calls)
