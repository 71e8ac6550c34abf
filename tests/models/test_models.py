"""The paper's models: what they compute, what their options change, and that histories keep them exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.models import APPNP, GAT, GCN, GCNII, GIN, MODELS, build_model, model_options
from gnnautoscale.training.optimizer import make_optimizer
from gnnautoscale.training.options import Optimization

FEATURES, CLASSES, NODES = 5, 3, 12
WEIGHTED = {"gcn", "gcnii", "appnp"}
UNTYPED = sorted(MODELS.keys() - {"rgcn"})
SMALL: dict[str, dict[str, Any]] = {name: {"hidden": 4, "layers": 3} for name in UNTYPED}
SMALL["gat"] = {"hidden": 4, "layers": 3, "heads": 2}


def small_graph(*, weighted: bool = False) -> Data:
    """A directed graph of 12 nodes: a ring, chords, a double edge, a self-loop; node 11 has no edge."""
    ring = [(i, (i + 1) % 11) for i in range(11)]
    edges = torch.tensor([*ring, (0, 5), (5, 0), (2, 7), (2, 7), (9, 4), (3, 3), (8, 1)]).t().contiguous()
    generator = torch.Generator().manual_seed(0)
    data = Data(x=torch.randn(NODES, FEATURES, generator=generator), edge_index=edges)
    if weighted:
        data.edge_weight = torch.rand(edges.size(1), generator=generator) + 0.5
    return data


def build(name: str, data: Data | None = None, **options: Any) -> Any:
    """A small model by its name; typed as anything, since each class has modules of its own."""
    torch.manual_seed(1)
    return build_model(name, small_graph() if data is None else data, CLASSES, **{**SMALL[name], **options})


def settle(model: Any) -> Any:
    """Give batch norms statistics that are not those of a fresh model."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            for name in ("running_mean", "running_var", "weight", "bias"):
                value = torch.rand(module.num_features, generator=generator) + 0.5
                getattr(module, name).data.copy_(value)
    return model


def call(model: nn.Module, data: Data) -> Tensor:
    """The output in evaluation mode."""
    model.eval()
    weights = () if data.edge_weight is None else (data.edge_weight,)
    with torch.no_grad():
        out: Tensor = model(data.x, data.edge_index, *weights)
    return out


# Building ############################################################################################################


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_one_row_per_node_and_one_column_per_class(name: str, layers: int) -> None:
    out = call(build(name, layers=layers), small_graph())
    assert out.shape == (NODES, CLASSES)
    assert bool(out.isfinite().all())
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_model_sees_as_far_as_it_has_layers(name: str, layers: int) -> None:
    """On a directed path, a change at its start reaches as many nodes further as there are layers."""
    path = torch.stack([torch.arange(7), torch.arange(1, 8)])
    data = Data(x=torch.randn(8, FEATURES), edge_index=path)
    model = build(name, data, layers=layers)
    before = call(model, data)
    data.x[0] += 3.0
    changed = (call(model, data) != before).any(1)
    assert changed.tolist() == [node <= layers for node in range(8)]


@pytest.mark.parametrize("name", UNTYPED)
def test_dropout_acts_in_training_only(name: str) -> None:
    data, model = small_graph(), build(name, dropout=0.5)
    assert torch.equal(call(model, data), call(model, data))
    model.train()
    assert not torch.equal(model(data.x, data.edge_index), model(data.x, data.edge_index))


@pytest.mark.parametrize("name", UNTYPED)
def test_without_dropout_training_draws_nothing(name: str) -> None:
    options = {"batch_norm": False} if "batch_norm" in model_options(name) else {}
    data, model = small_graph(), build(name, dropout=0.0, **options)
    state = torch.get_rng_state()
    torch.testing.assert_close(model.train()(data.x, data.edge_index), call(model, data))
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_models_are_refused() -> None:
    with pytest.raises(gas.InputError, match="gcn, graphsage, gin"):
        build_model("gnc", small_graph(), CLASSES)
    with pytest.raises(gas.InputError, match="gcn, graphsage, gin"):
        model_options("gnc")


