"""Training steps on a GPU: captured or not, wherever batches and histories live, the numbers are the same."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCNConv, GraphConv  # type: ignore[import-untyped]
from torch_geometric.utils import coalesce  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data import generate
from gnnautoscale.models import MODELS, build_model, model_options
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training import Engine, Optimization, make_optimizer

CLASSES = 4


@pytest.fixture
def data() -> Data:
    graph = generate.communities(600, degree=6.0, num_features=12, num_classes=CLASSES)
    graph.train_mask[:100] = False  # so that parts differ in their number of training nodes
    return graph


def fitted(name: str, data: Data, **options: Any) -> gas.FitResult:
    """How a small model trains."""
    torch.manual_seed(1)
    small = {"hidden": 16, "layers": 3, "dropout": 0.0} | ({"heads": 2} if name == "gat" else {})
    if "batch_norm" in model_options(name):
        # With it, Adam's first steps make a difference of a thousandth out of one in the last digit.
        small["batch_norm"] = False
    model = build_model(name, data, CLASSES, **small)
    defaults = {"num_parts": 6, "epochs": 4, "lr": 0.005, "evaluate_every": 4, "device": "cuda", "grad_norm": 1.0}
    return gas.fit(model, data, **{**defaults, **options})


def losses(name: str, data: Data, **options: Any) -> tuple[list[float], str]:
    """The training curve of a small model, and how its steps were run."""
    result = fitted(name, data, **options)
    return [epoch.loss for epoch in result.epochs], result.how


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
def test_steps_with_refreshed_batches_between_them_are_not_captured(storage: str, data: Data) -> None:
    found, how = losses("gcn", data, storage=storage, refresh=2)
    assert how == "uncaptured, since batches are refreshed between steps"
    expected, _ = losses("gcn", data, device="cpu", refresh=2)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"rgcn"}))
def test_captured_steps_give_the_numbers_of_uncaptured_ones(name: str, storage: str, data: Data) -> None:
    replayed, how = losses(name, data, storage=storage)
    assert how.startswith("captured as 6 CUDA graphs; batches stay on the GPU")
    plain, how = losses(name, data, storage=storage, capture=False)
    assert how.startswith("uncaptured, since this was asked for")
    assert replayed == pytest.approx(plain, rel=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", ["gcn", "gin", "gat", "pna", "appnp"])
def test_compensated_steps_give_the_numbers_of_a_cpu(name: str, storage: str, data: Data) -> None:
    fixed: dict[str, Any] = {"storage": storage, "compensate": "gradient", "lr": 0.002}
    on_gpu, how = losses(name, data, **fixed)
    assert how.startswith("captured as 6 CUDA graphs")
    plain, _ = losses(name, data, capture=False, **fixed)
    assert on_gpu == pytest.approx(plain, rel=2e-4)
    on_cpu, _ = losses(name, data, device="cpu", **fixed)
    assert on_gpu == pytest.approx(on_cpu, rel=2e-3)
    _, how = losses(name, data, **{**fixed, "compensate": "momentum"})
    assert how.startswith("uncaptured, since the host counts the neighbours")


@pytest.mark.gpu
@pytest.mark.parametrize("compensate", ["none", "gradient"])
def test_nodes_with_very_many_edges_do_not_stand_in_the_way(compensate: str, data: Data) -> None:
    # Wherever such a node is, it takes part in the step that is watched before the first capture.
    hub, others = torch.zeros(599, dtype=torch.long), torch.arange(1, 600)
    star = torch.stack([torch.cat([hub, others]), torch.cat([others, hub])])
    data.edge_index = coalesce(torch.cat([data.edge_index, star], dim=1))
    fixed: dict[str, Any] = {"compensate": compensate, "lr": 0.002}
    replayed, how = losses("gcn", data, **fixed)
    assert how.startswith("captured as 6 CUDA graphs")
    plain, _ = losses("gcn", data, capture=False, **fixed)
    assert replayed == pytest.approx(plain, rel=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
def test_it_does_not_matter_where_batches_live(storage: str, data: Data) -> None:
    near, _ = losses("gcn", data, storage=storage, batches_on="device")
    far, how = losses("gcn", data, storage=storage, batches_on="host")
    assert how.startswith("captured as 6 CUDA graphs; batches are assembled anew")
    assert near == far


@pytest.mark.gpu
def test_the_cpu_trains_the_same(data: Data) -> None:
    on_gpu, _ = losses("gin", data, storage="host", lr=0.001)
    on_cpu, how = losses("gin", data, lr=0.001, device="cpu")
    assert how == "uncaptured: CUDA graphs need a GPU"
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.gpu
def test_batches_that_are_drawn_anew_are_not_captured(data: Data) -> None:
    _, how = losses("gcn", data, batch_size=2)
    assert how.startswith("uncaptured, since parts are drawn into new batches")
    _, how = losses("gcn", data, edge_dropout=0.2)
    assert how.startswith("uncaptured, since edge dropout")


@pytest.mark.gpu
def test_drawings_that_come_back_are_captured(data: Data) -> None:
    replayed, how = losses("gcn", data, batch_size=2, drawings=2, epochs=6)
    loader = gas.HaloLoader(data, 6, batch_size=2, shuffle=True, drawings=2)
    batches = [parts for _ in range(6) for parts in loader.draw()]
    assert how.startswith(f"captured as {len(set(batches[2:]))} CUDA graphs")  # the first two steps are not
    plain, _ = losses("gcn", data, batch_size=2, drawings=2, epochs=6, capture=False)
    assert replayed == pytest.approx(plain, rel=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"rgcn"}))
def test_a_captured_evaluation_gives_the_scores_of_others(name: str, storage: str, data: Data) -> None:
    found = []
    others: list[dict[str, Any]] = [
        {"evaluate_parts": 1, "capture": False},
        {"evaluate_parts": 1, "keep_batches": False},
        {"evaluate_parts": 3},
    ]
    for options in ({"evaluate_parts": 1}, *others):
        result = fitted(name, data, storage=storage, num_parts=4, epochs=6, evaluate_every=1, lr=0.001, **options)
        found.append([epoch.scores["val"] for epoch in result.epochs])
    for scores in found[1:]:
        assert scores == pytest.approx(found[0], abs=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("refresh_every", ["epoch", 4])
def test_a_refresh_at_once_trains_like_one_in_parts(storage: str, refresh_every: str | int, data: Data) -> None:
    fixed: dict[str, Any] = {"storage": storage, "refresh_every": refresh_every, "epochs": 8}
    at_once, _ = losses("gcn", data, evaluate_parts=1, **fixed)
    in_parts, _ = losses("gcn", data, evaluate_parts=3, capture=False, **fixed)
    never, _ = losses("gcn", data, evaluate_parts=1, **{**fixed, "refresh_every": "never"})
    assert at_once == pytest.approx(in_parts, rel=2e-4)
    assert at_once != pytest.approx(never, rel=2e-4)


@pytest.mark.gpu
def test_penalty_and_refresh_are_compatible_with_capture(data: Data) -> None:
    options: dict[str, Any] = {"lipschitz": 0.1, "refresh_every": 4, "storage": "host"}
    replayed, how = losses("gcn", data, **options)
    assert how.startswith("captured")
    assert replayed[-1] < replayed[0]
    # A layer with dropout inside has to be repeated with the same random numbers.
    torch.manual_seed(1)
    model = build_model("gat", data, CLASSES, hidden=8, layers=2, dropout=0.3)
    result = gas.fit(model, data, num_parts=6, epochs=2, device="cuda", lipschitz=0.1)
    assert result.how.startswith("uncaptured, since the penalty runs layers with dropout")


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_captured_steps_see_the_learning_rate(schedule: str, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    monkeypatch.setattr(  # soon enough for a few epochs
        torch.optim.lr_scheduler,
        "ReduceLROnPlateau",
        lambda optimizer, **options: plateau(optimizer, **{**options, "patience": 0}),
    )
    fixed: dict[str, Any] = {"epochs": 8, "evaluate_every": 1, "lr": 0.05}
    replayed, how = losses("gcn", data, schedule=schedule, **fixed)
    assert how.startswith("captured")
    plain, _ = losses("gcn", data, schedule=schedule, capture=False, **fixed)
    constant, _ = losses("gcn", data, capture=False, **fixed)
    assert replayed == pytest.approx(plain, rel=1e-3)
    assert replayed != pytest.approx(constant, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"precision": "tf32"}, {"history_dtype": "bfloat16"}])
def test_lower_precision_is_close(options: dict[str, Any], data: Data) -> None:
    exact, _ = losses("gcn", data, storage="host")
    low, how = losses("gcn", data, storage="host", **options)
    assert how.startswith("captured")
    assert low == pytest.approx(exact, rel=3e-2)
    assert low != exact or options == {"precision": "tf32"}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_the_number_of_graphs_is_bounded(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = losses("gcn", data)
    monkeypatch.setattr("gnnautoscale.replay.replayer.MOST_GRAPHS", 2)
    got, how = losses("gcn", data)
    assert how.startswith("captured as 2 CUDA graphs")
    assert got == pytest.approx(expected, rel=1e-5)


class Odd(nn.Module):
    """A GCN that does something a captured step cannot repeat."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second = GCNConv(12, 16), GraphConv(16, CLASSES)
        self.what = what
        self.calls = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        if self.what == "item" and self.training and float(x.detach().sum()) > 1e9:
            x = 2 * x
        elif self.what == "random" and self.training:
            x = x * (1.0 + 0.0 * random.random())
        elif self.what == "counts" and self.training:
            self.calls += 1
        elif self.what == "synchronize" and self.training:
            torch.cuda.synchronize()
        out: Tensor = self.second(x, edge_index)
        return out


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nothing", "captured"),
        ("item", "uncaptured, since the model waits for values on the host"),
        ("random", "uncaptured, since the model draws random numbers on the host"),
        ("counts", "uncaptured, since the model's attributes change"),
        ("synchronize", "uncaptured, since the model cannot be captured"),
    ],
)
def test_a_model_that_cannot_be_captured_is_trained_all_the_same(what: str, reason: str, data: Data) -> None:
    curves = []
    for kind in ("nothing", what):
        torch.manual_seed(3)
        result = gas.fit(Odd(kind), data, num_parts=5, epochs=4, device="cuda", storage="host")
        curves.append([epoch.loss for epoch in result.epochs])
    assert result.how.startswith(reason)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    # Random numbers on the GPU still come, and still follow the seed.
    torch.manual_seed(0)
    first = torch.rand(5, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(5, device="cuda"))


