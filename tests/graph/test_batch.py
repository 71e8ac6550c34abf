"""Where batches lie in their graph, and tensors that know their batch."""

from __future__ import annotations

import copy
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, history_rows, odd_graph, undirected_graph, whole
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward import GraphMemory
from gnnautoscale.graph.batch import BatchInfo, BatchTensor
from gnnautoscale.graph.edges import RowOrder
from gnnautoscale.graph.ready import ReadyBatch
from gnnautoscale.transfer import BatchRows

C = CHANNELS
LABELS = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])


def info_of(batch: Data) -> BatchInfo:
    info: BatchInfo = batch.edge_index.info
    return info


def rows_of(info: BatchInfo) -> BatchRows:
    """Where a batch's rows lie in histories that its loader was the first to use."""
    return GraphMemory(info.graph, info.graph.num_nodes, "device", None).rows_of(info)


def eight_nodes() -> gas.HaloLoader:
    return gas.HaloLoader(undirected_graph(8, 6), partition=LABELS)


# Rows ################################################################################################################


def check_rows(rows: BatchRows, info: BatchInfo, order: RowOrder) -> None:
    """Runs name every own row once, in the order of the batch, and none of them could be joined with the next."""
    assert torch.equal(rows.index, order.row_of[info.n_id])
    assert rows.batch_size == info.batch_size
    positions = [first + step for _, first, count in rows.runs for step in range(count)]
    places = [start + step for start, _, count in rows.runs for step in range(count)]
    assert positions == list(range(info.batch_size))
    assert places == rows.index[: info.batch_size].tolist()
    assert all(count > 0 for _, _, count in rows.runs)
    assert all(a[0] + a[2] != b[0] for a, b in pairwise(rows.runs))


def test_a_part_is_one_run() -> None:
    batches = list(eight_nodes())
    rows = [rows_of(info) for info in map(info_of, batches)]
    assert [part.runs for part in rows] == [[(0, 0, 3)], [(3, 0, 2)], [(5, 0, 3)]]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make_data", [undirected_graph, odd_graph])
def test_rows_of_batches_of_parts(batch_size: int, shuffle: bool, make_data: Any) -> None:
    loader = gas.HaloLoader(make_data(), 5, partition="random", batch_size=batch_size, shuffle=shuffle)
    for _ in range(2):
        seen = []
        for batch in loader:
            info = info_of(batch)
            rows = rows_of(info)
            check_rows(rows, info, info.order)
            assert len(rows.runs) <= batch_size
            seen.append(rows.index[: info.batch_size])
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(loader.graph.num_nodes))


def test_neighbouring_parts_are_one_run() -> None:
    loader = gas.HaloLoader(undirected_graph(), 6, partition="random", batch_size=3)
    assert [len(rows_of(info).runs) for info in map(info_of, loader)] == [1, 1]


@pytest.mark.parametrize("nodes", [[], [3], [1, 3, 6], [6, 3, 1], [1, 3, 0], [7, 6, 5, 4, 3, 2, 1, 0], [0, 4, 7, 2]])
def test_rows_around_nodes(nodes: list[int]) -> None:
    loader = eight_nodes()
    info = info_of(loader.batch_for(torch.tensor(nodes, dtype=torch.long)))
    rows = rows_of(info)
    check_rows(rows, info, info.order)
    expected = {(): [], (1, 3, 6): [(0, 0, 3)], (6, 3, 1): [(2, 0, 1), (1, 1, 1), (0, 2, 1)], (0, 4, 7, 2): None}
    if expected.get(tuple(nodes)) is not None:
        assert rows.runs == expected[tuple(nodes)]


def test_rows_are_kept_for_each_order_and_forgotten_with_it() -> None:
    loader = eight_nodes()
    info = info_of(next(iter(loader)))
    rows = rows_of(info)
    assert rows_of(info) is rows
    other = GraphMemory(info.graph, 8, "device", None)
    order = RowOrder(torch.arange(8).flip(0))
    other.reopen({}, torch.device("cpu"), order)
    again = other.rows_of(info)
    check_rows(again, info, order)
    assert again is not rows
    assert rows_of(info) is rows
    count = len(info._derived)
    del other, order
    gc.collect()
    assert len(info._derived) == count - 1


def test_rows_made_without_gradients_are_ordinary_tensors() -> None:
    loader = eight_nodes()
    with torch.inference_mode():
        info = info_of(next(iter(loader)))
        rows = rows_of(info)
    assert not rows.index.is_inference()
    assert rows.on(torch.device("cpu")) is rows.index


