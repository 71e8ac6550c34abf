"""Data that change after a loader was made: an epoch sees all of it before or all of it after, never a mixture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from conftest import undirected_graph
from gnnautoscale.errors import InputError
from gnnautoscale.graph.baselines import ClusterLoader, SampleLoader
from gnnautoscale.graph.edges import EdgeTable
from gnnautoscale.graph.graph import Graph
from gnnautoscale.graph.loader import HaloLoader

SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {},
    "not kept": {"keep": False},
    "drawn anew": {"shuffle": True, "batch_size": 2},
    "drawn often": {"shuffle": True, "batch_size": 2, "drawings": 2},
    "with workers": {"keep": False, "num_workers": 1},
}
settings = pytest.mark.parametrize("settings", SETTINGS)

NODE_LEVEL, EDGE_LEVEL = ("x", "y", "train_mask"), ("edge_weight", "edge_attr", "edge_type")


def made(data: Data, settings: str) -> HaloLoader:
    return HaloLoader(data, 5, partition="random", **SETTINGS[settings])


def check(batches: Any, data: Data) -> None:
    """Every batch has the rows of these data, and all nodes are there."""
    seen = []
    for batch in batches:
        n_id, e_id = batch.n_id.as_subclass(Tensor), batch.e_id
        assert torch.equal(n_id[batch.edge_index.as_subclass(Tensor)], data.edge_index[:, e_id])
        for name in NODE_LEVEL:
            assert torch.equal(batch[name], data[name][n_id]), name
        for name in EDGE_LEVEL:
            assert torch.equal(batch[name], data[name][e_id]), name
        seen.append(n_id[: batch.batch_size])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(data.num_nodes))


def replace(data: Data) -> None:
    data.x, data.y, data.train_mask = data.x + 1, 3 - data.y, ~data.train_mask
    data.edge_weight, data.edge_attr, data.edge_type = data.edge_weight * 2, -data.edge_attr, 2 - data.edge_type


def write(data: Data) -> None:
    data.x.add_(1)
    data.y[3] += 1
    data.train_mask.logical_not_()
    data.edge_weight[:] = 7.0
    data.edge_attr.zero_()
    data.edge_type[0] = 1


def rewire(data: Data) -> None:
    """Other edges, and another number of them."""
    data.edge_index = torch.cat([data.edge_index.flip(0)[:, 1:], data.edge_index[:, :5]], dim=1)
    for name in EDGE_LEVEL:
        data[name] = torch.cat([data[name][1:], data[name][:5]])


def rewrite(data: Data) -> None:
    """Other edges in the same tensor."""
    data.edge_index.copy_(data.edge_index.roll(3, dims=1))


@settings
@pytest.mark.parametrize("change", [replace, write, rewire, rewrite])
def test_the_next_epoch_takes_over_what_changed(settings: str, change: Callable[[Data], None]) -> None:
    data = undirected_graph()
    loader = made(data, settings)
    list(loader), list(loader.in_order())
    key = loader.graph.key
    change(data)
    loader.first_of_next_epoch()
    check(loader, data)
    check(loader.in_order(), data)
    check([loader.batch_for(torch.randperm(40))], data)
    assert loader.graph is Graph.of(data)
    assert loader.graph.key == Graph(data.clone()).key != key


@settings
def test_a_running_epoch_goes_on_with_tensors_that_are_replaced(settings: str) -> None:
    data = undirected_graph()
    before = data.clone()
    loader = made(data, settings)
    epoch, sweep = iter(loader), loader.in_order()
    first = [next(epoch)]
    replace(data)
    after = data.clone()
    assert torch.equal(loader.batch_for(torch.tensor([2])).x[:1], after.x[2:3])  # somebody else's are new
    check([*first, *epoch], before)
    check(sweep, before)
    check(loader, after)
    check(loader.in_order(), after)


@settings
@pytest.mark.parametrize("name", [*NODE_LEVEL, *EDGE_LEVEL, "edge_index"])
def test_writing_in_the_middle_of_an_epoch_is_refused(settings: str, name: str) -> None:
    data = undirected_graph()
    loader = made(data, settings)
    epoch = iter(loader)
    next(epoch)  # and the next is built
    data[name].copy_(data[name].flip(0))
    with pytest.raises(InputError, match=rf"must not be written to while its batches are in use, but got {name}"):
        list(epoch)
    check(loader, data)


def test_an_epoch_whose_batches_are_all_kept_goes_on_with_them() -> None:
    data = undirected_graph()
    before = data.clone()
    loader = HaloLoader(data, 5)
    list(loader)
    epoch = iter(loader)
    first = [next(epoch)]
    write(data)
    check([*first, *epoch], before)
    check(loader, data)


def test_attributes_come_and_go() -> None:
    data = undirected_graph()
    data.note = "old"
    loader = HaloLoader(data, 4)
    list(loader)
    data.age = torch.arange(40)
    data.cost = torch.arange(data.num_edges)
    data.note = "new"
    del data.y
    for batch in loader:
        assert torch.equal(batch.age, batch.n_id.as_subclass(Tensor))
        assert torch.equal(batch.cost, batch.e_id)
        assert batch.cost.attribute == "cost"
        assert batch.note == "new"
        assert "y" not in batch


def test_labels_leave_everything_else_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 4, bidirectional=True)
    before, key, table = loader.graph, loader.graph.key, table_of(loader)
    data.y = data.y + 1
    data.train_mask.logical_not_()
    data.val_mask = ~data.train_mask
    monkeypatch.setattr("gnnautoscale.graph.graph.fingerprint", lambda *_, **__: pytest.fail("hashed again"))
    check(loader, data)
    now = loader.graph
    assert now is not before
    assert now.key == key
    assert table_of(loader) is table


def test_other_features_leave_the_sorted_edges() -> None:
    data = undirected_graph()
    for partition in (torch.arange(40) % 4, torch.arange(40) // 10):  # with and without another order of rows
        loader = HaloLoader(data, partition=partition)
        before, table = loader.graph.key, table_of(loader)
        data.x = data.x * 2
        assert table_of(loader) is table
        assert loader.graph.key != before
        rewrite(data)
        assert table_of(loader) is not table


def table_of(loader: HaloLoader) -> EdgeTable:
    table: EdgeTable = loader.any_batch().edge_index.info.table
    return table


def test_nothing_is_made_anew_if_nothing_changed() -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 4)
    before = [batch.info for batch in loader.ready_batches()]
    data.x, data.y = data.x, data.y
    assert [batch.info for batch in loader.ready_batches()] == before


@pytest.mark.parametrize("wrong", ["y", "train_mask", "x"])
def test_what_is_put_in_place_is_checked(wrong: str) -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 4)
    right, data[wrong] = data[wrong], data[wrong][:-1]
    data.num_nodes = 40
    with pytest.raises(InputError, match=f"{wrong} must have one row for each of the 40 nodes"):
        iter(loader)
    data[wrong] = right
    check(loader, data)


def test_another_number_of_nodes_is_refused() -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 4)
    others = baselines(data)
    data.update(undirected_graph(41).to_dict())
    uses: list[Callable[[], Any]] = [loader.in_order, loader.follow, lambda: loader.batch_for(torch.tensor([1]))]
    uses += [lambda: list(loader), *(partial(list, other) for other in others)]
    for use in uses:
        with pytest.raises(InputError, match=r"must keep its 40 nodes, but got 41 nodes.*a new loader.*gas\.grow"):
            use()


def test_connectivity_is_that_of_the_edges() -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 4, partition="random")
    assert loader.connectivity > 0
    data.edge_index = torch.stack([torch.arange(40)] * 2)
    data.edge_weight, data.edge_attr, data.edge_type = torch.ones(40), torch.ones(40, 3), torch.ones(40).long()
    list(loader)
    assert loader.connectivity == 0


def baselines(data: Data) -> list[ClusterLoader | SampleLoader]:
    return [ClusterLoader(data, 4), SampleLoader(data, torch.arange(40), [3], num_batches=4)]


@pytest.mark.parametrize("change", [replace, write, rewire, rewrite])
def test_the_baselines_follow_too(change: Callable[[Data], None]) -> None:
    data = undirected_graph()
    loaders = baselines(data)
    for loader in loaders:
        list(loader)
    change(data)
    for loader in loaders:
        check(loader, data)


def test_running_epochs_of_the_baselines() -> None:
    data = undirected_graph()
    before = data.clone()
    for loader in baselines(data):
        epoch = iter(loader)
        first = [next(epoch)]
        replace(data)
        check([*first, *epoch], before)
        before = data.clone()
        epoch = iter(loader)
        next(epoch)
        data.y.zero_()
        with pytest.raises(InputError, match="must not be written to"):
            list(epoch)
        before = data.clone()
