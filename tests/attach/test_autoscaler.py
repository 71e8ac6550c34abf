"""Attaching, detaching, calling, and what is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import (
    CHANNELS,
    Stack,
    assert_same,
    call_whole,
    directed_ring,
    history_rows,
    odd_graph,
    undirected_graph,
    whole,
)
from gnnautoscale.attach import autoscaler as autoscaler_module
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import memory as memory_module
from gnnautoscale.forward.plan import Plan
from gnnautoscale.graph.graph import Graph

C = CHANNELS


def gcn(**options: Any) -> Any:
    return pyg.GCN(C, 6, num_layers=3, out_channels=4, **options)


def first_batch(data: Data, num_parts: int = 4) -> Data:
    return next(iter(gas.HaloLoader(data, num_parts)))


def exact(model: nn.Module, data: Data, num_parts: int = 5) -> None:
    expected = whole(model, data)
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, num_parts, partition="random")), expected)


# Attach and detach ###################################################################################################


def attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


def test_detaching_gives_the_model_back() -> None:
    data = undirected_graph()
    model = gcn(norm="batch_norm", jk="cat").eval()
    before, names = attributes(model), list(model.state_dict())
    expected = call_whole(model, data)
    assert gas.autoscale(model, data) is model
    assert list(model.state_dict()) == names
    gas.infer(model, gas.HaloLoader(data, 3))
    assert gas.detach(model) is model
    assert attributes(model) == before
    assert list(model.state_dict()) == names
    assert model.forward.__func__ is type(model).forward
    assert torch.equal(call_whole(model, data), expected)


def test_an_instances_own_forward_comes_back() -> None:
    """Other libraries replace ``forward`` on instances too."""
    data = undirected_graph()
    model = gcn().eval()
    original = model.forward

    def doubled(x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = original(x, edge_index)
        return out * 2

    model.forward = doubled
    expected = model(data.x, data.edge_index).detach()
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, 3)), expected)
    gas.detach(model)
    assert_same(model(data.x, data.edge_index), expected)


def test_weights_are_trained_in_place() -> None:
    data = undirected_graph()
    model = gcn()
    weights = list(model.parameters())
    before = [value.detach().clone() for value in weights]
    gas.autoscale(model, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(first_batch(data)).square().sum().backward()
    optimizer.step()
    gas.detach(model)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_attaching_twice_is_refused_and_again_after_detaching_is_not() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn(), data)
    with pytest.raises(InputError, match="autoscaled only once, and only as a whole, but got GCN, which is, or"):
        gas.autoscale(model, data)
    gas.detach(model)
    with pytest.raises(InputError, match="must be autoscaled, but got GCN"):
        gas.detach(model)
    other = odd_graph()
    exact(model, other)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.inner(x, edge_index)


def test_attaching_around_or_inside_an_attached_model_is_refused() -> None:
    data = undirected_graph()
    inner = gas.autoscale(gcn(), data)
    with pytest.raises(InputError, match="belongs to, an autoscaled model"):
        gas.autoscale(Wrapper(inner), data)
    outer = gas.autoscale(Wrapper(gcn()), data)
    with pytest.raises(InputError, match="belongs to, an autoscaled model"):
        gas.autoscale(outer.inner, data)


def test_deep_copies_are_independent() -> None:
    data = undirected_graph()
    loader = gas.HaloLoader(data, 4)
    model = gas.autoscale(gcn(), data.num_nodes)
    expected = gas.infer(model, loader)
    copied = copy.deepcopy(model)
    assert torch.equal(gas.infer(copied, loader), expected)
    copied.convs[0].lin.weight.data.mul_(3.0)
    copied.train()
    changed = gas.infer(copied, loader)
    assert not torch.allclose(changed, expected)
    assert torch.equal(gas.infer(model, loader), expected)
    gas.detach(copied)
    assert_same(whole(copied, data), changed)
    assert attached(model).session is None


def test_state_moves_between_plain_and_attached_models() -> None:
    data = undirected_graph()
    trained, plain, fresh = gas.autoscale(gcn(), data), gcn(), gas.autoscale(gcn(), data)
    plain.load_state_dict(trained.state_dict())
    fresh.load_state_dict(plain.state_dict())
    loader = gas.HaloLoader(data, 4)
    assert_same(gas.infer(fresh, loader), gas.infer(trained, loader), 1e-7)
    assert_same(gas.infer(fresh, loader), whole(plain, data))


def test_bad_arguments_are_refused_at_once() -> None:
    model = gcn()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "GCN"}, "model must be a Module, but got 'GCN'"),
        ({"model": pyg.GCN}, "model must be a Module"),
        ({"data": 0}, "a Data, or a HeteroData, but got 0"),
        ({"data": -3}, "a HeteroData, but got -3"),
        ({"data": True}, "a HeteroData, but got True"),
        ({"data": 3.5}, "a HeteroData, but got 3.5"),
        ({"data": None}, "a HeteroData, but got None"),
        ({"dtype": torch.int64}, "floating-point rows, or eight bits with a scale for each row, but got torch.int64"),
        ({"edge_dropout": 1.0}, "at least 0 and below 1, but got 1.0"),
        ({"edge_dropout": -0.1}, "at least 0 and below 1"),
        ({"edge_dropout": float("nan")}, "at least 0 and below 1"),
        ({"storage": "tape"}, "storage must be one of device, host, disk, auto, but got 'tape'"),
        ({"storage": "disk"}, "histories on disk need a folder"),
    ]
    for arguments, message in cases:
        given: dict[str, Any] = {"model": model, "data": undirected_graph(), **arguments}
        with pytest.raises(InputError, match=message):
            gas.autoscale(**given)
        assert "forward" not in vars(model)


def test_bad_graph_is_refused() -> None:
    data = undirected_graph()
    data.edge_weight[3] = float("nan")
    with pytest.raises(InputError, match="edge_weight must be finite"):
        gas.autoscale(gcn(), data)


# Calling #############################################################################################################


def test_one_row_per_node_of_the_batch() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn().eval(), data)
    for batch in gas.HaloLoader(data, 4, batch_size=2):
        out = model(batch.x, batch.edge_index, edge_weight=batch.edge_weight)
        assert out.shape == (batch.batch_size, 4)


CALLS: list[Callable[[nn.Module, Data], Tensor]] = [
    lambda model, batch: model(batch),
    lambda model, batch: model(batch.x, batch.edge_index, batch.edge_weight),
    lambda model, batch: model(x=batch.x, edge_index=batch.edge_index, edge_weight=batch.edge_weight),
    lambda model, batch: model(batch.to("cpu")),
    lambda model, batch: model(batch.x, batch.edge_index.to("cpu"), batch.edge_weight.to("cpu", copy=True)),
    lambda model, batch: model(batch.x.clone(), batch.edge_index.clone(), batch.edge_weight.clone()),
    lambda model, batch: model(batch.clone()),
]


def test_ways_to_call_a_model() -> None:
    """Passed one by one, by name or as a batch, moved or copied: the model sees the same edges and weights."""
    data = undirected_graph()
    model = Stack([pyg.GCNConv(C, C), pyg.GCNConv(C, C)], ("edge_weight",))
    expected = whole(model, data)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 3)
    gas.refresh(model, loader)
    for call in CALLS:
        for batch in loader:
            assert_same(call(model, batch), expected[batch.n_id[: batch.batch_size]])


def test_batch_of_another_loader_of_the_same_graph_is_accepted() -> None:
    data = undirected_graph()
    model = gcn()
    expected = whole(model, data)
    gas.autoscale(model, data)
    gas.infer(model, gas.HaloLoader(data, 3))
    batch = next(iter(gas.HaloLoader(data.clone(), 7, partition="random")))
    assert_same(model(batch), expected[batch.n_id[: batch.batch_size]])


def test_batch_of_another_graph_is_refused() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn(), 40)
    model(first_batch(data))
    reweighted = data.clone()
    reweighted.edge_weight = data.edge_weight + 1
    for other in (odd_graph(), undirected_graph(seed=1), reweighted):
        with pytest.raises(InputError, match=r"takes batches of its training graph, which has 40 nodes.*gas.infer"):
            model(first_batch(other))


def test_whole_graph_is_refused() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn(), data)
    for arguments in ((data.x, data.edge_index), (data,), ()):
        with pytest.raises(InputError, match=r"must be called with a batch of a HaloLoader.*gas.infer"):
            model(*arguments)


def test_mixed_batches_are_refused() -> None:
    data = undirected_graph()
    model = gas.autoscale(Stack([pyg.GCNConv(C, C)], ("edge_weight",)), data)
    first, second = gas.HaloLoader(data, partition=torch.arange(40) % 2)
    model(first)
    with pytest.raises(InputError, match="same batch"):
        model(first.x, first.edge_index, second.edge_weight)


def test_missing_arguments_are_named() -> None:
    class Needy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor, timestamps: Tensor) -> Any:
            return self.conv(x, edge_index)

    model = gas.autoscale(Needy(), 40)
    with pytest.raises(InputError, match=r"required argument of Needy.forward, but got a batch without timestamps"):
        model(first_batch(undirected_graph()))


def test_rows_of_the_batch_alone_are_refused() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn(), data)
    batch = first_batch(data)
    with pytest.raises(
        InputError, match=rf"each of the {batch.num_nodes} nodes.*{batch.batch_size} nodes of the batch"
    ):
        model(batch.x[: batch.batch_size], batch.edge_index)


def test_another_width_gets_another_history() -> None:
    data = undirected_graph()
    model = gas.autoscale(Stack([pyg.SAGEConv(C, C), pyg.SAGEConv(C, C)]), data)
    loader = gas.HaloLoader(data, 4, partition="random")
    gas.infer(model, loader)
    assert [history.width for history in attached(model).memory.histories.values()] == [C]
    model.layers[0], model.layers[1] = pyg.SAGEConv(C, 5), pyg.SAGEConv(5, C)
    out = gas.infer(model, loader)
    assert [history.width for history in attached(model).memory.histories.values()] == [5]
    gas.detach(model)
    assert_same(out, whole(model, data))


def test_failed_call_leaves_the_model_usable() -> None:
    data = undirected_graph()
    model = gcn()
    expected = whole(model, data)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4)
    gas.infer(model, loader)
    batch = first_batch(data)
    with pytest.raises(InputError, match="shapes cannot be multiplied"):
        model(batch.x[:, :3], batch.edge_index, edge_weight=batch.edge_weight)
    assert_same(gas.infer(model, loader), expected)


# Changes of the model ################################################################################################


class Adjustable(nn.Module):
    """Has numbers and a flag to change, and dropout so that its modes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = pyg.SAGEConv(C, C), pyg.SAGEConv(C, C), nn.Dropout(0.5)
        self.scale, self.doubled = 1.0, False

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.drop(self.first(x, edge_index)) * self.scale
        return self.second(2 * x if self.doubled else x, edge_index)