def test_loader_made_in_inference_mode() -> None:
    with torch.inference_mode():
        loader = eight_nodes()
        assert len(list(loader)) == 3
    assert len(list(loader)) == 3


class Owner:
    """Something that batches keep values for."""


def test_what_is_derived_is_computed_once_and_dropped_with_its_owner() -> None:
    info = info_of(next(iter(eight_nodes())))
    owner, other = Owner(), Owner()
    computed: list[int] = []

    def compute() -> int:
        computed.append(len(computed))
        return computed[-1]

    assert [info.derive(owner, compute), info.derive(owner, compute), info.derive(other, compute)] == [0, 0, 1]
    del owner
    gc.collect()
    assert list(info._derived.values()) == [1]


def test_placed_pieces_are_forgotten_together() -> None:
    info = info_of(next(iter(eight_nodes())))
    info.place("a", 1)
    info.place("b", 2)
    assert (info.placed("a"), info.placed("b"), info.placed("c")) == (1, 2, None)
    info.displace()
    assert info.placed("a") is None


def test_hints_come_back() -> None:
    first, second, third = (info_of(batch) for batch in eight_nodes())
    with first.followed_by(second):
        with first.followed_by(third):
            assert first.upcoming is third
        assert first.upcoming is second
    assert first.upcoming is None


def test_parts_of_a_batch() -> None:
    for batch in gas.HaloLoader(odd_graph(), 4, partition="random"):
        info = info_of(batch)
        assert info.num_rows == batch.num_nodes == info.nodes.numel() + info.num_halo
        assert torch.equal(torch.cat([info.nodes, info.halo]), batch.n_id)


# Two loaders #########################################################################################################


def model_of(data: Data) -> Any:
    torch.manual_seed(0)
    return gas.autoscale(pyg.GraphSAGE(C, C, 3, 4), data).eval()


def exact_rows(data: Data) -> dict[str, Tensor]:
    """What histories must hold, from a single batch."""
    model = model_of(data)
    gas.infer(model, gas.HaloLoader(data, 1))
    return history_rows(model)


@pytest.mark.parametrize("make_data", [undirected_graph, odd_graph])
def test_loaders_may_take_turns(make_data: Any) -> None:
    """Histories keep the order of the first loader; batches of others are found in it too."""
    data = make_data()
    expected = exact_rows(data)
    loaders = [
        gas.HaloLoader(data, 4, partition="random"),
        gas.HaloLoader(data, 3, partition="random", seed=1, batch_size=2, shuffle=True),
        gas.HaloLoader(data, partition=torch.arange(data.num_nodes) % 7),
        gas.HaloLoader(data, 1),
    ]
    for first in loaders:
        model = model_of(data)
        with torch.no_grad():
            for loader in (first, *loaders, *loaders):
                for batch in loader:
                    model(batch.x, batch.edge_index)
        rows = history_rows(model)
        assert attached(model).memory._order is info_of(next(iter(first))).order or first is loaders[-1]
        assert rows.keys() == expected.keys()
        for name in rows:
            assert_same(rows[name], expected[name])


@pytest.mark.parametrize("make_data", [undirected_graph, odd_graph])
def test_batches_around_nodes_write_and_read_the_right_rows(make_data: Any) -> None:
    data = make_data()
    expected = exact_rows(data)
    loader = gas.HaloLoader(data, 4, partition="random")
    model = model_of(data)
    gas.refresh(model, loader)
    out = whole(copy.deepcopy(gas.detach(model)), data)
    gas.autoscale(model, data)
    gas.refresh(model, loader)
    for history in attached(model).memory.histories.values():
        history.push(torch.zeros(1, history.width), torch.tensor([0]))  # one node's rows are lost
    order = attached(model).memory._order
    assert order is not None
    lost = int((order.row_of == 0).nonzero())
    with torch.no_grad():
        for nodes in ([lost], [lost, (lost + 5) % 30], [], list(range(data.num_nodes - 1, -1, -1))):
            batch = loader.batch_for(torch.tensor(nodes, dtype=torch.long))
            for _ in range(2):
                rows = model(batch.x, batch.edge_index)
            assert_same(rows, out[nodes])
            for name, got in history_rows(model).items():
                assert_same(got, expected[name])


