"""Which places get a history, which models are refused with the culprit named, and what a trial leaves behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import add_self_loops, dropout_edge, to_undirected  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, EDGE_CHANNELS, Stack, assert_same, odd_graph, undirected_graph, whole
from gnnautoscale._util import undisturbed
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.exchange import PlanOnly, run_pass
from gnnautoscale.forward.plan import Plan
from gnnautoscale.planner.understudy import seed_everything
from support.oracle import Outcome, outcome

C = CHANNELS
CPU = torch.device("cpu")


def plan_of(model: nn.Module) -> Plan:
    data = undirected_graph()
    gas.autoscale(model, data)
    model(next(iter(gas.HaloLoader(data, 4))))
    plan = attached(model).plan
    assert plan is not None
    return plan


# Placement ###########################################################################################################


def test_history_at_the_output_of_every_layer_but_the_last() -> None:
    plan = plan_of(
        Stack(
            [
                pyg.GCNConv(C, C),
                pyg.GATConv(C, C),
                pyg.PNAConv(C, C, ["mean"], ["identity"], torch.ones(3, dtype=torch.long)),
            ]
        )
    )
    assert plan.live == {"layers.0", "layers.1"}
    assert plan.levels == [{"layers.0"}, {"layers.1"}]
    assert plan.needs == {
        "layers.0": frozenset(),
        "layers.1": {"layers.0"},
        "layers.2": {"layers.1"},
        Plan.OUTPUT: {"layers.2"},
    }
    assert not plan.inner


@pytest.mark.parametrize(
    ("make", "live"),
    [
        (lambda: pyg.APPNP(3, 0.1), {"layers.0/0", "layers.0/1", "layers.0/2", "layers.1/0", "layers.1/1"}),
        (lambda: pyg.SGConv(C, C, K=2), {"layers.0/0", "layers.0/1", "layers.1/0"}),
        (lambda: pyg.GatedGraphConv(C, 2), {"layers.0/0", "layers.0/1", "layers.1/0"}),
        (lambda: pyg.MFConv(C, C), {"layers.0"}),
        (lambda: pyg.DirGNNConv(pyg.SAGEConv(C, C)), {"layers.0.conv_in", "layers.0.conv_out"}),
    ],
    ids=["APPNP", "SG", "GatedGraph", "MF", "DirGNN"],
)
def test_history_at_inner_propagations_only_where_needed(make: Callable[[], Any], live: set[str]) -> None:
    plan = plan_of(Stack([make(), make()]))
    assert plan.live == live
    assert plan.inner == ({"layers.0", "layers.1"} if any("/" in slot for slot in live) else set())


def test_several_propagations_over_one_hop_need_no_inner_history() -> None:
    """RGCN propagates once per relation, but only from its own input."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = pyg.RGCNConv(C, C, 3), pyg.RGCNConv(C, C, 3)

        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Any:
            return self.second(self.first(x, edge_index, edge_type), edge_index, edge_type)

    assert plan_of(Model()).live == {"first"}


def test_branches_share_a_level() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.unused = (pyg.SAGEConv(C, C) for _ in range(4))

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.c(self.a(x, edge_index) + self.b(x, edge_index), edge_index)

    plan = plan_of(Model())
    assert plan.levels == [{"a", "b"}]


def test_shared_layer_has_a_history_per_call() -> None:
    layer = pyg.GCNConv(C, C)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            for _ in range(3):
                x = self.layer(x, edge_index).tanh()
            return x

    assert plan_of(Model()).levels == [{"layer"}, {"layer#2"}]


# Refusals ############################################################################################################


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self, middle: nn.Module | Callable[[Tensor], Any], *, after: bool = False) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(C, C), pyg.SAGEConv(C, C)
        self.middle = middle
        self.after = after

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.first(x, edge_index)
        if not self.after:
            x = self.middle(x)
        x = self.second(x, edge_index)
        return self.middle(x) if self.after else x


class GlobalMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0)


