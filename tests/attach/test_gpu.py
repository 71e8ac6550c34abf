"""What must hold on a GPU as it does on the CPU; skipped without one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import to_undirected  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.forward import StageExchange, StepExchange, SweepExchange
from gnnautoscale.graph.assemble import BatchBuilder
from gnnautoscale.history import Storage
from gnnautoscale.models import MODELS, build_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = to_undirected(torch.randint(0, 300, (2, 1500), generator=generator), num_nodes=300)
    x = torch.randn(300, 16, generator=generator)
    y = torch.randint(0, 5, (300,), generator=generator)
    mask = torch.rand(300, generator=generator) < 0.5
    return Data(x=x, edge_index=edge_index, y=y, train_mask=mask, val_mask=~mask, test_mask=~mask)


@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_inference_on_the_gpu_is_exact(name: str, storage: Storage, data: Data) -> None:
    torch.manual_seed(1)
    more: dict[str, torch.Tensor] = {}
    if name == "rgcn":
        data.edge_type = torch.arange(data.num_edges) % 3
        more = {"edge_type": data.edge_type, "n_id": torch.arange(data.num_nodes)}
    model = build_model(name, data, 5).cuda().eval()
    with torch.no_grad():
        expected = model(
            data.x.cuda(), data.edge_index.cuda(), **{key: each.cuda() for key, each in more.items()}
        ).cpu()
    gas.autoscale(model, data, storage=storage)
    out = gas.infer(model, gas.HaloLoader(data, num_parts=7, batch_size=2))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", ["device", "host"])
def test_a_step_on_the_gpu_equals_one_on_the_cpu(storage: Storage, data: Data) -> None:
    torch.manual_seed(1)
    cpu = build_model("gin", data, 5, dropout=0.0)
    gpu = copy.deepcopy(cpu).cuda()
    gas.autoscale(cpu, data)
    gas.autoscale(gpu, data, storage=storage)
    loader = gas.HaloLoader(data, num_parts=5)
    for batch in [*loader, *loader]:
        losses = []
        for model in (cpu, gpu):
            device = next(model.parameters()).device
            moved = copy.copy(batch).to(str(device))
            model.zero_grad()
            out = model(moved.x, moved.edge_index)
            loss = nn.functional.cross_entropy(out, moved.y[: moved.batch_size])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().cpu())
        torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-4)
        for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            torch.testing.assert_close(a.grad, b.grad.cpu(), atol=1e-3, rtol=1e-3)


@pytest.fixture
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is far behind the host, so that nothing is there unless somebody waits for it."""

    def after_a_while(cls: type, name: str) -> None:
        run = getattr(cls, name)

        def late(*args: object, **kwargs: object) -> object:
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
            return run(*args, **kwargs)

        monkeypatch.setattr(cls, name, late)

    for name in ("start", "start_again"):
        after_a_while(BatchBuilder, name)
    for policy in (StepExchange, SweepExchange, StageExchange):
        after_a_while(policy, "begin")


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("storage", ["device", "host", "disk"])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_rows_in_the_order_of_another_loader_arrive_in_time(
    device: str | None, storage: Storage, data: Data, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = pyg.GCN(16, 8, num_layers=4, out_channels=5).cuda().eval()
    with torch.no_grad():
        expected = model(data.x.cuda(), data.edge_index.cuda()).cpu()
    gas.autoscale(model, data, storage=storage, history_dir=str(tmp_path) if storage == "disk" else None)
    for seed in range(2):
        loader = gas.HaloLoader(data, 6, partition="random", batch_size=2, device=device, seed=seed)
        for _ in range(2):  # the second time halos are known
            torch.testing.assert_close(gas.infer(model, loader), expected, atol=1e-5, rtol=1e-5)
        out = gas.exact_forward(model, loader)
        torch.testing.assert_close(out.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("capture", [True, False])
def test_steps_on_a_late_gpu_find_their_rows_in_any_medium(capture: bool, data: Data, tmp_path: Path) -> None:
    found = []
    for storage in ("device", "host", "disk"):
        folder = str(tmp_path) if storage == "disk" else None
        torch.manual_seed(1)
        model = pyg.GraphSAGE(16, 8, num_layers=3, out_channels=5)
        options: dict[str, Any] = {"storage": storage, "history_dir": folder, "device": "cuda", "capture": capture}
        options |= {"partition": "random", "refresh_every": 2, "progress": False}
        result = gas.fit(model, data, num_parts=6, batch_size=2, epochs=6, **options)
        found.append([epoch.loss for epoch in result.epochs])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_histories_in_host_memory_are_pinned(data: Data) -> None:
    model = gas.autoscale(pyg.GCN(16, 8, num_layers=2, out_channels=5).cuda(), data, storage="host")
    gas.refresh(model, gas.HaloLoader(data, num_parts=3))
    (history,) = model._autoscaler.memory.histories.values()
    assert history.raw.is_pinned()


def test_batches_can_be_moved_piece_by_piece(data: Data) -> None:
    model = gas.autoscale(pyg.GraphConv(16, 5).cuda(), data)
    batch = next(iter(gas.HaloLoader(data, num_parts=3)))
    assert model(batch.x.cuda(), batch.edge_index.cuda()).shape == (batch.batch_size, 5)


def test_autocast_trains(data: Data) -> None:
    model = gas.autoscale(pyg.GCN(16, 8, num_layers=3, out_channels=5).cuda(), data, dtype=torch.bfloat16)
    for batch in gas.HaloLoader(data, num_parts=4):
        batch = batch.to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(batch.x, batch.edge_index)
            loss = nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.isfinite(loss)


def test_fit_runs_on_the_gpu(data: Data) -> None:
    torch.manual_seed(0)
    result = gas.fit(
        build_model("gcn", data, 5), data, num_parts=4, epochs=3, device="cuda", storage="host", lipschitz=0.1
    )
    assert result.peak_memory is not None
    assert len(result.epochs) == 3


def test_memory_does_not_grow_with_the_graph() -> None:
    """A ring in which every node sees its eight neighbours to the right: all batches look the same."""

    def peak(num_nodes: int) -> int:
        source = torch.arange(num_nodes).repeat(8)
        target = (source + torch.arange(1, 9).repeat_interleave(num_nodes)) % num_nodes
        graph = Data(x=torch.ones(num_nodes, 32), edge_index=torch.stack([source, target]), num_nodes=num_nodes)
        loader = gas.HaloLoader(graph, partition=torch.arange(num_nodes) // 1000)
        model = gas.autoscale(pyg.GCN(32, 64, num_layers=3, out_channels=5).cuda(), graph, storage="host")
        model(next(iter(loader)).to("cuda"))  # what the first call does once
        torch.cuda.reset_peak_memory_stats()
        for batch in loader:
            batch = batch.to("cuda")
            model(batch.x, batch.edge_index).sum().backward()
        gas.infer(model, loader)
        return torch.cuda.max_memory_allocated()

    assert peak(200_000) <= 1.02 * peak(20_000)
