"""The local Lipschitz penalty, against values known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Stack, history_rows, undirected_graph
from gnnautoscale.attach.regularize import ball
from gnnautoscale.errors import InputError

C = CHANNELS


class Scaling(MessagePassing):  # type: ignore[misc]
    """f(x) = c x, whatever the neighbours are; optionally with dropout or noise that does not depend on x."""

    def __init__(self, c: float, *, constant: str = "") -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor(c))
        self.constant = constant

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.c * x + 0.0 * self.propagate(edge_index, x=x)
        if self.constant == "dropout":
            return F.dropout(torch.ones_like(x), 0.5, self.training) + 0.0 * out
        if self.constant == "noise" and self.training:
            return torch.randn_like(x) + 0.0 * out
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def penalty_of(model: nn.Module, radius: float = 0.1, num_parts: int = 3) -> Tensor:
    data = undirected_graph()
    if not hasattr(model, "_autoscaler"):
        gas.autoscale(model, data)
    batch = next(iter(gas.HaloLoader(data, num_parts)))
    with gas.LocalLipschitz(model, radius) as penalty:
        model(batch)
    return penalty.value()


# The noise ###########################################################################################################


@pytest.mark.parametrize(("shape", "radius"), [((4000, 1), 0.1), ((4000, 3), 5.0), ((4000, 2, 4), 0.1)])
def test_rows_are_uniform_in_the_ball(shape: tuple[int, ...], radius: float) -> None:
    rows = ball(torch.empty(shape, dtype=torch.float64), radius)
    assert rows.shape == shape
    assert rows.dtype == torch.float64
    flat = rows.flatten(1)
    size = flat.norm(dim=1) / radius
    assert float(size.max()) <= 1.0
    # The share of a ball's volume within distance r of its centre is r^d, so r^d is uniform on [0, 1].
    share = size.pow(flat.size(1))
    assert float(share.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(share.var()) == pytest.approx(1 / 12, abs=0.01)
    assert float(flat.mean(0).norm()) < 0.05 * radius


def test_rows_are_drawn_for_each_node() -> None:
    rows = ball(torch.empty(50, 4), 1.0)
    assert torch.unique(rows, dim=0).size(0) == 50


# The penalty #########################################################################################################


@pytest.mark.parametrize(("c", "radius"), [(0.5, 0.01), (-3.0, 2.0)])
def test_linear_layer(c: float, radius: float) -> None:
    """For f(x) = c x each row changes by c |eps|, and |eps| is d / (d + 1) of the radius on average."""
    value = float(penalty_of(Stack([Scaling(c)]), radius).detach())
    assert 0.0 < value <= abs(c) * radius
    assert value == pytest.approx(abs(c) * radius * C / (C + 1), rel=0.1)


def test_layers_add_up() -> None:
    total = float(penalty_of(Stack([Scaling(1.0), Scaling(2.0), Scaling(4.0)]), 0.1).detach())
    assert total == pytest.approx(0.1 * C / (C + 1) * 7, rel=0.1)


def test_sage_stays_within_its_bound() -> None:
    """One SAGE layer moves by at most (|W_neighbour| + |W_root|) times the radius."""
    conv = pyg.SAGEConv(C, C)
    bound = 0.1 * float(
        (torch.linalg.matrix_norm(conv.lin_l.weight, 2) + torch.linalg.matrix_norm(conv.lin_r.weight, 2)).detach()
    )
    assert 0.0 < float(penalty_of(Stack([conv]), 0.1).detach()) <= bound


def test_layer_that_does_not_react_has_no_penalty() -> None:
    """With dropout or noise this also says that both runs draw the same numbers."""
    model = Stack([Scaling(0.0), Scaling(0.0, constant="dropout"), Scaling(0.0, constant="noise")]).train()
    assert float(penalty_of(model).detach()) == 0.0


def test_penalty_does_not_repeat_the_random_numbers_of_the_next_layers() -> None:
    """Without fresh numbers after the second run, the dropout of two layers would be the same."""
    first, second = (Scaling(0.0, constant="noise") for _ in range(2))
    seen: list[Tensor] = []
    for layer in (first, second):
        layer.register_forward_hook(lambda layer, args, out: seen.append(out.detach()))
    data = undirected_graph()
    model = gas.autoscale(Stack([first, second]), data).train()
    batch = next(iter(gas.HaloLoader(data, 1)))
    model(batch)
    seen.clear()
    with gas.LocalLipschitz(model, 0.1):
        model(batch)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


def test_gradient_flows() -> None:
    layer = Scaling(2.0)
    value = penalty_of(Stack([layer]), 0.5)
    value.backward()  # type: ignore[no-untyped-call]
    assert layer.c.grad is not None
    assert float(layer.c.grad) == pytest.approx(float(value.detach()) / 2.0, rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.GCNConv(C, C),
        lambda: pyg.GATConv(C, C),
        lambda: pyg.APPNP(3, 0.1),
        lambda: pyg.EdgeConv(nn.Linear(2 * C, C)),
    ],
    ids=["GCN", "GAT", "APPNP", "Edge"],
)
def test_output_is_what_it_is_without_a_penalty(make: Any) -> None:
    data = undirected_graph()
    model = gas.autoscale(Stack([make(), make()]), data).eval()
    loader = gas.HaloLoader(data, 4)
    gas.refresh(model, loader)
    batch = next(iter(loader))
    expected = model(batch)
    before = history_rows(model)
    with gas.LocalLipschitz(model, 10.0) as penalty:
        assert torch.equal(model(batch), expected)
    assert float(penalty.value().detach()) > 0.0
    after = history_rows(model)
    assert before
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], rows) for name, rows in before.items())


def test_histories_are_pushed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnautoscale.history.device import DeviceHistory
    from gnnautoscale.kernels import Runs

    pushed: list[int] = []
    original = DeviceHistory.push

    def push(self: DeviceHistory, rows: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        pushed.append(where.numel())
        original(self, rows, where, runs)

    monkeypatch.setattr(DeviceHistory, "push", push)
    data = undirected_graph()
    model = gas.autoscale(Stack([pyg.GCNConv(C, C), pyg.SGConv(C, C, K=2), pyg.GCNConv(C, C)]), data)
    batch = next(iter(gas.HaloLoader(data, 4)))
    model(batch)
    once = list(pushed)
    pushed.clear()
    with gas.LocalLipschitz(model, 0.1):
        model(batch)
    assert pushed == once
    assert len(once) == 3  # the first layer and both propagations of the second


def perceptron(in_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_channels, C), nn.BatchNorm1d(C))


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.GINConv(perceptron(C)),  # normalizes nodes
        lambda: pyg.EdgeConv(perceptron(2 * C)),  # normalizes edges, inside propagate
    ],
    ids=["nodes", "edges"],
)
def test_batch_norm_counts_a_batch_once(make: Any) -> None:
    data = undirected_graph()
    conv = make()
    norm = conv.nn[1]
    model = gas.autoscale(Stack([conv]), data).train()
    batch = next(iter(gas.HaloLoader(data, 4)))
    start = {name: value.clone() for name, value in norm.state_dict().items()}
    model(batch)
    expected = {name: value.clone() for name, value in norm.state_dict().items()}
    norm.load_state_dict(start)
    with gas.LocalLipschitz(model, 0.5):
        model(batch)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert int(norm.num_batches_tracked) == 1


class Nested(MessagePassing):  # type: ignore[misc]
    """A layer that has a layer inside."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.inner = pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.inner(x, edge_index))
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_layer_in_a_layer() -> None:
    assert float(penalty_of(Stack([Nested(), Nested()])).detach()) > 0.0


