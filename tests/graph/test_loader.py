"""Batches follow PyG's conventions, lose nothing, and stay as they were."""

from __future__ import annotations

import copy
import io
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from conftest import directed_ring, odd_graph, undirected_graph, with_attributes
from gnnautoscale.errors import InputError
from gnnautoscale.graph.batch import BatchTensor
from gnnautoscale.graph.loader import HaloLoader

#   0 -> 1 -> 2 -> 3 -> 0, 3 -> 3, 4 -> 1, and 5 by itself; parts {0, 1, 5} and {2, 3, 4}
TINY = torch.tensor([[0, 1, 2, 3, 3, 4], [1, 2, 3, 0, 3, 1]])
TINY_PARTS = torch.tensor([0, 0, 1, 1, 1, 0])

GRAPHS = {"undirected": undirected_graph(), "odd": odd_graph(), "ring": directed_ring()}
graphs = pytest.mark.parametrize("name", GRAPHS)


def plain(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor)


def nodes_of(batch: Data) -> list[int]:
    found: list[int] = batch.n_id[: batch.batch_size].tolist()
    return found


def tiny() -> Data:
    data = with_attributes(TINY, 6)
    data.pos = torch.arange(12.0).view(6, 2)
    data.edge_label_of = torch.arange(6) * 10
    data.name = "tiny"
    data.num_classes = 4
    data.matrix = torch.eye(3)
    return data


def test_tiny_graph() -> None:
    data = tiny()
    loader = HaloLoader(data, partition=TINY_PARTS)
    first, second = loader
    assert len(loader) == 2
    assert first.n_id.tolist() == [0, 1, 5, 3, 4]
    assert first.batch_size == 3
    assert first.num_nodes == 5
    assert first.edge_index.tolist() == [[3, 0, 4], [0, 1, 1]]
    assert first.e_id.tolist() == [3, 0, 5]
    assert second.n_id.tolist() == [2, 3, 4, 1]
    assert second.batch_size == 3
    assert second.edge_index.tolist() == [[3, 0, 1], [0, 1, 1]]
    assert second.e_id.tolist() == [1, 2, 4]
    for batch in (first, second):
        assert batch.edge_label_of.tolist() == (batch.e_id * 10).tolist()
        assert torch.equal(batch.pos, data.pos[batch.n_id])
        assert (batch.name, batch.num_classes) == ("tiny", 4)
        assert torch.equal(batch.matrix, torch.eye(3))


@graphs
@pytest.mark.parametrize(
    ("parts", "num_parts", "batch_size"), [("metis", 1, 1), ("random", 4, 1), ("metis", 7, 2), ("random", 12, 12)]
)
def test_batches_hold_every_edge_into_their_nodes(name: str, parts: Any, num_parts: int, batch_size: int) -> None:
    data = GRAPHS[name]
    loader = HaloLoader(data, num_parts, partition=parts, batch_size=batch_size, shuffle=True)
    seen_nodes, seen_edges = [], []
    batches = list(loader)
    assert len(batches) == len(loader) == -(-num_parts // batch_size)
    for batch in batches:
        nodes = plain(batch.n_id)[: batch.batch_size]
        halo = plain(batch.n_id)[batch.batch_size :]
        assert torch.unique(batch.n_id).numel() == batch.num_nodes == batch.n_id.numel()
        # Node- and edge-level attributes are rows of the graph's.
        for key in ("x", "y", "train_mask"):
            assert torch.equal(batch[key], data[key][batch.n_id])
        for key in ("edge_weight", "edge_attr", "edge_type"):
            assert torch.equal(batch[key], data[key][batch.e_id])
        # Edges are the graph's, point into batch nodes only, and all of those are there.
        source, target = plain(batch.edge_index)
        assert torch.equal(batch.n_id[plain(batch.edge_index)], data.edge_index[:, batch.e_id])
        assert bool((target < batch.batch_size).all())
        wanted = torch.isin(data.edge_index[1], nodes).nonzero().squeeze(1)
        assert torch.equal(batch.e_id.sort().values, wanted)
        # The halo is what these edges need and no more.
        assert set(halo.tolist()) == set(batch.n_id[source].tolist()) - set(nodes.tolist())
        seen_nodes.append(nodes)
        seen_edges.append(batch.e_id)
    assert torch.equal(torch.cat(seen_nodes).sort().values, torch.arange(data.num_nodes))
    assert torch.equal(torch.cat(seen_edges).sort().values, torch.arange(data.num_edges))


def test_batches_are_whole_parts() -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 8, partition="random", batch_size=3, shuffle=True)
    for batch in loader:
        parts = torch.unique(loader.labels[nodes_of(batch)])
        assert batch.batch_size == int(torch.isin(loader.labels, parts).sum())


