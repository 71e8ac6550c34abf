"""Batches packed into one buffer train as the batches they were made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, odd_graph, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward.record import BatchEdges
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training.feed import Feed, _Package, plain_item
from gnnautoscale.transfer import BatchRows

CPU = torch.device("cpu")
TASK = NodeClassification(4)


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
    "gin": lambda: pyg.GIN(CHANNELS, 8, num_layers=3, out_channels=4),
    "gat": lambda: pyg.GAT(CHANNELS, 8, num_layers=2, out_channels=4),
    "sage max": lambda: pyg.GraphSAGE(CHANNELS, 8, num_layers=2, out_channels=4, aggr="max"),
    "batch": TakesTheBatch,
    "n_id": ByNode,
}


def grads(model: nn.Module, out: Tensor) -> list[Tensor]:
    model.zero_grad()
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    return [value.grad for value in model.parameters() if value.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_trains_as_it_did(name: str) -> None:
    data = undirected_graph()
    model = gas.autoscale(MODELS[name](), data)
    loader = gas.HaloLoader(data, num_parts=3)
    for batch in loader:
        model(batch)  # what happens with edges is known afterwards, and histories are not empty
    feed = Feed(model, TASK, fixed=True)
    for ready in loader.ready_batches():
        batch = ready.tagged_copy()
        out = model(batch)
        expected = out.detach(), grads(model, out)
        rows = attached(model).memory.rows_of(ready.info)
        package = _Package.of(batch, rows, feed._tensors(batch, ready.info), CPU)
        elsewhere = package.buffer.clone()
        package.buffer.fill_(255)  # nothing may be left in the first place
        item = feed._item(package, package.views(elsewhere))
        for event in feed._events:
            ready.info.forget(event)
        assert rows.on(CPU).data_ptr() != rows.index.data_ptr()
        got = model(item.batch)
        assert_same(got.detach(), expected[0], 1e-6)
        for one, other in zip(grads(model, got), expected[1], strict=True):
            assert_same(one, other, 1e-6)
        assert torch.equal(item.targets, batch.y[: batch.batch_size][batch.train_mask[: batch.batch_size]])
        package.displace()
        assert rows.on(CPU) is rows.index
        assert all(ready.info.placed(event) is None for event in feed._events)


def test_a_packed_batch_has_the_class_and_the_plain_attributes_of_its_graph() -> None:
    class Named(Data):  # type: ignore[misc]
        @property
        def shout(self) -> str:
            return str(self.name).upper()

    data = Named(**undirected_graph().to_dict(), name="ring", scale=0.5)
    model = gas.autoscale(MODELS["gcn"](), data)
    batch = next(iter(gas.HaloLoader(data, num_parts=3)))
    model(batch)
    info, feed = batch.edge_index.info, Feed(model, TASK)
    package = _Package.of(batch, attached(model).memory.rows_of(info), feed._tensors(batch, info), CPU)
    packed = feed._item(package, package.views(package.buffer)).batch
    assert (type(packed), packed.shout, packed.scale) == (Named, "RING", 0.5)
    assert (packed.num_nodes, packed.batch_size) == (batch.num_nodes, batch.batch_size)
    assert "y" not in packed


def test_only_what_is_needed_is_packed() -> None:
    data = undirected_graph()
    model = gas.autoscale(pyg.GCN(CHANNELS, 8, num_layers=2, out_channels=4), data)
    loader = gas.HaloLoader(data, num_parts=3)
    ready = next(loader.ready_batches())
    model(ready.tagged_copy().x, ready.tagged_copy().edge_index)
    names = Feed(model, TASK)._tensors(ready.tagged_copy(), ready.info)
    kinds = {name if isinstance(name, str) else name[1] for name in names}
    # The edges as they are, and masks, stay where they are; fused edges with their transpose come along.
    assert kinds >= {"n_id", "places", "targets", "rows", "x", "fused"}
    assert "constant" not in kinds
    assert names["batch", "edge_index"].numel() == 0
    assert not any("mask" in str(name) for name in names)


def test_edges_stay_as_they_are_for_edge_dropout() -> None:
    data = undirected_graph()
    model = gas.autoscale(pyg.GCN(CHANNELS, 8, num_layers=2, out_channels=4), data, edge_dropout=0.5)
    loader = gas.HaloLoader(data, num_parts=3)
    ready = next(loader.ready_batches())
    batch = ready.tagged_copy()
    model(batch.x, batch.edge_index)
    names = Feed(model, TASK)._tensors(batch, ready.info)
    assert any(not isinstance(name, str) and name[1] == "edge_index" for name in names)
    assert not any(not isinstance(name, str) and name[1] == "fused" for name in names)


def test_tensors_start_at_round_addresses() -> None:
    batch = next(iter(gas.HaloLoader(odd_graph(), num_parts=2)))
    info = batch.edge_index.info
    rows = BatchRows(info.n_id, info.batch_size)
    tensors = {"a": torch.arange(3), "b": torch.empty(0, 4), "c": torch.rand(5, 7), "d": torch.tensor([True, False])}
    package = _Package.of(batch, rows, tensors, CPU)
    assert all(start % 256 == 0 for _, _, start in package.layout.values())
    for name, view in package.views(package.buffer).items():
        assert torch.equal(view, tensors[name])
        assert view.dtype == tensors[name].dtype


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_rows_to_train_on(share: float) -> None:
    data = undirected_graph()
    data.train_mask = torch.arange(40) < 40 * share
    batch = next(iter(gas.HaloLoader(data, num_parts=1)))
    item = plain_item(batch, TASK, CPU)
    mask = batch.train_mask[: batch.batch_size]
    assert torch.equal(item.targets, batch.y[mask])
    assert (item.rows is None) == (share == 1.0)
    if item.rows is not None:
        assert torch.equal(item.rows, mask.nonzero().squeeze(1))


def test_on_a_cpu_batches_are_passed_through() -> None:
    data = undirected_graph()
    model = gas.autoscale(MODELS["gcn"](), data)
    loader = gas.HaloLoader(data, num_parts=4)
    items = list(Feed(model, TASK).items(loader.ready_batches()))
    assert [item.info for item in items] == [ready.info for ready in loader.ready_batches()]
    assert all(item.version is None for item in items)


def test_a_slice_without_edges_says_so() -> None:
    with pytest.raises(RuntimeError, match="layers that fuse only"):
        _ = BatchEdges(None, {}).edges


def test_attributes_a_model_looks_at() -> None:
    data = undirected_graph()
    batch = next(iter(gas.HaloLoader(data, num_parts=2)))
    found: dict[str, Any] = {
        name: set(attached(gas.autoscale(make(), data)).attributes(batch)) for name, make in MODELS.items()
    }
    assert found["gin"] == {"x", "edge_index"} | ({"edge_weight", "edge_attr"} & found["gin"])
    assert found["n_id"] == {"n_id", "edge_index"}
    assert found["batch"] >= {"x", "edge_index", "edge_weight", "y"}