def test_context_ends() -> None:
    data = undirected_graph()
    layer = Scaling(1.0)
    model = gas.autoscale(Stack([layer]), data)
    batch = next(iter(gas.HaloLoader(data, 2)))
    with gas.LocalLipschitz(model, 0.1) as penalty:
        model(batch)
    value = penalty.value()
    model(batch)
    assert penalty.value() is not None
    assert torch.equal(penalty.value(), value)
    with pytest.raises(RuntimeError, match="stop"), gas.LocalLipschitz(model, 0.1):
        raise RuntimeError("stop")
    calls: list[str] = []
    layer.register_propagate_forward_hook(lambda *_: calls.append("once"))
    model(batch)  # with a hook, the model is tried again
    calls.clear()
    model(batch)
    assert calls == ["once"]  # not run a second time
    with penalty:
        pass
    with pytest.raises(InputError, match="needs a forward pass, but got none"):
        penalty.value()


def test_bad_radius_is_refused() -> None:
    model = gas.autoscale(Stack([Scaling(1.0)]), 40)
    for radius in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="radius must be a number above 0"):
            gas.LocalLipschitz(model, radius)


def test_plain_model_is_refused() -> None:
    with pytest.raises(InputError, match="must be autoscaled"):
        gas.LocalLipschitz(Stack([Scaling(1.0)]), 0.1)
