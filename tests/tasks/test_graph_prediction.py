"""Graph-level prediction in fit: full batch, batches of whole graphs, parts of large graphs, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.nn import GIN, GraphSAGE, aggr  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph, HaloLoader
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import GraphPrediction
from gnnautoscale.tasks.task import Task
from support.communities import same_bits, weights_of

WIDTH = 5


def small_graphs(count: int = 24, *, classes: int = 2, dtype: torch.dtype = torch.float32) -> list[Data]:
    """Random graphs of 3 to 9 nodes, whose class shifts their features."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        nodes, kind = 3 + number % 7, number % classes
        edge_index = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        x = torch.randn(nodes, 4, generator=generator).to(dtype) + kind
        found.append(Data(x=x, edge_index=edge_index, y=torch.tensor([kind])))
    return found


def dataset(**changes: Any) -> Dataset:
    graphs = small_graphs(**changes)
    return Dataset.of_graphs((graphs[:16], graphs[16:20], graphs[20:]))


def encoder(*, norm: str | None = None) -> GIN:
    torch.manual_seed(1)
    return GIN(4, 6, num_layers=2, out_channels=WIDTH, norm=norm)


READOUTS = {
    "sum": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "softmax": lambda: aggr.SoftmaxAggregation(learn=True),
    "attention": lambda: aggr.AttentionalAggregation(nn.Linear(WIDTH, 1)),
}