def test_bidirectional_halo_has_both_ends_of_every_edge() -> None:
    data = odd_graph()
    loader = HaloLoader(data, 5, partition="random", bidirectional=True)
    for batch in loader:
        nodes = plain(batch.n_id)[: batch.batch_size]
        near = torch.isin(data.edge_index, nodes).any(0)
        assert set(batch.n_id.tolist()) == set(nodes.tolist()) | set(data.edge_index[:, near].flatten().tolist())
        assert bool((batch.edge_index[1] < batch.batch_size).all())


def epoch(loader: HaloLoader) -> list[tuple[int, ...]]:
    return [tuple(nodes_of(batch)) for batch in loader]


def test_shuffle_draws_new_groups_in_each_epoch_and_the_seed_repeats_them() -> None:
    data = undirected_graph()
    first, second, other = (
        HaloLoader(data, 8, partition=torch.arange(40) % 8, batch_size=2, shuffle=True, seed=seed) for seed in (1, 1, 2)
    )
    epochs = [epoch(first) for _ in range(3)]
    assert epochs == [epoch(second) for _ in range(3)]
    assert epochs != [epoch(other) for _ in range(3)]
    groups = {frozenset(batches) for batches in epochs}
    assert len(groups) == 3
    assert all(sorted(sum(batches, ())) == list(range(40)) for batches in epochs)


def test_order_of_single_parts_is_shuffled() -> None:
    loader = HaloLoader(undirected_graph(), 8, shuffle=True)
    epochs = [epoch(loader) for _ in range(3)]
    assert len({tuple(batches) for batches in epochs}) == 3
    assert len({frozenset(batches) for batches in epochs}) == 1


def test_without_shuffle_and_in_order_nothing_changes() -> None:
    data = undirected_graph()
    still = HaloLoader(data, 8, partition="random", batch_size=3)
    moving = HaloLoader(data, 8, partition="random", batch_size=3, shuffle=True)
    expected = epoch(still)
    assert epoch(still) == expected
    for _ in range(2):
        list(moving)
        assert [tuple(nodes_of(batch)) for batch in moving.in_order()] == expected


def test_seed_also_makes_the_partition_reproducible() -> None:
    data = undirected_graph()
    labels = [HaloLoader(data, 5, partition="random", seed=seed).labels for seed in (0, 0, 1)]
    assert torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])


@pytest.mark.parametrize(("batch_size", "shuffle"), [(1, True), (2, False), (4, True)])
def test_fixed_batches_are_the_same_tensors_again(batch_size: int, shuffle: bool) -> None:
    loader = HaloLoader(undirected_graph(), 4, batch_size=batch_size, shuffle=shuffle)
    before, after = ({tuple(nodes_of(b)): b.edge_attr.data_ptr() for b in loader} for _ in range(2))
    assert before == after


def test_changing_a_batch_does_not_change_the_next_epoch() -> None:
    loader = HaloLoader(undirected_graph(), 3)
    before = [batch.clone() for batch in loader]
    for batch in loader:
        batch.x = batch.x * 2
        batch.extra = torch.ones(3)
        batch.batch_size = 1
        del batch.y
        batch.edge_index = batch.edge_index[:, :1]
    for batch, expected in zip(loader, before, strict=True):
        assert batch.keys() == expected.keys()
        for key in expected.keys():  # noqa: SIM118
            same = (
                torch.equal(batch[key], expected[key])
                if isinstance(batch[key], Tensor)
                else batch[key] == expected[key]
            )
            assert same, key


