"""The clock counts each moment for one piece of work, and tells which."""

import time

import pytest
import torch

from gnnautoscale.training.clock import Clock


def test_nested_work_counts_for_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    seconds: dict[str, float] = {}
    clock = Clock(seconds, torch.device("cpu"))
    with clock("train"):
        now += 1
        with clock("refresh"):
            now += 10
        now += 2
    now += 100
    with clock("train"):
        now += 4
    assert seconds == {"train": 7.0, "refresh": 10.0}
    assert clock.total("train") == 7.0
    assert clock.total("evaluate") == 0.0


def test_it_tells_what_runs_from_now_on() -> None:
    told: list[str] = []
    clock = Clock({}, torch.device("cpu"), told.append)
    with clock("train"), clock("refresh"):
        pass
    with pytest.raises(ZeroDivisionError), clock("evaluate"):
        raise ZeroDivisionError
    assert told == ["train", "refresh", "train", "", "evaluate", ""]
