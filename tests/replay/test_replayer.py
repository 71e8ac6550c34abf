"""Steps that are captured and replayed: what each of them asks for, and what stands in the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, undirected_graph
from gnnautoscale.forward import GraphMemory
from gnnautoscale.history import History
from gnnautoscale.models import build_model
from gnnautoscale.replay.graphs import watching
from gnnautoscale.replay.replayer import WARM_UP, Replayer
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training import Engine, Optimization, make_optimizer
from gnnautoscale.transfer import BatchRows, DirectTransfer

CPU = torch.device("cpu")


def autoscaled(data: Data) -> nn.Module:
    return gas.autoscale(build_model("gcn", data, 4, hidden=CHANNELS, layers=2), data)


# What stands in the way ##############################################################################################


class Counts(nn.Module):
    """Something with a number."""

    calls = 0


def count(model: Counts) -> None:
    model.calls += 1


@pytest.mark.parametrize(
    ("work", "reasons"),
    [
        (count, ["the model's attributes change from step to step"]),
        (lambda _: torch.rand(1), ["the model draws random numbers on the host"]),
        (lambda _: None, []),
    ],
)
def test_what_a_step_does_on_the_host_is_noticed(work: Callable[[nn.Module], Any], reasons: list[str]) -> None:
    model = Counts()
    model.calls = 0
    with watching(model) as found:
        work(model)
    assert found == reasons


def test_the_last_run_before_the_first_capture_is_watched() -> None:
    data = undirected_graph()
    replayer, batch = Replayer(autoscaled(data), CPU), next(iter(gas.HaloLoader(data, 3)))
    assert (replayer.why_not, replayer.how) == ("there is no GPU", "uncaptured: CUDA graphs need a GPU")
    replayer.why_not = None
    batch.edge_index.info.recurring = 3

    def work(batch: Data, extras: dict[str, Tensor]) -> Tensor:
        return extras["one"] + torch.rand(()) * 0

    for step in range(WARM_UP):
        assert replayer.why_not is None
        replayer.run(batch, work, {"one": torch.ones(())}, trains=False)  # does not count
        assert replayer.run(batch, work, {"one": torch.full((), float(step))}) == step
    assert replayer.why_not == "the model draws random numbers on the host"


def test_what_was_asked_for_comes_first() -> None:
    data = undirected_graph()
    assert Replayer(autoscaled(data), CPU, capture=False).why_not == "this was asked for"


# What a step asks for ################################################################################################


class Noted(DirectTransfer):
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, rows: BatchRows, following: BatchRows | None, histories: Mapping[str, History]) -> None:
        self.calls.append("begin" if following is None else "begin, another follows")
        super().begin(rows, following, histories)

    def look_ahead(self) -> None:
        self.calls.append("look ahead")

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        self.calls.append("exchange")
        return super().exchange(slot, history, rows, push=push)

    def end(self) -> None:
        self.calls.append("end")

    def complete(self) -> None:
        self.calls.append("complete")

    def replay(self) -> None:
        """What a captured step would do."""
        self.calls.append("replay")


def test_every_step_makes_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    data = undirected_graph()
    model, transfer, loader = autoscaled(data), Noted(), gas.HaloLoader(data, 2)
    engine = Engine(model, make_optimizer(model, Optimization(lr=0.01)), NodeClassification(4), CPU)
    model(next(iter(loader)))  # which makes the plan
    monkeypatch.setattr(GraphMemory, "transfer", lambda *_: transfer)
    first, second = (["begin, another follows"], ["begin"])
    rest = ["look ahead", "exchange", "end", "complete"]
    for batch in loader:
        model(batch)
    assert transfer.calls == [*first, *rest, *second, *rest]
    transfer.calls.clear()
    engine.epoch(loader)
    # It knows the batch that the next epoch begins with.
    assert transfer.calls == [*first, *rest, *first, *rest]
    # A replay asks for the next step's rows before this step's are on their way to a disk.
    transfer.calls.clear()
    monkeypatch.setattr(engine._replayer, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(engine._replayer, "why_not", None)
    monkeypatch.setattr(engine._replayer, "_placed", lambda *_: SimpleNamespace())
    monkeypatch.setattr(engine._replayer, "_replay", lambda *_: SimpleNamespace(graph=transfer, result=None))
    engine.epoch(loader)
    rest = ["replay", "look ahead", "complete"]
    assert transfer.calls == [*first, *rest, *first, *rest]