def refused(model: nn.Module, match: str, *, call: Callable[..., Any] | None = None) -> None:
    data = undirected_graph()
    gas.autoscale(model, data)
    batch = next(iter(gas.HaloLoader(data, 4)))
    with pytest.raises(UnsupportedModelError, match=match):
        call(model, batch) if call else model(batch)
    assert attached(model).plan is None
    assert not attached(model).memory.histories


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.GraphNorm(C),
        lambda: pyg.LayerNorm(C, mode="graph"),
        lambda: pyg.PairNorm(),
        lambda: pyg.InstanceNorm(C),
        lambda: pyg.MeanSubtractionNorm(),
        lambda: pyg.GraphSizeNorm(),
        lambda: GlobalMean(),
        lambda: nn.Softmax(dim=0),
    ],
)
def test_norms_over_all_nodes_are_refused(make: Callable[[], nn.Module]) -> None:
    norm = make()
    after = isinstance(norm, (pyg.GraphNorm, pyg.InstanceNorm, GlobalMean, nn.Softmax))
    refused(
        Between(norm, after=after), rf"{type(norm).__name__} \('middle.*must compute the same rows.*mixes all nodes"
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: F.normalize(x, dim=0),
        lambda x: x.softmax(0),
        lambda x: x.flip(0),
        lambda x: x.sort(0)[0],
    ],
)
def test_functions_over_all_nodes_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    rule = "every row of the model must depend on its node's neighbourhood only"
    refused(Between(function), rf"{rule}.*something before SAGEConv \('second'\) that mixes all nodes of a batch")
    refused(Between(function, after=True), f"{rule}.*something after the last layer that mixes all nodes of a batch")


def test_global_term_that_starts_at_zero_is_refused_too() -> None:
    """Gates are often initialized with zero; the model would turn wrong while it trains."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, C)
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = self.conv(x, edge_index)
            return x + self.gate * x.mean(0)

    refused(Gated(), "must depend on its node's neighbourhood")


def test_pooled_outputs_are_refused() -> None:
    data = undirected_graph()
    model = gas.autoscale(Between(lambda x: pyg.global_mean_pool(x, None), after=True), data)
    with pytest.raises(UnsupportedModelError, match="returns one row per node, but got an output of shape"):
        model(next(iter(gas.HaloLoader(data, 4))))


def test_outputs_without_tensors_are_refused() -> None:
    data = undirected_graph()
    nothing: Any = lambda x: "text"  # noqa: E731
    model = gas.autoscale(Between(nothing, after=True), data)
    with pytest.raises(UnsupportedModelError, match="returns a tensor, or a tuple"):
        model(next(iter(gas.HaloLoader(data, 4))))


@pytest.mark.parametrize(
    ("layer", "edge_arguments", "name"),
    [
        (
            lambda: pyg.GPSConv(C, pyg.GCNConv(C, C), heads=2, norm=None),
            (),
            r"MultiheadAttention \('layers\.0\.attn'\), attention over all nodes of a batch.*GATConv",
        ),
        (lambda: pyg.PDNConv(C, C, EDGE_CHANNELS, 4), ("edge_attr",), r"PDNConv \('layers\.0'\)"),
    ],
    ids=["GPS", "PDN"],
)
def test_layers_beyond_the_neighbourhood_are_refused(
    layer: Callable[[], Any], edge_arguments: tuple[str, ...], name: str
) -> None:
    refused(Stack([layer(), layer()], edge_arguments), name)


class Nearest(MessagePassing):  # type: ignore[misc]
    """Finds its own edges among all rows, as DynamicEdgeConv does."""

    def __init__(self) -> None:
        super().__init__(aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        near = torch.cdist(x, x).topk(3, largest=False).indices
        target = torch.arange(x.size(0)).repeat_interleave(3)
        return self.propagate(torch.stack([near.flatten(), target]), x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_layers_that_find_their_own_edges_are_refused() -> None:
    refused(Stack([Nearest(), Nearest()]), r"Nearest \('layers\.[01]'\)")


@pytest.mark.parametrize(
    "layer",
    [
        pyg.GCNConv(C, C, cached=True),
        pyg.SGConv(C, C, cached=True),
        pyg.APPNP(3, 0.1, cached=True),
        pyg.GCN2Conv(C, 0.1, cached=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_cached_edges_are_refused_at_once(layer: nn.Module) -> None:
    model = Stack([pyg.SAGEConv(C, C), layer])
    name = type(layer).__name__
    with pytest.raises(UnsupportedModelError, match=rf"{name} \('layers\.1'\).*cached=True.*cached=False"):
        gas.autoscale(model, undirected_graph())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("model", [nn.Linear(3, 4), pyg.MLP([3, 4])])
def test_models_without_message_passing_are_refused_at_once(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match=f"at least one message-passing layer.*{type(model).__name__}"):
        gas.autoscale(model, 40)


def test_edge_dropout_of_a_layer_is_refused() -> None:
    refused(
        Stack([pyg.APPNP(3, 0.1, dropout=0.5)]),
        r"APPNP \('layers\.0'\) must pass the same edges and edge weights.*edge_dropout=p",
    )


class DropsItsEdges(MessagePassing):  # type: ignore[misc]
    """Drops edges by itself while it trains; the recorded edges must not undo that silently."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        edge_index, _ = dropout_edge(edge_index, p=0.9, training=self.training)
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_layer_that_drops_its_edges_is_refused() -> None:
    refused(Stack([DropsItsEdges()]), "DropsItsEdges")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        if self.training:
            edge_index, _ = dropout_edge(edge_index, p=0.5)
        return self.conv(x, edge_index)