def test_writing_into_a_batch_does_not_change_the_next_epoch() -> None:
    """A model that starts with ``x.relu_()`` is common, and harmless with PyG's loaders."""
    loader = HaloLoader(undirected_graph(), 3)
    for key in ("x", "y", "edge_index", "edge_weight", "n_id"):
        first = next(iter(loader))
        expected = plain(first[key]).clone()
        plain(first[key]).mul_(0)
        again = next(iter(loader))
        assert torch.equal(plain(again[key]), expected), key
        assert key == "y" or key == "x" or again[key].is_original


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_give_the_same_batches(shuffle: bool) -> None:
    data = odd_graph()
    alone, helped = (
        HaloLoader(data, 6, partition="random", batch_size=2, shuffle=shuffle, num_workers=workers)
        for workers in (0, 2)
    )
    for _ in range(2):
        for batch, other in zip(alone, helped, strict=True):
            assert set(batch.keys()) == set(other.keys())
            assert isinstance(other.edge_index, BatchTensor)
            for key, value in batch:
                assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key], key


def test_a_sweep_in_the_middle_of_an_epoch_changes_nothing() -> None:
    data = undirected_graph()
    loader, other = (HaloLoader(data, 6, partition="random", batch_size=2, shuffle=True) for _ in range(2))
    expected = epoch(other)
    got = []
    for batch in loader:
        got.append(tuple(nodes_of(batch)))
        if len(got) == 1:
            list(loader.in_order())
    assert got == expected


def test_two_iterations_at_once_do_not_disturb_each_other() -> None:
    loader = HaloLoader(undirected_graph(), 5, partition="random")
    expected = epoch(HaloLoader(undirected_graph(), 5, partition="random"))
    slow, fast = iter(loader), iter(loader)
    got = [tuple(nodes_of(next(slow)))]
    assert [tuple(nodes_of(next(fast))) for _ in range(3)] == expected[:3]
    got += [tuple(nodes_of(batch)) for batch in slow]
    assert got == expected
    assert epoch(loader) == expected


def test_iterating_leaves_the_random_state_alone() -> None:
    loader = HaloLoader(undirected_graph(), 5, shuffle=True, batch_size=2)
    before = torch.get_rng_state()
    list(loader)
    list(loader.in_order())
    assert torch.equal(torch.get_rng_state(), before)


def test_labels() -> None:
    labels = torch.arange(40) // 10
    loader = HaloLoader(undirected_graph(), partition=labels)
    assert loader.num_parts == 4
    assert epoch(loader) == [tuple(range(i, i + 10)) for i in range(0, 40, 10)]
    assert len(HaloLoader(undirected_graph(), 4, partition=labels)) == 4


def test_connectivity() -> None:
    # Part {0, 1, 5} has the halo {3, 4}, part {2, 3, 4} has {1}.
    assert HaloLoader(tiny(), partition=TINY_PARTS).connectivity == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert HaloLoader(undirected_graph(), 1).connectivity == 0.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_some_parts_is_that_of_an_epoch(workers: int) -> None:
    loader = HaloLoader(undirected_graph(), 6, partition="random", batch_size=2, num_workers=workers)
    state = loader.state_dict()
    second = list(loader.in_order())[1]
    loader.load_state_dict(state)
    found = loader.batch_of([3, 2])
    assert torch.equal(plain(found.n_id), plain(second.n_id))
    assert torch.equal(plain(found.edge_index), plain(second.edge_index))
    assert found.batch_size == second.batch_size
    assert torch.equal(loader.state_dict()["worker_seeds"], state["worker_seeds"])
    single = loader.batch_of([4])
    assert sorted(plain(single.n_id)[: single.batch_size].tolist()) == (loader.labels == 4).nonzero().flatten().tolist()


