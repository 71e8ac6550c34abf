"""Which medium is chosen for how much memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale.history.placement as choice_module
from conftest import CHANNELS, history_rows, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph
from gnnautoscale.history import choose_medium
from gnnautoscale.history.device import DeviceHistory
from gnnautoscale.history.disk import DiskHistory
from gnnautoscale.models import GCN
from gnnautoscale.transfer.direct import DirectTransfer
from gnnautoscale.transfer.thread import ThreadTransfer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GB = 10**9


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets how much memory host and GPU have free."""

    def set_free(host: int | None, gpu: int = 0) -> None:
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
    memory_of: Callable[..., None],
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


@pytest.mark.parametrize(("device", "medium", "reason"), [(CPU, "device", ""), (GPU, "host", ", more than half of .*")])
def test_memory_is_chosen_where_the_system_does_not_say_how_much_is_free(
    memory_of: Callable[..., None], device: torch.device, medium: str, reason: str
) -> None:
    memory_of(None, 8 * GB)
    chosen, why = choose_medium(5 * GB, device, disk=True)
    assert chosen == medium
    assert re.fullmatch(rf"histories take 5 GB{reason}, and this system does not say how much host memory is free", why)


# Where a model's histories live #####################################################################################


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
    assert (memory.medium, memory.why) == (None, "set by storage")
    memory_of(free)
    for batch in gas.HaloLoader(data, 4):
        assert torch.equal(*(model(batch) for model in models))
    assert (memory.medium, memory.why) == (medium, why)
    assert [type(history) for history in memory.histories.values()] == [kind, kind]
    assert type(memory.transfer(CPU)) is (ThreadTransfer if medium == "disk" else DirectTransfer)
    # It is decided once, and what is made of it lives there too.
    memory_of(10**6 - free)
    models[1](batch)
    assert memory.medium == memory.apart(Graph.of(data), CPU).medium == medium
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