@pytest.mark.parametrize("name", ["gcn", "gat"])
@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 0},
        {"hidden": 2.0},
        {"hidden": True},
        {"layers": 0},
        {"layers": -1},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": math.nan},
        {"depth": 3},
    ],
    ids=str,
)
def test_bad_options_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(gas.InputError, match=next(iter(options))):
        build(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gat", {"heads": 0}),
        ("gat", {"out_heads": 0}),
        ("gat", {"residual": True}),
        ("gat", {"batch_norm": True}),
        ("appnp", {"alpha": 1.5}),
        ("appnp", {"alpha": math.nan}),
        ("appnp", {"drop_input": True}),
        ("gcnii", {"alpha": -0.5}),
        ("gcnii", {"theta": -2.0}),
        ("gcnii", {"linear": True}),
        ("gin", {"linear": True}),
        ("gcn", {"heads": 2}),
        ("gcn", {"shared_weights": True}),
        ("pna", {"aggregators": ["middle"]}),
        ("pna", {"aggregators": []}),
        ("pna", {"scalers": ["squared"]}),
        ("pna", {"scalers": []}),
        ("pna", {"degrees": torch.tensor([1])}),
        ("pna", {"jumping_knowledge": True}),
    ],
    ids=str,
)
def test_options_of_some_models_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(gas.InputError, match=next(iter(options))):
        build(name, **options)


@pytest.mark.parametrize("cls", [GCN, GAT])
@pytest.mark.parametrize("widths", [(0, 3), (5, 0), (5.0, 3)])
def test_bad_widths_are_refused(cls: Callable[..., nn.Module], widths: tuple[Any, Any]) -> None:
    with pytest.raises(gas.InputError, match="channels"):
        cls(*widths)


# Single models against PyG ###########################################################################################


@pytest.mark.parametrize(("name", "cls"), [("gcn", pyg.GCN), ("graphsage", pyg.GraphSAGE), ("gat", pyg.GAT)])
def test_the_plain_models_are_pyg_s(name: str, cls: Callable[..., Any]) -> None:
    data = small_graph()
    if name == "gat":
        # PyG's ready model joins heads to its hidden width, and its last layer averages them.
        mine = build(name, heads=2, hidden=4)
        reference = cls(FEATURES, 8, 3, CLASSES, heads=2, act="elu")
        reference.convs[2] = pyg.GATConv(8, CLASSES, 1, concat=False)
    else:
        mine = build(name, hidden=8)
        reference = cls(FEATURES, 8, 3, CLASSES)
    reference.convs.load_state_dict(mine.convs.state_dict())
    reference.eval()
    torch.testing.assert_close(call(mine, data), reference(data.x, data.edge_index))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_appnp_is_an_mlp_and_pyg_s_propagation(alpha: float, weighted: bool) -> None:
    data = small_graph(weighted=weighted)
    model = APPNP(FEATURES, CLASSES, hidden=4, layers=7, alpha=alpha)
    hidden = (data.x @ model.first.weight.t() + model.first.bias).relu()
    prediction = hidden @ model.second.weight.t() + model.second.bias
    expected = pyg.APPNP(7, alpha)(prediction, data.edge_index, data.edge_weight)
    torch.testing.assert_close(call(model, data), expected)
    if alpha == 1.0:
        torch.testing.assert_close(call(model, data), prediction)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("alpha", "theta"), [(0.1, 0.5), (0.5, 1.0)])
def test_gcnii_by_its_formula(alpha: float, theta: float, shared: bool) -> None:
    data = small_graph()
    model: Any = GCNII(FEATURES, CLASSES, hidden=4, layers=3, alpha=alpha, theta=theta, shared_weights=shared)
    with_loops = torch.cat([data.edge_index, torch.arange(NODES).repeat(2, 1)], dim=1)
    # PyG replaces loops that are there already, with weight one.
    loops = with_loops[0] == with_loops[1]
    with_loops = torch.cat([with_loops[:, ~loops], torch.arange(NODES).repeat(2, 1)], dim=1)
    adjacency = torch.zeros(NODES, NODES).index_put_((with_loops[1], with_loops[0]), torch.tensor(1.0), accumulate=True)
    scale = adjacency.sum(1).pow(-0.5)
    matrix = scale[:, None] * adjacency * scale
    start = model.first(data.x).relu()
    x = start
    for number, conv in enumerate(model.convs, start=1):
        beta = math.log(theta / number + 1)
        passed, initial = (1 - alpha) * (matrix @ x), alpha * start
        if shared:
            both = passed + initial
            x = ((1 - beta) * both + beta * (both @ conv.weight1)).relu()
        else:
            x = (1 - beta) * (passed + initial) + beta * (passed @ conv.weight1 + initial @ conv.weight2)
            x = x.relu()
    torch.testing.assert_close(call(model, data), model.last(x))


