"""The paper's interface: Listing 2 with only the import changed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.nn import GCNConv  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, history_rows, odd_graph, undirected_graph
from gnnautoscale import ScalableGNN
from gnnautoscale.errors import InputError, UnsupportedModelError

C = CHANNELS


# fmt: off
class GNN(ScalableGNN):
    def __init__(self, num_nodes, in_channels, hidden_channels, out_channels, num_layers):  # type: ignore[no-untyped-def]
        super(GNN, self).__init__(num_nodes, hidden_channels, num_layers)  # noqa: UP008

        self.convs = ModuleList()
        self.convs.append(GCNConv(in_channels, hidden_channels))
        for _ in range(num_layers - 2):
            self.convs.append(GCNConv(hidden_channels, hidden_channels))
        self.convs.append(GCNConv(hidden_channels, out_channels))

    def forward(self, x, adj_t, n_id):  # type: ignore[no-untyped-def]
        for conv, history in zip(self.convs[:-1], self.histories):  # noqa: B905
            x = conv(x, adj_t).relu()
            x = self.push_and_pull(history, x, n_id)
        return self.convs[-1](x, adj_t)
# fmt: on


class Listing1(Module):
    """The full-batch model of Listing 1."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> None:
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = ModuleList(GCNConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        for conv in list(self.convs)[:-1]:
            x = conv(x, adj_t).relu()
        out: Tensor = self.convs[-1](x, adj_t)
        return out


def pair(num_nodes: int, num_layers: int = 4) -> tuple[GNN, Listing1]:
    model = GNN(num_nodes, C, 6, 3, num_layers)  # type: ignore[no-untyped-call]
    plain = Listing1(C, 6, 3, num_layers)
    plain.load_state_dict(model.state_dict())
    return model, plain


@pytest.mark.parametrize(("num_layers", "num_parts"), [(2, 1), (4, 6)])
def test_listing_2_is_exact(num_layers: int, num_parts: int) -> None:
    data = odd_graph()
    model, plain = pair(data.num_nodes, num_layers)
    expected = plain(data.x, data.edge_index).detach()
    loader = gas.HaloLoader(data, num_parts, partition="random")
    assert_same(gas.infer(model, loader), expected)
    called = gas.infer(model, loader, call=lambda model, batch: model(batch.x, batch.edge_index, batch.n_id))
    assert_same(called, expected)
    gas.refresh(model, loader)
    assert_same(gas.predict(model, loader, torch.tensor([7, 0])), expected[[7, 0]])


def test_listing_2_is_exact_after_as_many_sweeps_as_layers() -> None:
    data = undirected_graph()
    model, plain = pair(40)
    expected = plain(data.x, data.edge_index).detach()
    loader = gas.HaloLoader(data, 8, partition="random")
    errors = []
    with torch.no_grad():
        for _ in range(4):
            for batch in loader:
                out = model(batch.x, batch.edge_index, batch.n_id)
                assert torch.equal(model(batch), out)
                errors.append(float((out - expected[batch.n_id[: batch.batch_size]]).abs().max()))
    assert max(errors[:8]) > 1e-3
    assert max(errors[-8:]) < 1e-5


def test_listing_2_trains() -> None:
    """On one part it is the full-batch model; in several it still learns."""
    data = undirected_graph()
    model, plain = pair(40)
    batch = next(iter(gas.HaloLoader(data, 1)))
    model(batch.x, batch.edge_index, batch.n_id).square().sum().backward()
    plain(data.x, data.edge_index).square().sum().backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        assert_same(got.grad, expected.grad)
    loader = gas.HaloLoader(data, 5, batch_size=2, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    labels = data.y % 3
    for _ in range(30):
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), labels[batch.n_id[: batch.batch_size]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_history_holds_what_was_pushed() -> None:
    data = undirected_graph()
    model, plain = pair(40, 3)
    loader = gas.HaloLoader(data, 4)
    gas.refresh(model, loader)
    first = plain.convs[0](data.x, data.edge_index).relu()
    second = plain.convs[1](first, data.edge_index).relu()
    kept = history_rows(model)
    assert list(kept) == ["histories.0", "histories.1"]
    assert_same(kept["histories.0"], first.detach())
    assert_same(kept["histories.1"], second.detach())


class Forgetful(GNN):
    def forward(self, x: Tensor, adj_t: Tensor, n_id: Tensor) -> Any:
        x = self.push_and_pull(self.histories[0], self.convs[0](x, adj_t).relu(), n_id)
        x = self.convs[1](x, adj_t).relu()
        return self.convs[2](x, adj_t)


class Repeated(GNN):
    def forward(self, x: Tensor, adj_t: Tensor, n_id: Tensor) -> Any:
        x = self.push_and_pull(self.histories[0], self.convs[0](x, adj_t).relu(), n_id)
        x = self.push_and_pull(self.histories[0], self.convs[1](x, adj_t).relu(), n_id)
        return self.convs[2](x, adj_t)


@pytest.mark.parametrize("make", [Forgetful, Repeated])
def test_missing_or_shared_history_is_refused(make: type[GNN]) -> None:
    model = make(40, C, 6, 3, 3)
    batch = next(iter(gas.HaloLoader(undirected_graph(), 4)))
    with pytest.raises(UnsupportedModelError, match=r"push_and_pull.*from 'convs\.[12]' on"):
        model(batch)


class Wide(ScalableGNN):
    def __init__(self, width: int, rows: int | None = None) -> None:
        super().__init__(40, 6, 2)
        self.first, self.second, self.rows = pyg.SAGEConv(C, width), pyg.SAGEConv(width, 3), rows

    def forward(self, x: Tensor, adj_t: Tensor, n_id: Tensor) -> Any:
        x = self.first(x, adj_t)
        return self.second(self.push_and_pull(self.histories[0], x, n_id[: self.rows]), adj_t)


@pytest.mark.parametrize(("width", "rows"), [(5, None), (6, 3)])
def test_wrong_width_and_wrong_rows_are_refused(width: int, rows: int | None) -> None:
    with pytest.raises(InputError, match=r"this history takes rows of width 6.*set hidden_channels"):
        Wide(width, rows)(next(iter(gas.HaloLoader(undirected_graph(), 4))))


class Deep(ScalableGNN):
    """A layer that propagates several times inside one of the paper's models."""

    def __init__(self) -> None:
        super().__init__(40, 6, 2, storage="host", dtype=torch.float64)
        self.first, self.second = pyg.SGConv(C, 6, K=2), pyg.APPNP(3, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Any:
        x = self.push_and_pull(self.histories[0], self.first(x, edge_index).tanh(), n_id)
        return self.second(x, edge_index)


def test_layers_that_propagate_several_times() -> None:
    data = undirected_graph()
    model = Deep()
    out = gas.infer(model, gas.HaloLoader(data, 5, partition="random"))
    gas.detach(model)
    assert_same(out, model(data.x, data.edge_index, None))


def test_detached_model_is_plain() -> None:
    data = undirected_graph()
    model, plain = pair(40)
    loader = gas.HaloLoader(data, 4)
    gas.infer(model, loader)
    assert gas.detach(model) is model
    assert_same(model(data.x, data.edge_index, None), plain(data.x, data.edge_index))
    assert "forward" not in vars(model)
    with pytest.raises(InputError, match="must be autoscaled"):
        gas.detach(model)


def test_another_size_is_refused() -> None:
    model, _ = pair(39)
    with pytest.raises(InputError, match="which has 39 nodes, but got a batch of another graph, with 40 nodes"):
        model(next(iter(gas.HaloLoader(undirected_graph(), 4))))


def test_bad_sizes_are_refused() -> None:
    for position, value in [(0, 0), (0, 3.5), (1, -1), (2, 0), (2, True), (0, "many")]:
        sizes: list[Any] = [40, 6, 3]
        sizes[position] = value
        name = ("num_nodes", "hidden_channels", "num_layers")[position]
        with pytest.raises(InputError, match=f"{name} must be an integer of at least 1"):
            ScalableGNN(*sizes)


def test_already_attached() -> None:
    model, _ = pair(40)
    with pytest.raises(InputError, match="autoscaled only once"):
        gas.autoscale(model, undirected_graph())
    assert [history.width for history in model.histories] == [6, 6, 6]


def test_state_is_that_of_the_layers() -> None:
    model, plain = pair(40)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_unknown_storage_is_refused_at_once() -> None:
    storage: Any = "tape"

    class Taped(ScalableGNN):
        def __init__(self) -> None:
            super().__init__(40, 6, 2, storage=storage)
            self.conv = GCNConv(C, 6)

    with pytest.raises(InputError, match="storage must be one of"):
        Taped()