def test_edges_dropped_in_training_are_refused() -> None:
    data = undirected_graph()
    model = gas.autoscale(Dropping(), data)
    batch = next(iter(gas.HaloLoader(data, 4)))
    model.eval()
    assert model(batch).size(0) == batch.batch_size
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"GCNConv \('conv'\).*edge_dropout=p"):
        model(batch)


class Weighted(nn.Module):
    """Computes or changes edge weights before its layers."""

    def __init__(self, layer: Callable[..., Any], how: str) -> None:
        super().__init__()
        self.first, self.second = layer(C, C), layer(C, C)
        self.weigh = nn.Sequential(nn.Linear(EDGE_CHANNELS, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())
        self.how = how

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Any:
        if self.how == "learned":
            edge_weight = self.weigh(edge_attr).squeeze(-1)
        elif self.how == "scaled":
            edge_weight = edge_weight * 2.0
        elif self.how == "in place":
            edge_weight.mul_(2.0)
        return self.second(self.first(x, edge_index, edge_weight).tanh(), edge_index, edge_weight)


@pytest.mark.parametrize("how", ["learned", "scaled", "in place"])
def test_changed_weights_before_a_normalizing_layer_are_refused(how: str) -> None:
    refused(Weighted(pyg.GCNConv, how), r"GCNConv \('first'\)")


def test_changed_weights_before_other_layers_are_exact() -> None:
    data = odd_graph()
    for how in ("learned", "scaled"):
        model = Weighted(pyg.GraphConv, how)
        expected = whole(model, data)
        gas.autoscale(model, data)
        for num_parts in (1, 5):
            assert_same(gas.infer(model, gas.HaloLoader(data, num_parts, partition="random")), expected)


def test_learned_weights_learn() -> None:
    data = odd_graph()
    model = Weighted(pyg.GraphConv, "learned")
    model(data.x, data.edge_index, data.edge_weight, data.edge_attr).square().sum().backward()
    expected = [value.grad.clone() for value in model.parameters() if value.grad is not None]
    model.zero_grad()
    gas.autoscale(model, data)
    model(next(iter(gas.HaloLoader(data, 1)))).square().sum().backward()
    got = [value.grad for value in model.parameters() if value.grad is not None]
    assert any(bool(value.grad.abs().max() > 0) for value in model.weigh.parameters() if value.grad is not None)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)
    model.zero_grad()
    for batch in gas.HaloLoader(data, 4):
        model(batch).square().sum().backward()
    assert all(value.grad is not None and bool(value.grad.abs().max() > 0) for value in model.weigh.parameters())


def test_gradient_of_given_weights_is_refused() -> None:
    """A batch's edge weights that need a gradient must not be replaced by constants in silence."""
    data = undirected_graph()
    model = gas.autoscale(pyg.GCN(C, C, 2, 4), data)
    batch = next(iter(gas.HaloLoader(data, 1)))
    with pytest.raises(UnsupportedModelError, match=r"GCNConv \('convs\.0'\)"):
        model(batch.x, batch.edge_index, edge_weight=batch.edge_weight.clone().requires_grad_())