def test_a_batch_for_nodes_keeps_their_order() -> None:
    data = tiny()
    batch = HaloLoader(data, 2).batch_for(torch.tensor([3, 0]))
    assert batch.batch_size == 2
    assert batch.n_id.tolist() == [3, 0, 2]
    assert batch.edge_index.tolist() == [[2, 0, 0], [0, 0, 1]]
    assert batch.e_id.tolist() == [2, 4, 3]
    assert torch.equal(batch.x, data.x[[3, 0, 2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the number of parts"),
        ({"num_parts": 0}, "num_parts must be an integer of at least 1"),
        ({"num_parts": 7}, "num_parts must be between 1 and num_nodes, but got 7 for 6"),
        ({"num_parts": 2, "batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"num_parts": 2, "batch_size": 1.5}, "batch_size must be an integer of at least 1"),
        ({"num_parts": 2, "batch_size": 3}, "at most the number of parts, 2, but got 3"),
        ({"num_parts": 2, "num_workers": -1}, "num_workers must be an integer of at least 0"),
        ({"num_parts": 2, "partition": "louvain"}, "random, or a Tensor, or a dict, but got 'louvain'"),
        (
            {"num_parts": 3, "partition": TINY_PARTS},
            "must match the given labels, which name 2 parts, but got num_parts=3",
        ),
        ({"partition": TINY_PARTS[:4]}, "got shape"),
        ({"partition": TINY_PARTS.float()}, "labels must be integers"),
        ({"partition": TINY_PARTS - 1}, "must not be negative"),
        ({"partition": TINY_PARTS * 2}, "without gaps"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HaloLoader(tiny(), **options)


@pytest.mark.parametrize("data", [torch.eye(3), None])
def test_other_than_one_graph_is_refused(data: Any) -> None:
    with pytest.raises(InputError, match=r"data must be a Data, or a HeteroData, but got"):
        HaloLoader(data, 2)


def test_bad_graph_is_refused() -> None:
    data = tiny()
    data.x[2, 1] = float("nan")
    with pytest.raises(InputError, match=r"x must be finite.*first in row 2"):
        HaloLoader(data, 2)


# Tags ################################################################################################################

TAGGED = ["edge_index", "edge_weight", "edge_attr", "edge_type", "n_id"]


@pytest.mark.parametrize(
    "keep",
    [
        lambda value: value.to("cpu"),
        lambda value: value.to(torch.device("cpu"), non_blocking=True, copy=True),
        lambda value: value.cpu(),
        lambda value: value.clone(),
        lambda value: value.detach(),
        lambda value: value.contiguous(),
        lambda value: value.flip([0]).flip([0]) if value.attribute == "edge_index" else value,
    ],
)
def test_tag_stays_if_values_do(keep: Any) -> None:
    batch = next(iter(HaloLoader(undirected_graph(), 3)))
    for key in TAGGED:
        kept = keep(batch[key])
        assert isinstance(kept, BatchTensor), key
        assert kept.is_original
        assert kept.info is batch.edge_index.info
        assert kept.attribute == key
        assert torch.equal(kept, batch[key])
        assert type(kept.plain) is Tensor


@pytest.mark.parametrize("dims", [([0],), ((0,),), (0,)])
def test_flipped_edges_are_known(dims: Any) -> None:
    edges = next(iter(HaloLoader(undirected_graph(), 3))).edge_index
    flipped = edges.flip(*dims)
    assert isinstance(flipped, BatchTensor)
    assert flipped.attribute == "reversed edge_index"
    back = flipped.flip(*dims)
    assert isinstance(back, BatchTensor)
    assert back.attribute == "edge_index"
    assert type(edges.flip([1])) is Tensor
    assert type(edges.flip([0, 1])) is Tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value + 1,
        lambda value: 1 - value,
        lambda value: value[:1],
        lambda value: value.to(torch.float16),
        lambda value: torch.cat([value, value]),
        lambda value: value * torch.ones(()),
        lambda value: torch.nn.functional.relu(value),
        lambda value: value.view(-1),
        lambda value: value.unsqueeze(0),
    ],
)
def test_tag_is_lost_if_values_change(change: Any) -> None:
    batch = next(iter(HaloLoader(undirected_graph(), 3)))
    assert {key: type(change(batch[key])) for key in TAGGED} == dict.fromkeys(TAGGED, Tensor)


@pytest.mark.parametrize(
    "write",
    [
        lambda value: value.add_(1),
        lambda value: value.fill_(0),
        lambda value: value.__setitem__(0, 0),
        lambda value: value.plain.mul_(2),
        lambda value: value.zero_(),
    ],
)
def test_writing_is_noticed(write: Any) -> None:
    batch = next(iter(HaloLoader(undirected_graph(), 3)))
    for key in TAGGED:
        write(batch[key])
        assert not batch[key].is_original, key
        assert type(batch[key].clone()) is Tensor
        assert type(batch[key].to("cpu", copy=True)) is Tensor


def test_batches_can_be_copied_and_printed() -> None:
    batch = next(iter(HaloLoader(undirected_graph(), 3)))
    copied = copy.deepcopy(batch)
    assert torch.equal(copied.edge_index, batch.edge_index)
    assert "edge_index" in repr(batch)
    assert "tensor" in repr(batch.edge_index).lower()
    assert isinstance(copy.copy(batch).edge_index, BatchTensor)
    assert isinstance(batch.clone().edge_index, BatchTensor)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (torch.tensor([1, 1]), "each node once"),
        (torch.tensor([1.0]), "int64"),
        (torch.tensor([[1]]), "one-dimensional"),
        (torch.tensor([40]), "from 0 to 39"),
        (torch.tensor([-1]), "from 0 to 39"),
    ],
)
def test_batches_for_wrong_nodes_are_refused(nodes: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        HaloLoader(undirected_graph(), 3).batch_for(nodes)


def test_drawings_come_back() -> None:
    loader = HaloLoader(undirected_graph(60, 150), 12, batch_size=4, shuffle=True, drawings=3, seed=5)
    assert loader.is_fixed
    assert (len(loader), loader.num_batches) == (3, 9)
    epochs = [[batch.n_id[: batch.batch_size].tolist() for batch in loader] for _ in range(40)]
    for epoch in epochs:
        assert sorted(node for batch in epoch for node in batch) == list(range(60))
    drawings = {frozenset(map(tuple, epoch)) for epoch in epochs}
    assert len(drawings) == 3
    assert len({frozenset(map(tuple, epoch)) for epoch in epochs[:3]}) == 3
    # Taken again at random, with their batches in any order.
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) > 6


def test_the_first_drawings_are_those_of_a_loader_that_draws_for_every_epoch() -> None:
    data = undirected_graph(60, 150)
    few, many = (HaloLoader(data, 12, batch_size=4, shuffle=True, drawings=n, seed=5) for n in (2, None))
    assert not many.is_fixed
    for _ in range(2):
        for one, other in zip(few, many, strict=True):
            assert torch.equal(one.n_id, other.n_id)


@pytest.mark.parametrize(("drawings", "shuffle"), [(0, True), (2, False), (1.5, True)])
def test_odd_drawings_are_refused(drawings: Any, shuffle: bool) -> None:
    with pytest.raises(InputError, match="drawings"):
        HaloLoader(undirected_graph(20, 40), 4, batch_size=2, shuffle=shuffle, drawings=drawings)


def test_one_part_per_batch_needs_no_drawings() -> None:
    loader = HaloLoader(undirected_graph(20, 40), 4, shuffle=True, drawings=5)
    assert loader.num_batches == 4


def test_batches_that_are_not_kept_are_cut_anew() -> None:
    data = undirected_graph()
    loader = HaloLoader(data, 4, keep=False)
    assert not loader.is_fixed
    before = [batch.x.clone() for batch in loader]
    data.x += 1.0
    for batch, earlier in zip(loader, before, strict=True):
        assert torch.equal(batch.x, earlier + 1.0)
    for batch in loader.in_order():
        assert torch.equal(batch.x, data.x[batch.n_id])


# States ##############################################################################################################

SETTINGS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 2},
    "single parts": {"shuffle": True},
    "shuffled": {"shuffle": True, "batch_size": 3},
    "all at once": {"shuffle": True, "batch_size": 8},
    "drawings": {"shuffle": True, "batch_size": 3, "drawings": 2},
}


