"""Batches packed into one buffer train as the batches they were made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.graph import ReadyBatch
from gnnautoscale.replay.packing import Packer, Placement, layout_of, view_in

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU packs as well, if nobody asks for the memory of a GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


class TakesTheBatch(nn.Module):
    """A model that is called with the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GraphConv(CHANNELS, 8), pyg.GATConv(8, 4)

    def forward(self, data: Data) -> Tensor:
        out: Tensor = self.second(self.first(data.x, data.edge_index, data.edge_weight).tanh(), data.edge_index)
        return out


class ByNode(nn.Module):
    """A model with something learned for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(40, CHANNELS), pyg.SAGEConv(CHANNELS, 4)

    def forward(self, n_id: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.table(n_id), edge_index)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCN(CHANNELS, 8, num_layers=3, out_channels=4),
    "gat": lambda: pyg.GAT(CHANNELS, 8, num_layers=2, out_channels=4),
    "sage max": lambda: pyg.GraphSAGE(CHANNELS, 8, num_layers=2, out_channels=4, aggr="max"),
    "batch": TakesTheBatch,
    "n_id": ByNode,
}


def grads(model: nn.Module, out: Tensor) -> list[Tensor]:
    model.zero_grad()
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    return [value.grad for value in model.parameters() if value.grad is not None]


def ready_batches(data: Data, num_parts: int = 3) -> list[ReadyBatch]:
    """Batches as a GPU's: with a key."""
    batches = list(gas.HaloLoader(data, num_parts).ready_batches())
    for number, ready in enumerate(batches):
        ready.info.key = number
    return batches


def autoscaled(name: str, data: Data, **options: Any) -> nn.Module:
    """A model that knows what happens with edges, and whose histories are not empty."""
    model = gas.autoscale(MODELS[name](), data, **options)
    for batch in gas.HaloLoader(data, 3):
        model(batch)
    return model


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_trains_as_it_did(name: str, placement: Placement) -> None:
    data = undirected_graph()
    model = autoscaled(name, data)
    scaler = attached(model)
    packer, batches = Packer(scaler, CPU, placement), ready_batches(data)
    for _ in range(2):
        for ready in batches:
            info, batch = ready.info, ready.tagged_copy()
            out = model(batch)
            expected = out.detach(), grads(model, out)
            package = packer.pack(batch, {"targets": batch.y}, scaler.attributes(batch))
            rows = scaler.memory.rows_of(info)
            assert rows.on(CPU).data_ptr() != rows.index.data_ptr()
            got = model(package.batch)
            assert_same(got.detach(), expected[0], 1e-6)
            for one, other in zip(grads(model, got), expected[1], strict=True):
                assert_same(one, other, 1e-6)
            assert torch.equal(package.extras["targets"], data.y[info.n_id])
            packer.clear()
            assert rows.on(CPU) is rows.index
            assert all(info.placed(record) is None for records in scaler.memory.records.values() for record in records)


@pytest.mark.parametrize("name", ["gcn", "gat", "sage max"])
def test_a_packed_batch_of_compensated_steps_trains_as_it_did(name: str) -> None:
    data = undirected_graph(dtype=torch.float64)
    model = gas.autoscale(MODELS[name]().double(), data, compensate="gradient")
    scaler, batches = attached(model), ready_batches(data)
    for _ in range(8):  # until nothing is stale
        for ready in batches:
            grads(model, model(ready.tagged_copy()))
    packer = Packer(scaler, CPU, "device")
    for ready in batches:
        batch = ready.tagged_copy()
        expected = grads(model, model(batch))
        package = packer.pack(batch, {}, None)
        placed = [ready.info.placed(record.closed) for records in scaler.memory.records.values() for record in records]
        assert all(edges is not None for edges in placed)
        for one, other in zip(grads(model, model(package.batch)), expected, strict=True):
            assert_same(one, other, 1e-12)


def test_packages_stay_or_take_turns() -> None:
    data = undirected_graph()
    model = autoscaled("gcn", data)
    scaler, batches = attached(model), [ready.tagged_copy() for ready in ready_batches(data)]
    placements: list[tuple[Placement, bool]] = [("device", True), ("auto", True), ("host", False)]
    for placement, stay in placements:
        packer = Packer(scaler, CPU, placement)
        packages = [packer.pack(batch, {}, None) for batch in batches]
        assert packer.resident is stay
        again = [packer.pack(batch, {}, None) for batch in batches]
        assert len({package.batch.x.untyped_storage().data_ptr() for package in again}) == (3 if stay else 1)
        for package in again if stay else again[-1:]:  # each is written over the one before it
            assert torch.equal(package.batch.x, data.x[package.info.n_id])
        if stay:
            assert all(one is other for one, other in zip(packages, again, strict=True))
            packer.clear()
            assert packer.pack(batches[0], {}, None) is not packages[0]


