"""Shortcuts: which of them a model gets, and that none of them changes a result, a gradient or a history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import degree, scatter, spmm  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import (
    CHANNELS,
    EDGE_CHANNELS,
    NUM_RELATIONS,
    Stack,
    assert_same,
    history_rows,
    odd_graph,
    spread_norms,
    undirected_graph,
    whole,
)
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.fused import FusedEdges
from gnnautoscale.forward.plan import Plan
from gnnautoscale.models import build_model, model_options

C = CHANNELS
Run = Callable[[nn.Module, Data], Any]
ALL = {"pair", "short", "fused"}
LAZY = {"short", "lazy"}
Make = Callable[[], Any]
GRAPHS = [undirected_graph, odd_graph]


def in_turn(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each case on one of the graphs, in turn."""
    cases = [(name, GRAPHS[place % 2]) for place, name in enumerate(names)]
    return pytest.mark.parametrize(("name", "make_data"), cases)


def plan_of(model: nn.Module) -> Plan:
    plan = attached(model).plan
    assert plan is not None
    return plan


def switch_off(model: nn.Module) -> None:
    """Run a model without any shortcut from now on, in all ways that it has a plan for."""
    for plan in attached(model)._plans.values():
        for call in plan.calls.values():
            call.shortcuts = frozenset()
            call.constant_halo.clear()
        plan.short_tail = plan.ignores_edges = False


def is_off(model: nn.Module) -> bool:
    """Whether no plan has a shortcut, nor one that was made since they were switched off."""
    plans = attached(model)._plans.values()
    return not any(plan.ignores_edges or call.shortcuts for plan in plans for call in plan.calls.values())


def batchwise(model: nn.Module, batch: Data) -> Any:
    return model(batch)


def parts(data: Data, num_parts: int = 4) -> gas.HaloLoader:
    return gas.HaloLoader(data, num_parts, partition="random", bidirectional=True)


def prepared(
    make: Callable[[], nn.Module], data: Data, loader: gas.HaloLoader, run: Run = batchwise, **options: Any
) -> nn.Module:
    """A model with a plan for a way to run it and with histories full of random rows; the same one every time."""
    torch.manual_seed(3)
    model = make().to(data.x.dtype)
    if not any(isinstance(module, nn.BatchNorm1d) and not module.affine for module in model.modules()):
        spread_norms(model)
    state = copy.deepcopy(model.state_dict())
    gas.autoscale(model, data, **options)
    model.train()
    run(model, next(iter(loader)))
    reset(model, state)
    return model


def reset(model: nn.Module, state: dict[str, Any]) -> None:
    """Give a model back its weights and statistics, and fill its histories with random rows."""
    model.load_state_dict(state)
    generator = torch.Generator().manual_seed(5)
    for _, history in sorted(attached(model).memory.histories.items()):
        rows = torch.randn(history.num_nodes, history.width, generator=generator, dtype=history.dtype)
        history.push(rows, torch.arange(history.num_nodes))


def observed(model: nn.Module, loader: gas.HaloLoader, run: Run = batchwise) -> list[dict[str, Tensor]]:
    """What training steps over all batches give: outputs, gradients, histories and buffers."""
    steps = []
    for number, batch in enumerate(loader):
        model.zero_grad()
        torch.manual_seed(number)
        out = run(model, batch)
        found = {f"out {place}": value for place, value in enumerate(flat(out))}
        assert all(value.size(0) == batch.batch_size for value in found.values() if value.dim())
        torch.stack([value.square().sum() for value in found.values()]).sum().backward()  # type: ignore[no-untyped-call]
        found |= {
            f"gradient of {name}": value.grad for name, value in model.named_parameters() if value.grad is not None
        }
        found |= {f"buffer {name}": value for name, value in model.named_buffers()}
        found |= {f"history {name}": value for name, value in history_rows(model).items()}
        steps.append({name: value.detach().clone() for name, value in found.items()})
    return steps


def flat(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [value for item in (out.values() if isinstance(out, dict) else out) for value in flat(item)]


def check_same(
    make: Callable[[], nn.Module],
    data: Data,
    *,
    run: Run = batchwise,
    tolerance: float = 1e-5,
    infers: bool = False,
    **options: Any,
) -> Plan:
    """Compare training steps, and inference, with and without shortcuts; returns the plan with them."""
    loader = parts(data)
    model = prepared(make, data, loader, **options)
    if infers:
        state, plain = copy.deepcopy(model.state_dict()), make().to(data.x.dtype)
        plain.load_state_dict(state)
        for out, exact in zip(flat(gas.infer(model, loader)), flat(whole(plain, data)), strict=True):
            assert_same(out, exact, tolerance)
        reset(model, state)
        model.train()
    return check_prepared(model, loader, run, tolerance)


def check_prepared(model: nn.Module, loader: gas.HaloLoader, run: Run = batchwise, tolerance: float = 1e-10) -> Plan:
    """Compare training steps of a model with and without shortcuts, which it loses; returns the plan with them."""
    plan = next(iter(attached(model)._plans.values()))  # that of training, which came first
    calls = {name: replace(call, constant_halo=set(call.constant_halo)) for name, call in plan.calls.items()}
    found = Plan(calls=calls, short_tail=plan.short_tail, ignores_edges=plan.ignores_edges)
    for now, before in with_and_without(model, lambda model: observed(model, loader, run)):
        assert now.keys() == before.keys()
        assert any(name.startswith("gradient") for name in now)
        for name in now:
            assert_named(name, now[name], before[name], tolerance)
    return found


def with_and_without(model: nn.Module, run: Callable[[nn.Module], list[Any]]) -> list[tuple[Any, Any]]:
    """Pairs of what a model gives with shortcuts and what it gives without, in the same state."""
    state = copy.deepcopy(model.state_dict())
    reset(model, state)
    quick = run(model)
    reset(model, state)
    switch_off(model)
    plain = run(model)
    assert is_off(model)
    return [*zip(quick, plain, strict=True)]


def assert_named(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    try:
        assert_same(got, expected, tolerance)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


# Layers ##############################################################################################################


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, 2 * C), nn.BatchNorm1d(2 * C), nn.ReLU(), nn.Linear(2 * C, C))


