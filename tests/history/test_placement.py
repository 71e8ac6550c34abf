"""Which medium is chosen for how much memory, and how much there is."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale._util.memory as memory_module
import gnnautoscale.history.placement as choice_module
from conftest import CHANNELS, history_rows, undirected_graph
from gnnautoscale._util.memory import available_memory
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.history import choose_medium
from gnnautoscale.history.device import DeviceHistory
from gnnautoscale.history.disk import DiskHistory
from gnnautoscale.models import GCN
from gnnautoscale.transfer.direct import DirectTransfer
from gnnautoscale.transfer.thread import ThreadTransfer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GB = 10**9


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets how much memory host and GPU have free."""

    def set_free(host: int, gpu: int = 0) -> None:
        monkeypatch.setattr(choice_module, "available_memory", lambda: host)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu, 99 * GB))

    return set_free


# The choice ##########################################################################################################


@pytest.mark.parametrize(
    ("device", "host", "gpu", "num_bytes", "medium", "why"),
    [
        (CPU, 8, 0, 4 * GB, "device", "histories take 4 GB, and 8 GB of host memory are free"),
        (CPU, 8, 99, 4 * GB + 1, "disk", "histories take 4 GB, more than half of the free 8 GB of host memory"),
        (CPU, 8, 0, 1_500_000, "device", "histories take 1.5 MB, and 8 GB of host memory are free"),
        (CPU, 0, 0, 0, "device", "histories take 0 MB, and 0 MB of host memory are free"),
        (GPU, 0, 8, 4 * GB, "device", "histories take 4 GB, and 8 GB of the GPU's memory are free"),
        (
            GPU, 20, 8, 5 * GB, "host",
            "histories take 5 GB, more than half of the GPU's free 8 GB, and 20 GB of host memory are free",
        ),
        (
            GPU, 9, 8, 5 * GB, "disk",
            "histories take 5 GB, more than half of the GPU's free 8 GB and more than half of the free 9 GB of host "
            "memory",
        ),
    ],
)  # fmt: skip
def test_the_fastest_medium_with_room_is_chosen(
    memory_of: Callable[[int, int], None],
    device: torch.device,
    host: int,
    gpu: int,
    num_bytes: int,
    medium: str,
    why: str,
) -> None:
    memory_of(host * GB, gpu * GB)
    assert choose_medium(num_bytes, device, disk=True) == (medium, why)
    if medium != "disk":
        assert choose_medium(num_bytes, device, disk=False) == (medium, why)
        return
    reasons = why.partition(", ")[2]
    with pytest.raises(InputError, match=rf"no folder for them on disk, but got \d GB, {reasons}\. Pass history_dir"):
        choose_medium(num_bytes, device, disk=False)


# How much there is ###################################################################################################


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the system's, with nothing in it yet; the system itself has 100 GB free."""
    monkeypatch.setattr(memory_module, "_meminfo", {"MemAvailable": 100 * GB}.__getitem__)
    groups = tuple((tmp_path / group[0].relative_to("/"), *group[1:]) for group in memory_module._GROUPS)
    monkeypatch.setattr(memory_module, "_GROUPS", groups)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def fill(folder: Path, **contents: Any) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_without_limits_it_is_what_the_system_says(system: Path) -> None:
    assert available_memory() == 100 * GB


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "expected"),
    [
        ("max", 5 * GB, "anon 1", 100 * GB),
        (8 * GB, 5 * GB, "anon 1", 3 * GB),
        # What is cached of files makes way.
        (8 * GB, 5 * GB, f"anon 1\ninactive_file {2 * GB}\nactive_file {GB}", 5 * GB),
        (8 * GB, 9 * GB, "anon 1", 0),
        (8 * GB, 7 * GB, f"inactive_file {9 * GB}", 8 * GB),
        (800 * GB, 5 * GB, "", 100 * GB),
        ("odd", 5 * GB, "", 100 * GB),
    ],
)
def test_limits_of_a_control_group_count(system: Path, limit: Any, used: int, statistics: str, expected: int) -> None:
    fill(system / "sys/fs/cgroup", max=limit, current=used, stat=statistics)
    assert available_memory() == expected


def test_limits_of_an_older_control_group_count(system: Path) -> None:
    statistics = f"cache 7\ninactive_file 5\ntotal_inactive_file {GB}"
    fill(system / "sys/fs/cgroup/memory", limit_in_bytes=8 * GB, usage_in_bytes=6 * GB, stat=statistics)
    assert available_memory() == 3 * GB