def test_gin_by_its_formula() -> None:
    data = small_graph()
    model: Any = GIN(FEATURES, CLASSES, hidden=4, layers=2, batch_norm=False, residual=False)
    adjacency = torch.zeros(NODES, NODES)
    adjacency.index_put_((data.edge_index[1], data.edge_index[0]), torch.tensor(1.0), accumulate=True)
    x = model.first(data.x).relu()
    for number, conv in enumerate(model.convs):
        conv.eps.data.fill_(0.3 + number)
        x = conv.nn((1.3 + number) * x + adjacency @ x).relu()
    torch.testing.assert_close(call(model, data), model.last(x))


@pytest.mark.parametrize("averages", [False, True])
def test_gin_adds_residuals_after_relu_and_normalizes_inside_only(averages: bool) -> None:
    data = small_graph()
    model: Any = GIN(FEATURES, CLASSES, hidden=4, layers=2, track_running_stats=averages).train()
    adjacency = torch.zeros(NODES, NODES)
    adjacency.index_put_((data.edge_index[1], data.edge_index[0]), torch.tensor(1.0), accumulate=True)
    x = model.first(data.x).relu()
    for conv in model.convs:
        inner = conv.nn[0](x + adjacency @ x)
        inner = (inner - inner.mean(0)) / (inner.var(0, correction=0) + 1e-5).sqrt()
        x = x + conv.nn[3](inner.relu()).relu()
    torch.testing.assert_close(model(data.x, data.edge_index), model.last(x))
    assert any("running" in name for name, _ in model.named_buffers()) == averages


def test_jumping_knowledge_sees_all_layers() -> None:
    data = small_graph()
    model = build("pna-jk", layers=2, batch_norm=False)
    outputs = [model.first(data.x).relu()]
    for conv in model.convs:
        outputs.append(conv(outputs[-1], data.edge_index).relu())
    assert model.last.in_features == 3 * 4
    torch.testing.assert_close(call(model, data), model.last(torch.cat(outputs, dim=1)))


def test_gin_with_norms_between_layers_and_jumping_knowledge() -> None:
    data = small_graph()
    options: dict[str, Any] = {"batch_norm": False, "residual": False, "jumping_knowledge": True, "norm_between": True}
    model: Any = GIN(FEATURES, CLASSES, hidden=4, layers=2, **options).train()
    outputs = [model.first(data.x).relu()]
    for conv, norm in zip(model.convs, model.norms, strict=True):
        assert isinstance(norm, torch.nn.BatchNorm1d)
        outputs.append(norm(conv(outputs[-1], data.edge_index)).relu())
    torch.testing.assert_close(model(data.x, data.edge_index), model.last(torch.cat(outputs, dim=1)))


def test_jumping_knowledge_is_a_matter_of_the_name() -> None:
    assert not build("pna").jumping_knowledge
    assert build("pna-jk").jumping_knowledge
    assert "jumping_knowledge" not in model_options("pna-jk")


# Options #############################################################################################################


def test_dropout_leaves_the_initial_residual_of_gcnii_alone() -> None:
    data = small_graph()
    model = build("gcnii", layers=3, dropout=0.9, drop_input=False).train()
    given: list[tuple[Tensor, Tensor]] = []
    for conv in model.convs:
        conv.register_forward_pre_hook(lambda _, args: given.append(args[:2]))
    model(data.x, data.edge_index)
    start = model.first(data.x).relu()
    assert len(given) == 3
    assert all(torch.equal(initial, start) for _, initial in given)
    assert not torch.equal(given[0][0], start)


@pytest.mark.parametrize(
    "options", [{}, {"batch_norm": True}, {"residual": True}, {"linear": True}, {"linear": True, "residual": True}]
)
@pytest.mark.parametrize("training", [False, True])
def test_order_of_norm_residual_and_relu(options: dict[str, bool], training: bool) -> None:
    data = small_graph()
    model, again = (settle(build("gcn", **options, dropout=0.0)).train(training) for _ in range(2))
    x = data.x
    if options.get("linear"):
        x = again.first(x).relu()
    for number, conv in enumerate(again.convs):
        h = conv(x, data.edge_index)
        if number == 2 and not options.get("linear"):
            x = h
            break
        if options.get("batch_norm"):
            h = again.norms[number](h)
        if options.get("residual") and h.shape == x.shape:
            h = h + x
        x = h.relu()
    if options.get("linear"):
        x = again.last(x)
    torch.testing.assert_close(model(data.x, data.edge_index), x)