class Plain(nn.Module):
    """The model, the readout and the head in plain PyG."""

    def __init__(self, model: nn.Module, readout: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.readout, self.head = model, readout, head

    def forward(self, data: Data) -> Tensor:
        rows = self.readout(self.model(data.x, data.edge_index), data.graph_id)
        scores: Tensor = self.head(rows)
        return scores


@pytest.mark.parametrize(
    ("name", "options"),
    [("attention", {"mode": "full"}), *((name, {"mode": "exact", "num_parts": 4}) for name in READOUTS)],
    ids=str,
)
def test_one_part_and_exact_steps_train_like_plain_pyg(name: str, options: dict[str, Any]) -> None:
    data = dataset(dtype=torch.double)
    model, readout = encoder().double(), READOUTS[name]().double()
    head = nn.Linear(WIDTH, 2).double()
    plain = copy.deepcopy(Plain(model, readout, head))
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    wanted = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(data.train), data.train.graph_y)
        torch.autograd.backward(loss)
        optimizer.step()
        wanted.append(float(loss.detach()))
    task = GraphPrediction(readout, head, width=WIDTH)
    result = gas.fit(model, data, task=task, epochs=4, lr=0.01, evaluate_every=4, device="cpu", **options)
    torch.testing.assert_close([epoch.loss for epoch in result.epochs], wanted, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(Plain(model, readout, head).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    # And evaluation is that of the plain model.
    right = (plain.eval()(data.test).argmax(dim=1) == data.test.graph_y).double().mean()
    assert result.epochs[-1].scores["test"] == pytest.approx(100 * float(right))


@pytest.mark.parametrize("name", READOUTS)
def test_inference_in_parts_equals_the_plain_model(name: str) -> None:
    data = dataset(dtype=torch.double)
    model, readout, head = encoder().double(), READOUTS[name]().double(), nn.Linear(WIDTH, 2).double()
    task = GraphPrediction(readout, head, width=WIDTH)
    task.bound_to(data, metric=None, class_weight="none")
    wanted = Plain(copy.deepcopy(model), readout, head).eval()(data.train)
    loader = HaloLoader(data.train, 5, partition="random")  # graphs are spread over parts
    found = task.predict(gas.infer(gas.autoscale(model, data.train), loader), data.train)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_head_is_fitted_alone() -> None:
    data, task, model = dataset(), GraphPrediction("attention", "mlp", width=WIDTH), encoder()
    task.bound_to(data, metric=None, class_weight="none")
    rows = gas.infer(gas.autoscale(model, data.train), HaloLoader(data.train, 4))
    before, loss = weights_of(task.readout), F.cross_entropy(task.predict(rows, data.train), data.train.graph_y)
    losses = task.fit_head(rows, data.train, epochs=50, lr=0.05)
    assert losses[0] == pytest.approx(float(loss), abs=1e-6)
    assert losses[-1] < 0.5 * losses[0]
    assert same_bits(before, weights_of(task.readout))
    found = F.cross_entropy(task.predict(rows, data.train), data.train.graph_y)
    assert float(found) < losses[-1] + 1e-3


def test_parts_are_whole_graphs() -> None:
    data, task = dataset(), GraphPrediction(width=WIDTH)
    task.bound_to(data, metric=None, class_weight="none")
    for num_parts in (1, 4, 16):
        labels = task.cut(data.train, num_parts, 1, method="metis", seed=0, cache_dir=None)
        assert isinstance(labels, Tensor)
        assert int(labels.max()) + 1 == num_parts
        assert torch.unique(torch.stack([data.train.graph_id, labels]), dim=1).size(1) == 16


class Recorder(GraphPrediction):
    """Keeps what each batch was about: its graphs and its loss."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[tuple[Tensor, float]] = []

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        loss = super().loss(out, targets)
        self.batches.append((targets[:, 0].clone(), float(loss.detach())))
        return loss


def test_a_step_on_whole_graphs_is_pyg_s() -> None:
    """With batch norm and all: the same loss in each step, and the same weights after them."""
    graphs = small_graphs(dtype=torch.double)
    data = Dataset.of_graphs((graphs[:16], graphs[16:20], graphs[20:]))
    model, head = encoder(norm="batch_norm").double(), nn.Linear(WIDTH, 2).double()
    plain = copy.deepcopy(Plain(model, aggr.SumAggregation(), head)).train()
    task = Recorder("sum", head, width=WIDTH)
    gas.fit(model, data, task=task, num_parts=16, batch_size=4, epochs=2, lr=0.01, evaluate_every=2, device="cpu")
    assert [graphs.numel() for graphs, _ in task.batches] == [4] * 8
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for numbers, loss in task.batches:
        batch = Batch.from_data_list([graphs[number] for number in numbers.tolist()])
        batch.graph_id = batch.batch
        optimizer.zero_grad()
        wanted = F.cross_entropy(plain(batch), batch.y)
        torch.autograd.backward(wanted)
        optimizer.step()
        assert loss == pytest.approx(float(wanted.detach()), abs=1e-5)
    for mine, theirs in zip(Plain(model, aggr.SumAggregation(), head).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def large_graphs() -> Dataset:
    """Rings of 40 nodes, cut into parts."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.arange(40)
    edges = torch.cat([torch.stack([ring, (ring + 1) % 40]), torch.stack([(ring + 1) % 40, ring])], dim=1)
    graphs = [
        Data(x=torch.randn(40, 4, generator=generator) + 0.3 * (i % 2), edge_index=edges, y=torch.tensor([i % 2]))
        for i in range(12)
    ]
    return Dataset.of_graphs((graphs[:6], graphs[6:8], graphs[8:]))


PARTS: dict[str, Any] = {"num_parts": 24, "batch_size": 3, "device": "cpu"}


@pytest.mark.parametrize(
    ("mode", "readout"),
    [
        *(("gas", readout) for readout in ("sum", "mean", "max", "attention")),
        *(("history", readout) for readout in ("mean", "attention")),
        *(("cluster", readout) for readout in ("sum", "max")),
    ],
)
def test_parts_of_large_graphs_train(readout: Any, mode: str) -> None:
    data, task = large_graphs(), Recorder(readout, "mlp", width=WIDTH, stale_dropout=0.2)
    result = gas.fit(encoder(), data, task=task, mode=mode, epochs=8, lr=0.01, evaluate_every=8, **PARTS)
    assert len(task.batches) == 8 * 8
    assert result.epochs[-1].loss < result.epochs[0].loss


@pytest.mark.parametrize(
    "options",
    [
        {"exact_epochs": 2},
        {"precision": "bfloat16"},
        {"accumulate": 2},
        {"compensate": "momentum"},
        {"compensate": "gradient"},
        {"compensate": "gradient", "refresh": 1},
        {"lipschitz": 0.1},
        {"storage": "host", "history_dtype": "bfloat16"},
        {"drawings": 2, "evaluate_parts": 1},
    ],
    ids=str,
)
def test_options_of_steps(options: dict[str, Any]) -> None:
    task = GraphPrediction("mean", width=WIDTH)
    result = gas.fit(encoder(), large_graphs(), task=task, epochs=6, lr=0.01, evaluate_every=3, **PARTS, **options)
    assert result.epochs[-1].loss < result.epochs[0].loss


def test_the_gradients_of_parts_are_compared_with_full_batch() -> None:
    """Exact histories and pooled rows: the last layer's gradients add up, all of them if they cross borders."""
    data, task = large_graphs(), GraphPrediction("mean", "mlp", width=WIDTH)
    torch.manual_seed(5)
    task.bound_to(data, metric=None, class_weight="none")
    model = gas.autoscale(GraphSAGE(4, 6, num_layers=2, out_channels=WIDTH), data.train)
    both = not Graph.of(data.train).is_symmetric
    loader = HaloLoader(data.train, 24, batch_size=3, shuffle=True, bidirectional=both)
    task.prepare(loader)
    rows = gas.infer(model, loader, update_histories=True)
    task.see(rows, torch.arange(rows.size(0)))
    task.loss(rows, task.targets_of_graph(data.train)[1])
    before = copy.deepcopy(task.state_dict())
    found = gas.diagnose(model, loader, "gradients", task=task)["gradients"]
    by_name = {layer["layer"]: layer for layer in found["layers"]}
    assert by_name["convs.1"]["relative_error"] < 1e-4
    assert by_name["convs.0"]["relative_error"] > 1e-3
    assert found["compensated"]["relative_error"] < 1e-3
    assert same_bits(before, task.state_dict())  # it was no training


def test_steps_follow_full_batch_where_nothing_is_stale() -> None:
    """One step on all parts but in one batch, and one on the whole, are the same."""
    data, losses = large_graphs(), []
    for options in ({"num_parts": 24, "batch_size": 24}, {"mode": "full"}):
        torch.manual_seed(2)
        task = GraphPrediction("attention", width=WIDTH)
        torch.manual_seed(3)
        task.bound_to(data, metric=None, class_weight="none")
        result = gas.fit(encoder(), data, task=task, epochs=3, lr=0.01, device="cpu", **options)
        losses.append([epoch.loss for epoch in result.epochs])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("readout", ["sum", "mean", "max", "min", "softmax", "attention"])
def test_the_loss_reads_no_values_so_that_a_gpu_can_capture_it(readout: Any) -> None:
    data, task = large_graphs(), GraphPrediction(readout, "mlp", width=WIDTH, stale_dropout=0.3)
    task.bound_to(data, metric=None, class_weight="balanced")
    task.prepare(HaloLoader(data.train, 12))
    nodes = torch.arange(60)
    _, targets = task.targets(Data(n_id=nodes, batch_size=60, num_nodes=60))
    warm_up = torch.zeros(60, WIDTH)
    task.see(warm_up, nodes)
    task.loss(warm_up, targets)
    with FakeTensorMode(allow_non_fake_inputs=True) as without_values:
        out = without_values.from_tensor(torch.zeros(60, WIDTH))
        task.see(out, without_values.from_tensor(nodes))
        loss = task.loss(out, without_values.from_tensor(targets))
    assert loss.shape == ()


@pytest.mark.gpu
@pytest.mark.parametrize("readout", ["mean", "max", "attention"])
def test_steps_on_graphs_are_captured(readout: Any) -> None:
    def run(**options: Any) -> gas.FitResult:
        torch.manual_seed(5)
        task = GraphPrediction(readout, "mlp", width=WIDTH)
        task.bound_to(large_graphs(), metric=None, class_weight="none")
        return gas.fit(encoder(), large_graphs(), task=task, drawings=2, epochs=20, **{**PARTS, **options})

    captured, plain = (run(device="cuda", capture=capture) for capture in (True, False))
    assert captured.how.startswith("captured")
    assert captured.epochs[-1].loss == pytest.approx(plain.epochs[-1].loss, rel=1e-3)


@pytest.mark.parametrize("every", ["epoch", 3])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, every: Any) -> None:
    def run(epochs: int, **options: Any) -> tuple[gas.FitResult, dict[str, Tensor]]:
        torch.manual_seed(5)
        task = GraphPrediction("attention", "mlp", width=WIDTH, stale_dropout=0.3)
        task.bound_to(data, metric=None, class_weight="none")
        model = encoder()
        result = gas.fit(model, data, task=task, epochs=epochs, **PARTS, **options)
        return result, weights_of(nn.ModuleList([model, task.module or nn.Identity()]))

    class StopError(Exception):
        pass

    def stop(epoch: Any) -> None:
        if epoch.number == 2:
            raise StopError

    data = large_graphs()
    whole, weights = run(4)
    with pytest.raises(StopError):
        run(4, checkpoint_dir=str(tmp_path), checkpoint_every=every, callback=stop)
    again, resumed = run(4, resume=str(tmp_path))
    assert [epoch.loss for epoch in again.epochs] == [epoch.loss for epoch in whole.epochs]
    assert same_bits(weights, resumed)


@pytest.mark.parametrize(
    ("y", "metric", "outputs"),
    [
        (lambda i: torch.tensor([i % 3]), "accuracy", 3),
        (lambda i: torch.tensor([float(i % 2)]), "accuracy", 1),
        (lambda i: torch.tensor([[float(i % 2), float(i % 3 == 0), float("nan")]]), "micro-F1", 3),
        (lambda i: torch.tensor([0.1 * i]), "RMSE", 1),
        (lambda i: torch.tensor([[0.1 * i, 1.0 + i]]), "RMSE", 2),
    ],
    ids=["classes", "yes or no", "labels", "number", "numbers"],
)
def test_kinds_of_targets(y: Any, metric: str, outputs: int) -> None:
    graphs = small_graphs()
    for number, graph in enumerate(graphs):
        graph.y = y(number)
    if metric == "micro-F1":
        graphs[1].y[0, 2] = 1.0
    task = GraphPrediction("mean", width=WIDTH)
    result = gas.fit(encoder(), (graphs[:16], graphs[16:20], graphs[20:]), task=task, num_parts=4, epochs=2)
    assert result.metric == metric
    rows = torch.zeros(sum(graph.num_nodes for graph in graphs), WIDTH)
    assert task.predict(rows, Dataset.of_graphs((graphs, graphs, graphs)).train).shape == (24, outputs)


def test_graphs_without_known_targets_are_passed_over() -> None:
    graphs = small_graphs()
    for graph in graphs[1:16]:
        graph.y = torch.tensor([-1])
    task = Recorder("mean", width=WIDTH)
    data = Dataset.of_graphs((graphs[:16], graphs[16:20], graphs[20:]))
    gas.fit(encoder(), data, task=task, num_parts=8, batch_size=2, epochs=1)
    assert [numbers.tolist() for numbers, _ in task.batches] == [[0]]


def test_the_task_follows_from_the_data_and_takes_options(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GraphSAGE(4, 8, num_layers=2, out_channels=64)
    options: dict[str, Any] = {"metric": "ROC-AUC", "class_weight": "balanced", "run_dir": str(tmp_path / "run")}
    result = gas.fit(model, dataset(), num_parts=4, epochs=1, **options)
    assert result.metric == "ROC-AUC"
    described = read_run(tmp_path / "run").run["data"]
    assert (described["train graphs"], described["val graphs"], described["classes"]) == (16, 4, 2)


def test_joined_graphs_with_masks() -> None:
    graphs = Batch.from_data_list(small_graphs())
    split = torch.arange(24) % 3
    graphs.train_mask, graphs.val_mask, graphs.test_mask = split == 0, split == 1, split == 2
    result = gas.fit(encoder(), graphs, task=GraphPrediction(width=WIDTH), num_parts=2, epochs=1)
    assert set(result.scores) == {"train", "val", "test"}
    del graphs.val_mask
    with pytest.raises(InputError, match="graphs are split by train_mask, val_mask and test_mask"):
        gas.fit(encoder(), graphs, task=GraphPrediction(width=WIDTH))
    graphs.val_mask = torch.ones(graphs.num_nodes, dtype=torch.bool)
    with pytest.raises(InputError, match="graphs are split by train_mask, val_mask and test_mask"):
        gas.fit(encoder(), graphs, task=GraphPrediction(width=WIDTH))
    del graphs.train_mask, graphs.val_mask, graphs.test_mask
    with pytest.raises(InputError, match="graphs to train on need a split"):
        gas.fit(encoder(), graphs, task=GraphPrediction(width=WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sage", "fan_out": [2, 2]}, "pooled from all of its nodes, but got neighbour sampling"),
        ({"lipschitz": 0.1, "mode": "exact"}, "exact steps of GraphPrediction.* have no lipschitz"),
        ({"precision": "bfloat16", "exact_epochs": 1}, "have no precision"),
        ({"metric": "RMSE"}, "a metric of classes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        gas.fit(encoder(), dataset(), task=GraphPrediction(width=WIDTH), num_parts=2, epochs=1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be"),
        ({"stale_dropout": 1.0}, "stale_dropout must be"),
        ({"head": "deep"}, "head must be one of linear, mlp"),
        ({"readout": "median"}, "readout must be one of sum"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GraphPrediction(**options)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (GraphPrediction(width=WIDTH + 1), "must return a tensor of 6 columns"),
        (GraphPrediction(head=nn.Linear(WIDTH, 3), width=WIDTH), "the head must return 2 columns"),
    ],
)
def test_models_and_heads_of_another_form_are_refused(task: Task, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gas.fit(encoder(), dataset(), task=task, num_parts=2, epochs=1)


def test_data_that_pose_no_such_task_are_refused() -> None:
    node = Data(x=torch.ones(4, 4), edge_index=torch.tensor([[0], [1]]), y=torch.arange(4))
    with pytest.raises(InputError, match="graphs with a target each"):
        gas.fit(encoder(), node, task=GraphPrediction(width=WIDTH))
    graphs = small_graphs()
    for graph in graphs[16:20]:
        graph.y = torch.tensor([-1])
    with pytest.raises(InputError, match="the val split needs at least one graph"):
        gas.fit(encoder(), (graphs[:16], graphs[16:20], graphs[20:]), task=GraphPrediction(width=WIDTH))
    with pytest.raises(InputError, match="each split has its own graphs"):
        gas.fit(encoder(), Dataset.of(dataset().train), task=GraphPrediction(width=WIDTH))


def test_a_head_is_made_for_what_the_readout_gives() -> None:
    gate = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    readout = aggr.AttentionalAggregation(gate, nn.Linear(WIDTH, 7)).double()
    before = weights_of(readout)
    task = GraphPrediction(readout, "mlp", width=WIDTH)
    task.bound_to(dataset(), metric=None, class_weight="none")
    assert task.module is not None
    first = task.module.get_submodule("head.0")
    assert isinstance(first, nn.Linear)
    assert (first.in_features, first.out_features) == (7, 7)
    assert same_bits(before, weights_of(readout))
    assert readout.training


def test_a_task_must_know_its_data() -> None:
    task = GraphPrediction(width=WIDTH)
    with pytest.raises(InputError, match="must know its data set"):
        task.targets_of_graph(dataset().train)
    with pytest.raises(InputError, match="must know its data set"):
        task.predict(torch.ones(2, WIDTH), dataset().train)
    task.bound_to(dataset(), metric=None, class_weight="none")
    with pytest.raises(InputError, match="the batch that the model has just seen"):
        task.loss(torch.ones(2, WIDTH), torch.zeros(1, 2, dtype=torch.long))
