"""The guarantees: exact inference, full-batch training on one part, and the paper's gradient in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import degree, scatter  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import (
    EDGE_CHANNELS,
    Stack,
    assert_same,
    call_whole,
    directed_ring,
    odd_graph,
    spread_norms,
    undirected_graph,
    whole,
    with_attributes,
)
from support.layers import ALL_LAYERS, DEGREES, LAYERS, TWO_WAY_LAYERS, C, alike, stacked


def check_exact(
    model: nn.Module,
    data: Data,
    *num_parts: int,
    batch_size: int = 1,
    bidirectional: bool = False,
    storage: Literal["device", "host"] = "device",
    tolerance: float = 1e-5,
) -> None:
    """Inference in each number of parts equals the whole graph at once; 3 parts are METIS's, others random."""
    expected = whole(model, data)
    gas.autoscale(model, data, storage=storage)
    for count in num_parts:
        size = min(batch_size, count)
        partition: Literal["metis", "random"] = "metis" if count == 3 else "random"
        loader = gas.HaloLoader(data, count, partition=partition, batch_size=size, bidirectional=bidirectional)
        assert_same(gas.infer(model, loader), expected, tolerance)


# Exact inference #####################################################################################################

GROUPS = alike(name for name in ALL_LAYERS if name not in TWO_WAY_LAYERS)


@pytest.mark.parametrize("group", [*GROUPS[::2], *alike(TWO_WAY_LAYERS)], ids=" + ".join)
def test_layers_are_exact(group: list[str]) -> None:
    """In one part and in several."""
    check_exact(stacked(group), undirected_graph(), 1, 3, 9, batch_size=2)


@pytest.mark.parametrize("group", [*GROUPS[1::2], *alike(TWO_WAY_LAYERS)], ids=" + ".join)
def test_layers_are_exact_on_an_odd_graph(group: list[str]) -> None:
    """In double precision, with histories in the host's memory."""
    data, both_ways = odd_graph(dtype=torch.float64), group[0] in TWO_WAY_LAYERS
    model = stacked(group).double()
    check_exact(model, data, 1, 7, batch_size=2, bidirectional=both_ways, storage="host", tolerance=1e-11)


@pytest.mark.parametrize(
    "group", alike(["GCN weighted", "GAT edge_attr", "PNA", "APPNP", "TAG", "GCN2"]), ids=" + ".join
)
def test_graphs_of_unusual_size(group: list[str]) -> None:
    """As many edges as nodes, in parts of one node each too; and no edges at all."""
    check_exact(stacked(group), directed_ring(), 4, 12)
    check_exact(stacked(group), with_attributes(torch.empty(2, 0, dtype=torch.long), 7), 4)


