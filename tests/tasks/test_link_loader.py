"""Link prediction in a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]
from torch_geometric.transforms import RandomLinkSplit  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.errors import InputError
from support.communities import FEATURES, community_graph


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
