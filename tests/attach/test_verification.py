"""``gas.verify``: exact models verify as exact, planted faults are found and named, and nothing is touched."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, history_rows, odd_graph, spread_norms, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.verification import _error
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import OVERRIDES

C = CHANNELS

# The environment variable that says what the models of this file do wrong, separated by commas. Nothing about a model
# shows that it has changed, so plans that were made before go on being used.
FAULTS = "FAULTS_OF_TEST_MODELS"


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "")


def plant(fault: str) -> None:
    """Let models do something wrong for the rest of a test."""
    os.environ[FAULTS] = fault


def has_fault(*names: str) -> bool:
    """Whether one of these faults is planted."""
    return os.environ[FAULTS] in names


def attach(model: nn.Module, data: Data | None = None, num_parts: int = 5, **options: Any) -> gas.HaloLoader:
    """Attach histories and verify the model, so that all plans are made; returns the loader."""
    data = undirected_graph(60, 90) if data is None else data
    loader = gas.HaloLoader(data, num_parts, partition="random")
    gas.autoscale(model, data, **options)
    assert gas.verify(model, loader, nodes=2).exact
    return loader


def centred(x: Tensor, fault: str, module: nn.Module) -> Tensor:
    """The rows less their mean, which differs from batch to batch, if that is among the faults for its mode."""
    mode = "training" if module.training else "evaluation"
    return x - x.mean(0) if has_fault(fault, f"{fault} in {mode}") else x


class Net(nn.Module):
    """Three layers with norm and dropout, and places for faults between them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(C, C) for _ in range(3))
        self.norm = nn.BatchNorm1d(C)
        spread_norms(self)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if has_fault("noise"):
            x = x + torch.randn_like(x)
        if has_fault("in sweeps") and not torch.is_grad_enabled() and x.size(0) < 60:
            x = x + 1.0
        for number, conv in enumerate(self.convs):
            x = conv(centred(x, f"before {number}", self), edge_index)
            if number < 2:
                x = F.dropout(self.norm(x).tanh(), 0.5, self.training)
        return centred(x, "after the last", self)


@cache
def net() -> tuple[Net, gas.HaloLoader]:
    """A model and its loader for tests that only verify it, which leaves it as it is."""
    model = Net()
    return model, attach(model)


# Exact models ########################################################################################################


def gin() -> Any:
    return pyg.GIN(C, C, num_layers=3, out_channels=4, norm="batch_norm", dropout=0.3)


def appnp() -> Any:
    return pyg.Sequential(
        "x, edge_index",
        [
            (nn.Linear(C, C), "x -> x"),
            nn.Dropout(0.5),
            (pyg.APPNP(K=4, alpha=0.2), "x, edge_index -> x"),
            (pyg.GCNConv(C, 3), "x, edge_index -> x"),
        ],
    )


EXACT: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg.GCN(C, 16, num_layers=3, out_channels=4, dropout=0.5),
    "GAT": lambda: pyg.GAT(C, 16, num_layers=2, out_channels=4, heads=2, dropout=0.5),
    "GIN with batch norms": gin,
    "APPNP": appnp,
    "jumping knowledge": lambda: pyg.GCN(C, 16, num_layers=3, out_channels=4, jk="lstm", dropout=0.2),
    "norms and dropout": Net,
    "one layer": lambda: pyg.SAGEConv(C, 3),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_models_are_exact(name: str) -> None:
    model = EXACT[name]()
    spread_norms(model)
    loader = gas.HaloLoader(undirected_graph(60, 90), 5, partition="random")
    gas.autoscale(model, loader.data)
    for batches in (loader, gas.HaloLoader(loader.data, 1)):
        found = gas.verify(model, batches, nodes=20)
        assert found.exact
        assert found.inference < 1e-5
        assert found.training is not None
        assert found.training < 1e-5
        assert (found.nodes, found.how, found.layer, found.note) == (20, "the whole graph", None, "")


def test_a_model_that_was_never_called_and_a_loader_that_shuffles() -> None:
    data = odd_graph()
    model = gas.autoscale(pyg.GCN(C, 16, num_layers=3, out_channels=4), data)
    loader = gas.HaloLoader(data, 6, partition="random", batch_size=2, shuffle=True)
    found = gas.verify(model, loader)
    assert found.exact
    assert found.nodes == data.num_nodes, "there are no more to draw"