@pytest.mark.parametrize("name", sorted({"gcn", "graphsage", "gin", "gcnii", "pna", "pna-jk"}))
def test_residual_connections_change_the_output(name: str) -> None:
    off, on = (build(name, residual=value) for value in (False, True))
    on.load_state_dict(off.state_dict())
    assert not torch.equal(call(off, small_graph()), call(on, small_graph()))


@pytest.mark.parametrize("name", sorted({"gcn", "graphsage", "gin", "gcnii", "pna", "pna-jk"}))
def test_batch_norms_are_there_when_asked_for(name: str) -> None:
    def count(model: nn.Module) -> int:
        return sum(isinstance(module, nn.BatchNorm1d) for module in model.modules())

    last = name in ("gin", "gcnii", "pna-jk")  # a linear layer comes last, so that the third layer has a norm too
    assert count(build(name, batch_norm=False)) == 0
    assert count(build(name, batch_norm=True)) == (3 if last else 2)


def test_only_equal_widths_have_residual_connections() -> None:
    """Five features cannot be added to four columns, but to five."""
    data = small_graph()
    for hidden, added in ((4, False), (FEATURES, True)):
        off, on = (build("gcn", hidden=hidden, layers=2, residual=value) for value in (False, True))
        assert torch.equal(call(off, data), call(on, data)) is not added


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("name", sorted({"gcn", "graphsage", "gin", "gcnii", "pna"}))
def test_input_dropout(name: str, drop: bool) -> None:
    """With ones as features, what reaches the first layer shows whether some were dropped and the rest scaled up."""
    data = small_graph()
    model = build(name, drop_input=drop, dropout=0.5)
    first = model.first if model.first is not None else model.convs[0]
    assert isinstance(first, nn.Module)
    seen: list[Tensor] = []
    handle = first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.train()(torch.ones_like(data.x), data.edge_index)
    handle.remove()
    assert set(seen[0].flatten().tolist()) == ({0.0, 2.0} if drop else {1.0})


@pytest.mark.parametrize("name", UNTYPED)
def test_dropout_of_hidden_rows_comes_after_each_layer(name: str) -> None:
    """In training about half of what a layer is given is zero."""
    model = build(name, dropout=0.5, hidden=32)
    seen: list[Tensor] = []
    layers = [model.second] if name == "appnp" else [*model.convs][1:]
    for layer in layers:
        assert isinstance(layer, nn.Module)
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    data = small_graph()
    model.train()(data.x.abs(), data.edge_index)
    assert len(seen) == len(layers) > 0
    for rows in seen:
        assert 0.35 < float((rows == 0).double().mean()) < 0.95


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("out_heads", [1, 2])
def test_heads_stand_side_by_side_and_are_averaged_at_the_end(heads: int, out_heads: int) -> None:
    data = small_graph()
    model: Any = GAT(FEATURES, CLASSES, hidden=4, layers=2, heads=heads, out_heads=out_heads)
    expected = []
    model.eval()
    hidden = F.elu(model.convs[0](data.x, data.edge_index))
    assert hidden.shape == (NODES, 4 * heads)
    for head in range(out_heads):
        single = pyg.GATConv(4 * heads, CLASSES, 1, bias=False)
        rows = slice(head * CLASSES, (head + 1) * CLASSES)
        single.lin.weight.data = model.convs[1].lin.weight.data[rows]
        single.att_src.data, single.att_dst.data = (
            getattr(model.convs[1], name).data[:, head : head + 1] for name in ("att_src", "att_dst")
        )
        expected.append(single(hidden, data.edge_index))
    torch.testing.assert_close(call(model, data), torch.stack(expected).mean(0) + model.convs[1].bias)


# PNA #################################################################################################################