def plan_in_use(model: nn.Module, batch: Data) -> Plan:
    model(batch)
    plan = attached(model).plan
    assert plan is not None
    return plan


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attempts to make plans, and to confirm them."""
    seen: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*args, **options)

        return run

    for name in ("make_plan", "still_holds"):
        monkeypatch.setattr(autoscaler_module, name, noting(name, getattr(autoscaler_module, name)))
    return seen


def test_each_mode_has_its_plan(tried: list[str]) -> None:
    data = undirected_graph()
    model, batch = gas.autoscale(Adjustable(), data), first_batch(data)
    training, evaluation = plan_in_use(model.train(), batch), plan_in_use(model.eval(), batch)
    assert training is not evaluation
    assert plan_in_use(model.train(), batch) is training
    assert plan_in_use(model.eval(), batch) is evaluation
    model.train()
    gas.infer(model, gas.HaloLoader(data, 4))  # in evaluation mode
    assert attached(model).plan is evaluation
    assert tried == ["make_plan"] * 2


def test_a_number_confirms_a_plan_and_a_flag_makes_one(tried: list[str]) -> None:
    data = undirected_graph()
    model, batch = gas.autoscale(Adjustable(), data), first_batch(data)
    first = plan_in_use(model, batch)
    model.scale = 3.0
    second = plan_in_use(model, batch)
    assert tried == ["make_plan", "still_holds"]
    model.scale = 1.0
    assert plan_in_use(model, batch) is first
    model.doubled = True
    plan_in_use(model, batch)
    assert tried == ["make_plan", "still_holds", "make_plan"]
    model.scale, model.doubled = 3.0, False
    assert plan_in_use(model, batch) is second
    assert tried == ["make_plan", "still_holds", "make_plan"]


def test_few_plans_are_kept() -> None:
    """A number may change in every step."""
    data = undirected_graph()
    model, batch = gas.autoscale(Adjustable(), data).eval(), first_batch(data)
    plans = []
    for number in range(20):
        model.scale = 1.0 + number
        plans.append(ref(plan_in_use(model, batch)))
    gc.collect()
    assert sum(plan() is not None for plan in plans) == 16
    assert attached(model).plan is plans[-1]()


def test_replaced_methods_of_attached_layers_are_refused() -> None:
    data = undirected_graph()
    model, batch = gas.autoscale(Adjustable(), data), first_batch(data)
    model(batch)
    model.first.forward = lambda x, edge_index: x
    with pytest.raises(InputError, match=r"must stay as they are.*got another first\.forward.*gas\.detach"):
        model(batch)


# Two inputs for one batch ############################################################################################


def test_two_inputs_for_one_batch_are_warned_of() -> None:
    """A history has room for the rows of one of them."""
    data = undirected_graph()
    model, batch = gas.autoscale(gcn(), data), first_batch(data)
    model(batch.x, batch.edge_index)
    with pytest.warns(UserWarning, match="ran on one batch with two different inputs and the same weights"):
        model(batch.x.flip(0), batch.edge_index)


def test_other_calls_are_not_warned_of() -> None:
    """Warnings are errors in these tests."""
    data = undirected_graph()
    model = gas.autoscale(gcn(), data)
    first, second, *_ = gas.HaloLoader(data, 4)
    for batch in (first, second, first):
        model(batch.x, batch.edge_index)
    model(first.x.clone(), first.edge_index)  # equal values
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    model(first.x.flip(0), first.edge_index)  # another step


# Models that users write #############################################################################################


def test_model_that_is_a_layer() -> None:
    exact(pyg.GCNConv(C, 4), undirected_graph())


def test_pyg_sequential() -> None:
    data = undirected_graph()
    model = pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(C, C), "x, edge_index -> x"),
            nn.ReLU(inplace=True),
            (pyg.GCNConv(C, 4), "x, edge_index -> x"),
        ],
    ).eval()
    expected = model(data.x, data.edge_index).detach()
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4)
    out = gas.infer(model, loader, call=lambda model, batch: model(batch.x, batch.edge_index))
    assert_same(out, expected)


class Nested(nn.Module):
    """Layers in dictionaries, in modules in modules, and one layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({"gcn": pyg.GCNConv(C, C), "gat": pyg.GATConv(C, C)})
        self.block = Wrapper(Wrapper(pyg.GraphSAGE(C, C, num_layers=2)))
        self.shared = pyg.GCNConv(C, C)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.act(self.kinds["gcn"](x, edge_index))
        x = self.block(x, edge_index) + self.kinds["gat"](x, edge_index)
        for _ in range(3):
            x = self.act(self.shared(x, edge_index)) + x
        return {"scores": x, "kinds": (x > 0).long()}["scores"]


