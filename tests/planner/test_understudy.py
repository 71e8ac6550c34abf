"""Copies that are tried in place of a model: every run starts in the same state, and the model stays as it is."""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, undirected_graph
from gnnautoscale._util import undisturbed
from gnnautoscale.forward import Plan
from gnnautoscale.planner import understudy as understudy_module
from gnnautoscale.planner.rehearsal import Observation
from gnnautoscale.planner.trial_graph import TrialGraph, disturb, setups_for
from gnnautoscale.planner.understudy import Understudy, seed_everything

C = CHANNELS
CPU = torch.device("cpu")


class Changing(nn.Module):
    """Changes everything about itself that a forward pass can, and adds to its rows what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(C, C)
        self.calls, self.sizes, self.kept = 0, [1.0], {"rows": torch.zeros(C)}
        self.total: Tensor
        self.register_buffer("total", torch.tensor([0.0, 1.0]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.conv(x, edge_index) + self.calls + sum(self.sizes) + self.kept["rows"] + self.total.sum()
        self.calls += 1
        self.sizes.append(2.0)
        self.kept["rows"] = x.detach().mean(0)
        self.total += 1.0
        return x


class Still(nn.Module):
    """Has dropout, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = pyg.SAGEConv(C, C), nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.drop(self.conv(x, edge_index))


def run(actor: Understudy, **options: Any) -> Tensor:
    """Run an understudy on the whole of a trial graph."""
    batch = next(iter(gas.HaloLoader(undirected_graph(), 2)))
    bound = inspect.signature(lambda x, edge_index: None).bind(batch.x, batch.edge_index)
    info = batch.edge_index.info
    with undisturbed(CPU), torch.no_grad():
        seed_everything(0, CPU)
        trial = TrialGraph(info, bound, CPU, setups_for(info.graph)[0], actor.dtype)
        whole = next(iter(trial.whole))
        session = Observation(trial, whole, Plan()).session
        out: Tensor = actor.run(session, trial.arguments(whole), **options)
    return out


# State ###############################################################################################################


def test_every_run_starts_in_the_same_state_after_a_reset() -> None:
    model = Changing()
    actor = Understudy(model)
    first, second = run(actor), run(actor)
    assert not torch.allclose(first, second)
    actor.reset()
    assert torch.equal(run(actor), first)
    actor.reset()
    assert actor.touched() == []


def test_the_model_itself_stays_as_it_is() -> None:
    model = Changing()
    weights = copy.deepcopy(model.state_dict())
    run(Understudy(model, torch.float64))
    assert (model.calls, model.sizes, model.kept["rows"].tolist()) == (0, [1.0], [0.0] * C)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert "forward" not in vars(model.conv)


def test_what_a_run_changes_is_named() -> None:
    actor = Understudy(Changing())
    assert actor.touched() == []
    run(actor)
    assert actor.touched() == ["calls", "kept", "sizes", "total"]
    assert actor.changed_attributes() == {("", "calls"), ("", "kept"), ("", "sizes")}
    (kept,) = actor.kept_tensors()
    model: Any = actor.model
    assert kept is model.kept["rows"]


def test_a_copy_that_nothing_has_touched_is_used_again() -> None:
    actor = Understudy(Still())
    run(actor)
    before = actor.model
    actor.reset()
    assert actor.model is before


def test_copies_share_the_memory_of_weights() -> None:
    actor = Understudy(Changing())
    run(actor)
    weights = [weight.data_ptr() for weight in actor.model.parameters()]
    actor.reset()
    assert [weight.data_ptr() for weight in actor.model.parameters()] == weights


def test_very_large_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(understudy_module, "MOST_COPIED", 10)
    model = nn.Sequential(nn.Linear(4, 3)).requires_grad_(False)
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    weight, bias = Understudy(model, torch.float64).model.parameters()
    assert weight.data_ptr() == next(model.parameters()).data_ptr()
    assert weight.requires_grad
    assert (weight.dtype, bias.dtype) == (torch.float32, torch.float64)
    assert bias.all()
    assert not any(value.requires_grad or value.any() for value in model.parameters())


# Weights #############################################################################################################


def test_weights_of_another_type() -> None:
    model = Still()
    actor = Understudy(model, torch.float64)
    assert {value.dtype for value in actor.model.parameters()} == {torch.float64}
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert run(actor).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_frozen_weights_are_tried_as_trainable_ones() -> None:
    model = Still().requires_grad_(False)
    assert all(value.requires_grad for value in Understudy(model).model.parameters())
    assert not any(value.requires_grad for value in model.parameters())


def test_equal_entries_are_disturbed_except_for_statistics_of_norms() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.zeros_(model[0].bias)
    model.register_buffer("gate", torch.zeros(2))
    model.register_buffer("count", torch.zeros(2, dtype=torch.long))
    actor: Any = Understudy(model).model
    assert torch.equal(actor.gate, disturb(torch.zeros(2)))
    assert torch.equal(actor[0].bias, disturb(torch.zeros(2)))
    assert torch.equal(actor[1].weight, disturb(torch.ones(2)))
    assert torch.equal(actor[0].weight, model[0].weight)
    assert not actor[1].running_mean.any()
    assert not actor.count.any()
    plain: Any = Understudy(model, disturbed=False).model
    assert not plain.gate.any()
    assert not model.gate.any()


# Random numbers ######################################################################################################


def test_runs_give_expected_values_unless_by_chance() -> None:
    actor = Understudy(Still())
    expected = run(actor)
    assert expected.all()
    drawn = run(actor, seed=1, by_chance=True)
    kept = drawn != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(drawn[kept], 2 * expected[kept])
    assert torch.equal(run(actor, seed=1, by_chance=True), drawn)
    assert not torch.equal(run(actor, seed=2, by_chance=True), drawn)


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return F.dropout(self.conv(x, edge_index), 0.5, training=True)


@pytest.mark.parametrize("training", [True, False])
def test_draws_are_replaced_in_training_mode_only(training: bool) -> None:
    """In evaluation mode nothing should be random; if something is, it has to show."""
    out = run(Understudy(Always().train(training)))
    assert bool((out == 0).any()) is not training


def test_everything_random_is_seeded() -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002

    with undisturbed(CPU):
        seed_everything(7, CPU)
        first = draw()
        assert first != draw()
        seed_everything(7, CPU)
        assert draw() == first
