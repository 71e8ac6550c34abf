"""What is said when training fails, and what is left of it."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GraphConv  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale.training.faults as faults_module
from conftest import history_rows
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.graph.assemble import BatchBuilder
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.runs.result import Epoch
from gnnautoscale.training.checkpoint import latest_checkpoint, load_latest
from gnnautoscale.training.loop import fit
from gnnautoscale.training.options import FitOptions
from gnnautoscale.training.strategies import HistoryStrategy, SubgraphStrategy
from support.communities import CLASSES, FEATURES, community_graph

OUT_OF_GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB\nand more"
OUT_OF_HOST = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: {} memory: you tried to allocate 2147483648 bytes."
)


class Trouble:
    """What models raise in training, or in evaluation. As an attribute of theirs it would be raised while planning."""

    error: BaseException | None = None
    in_training = True


TROUBLE = Trouble()


@pytest.fixture(autouse=True)
def _no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TROUBLE, "error", None)
    monkeypatch.setattr(TROUBLE, "in_training", True)


class Fragile(nn.Module):
    """Three layers; what goes wrong in them is set from outside.

    Attributes:
        at_inputs: Multiplies the features of each node.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        widths = (FEATURES, 8, 8, CLASSES)
        self.convs = nn.ModuleList([GraphConv(widths[layer], widths[layer + 1]) for layer in range(3)])
        self.at_inputs = torch.ones(100, 1)

    def spoil(self, *layers: int) -> None:
        """Let some layers give no numbers."""
        for layer in layers:
            next(self.convs[layer].parameters()).data.fill_(math.nan)

    def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Tensor:
        if TROUBLE.error is not None and self.training == TROUBLE.in_training:
            raise TROUBLE.error
        x = x * self.at_inputs[n_id]
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


OPTIONS: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "epochs": 4, "seed": 3}