def test_nested_and_shared_modules() -> None:
    exact(Nested(), odd_graph())


class Embedded(nn.Module):
    """Takes classes and node numbers, and looks both up."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.classes, self.nodes = nn.Embedding(4, C), nn.Embedding(num_nodes, C)
        self.convs = nn.ModuleList(pyg.GCNConv(C, C) for _ in range(3))

    def forward(self, y: Tensor, edge_index: Tensor, n_id: Tensor) -> Any:
        x = self.classes(y) + self.nodes(n_id)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


@pytest.mark.parametrize("num_nodes", [5, 40])
def test_embeddings_of_classes_and_nodes(num_nodes: int) -> None:
    data = undirected_graph(num_nodes)
    model = Embedded(num_nodes).eval()
    expected = model(data.y, data.edge_index, torch.arange(num_nodes)).detach()
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, 5)), expected)


def test_integer_nodes_where_edges_are_as_many_as_rows() -> None:
    """Nodes and edges cannot always be told apart by counting."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.conv = nn.Embedding(4, C), pyg.GCNConv(C, C)

        def forward(self, y: Tensor, edge_index: Tensor) -> Any:
            return self.conv(self.classes(y), edge_index)

    exact(Typed(), directed_ring(), 1)


class TakesData(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(C, C) for _ in range(2))
        self.names = names

    def forward(self, data: Data) -> Any:
        x = data.x
        for conv in self.convs:
            x = conv(x, data.edge_index, data.edge_weight).tanh()
        for name in self.names:
            x = x * data[name]
        return x