def test_rows_of_two_loaders_match_in_every_sweep() -> None:
    data = odd_graph()
    loaders = [
        gas.HaloLoader(data, 4, partition="random"),
        gas.HaloLoader(data, 6, partition="random", seed=3, batch_size=2),
    ]
    model = model_of(data)
    first = gas.infer(model, loaders[0])
    assert_same(gas.predict(model, loaders[1], torch.arange(33)), first)
    assert_same(gas.infer(model, loaders[1]), first)
    assert_same(gas.predict(model, loaders[0], torch.tensor([32, 0, 0, 7])), first[[32, 0, 0, 7]])
    for name, rows in exact_rows(data).items():
        assert_same(history_rows(model)[name], rows)


# Tensors that know their batch #######################################################################################

EDGE_LEVEL = ("edge_index", "edge_weight", "edge_attr", "edge_type")


@pytest.mark.parametrize("key", EDGE_LEVEL)
def test_emptied(key: str) -> None:
    batch = next(iter(gas.HaloLoader(undirected_graph(), 4, partition="random")))
    value = batch[key]
    empty = value.emptied()
    assert isinstance(empty, BatchTensor)
    assert (empty.info, empty.attribute, empty.dtype) == (value.info, key, value.dtype)
    assert empty.numel() == 0
    assert empty.dim() == value.dim()
    assert empty.shape == ((2, 0) if key == "edge_index" else (0, *value.shape[1:]))
    assert empty.is_original
    assert empty.is_own_edges
    assert value.numel() > 0
    assert empty.emptied().shape == empty.shape


def test_emptied_and_flipped() -> None:
    edges = next(iter(gas.HaloLoader(undirected_graph(), 4))).edge_index
    for empty in (edges.flip(0).emptied(), edges.emptied().flip(0)):
        assert isinstance(empty, BatchTensor)
        assert empty.attribute == "reversed edge_index"
        assert empty.shape == (2, 0)
        assert empty.is_own_edges
    assert edges.emptied().flip(0).flip([0]).attribute == "edge_index"


@pytest.mark.parametrize("key", EDGE_LEVEL)
def test_emptied_in_inference_mode(key: str) -> None:
    batch = next(iter(gas.HaloLoader(undirected_graph(), 4, partition="random")))
    with torch.inference_mode():
        assert batch[key].emptied().is_own_edges


def test_own_edges() -> None:
    batch = next(iter(gas.HaloLoader(undirected_graph(), 4, partition="random")))
    assert all(batch[key].is_own_edges for key in EDGE_LEVEL)
    assert not batch.n_id.is_own_edges
    assert batch.edge_index.flip(0).is_own_edges
    assert batch.edge_weight.clone().is_own_edges
    assert not batch.edge_weight.clone().requires_grad_().is_own_edges
    written = batch.edge_weight.clone()
    written.mul_(2.0)
    assert not written.is_own_edges
    assert not isinstance(batch.edge_weight * 2.0, BatchTensor)


# What comes next #####################################################################################################


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_next_batch_is_known_while_one_is_used(shuffle: bool, batch_size: int) -> None:
    loader = gas.HaloLoader(undirected_graph(), 6, partition="random", batch_size=batch_size, shuffle=shuffle)
    for _ in range(2):
        seen: list[BatchInfo] = []
        expected: BatchInfo | None = None
        for batch in loader:
            info = info_of(batch)
            assert info is expected or not seen
            assert all(earlier.upcoming is None for earlier in seen)
            seen.append(info)
            expected = info.upcoming
        assert expected is None
        assert len(seen) == len(loader)
        assert all(info.upcoming is None for info in seen)


def test_hints_end_with_the_iteration() -> None:
    loader = gas.HaloLoader(undirected_graph(), 4, partition="random")
    infos = [info_of(batch) for batch in loader]
    for _ in loader:
        break
    gc.collect()
    assert all(info.upcoming is None for info in infos)
    iterator = iter(loader)
    next(iterator)
    assert infos[0].upcoming is infos[1]
    del iterator
    gc.collect()
    assert infos[0].upcoming is None

    def fail() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()
    assert all(info.upcoming is None for info in infos)


def test_nested_iterations() -> None:
    loader = gas.HaloLoader(undirected_graph(), 4, partition="random")
    infos = [info_of(batch) for batch in loader]
    outer = []
    for batch in loader:
        outer.append(info_of(batch))
        inner = []
        for other in loader:
            inner.append(info_of(other))
            following = infos[len(inner)] if len(inner) < len(infos) else None
            assert info_of(other).upcoming is following
        assert inner == infos
    assert outer == infos
    assert all(info.upcoming is None for info in infos)