@pytest.mark.gpu
def test_same_seed_same_bits(data: Data) -> None:
    runs = [losses("gcn", data, storage="host", batches_on="host")[0] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gcn", "graphsage"])
def test_the_whole_graph_is_evaluated_by_a_captured_pass(name: str, data: Data) -> None:
    model = gas.autoscale(build_model(name, data, CLASSES, hidden=8, layers=2).cuda(), data)
    engine = Engine(
        model, make_optimizer(model, Optimization(lr=0.01)), NodeClassification(CLASSES), torch.device("cuda")
    )
    loader = gas.HaloLoader(data, 1, device="cuda")
    with engine.running():
        plain, _, captured, again = (engine.output(next(loader.ready_batches())) for _ in range(4))
        assert again is captured
        assert again is not plain
        torch.testing.assert_close(captured, plain)


# Without a GPU #######################################################################################################


def engine_of(data: Data) -> Engine:
    model = gas.autoscale(build_model("gcn", data, CLASSES, hidden=8, layers=2), data)
    return Engine(model, make_optimizer(model, Optimization(lr=0.01)), NodeClassification(CLASSES), torch.device("cpu"))


@pytest.mark.parametrize("keep", [True, False])
def test_batches_to_evaluate_that_do_not_come_back_are_not_kept(keep: bool, data: Data) -> None:
    engine, loader = engine_of(data), gas.HaloLoader(data, 1, keep=keep)
    seen, outputs = [], []
    for _ in range(4):
        batch = next(loader.ready_batches())
        seen.append(weakref.ref(batch.info))
        outputs.append(engine.output(batch))
    del batch
    gc.collect()
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert [info() is not None for info in seen] == [keep] * 4
