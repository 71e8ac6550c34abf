"""A user's own step: the same numbers as without the helper, captured or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import assert_same
from gnnautoscale.data import generate
from gnnautoscale.models import build_model
from support.communities import weights_of

CLASSES, PARTS = 4, 6
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Step = Callable[[Data], Any]


@pytest.fixture
def data() -> Data:
    graph = generate.communities(300, degree=6.0, num_features=12, num_classes=CLASSES)
    graph.wanted = torch.where(graph.train_mask, graph.y, -1)
    return graph


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def model_for(data: Data, device: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    model = build_model("gcn", data, CLASSES, hidden=16, layers=3, dropout=0.0, batch_norm=False)
    return gas.autoscale(model.to(device), data, **options)


def loss_of(model: nn.Module, batch: Data) -> Tensor:
    out = model(batch.x, batch.edge_index)
    wanted = batch.wanted[: batch.batch_size]
    return F.cross_entropy(out, wanted, ignore_index=-1, reduction="sum") / 50


def usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Data) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


class Outcome(NamedTuple):
    """What training led to."""

    losses: list[float]
    weights: dict[str, Tensor]
    how: str


def trained(
    data: Data,
    device: str,
    *,
    capture: bool,
    epochs: int = 4,
    make_optimizer: MakeOptimizer = sgd,
    make_step: Callable[[nn.Module, torch.optim.Optimizer], Step] = usual,
    between: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, epoch: None,
    after_batch: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, number: None,
    batches_on: Any = "auto",
    loader: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """Train a small model with steps of one's own."""
    model = model_for(data, device, **options)
    optimizer = make_optimizer(model)
    step = made = make_step(model, optimizer)
    if capture:
        step = made = gas.capture(model, step, optimizer, batches_on=batches_on)
    batches = gas.HaloLoader(data, PARTS, partition="random", **{"device": device, **(loader or {})})
    losses = []
    for epoch in range(epochs):
        for number, batch in enumerate(batches):
            losses.append(step(batch.to(device)))
            after_batch(optimizer, number)
        between(optimizer, epoch)
    # Looked at here, so that a replay that wrote into the loss of another step would show.
    found = [float(loss.detach()) for loss in losses]
    return Outcome(found, {name: value.cpu() for name, value in weights_of(model).items()}, getattr(made, "how", ""))


def assert_alike(one: Outcome, other: Outcome, tolerance: float = 1e-4, *, weights: bool = True) -> None:
    """Equal up to rounding; Adam makes much of it in weights that hardly matter."""
    assert one.losses == pytest.approx(other.losses, rel=tolerance)
    for name, value in one.weights.items() if weights else ():
        assert_same(value, other.weights[name], tolerance)


def test_on_a_cpu_the_step_runs_as_it_is(data: Data) -> None:
    own, plain = (trained(data, "cpu", capture=capture, epochs=2) for capture in (True, False))
    assert own.how == "uncaptured: CUDA graphs need a GPU"
    assert own.losses == plain.losses
    assert all(torch.equal(own.weights[name], plain.weights[name]) for name in plain.weights)


def test_results_need_no_gradient(data: Data) -> None:
    model = model_for(data, "cpu")

    def step(batch: Data) -> dict[str, Any]:
        loss = loss_of(model, batch)
        return {"loss": loss, "several": [loss, loss * 2], "name": "step"}

    batch = next(iter(gas.HaloLoader(data, 3)))
    found = gas.capture(model, step)(batch)
    assert not found["loss"].requires_grad
    assert not any(value.requires_grad for value in found["several"])
    assert found["name"] == "step"
    assert gas.capture(model, lambda batch: None)(batch) is None


def test_bad_arguments_are_refused(data: Data) -> None:
    model = model_for(data, "cpu")
    wrong: Any = None
    with pytest.raises(gas.InputError, match="step must be a function, but got None"):
        gas.capture(model, wrong)
    with pytest.raises(gas.InputError, match=r"optimizers must be an Optimizer, but got .*capture\(model, step"):
        gas.capture(model, print, [sgd(model)])  # type: ignore[arg-type]
    with pytest.raises(gas.InputError, match="batches_on must be one of auto, device, host, but got 'disk'"):
        gas.capture(model, print, batches_on="disk")  # type: ignore[arg-type]
    with pytest.raises(gas.InputError, match="must be autoscaled"):
        gas.capture(gas.detach(model), print)


# On a GPU ############################################################################################################


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("batches_on", ["device", "host"])
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_captured_step_gives_the_numbers_of_the_plain_one(
    make_optimizer: MakeOptimizer, storage: str, batches_on: str, data: Data
) -> None:
    fixed: dict[str, Any] = {"make_optimizer": make_optimizer, "storage": storage}
    replayed = trained(data, "cuda", capture=True, batches_on=batches_on, **fixed)
    plain = trained(data, "cuda", capture=False, **fixed)
    where = "stay on the GPU" if batches_on == "device" else "are assembled anew"
    assert replayed.how.startswith(f"captured as {PARTS} CUDA graphs; batches {where}")
    assert_alike(replayed, plain, 1e-3, weights=make_optimizer is sgd)
    assert_alike(plain, trained(data, "cpu", capture=False, make_optimizer=make_optimizer), 1e-2, weights=False)
    assert sum(replayed.losses[-PARTS:]) < sum(replayed.losses[:PARTS])


