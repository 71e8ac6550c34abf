"""Batches of several types, packed into one buffer and captured, train as they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale._util import tensors_in
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.replay.packing import Packer, Placement
from support.typed import MODELS, typed_graph

CPU = torch.device("cpu")
NAMES = ["SAGE sum", "GCN", "GAT", "HGT", "looping", "weighted", "residual"]
pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU packs as well, if nobody asks for the memory of a GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def autoscaled(name: str, data: Any, **options: Any) -> nn.Module:
    """A model that knows what happens with edges, and whose histories are not empty."""
    torch.manual_seed(2)
    model = gas.autoscale(MODELS[name]().double().eval(), data, **options)
    loader = gas.HaloLoader(data, 4)
    for _ in range(6):  # until nothing is stale
        for batch in loader:
            model(batch)
    return model


def grads(model: nn.Module, out: Any) -> list[Tensor]:
    model.zero_grad()
    sum(value.square().sum() for value in tensors_in(out)).backward()  # type: ignore[union-attr]
    return [value.grad for value in model.parameters() if value.grad is not None]


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_batch_trains_as_it_did(name: str) -> None:
    data = typed_graph(4)
    model = autoscaled(name, data)
    check_packed_batches(model, data, "device")
    check_packed_batches(model, data, "host")


def check_packed_batches(model: nn.Module, data: HeteroData, placement: Placement) -> None:
    scaler = attached(model)
    packer = Packer(scaler, CPU, placement)
    for number, ready in enumerate(gas.HaloLoader(data, 4).ready_batches()):
        info: Any = ready.info
        batch, kept = ready.tagged_copy(), list[Any]()
        info.key = number
        out = model(batch)
        want = [value.detach() for value in tensors_in(out)], grads(model, out)
        if placement == "device":
            info.keeper = kept.append
        package = packer.pack(batch, {"targets": batch["paper"].y}, scaler.attributes(batch))
        storages = {value.untyped_storage().data_ptr() for value in package.views.values()}
        assert len(storages) == 1
        for again in (package.batch, *(each.tagged_copy() for each in kept)):
            got = model(again)
            found = [value.detach() for value in tensors_in(got)], grads(model, got)
            for one, other in zip((*found[0], *found[1]), (*want[0], *want[1]), strict=True):
                assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        assert torch.equal(package.extras["targets"], data["paper"].y[info.nodes["paper"].n_id])
        packer.release(package)
        rows = scaler.memory.kinds["paper"].rows_of(info.nodes["paper"])
        assert rows.on(CPU) is rows.index


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("name", ["SAGE sum", "GCN", "weighted"])
def test_a_packed_batch_of_compensated_steps_trains_as_it_did(name: str) -> None:
    data = typed_graph(4)
    torch.manual_seed(2)
    model = gas.autoscale(MODELS[name]().double().eval(), data, compensate="gradient")
    loader = gas.HaloLoader(data, 4, bidirectional=True)
    for _ in range(8):  # until nothing is stale
        for batch in loader:
            grads(model, model(batch))
    packer = Packer(attached(model), CPU, "device")
    for number, ready in enumerate(loader.ready_batches()):
        ready.info.key = number
        batch = ready.tagged_copy()
        want = grads(model, model(batch))
        package = packer.pack(batch, {}, None)
        for one, other in zip(grads(model, model(package.batch)), want, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("_no_gpu")
def test_a_package_has_what_fused_layers_need_and_no_more() -> None:
    data = typed_graph(4)
    model = autoscaled("SAGE sum", data)
    ready = next(iter(gas.HaloLoader(data, 4).ready_batches()))
    views = Packer(attached(model), CPU, "device").pack(ready.tagged_copy(), {}, None).views
    relations = data.edge_types
    assert sum("fused" in name for name in views) == 4 * len(relations)  # two layers share the edges, both ways
    assert not any("edge_index" in name for name in views if name[0] != "batch")


# On a GPU ############################################################################################################


def trained(name: str, *, capture: bool, storage: Any, batches_on: Any) -> tuple[list[float], list[Tensor], str]:
    torch.manual_seed(0)
    data = typed_graph(5).apply(lambda x: x.float() if x.is_floating_point() else x)
    model = MODELS[name]()
    loader = gas.HaloLoader(data, 4, device="cuda")
    gas.autoscale(model.cuda(), data, storage=storage)
    model(next(iter(loader)))  # lazy weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        out = tensors_in(model(batch))[-1]
        loss = F.cross_entropy(out, batch["paper"].y[: batch["paper"].batch_size])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run = gas.capture(model, step, optimizer, batches_on=batches_on) if capture else None
    losses = [float((run or step)(batch)) for _ in range(6) for batch in loader]
    histories = attached(model).memory.histories
    attached(model).memory.settle()
    return losses, [history.raw.cpu() for history in histories.values()], "" if run is None else run.how


@pytest.mark.gpu
@pytest.mark.parametrize("batches_on", ["device", "host"])
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", ["SAGE sum", "GCN", "GAT", "looping"])
def test_captured_steps_give_the_numbers_of_plain_ones(name: str, storage: str, batches_on: str) -> None:
    losses, rows, how = trained(name, capture=True, storage=storage, batches_on=batches_on)
    want, want_rows, _ = trained(name, capture=False, storage=storage, batches_on=batches_on)
    assert how.startswith("captured as 4 CUDA graphs")
    assert losses == pytest.approx(want, rel=1e-5)
    for one, other in zip(rows, want_rows, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert sum(losses[-4:]) < sum(losses[:4])