def made(settings: str) -> HaloLoader:
    return HaloLoader(undirected_graph(), partition=torch.arange(40) % 8, seed=3, **SETTINGS[settings])


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("before", "ahead"), [(0, True), (1, False), (4, True)])
def test_a_loader_continues_between_epochs(settings: str, before: int, ahead: bool) -> None:
    loader, other = made(settings), made(settings)
    for _ in range(before):
        epoch(loader)
    if ahead:  # the next epoch is drawn already
        loader.first_of_next_epoch()
    state = through_file(loader.state_dict())
    expected = [epoch(loader) for _ in range(4)]
    epoch(other)
    other.load_state_dict(state)
    assert [epoch(other) for _ in range(4)] == expected
    # The same loader can go back.
    loader.load_state_dict(state)
    assert [epoch(loader) for _ in range(4)] == expected


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("before", "ahead"), [(0, False), (3, True)])
def test_a_loader_continues_in_the_middle_of_an_epoch(settings: str, before: int, ahead: bool) -> None:
    for done in range(1, len(made(settings)) + 1):
        loader, other = made(settings), made(settings)
        for _ in range(before):
            epoch(loader)
        batches = iter(loader)
        for _ in islice(batches, done):
            pass
        if ahead:
            loader.first_of_next_epoch()
        state = through_file(loader.state_dict(done))
        left = [tuple(nodes_of(batch)) for batch in batches]
        assert len(left) == len(loader) - done
        expected = [left, *(epoch(loader) for _ in range(3))]
        other.load_state_dict(state)
        # The state does not change before the loader continues.
        torch.testing.assert_close(other.state_dict(done), state, rtol=0, atol=0)
        sweeps = [tuple(nodes_of(batch)) for batch in other.in_order()]
        assert sorted(sum(sweeps, ())) == list(range(40))
        assert [epoch(other) for _ in range(4)] == expected