def test_a_limit_without_statistics_counts(system: Path) -> None:
    fill(system / "sys/fs/cgroup", max=8 * GB, current=2 * GB)
    assert available_memory() == 6 * GB


@pytest.mark.parametrize(("limit", "expected"), [(9 * GB, 6 * GB), (2 * GB, 0), (1000 * GB, 100 * GB)])
def test_limits_of_the_process_count(system: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit) if kind == resource.RLIMIT_DATA else None)
    monkeypatch.setattr(memory_module, "_status", {"VmData": 3 * GB}.__getitem__)
    assert available_memory() == expected


def test_the_smallest_limit_counts(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(system / "sys/fs/cgroup", max=8 * GB, current=2 * GB)
    monkeypatch.setattr(memory_module, "_meminfo", {"MemAvailable": 4 * GB}.__getitem__)
    assert available_memory() == 4 * GB


def test_this_machine_has_memory() -> None:
    assert 2**20 < available_memory() < 2**50
    assert memory_module._status("VmData") > 2**20
    with pytest.raises(RuntimeError, match="no Nonsense"):
        memory_module._status("Nonsense")


# What a model's histories end in #####################################################################################


@pytest.mark.parametrize(
    ("free", "medium", "kind", "why"),
    [
        # Two histories of 40 rows and 6 columns of four bytes.
        (3840, "device", DeviceHistory, "histories take 0.00192 MB, and 0.00384 MB of host memory are free"),
        (3839, "disk", DiskHistory, "histories take 0.00192 MB, more than half of the free 0.00384 MB of host memory"),
    ],
)
def test_where_histories_live_is_decided_with_the_first_batch(
    tmp_path: Path, memory_of: Callable[..., None], free: int, medium: str, kind: type, why: str
) -> None:
    data = undirected_graph()
    models = []
    for storage in ("device", "auto"):
        torch.manual_seed(1)
        model = pyg.GraphSAGE(CHANNELS, 6, num_layers=3, out_channels=4)
        gas.autoscale(model, data, storage=storage, history_dir=tmp_path / storage)
        models.append(model)
    memory = attached(models[1]).memory
    assert (memory.medium, memory.why) == (None, "this was asked for")
    memory_of(free)
    for batch in gas.HaloLoader(data, 4):
        assert torch.equal(*(model(batch) for model in models))
    assert (memory.medium, memory.why) == (medium, why)
    assert [type(history) for history in memory.histories.values()] == [kind, kind]
    assert type(memory.transfer(CPU)) is (ThreadTransfer if medium == "disk" else DirectTransfer)
    # It is decided once, and what is made of it lives there too.
    memory_of(10**6 - free)
    models[1](batch)
    assert memory.medium == memory.apart().medium == medium
    memory.settle()
    first, second = (history_rows(model) for model in models)
    assert all(torch.equal(first[slot], second[slot]) for slot in first)


def test_histories_that_fit_nowhere_are_refused(memory_of: Callable[..., None]) -> None:
    memory_of(1000)
    model = pyg.GraphSAGE(CHANNELS, 6, num_layers=3, out_channels=4)
    gas.autoscale(model, undirected_graph(), storage="auto")
    with pytest.raises(InputError, match=r"0.00192 MB, more than half of the free 0.001 MB.*Pass history_dir"):
        model(next(iter(gas.HaloLoader(undirected_graph(), 4))))


@pytest.mark.parametrize("storage", ["disk", "auto"])
@pytest.mark.parametrize(("evaluation", "needed"), [("histories", 2560), ("exact", 2 * 2560)])
def test_no_room_on_disk_is_said_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_of: Callable[..., None],
    storage: Any,
    evaluation: Any,
    needed: int,
) -> None:
    memory_of(0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    data = undirected_graph()
    data.val_mask = ~data.train_mask
    torch.manual_seed(1)
    model = GCN(CHANNELS, 4, hidden=8, layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fixed: dict[str, Any] = {"num_parts": 4, "epochs": 2, "storage": storage, "history_dir": str(tmp_path)}
    with pytest.raises(InputError, match=rf"histories of {needed / 1e9:.3g} GB must fit on the disk.*of free space"):
        gas.fit(model, data, evaluation=evaluation, **fixed)
    assert not hasattr(model, "_autoscaler")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    # One byte more is enough.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    gas.fit(model, data, evaluation=evaluation, **fixed)
    assert attached(model).memory.medium == "disk"