@pytest.mark.gpu
def test_drawings_that_come_back_are_captured(data: Data) -> None:
    fixed: dict[str, Any] = {"epochs": 6, "loader": {"batch_size": 2, "shuffle": True, "drawings": 2}}
    replayed, plain = (trained(data, "cuda", capture=capture, **fixed) for capture in (True, False))
    assert replayed.how.startswith("captured as")
    assert_alike(replayed, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("passes_optimizer", [True, False])
def test_gradients_add_up_over_two_batches(passes_optimizer: bool, data: Data) -> None:
    """They are left there by one step for the next, and the optimizer steps outside."""

    def adding(model: nn.Module, _: torch.optim.Optimizer) -> Step:
        def step(batch: Data) -> Tensor:
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return step

    def after_batch(optimizer: torch.optim.Optimizer, number: int) -> None:
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=passes_optimizer)  # or keeps them as zeros

    fixed: dict[str, Any] = {"make_step": adding, "after_batch": after_batch, "storage": "host"}
    replayed, plain = (trained(data, "cuda", capture=capture, **fixed) for capture in (True, False))
    assert replayed.how.startswith("captured")
    assert_alike(replayed, plain)
    # Gradients that do not add up would lead elsewhere.
    alone = trained(data, "cuda", capture=False, storage="host")
    assert alone.losses != pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.gpu
def test_several_losses(data: Data) -> None:
    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(batch: Data) -> Tensor:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            first = F.cross_entropy(out, batch.wanted[: batch.batch_size], ignore_index=-1, reduction="sum") / 50
            second: Tensor = 1e-3 * out.square().sum()
            for loss in (first, second):
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            optimizer.step()
            return first + second

        return step

    replayed, plain = (
        trained(data, "cuda", capture=capture, make_step=make_step, storage="host") for capture in (True, False)
    )
    assert replayed.how.startswith("captured")
    assert_alike(replayed, plain)


def reads_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    step = usual(model, optimizer)

    def reading(batch: Data) -> Tensor:
        loss: Tensor = step(batch)
        assert loss.item() > 0
        return loss

    return reading


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"make_step": reads_the_loss}, "waits for values on the host"),
        ({"loader": {"batch_size": 2, "shuffle": True}}, "parts are drawn into new batches every epoch"),
        ({"loader": {"device": None}}, r"batches come from host memory (use HaloLoader(..., device='cuda'))"),
        ({"edge_dropout": 1e-9}, "edge dropout changes the number of edges"),
    ],
    ids=["item", "drawn", "host", "edge dropout"],
)
def test_a_step_that_cannot_be_captured_runs_as_it_is_and_says_why(
    options: dict[str, Any], reason: str, data: Data
) -> None:
    own, plain = (trained(data, "cuda", capture=capture, storage="host", **options) for capture in (True, False))
    assert own.how.startswith("uncaptured, since")
    assert reason in own.how
    assert_alike(own, plain)


@pytest.mark.gpu
def test_a_changed_learning_rate_is_used(data: Data) -> None:
    kept: list[list[Tensor]] = []

    def stop(optimizer: torch.optim.Optimizer, epoch: int) -> None:
        kept.append([weight.detach().clone() for weight in optimizer.param_groups[0]["params"]])
        optimizer.param_groups[0]["lr"] = 0.0 if epoch == 2 else 0.05

    def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    fixed: dict[str, Any] = {"epochs": 5, "make_optimizer": plain_sgd, "between": stop}
    replayed, plain = (trained(data, "cuda", capture=capture, **fixed) for capture in (True, False))
    assert replayed.how.startswith("captured")
    assert_alike(replayed, plain)
    # Nothing is learned in the fourth epoch, and in the fifth it goes on.
    stays = [all(torch.equal(*pair) for pair in zip(*two, strict=True)) for two in pairwise(kept[:5])]
    assert stays == [False, False, True, False]


@pytest.mark.gpu
def test_a_learning_rate_on_the_gpu_is_written_to(data: Data) -> None:
    def adam_there(model: nn.Module) -> torch.optim.Optimizer:
        rate = torch.tensor(0.01, device="cuda")
        return torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=True)

    def lower(optimizer: torch.optim.Optimizer, epoch: int) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.01 / (epoch + 2))

    fixed: dict[str, Any] = {"make_optimizer": adam_there, "epochs": 12}  # more changes than numbers may have
    lowered, plain = (trained(data, "cuda", capture=capture, between=lower, **fixed) for capture in (True, False))
    constant = trained(data, "cuda", capture=False, **fixed)
    assert lowered.how.startswith("captured")
    assert_alike(lowered, plain, 1e-2, weights=False)
    assert lowered.losses[-PARTS:] != pytest.approx(constant.losses[-PARTS:], rel=1e-2)


@pytest.mark.gpu
def test_numbers_that_change_all_the_time_end_capture(data: Data) -> None:
    def change(optimizer: torch.optim.Optimizer, epoch: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 / (epoch + 2)

    fixed: dict[str, Any] = {"epochs": 12, "between": change}
    own, plain = (trained(data, "cuda", capture=capture, **fixed) for capture in (True, False))
    assert own.how.startswith("uncaptured, since the model or the numbers of an optimizer change all the time")
    assert_alike(own, plain)


@pytest.mark.gpu
def test_evaluation_between_epochs_changes_nothing(data: Data) -> None:
    """The helper's steps share histories and batches with everything else that is done with a model."""
    found = []
    for evaluates in (True, False):
        model = model_for(data, "cuda", storage="host")
        optimizer = sgd(model)
        step = gas.capture(model, usual(model, optimizer), optimizer)
        loader, losses = gas.HaloLoader(data, PARTS, partition="random", device="cuda"), []
        for _ in range(4):
            losses += [step(batch) for batch in loader]
            if evaluates:
                out = gas.infer(model, loader, update_histories=False)
                assert bool(out.isfinite().all())
        assert step.how.startswith("captured")
        found.append([float(loss) for loss in losses])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