@pytest.mark.parametrize("seed", range(3))
def test_any_graph_and_any_parts(seed: int) -> None:
    """Random graphs in random parts of random size, under a model of different layers."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes = int(torch.randint(5, 60, (1,), generator=generator))
    edges = torch.randint(num_nodes, (2, 3 * num_nodes), generator=generator)
    labels = torch.unique(torch.randint(num_nodes, (num_nodes,), generator=generator), return_inverse=True)[1]
    data = with_attributes(edges, num_nodes, seed=seed)
    make = [LAYERS[name][0] for name in ("GCN", "SAGE max", "TAG", "GATv2", "MF")]
    model = Stack([layer() for layer in make])
    expected = whole(model, data)
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, partition=labels, batch_size=2, shuffle=True)), expected)


READY: dict[str, Callable[..., Any]] = {
    "GCN": pyg.GCN,
    "GraphSAGE": pyg.GraphSAGE,
    "GIN": pyg.GIN,
    "GAT": pyg.GAT,
    "PNA": lambda *args, **kwargs: pyg.PNA(
        *args,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=DEGREES,
        **kwargs,
    ),
}


def ready(name: str, **options: Any) -> nn.Module:
    model: nn.Module = READY[name](C, 6, num_layers=3, out_channels=4, **options)
    spread_norms(model)
    return model


JK = [None, "last", "cat", "max", "lstm"]
NORMS = [None, "batch_norm", "layer_norm"]


@pytest.mark.parametrize(
    ("name", "jk", "norm"),
    [(name, JK[(a + b) % 5], NORMS[(a + b) % 3]) for a, name in enumerate(READY) for b in (0, 2)],
)
def test_ready_model_is_exact(name: str, jk: str | None, norm: str | None) -> None:
    options: dict[str, Any] = {"norm": norm, "norm_kwargs": {"mode": "node"} if norm == "layer_norm" else None}
    if name == "PNA":
        options["edge_dim"] = EDGE_CHANNELS
    check_exact(ready(name, jk=jk, **options), undirected_graph(), 5, batch_size=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GraphSAGE", {"aggr": "max", "project": True}),
        ("GAT", {"v2": True, "heads": 2, "edge_dim": EDGE_CHANNELS}),
        ("GAT", {"heads": 2, "edge_dim": EDGE_CHANNELS, "jk": "cat"}),
        ("PNA", {"edge_dim": EDGE_CHANNELS, "jk": "max", "norm": "batch_norm", "towers": 2}),
        ("GCN", {"act": nn.ReLU(inplace=True), "act_first": True, "norm": "batch_norm"}),
        ("GIN", {"dropout": 0.5, "norm": "batch_norm", "jk": "lstm"}),
    ],
)
def test_ready_model_with_options_is_exact(name: str, options: dict[str, Any]) -> None:
    check_exact(ready(name, **options), odd_graph(3), 6)


def test_ready_model_uses_edge_weights_and_features() -> None:
    """The tests above would mean less if ``model(batch)`` left these arguments out."""
    data = odd_graph()
    model = ready("GCN").eval()
    with torch.no_grad():
        assert not torch.allclose(model(data.x, data.edge_index), call_whole(model, data), atol=1e-2)


class Residual(nn.Module):
    """What users write: a projection, residuals, a norm inside, a concatenation, two kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(C, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.BatchNorm1d(6), "conv": conv, "mix": nn.Linear(12, 6)})
            for conv in (pyg.GCNConv(6, 6), pyg.GATv2Conv(6, 6), pyg.SGConv(6, 6, K=2), pyg.GCNConv(6, 6))
        )
        self.end = nn.Linear(12, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = x = F.leaky_relu(self.start(x), inplace=True)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            h = F.relu(block["norm"](x))
            h = F.dropout(block["conv"](h, edge_index), 0.5, self.training)
            x = x + block["mix"](torch.cat([h, first], dim=1))
        out: Tensor = self.end(torch.cat([x, first], dim=1)).log_softmax(dim=1)
        return out


def test_residual_model_is_exact() -> None:
    for data in (undirected_graph(), odd_graph()):
        model = Residual()
        spread_norms(model)
        check_exact(model, data, 8, batch_size=3)


class Detached(nn.Module):
    """Uses an early layer through a path that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.SAGEConv(C, C) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = self.convs[0](x, edge_index).tanh()
        second = self.convs[1](first, edge_index).tanh()
        third = self.convs[2](second + first.detach(), edge_index).tanh()
        out: Tensor = self.convs[3](third, edge_index)
        return out


class Classes(nn.Module):
    """Returns classes instead of scores: the output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.model = pyg.GraphSAGE(C, C, num_layers=3, out_channels=5, jk="cat")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.model(x, edge_index).argmax(dim=-1)
        return out


class Signs(nn.Module):
    """Every layer sees signs of the layer before, so there is no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.SAGEConv(C, C) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
            x = (x > 0).to(x.dtype) + 1.0
        return x


@pytest.mark.parametrize("make", [Detached, Classes, Signs])
def test_dependence_without_a_gradient_is_exact(make: Callable[[], nn.Module]) -> None:
    check_exact(make(), undirected_graph(), 6)


class Outputs(nn.Module):
    """A layer may have any name, also the one that the library uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = pyg.GCNConv(C, C)
        self.output = pyg.GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.output(self.hidden(x, edge_index).relu(), edge_index)
        return out


def test_layer_may_be_called_output() -> None:
    check_exact(Outputs(), undirected_graph(), 4)


# Sweeps of plain forward passes ######################################################################################


@pytest.mark.parametrize(("name", "num_layers"), [("GCN", 2), ("SAGE mean", 3), ("GAT", 4), ("GIN", 3)])
def test_exact_after_as_many_sweeps_as_layers(name: str, num_layers: int) -> None:
    """The paper's claim: without training, L passes over the batches make an L-layer model exact, fewer do not."""
    data = undirected_graph(60, 150)
    model = Stack([LAYERS[name][0]() for _ in range(num_layers)])
    spread_norms(model)
    expected = whole(model, data)
    loader = gas.HaloLoader(data, 10, partition="random")
    gas.autoscale(model, data)

    def sweep() -> Tensor:
        rows = torch.empty_like(expected)
        with torch.no_grad():
            for batch in loader:
                rows[batch.n_id[: batch.batch_size]] = model(batch)
        return rows

    assert not torch.allclose(sweep(), expected, atol=1e-3)
    for _ in range(num_layers - 2):
        sweep()
    assert_same(sweep(), expected)


# Training on one part ################################################################################################


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def train(model: nn.Module, batches: Callable[[], Any], scores: Callable[[Any], Tensor], steps: int) -> list[float]:
    """Losses of a few epochs with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    model.train()
    for epoch in range(steps):
        for batch in batches():
            optimizer.zero_grad()
            size = batch.batch_size if "batch_size" in batch else batch.num_nodes
            mask = batch.train_mask[:size]
            with seeded(epoch):
                out = scores(batch)
            loss = F.cross_entropy(out[mask], batch.y[:size][mask])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: ready("GCN", dropout=0.5, norm="batch_norm"),
    "GraphSAGE": lambda: ready("GraphSAGE", dropout=0.2, jk="cat"),
    # Without dropout: on attention it is drawn edge by edge, and the library groups edges by target.
    "GAT": lambda: ready("GAT", heads=2, edge_dim=EDGE_CHANNELS, norm="batch_norm"),
    "GIN": lambda: ready("GIN", dropout=0.5, norm="batch_norm", jk="max"),
    "PNA": lambda: ready("PNA", edge_dim=EDGE_CHANNELS, norm="layer_norm", norm_kwargs={"mode": "node"}),
    "APPNP": lambda: Stack([pyg.SAGEConv(C, 4), pyg.APPNP(K=3, alpha=0.2)]),
    "SG": lambda: Stack([pyg.SGConv(C, C, K=2), pyg.TAGConv(C, 4)], ("edge_weight",)),
    "residual": Residual,
}


@pytest.mark.parametrize(("number", "name"), list(enumerate(TRAINED)))
def test_one_part_trains_like_the_whole_graph(number: int, name: str) -> None:
    # Double precision: in single precision Adam blows up rounding where the gradient is zero.
    data = (odd_graph if number % 2 else undirected_graph)(dtype=torch.float64)
    data.y = data.y % 3
    plain, scaled = TRAINED[name]().double(), TRAINED[name]().double()
    scaled.load_state_dict(plain.state_dict())
    expected = train(plain, lambda: [data], lambda graph: call_whole(plain, graph), 5)
    gas.autoscale(scaled, data)
    loader = gas.HaloLoader(data, 1)
    got = train(scaled, lambda: loader, scaled, 5)
    assert got == pytest.approx(expected, abs=1e-10)
    assert expected[-1] != expected[0]
    for (key, value), other in zip(plain.state_dict().items(), scaled.state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-8, atol=1e-8, msg=key)
    # Adam would hide gradients that are too large or too small.
    gradients = [[value.grad for value in model.parameters() if value.grad is not None] for model in (scaled, plain)]
    assert any(bool(value.abs().max() > 0) for value in gradients[1])
    for gradient, wanted in zip(*gradients, strict=True):
        assert_same(gradient, wanted, 1e-8)


def test_seeding_once_is_enough_for_the_loss_curve_of_the_whole_graph() -> None:
    """Nothing but the model's dropout may draw from the global random state."""
    data = undirected_graph()
    curves = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = pyg.GCN(C, C, num_layers=2, out_channels=4, dropout=0.5)
        loader = gas.HaloLoader(data, 1)
        if scaled:
            gas.autoscale(model, data)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            for batch in loader if scaled else [data]:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch.x, batch.edge_index), batch.y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], abs=1e-6)