def test_a_batch_that_others_are_written_over_is_let_go() -> None:
    """What is left of it is its place, to which it is written when it comes back."""
    data = undirected_graph()
    packer = Packer(attached(autoscaled("gcn", data)), CPU, "host")
    batches = [ready.tagged_copy() for ready in ready_batches(data)]
    for _ in range(2):  # the first time there may be too little room
        places = [packer.release(packer.pack(batch, {}, None)) for batch in batches]
    infos = [weakref.ref(batch.edge_index.info) for batch in batches]
    again = ready_batches(data)[0]
    again.info.key = batches[0].edge_index.info.key
    del batches
    assert [info() for info in infos] == [None] * len(infos)
    assert packer.fill(again.tagged_copy(), {}, None) is places[0]
    assert torch.equal(places[0].views["batch", "x"], data.x[again.info.n_id])


def test_packages_that_need_more_room_move_all() -> None:
    data = undirected_graph()
    small, large = (next(iter(ready_batches(data, parts))).tagged_copy() for parts in (5, 2))
    large.edge_index.info.key = "large"
    packer = Packer(attached(autoscaled("gcn", data)), CPU, "host")
    packer.pack(small, {}, None)
    assert packer.version == 1
    packer.pack(large, {}, None)
    assert packer.version == 2
    assert torch.equal(packer.pack(small, {}, None).batch.x, small.x)
    assert packer.version == 2


def test_batches_stay_only_if_all_of_them_fit() -> None:
    data = undirected_graph()
    batch = ready_batches(data)[0].tagged_copy()
    scaler = attached(autoscaled("gcn", data))
    info = batch.edge_index.info
    for recurring, stays in ((3, True), (1 << 20, False)):
        info.recurring = recurring
        packer = Packer(scaler, CPU, "auto")
        packer.pack(batch, {}, None)
        assert packer.resident is stays


def test_the_loader_keeps_what_stays() -> None:
    """A batch whose package stays need not be assembled again, and forgets what can be found again."""
    data = undirected_graph()
    model = autoscaled("gcn", data)
    ready = ready_batches(data)[0]
    info, batch, kept = ready.info, ready.tagged_copy(), list[Any]()
    expected = model(batch).detach()
    info.keeper = kept.append
    packer = Packer(attached(model), CPU, "device")
    package = packer.pack(batch, {}, None)
    assert len(kept) == 1
    assert kept[0].info is info
    assert info.rows is package.views["rows"]
    again = kept[0].tagged_copy()
    assert torch.equal(again.n_id, batch.n_id)
    assert_same(model(again).detach(), expected, 1e-6)
    packer.clear()
    assert kept[1:] == [None]


def test_a_packed_batch_has_the_class_and_the_plain_attributes_of_its_graph() -> None:
    class Named(Data):  # type: ignore[misc]
        @property
        def shout(self) -> str:
            return str(self.name).upper()

    data = Named(**undirected_graph().to_dict(), name="ring", scale=0.5)
    batch = ready_batches(data)[0].tagged_copy()
    scaler = attached(autoscaled("gcn", data))
    packed = Packer(scaler, CPU, "device").pack(batch, {}, scaler.attributes(batch)).batch
    assert (type(packed), packed.shout, packed.scale) == (Named, "RING", 0.5)
    assert (packed.num_nodes, packed.batch_size) == (batch.num_nodes, batch.batch_size)
    assert "y" not in packed
    # Nobody uses the edges as they are.
    assert packed.edge_index.shape == (2, 0)
    assert packed.edge_index.info is batch.edge_index.info


def test_only_what_is_needed_is_packed() -> None:
    data = undirected_graph()
    batch = ready_batches(data)[0].tagged_copy()
    for dropout in (0.0, 0.5):
        scaler = attached(autoscaled("gcn", data, edge_dropout=dropout))
        views = Packer(scaler, CPU, "device").pack(batch, {}, scaler.attributes(batch)).views
        kinds = {name if isinstance(name, str) else name[1] for name in views}
        # Dropout draws from plain edges; fused ones come with their transpose.
        assert kinds == {"rows", "n_id", "x", *(("fused",) if not dropout else ("edge_index", "constant"))}
        assert dropout or any(name[-1] == "ptr_t" for name in views)


def test_tensors_start_at_round_addresses() -> None:
    tensors = {"a": torch.arange(3), "b": torch.empty(0, 4), "c": torch.rand(5, 7), "d": torch.tensor([True, False])}
    layout, size = layout_of(tensors)
    assert all(start % 256 == 0 for _, _, start in layout.values())
    buffer = torch.zeros(size, dtype=torch.uint8)
    for name, place in layout.items():
        view_in(buffer, *place).copy_(tensors[name])
    for name, place in layout.items():
        assert torch.equal(view_in(buffer, *place), tensors[name])


def test_attributes_a_model_looks_at() -> None:
    data = undirected_graph()
    batch = next(iter(gas.HaloLoader(data, num_parts=2)))
    found: dict[str, Any] = {
        name: set(attached(gas.autoscale(make(), data)).attributes(batch)) for name, make in MODELS.items()
    }
    assert found["sage max"] == {"x", "edge_index"} | ({"edge_weight", "edge_attr"} & found["sage max"])
    assert found["n_id"] == {"n_id", "edge_index"}
    assert found["batch"] >= {"x", "edge_index", "edge_weight", "y"}