@pytest.mark.parametrize("make_data", [odd_graph, directed_ring])
def test_model_that_takes_data(make_data: Callable[[], Data]) -> None:
    data = make_data()
    model = TakesData().eval()
    expected = model(data).detach()
    gas.autoscale(model, data)
    for num_parts in (1, 5):
        assert_same(gas.infer(model, gas.HaloLoader(data, num_parts)), expected)


def test_model_that_takes_data_with_graph_level_attributes() -> None:
    data = undirected_graph()
    data.scalar, data.one, data.several, data.number = torch.tensor(3.0), torch.full((1,), 3.0), torch.arange(8.0), 3
    model = TakesData("scalar", "one", "several", "number").eval()
    expected = model(data).detach()
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, 4)), expected)


def test_inputs_may_be_written_to() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.APPNP(3, 0.1)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.conv(x.mul_(0.5), edge_index)

    data = undirected_graph()
    model = Writing()
    expected = model(data.x.clone(), data.edge_index)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4)
    for _ in range(2):
        assert_same(gas.infer(model, loader), expected)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(C, C) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        for conv in self.convs:
            x = checkpoint(conv, x, edge_index, use_reentrant=False).tanh()
        return x


def deep_gcn() -> nn.Module:
    def layer() -> nn.Module:
        made: nn.Module = pyg.DeepGCNLayer(pyg.GCNConv(C, C), nn.LayerNorm(C), nn.Tanh(), "res", ckpt_grad=True)
        return made

    return Stack([layer(), layer()])