def pna() -> Any:
    counts = torch.tensor([2, 6, 12, 20, 10, 5, 3, 1])
    return pyg.PNAConv(C, C, ["mean", "min", "max", "std"], ["identity", "amplification"], counts, towers=2)


W, A, T = ("edge_weight",), ("edge_attr",), ("edge_type",)
# How to make one, the edge-level arguments it takes, and the shortcuts it is expected to get (None: any).
LAYERS: dict[str, tuple[Make, tuple[str, ...], set[str] | None]] = {
    "GCN": (lambda: pyg.GCNConv(C, C), (), {"short", "fused"}),
    "GCN weighted": (lambda: pyg.GCNConv(C, C), W, {"short", "fused"}),
    "GCN plain": (lambda: pyg.GCNConv(C, C, normalize=False, bias=False), W, {"short", "fused"}),
    "SAGE mean": (lambda: pyg.SAGEConv(C, C), (), ALL),
    "SAGE max": (lambda: pyg.SAGEConv(C, C, aggr="max"), (), ALL),
    "SAGE min": (lambda: pyg.SAGEConv(C, C, aggr="min"), (), ALL),
    "SAGE sum": (lambda: pyg.SAGEConv(C, C, aggr="sum"), (), ALL),
    "SAGE no root": (lambda: pyg.SAGEConv(C, C, root_weight=False), (), ALL),
    "SAGE normalize": (lambda: pyg.SAGEConv(C, C, normalize=True), (), ALL),
    "SAGE project": (lambda: pyg.SAGEConv(C, C, project=True), (), ALL),
    "SAGE project max": (lambda: pyg.SAGEConv(C, C, aggr="max", project=True, root_weight=False), (), ALL),
    "SAGE several": (lambda: pyg.SAGEConv(C, C, aggr=["mean", "std"]), (), LAZY | {"pair"}),
    "SAGE reversed": (lambda: pyg.SAGEConv(C, C, flow="target_to_source"), (), None),
    "GIN": (lambda: pyg.GINConv(mlp(), train_eps=True), (), ALL),
    "GIN linear": (lambda: pyg.GINConv(nn.Linear(C, C)), (), ALL),
    "Graph add": (lambda: pyg.GraphConv(C, C), (), ALL),
    "Graph mean": (lambda: pyg.GraphConv(C, C, aggr="mean"), (), ALL),
    "Graph max": (lambda: pyg.GraphConv(C, C, aggr="max"), (), ALL),
    "Graph add weighted": (lambda: pyg.GraphConv(C, C), W, ALL),
    "Graph mean weighted": (lambda: pyg.GraphConv(C, C, aggr="mean"), W, ALL),
    "Graph max weighted": (lambda: pyg.GraphConv(C, C, aggr="max"), W, ALL),
    "APPNP": (lambda: pyg.APPNP(K=3, alpha=0.1), (), {"fused"}),
    "APPNP once": (lambda: pyg.APPNP(K=1, alpha=0.1), W, {"fused"}),
    "SG": (lambda: pyg.SGConv(C, C, K=2), (), {"fused"}),
    "SG once": (lambda: pyg.SGConv(C, C, K=1), W, {"short", "fused"}),
    "SSG": (lambda: pyg.SSGConv(C, C, alpha=0.1, K=2), (), {"fused"}),
    "TAG": (lambda: pyg.TAGConv(C, C, K=2), W, {"fused"}),
    "LG": (lambda: pyg.LGConv(), W, {"short", "fused"}),
    "ClusterGCN": (lambda: pyg.ClusterGCNConv(C, C, diag_lambda=0.1), (), {"fused"}),
    "MixHop": (lambda: pyg.MixHopConv(C, C // 2, powers=[0, 2]), (), {"fused"}),
    "ARMA": (lambda: pyg.ARMAConv(C, C, num_stacks=2, num_layers=2), (), None),
    "EG": (lambda: pyg.EGConv(C, C, aggregators=["symnorm"], num_heads=2, num_bases=2), (), None),
    "GatedGraph": (lambda: pyg.GatedGraphConv(C, num_layers=2), W, {"fused"}),
    "MF": (lambda: pyg.MFConv(C, C, max_degree=6), (), None),
    "Simple": (lambda: pyg.SimpleConv(aggr="mean", combine_root="sum"), W, {"fused"}),
    "Simple max": (lambda: pyg.SimpleConv(aggr="max"), W, {"short", "fused"}),
    "GAT": (lambda: pyg.GATConv(C, C // 2, heads=2), (), LAZY),
    "GAT averaged": (lambda: pyg.GATConv(C, C, heads=2, concat=False, dropout=0.5), (), LAZY),
    "GAT residual": (lambda: pyg.GATConv(C, C, residual=True, add_self_loops=False), (), {"lazy"}),
    "GAT edges": (lambda: pyg.GATConv(C, C // 2, heads=2, edge_dim=EDGE_CHANNELS), A, LAZY),
    "GATv2": (lambda: pyg.GATv2Conv(C, C // 2, heads=2), (), LAZY),
    "GATv2 edges": (lambda: pyg.GATv2Conv(C, C, edge_dim=EDGE_CHANNELS), A, LAZY),
    "AGNN": (lambda: pyg.AGNNConv(), (), LAZY),
    "SuperGAT": (lambda: pyg.SuperGATConv(C, C // 2, heads=2, attention_type="SD"), (), None),
    "Transformer edges": (lambda: pyg.TransformerConv(C, C, edge_dim=EDGE_CHANNELS), A, LAZY | {"pair"}),
    "Transformer averaged": (lambda: pyg.TransformerConv(C, C, heads=2, concat=False), (), LAZY | {"pair"}),
    "PNA": (pna, (), LAZY),
    "GINE": (lambda: pyg.GINEConv(mlp(), edge_dim=EDGE_CHANNELS), A, LAZY | {"pair"}),
    "Transformer": (lambda: pyg.TransformerConv(C, C // 2, heads=2, beta=True), (), LAZY | {"pair"}),
    "RGCN": (lambda: pyg.RGCNConv(C, C, NUM_RELATIONS), T, None),
    "Cheb": (lambda: pyg.ChebConv(C, C, K=3), (), {"lazy"}),
    "DirGNN": (lambda: pyg.DirGNNConv(pyg.SAGEConv(C, C)), (), None),
    "DirGNN GCN": (lambda: pyg.DirGNNConv(pyg.GCNConv(C, C)), (), None),
    "LE": (lambda: pyg.LEConv(C, C), W, LAZY | {"pair"}),
    "GEN": (lambda: pyg.GENConv(C, C, learn_t=True), (), LAZY | {"pair"}),
    "ResGated": (lambda: pyg.ResGatedGraphConv(C, C), (), LAZY | {"pair"}),
    "CG": (lambda: pyg.CGConv(C, dim=EDGE_CHANNELS, batch_norm=True), A, LAZY | {"pair"}),
    "NN": (lambda: pyg.NNConv(C, C, nn.Linear(EDGE_CHANNELS, C * C), aggr="mean"), A, LAZY | {"pair"}),
    "AntiSymmetric": (lambda: pyg.AntiSymmetricConv(C, num_iters=2), (), None),
    "GCN2": (lambda: pyg.GCN2Conv(C, alpha=0.1, theta=0.5, layer=1), (), {"short", "fused"}),
    "GCN2 weighted": (lambda: pyg.GCN2Conv(C, alpha=0.1, shared_weights=False), W, {"short", "fused"}),
}


def stack(name: str) -> Stack:
    make, arguments, _ = LAYERS[name]
    layers = [make(), make()]
    if not list(layers[0].parameters()):
        layers.insert(0, pyg.GraphConv(C, C))  # so that there is something to train
    return Stack(layers, arguments, initial=name.startswith("GCN2"))


@in_turn(LAYERS)
def test_shortcuts_change_nothing(name: str, make_data: Callable[..., Data]) -> None:
    plan = check_same(lambda: stack(name), make_data(dtype=torch.float64), tolerance=1e-10)
    expected = LAYERS[name][2]
    for call in list(plan.calls.values())[-2:]:
        assert expected is None or call.shortcuts == expected
    if expected:
        assert plan.short_tail
        assert plan.ignores_edges


@pytest.mark.parametrize("name", ["SAGE max", "Graph mean weighted", "APPNP", "GAT", "GATv2", "Transformer"])
def test_inference_is_exact_with_shortcuts(name: str) -> None:
    data = odd_graph(dtype=torch.float64)
    model = stack(name).double()
    spread_norms(model)
    expected = whole(model, data)
    gas.autoscale(model, data)
    loader = parts(data, 5)
    assert_same(gas.infer(model, loader), expected, 1e-10)
    assert plan_of(model).ignores_edges
    assert any(call.shortcuts for call in plan_of(model).calls.values())
    for nodes in ([3], [32], [7, 1, 30, 7, 28]):
        assert_same(gas.predict(model, loader, torch.tensor(nodes)), expected[nodes], 1e-10)
    switch_off(model)
    assert_same(gas.infer(model, loader), expected, 1e-10)


@pytest.mark.parametrize("name", ["GCN", "APPNP", "DirGNN"])
def test_second_graph_that_is_directed(name: str) -> None:
    """What was found out on a symmetric graph holds on another one."""
    data, other = undirected_graph(dtype=torch.float64), odd_graph(dtype=torch.float64)
    model = stack(name).double()
    spread_norms(model)
    expected = whole(model, data), whole(model, other)
    gas.autoscale(model, data)
    assert_same(gas.infer(model, parts(data)), expected[0], 1e-10)
    assert_same(gas.infer(model, parts(other)), expected[1], 1e-10)


@pytest.mark.parametrize("name", ["GCN", "SAGE max", "APPNP", "RGCN", "GAT"])
def test_graph_without_edges(name: str) -> None:
    data = undirected_graph(dtype=torch.float64)
    for key in ("edge_index", "edge_weight", "edge_attr", "edge_type"):
        data[key] = data[key][..., :0] if key == "edge_index" else data[key][:0]
    check_same(lambda: stack(name), data, tolerance=1e-10)


class Listing(gas.ScalableGNN):
    """Names its own slots, as the paper does."""

    def __init__(self, layer: Make) -> None:
        super().__init__(40, C, 3)
        self.convs = nn.ModuleList(layer() for _ in range(3))
        self.lins = nn.ModuleList(nn.Linear(C, C) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Any:
        for conv, lin, history in zip(self.convs, self.lins, self.histories, strict=False):
            x = self.push_and_pull(history, lin(conv(x, edge_index)).tanh(), n_id)
        return self.lins[-1](self.convs[-1](x, edge_index))


@pytest.mark.parametrize("name", ["GCN", "GIN"])
def test_models_that_name_their_own_slots(name: str) -> None:
    data = undirected_graph(dtype=torch.float64)
    loader = parts(data)
    steps = []
    for quick in (True, False):
        torch.manual_seed(3)
        model = Listing(LAYERS[name][0]).double().train()
        spread_norms(model)
        batch = next(iter(loader))
        model(batch.x, batch.edge_index, batch.n_id)
        if not quick:
            switch_off(model)
        for _ in range(2):
            found = observed(model, loader, lambda model, batch: model(batch.x, batch.edge_index, batch.n_id))
        steps.append(found)
    for got, expected in zip(*steps, strict=True):
        assert got.keys() == expected.keys()
        for key in got:
            assert_named(key, got[key], expected[key], 1e-10)


def test_signed_layers() -> None:
    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = pyg.SignedConv(C, C // 2, first_aggr=True)
            self.second = pyg.SignedConv(C // 2, C // 2, first_aggr=False)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.second(self.first(x, edge_index, edge_index).tanh(), edge_index, edge_index)

    for make_data in (undirected_graph, odd_graph):
        check_same(Signed, make_data(dtype=torch.float64), tolerance=1e-10)


# Which gradients of the halo are needed ##############################################################################


class Between(nn.Module):
    """Something between a slot and the next aggregation."""

    def __init__(self, middle: nn.Module, layer: Make = lambda: pyg.SAGEConv(C, C, aggr="sum")) -> None:
        super().__init__()
        self.first, self.middle, self.second = layer(), middle, layer()

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.second(self.middle(self.first(x, edge_index)), edge_index)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Checkpointed(nn.Module):
    """Hides its weights from autograd until the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.lin, self.reentrant = nn.Linear(C, C), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.lin, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("middle", "constant"),
    [
        (nn.Identity, True),
        (nn.Tanh, True),
        (lambda: nn.BatchNorm1d(C, affine=False), True),
        (lambda: nn.LayerNorm(C, elementwise_affine=False), True),
        (lambda: nn.Linear(C, C), False),
        (lambda: nn.BatchNorm1d(C), False),
        (lambda: nn.LayerNorm(C), False),
        (nn.PReLU, False),
        (Scaled, False),
        (lambda: Checkpointed(False), False),
    ],
)
def test_halo_gradients_are_left_out_only_where_no_weight_needs_them(
    middle: Callable[[], nn.Module], constant: bool
) -> None:
    plan = check_same(lambda: Between(middle()), odd_graph(dtype=torch.float64), tolerance=1e-10)
    assert plan.calls["first"].constant_halo == {0}
    assert plan.calls["second"].constant_halo == ({0} if constant else set())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_weights_that_a_checkpoint_hides_get_the_halos_part() -> None:
    """Autograd sees the input of a reentrant checkpoint only, not the weights used in it."""
    data = undirected_graph(dtype=torch.float64)
    check_same(lambda: Between(Checkpointed(True)), data, tolerance=1e-10)


class Embedded(nn.Module):
    """Features that are learned, by node, at the input or between layers."""

    def __init__(self, at_input: bool) -> None:
        super().__init__()
        self.table, self.at_input = nn.Embedding(40, C), at_input
        self.first, self.second = pyg.SAGEConv(C, C), pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Any:
        learned = self.table(n_id)
        h = self.first(learned if self.at_input else x, edge_index).tanh()
        return self.second(h if self.at_input else h + learned, edge_index)


@pytest.mark.parametrize("at_input", [True, False])
def test_learned_embeddings_of_the_halo_get_their_gradient(at_input: bool) -> None:
    data = undirected_graph(dtype=torch.float64)
    model = prepared(lambda: Embedded(at_input), data, loader := parts(data))
    batch = next(iter(loader))
    model(batch).square().sum().backward()
    gradient = dict(model.named_parameters())["table.weight"].grad
    assert gradient is not None
    assert bool(gradient[batch.n_id[batch.batch_size :]].abs().max() > 0)
    plan = check_prepared(model, loader)
    found = plan.calls["first"].constant_halo, plan.calls["second"].constant_halo
    assert found == ((set(), {0}) if at_input else ({0}, set()))


def test_gradients_of_one_batch_by_hand() -> None:
    """A linear map between the layers gets gradients from rows of the halo, which the history gives."""
    data = odd_graph(dtype=torch.float64)
    loader = parts(data)
    model = prepared(lambda: Between(nn.Linear(C, C)), data, loader)
    (slot,) = plan_of(model).live
    plain = Between(nn.Linear(C, C)).double()
    plain.load_state_dict(model.state_dict())
    for batch in loader:
        history = history_rows(model)[slot].clone()
        nodes = batch.n_id[: batch.batch_size]
        inside = torch.zeros(data.num_nodes, 1, dtype=torch.bool)
        inside[nodes] = True
        model.zero_grad()
        out = model(batch)
        out.square().sum().backward()
        plain.zero_grad()
        mixed = torch.where(inside, plain.first(data.x, data.edge_index), history)
        expected = plain.second(plain.middle(mixed), data.edge_index)[nodes]
        expected.square().sum().backward()
        assert_same(out, expected, 1e-10)
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert got.grad is not None
            assert wanted.grad is not None
            assert_same(got.grad, wanted.grad, 1e-10)


@pytest.mark.parametrize("part", ["middle", "first"])
def test_weights_may_be_frozen_at_first(part: str) -> None:
    """What is trained later needs the halo's gradients, although nothing asked for them when the model was tried."""
    data = undirected_graph(dtype=torch.float64)
    loader = parts(data)
    grads = []
    for frozen in (False, True):
        torch.manual_seed(3)
        model = Between(nn.Linear(C, C)).double()
        gas.autoscale(model, data)
        getattr(model, part).requires_grad_(not frozen)
        gas.refresh(model, loader)
        getattr(model, part).requires_grad_()
        model(next(iter(loader))).square().sum().backward()
        grads.append([value.grad for value in model.parameters()])
    for got, expected in zip(*grads, strict=True):
        assert got is not None
        assert expected is not None
        assert_same(got, expected, 1e-10)


@in_turn(["SAGE sum", "SAGE max", "GIN", "GCN", "LG", "APPNP", "Graph mean weighted"])
def test_gradients_of_features_are_right_for_the_halo_too(name: str, make_data: Callable[..., Data]) -> None:
    def gradient(model: nn.Module, batch: Data, *, by_name: bool = False) -> Any:
        batch.x = batch.x.detach().clone().requires_grad_()
        arguments = {key: batch[key] for key in ("x", "edge_index", *LAYERS[name][1])}
        (model(**arguments) if by_name else model(batch)).square().sum().backward()
        return batch.x.grad

    data = make_data(dtype=torch.float64)
    model = prepared(lambda: stack(name), data, loader := parts(data), gradient)
    ways = [(batch, bool(number % 2)) for number, batch in enumerate(loader)]
    found = with_and_without(model, lambda model: [gradient(model, batch, by_name=named) for batch, named in ways])
    for (batch, _), (got, expected) in zip(ways, found, strict=True):
        assert_same(got, expected, 1e-10)
        assert bool(got[: batch.batch_size].abs().max() > 0)


def test_gradients_flow_into_what_made_the_features() -> None:
    data = undirected_graph(dtype=torch.float64)
    encoder = nn.Linear(C, C).double()

    def gradient(model: nn.Module, batch: Data) -> Tensor:
        encoder.zero_grad()
        model(encoder(batch.x), batch.edge_index).square().sum().backward()
        assert encoder.weight.grad is not None
        return encoder.weight.grad.clone()

    model = prepared(lambda: stack("SAGE sum"), data, loader := parts(data), gradient)
    for got, expected in with_and_without(model, lambda model: [gradient(model, batch) for batch in loader]):
        assert_same(got, expected, 1e-10)


# What breaks a shortcut ##############################################################################################


class Residual(nn.Module):
    """Adds a layer's input to its output, after the last layer too."""

    def __init__(self, layer: Make = lambda: pyg.SAGEConv(C, C)) -> None:
        super().__init__()
        self.first, self.second, self.head = layer(), layer(), nn.Linear(C, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = x + self.first(x, edge_index).tanh()
        return self.head(x + self.second(x, edge_index).tanh())


class Degrees(nn.Module):
    """Looks at edges itself; at the batch's nodes only, since the halo's degrees are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GINConv(mlp()), pyg.GINConv(mlp())
        self.weight = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.second(self.first(x, edge_index).tanh(), edge_index)
        return h + degree(edge_index[1], x.size(0), x.dtype)[: h.size(0), None] * self.weight


class Doubled(nn.Module):
    """Multiplies weights before it passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GraphConv(C, C), pyg.GraphConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Any:
        h = self.first(x, edge_index, edge_weight * 2.0).tanh()
        return self.second(h, edge_index, edge_weight)


class Shared(nn.Module):
    def __init__(self, layer: Make) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        for _ in range(3):
            x = self.layer(x, edge_index).tanh()
        return x


class Mixing(MessagePassing):  # type: ignore[misc]
    """Adds its own input after it has propagated; can aggregate in one go, rightly or by another rule."""

    def __init__(self, factor: float | None = None, *, root: bool = True, dense: bool = False) -> None:
        super().__init__(aggr="sum")
        self.lin, self.root, self.factor = nn.Linear(C, C), root, factor
        self.after = nn.Linear(C, C) if dense else None
        if factor is None:
            self.fuse = False

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.lin(x)
        out = self.propagate(edge_index, x=x)
        out = x + out if self.root else out
        return out if self.after is None else self.after(out)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Any:
        return spmm(edge_index, x, reduce="sum") * (self.factor or 1.0)


class Parallel(nn.Module):
    """Two last layers of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SAGEConv(C, C)
        self.gin, self.gcn = pyg.GINConv(mlp()), pyg.GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).tanh()
        return self.gin(h, edge_index) + self.gcn(h, edge_index)


class Mixed(nn.Module):
    """Two last layers, one of which computes the halo's rows as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sage, self.gat = pyg.SAGEConv(C, C), pyg.SAGEConv(C, C), pyg.GATConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).tanh()
        return self.sage(h, edge_index) + self.gat(h, edge_index)


class Several(nn.Module):
    """Returns rows of several layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = pyg.GINConv(mlp()), pyg.GCNConv(C, 3), kind

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index)
        out = self.second(h.relu(), edge_index)
        if self.kind == "dict":
            return {"hidden": h, "rest": [out, out.log_softmax(-1)]}
        return (out, h, x)


BROKEN: dict[str, tuple[Callable[[], nn.Module], Callable[[Plan], bool]]] = {
    "residual": (Residual, lambda plan: not plan.short_tail and plan.calls["second"].shortcuts == ALL),
    "residual GCN": (lambda: Residual(lambda: pyg.GCNConv(C, C)), lambda plan: not plan.short_tail),
    "cat": (lambda: pyg.GIN(C, C, 3, 4, jk="cat", norm="batch_norm"), lambda plan: not plan.short_tail),
    "max": (lambda: pyg.GraphSAGE(C, C, 3, 4, jk="max"), lambda plan: not plan.short_tail),
    "lstm": (lambda: pyg.GCN(C, C, 3, 4, jk="lstm"), lambda plan: not plan.short_tail),
    "last": (
        lambda: pyg.GIN(C, C, 3, 4, jk="last", norm="batch_norm"),
        lambda plan: plan.short_tail and plan.ignores_edges,
    ),
    "degrees": (Degrees, lambda plan: not plan.ignores_edges),
    "doubled weights": (Doubled, lambda plan: not plan.ignores_edges),
    "shared GIN": (lambda: Shared(lambda: pyg.GINConv(mlp())), lambda plan: plan.calls["layer#3"].shortcuts == ALL),
    "shared GCN": (lambda: Shared(lambda: pyg.GCNConv(C, C)), lambda plan: plan.short_tail),
    "mixing unfused": (lambda: Stack([Mixing(), Mixing()]), lambda plan: plan.calls["layers.0"].shortcuts == {"lazy"}),
    "mixing": (lambda: Stack([Mixing(1.0), Mixing(1.0)]), lambda plan: plan.calls["layers.1"].shortcuts == {"fused"}),
    "dense after": (
        lambda: Stack([Mixing(1.0, dense=True), Mixing(1.0, dense=True)]),
        lambda plan: plan.calls["layers.1"].shortcuts == {"fused"},
    ),
    "right": (
        lambda: Stack([Mixing(1.0, root=False), Mixing(1.0, root=False)]),
        lambda plan: plan.calls["layers.0"].shortcuts == {"short", "fused"},
    ),
    "wrong": (
        lambda: Stack([Mixing(1.5, root=False), Mixing(1.5, root=False)]),
        lambda plan: "fused" not in plan.calls["layers.0"].shortcuts | plan.calls["layers.1"].shortcuts,
    ),
    "wrong in the second layer": (
        lambda: Stack([Mixing(1.0, root=False), Mixing(1.5)]),
        lambda plan: "fused" in plan.calls["layers.0"].shortcuts and "fused" not in plan.calls["layers.1"].shortcuts,
    ),
    "parallel": (Parallel, lambda plan: plan.short_tail),
    "mixed": (Mixed, lambda plan: plan.calls["sage"].shortcuts == ALL),
    "tuple": (lambda: Several("tuple"), lambda plan: plan.ignores_edges),
    "dict": (lambda: Several("dict"), lambda plan: plan.ignores_edges),
}


@in_turn(BROKEN)
def test_shortcuts_are_dropped_where_they_would_change_something(name: str, make_data: Callable[..., Data]) -> None:
    make, expected = BROKEN[name]
    plan = check_same(make, make_data(dtype=torch.float64), tolerance=1e-10, infers=True)
    assert expected(plan), plan


class Refusing(MessagePassing):  # type: ignore[misc]
    """Insists on something by an assertion, as many layers do."""

    def __init__(self, what: str) -> None:
        super().__init__(aggr="sum")
        self.what, self.before, self.after = what, nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Any, edge_index: Tensor) -> Any:
        if self.what == "tensor":
            assert isinstance(x, Tensor)
        elif self.what == "edges":
            assert edge_index.size(1) > 0
        elif not isinstance(x, Tensor):
            raise KeyError("no pairs")
        return self.after(self.propagate(edge_index, x=x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


@pytest.mark.parametrize("what", ["tensor", "edges", "key"])
def test_layers_may_refuse_shortcuts_by_any_exception(what: str) -> None:
    check_same(lambda: Stack([Refusing(what), Refusing(what)]), undirected_graph(dtype=torch.float64), tolerance=1e-10)


class Asserting(nn.Module):
    """Checks its edges before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        assert edge_index.numel() > 0
        return self.conv(x, edge_index)


def test_models_may_refuse_empty_edges_by_an_assertion() -> None:
    plan = check_same(Asserting, undirected_graph(dtype=torch.float64), tolerance=1e-10)
    assert not plan.ignores_edges


class OnlyWhileTraining(nn.Module):
    """Looks at edges only while it trains: how it is tried in evaluation mode must not decide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.conv(x, edge_index)
        if self.training:
            h = h / (1 + degree(edge_index[1], x.size(0), x.dtype)[: h.size(0), None])
        return h


def test_edges_used_only_while_training_are_there() -> None:
    check_same(OnlyWhileTraining, undirected_graph(dtype=torch.float64), tolerance=1e-10)


class Hubs(nn.Module):
    """Treats nodes of a high degree, which the tiny graph does not have, in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.kinds = pyg.SAGEConv(C, C), nn.Embedding(2, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.conv(x, edge_index)
        hub = degree(edge_index[1], x.size(0))[: h.size(0)] >= 8
        return h + self.kinds(hub.long())


def test_edges_that_matter_for_few_nodes_only_are_there() -> None:
    data = undirected_graph(40, 160, dtype=torch.float64)
    assert int(degree(data.edge_index[1]).max()) >= 8
    check_same(Hubs, data, tolerance=1e-10)


class GuardedDropout(pyg.SAGEConv):  # type: ignore[misc]
    """Does something to its input while it trains, before it looks whether that is a pair."""

    def forward(self, x: Any, edge_index: Tensor) -> Any:
        if self.training:
            x = x * 1.5
        return super().forward(x, edge_index)


def test_layers_that_change_their_input_only_while_training() -> None:
    data = undirected_graph(dtype=torch.float64)
    check_same(lambda: Stack([GuardedDropout(C, C), GuardedDropout(C, C)]), data, tolerance=1e-10)


class DropsMessages(pyg.GCNConv):  # type: ignore[misc]
    """Inherits a way to aggregate in one go that knows nothing of the dropout on its messages."""

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Any:
        return super().message(F.dropout(x_j, 0.5, self.training), edge_weight)


def test_messages_that_change_only_while_training() -> None:
    data = undirected_graph(dtype=torch.float64)
    check_same(lambda: Stack([DropsMessages(C, C), DropsMessages(C, C)]), data, tolerance=1e-10)


class Detaching(Mixing):
    """Has the right rows, but no gradient, when it aggregates in one go."""

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Any:
        return spmm(edge_index, x.detach(), reduce="sum")


def test_fused_layers_with_another_gradient() -> None:
    data = undirected_graph(dtype=torch.float64)
    check_same(lambda: Stack([Detaching(1.0), Detaching(1.0)]), data, tolerance=1e-10)


class Shares(nn.Module):
    """Divides by what is zero in rows that nothing was computed for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.weight = pyg.SAGEConv(C, C), pyg.SAGEConv(C, C), nn.Parameter(torch.rand(C) + 0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).tanh()
        p = self.second(h, edge_index).square() * self.weight
        return torch.cat([p / p.sum(-1, keepdim=True), h], dim=-1)


def test_rows_that_nothing_was_computed_for_spoil_no_gradient() -> None:
    check_same(Shares, undirected_graph(dtype=torch.float64), tolerance=1e-10)


def test_pooled_output_is_refused_for_a_single_node_too() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.conv(x, edge_index).mean(0, keepdim=True)

    data = undirected_graph()
    model = gas.autoscale(Pooled(), data)
    with pytest.raises(UnsupportedModelError):
        model(parts(data).batch_for(torch.tensor([3])))


@pytest.mark.parametrize("layer", [lambda: pyg.GCNConv(C, C), lambda: pyg.GINConv(mlp())])
def test_single_nodes_and_no_nodes_at_all(layer: Make) -> None:
    data = odd_graph(dtype=torch.float64)
    model = Residual(layer).double()
    expected = whole(model, data)
    gas.autoscale(model, data)
    loader = parts(data)
    gas.refresh(model, loader)
    model.eval()
    for nodes in ([], [31], [5], [29]):
        out = model(loader.batch_for(torch.tensor(nodes, dtype=torch.long)))
        assert_same(out, expected[nodes], 1e-10)
        out.sum().backward()


# The rest of the library #############################################################################################


@pytest.mark.parametrize("name", ["GCN", "GIN", "APPNP", "GAT", "GATv2", "DirGNN"])
def test_penalty_is_the_same(name: str) -> None:
    values = []

    def run(model: nn.Module, batch: Data) -> Any:
        with gas.LocalLipschitz(model, radius=0.3) as penalty:
            out = model(batch)
        values.append(float(penalty.value().detach()))
        return (out, penalty.value().expand(batch.batch_size))

    check_same(lambda: stack(name), odd_graph(dtype=torch.float64), run=run, tolerance=1e-9)
    assert min(values) > 0
    assert values[: len(values) // 2] == pytest.approx(values[len(values) // 2 :])


@pytest.mark.parametrize("name", ["GCN", "GIN", "Graph mean weighted", "APPNP", "RGCN"])
def test_edge_dropout_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    matmul = FusedEdges.matmul

    def noted(self: FusedEdges, *args: Any, **kwargs: Any) -> Any:
        used.append(self)
        return matmul(self, *args, **kwargs)

    data = odd_graph(dtype=torch.float64)
    model = prepared(lambda: stack(name), data, loader := parts(data), edge_dropout=0.5)
    monkeypatch.setattr(FusedEdges, "matmul", noted)
    for batch in loader:
        model(batch)
    assert not used
    model.eval()
    for batch in loader:
        model(batch)
    assert used
    plan = check_prepared(model.train(), loader)
    assert any("fused" in call.shortcuts for call in plan.calls.values())


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer edges"])
def test_edge_dropout_of_lazy_edges_is_the_same(name: str) -> None:
    data = odd_graph(dtype=torch.float64)
    plan = check_same(lambda: stack(name), data, tolerance=1e-10, edge_dropout=0.5)
    assert all("lazy" in call.shortcuts for call in plan.calls.values())


class ReturnsAttention(pyg.GATv2Conv):  # type: ignore[misc]
    """Asks for the attention of each edge, and looks at it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        out, (_, attention) = super().forward(x, edge_index, return_attention_weights=True)
        assert type(attention) is Tensor
        return out * attention.size(1)


def test_attention_of_lazy_edges_is_a_plain_tensor() -> None:
    make = lambda: Stack([ReturnsAttention(C, C), ReturnsAttention(C, C)])  # noqa: E731
    plan = check_same(make, undirected_graph(dtype=torch.float64), tolerance=1e-10, infers=True)
    assert all(call.shortcuts == LAZY for call in plan.calls.values())


@pytest.mark.parametrize("make", [Mixed, Residual])
def test_edge_dropout_with_several_last_layers(make: Callable[[], nn.Module]) -> None:
    check_same(make, undirected_graph(dtype=torch.float64), tolerance=1e-10, edge_dropout=0.5)


@pytest.mark.parametrize(
    "name", ["GCN", "SAGE max", "GIN linear", "Graph mean weighted", "APPNP", "GAT", "GATv2", "Transformer"]
)
def test_autocast(name: str) -> None:
    def run(model: nn.Module, batch: Data) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float()

    data = undirected_graph()
    model = prepared(lambda: stack(name), data, loader := parts(data))
    for got, expected in with_and_without(model, lambda model: observed(model, loader, run)):
        assert got.keys() == expected.keys()
        norms = {key: float(torch.linalg.vector_norm(value.double())) for key, value in expected.items()}
        # Some gradients cancel out, as that of the bias of keys does, so that only rounding is left of them.
        rounding = 2e-3 * max(norm for key, norm in norms.items() if key.startswith("gradient"))
        for key in got:
            assert got[key].dtype == expected[key].dtype
            error = float(torch.linalg.vector_norm(got[key].double() - expected[key].double()))
            assert error <= 0.05 * norms[key] + rounding, key


@pytest.mark.parametrize("name", ["GCN", "GIN"])
def test_autocast_in_the_first_call(name: str) -> None:
    data = undirected_graph()
    model = gas.autoscale(stack(name), data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in parts(data):
            model(batch).float().square().sum().backward()
    assert plan_of(model).short_tail
    assert all(bool(value.grad.isfinite().all()) for value in model.parameters() if value.grad is not None)


def test_autocast_with_batch_norm() -> None:
    data = undirected_graph()
    model = gas.autoscale(pyg.GraphSAGE(C, C, 3, 4, norm="batch_norm"), data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in [*gas.HaloLoader(data, 4), *gas.HaloLoader(data, 1)]:
            assert bool(model(batch).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    data = undirected_graph(dtype=dtype)
    check_same(lambda: stack("Graph mean weighted"), data, tolerance=1e-5 if dtype == torch.float32 else 0.05)


# Modes of autograd ###################################################################################################


@pytest.mark.parametrize("name", ["GCN", "GIN", "APPNP", "GAT"])
def test_training_after_a_first_call_without_gradients(name: str) -> None:
    data = odd_graph(dtype=torch.float64)
    loader = parts(data)
    grads = []
    for mode in (None, torch.no_grad, torch.inference_mode):
        torch.manual_seed(3)
        model = gas.autoscale(stack(name).double(), data).eval()
        if mode is not None:
            with mode():
                for batch in loader:
                    model(batch)
            for history in attached(model).memory.histories.values():
                history.push(torch.zeros(33, history.width, dtype=history.dtype), torch.arange(33))
        for batch in loader:
            model(batch).square().sum().backward()
        grads.append([value.grad for value in model.parameters() if value.grad is not None])
    assert grads[0]
    for other in grads[1:]:
        for got, expected in zip(other, grads[0], strict=True):
            assert_same(got, expected, 1e-10)


@pytest.mark.parametrize(
    "name", ["GAT", "GATv2", "Transformer", "SAGE sum", "SAGE max", "GCN", "GIN", "Graph mean weighted", "APPNP"]
)
def test_gradients_of_gradients(name: str) -> None:
    """A penalty on the gradient of features or weights, as in adversarial training and meta-learning."""

    def gradients(model: nn.Module, batch: Data, of: str = "features") -> list[Tensor]:
        model.zero_grad()
        batch.x = batch.x.detach().requires_grad_(of == "features")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        inputs = [batch.x] if of == "features" else weights
        slopes = torch.autograd.grad(model(batch).square().sum(), inputs, create_graph=True, allow_unused=True)
        torch.stack([slope.square().sum() for slope in slopes if slope is not None]).sum().backward()  # type: ignore[no-untyped-call]
        return [value.grad for value in weights if value.grad is not None]

    data = odd_graph(dtype=torch.float64)
    model = prepared(lambda: stack(name), data, loader := parts(data), gradients)
    batch = next(iter(loader))
    for grads in with_and_without(model, lambda model: [gradients(model, batch, of) for of in ("features", "weights")]):
        assert grads[0]
        for got, expected in zip(*grads, strict=True):
            assert_same(got, expected, 1e-9)


def test_backward_twice_through_one_graph() -> None:
    data = undirected_graph(dtype=torch.float64)
    model = prepared(lambda: stack("SAGE max"), data, loader := parts(data))
    out = model(next(iter(loader))).square().sum()
    model.zero_grad()
    out.backward(retain_graph=True)
    once = [value.grad.clone() for value in model.parameters() if value.grad is not None]
    out.backward()
    for value, grad in zip(model.parameters(), once, strict=True):
        assert value.grad is not None
        assert_same(value.grad, 2 * grad, 1e-12)


def test_deep_copies_keep_their_shortcuts() -> None:
    data = undirected_graph(dtype=torch.float64)
    model = prepared(lambda: stack("Graph mean weighted"), data, loader := parts(data)).eval()
    copied, plain = copy.deepcopy(model), copy.deepcopy(model)
    assert plan_of(copied).ignores_edges
    plain(next(iter(loader)))  # makes the plan of evaluation
    switch_off(plain)
    for batch in loader:
        expected = plain(batch)
        assert_same(copied(batch), expected, 1e-10)
        assert_same(model(batch), expected, 1e-10)
    assert is_off(plain)
    assert not is_off(copied)


def test_rows_of_a_fused_sum_by_hand() -> None:
    data = odd_graph(dtype=torch.float64)
    expected = scatter(data.x[data.edge_index[0]], data.edge_index[1], 0, data.num_nodes, "sum")
    model = gas.autoscale(pyg.SimpleConv(aggr="sum"), data)
    for batch in parts(data):
        assert_same(model(batch.x, batch.edge_index), expected[batch.n_id[: batch.batch_size]], 1e-12)
    assert plan_of(model).calls["SimpleConv"].shortcuts == {"short", "fused"}


@pytest.mark.parametrize(
    ("name", "shortcuts"),
    [
        ("gcn", {"fused", "short"}),
        ("graphsage", {"fused", "short", "pair"}),
        ("gin", {"fused", "short", "pair"}),
        ("gcnii", {"fused", "short"}),
        ("appnp", {"fused"}),
        ("gat", {"lazy", "short"}),
    ],
)
def test_models_of_the_paper_take_shortcuts(name: str, shortcuts: set[str]) -> None:
    """Batch norm makes some gradients cancel out, so that only rounding is left of them."""
    data = undirected_graph()
    del data.edge_weight, data.edge_attr, data.edge_type
    norm = {"batch_norm": True} if "batch_norm" in model_options(name) else {}
    model = gas.autoscale(build_model(name, data, 3, layers=3, **norm), data)
    model(next(iter(gas.HaloLoader(data, num_parts=3))))
    plan = attached(model).plan
    assert plan is not None
    assert plan.ignores_edges
    assert {frozenset(call.shortcuts) for call in plan.calls.values()} == {frozenset(shortcuts)}
