"""Training on heterogeneous graphs."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.attach.calling import unpack_batch
from gnnautoscale.data import TypedDataset
from gnnautoscale.errors import InputError
from support.typed import ADDING, MODELS, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


def graph() -> HeteroData:
    data = typed_graph(6).apply(lambda x: x.float() if x.is_floating_point() else x)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    place = torch.arange(40) % 4
    for name, which in (("train", place < 2), ("val", place == 2), ("test", place == 3)):
        data["paper"][f"{name}_mask"] = which
    return data


def call(model: nn.Module, data: HeteroData) -> Any:
    args, kwargs = unpack_batch(inspect.signature(model.forward), "the model", (data,), {})
    return model(*args, **kwargs)


def trained(name: str = "SAGE sum", *, lazy: bool = False, **options: Any) -> tuple[gas.FitResult, nn.Module]:
    torch.manual_seed(0)
    model = {**MODELS, **ADDING}[name]()
    if not lazy:  # models with lazy weights have no plan in common
        with torch.no_grad():
            call(model.eval(), graph())
    defaults = {"num_parts": 6, "batch_size": 2, "epochs": 4, "lr": 0.02, "device": "cpu", "seed": 3}
    return gas.fit(model, graph(), **{**defaults, **options}), model


def assert_scored(result: gas.FitResult, model: nn.Module) -> None:
    """The score of the test split is that of exact outputs."""
    out = gas.infer(model, graph())
    out, data = out["paper"] if isinstance(out, dict) else out, graph()["paper"]
    right = (out.argmax(1) == data.y)[data.test_mask]
    assert 100 * float(right.double().mean()) == pytest.approx(result.scores["test"])


@pytest.mark.parametrize("name", ["SAGE sum", "residual"])
def test_a_model_learns_the_classes_of_one_type(name: str) -> None:
    result, model = trained(name, epochs=30, evaluate_every=10)
    assert result.metric == "accuracy"
    assert result.scores["train"] > 90.0
    assert result.how == "uncaptured: CUDA graphs need a GPU"
    assert result.history_bytes > 0
    assert_scored(result, model)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", ["SAGE sum", "HAN"])
def test_a_gpu_captures_steps_that_learn(name: str, storage: str) -> None:
    options: dict[str, Any] = {"storage": storage, "drawings": 2, "epochs": 20, "device": "cuda"}
    (captured, _), (plain, _) = (trained(name, capture=capture, **options) for capture in (True, False))
    assert captured.how.startswith("captured as")
    assert plain.how.startswith("uncaptured")
    losses = [[epoch.loss for epoch in result.epochs] for result in (captured, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][-1] < losses[0][0] / 3  # scores are those of the best epoch, which may be an early one


def test_full_batch_is_plain_pyg() -> None:
    result, _ = trained(mode="full", epochs=5, lazy=True)
    torch.manual_seed(0)
    model, data = MODELS["SAGE sum"](), graph()
    torch.manual_seed(3)
    call(model, data)  # lazy weights
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(5):
        out: Tensor = call(model, data)
        mask = data["paper"].train_mask
        loss = F.cross_entropy(out[mask], data["paper"].y[mask])
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert [epoch.loss for epoch in result.epochs] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("name", "mode"), [("SAGE sum", "sage"), ("residual", "cluster")])
def test_baselines_learn_the_classes_too(name: str, mode: str) -> None:
    more: dict[str, Any] = {"lazy": True, **({"fan_out": [3, 3]} if mode == "sage" else {})}
    result, model = trained(name, mode=mode, epochs=30, **more)
    assert result.scores["train"] > 80.0
    assert (result.steps, result.history_bytes, result.connectivity) == (90, 0, 0.0)
    again, _ = trained(name, mode=mode, epochs=2, **more)
    assert [epoch.loss for epoch in again.epochs] == [epoch.loss for epoch in result.epochs[:2]]
    gas.autoscale(model, graph())
    assert_scored(result, model)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cluster", "sage"])
def test_baselines_on_a_gpu_are_those_on_a_cpu(mode: str) -> None:
    options: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "epochs": 4, "lr": 0.02, "seed": 3, "mode": mode}
    options |= {"fan_out": [3, 3]} if mode == "sage" else {}
    torch.manual_seed(0)
    model, data = MODELS["SAGE sum"](), graph()
    call(model, data)  # lazy weights would be drawn on the device
    on_gpu, on_cpu = (gas.fit(copy.deepcopy(model), data, device=device, **options) for device in ("cuda", "cpu"))
    assert [epoch.loss for epoch in on_gpu.epochs] == pytest.approx([epoch.loss for epoch in on_cpu.epochs], rel=1e-3)


def test_sampling_all_neighbours_in_one_batch_is_full_batch() -> None:
    full, _ = trained(mode="full", epochs=4)
    sampled, _ = trained(mode="sage", fan_out=[-1, -1], num_parts=1, batch_size=1, epochs=4)
    assert [epoch.loss for epoch in sampled.epochs] == pytest.approx([epoch.loss for epoch in full.epochs], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"compensate": "gradient", "evaluate_parts": 1},
        {"compensate": "momentum", "evaluation": "histories", "refresh_every": "epoch"},
        {"lipschitz": 0.01, "lipschitz_radius": 0.1, "edge_dropout": 0.2},
        {"refresh": 1, "exact_epochs": 4},
    ],
)
def test_steps_of_every_kind_learn(options: dict[str, Any]) -> None:
    result, _ = trained("weighted", epochs=20, lr=0.03, evaluate_every=10, **options)
    assert result.scores["train"] >= 85.0  # of 20 papers


def test_exact_steps_are_those_of_full_batch() -> None:
    (exact, model), (full, other) = trained(mode="exact"), trained(mode="full")
    assert exact.how.startswith("exact steps")
    assert [epoch.loss for epoch in exact.epochs] == pytest.approx([epoch.loss for epoch in full.epochs], rel=1e-4)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-4)


def after_one_epoch(saved: Path) -> str:
    """The first of the two checkpoints of a run of two epochs."""
    first, _ = sorted(saved.glob("checkpoint-*.pt"))
    return str(first)


@pytest.mark.parametrize(
    ("name", "compensate", "storage"), [("SAGE sum", "gradient", "device"), ("HAN", "none", "disk")]
)
def test_a_resumed_run_has_the_same_bits(name: str, compensate: str, storage: str, tmp_path: Path) -> None:
    def options(folder: str) -> dict[str, Any]:
        return {
            "storage": storage,
            "compensate": compensate,
            **({"history_dir": str(tmp_path / folder)} if storage == "disk" else {}),
        }

    kept: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "checkpoint_dir": str(tmp_path / "saved")}
    whole, model = trained(name, **options("a"), epochs=2, **kept)
    resumed, other = trained(name, **options("b"), epochs=2, resume=after_one_epoch(tmp_path / "saved"))
    assert len(resumed.epochs) == 2
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    gas.detach(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 2}, "num_workers=2"),
        ({"task": "link"}, "a graph for each split"),
    ],
)
def test_what_needs_a_plain_graph_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trained(**options)


def test_naive_histories_are_those_of_random_parts() -> None:
    ways: list[dict[str, Any]] = [{"mode": "history"}, {"partition": "random"}]
    naive, random = (trained(epochs=2, **how)[0] for how in ways)
    assert [epoch.loss for epoch in naive.epochs] == [epoch.loss for epoch in random.epochs]


class HalfLazy(nn.Module):
    """Has weights for types that it never computes rows of, which stay lazy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MODELS["SAGE sum"]()
        self.unused = nn.ModuleDict({kind: pyg.Linear(-1, 4) for kind in ("term", "venue")})

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
        out: Tensor = self.model(x_dict, edge_index_dict)
        return out