def test_workers_do_not_change_what_a_state_leads_to() -> None:
    loader, other = made("shuffled"), made("shuffled")
    other.num_workers = 1
    epoch(loader)
    state = loader.state_dict()
    expected = epoch(loader)
    other.load_state_dict(state)
    assert epoch(other) == expected


# On a GPU ############################################################################################################

GPU_SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "several parts": {"batch_size": 3},
    "all at once": {"batch_size": 7},
    "drawn anew": {"batch_size": 2, "shuffle": True},
    "drawn often": {"batch_size": 3, "shuffle": True, "drawings": 2},
    "both directions": {"batch_size": 2, "shuffle": True, "bidirectional": True},
    "both directions, fixed": {"bidirectional": True},
    "not kept": {"keep": False},
}


def check_same_batch(there: Data, here: Data) -> None:
    """A batch of a GPU has every attribute of one in host memory, and knows the same about itself."""
    assert set(there.keys()) == set(here.keys())
    for name, value in here:
        if isinstance(value, Tensor):
            assert torch.equal(plain(there[name]).cpu(), plain(value)), name
            assert there[name].dtype == value.dtype
            assert isinstance(there[name], BatchTensor) == isinstance(value, BatchTensor), name
        else:
            assert there[name] == value, name
    assert all(there[name].is_cuda for name in ("x", "y", "edge_index", "edge_attr", "n_id", "e_id"))
    found, info = there.edge_index.info, here.edge_index.info
    assert (found.batch_size, found.num_halo, found.num_edges) == (info.batch_size, info.num_halo, info.num_edges)
    for name in ("n_id", "e_id", "nodes", "halo"):
        assert torch.equal(getattr(found, name), getattr(info, name)), name
    assert torch.equal(found.rows.cpu(), info.rows)
    assert torch.equal(found.found.source.cpu(), info.found.source)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", GPU_SETTINGS)
@graphs
def test_a_gpu_assembles_the_same_batches(name: str, settings: str) -> None:
    data = GRAPHS[name]
    options = {"partition": "random", **GPU_SETTINGS[settings]}
    there, here = HaloLoader(data, 7, device="cuda", **options), HaloLoader(data, 7, **options)
    for _ in range(4):
        for batch, expected in zip(there, here, strict=True):
            check_same_batch(batch, expected)
        for batch, expected in zip(there.in_order(), here.in_order(), strict=True):
            check_same_batch(batch, expected)
    for batch, expected in zip(here.in_order(there.device), here.in_order(), strict=True):
        check_same_batch(batch, expected)
    check_same_batch(there.any_batch(), here.any_batch())
    nodes = torch.tensor([4, 0, 9])
    assert torch.equal(plain(there.batch_for(nodes).n_id), plain(here.batch_for(nodes).n_id))