@pytest.mark.parametrize("called", [True, False])
def test_another_graph(called: bool) -> None:
    model = Net()
    if called:
        attach(model)
    else:
        gas.autoscale(model, undirected_graph())
    other = gas.HaloLoader(odd_graph(), 4, partition="random")
    assert gas.verify(model, other).exact
    plant("before 1")
    assert not gas.verify(model, other).exact


def test_a_model_that_names_its_own_slots() -> None:
    class Explicit(gas.ScalableGNN):
        def __init__(self) -> None:
            super().__init__(60, hidden_channels=C, num_layers=2)
            self.first, self.second = pyg.SAGEConv(C, C), pyg.SAGEConv(C, 4)

        def forward(self, x: Tensor, adj_t: Tensor, n_id: Tensor) -> Tensor:
            x = self.push_and_pull(self.histories[0], self.first(x, adj_t).relu(), n_id)
            out: Tensor = self.second(centred(x, "before the second", self), adj_t)
            return out

    model = Explicit()
    loader = gas.HaloLoader(undirected_graph(60, 90), 5, partition="random")
    assert gas.verify(model, loader).exact
    plant("before the second")
    assert gas.verify(model, loader).layer == "SAGEConv ('second')"


def test_own_call_and_several_outputs() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(60, C)
            self.conv = pyg.GCNConv(C, C)

        def forward(self, edges: Tensor, who: Tensor) -> dict[str, Tensor]:
            rows = self.conv(self.table(who), edges)
            return {"rows": rows, "cube": rows.view(-1, 2, C // 2), "largest": rows.argmax(1)}

    data = undirected_graph(60, 90)
    loader = gas.HaloLoader(data, 5, partition="random")
    model = gas.autoscale(Embedded(), data)
    found = gas.verify(model, loader, call=lambda model, batch: model(batch.edge_index, batch.n_id))
    assert found.exact
    assert found.training is not None


# Faults ##############################################################################################################


@pytest.mark.parametrize(
    ("fault", "mode", "layer"),
    [
        ("before 0", "", "GCNConv ('convs.0')"),
        ("before 1", "", "GCNConv ('convs.1')"),
        ("before 1", " in training", "GCNConv ('convs.1')"),
        ("before 1", " in evaluation", "GCNConv ('convs.1')"),
        ("before 2", "", "GCNConv ('convs.2')"),
        ("after the last", "", None),
        ("after the last", " in training", None),
        ("after the last", " in evaluation", None),
    ],
)
def test_a_fault_is_found_and_its_layer_named(fault: str, mode: str, layer: str | None) -> None:
    model, loader = net()
    plant(fault + mode)
    found = gas.verify(model, loader)
    assert not found.exact
    assert found.layer == layer
    assert found.training is not None
    assert (found.inference > 0.01) == (mode != " in training")
    assert (found.training > 0.01) == (mode != " in evaluation")
    assert (found.inference < 1e-5) == (mode == " in training")
    assert (found.training < 1e-5) == (mode == " in evaluation")


def test_rows_in_histories_are_compared_too() -> None:
    """The first layer's rows in a step are right, but those that a sweep has written are not."""
    model, loader = net()
    plant("in sweeps")
    found = gas.verify(model, loader)
    assert not found.exact
    assert found.layer == "GCNConv ('convs.0')"


def test_a_single_part_computes_global_things_right() -> None:
    model = Net()
    loader = attach(model, num_parts=1)
    plant("before 1")
    assert gas.verify(model, loader).exact


class Powers(pyg.MessagePassing):  # type: ignore[misc]
    """Propagates twice, with a place for a fault in between."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.propagate(edge_index, x=x)
        out: Tensor = self.propagate(edge_index, x=centred(x, "between propagations", self))
        return out


class Outer(pyg.MessagePassing):  # type: ignore[misc]
    """A layer that calls another one, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.inner(centred(self.inner(x, edge_index), "inside", self), edge_index)
        return out


@pytest.mark.parametrize(
    ("layer", "fault", "named"),
    [
        (Powers, "between propagations", "Powers ('module_0')"),
        (Outer, "inside", "SAGEConv ('module_0>module_0.inner#2')"),
    ],
)
def test_faults_inside_layers(layer: Callable[[], nn.Module], fault: str, named: str) -> None:
    model = pyg.Sequential(
        "x, edge_index", [(layer(), "x, edge_index -> x"), nn.Tanh(), (pyg.GCNConv(C, 4), "x, edge_index -> x")]
    )
    loader = attach(model)
    assert gas.verify(model, loader).exact
    plant(fault)
    found = gas.verify(model, loader)
    assert not found.exact
    assert found.layer == named


def test_a_layer_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.conv(centred(self.conv(x, edge_index), "in between", self), edge_index)
            return out

    model = Twice()
    loader = attach(model)
    plant("in between")
    assert gas.verify(model, loader).layer == "SAGEConv ('conv#2')"


def test_only_the_given_nodes_are_looked_at() -> None:
    class Odd(nn.Module):
        """Wrong for nodes with odd numbers in every batch."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Tensor:
            out: Tensor = self.conv(x, edge_index)
            return out + (n_id % 2)[: out.size(0)].unsqueeze(1) if has_fault("odd") and n_id.numel() < 60 else out

    model = Odd()
    loader = attach(model)
    plant("odd")
    assert gas.verify(model, loader, nodes=torch.tensor([2, 58, 2])).exact
    assert gas.verify(model, loader, nodes=torch.tensor([2, 58, 2])).nodes == 2
    assert not gas.verify(model, loader, nodes=torch.tensor([2, 59])).exact
    verdicts = [gas.verify(model, loader, nodes=1, seed=seed).exact for seed in (*range(8), *range(8))]
    assert verdicts[:8] == verdicts[8:]
    assert len(set(verdicts)) == 2, "other seeds draw other nodes"


# Chance and precision ################################################################################################


def test_random_evaluation_is_refused() -> None:
    plant("noise")
    data = undirected_graph()
    model = gas.autoscale(Net(), data)
    with pytest.raises(UnsupportedModelError, match="random in evaluation mode"):
        gas.verify(model, gas.HaloLoader(data, 4))


def test_random_evaluation_that_nobody_noticed_is_found() -> None:
    model, loader = net()
    plant("noise")
    found = gas.verify(model, loader)
    assert not found.exact
    assert found.inference > 0.01
    assert found.training is not None
    assert found.training < 1e-5, "noise is constant in training steps"
    assert found.layer == "GCNConv ('convs.0')"


class Random(Net):
    """Draws random numbers in training: noise for every row, a row of noise for all, and which layers to leave out."""

    def __init__(self, draw: Callable[[], float], share: float) -> None:
        super().__init__()
        self.draw, self.share = draw, share

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            x = x * torch.randn_like(x) + torch.rand(x.size(0), 1) + torch.randint(9, (C,))
        for conv in self.convs:
            if not self.training or self.draw() >= self.share:
                x = conv(centred(F.dropout(x, 0.5, self.training).tanh(), "in between", self), edge_index)
        return x


@pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(()))])
def test_random_training_is_compared_without_chance(draw: Callable[[], float]) -> None:
    model = Random(draw, 0.4)
    loader = attach(model)
    found = gas.verify(model, loader)
    assert found.exact
    assert found.training is not None
    assert found.training < 1e-5
    plant("in between in training")
    found = gas.verify(model, loader)
    assert found.inference < 1e-5
    assert found.training is not None
    assert found.training > 0.01
    assert found.layer == "GCNConv ('convs.0')"


def test_steps_that_always_leave_out_layers_are_not_compared() -> None:
    model = Random(lambda: 0.0 if has_fault("never") else 1.0, 0.4)
    loader = attach(model)
    plant("never")
    found = gas.verify(model, loader)
    assert found.exact
    assert found.training is None
    assert "leaves out some of them at random in every step" in str(found)


def test_a_model_that_cannot_be_trained_is_compared_in_inference() -> None:
    """What is refused because of chance is refused here too, and still is when training begins."""
    data = undirected_graph(60, 90)
    model = gas.autoscale(pyg.APPNP(K=2, alpha=0.1, dropout=0.5), data)
    loader = gas.HaloLoader(data, 5, partition="random")
    found = gas.verify(model, loader)
    assert found.exact
    assert found.training is None
    assert str(found).startswith("exact in inference: ")
    assert "Training steps were not compared: APPNP" in found.note
    with pytest.raises(UnsupportedModelError, match="same edges and edge weights"):
        model(next(iter(loader)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 0.01), (torch.bfloat16, 0.05), (torch.int8, 0.1), (torch.float8_e4m3fn, 0.2)],
)
def test_coarse_histories_have_a_coarser_tolerance(dtype: torch.dtype, tolerance: float) -> None:
    model = Net()
    loader = attach(model, dtype=dtype)
    found = gas.verify(model, loader)
    assert found.exact
    assert found.precision == str(dtype).removeprefix("torch.")
    assert found.tolerance == tolerance
    assert 1e-5 < found.inference < tolerance, "histories are rounded, so this is more than float32's rounding"
    assert gas.verify(model, gas.HaloLoader(loader.data, 1)).tolerance == 1e-4, "one part uses no histories"


def test_double_precision_has_a_finer_one() -> None:
    model = Net().double()
    found = gas.verify(model, attach(model, undirected_graph(60, 90, dtype=torch.double)))
    assert (found.precision, found.tolerance) == ("float64", 1e-6)
    assert found.exact
    assert found.inference < 1e-12


def test_in_inference_mode() -> None:
    model = Net()
    loader = attach(model)
    with torch.inference_mode():
        found = gas.verify(model, loader)
    assert found.exact
    assert found.training is not None
    model(next(iter(loader))).sum().backward()


def test_autocast_is_left_out() -> None:
    model, loader = net()
    with torch.autocast("cpu", torch.bfloat16):
        found = gas.verify(model, loader)
    assert found.precision == "float32"
    assert found.exact


def test_errors_are_relative_to_their_column() -> None:
    exact = torch.tensor([[1e4, 1.0, 0.0], [5e3, 2.0, 0.0]])
    for column, off, expected in ((0, 1.0, 1e-4), (1, 1.0, 0.01), (2, 1.0, 0.01)):
        found = exact.clone()
        found[0, column] += off
        # The largest value of a column, or a hundredth of the largest of all.
        assert _error(found, exact) == pytest.approx(expected)
    assert _error(exact, exact[:1]) == math.inf
    assert _error(exact[:0], exact[:0]) == 0.0
    assert _error(torch.zeros(2), torch.zeros(2)) == 0.0


def test_values_that_are_not_finite() -> None:
    both = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    assert _error(both, both.clone()) == 0.0
    assert _error(both, torch.tensor([[1.0, 1.0], [torch.inf, 2.0]])) == math.inf
    assert _error(torch.ones(2, 2), both) == math.inf


# Nothing is touched ##################################################################################################


class Stateful(Net):
    """Keeps all kinds of state that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(C))
        self.calls, self.sizes, self.last = 0, [0], torch.zeros(1)
        self.nested: dict[str, Any] = {"rows": [torch.zeros(1)], "all": {0}}

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.calls += 1
        self.sizes.append(x.size(0))
        self.last = x.detach()
        self.nested["rows"][0] += 1.0
        self.nested["rows"].append(x.detach())
        self.nested["all"].add(x.size(0))
        self.seen += 1.0
        return super().forward(x, edge_index)


# Attributes whose copies would not be equal: hooks, which refer to the model, and what is compared by itself.
SHARED = OVERRIDES | {"_modules", "_parameters", "inspector"}


def everything(model: nn.Module) -> dict[str, Any]:
    """All state of a model and of the process, as copies."""
    return {
        "weights": copy.deepcopy(model.state_dict()),
        "gradients": {name: copy.deepcopy(weight.grad) for name, weight in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "attributes": {
            name: {key: value if key in SHARED else copy.deepcopy(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()
        },
        "histories": history_rows(model),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True)[1],  # type: ignore[index]  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }


def assert_equal(before: Any, after: Any) -> None:
    """The same values, bit for bit."""
    assert type(before) is type(after)
    if isinstance(before, Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, np.ndarray):
        assert np.array_equal(before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for name in before:
            assert_equal(before[name], after[name])
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_equal(one, other)
    elif not isinstance(before, nn.Module):
        assert before == after


def test_everything_is_as_before() -> None:
    model = Stateful()
    loader = attach(model)
    for batch in loader:  # leaves gradients and stale histories
        model(batch).sum().backward()
    model.train()
    model.norm.eval()
    before, buffer, calls = everything(model), model.seen, attached(model).calls
    for fault in ("", "before 1", "noise"):
        plant(fault)
        gas.verify(model, loader, nodes=10)
        assert_equal(before, everything(model))
        assert model.seen is buffer
        assert attached(model).calls is calls, "those of training steps"


def test_generated_code_is_not_mixed_up() -> None:
    """PyG's Sequential names its code by a random number: models made before and after must not share it."""
    model = appnp()
    gas.verify(model, attach(model))
    other = pyg.Sequential("x, edge_index", [(pyg.SAGEConv(C, 2), "x, edge_index -> x")])
    data = undirected_graph()
    assert other(data.x, data.edge_index).shape == (40, 2)
    state = random.getstate()
    attached(model).bare_copy()
    assert random.getstate() == state


def test_a_pass_that_waits_for_its_gradient() -> None:
    """Nothing that autograd has saved is written to."""
    model = Net()
    loader = attach(model)
    model.train()
    loss = model(next(iter(loader))).square().sum()
    gas.verify(model, loader, nodes=10)
    loss.backward()


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    def train(verifying: bool) -> list[float]:
        torch.manual_seed(3)
        model = Net()
        loader = attach(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = []
        for batch in loader:
            model.train()
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if verifying:
                gas.verify(model, loader, nodes=5)
        return losses

    assert train(True) == train(False)


# Input and words #####################################################################################################


@pytest.mark.parametrize("nodes", [0, -1, True, 2.0, torch.tensor([], dtype=torch.long)])
def test_wrong_numbers_of_nodes(nodes: Any) -> None:
    model, loader = net()
    with pytest.raises(InputError, match="at least 1, or"):
        gas.verify(model, loader, nodes=nodes)


@pytest.mark.parametrize("nodes", [torch.tensor([60]), torch.tensor([-1]), torch.tensor([0.0]), torch.tensor([[1]])])
def test_wrong_nodes(nodes: Tensor) -> None:
    model, loader = net()
    with pytest.raises(InputError, match="nodes must"):
        gas.verify(model, loader, nodes=nodes)


def test_a_plain_model_and_a_plain_graph_are_refused() -> None:
    data, model = undirected_graph(), Net()
    with pytest.raises(InputError, match="must be autoscaled"):
        gas.verify(model, gas.HaloLoader(data, 4))
    gas.autoscale(model, data)
    with pytest.raises(InputError, match="loader must be a HaloLoader"):
        gas.verify(model, data)


def test_a_plain_copy_that_does_not_run() -> None:
    model, loader = net()
    with pytest.raises(InputError, match=r"plain copy of the model.*Pass the same call"):
        gas.verify(model, loader, call=lambda _, batch: model(batch))  # not the model that it is given


def test_words() -> None:
    found = gas.Verification(
        nodes=7,
        how="the whole graph",
        inference=0.25,
        training=3e-7,
        layer="GCNConv ('convs.1')",
        precision="float32",
        tolerance=1e-4,
        exact=False,
    )
    assert str(found) == (
        "NOT exact: 7 nodes recomputed on the whole graph, largest relative error 0.25 in inference, 3e-07 in "
        "training steps (rounding in float32: up to 0.0001). The first layer with other rows is GCNConv ('convs.1'): "
        "look at it, and at what comes before it."
    )
    assert str(dataclasses.replace(found, inference=0.0, layer=None, exact=True)) == (
        "exact: 7 nodes recomputed on the whole graph, largest relative error 0 in inference, 3e-07 in training steps "
        "(rounding in float32: up to 0.0001)."
    )
    assert "after the last one" in str(dataclasses.replace(found, layer=None))