def test_degrees_are_those_of_the_graph() -> None:
    data = small_graph()
    # In-degrees: 0 has the ring's and 5's; 1: ring and 8; 3: ring and loop; 4, 5, two; 7: ring and double; 11: none.
    in_degree = torch.tensor([2, 2, 1, 2, 2, 2, 1, 3, 1, 1, 1, 0])
    expected = float(torch.log(in_degree + 1.0).mean())
    model = build("pna", data)
    for conv in model.convs:
        assert float(conv.aggr_module.avg_deg_lin) == pytest.approx(float(in_degree.double().mean()))
        assert float(conv.aggr_module.avg_deg_log) == pytest.approx(expected)


def test_degrees_are_part_of_the_weights() -> None:
    """So that a model runs on another graph with the degrees it was trained with."""
    other = Data(x=small_graph().x, edge_index=torch.tensor([[0, 1], [1, 0]]))
    trained, fresh = build("pna"), build("pna", other)
    assert not torch.equal(call(trained, small_graph()), call(fresh, small_graph()))
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(call(trained, small_graph()), call(fresh, small_graph()))


@pytest.mark.parametrize(
    ("aggregators", "scalers"),
    [
        (("mean",), ("identity",)),
        (("mean", "max"), ("identity", "amplification")),
        (("mean", "min", "max", "std", "sum"), ("identity", "amplification", "attenuation")),
    ],
)
def test_aggregators_and_scalers_by_hand(aggregators: tuple[str, ...], scalers: tuple[str, ...]) -> None:
    data = small_graph()
    model = build("pna", layers=1, aggregators=aggregators, scalers=scalers)
    conv = model.convs[0]
    degree = torch.bincount(data.edge_index[1], minlength=NODES)
    log = torch.log(degree + 1.0)
    average = float(log.mean())
    rows = []
    for node in range(NODES):
        sources = data.edge_index[0][data.edge_index[1] == node]
        pairs = torch.cat([data.x[node].expand(sources.numel(), -1), data.x[sources]], dim=1)
        messages = conv.pre_nns[0](pairs) if sources.numel() else torch.zeros(1, FEATURES)
        values = {
            "mean": messages.mean(0),
            "min": messages.min(0).values,
            "max": messages.max(0).values,
            "sum": messages.sum(0),
            # PyG's deviation does not fall below a small constant.
            "std": (messages.var(0, correction=0)).clamp(min=1e-5).sqrt(),
        }
        values["std"] = values["std"].masked_fill(values["std"] <= math.sqrt(1e-5), 0.0)
        joined = torch.cat([values[name] for name in aggregators])
        factor = {
            "identity": 1.0,
            "amplification": float(log[node]) / average,
            "attenuation": average / float(torch.log(degree[node].clamp(min=1) + 1.0)),
        }
        scaled = torch.cat([joined * factor[name] for name in scalers])
        rows.append(conv.lin(conv.post_nns[0](torch.cat([data.x[node], scaled]))))
    torch.testing.assert_close(call(model, data), torch.stack(rows), rtol=1e-4, atol=1e-4)


# Edge weights ########################################################################################################


@pytest.mark.parametrize("name", sorted(WEIGHTED))
def test_edge_weights_count(name: str) -> None:
    data, plain = small_graph(weighted=True), small_graph()
    model = build(name)
    weighted = call(model, data)
    assert not torch.equal(weighted, call(model, plain))
    data.edge_weight = torch.ones_like(data.edge_weight)
    torch.testing.assert_close(call(model, data), call(model, plain))


@pytest.mark.parametrize("name", sorted({*UNTYPED} - WEIGHTED))
def test_edge_weights_are_refused_by_models_without_them(name: str) -> None:
    data = small_graph(weighted=True)
    model = gas.autoscale(build(name), data)
    batch = next(iter(gas.HaloLoader(data, 3)))
    with pytest.raises(gas.InputError, match="edge weights"):
        model(batch)


# Histories ###########################################################################################################

