"""What training steps take and move."""

from __future__ import annotations

import time

import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.graph.batch import BatchInfo
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.training import flow as meter
from gnnautoscale.training.flow import Flow
from gnnautoscale.transfer.times import DeviceTimes, HostTimes, Times, times_for


def batches(batch_size: int = 1) -> tuple[HaloLoader, list[BatchInfo]]:
    """A path of 6 nodes in 3 parts of 2: the halo of part 1 has two nodes, those of the others have one."""
    nodes = torch.arange(5)
    edges = torch.stack([nodes, nodes + 1])
    data = Data(edge_index=torch.cat([edges, edges.flip(0)], dim=1), x=torch.ones(6, 1), num_nodes=6)
    loader = HaloLoader(data, partition=torch.tensor([0, 0, 1, 1, 2, 2]), batch_size=batch_size)
    return loader, [batch.edge_index.info for batch in loader]


def test_an_epoch_by_hand() -> None:
    loader, (first, second, third) = batches()
    flow = Flow(loader.labels)
    for info in (first, second, third):
        flow.step(info)
    # Part 0 pulls node 2 (never written); part 1 pulls 1 (age 1) and 4 (never); part 2 pulls 3 (age 1).
    assert flow.taken(10) == {
        "pulled_bytes": 40,
        "pushed_bytes": 60,
        "hit_ratio": 0.5,
        "age": {"mean": 1.0, "max": 1},
    }
    flow.step(first)  # pulls part 1 of step 2 in step 4
    flow.step(third)  # pulls part 1 of step 2 in step 5
    assert flow.taken(10) == {
        "pulled_bytes": 20,
        "pushed_bytes": 40,
        "hit_ratio": 1.0,
        "age": {"mean": 2.5, "max": 3},
    }
    assert flow.ages().tolist() == [2, 2, 4, 4, 1, 1]
    assert flow.taken(1) == {}


def test_rows_that_are_at_hand_are_not_moved() -> None:
    loader, (first, second, third) = batches()
    flow = Flow(loader.labels)
    flow.step(first)
    flow.taken(1)
    flow.step(second, skips_shared=True)  # node 1 is, node 4 is not
    assert flow.taken(1)["pulled_bytes"] == 1
    flow.step(first)
    flow.step(third, skips_shared=True)  # node 3 was written two steps before
    assert flow.taken(1)["pulled_bytes"] == 2


def test_a_refresh_makes_all_rows_young() -> None:
    loader, (first, second, _) = batches()
    flow = Flow(loader.labels)
    assert flow.ages().tolist() == [-1] * 6
    flow.step(first)
    flow.refreshed()
    assert flow.ages().tolist() == [1] * 6
    flow.taken(1)
    flow.step(second)
    assert flow.taken(1)["hit_ratio"] == 1.0


def test_the_oldest_parts_are_those_that_wait_longest() -> None:
    loader, (first, second, third) = batches()
    flow = Flow(loader.labels)
    flow.step(second)
    assert flow.oldest(3) == [0, 2, 1]  # never written ones first, by their numbers
    flow.step(first)
    flow.refreshed(third)
    assert flow.oldest(2) == [1, 0]
    assert flow.ages().tolist() == [1, 1, 2, 2, 1, 1]
    flow.refreshed(second)
    assert flow.oldest(3) == [0, 1, 2]  # all of an age
    assert flow.steps == 2  # a refresh is none
    assert flow.taken(1)["pushed_bytes"] == 4


def test_batches_of_several_parts() -> None:
    loader, (both, alone) = batches(batch_size=2)
    flow = Flow(loader.labels)
    flow.step(both)
    flow.step(alone)
    assert flow.ages().tolist() == [2, 2, 2, 2, 1, 1]
    assert flow.taken(1)["age"] == {"mean": 1.0, "max": 1}


def test_nothing_but_rows_that_were_never_written() -> None:
    loader, infos = batches()
    flow = Flow(loader.labels)
    flow.step(infos[0])
    found = flow.taken(1)
    assert found["hit_ratio"] == 0.0
    assert found["age"] is None


def test_many_steps_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, infos = batches()
    found = []
    for most in (1, 4, 1000):
        monkeypatch.setattr(meter, "_MOST_WAITING", most)
        flow = Flow(loader.labels)
        for step in range(11):
            flow.step(infos[step * 5 % 3], skips_shared=step % 2 == 0)
        found.append((flow.ages().tolist(), flow.taken(1)))
    assert found[0] == found[1] == found[2]


def test_it_goes_on_from_a_state() -> None:
    loader, infos = batches()
    whole, first, second = (Flow(loader.labels) for _ in range(3))
    for info in infos:
        whole.step(info)
    first.step(infos[0])
    first.step(infos[1])
    second.load_state_dict(first.state_dict())
    second.step(infos[2])
    assert second.ages().tolist() == whole.ages().tolist()
    assert second.taken(1) == whole.taken(1)
    unknown = Flow(loader.labels)
    unknown.load_state_dict(None)
    unknown.step(infos[0])
    assert unknown.taken(1)["hit_ratio"] == 1.0


def test_a_state_is_not_changed_by_what_follows() -> None:
    loader, infos = batches()
    flow = Flow(loader.labels)
    state = flow.state_dict()
    flow.step(infos[0])
    assert state["written"].tolist() == [-1, -1, -1]
    assert state["sums"] == {}


def test_times_add_up_by_name() -> None:
    times = HostTimes()
    for _ in range(2):
        with times.during("pull"):
            time.sleep(0.01)
    with times.during("push"):
        pass
    taken = times.taken()
    assert 0.02 <= taken["pull"] < 1.0
    assert 0.0 <= taken["push"] < 0.01
    assert times.taken() == {}


def test_without_a_wish_nothing_is_measured() -> None:
    times = Times()
    with times.during("pull"):
        pass
    assert times.taken() == {}
    assert isinstance(times_for(torch.device("cpu")), HostTimes)


@pytest.mark.gpu
def test_times_of_a_gpu() -> None:
    times = times_for(torch.device("cuda"))
    assert isinstance(times, DeviceTimes)
    a = torch.randn(2000, 2000, device="cuda")
    for _ in range(3):
        with times.during("compute"):
            a = a @ a
    torch.cuda.synchronize()
    assert 0.0 < times.taken()["compute"] < 10.0
    assert times.taken() == {}