@pytest.fixture(params=["device", "disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"storage": request.param, "history_dir": str(tmp_path / "rows")}


# Values that are not finite ##########################################################################################


class Watched:
    """Trains until something is done after an epoch; remembers the histories from then."""

    def __init__(self, model: Fragile, then: Callable[[], None], epoch: int = 1) -> None:
        self.model, self._then, self._epoch = model, then, epoch
        self.memory: GraphMemory
        self.rows: dict[str, Tensor] = {}

    def __call__(self, epoch: Epoch) -> None:
        if epoch.number == self._epoch:
            self.memory = attached(self.model).memory
            self.memory.settle()
            self.rows = {slot: history.raw.clone() for slot, history in self.memory.histories.items()}
            self._then()

    def now(self) -> dict[str, Tensor]:
        self.memory.settle()
        return {slot: history.raw for slot, history in self.memory.histories.items()}


def second_epoch(data: Data) -> list[list[int]]:
    """The nodes of the batches of the second epoch."""
    loader = HaloLoader(
        data, OPTIONS["num_parts"], batch_size=OPTIONS["batch_size"], shuffle=True, seed=OPTIONS["seed"]
    )
    for _ in loader:
        pass
    return [batch.n_id[: batch.batch_size].tolist() for batch in loader]


@pytest.mark.parametrize(("node", "value"), [(5, math.nan), (30, -math.inf)])
def test_the_layer_a_node_and_the_batch_are_named(node: int, value: float, storage: dict[str, Any]) -> None:
    data, model = community_graph(), Fragile()
    source, target = data.edge_index
    reached = {node, *target[source == node].tolist()}
    number, nodes = next((i, nodes) for i, nodes in enumerate(second_epoch(data), 1) if reached & set(nodes))
    bad = [other for other in nodes if other in reached]

    def spoil() -> None:
        model.at_inputs[node] = value

    watched = Watched(model, spoil)
    expected = (
        f"layer 'convs.0' gives values that are not finite for {len(bad)} of {len(nodes)} nodes "
        f"(node {bad[0]} among them) in batch {number} of epoch 2: lower lr, or clip gradients with grad_norm"
    )
    with pytest.raises(FloatingPointError, match=f"^{re.escape(expected)}$"):
        fit(model, data, callback=watched, **OPTIONS, **storage)
    # What was good stays good, and where the bad batch's rows are nothing changed.
    rows = watched.now()
    place = HaloLoader(data, OPTIONS["num_parts"], seed=OPTIONS["seed"]).row_order.row_of[nodes]
    for slot, before in watched.rows.items():
        assert bool(torch.isfinite(rows[slot]).all())
        assert torch.equal(rows[slot][place], before[place])
    assert not hasattr(model, "_autoscaler")


@pytest.mark.parametrize("layer", [0, 1])
def test_what_a_bad_layer_gives_is_not_kept(layer: int, storage: dict[str, Any]) -> None:
    model = Fragile()
    watched = Watched(model, lambda: model.spoil(layer))
    with pytest.raises(FloatingPointError, match=rf"'convs.{layer}' .* in batch 1 of epoch 2: lower lr"):
        fit(model, community_graph(), callback=watched, **OPTIONS, **storage)
    rows = watched.now()
    assert rows.keys() == {"convs.0", "convs.1"}
    # In memory, layers before it have written already.
    kept = {f"convs.{other}" for other in range(0 if storage["storage"] == "disk" else layer, 2)}
    for slot, before in watched.rows.items():
        assert torch.equal(rows[slot], before) == (slot in kept)
        assert bool(torch.isfinite(rows[slot]).all())


def test_a_loss_that_is_no_number_names_the_batch(storage: dict[str, Any]) -> None:
    """The last layer has no history that could be spoiled."""
    model = Fragile()
    watched = Watched(model, lambda: model.spoil(2), epoch=2)
    with pytest.raises(FloatingPointError, match=r"^the loss is nan in batch 1 of epoch 3: lower lr"):
        fit(model, community_graph(), callback=watched, **OPTIONS, **storage)
    assert all(bool(torch.isfinite(rows).all()) for rows in watched.now().values())


def test_without_fit_the_layer_and_a_node_are_named() -> None:
    data = community_graph()
    model = gas.autoscale(Fragile(), data)
    loader = HaloLoader(data, 4)
    batch = next(iter(loader))
    model(batch)
    before = history_rows(model)
    model.spoil(0)
    expected = rf"^layer 'convs.0' .* for {batch.batch_size} of {batch.batch_size} nodes \(node \d+ among them\)$"
    with pytest.raises(FloatingPointError, match=expected):
        model(batch)
    with pytest.raises(FloatingPointError, match=r"layer 'convs\.0'"):
        gas.refresh(model, loader)
    assert all(torch.equal(rows, before[slot]) for slot, rows in history_rows(model).items())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"refresh_every": 2}, r"layer 'convs.0' .* after batch 2 of epoch 1: lower lr"),
        ({"refresh_every": "epoch"}, r"layer 'convs.0' .* after epoch 1: lower lr"),
        ({}, r"layer 'convs.0' .* after epoch 1: lower lr"),
        ({"num_parts": 1, "batch_size": 1}, r"layer 'convs.0' .* after epoch 1: lower lr"),
        ({"mode": "cluster"}, r"outputs are not finite any more after epoch 1: lower lr"),
    ],
    ids=str,
)
def test_what_goes_wrong_between_batches_says_after_which(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str
) -> None:
    model = Fragile()

    def spoiled(strategy: Any, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model.spoil(0, 1, 2)
        return work(strategy, *args, **kwargs)

    for kind, name in ((HistoryStrategy, "refresh"), (HistoryStrategy, "output"), (SubgraphStrategy, "output")):
        monkeypatch.setattr(kind, name, partialmethod(spoiled, getattr(kind, name)))
    with pytest.raises(FloatingPointError, match=expected):
        fit(model, community_graph(), **{**OPTIONS, **options})


def test_no_checkpoint_is_written_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = Fragile()

    def spoil(epoch: Epoch) -> None:
        if epoch.number == 3:
            next(model.parameters()).data[0] = math.inf

    with pytest.raises(FloatingPointError, match=r"^the weights are not finite any more after epoch 3: lower lr"):
        fit(model, community_graph(), checkpoint_dir=str(tmp_path), callback=spoil, **OPTIONS)
    found = load_latest(tmp_path)
    assert found is not None
    assert len(found.state["result"]["epochs"]) == 2


def test_no_checkpoint_is_written_in_an_epoch_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    """The loss of the first batch is fine; what the step leaves behind is not."""
    model = Fragile()
    next(model.parameters()).register_hook(lambda grad: grad * math.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(FloatingPointError, match=r"^the weights are not finite any more after batch 1 of epoch 1: "):
        fit(model, community_graph(), checkpoint_dir=str(tmp_path), checkpoint_every=1, **OPTIONS)
    assert latest_checkpoint(tmp_path) is None


# Memory ##############################################################################################################


@pytest.fixture
def one_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is 1 GiB of free memory, and no GPU."""
    monkeypatch.setattr(faults_module, "available_memory", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("one_gigabyte")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(OUT_OF_GPU), OUT_OF_GPU.splitlines()[0]),
        (RuntimeError(OUT_OF_HOST.format("can't allocate")), OUT_OF_HOST.format("can't allocate")),
        (RuntimeError(OUT_OF_HOST.format("not enough")), OUT_OF_HOST.format("not enough")),
        (MemoryError("Unable to allocate 2.00 GiB for an array"), "Unable to allocate 2.00 GiB for an array"),
    ],
    ids=["gpu", "host", "elsewhere", "numpy"],
)
@pytest.mark.parametrize(
    ("options", "in_training", "advice"),
    [
        # Half as much as is wanted is free, and a tenth of that is to stay free.
        ({"num_parts": 6, "batch_size": 5}, True, "Lower batch_size from 5 to 2, or raise num_parts."),
        ({"num_parts": 6, "batch_size": 1}, True, "Raise num_parts from 6 to 14."),
        ({"mode": "full"}, True, "Raise num_parts from 1 to 3."),
        ({"num_parts": 6, "batch_size": 5}, False, "Lower batch_size from 5 to 2, or raise num_parts."),
        ({"evaluate_parts": 2}, True, "Lower batch_size from 2 to 1, or raise num_parts."),
        ({"evaluate_parts": 2}, False, "Raise evaluate_parts from 2 to 5."),
        ({"mode": "cluster"}, True, "Lower batch_size from 2 to 1, or raise num_parts."),
    ],
    ids=str,
)
def test_too_little_memory_says_what_to_lower(
    error: BaseException, said: str, options: dict[str, Any], in_training: bool, advice: str
) -> None:
    strategy: Any = Strategy(between=not in_training, at_once=options.get("mode") == "cluster")
    sizes = FitOptions(**{"num_parts": 6, "batch_size": 2, "device": "cpu", **options}).in_effect()
    with pytest.raises(MemoryError) as caught, faults_module.explained(strategy, 2, sizes):
        raise error
    assert str(caught.value) == f"There is not enough memory ({said}). {advice}"
    assert caught.value.__cause__ is error


class Strategy:
    """What the explanations look at."""

    def __init__(self, *, between: bool, at_once: bool) -> None:
        self.between, self.evaluates_at_once, self.done = between, at_once, 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not looked at")


@pytest.mark.usefixtures("one_gigabyte")
@pytest.mark.parametrize(
    ("in_training", "options", "advice"),
    [
        (True, {}, r"alloc_cpu.cpp:127.*\)\. Lower batch_size from 2 to 1, or raise num_parts\.$"),
        (True, {"batch_size": 1}, r"Raise num_parts from 6 to 14\.$"),
        (False, {"evaluate_parts": 3}, r"Raise evaluate_parts from 3 to 7\.$"),
        (True, {"mode": "sage", "fan_out": [2, 2, 2]}, r"Lower batch_size from 2 to 1, or raise num_parts\.$"),
        (False, {"mode": "cluster"}, r"\) to evaluate on the whole graph at once\.$"),
    ],
)
def test_training_says_what_to_lower(in_training: bool, options: dict[str, Any], advice: str) -> None:
    model = Fragile()
    TROUBLE.in_training = in_training

    def run_out(epoch: Epoch) -> None:
        TROUBLE.error = RuntimeError(OUT_OF_HOST.format("can't allocate"))

    with pytest.raises(MemoryError, match=advice):
        fit(model, community_graph(), callback=run_out, **{**OPTIONS, **options})
    assert not hasattr(model, "_autoscaler")


def test_memory_that_really_is_not_there_is_noticed() -> None:
    """What PyTorch says today."""

    class Greedy(Fragile):
        wanted = 0

        def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Tensor:
            return super().forward(x, edge_index, n_id) + torch.empty(self.wanted).numel()

    model = Greedy()
    with pytest.raises(MemoryError, match=r"allocate 18014398509481984 bytes.*Lower batch_size from 2 to 1"):
        fit(model, community_graph(), callback=lambda _: setattr(model, "wanted", 2**52), **OPTIONS)


@pytest.mark.parametrize(
    ("said", "free", "parts"),
    [
        ("", 2**30, 20),
        ("odd", 0, 20),
        # Nothing at all is free, which says little.
        ("allocate 5 GiB", 0, 100),
        # There seems to be enough, and yet there is not.
        ("allocate 5 bytes", 2**30, 12),
        ("allocate 1.5TiB", 2**40, 17),
        ("allocate 0 bytes", 9, 20),
    ],
)
def test_advice_for_odd_amounts(monkeypatch: pytest.MonkeyPatch, said: str, free: int, parts: int) -> None:
    monkeypatch.setattr(faults_module, "available_memory", lambda: free)
    expected = f"There is not enough memory ({said or 'MemoryError'}). Raise num_parts from 10 to {parts}."
    strategy: Any = Strategy(between=False, at_once=False)
    with pytest.raises(MemoryError) as caught, faults_module.explained(strategy, 2, FitOptions(num_parts=10)):
        raise MemoryError(said)
    assert str(caught.value) == expected


def test_a_gpu_counts_what_is_in_use_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 4 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * 2**30)
    # 4 GiB could be used, and 2 and 2 more are wanted.
    strategy: Any = Strategy(between=False, at_once=False)
    options = FitOptions(num_parts=10, batch_size=10, device="cpu")
    with (
        pytest.raises(MemoryError, match=r"Lower batch_size from 10 to 9, or raise num_parts\.$"),
        faults_module.explained(strategy, 2, options),
    ):
        raise torch.OutOfMemoryError(OUT_OF_GPU)


@pytest.mark.parametrize("error", [RuntimeError("odd"), ValueError("odd"), gas.InputError("a", got="b", fix="c")])
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    def fail(epoch: Epoch) -> None:
        TROUBLE.error = error

    with pytest.raises(type(error)) as caught:
        fit(Fragile(), community_graph(), callback=fail, **OPTIONS)
    assert caught.value is error


def test_errors_of_the_callback_are_left_as_they_are() -> None:
    error = MemoryError("mine")

    def fail(epoch: Epoch) -> None:
        raise error

    with pytest.raises(MemoryError) as caught:
        fit(Fragile(), community_graph(), callback=fail, **OPTIONS)
    assert caught.value is error


# Workers #############################################################################################################


@pytest.fixture
def not_forever() -> Iterator[None]:
    """Ends a test that waits for what never comes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("this waits for something that does not come")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("not_forever")
@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="workers are told by what they inherit")
@pytest.mark.parametrize("number", [1, 2])
def test_a_worker_that_dies_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    assemble, calls = BatchBuilder.start, 0

    def die(self: BatchBuilder, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if get_worker_info() is not None and calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return assemble(self, *arguments)

    monkeypatch.setattr(BatchBuilder, "start", die)
    model = Fragile()
    expected = r"^in epoch 1, a process .* died \(DataLoader worker .*\)\. The system may .* lower num_workers\.$"
    with pytest.raises(ChildProcessError, match=expected):
        fit(model, community_graph(), num_workers=1, **OPTIONS)
    assert not hasattr(model, "_autoscaler")
    with pytest.raises(ChildProcessError, match="DataLoader worker"):
        list(HaloLoader(community_graph(), 6, num_workers=1))