OPTION_SETS: list[tuple[str, dict[str, Any]]] = [
    ("gcn", {"layers": 2}),
    ("gcn", {"layers": 3, "batch_norm": True, "drop_input": False}),
    ("gcn", {"layers": 2, "batch_norm": True, "residual": True, "linear": True, "dropout": 0.0}),
    ("gcn", {"layers": 3, "residual": True}),
    ("gcn", {"layers": 1}),
    ("graphsage", {"layers": 3, "batch_norm": True, "residual": True}),
    ("graphsage", {"layers": 2, "linear": True}),
    ("gin", {"layers": 4}),
    ("gin", {"layers": 2, "batch_norm": False, "residual": False}),
    ("gin", {"layers": 3, "jumping_knowledge": True, "norm_between": True, "residual": False}),
    ("gat", {"layers": 2, "heads": 3, "out_heads": 1}),
    ("gat", {"layers": 3, "heads": 2, "out_heads": 2}),
    ("appnp", {"layers": 3, "alpha": 0.1}),
    ("appnp", {"layers": 2, "alpha": 0.5}),
    ("gcnii", {"layers": 4, "alpha": 0.1, "theta": 0.5}),
    ("gcnii", {"layers": 3, "batch_norm": True, "shared_weights": False}),
    ("gcnii", {"layers": 3, "residual": True, "shared_weights": False, "alpha": 0.5, "theta": 1.0}),
    ("pna", {"layers": 3, "aggregators": ["mean"], "scalers": ["identity", "amplification"], "residual": True}),
    ("pna", {"layers": 3, "aggregators": ["mean", "max"], "batch_norm": False, "drop_input": True}),
    ("pna", {"layers": 2, "aggregators": ["mean", "min", "max", "std", "sum"]}),
    ("pna-jk", {"layers": 3, "aggregators": ["mean", "max"], "residual": True, "drop_input": True}),
]


@pytest.mark.parametrize(("name", "options"), OPTION_SETS, ids=str)
def test_inference_in_batches_is_that_of_the_whole_graph(name: str, options: dict[str, Any]) -> None:
    data = small_graph(weighted=name in WEIGHTED)
    model = settle(build(name, data, **options))
    expected = call(model, data)
    gas.autoscale(model, data)
    for parts in (torch.arange(NODES) // 4, torch.arange(NODES) % 5, torch.arange(NODES)):
        got = gas.infer(model, gas.HaloLoader(data, partition=parts))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), OPTION_SETS[::2], ids=str)
def test_one_part_gives_the_gradients_of_the_whole_graph(name: str, options: dict[str, Any]) -> None:
    data = small_graph(weighted=name in WEIGHTED)
    # Dropout on attention draws numbers in the order of the edges, which a batch is free to choose.
    options = {**options, "dropout": 0.0 if name == "gat" else 0.3}
    target = torch.arange(NODES) % CLASSES
    plain, scaled = build(name, data, **options).train(), build(name, data, **options).train()
    gas.autoscale(scaled, data)
    batch = next(iter(gas.HaloLoader(data, 1)))
    for model, given in ((plain, dict(data)), (scaled, {"batch": batch})):
        torch.manual_seed(5)
        out = model(given["batch"]) if "batch" in given else model(**given)
        F.cross_entropy(out, target).backward()  # type: ignore[no-untyped-call]
    for (key, mine), theirs in zip(scaled.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, key
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


# Weight decay ########################################################################################################


def decayed(model: nn.Module) -> set[str]:
    """Names of the weights in the first group."""
    groups = make_optimizer(model, Optimization(weight_decay_conv=0.5)).param_groups
    in_first = {id(weight) for group in groups if group["weight_decay"] == 0.5 for weight in group["params"]}
    in_rest = {id(weight) for group in groups if group["weight_decay"] == 0.0 for weight in group["params"]}
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert in_first | in_rest == names.keys()
    assert not in_first & in_rest
    return {names[key] for key in in_first}


def starting(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}


@pytest.mark.parametrize("name", ["gcn", "pna", "graphsage"])
def test_all_layers_but_the_last_are_decayed_with_their_norms(name: str) -> None:
    model = build(name, layers=3, batch_norm=True)
    expected = starting(model, "convs.0.", "convs.1.", "norms.0.", "norms.1.")
    assert decayed(model) == expected
    assert starting(model, "convs.2.") == {key for key, _ in model.named_parameters()} - expected != set()


def test_all_propagation_layers_of_gcnii_are_decayed() -> None:
    model = build("gcnii", layers=3)
    assert decayed(model) == starting(model, "convs.") == {f"convs.{number}.weight1" for number in range(3)}
    assert starting(model, "first.", "last.") == {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_all_of_gat_is_decayed() -> None:
    model = build("gat")
    assert decayed(model) == {name for name, _ in model.named_parameters()}


def test_the_first_linear_layer_of_appnp_is_decayed() -> None:
    assert decayed(build("appnp")) == {"first.weight", "first.bias"}


def test_a_single_layer_is_the_last() -> None:
    assert decayed(build("gcn", layers=1)) == set()