class Derived(nn.Module):
    """Changes the edges before its layers."""

    def __init__(self, layer: Callable[[], Any], change: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = layer(), layer(), change

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        edge_index = self.change(edge_index, x.size(0))
        return self.second(self.first(x, edge_index).tanh(), edge_index)


def gin() -> Any:
    return pyg.GINConv(nn.Linear(C, C))


def test_self_loops_added_before_a_layer_are_exact() -> None:
    data = odd_graph()
    model = Derived(gin, lambda edges, num_nodes: add_self_loops(edges, num_nodes=num_nodes)[0])
    expected = whole(model, data)
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, 6, partition="random")), expected)


def test_self_loops_added_before_a_normalizing_layer_are_refused() -> None:
    refused(Derived(lambda: pyg.GCNConv(C, C), lambda edges, n: add_self_loops(edges, num_nodes=n)[0]), "GCNConv")


def test_edges_made_undirected_before_a_layer_are_refused() -> None:
    """In a batch of a directed graph, edges from the batch are missing, so their reverse is too."""
    model = gas.autoscale(Derived(gin, lambda edges, n: to_undirected(edges, num_nodes=n)), odd_graph())
    with pytest.raises(UnsupportedModelError, match=r"GINConv \('first'\) needs the batch's own edges.*once, in data"):
        gas.infer(model, gas.HaloLoader(odd_graph(), 6, partition="random"))


def test_two_way_layers_need_a_two_sided_halo_on_directed_graphs() -> None:
    data = odd_graph()
    model = gas.autoscale(Stack([pyg.DirGNNConv(pyg.SAGEConv(C, C))]), data)
    with pytest.raises(UnsupportedModelError, match=r"SAGEConv.*bidirectional=True"):
        gas.infer(model, gas.HaloLoader(data, 5, partition="random"))


def test_attention_weights_are_refused() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.GATConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.conv(x, edge_index, return_attention_weights=True)

    refused(Attending(), r"layer 'conv' must return one floating-point row.*attention weights")


def test_lstm_aggregation_is_refused() -> None:
    """PyG pads it to the largest degree of all nodes, and the padding changes its result."""
    data = undirected_graph()
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index = data.edge_index[:, order]
    model = gas.autoscale(Stack([pyg.SAGEConv(C, C, aggr="lstm")]), data)
    with pytest.raises(UnsupportedModelError, match=r"SAGEConv \('layers.0'\) must compute the same rows"):
        model(next(iter(gas.HaloLoader(data, 4))))


class OftenerInEvaluation(pyg.MessagePassing):  # type: ignore[misc]
    """Propagates twice, but not in training."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out if self.training else out + self.propagate(edge_index, x=x)


def test_another_number_of_propagations_in_training_is_exact_in_both_modes() -> None:
    data = undirected_graph(dtype=torch.float64)
    assert outcome(lambda: Stack([OftenerInEvaluation(), OftenerInEvaluation()]), data) == Outcome("exact")


# What a trial leaves behind ##########################################################################################


def random_numbers() -> list[float]:
    """What everything random would give next."""
    with undisturbed(CPU):
        return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002


def plan_only(model: nn.Module, batch: Data) -> None:
    """Try a model, without its own call afterwards."""
    with attached(model).running(PlanOnly()):
        assert run_pass(lambda: model(batch)) is None
    assert attached(model).plan is not None


def test_state_of_the_model_survives_its_trial() -> None:
    """Being tried on tiny graphs leaves weights, statistics, modes and random numbers alone."""
    data = undirected_graph()
    model = pyg.GIN(C, 6, 3, 4, norm="batch_norm", dropout=0.5).train()
    model.norms[0].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    gas.autoscale(model, data)
    batch = next(iter(gas.HaloLoader(data, 4)))
    numbers = random_numbers()
    plan_only(model, batch)
    assert random_numbers() == numbers
    assert [module.training for module in model.modules()] == modes
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(value.grad is None for value in model.parameters())


class Journal(nn.Module):
    """Keeps notes of all kinds about its calls, which change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GATConv(C, C), pyg.SAGEConv(C, C)
        self.calls, self.sizes, self.last = 0, [0], dict[str, Tensor]()
        self.rows: Tensor | None = None
        self.config = SimpleNamespace(steps=0)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen: set[int] = set()

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.first(x, edge_index).tanh()
        self.calls += 1
        self.config.steps += 1
        self.sizes.append(x.size(0))
        self.seen.add(x.size(0))
        self.last["rows"] = self.rows = x
        self.steps += 1
        return self.second(x, edge_index)


