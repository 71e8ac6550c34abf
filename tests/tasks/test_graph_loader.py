"""Batches of graphs in a loop of one's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.nn import GIN, global_add_pool, global_mean_pool  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale.errors import InputError
from support.ranks import run_ranks


def graphs(count: int = 8) -> list[Data]:
    generator = torch.Generator().manual_seed(0)
    sizes = [4 + i % 3 for i in range(count)]
    return [
        Data(
            x=torch.randn(size, 3, generator=generator, dtype=torch.double),
            edge_index=torch.randint(size, (2, 3 * size), generator=generator),
            y=torch.tensor([i % 2]),
        )
        for i, size in enumerate(sizes)
    ]


def parts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return GIN(3, 4, num_layers=2).double(), nn.Linear(4, 2).double()


def weighted(scores: Tensor, batch: Data) -> Tensor:
    weight: Tensor = batch.graph_weight
    return (F.cross_entropy(scores, batch.y, reduction="none") * weight).sum() / weight.sum()


def test_whole_graphs_are_a_batch_of_pyg() -> None:
    """Loss and gradients are those of a step on the same graphs in a batch of PyG's DataLoader."""
    given = graphs()
    model, head = parts()
    plain = copy.deepcopy(model)
    loader = gas.GraphLoader(given, num_parts=8, batch_size=3, shuffle=True)
    gas.autoscale(model, loader.data)
    seen = []
    for batch in loader:
        assert batch.num_nodes == batch.batch_size  # no halo
        assert batch.graph_weight.tolist() == [1.0] * batch.graphs.numel()
        whole = Batch.from_data_list([given[number] for number in batch.graphs.tolist()])
        assert torch.equal(batch.y, whole.y)
        theirs = F.cross_entropy(head(global_add_pool(plain(whole.x, whole.edge_index), whole.batch)), whole.y)
        wanted = torch.autograd.grad(theirs, [*plain.parameters(), *head.parameters()])
        loss = weighted(head(loader.pool(batch, model(batch.x, batch.edge_index))), batch)
        found = torch.autograd.grad(loss, [*model.parameters(), *head.parameters()])
        torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        seen += batch.graphs.tolist()
    assert sorted(seen) == list(range(8))


def test_parts_of_graphs_add_up() -> None:
    """Over an epoch with fixed weights and fresh histories, the gradient of the head is that of full batch."""
    given = graphs()
    model, head = parts()
    whole = Batch.from_data_list(given)
    pooled = global_mean_pool(model(whole.x, whole.edge_index), whole.batch)
    wanted = torch.autograd.grad(F.cross_entropy(head(pooled), whole.y), list(head.parameters()))
    loader = gas.GraphLoader(given, partition=torch.arange(whole.num_nodes) % 5, readout="mean")
    gas.autoscale(model, loader.data)
    for _ in range(4):  # a layer is exact after as many rounds as its depth
        sums = [torch.zeros_like(weight) for weight in head.parameters()]
        for batch in loader:
            loss = weighted(head(loader.pool(batch, model(batch.x, batch.edge_index))), batch)
            share = batch.graph_weight.sum() / 8
            for total, each in zip(sums, torch.autograd.grad(loss * share, list(head.parameters())), strict=True):
                total += each
    torch.testing.assert_close(sums, list(wanted), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loader.pool_all(gas.infer(model, loader)), pooled.detach(), rtol=1e-10, atol=1e-10)