@pytest.mark.parametrize("make", [Checkpointed, deep_gcn])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.checkpoint")
def test_checkpointed_layers_are_refused(make: Callable[[], nn.Module]) -> None:
    """A layer that runs again in the backward pass would find neither its edges nor its histories."""
    data = undirected_graph()
    model = gas.autoscale(make(), data).train()
    batch = first_batch(data)
    out = model(batch.x.clone().requires_grad_(), batch.edge_index)
    with pytest.raises(UnsupportedModelError, match="but got a call outside it, by hand or by gradient checkpointing"):
        out.square().sum().backward()


def test_parameters_may_be_absent() -> None:
    exact(Stack([pyg.SimpleConv(aggr="mean"), pyg.LGConv()]), odd_graph())


def test_number_of_nodes_is_enough() -> None:
    data = undirected_graph()
    model = gcn()
    expected = whole(model, data)
    gas.autoscale(model, 40)
    assert_same(gas.infer(model, gas.HaloLoader(data, 4)), expected)


# torch.compile #######################################################################################################


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about its compiler
def test_torch_compile_leaves_an_autoscaled_model_as_it_is() -> None:
    data = undirected_graph()
    torch.manual_seed(0)
    model = gas.autoscale(pyg.GCN(CHANNELS, 8, num_layers=3, out_channels=4), data)
    loader = gas.HaloLoader(data, num_parts=3)
    compiled = torch.compile(model, backend="eager")
    for batch in [*loader, *loader]:
        expected = model(batch.x, batch.edge_index)
        assert torch.equal(compiled(batch.x, batch.edge_index), expected)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", ["wrapped", "in place", "inside"])
def test_a_compiled_model_is_refused(how: str) -> None:
    model = pyg.GCN(CHANNELS, 8, num_layers=2, out_channels=4)
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.convs[0].compile(backend="eager")
    with pytest.raises(gas.UnsupportedModelError, match=r"torch\.compile has wrapped"):
        gas.autoscale(model, undirected_graph())


def test_histories_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    data = undirected_graph()
    model = gas.autoscale(gcn(), data)
    monkeypatch.setattr(memory_module, "open_history", no_room)
    with pytest.raises(InputError, match=r"device memory must have room.*99 bytes.*'convs.0'.*storage='disk'"):
        gas.refresh(model, gas.HaloLoader(data, 3))


def test_visits_of_graphs_are_nested() -> None:
    data, other = undirected_graph(), odd_graph()
    scaler = attached(gas.autoscale(gcn(), data))
    here, there = Graph.of(data), Graph.of(other)
    with scaler.visiting(there, apart=True) as outer:
        with scaler.visiting(here, apart=True) as inner:
            assert scaler.memory_of(here) is inner
        assert scaler.memory_of(there) is outer
    with pytest.raises(InputError, match="batches of"):
        scaler.memory_of(there)
    assert scaler.memory_of(here) is scaler.memory


def test_a_twin_shares_nothing_that_changes() -> None:
    data = undirected_graph()
    model = gas.autoscale(gcn(), data).eval()
    loader = gas.HaloLoader(data, 3)
    gas.refresh(model, loader)
    before = history_rows(model)
    twin = attached(model).twin(loader.graph, "gradient")
    assert attached(twin).compensate == "gradient"
    assert attached(model).compensate == "none"
    assert not twin.training
    for batch in loader:
        twin(batch).sum().backward()
    assert all(torch.equal(rows, before[slot]) for slot, rows in history_rows(model).items())
    assert all(weight.grad is None for weight in model.parameters())
    assert any(weight.grad is not None for weight in twin.parameters())
    assert attached(twin).memory.last_gradients
    assert not attached(model).memory.last_gradients