@pytest.mark.parametrize("mode", ["gas", "exact"])
def test_weights_that_nothing_uses_may_stay_lazy(mode: str, tmp_path: Path) -> None:
    def run(**more: Any) -> tuple[gas.FitResult, nn.Module]:
        torch.manual_seed(0)
        model = HalfLazy()
        return gas.fit(model, graph(), num_parts=4, mode=mode, device="cpu", seed=1, epochs=2, **more), model

    whole, model = run(checkpoint_dir=str(tmp_path))
    resumed, _ = run(resume=after_one_epoch(tmp_path))
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]
    assert is_lazy(model.unused["term"].weight)  # type: ignore[index, union-attr]
    loader = gas.HaloLoader(graph(), 4)
    want = gas.infer(model, loader)
    assert gas.verify(model, loader, nodes=5).exact
    nodes = torch.tensor([3, 30])
    torch.testing.assert_close(gas.predict(model, loader, {"paper": nodes}), want[nodes])
    torch.testing.assert_close(gas.exact_forward(model, loader), want)
    assert gas.diagnose(model, loader, "gradients")["gradients"]["relative_error"] < 2


def test_targets_are_those_of_one_type() -> None:
    data = graph()
    data["author"].y = torch.zeros(30, dtype=torch.long)
    with pytest.raises(InputError, match=r"one type of nodes has targets, but got y for author, paper"):
        gas.fit(MODELS["SAGE sum"](), data, num_parts=3)
    with pytest.raises(InputError, match="one of the types of nodes"):
        TypedDataset.of_types(data, "book")
    result = gas.fit(MODELS["SAGE sum"](), TypedDataset.of_types(data, "paper"), num_parts=3, epochs=1, device="cpu")
    assert len(result.epochs) == 1
    other = copy.copy(data)
    for place, name in enumerate(("train_mask", "val_mask", "test_mask")):
        other["author"][name] = torch.arange(30) % 3 == place
    with pytest.raises(InputError, match=r"the model must return rows of 'author'.*rows of paper"):
        gas.fit(MODELS["SAGE sum"](), TypedDataset.of_types(other, "author"), num_parts=3, epochs=1, device="cpu")