def test_sweeps_have_hints_too_and_batches_around_nodes_have_none() -> None:
    loader = gas.HaloLoader(undirected_graph(), 4, partition="random", batch_size=2, shuffle=True)
    first, second = (info_of(batch) for batch in loader.in_order())
    iterator = loader.in_order()
    next(iterator)
    assert first.upcoming is second
    assert info_of(loader.batch_for(torch.tensor([1]))).upcoming is None
    assert [info_of(batch) for batch in loader.in_order()] == [first, second]


def test_training_with_nested_iterations_gives_the_same() -> None:
    data = undirected_graph()
    results = []
    for nested in (False, True):
        model = model_of(data)
        loader = gas.HaloLoader(data, 4, partition="random")
        with torch.no_grad():
            for batch in loader:
                out = model(batch.x, batch.edge_index)
                if nested:
                    for _ in loader:
                        pass
        results.append((out, history_rows(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(rows, results[1][1][name]) for name, rows in results[0][1].items())


# Batches as the loader keeps them ####################################################################################


@pytest.mark.parametrize(("batch_size", "shuffle", "fixed"), [(1, False, 1), (2, False, 1), (1, True, 1), (2, True, 0)])
def test_ready_batches(batch_size: int, shuffle: bool, fixed: int) -> None:
    data = odd_graph()
    loader = gas.HaloLoader(data, 6, partition="random", batch_size=batch_size, shuffle=shuffle)
    assert loader.is_fixed == bool(fixed)
    epochs = [list(loader.ready_batches()) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(loader)
        assert all(isinstance(batch, ReadyBatch) and batch.intact() for batch in epoch)
        assert all(batch.info.upcoming is None for batch in epoch)
        nodes = torch.cat([batch.info.nodes for batch in epoch])
        assert torch.equal(nodes.sort().values, torch.arange(data.num_nodes))
    same = {batch.info for batch in epochs[0]} == {batch.info for batch in epochs[1]}
    assert same == bool(fixed)
    for batch in epochs[0]:
        copied = batch.tagged_copy()
        assert copied.edge_index.info is batch.info
        assert copied is not batch.tagged_copy()
        assert torch.equal(copied.n_id, batch.info.n_id)
        assert torch.equal(copied.x, data.x[batch.info.n_id])


def test_ready_batches_are_what_iterating_hands_out() -> None:
    loader = gas.HaloLoader(odd_graph(), 6, partition="random")
    assert [batch.info for batch in loader.ready_batches()] == [info_of(batch) for batch in loader]


def test_ready_batches_that_were_written_to_are_cut_again() -> None:
    data = odd_graph()
    loader = gas.HaloLoader(data, 6, partition="random")
    first = list(loader.ready_batches())
    first[0].tagged_copy().x.zero_()
    assert [batch.intact() for batch in first] == [False] + [True] * 5
    second = list(loader.ready_batches())
    assert second[0].info is not first[0].info
    assert [batch.info for batch in second[1:]] == [batch.info for batch in first[1:]]
    assert torch.equal(second[0].tagged_copy().x, data.x[second[0].info.n_id])


def test_ready_batches_with_workers() -> None:
    loaders = [gas.HaloLoader(odd_graph(), 3, partition="random", num_workers=workers) for workers in (0, 1)]
    for one, other in zip(*(list(loader.ready_batches()) for loader in loaders), strict=True):
        assert torch.equal(one.info.n_id, other.info.n_id)
        assert torch.equal(one.info.e_id, other.info.e_id)


# Other processes #####################################################################################################


class Batches(Dataset[Data]):
    """A data set of the user's own that hands out a loader's batches."""

    def __init__(self, loader: gas.HaloLoader) -> None:
        self.batches = list(loader)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> Data:
        return self.batches[place]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_through_a_data_loader(num_workers: int) -> None:
    """From another process they come back as plain tensors, because there is no graph there to belong to."""
    batches = Batches(gas.HaloLoader(undirected_graph(), 3))
    loader = DataLoader(batches, batch_size=None, num_workers=num_workers, collate_fn=lambda batch: batch)
    for batch, expected in zip(loader, batches.batches, strict=True):
        for key, value in expected:
            if isinstance(value, Tensor):
                assert type(batch[key]) is (Tensor if num_workers else type(value))
                assert torch.equal(batch[key], value)