@pytest.mark.gpu
def test_a_gpu_assembles_batches_of_very_many_pieces() -> None:
    data = undirected_graph(400, 900)
    options: dict[str, Any] = {"partition": "random", "batch_size": 150, "shuffle": True}
    there, here = HaloLoader(data, 300, device="cuda", **options), HaloLoader(data, 300, **options)
    for _ in range(2):
        for batch, expected in zip(there, here, strict=True):
            assert not batch.edge_index.info.own.is_in_few_pieces
            check_same_batch(batch, expected)


@pytest.mark.gpu
def test_a_gpu_takes_attributes_wherever_they_are(tmp_path: Path) -> None:
    plain_data = tiny()
    plain_data.series = torch.arange(12).view(2, 6)  # stays as it is: no row of anything

    class Wide(Data):  # type: ignore[misc]
        def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return 1 if key == "series" else super().__cat_dim__(key, value, *args, **kwargs)

    path = tmp_path / "x"
    plain_data.x.numpy().tofile(path)
    mapped, moved, wide = plain_data.clone(), plain_data.clone(), Wide.from_dict(plain_data.to_dict())
    mapped.x = torch.from_file(str(path), size=plain_data.x.numel()).view_as(plain_data.x)
    moved.x, moved.edge_attr, moved.pos = moved.x.cuda(), moved.edge_attr.cuda(), moved.pos.t().contiguous().t()
    for data, like in ((mapped, plain_data), (moved, plain_data), (wide, wide)):
        there, here = HaloLoader(data, partition=TINY_PARTS, device="cuda"), HaloLoader(like, partition=TINY_PARTS)
        for _ in range(2):
            for batch, expected in zip(there, here, strict=True):
                check_same_batch(batch, expected)


@pytest.mark.gpu
def test_a_gpu_follows_changes_and_writes_to_batches_stay_theirs() -> None:
    data = undirected_graph()
    there = HaloLoader(data, 4, partition="random", device="cuda")
    for _ in range(3):
        for batch in there:
            batch.x.mul_(0)
            plain(batch.edge_index).mul_(0)
            plain(batch.n_id).mul_(0)
        data.x = data.x + 1
        data.edge_index = data.edge_index.roll(3, dims=1)
        for batch, expected in zip(there, HaloLoader(data.clone(), 4, partition="random"), strict=True):
            check_same_batch(batch, expected)


@pytest.mark.gpu
def test_a_gpu_serves_two_iterations_at_once() -> None:
    loader = HaloLoader(undirected_graph(), 5, partition="random", device="cuda")
    expected = list(HaloLoader(undirected_graph(), 5, partition="random"))
    for number, batch in enumerate(loader):
        check_same_batch(batch, expected[number])
        for other, wanted in zip(loader.in_order(), expected, strict=True):
            check_same_batch(other, wanted)


@pytest.mark.gpu
def test_a_gpu_can_leave_out_attributes() -> None:
    loader = HaloLoader(undirected_graph(), 5, partition="random")
    for bare, batch in zip(loader.in_order(torch.device("cuda", 0), only=["x", "edge_attr"]), loader, strict=True):
        assert bare.edge_index.shape == (2, 0)
        assert "y" not in bare
        assert bare.edge_attr.shape == (0, *batch.edge_attr.shape[1:])
        assert torch.equal(bare.x.cpu(), batch.x)
        assert bare.edge_index.info.num_edges == batch.edge_index.size(1)


def test_devices_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (
        ("cuda", r"in host memory or on a GPU, but got 'cuda'"),
        ("meta", r"in host memory or on a GPU, but got 'meta'"),
        ("gpu", r"device must be one of PyTorch's, but got 'gpu'"),
    ):
        with pytest.raises(InputError, match=message):
            HaloLoader(tiny(), 2, device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match="workers build batches in host memory, but got num_workers=2"):
        HaloLoader(tiny(), 2, device="cuda:0", num_workers=2)