# Training in several parts ###########################################################################################


def gcn_layer(x: Tensor, edge_index: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    num_nodes = x.size(0)
    loops = torch.arange(num_nodes)
    source, target = torch.cat([edge_index, torch.stack([loops, loops])], dim=1)
    scale = degree(target, num_nodes).pow(-0.5)
    rows = (x @ weight.t())[source] * (scale[source] * scale[target]).unsqueeze(1)
    out: Tensor = scatter(rows, target, 0, num_nodes, "sum") + bias
    return out


def sage_layer(x: Tensor, edge_index: Tensor, neighbour: Tensor, bias: Tensor, root: Tensor) -> Tensor:
    mean = scatter(x[edge_index[0]], edge_index[1], 0, x.size(0), "mean")
    out: Tensor = mean @ neighbour.t() + bias + x @ root.t()
    return out


def gcn_weights(conv: Any) -> tuple[Tensor, ...]:
    return conv.lin.weight, conv.bias


def sage_weights(conv: Any) -> tuple[Tensor, ...]:
    return conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight


@pytest.mark.parametrize(
    ("make", "layer", "weights"),
    [(pyg.GCNConv, gcn_layer, gcn_weights), (pyg.SAGEConv, sage_layer, sage_weights)],
    ids=["GCN", "SAGE"],
)
@pytest.mark.parametrize("warm", [False, True])
def test_gradient_is_the_papers(
    make: Callable[..., Any], layer: Callable[..., Tensor], weights: Callable[[Any], tuple[Tensor, ...]], warm: bool
) -> None:
    """Rows of the first layer outside the batch are constants from the history, in values and in gradients."""
    data = undirected_graph(24, 40)
    first, second = make(C, 5), make(5, 3)
    model = Stack([first, second])
    loader = gas.HaloLoader(data, 4, partition="random")
    gas.autoscale(model, data)
    # Kept by hand: what the history must hold.
    history = torch.zeros(data.num_nodes, 5)
    if warm:
        gas.refresh(model, loader)
        history = layer(data.x, data.edge_index, *weights(first)).detach()
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.1)  # so that the history is stale
    for batch in loader:
        nodes = batch.n_id[: batch.batch_size]
        inside = torch.zeros(data.num_nodes, 1, dtype=torch.bool)
        inside[nodes] = True

        model.zero_grad()
        out = model(batch)
        out.square().sum().backward()
        got = [weight.grad for weight in (*weights(first), *weights(second))]

        model.zero_grad()
        hidden = layer(data.x, data.edge_index, *weights(first))
        mixed = torch.where(inside, hidden, history)
        expected = layer(mixed.tanh(), data.edge_index, *weights(second))[nodes]
        expected.square().sum().backward()  # type: ignore[no-untyped-call]
        history[nodes] = hidden.detach()[nodes]

        assert_same(out, expected, 1e-6)
        for gradient, weight in zip(got, (*weights(first), *weights(second)), strict=True):
            assert gradient is not None
            assert weight.grad is not None
            assert_same(gradient, weight.grad, 1e-6)