def test_a_loader_goes_on_from_its_state() -> None:
    def batches(loader: gas.GraphLoader, count: int) -> list[Tensor]:
        found: list[Tensor] = []
        for batch in loader:
            found.append(loader.pool(batch, batch.x[: batch.batch_size] * (1 + len(found))))
            if len(found) == count:
                break
        return found

    options: dict[str, Any] = {"num_parts": 12, "batch_size": 2, "shuffle": True}
    first = gas.GraphLoader(graphs(), **options)
    batches(first, 6)
    state = copy.deepcopy(first.state_dict())
    wanted = batches(first, 6)
    second = gas.GraphLoader(graphs(), **options)
    second.load_state_dict(state)
    for mine, theirs in zip(batches(second, 6), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_bad_input_is_refused() -> None:
    loader = gas.GraphLoader(graphs(), num_parts=2)
    with pytest.raises(InputError, match="one row for each of the batch's"):
        loader.pool(next(iter(loader)), torch.ones(1, 3))
    with pytest.raises(InputError, match="stale_dropout must be"):
        gas.GraphLoader(graphs(), num_parts=2, stale_dropout=2.0)
    with pytest.raises(InputError, match="readout must be one of sum"):
        gas.GraphLoader(graphs(), num_parts=2, readout="median")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="graphs are a list"):
        gas.GraphLoader([], num_parts=2)
    with pytest.raises(InputError, match="num_parts must be between 1"):
        gas.GraphLoader(graphs(), num_parts=1000)


def on_a_rank(given: list[Data]) -> tuple[list[Tensor], list[Tensor], Tensor | None, list[Tensor]]:
    """The head's gradients of this rank's batches with fixed weights, what is pooled, and weights after a step."""
    model, head = parts()
    labels = torch.arange(sum(graph.num_nodes for graph in given)) % 6
    loader = gas.GraphLoader(given, partition=labels, readout="mean")
    ranks.autoscale(model, loader, also=[head])
    for _ in range(4):
        sums, pooled = [torch.zeros_like(weight) for weight in head.parameters()], []
        for batch in loader:
            rows = loader.pool(batch, model(batch.x, batch.edge_index))
            loss = weighted(head(rows), batch) * batch.graph_weight.sum() / 8
            for total, each in zip(sums, torch.autograd.grad(loss, list(head.parameters())), strict=True):
                total += each
            pooled.append(torch.cat([batch.graphs.unsqueeze(1), rows.detach()], dim=1))
    everything = loader.gathered(gas.infer(model, loader))
    exact = None if everything is None else loader.pool_all(everything)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for batch in loader:
        weighted(head(loader.pool(batch, model(batch.x, batch.edge_index))), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return sums, pooled, exact, [weight.detach() for weight in [*model.parameters(), *head.parameters()]]


def test_ranks_share_graphs() -> None:
    given = graphs()
    model, head = parts()
    whole = Batch.from_data_list(given)
    pooled = global_mean_pool(model(whole.x, whole.edge_index), whole.batch)
    wanted = torch.autograd.grad(F.cross_entropy(head(pooled), whole.y), list(head.parameters()))
    found = run_ranks(2, on_a_rank, given)
    sums = [sum(each) for each in zip(*(sums for sums, *_ in found), strict=True)]
    torch.testing.assert_close(sums, list(wanted), rtol=1e-6, atol=1e-7)
    for _, seen, exact, _ in found:
        for rows in seen:
            torch.testing.assert_close(rows[:, 1:], pooled.detach()[rows[:, 0].long()], rtol=1e-6, atol=1e-7)
        if exact is not None:
            torch.testing.assert_close(exact, pooled.detach(), rtol=1e-10, atol=1e-10)
    assert all(torch.equal(first, second) for first, second in zip(*(weights for *_, weights in found), strict=True))


def with_a_head_of_its_own(given: list[Data], apart: bool) -> None:
    model, head = parts()
    loader = gas.GraphLoader(given, num_parts=4)
    ranks.autoscale(model, loader)
    weights = [*model.parameters(), *head.parameters()]
    _other = torch.optim.SGD(head.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters() if apart else weights, lr=0.1)
    for batch in loader:
        weighted(head(loader.pool(batch, model(batch.x, batch.edge_index))), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_a_head_that_ranks_would_train_apart_is_noticed() -> None:
    with pytest.raises(InputError, match="2 others that an optimizer steps"):
        run_ranks(2, with_a_head_of_its_own, graphs(), False)
    with pytest.raises(UserWarning, match="each rank trains 2 weights apart"):
        run_ranks(2, with_a_head_of_its_own, graphs(), True)
