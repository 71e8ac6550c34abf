"""Options: said once, checked and converted in the same way wherever they come from."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale.training.options as options_module
from gnnautoscale._util import options_of
from gnnautoscale.models import GCN
from gnnautoscale.training.clock import Clock
from gnnautoscale.training.optimizer import make_optimizer
from gnnautoscale.training.options import GROUPS, OPTIONS, FitOptions, Optimization, pick_device

DEFAULT_DEVICE = options_module.default_device  # tests replace it
EVERY = ("refresh_every", "checkpoint_every", "diagnose_every")


def test_every_option_is_declared_once_and_described() -> None:
    declared = [name for group in GROUPS for name in options_of(group)]
    assert sorted(declared) == sorted(OPTIONS) == sorted(FitOptions().to_dict())
    for name, each in OPTIONS.items():
        assert each.help.endswith("."), name
        assert each.default is None or each.check(each.default) == each.default, name


def test_fit_shows_every_option() -> None:
    parameters = inspect.signature(gas.fit).parameters
    assert list(parameters) == ["model", "data", "task", *OPTIONS, "callback", "on_phase", "loggers", "progress"]
    doc = inspect.getdoc(gas.fit) or ""
    for name, each in OPTIONS.items():
        assert parameters[name].default == each.default
        assert f"    {name}: {each.help[:20]}" in doc
    assert "{options}" not in doc


def test_a_name_that_is_no_option_is_refused_with_a_close_one() -> None:
    with pytest.raises(gas.InputError, match=r"got 'num_part'\. Did you mean 'num_parts'\?"):
        gas.fit(GCN(5, 3), Data(), num_part=4)
    with pytest.raises(gas.InputError, match=r"got 'zzz'\. Leave it out\."):
        gas.fit(GCN(5, 3), Data(), zzz=4)


@pytest.mark.parametrize("name", EVERY)
def test_a_number_is_the_same_as_its_digits(name: str) -> None:
    first, second = (FitOptions.of({name: value}) for value in (5, "5"))
    assert first == second
    assert getattr(first, name) == 5


def test_options_are_plain_values_for_json() -> None:
    options = FitOptions(mode="sage", fan_out=(3, 2), diagnose=("staleness", "gradients"))
    plain = options.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert FitOptions.of(plain) == options


def test_the_mode_decides_some_options() -> None:
    given: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "lipschitz": 0.1, "grad_norm": 1.0}
    full = FitOptions(mode="full", **given).in_effect()
    assert (full.num_parts, full.batch_size, full.lipschitz, full.grad_norm) == (1, 1, 0.0, 1.0)
    naive = FitOptions(mode="history", **given).in_effect()
    assert (naive.num_parts, naive.partition, naive.lipschitz, naive.grad_norm) == (6, "random", 0.0, None)
    assert FitOptions(**given).in_effect() == FitOptions(**given)


def test_what_may_change_when_a_run_resumes() -> None:
    free = FitOptions().may_change()
    assert {"epochs", "patience", "device", "storage", "run_dir", "checkpoint_every"} <= free
    assert not {"num_parts", "lr", "seed", "mode", "precision", "refresh_every", "history_dtype", "evaluation"} & free
    assert free - FitOptions(schedule="cosine").may_change() == {"epochs"}


@pytest.mark.parametrize("every", [2, "2"])
def test_a_number_and_its_digits_are_the_same_run(tmp_path: Path, every: int | str) -> None:
    def train(epochs: int, refresh_every: int | str, **options: Any) -> gas.FitResult:
        torch.manual_seed(0)
        data = gas.load("communities", nodes=40, features=5, classes=3, degree=4.0)
        return gas.fit(
            GCN(5, 3, hidden=4), data, num_parts=4, epochs=epochs, refresh_every=refresh_every, device="cpu", **options
        )

    train(1, every, checkpoint_dir=str(tmp_path))
    other: int | str = 2 if every == "2" else "2"
    assert train(2, other, resume=str(tmp_path)).epochs[-1].loss == train(2, 2).epochs[-1].loss


# Devices #############################################################################################################


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "usable_device", lambda device: None)
    monkeypatch.setattr(options_module, "default_device", DEFAULT_DEVICE)
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert pick_device("auto") == device
        assert FitOptions().device == device
        assert pick_device("cpu") == "cpu"


def test_a_clock_on_the_cpu_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(*_: Any) -> None:
        raise AssertionError("this would create a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    seconds: dict[str, float] = {}
    with Clock(seconds, torch.device("cpu"))("train"):
        pass
    assert seconds["train"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_the_cpu_creates_no_cuda_context() -> None:
    code = (
        "import torch, gnnautoscale as gas; from gnnautoscale.models import GCN;"
        "data = gas.load('communities', nodes=60, features=5, classes=3, degree=4.0);"
        "gas.fit(GCN(5, 3), data, num_parts=4, epochs=2, device='cpu', refresh_every='epoch');"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Weight decay ########################################################################################################


@pytest.mark.parametrize(
    ("options", "first", "rest"),
    [
        ({}, 0.0, 0.0),
        ({"weight_decay": 0.1}, 0.1, 0.1),
        ({"weight_decay": 0.1, "weight_decay_conv": 0.2}, 0.2, 0.1),
        ({"weight_decay": 0.1, "weight_decay_other": 0.0}, 0.1, 0.0),
        ({"weight_decay_conv": 0.2, "weight_decay_other": 0.3}, 0.2, 0.3),
    ],
)
def test_weight_decay_of_a_group_wins(options: dict[str, Any], first: float, rest: float) -> None:
    groups = make_optimizer(GCN(5, 3, layers=2), Optimization(**options)).param_groups
    assert [group["weight_decay"] for group in groups] == [first, rest]