@pytest.mark.parametrize("name", ["GCN", "APPNP"])
def test_same_seed_same_bits(name: str) -> None:
    results = []
    for _ in range(2):
        data = undirected_graph()
        torch.manual_seed(0)
        model = gas.autoscale(TRAINED[name](), data, edge_dropout=0.1 if name == "GCN" else 0.0)
        loader = gas.HaloLoader(data, 6, batch_size=2, shuffle=True, seed=4)
        losses = train(model, lambda loader=loader: loader, model, 3)  # type: ignore[misc]
        results.append((losses, [value.clone() for value in model.state_dict().values()], gas.infer(model, loader)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert torch.equal(results[0][2], results[1][2])


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(C), pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.conv(x=self.norm(input=x), edge_index=edge_index)


class Inside(pyg.MessagePassing):  # type: ignore[misc]
    """A layer that has a layer inside."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.inner = pyg.GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.propagate(edge_index, x=self.inner(x, edge_index))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Scalars(pyg.MessagePassing):  # type: ignore[misc]
    """One number per node, without a dimension for channels."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.propagate(edge_index, x=x.view(x.size(0), -1)).sum(dim=-1)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


@pytest.mark.parametrize(
    "make",
    [
        ByKeyword,
        lambda: Stack([Inside(), Inside()]),
        lambda: Stack([Scalars(), Scalars(), Scalars()]),
    ],
    ids=["norm called by keyword", "layer in a layer", "one number per node"],
)
def test_less_common_models_are_exact(make: Callable[[], nn.Module]) -> None:
    data = undirected_graph()
    order = data.edge_index[1].argsort(stable=True)
    check_exact(make(), with_attributes(data.edge_index[:, order], 40), 5)
