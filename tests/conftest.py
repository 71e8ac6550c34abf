"""Tiny graphs and small helpers that several test files share."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.attach.autoscaler import attached, is_autoscaled
from gnnautoscale.planner.trial_graph import setups_for
from support import plans
from support.plans import plan_once

CHANNELS = 8
EDGE_CHANNELS = 3
NUM_RELATIONS = 3


@pytest.fixture(autouse=True)
def _cpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests expect a CPU's bits wherever they name no device, on machines with a GPU too."""
    monkeypatch.setattr("gnnautoscale.training.options.default_device", lambda: "cpu")


@pytest.fixture(autouse=True)
def _one_trial(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try models on one graph where a test is about something else, which takes half the time."""
    if request.path.parent.name not in ("planner", "forward"):
        monkeypatch.setattr("gnnautoscale.planner.planning.setups_for", lambda graph: setups_for(graph)[:1])


@pytest.fixture(scope="session", autouse=True)
def _folder_of_plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the processes that run tests side by side share their plans."""
    base = tmp_path_factory.getbasetemp()
    plans.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "plans"
    plans.folder.mkdir(exist_ok=True)


@pytest.fixture(autouse=True)
def _known_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take plans of equal models from tests before, unless plans are what the test is about."""
    about_plans = {"planner", "forward", "models", "graph", "test_autoscaler", "test_exactness", "test_typed_models"}
    if not about_plans & {request.path.parent.name, request.path.stem}:
        monkeypatch.setattr("gnnautoscale.attach.autoscaler.make_plan", plan_once)


def with_attributes(edge_index: Tensor, num_nodes: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Data:
    """A graph with every kind of attribute a layer may want."""
    generator = torch.Generator().manual_seed(seed)
    num_edges = edge_index.size(1)
    return Data(
        x=torch.randn(num_nodes, CHANNELS, generator=generator, dtype=dtype),
        edge_index=edge_index,
        edge_weight=torch.rand(num_edges, generator=generator, dtype=dtype) + 0.5,
        edge_attr=torch.rand(num_edges, EDGE_CHANNELS, generator=generator, dtype=dtype) + 0.5,
        edge_type=torch.randint(NUM_RELATIONS, (num_edges,), generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.6,
    )


def undirected_graph(
    num_nodes: int = 40, num_pairs: int = 70, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Data:
    """A random graph in which every edge has its reverse; the order of the edges is random."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(num_nodes, (2, num_pairs), generator=generator)
    pairs = pairs[:, pairs[0] != pairs[1]]
    ring = torch.stack([torch.arange(num_nodes), (torch.arange(num_nodes) + 1) % num_nodes])
    pairs = torch.unique(torch.cat([pairs.sort(dim=0).values, ring.sort(dim=0).values], dim=1), dim=1)
    edges = torch.cat([pairs, pairs.flip(0)], dim=1)
    edges = edges[:, torch.randperm(edges.size(1), generator=generator)]
    return with_attributes(edges, num_nodes, seed=seed, dtype=dtype)


def odd_graph(seed: int = 0, dtype: torch.dtype = torch.float32) -> Data:
    """A directed graph with isolated nodes, self-loops, double edges, sinks, sources and several components."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(18, (2, 50), generator=generator)
    second = torch.randint(18, 28, (2, 25), generator=generator)
    loops = torch.tensor([[1, 5, 20, 28], [1, 5, 20, 28]])  # node 28 has no other edge
    edges = torch.cat([first, second, loops, first[:, :3], torch.tensor([[29], [0]])], dim=1)  # 30 to 32: isolated
    edges = edges[:, torch.randperm(edges.size(1), generator=generator)]
    return with_attributes(edges, 33, seed=seed, dtype=dtype)


def directed_ring(num_nodes: int = 12) -> Data:
    """As many edges as nodes, so that one cannot tell them apart by counting."""
    nodes = torch.arange(num_nodes)
    return with_attributes(torch.stack([nodes, (nodes + 1) % num_nodes]), num_nodes)


def spread_norms(model: nn.Module, seed: int = 1) -> None:
    """Give every batch norm running statistics and weights that are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.copy_(0.5 * torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
            with torch.no_grad():
                module.weight.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
                module.bias.copy_(torch.randn(module.num_features, generator=generator))


def whole(model: nn.Module, data: Data) -> Any:
    """The full-batch output of a model that is not attached, in evaluation mode."""
    model.eval()
    assert not is_autoscaled(model)
    with torch.no_grad():
        return call_whole(model, data)


def call_whole(model: nn.Module, data: Data) -> Any:
    """Call a plain model with the arguments of its forward that the data has."""
    names = [name for name in inspect.signature(model.forward).parameters if name in data]
    return model(**{name: data[name] for name in names})


def assert_same(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to rounding, relative to the largest value."""
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * scale)


class Stack(nn.Module):
    """Layers one after another, with an activation between them."""

    def __init__(self, layers: list[nn.Module], edge_arguments: tuple[str, ...] = (), *, initial: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.edge_arguments = edge_arguments
        self.initial = initial  # whether layers also take the features the model started from

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        given = {"edge_weight": edge_weight, "edge_attr": edge_attr, "edge_type": edge_type}
        arguments = {name: given[name] for name in self.edge_arguments}
        first = x
        for number, layer in enumerate(self.layers):
            if number:
                x = torch.tanh(x)
            x = layer(x, first, edge_index, **arguments) if self.initial else layer(x, edge_index, **arguments)
        return x


class Counted(MessagePassing):  # type: ignore[misc]
    """Sums neighbours through a linear map and counts how often it passes messages, and for how many edges."""

    def __init__(self, in_channels: int = CHANNELS, out_channels: int = CHANNELS) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(in_channels, out_channels)
        self.calls = 0
        self.num_edges = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        out: Tensor = self.propagate(edge_index, x=x) + x
        return out

    def message(self, x_j: Tensor) -> Tensor:
        self.calls += 1
        self.num_edges += x_j.size(0)
        return x_j


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_configure() -> None:
    """Ctrl-C reaches the tests also where a shell has started them in the background, which ignores it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is there before the first test stays, and need not be looked through whenever training collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def undirected() -> Data:
    """A connected undirected graph of 40 nodes."""
    return undirected_graph()


@pytest.fixture
def odd() -> Data:
    """A directed graph with everything that is odd."""
    return odd_graph()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """The same goes for what the tests before have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def history_rows(model: nn.Module) -> dict[str, Tensor]:
    """All rows of all histories of a model."""
    memory = attached(model).memory
    index = memory._order.row_of if memory._order is not None else torch.arange(memory.num_nodes)
    return {
        name: history.pull(index, device=history.raw.device, dtype=history.dtype).cpu()
        for name, history in memory.histories.items()
    }


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is in memory."""

    def read(*_: Any) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", read)