@pytest.mark.parametrize("training", [True, False])
def test_notes_of_a_model_are_those_of_its_own_calls(training: bool) -> None:
    data = undirected_graph()
    model: Any = gas.autoscale(Journal(), data).train(training)
    batch = next(iter(gas.HaloLoader(data, 4)))
    plan_only(model, batch)
    assert (model.calls, model.config.steps, model.sizes, model.seen) == (0, 0, [0], set())
    assert (model.last, model.rows, int(model.steps)) == ({}, None, 0)
    model(batch)
    model(batch)
    count = batch.num_nodes
    assert (model.calls, model.config.steps, model.sizes, model.seen) == (2, 2, [0, count, count], {count})
    assert model.last["rows"] is model.rows
    assert int(model.steps) == 2


class Caching(nn.Module):
    """Computes its first layer only once, which is right as long as it sees one graph, as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(C, C), pyg.SAGEConv(C, C)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        if self.kept is None:
            self.kept = self.first(x, edge_index).detach()
        return self.second(self.kept, edge_index)


def test_a_refused_model_is_as_it_was() -> None:
    model = Caching()
    numbers = random_numbers()
    refused(model, "must not depend on what an earlier one computed from its batch, but got kept, which the forward")
    assert model.kept is None
    assert random_numbers() == numbers


def test_lazy_layers_get_weights_and_nothing_else() -> None:
    """The same as in full batch from the same seed, and the same random numbers afterwards."""
    data = undirected_graph()

    def lazy() -> Any:
        torch.manual_seed(5)
        model = Stack([pyg.GCNConv(-1, 6), pyg.SAGEConv((-1, -1), 6), Between(nn.LazyLinear(6)), pyg.GATConv(-1, 4)])
        model.layers[2].first = model.layers[2].second = pyg.SAGEConv(-1, 6)
        return model

    plain, model = lazy(), lazy()
    torch.manual_seed(6)
    plain(data.x, data.edge_index)
    numbers = random_numbers()
    names = [vars(module).keys() for module in plain.modules()]
    gas.autoscale(model, data)
    torch.manual_seed(6)
    plan_only(model, next(iter(gas.HaloLoader(data, 4))))
    assert random_numbers() == numbers
    for (name, weight), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, expected), name
    assert_same(gas.infer(model, gas.HaloLoader(data, 4)), whole(plain, data))
    gas.detach(model)
    assert [vars(module).keys() for module in model.modules()] == names
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


# Layers that are skipped at random ###################################################################################


class StochasticDepth(nn.Module):
    """Leaves out layers at random while it trains."""

    def __init__(self, skips: Callable[[], bool]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.SAGEConv(C, C) for _ in range(3))
        self.skips = skips

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            if not (self.training and self.skips()):
                x = x + conv(x, edge_index).tanh()
        return x


@pytest.mark.parametrize(
    "skips", [lambda: random.random() < 0.5, lambda: bool(torch.rand(()) < 0.7)], ids=["Python", "PyTorch"]
)
def test_layers_that_are_skipped_at_random_are_exact(skips: Callable[[], bool]) -> None:
    data = undirected_graph(dtype=torch.float64)
    plain = StochasticDepth(skips).double().train()
    model = gas.autoscale(copy.deepcopy(plain), data)
    loader = gas.HaloLoader(data, 4, partition="random")
    patterns = set()
    for seed in range(6):
        with torch.no_grad(), undisturbed(CPU):
            seed_everything(seed, CPU)
            patterns.add(tuple(skips() for _ in range(3)))
            seed_everything(seed, CPU)
            expected = plain(data.x, data.edge_index)
            for _ in range(3):  # until histories hold what these layers compute
                outputs = []
                for batch in loader:
                    seed_everything(seed, CPU)
                    outputs.append((batch.n_id[: batch.batch_size], model(batch)))
        for nodes, rows in outputs:
            assert_same(rows, expected[nodes], 1e-10)
    assert len(patterns) > 2
    assert_same(gas.infer(model, loader), whole(plain, data), 1e-10)


def test_layers_that_the_graph_decides_about_are_refused() -> None:
    """On some trial graphs they run, on others they do not."""

    class ByDegree(Between):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = self.first(x, edge_index)
            return self.second(x, edge_index) if edge_index.size(1) < 100 else x

    refused(ByDegree(nn.Identity()), "makes the same layer calls on every graph, but got a model that does not call")
