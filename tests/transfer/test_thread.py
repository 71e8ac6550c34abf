"""The thread that moves rows between steps and files: exact, whatever overlaps, and no failure is lost."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnautoscale as gas
import gnnautoscale.transfer.thread as thread_module
from conftest import history_rows, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.inference import infer_from_histories
from gnnautoscale.errors import InputError
from gnnautoscale.history import DiskHistory, History
from gnnautoscale.kernels import Runs
from gnnautoscale.models import build_model
from gnnautoscale.transfer import BatchRows
from gnnautoscale.transfer.thread import ThreadTransfer
from support import transfers
from support.communities import CLASSES, community_graph, same_bits, weights_of
from support.transfers import check_steps_that_fail, disagreements, precisions, rows_of

CPU = torch.device("cpu")


# Interleavings #######################################################################################################


class SlowDisk(DiskHistory):
    """Takes its time with everything, so that what does not wait comes too early."""

    delay = 0
    number = 0
    folder = Path()

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device) -> None:
        SlowDisk.number += 1
        super().__init__(num_nodes, width, dtype, path=self.folder / f"{self.number}.rows")

    def gather(self, index: Tensor, out: Tensor) -> None:
        wait(self.delay)
        super().gather(index, out)

    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        wait(self.delay)
        super().write(raw, where, runs)


def wait(delay: int) -> None:
    if delay:
        time.sleep(random.random() * 0.002)


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[SlowDisk]:
    """Histories in files, and steps, that are slow in turns."""
    monkeypatch.setattr(SlowDisk, "folder", tmp_path)
    monkeypatch.setattr(transfers, "slow", wait)
    return SlowDisk


@pytest.mark.parametrize("seed", range(2))
@precisions
def test_what_is_read_ahead_is_exact(slow_disk: type[SlowDisk], seed: int, dtype: torch.dtype) -> None:
    assert disagreements(ThreadTransfer(CPU), CPU, steps=50, seed=seed, dtype=dtype, open_slow=slow_disk) == 0


def test_rows_that_others_write_between_steps_are_read_again(slow_disk: type[SlowDisk]) -> None:
    def wrong(first_late: int | None, seed: int) -> int:
        transfer = ThreadTransfer(CPU, first_late)
        return disagreements(transfer, CPU, steps=50, seed=seed, open_slow=slow_disk, first_late=300)

    assert sum(wrong(300, seed) for seed in (0, 1)) == 0
    assert sum(wrong(None, seed) for seed in (0, 1)) > 0


@pytest.mark.parametrize("seed", range(2, 4))
def test_what_several_threads_read_is_exact(
    slow_disk: type[SlowDisk], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(thread_module, "_WORKERS", 3)
    monkeypatch.setattr(thread_module, "_SHARE", 20 * transfers.WIDTH * 4)  # 20 rows are worth a thread
    pieces: list[tuple[str, int]] = []
    wholes: set[int] = set()

    class Noted(slow_disk):  # type: ignore[misc, valid-type]
        def announce(self, index: Tensor) -> None:
            wholes.add(index.numel())
            super().announce(index)

        def gather(self, index: Tensor, out: Tensor) -> None:
            pieces.append((threading.current_thread().name, index.numel()))
            super().gather(index, out)

    assert disagreements(ThreadTransfer(CPU), CPU, steps=40, seed=seed, open_slow=Noted) == 0
    sizes = {name: {size for other, size in pieces if other == name} for name, _ in pieces if name.startswith("rows")}
    assert len(sizes) > 1
    assert 20 <= max(set().union(*sizes.values())) < max(wholes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [(torch.float32, 0), (torch.float32, 1), (torch.float32, 2), (torch.int8, 3), (torch.float8_e4m3fn, 4)],
    ids=str,
)
def test_what_is_read_ahead_for_a_gpu_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int
) -> None:
    """The GPU's steps take longer than what the thread does, or less, in turns."""
    monkeypatch.setattr(SlowDisk, "folder", tmp_path)
    device = torch.device("cuda", 0)
    assert disagreements(ThreadTransfer(device), device, steps=60, seed=seed, dtype=dtype, open_slow=SlowDisk) == 0


class NoPatch(ThreadTransfer):
    """Forgets what the step before writes itself."""

    def _arrive(self, slot: str, places: Tensor, positions: Tensor) -> None:
        super()._arrive(slot, places[:0], positions[:0])


class NoWaitForRead(ThreadTransfer):
    """Does not wait for rows that were read ahead."""

    def _start(self, rows: BatchRows, side: int, before: BatchRows | None) -> Any:
        read = super()._start(rows, side, before)
        if before is not None:
            shared = read.shared
            read.shared = Future()
            read.shared.set_result(shared.result() if shared.done() else thread_module._nothing())
        return read


class NoWaitForWrites(ThreadTransfer):
    """Reads what an earlier step is still writing."""

    def _pending_writes(self) -> list[Future[None]]:
        return []


class NoSettling(ThreadTransfer):
    """Lets others look at the file too early."""

    def settle(self) -> None:
        self._following = self._read = None


class OneSide(ThreadTransfer):
    """Reads ahead into what the step still uses."""

    _side = property(lambda _: 0, lambda _, __: None)

    def _start(self, rows: BatchRows, side: int, before: BatchRows | None) -> Any:
        return super()._start(rows, 0, before)


@pytest.mark.parametrize("kind", [NoPatch, NoWaitForRead, NoWaitForWrites, NoSettling, OneSide])
def test_nothing_can_be_left_out(slow_disk: type[SlowDisk], kind: type[ThreadTransfer]) -> None:
    """The stress test above notices when any one of these is missing."""
    for seed in range(8):
        if disagreements(kind(CPU), CPU, steps=50, seed=seed, open_slow=slow_disk):
            return
    raise AssertionError("nothing went wrong")


@precisions
def test_what_a_step_that_failed_computed_is_not_used(tmp_path: Path, dtype: torch.dtype) -> None:
    history = DiskHistory(40, 2, dtype, path=tmp_path / "first.rows")
    check_steps_that_fail(ThreadTransfer(CPU), history, writes_at_end=False)


@precisions
def test_gradients_flow_to_the_batch_only(tmp_path: Path, dtype: torch.dtype) -> None:
    info = next(iter(gas.HaloLoader(undirected_graph(40, 100), 4))).edge_index.info
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, dtype, path=tmp_path / "first.rows")
    rows = torch.ones(info.batch_size, 2, requires_grad=True)
    transfer.begin(rows_of(info), None, {"first": history})
    transfer.exchange("first", history, rows).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.ones_like(rows))


def test_a_step_has_to_begin() -> None:
    transfer = ThreadTransfer(CPU)
    transfer.look_ahead()
    transfer.settle()
    with pytest.raises(RuntimeError, match="begin"):
        transfer.end()


def test_the_model_may_write_into_rows_that_are_all_there_are(tmp_path: Path) -> None:
    """Without a halo it goes on with the very rows that it pushed."""
    info = next(iter(gas.HaloLoader(undirected_graph(40, 100), 1))).edge_index.info
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, torch.float32, path=tmp_path / "first.rows")
    transfer.begin(rows_of(info), None, {"first": history})
    transfer.exchange("first", history, torch.ones(40, 2)).zero_()
    transfer.end()
    transfer.complete()
    transfer.settle()
    assert torch.equal(history.raw, torch.ones(40, 2))


# Failures ############################################################################################################


class Broken:
    """Lets some writes to files pass, and then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, *, left: int) -> None:
        self._pwrite, self._code, self.left = os.pwrite, code, left
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, file: int, data: memoryview, start: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(self._code, os.strerror(self._code))
        return self._pwrite(file, data, start)


def steps_on(transfer: ThreadTransfer, history: History, count: int, done: list[int]) -> None:
    infos = [batch.edge_index.info for batch in gas.HaloLoader(undirected_graph(40, 100), 4)]
    for number in range(count):
        info = infos[number % 4]
        transfer.begin(rows_of(info), rows_of(infos[(number + 1) % 4]), {"first": history})
        transfer.look_ahead()
        transfer.exchange("first", history, torch.ones(info.batch_size, 2))
        transfer.end()
        transfer.complete()
        done.append(number)


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_write_that_fails_ends_one_of_the_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    Broken(monkeypatch, errno.EIO, left=at)
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, torch.float32, path=tmp_path / "first.rows")
    done: list[int] = []
    with pytest.raises(InputError, match=r"first.rows \(Input/output error\)"):
        steps_on(transfer, history, 20, done)
    # Every step writes one piece, and hears of it when its place is needed again, or there has to be more room.
    assert at < len(done) <= at + 2


@pytest.mark.parametrize("at", [0, 1])
def test_a_write_that_fails_is_heard_of_before_anyone_looks_at_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    Broken(monkeypatch, errno.ENOSPC, left=at)
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, torch.float32, path=tmp_path / "first.rows")
    steps_on(transfer, history, at + 1, [])
    with pytest.raises(InputError, match=r"No space left on device.*Free some space"):
        transfer.settle()


@pytest.mark.usefixtures("cold")
def test_a_read_that_fails_ends_the_step_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fail(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fadvise", fail)
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, torch.float32, path=tmp_path / "first.rows")
    done: list[int] = []
    with pytest.raises(InputError, match=r"first.rows \(Input/output error\)"):
        steps_on(transfer, history, 20, done)
    assert done == [0, 1]  # the second step needs more room, so rows that were read ahead for it are read again


def test_a_replayed_step_writes_where_it_wrote_when_captured(tmp_path: Path) -> None:
    """A replay does the device's work alone, which ends with rows that are recent."""
    first, second = [rows_of(batch.edge_index.info) for batch in gas.HaloLoader(undirected_graph(40, 100), 4)][:2]
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, torch.float32, path=tmp_path / "first.rows")
    expected = torch.zeros(40, 2)
    transfer.begin(first, second, {"first": history})
    transfer.exchange("first", history, torch.ones(first.batch_size, 2))
    transfer.end()
    transfer.join()
    for step in range(3):
        transfer.begin(first, second, {"first": history})
        transfer._rooms["first"].recent.fill_(float(step))
        transfer.look_ahead()
        transfer.complete()
        expected[first.index[: first.batch_size]] = float(step)
        transfer.begin(second, first, {"first": history})
        full = transfer.exchange("first", history, torch.zeros(second.batch_size, 2), push=False)
        assert torch.equal(full[second.batch_size :], expected[second.index[second.batch_size :]])
    transfer.settle()
    assert torch.equal(history.raw, expected)


@pytest.mark.parametrize("closed", [True, False])
def test_threads_end_with_the_transfer(tmp_path: Path, closed: bool) -> None:
    before = set(threading.enumerate())
    transfer, history = ThreadTransfer(CPU), DiskHistory(40, 2, torch.float32, path=tmp_path / "first.rows")
    steps_on(transfer, history, 4, [])
    started = set(threading.enumerate()) - before
    assert len(started) >= 2
    if closed:
        transfer.close()
        assert torch.equal(history.raw, torch.ones(40, 2))  # after all that was on its way
        assert not any(thread.is_alive() for thread in started)
        transfer.close()
        return
    transfer.settle()
    del transfer
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_threads_end_when_the_model_is_detached(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    data = undirected_graph(40, 100)
    model = build_model("gcn", data, CLASSES, hidden=8, layers=2)
    gas.autoscale(model, data, storage="disk", history_dir=tmp_path)
    for batch in gas.HaloLoader(data, 4):
        model(batch)
    started = set(threading.enumerate()) - before
    assert len(started) >= 2
    gas.detach(model)
    assert not any(thread.is_alive() for thread in started)


# Training ############################################################################################################

SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "shuffled and refreshed, penalty": (
        "gcn",
        {"batch_size": 2, "refresh_every": 3, "evaluation": "histories", "lipschitz": 0.1, "precision": "bfloat16"},
    ),
    "drawings": ("gat", {"drawings": 2, "num_parts": 6, "batch_size": 2, "refresh_every": "epoch"}),
    "inner, bfloat16": ("appnp", {"batch_size": 1, "history_dtype": "bfloat16", "evaluation": "histories"}),
    "int8": ("gcnii", {"batch_size": 2, "history_dtype": "int8", "edge_dropout": 0.2}),
    "float8": (
        "gin",
        {"batch_size": 2, "history_dtype": "float8", "evaluate_parts": 2, "refresh_every": 2, "steps_per_epoch": 2},
    ),
    "one batch": ("gcn", {"num_parts": 1, "batch_size": 1, "refresh_every": "epoch", "evaluation": "histories"}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_storage_on_disk_gives_the_same_bits(tmp_path: Path, scenario: str) -> None:
    name, options = SCENARIOS[scenario]
    data, found = community_graph(), []
    for storage in ("device", "disk"):
        torch.manual_seed(1)
        model = build_model(name, data, CLASSES, hidden=8, layers=3, dropout=0.3)
        kwargs: dict[str, Any] = {"num_parts": 5, "epochs": 2, "history_dir": str(tmp_path), **options}
        if storage == "device":
            del kwargs["history_dir"]
        result = gas.fit(model, data, storage=storage, **kwargs)
        attached(model).memory.settle()
        found.append((model, result, weights_of(model), history_rows(model)))
    (_, device, weights, rows), (model, disk, *others) = found
    assert [epoch.loss for epoch in device.epochs] == [epoch.loss for epoch in disk.epochs]
    assert [epoch.scores for epoch in device.epochs] == [epoch.scores for epoch in disk.epochs]
    assert same_bits(weights, others[0])
    assert rows.keys() == others[1].keys()
    assert all(torch.equal(rows[slot], others[1][slot]) for slot in rows)
    assert device.history_bytes == disk.history_bytes
    # Files of evaluations are gone.
    assert len(list(tmp_path.glob("*.rows"))) == len(rows)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.rows")) == disk.history_bytes
    gas.detach(model)


def test_a_loop_of_one_s_own_on_disk_gives_the_same_bits(tmp_path: Path) -> None:
    data, found = community_graph(), []
    for storage in ("device", "disk"):
        torch.manual_seed(1)
        model: nn.Module = build_model("appnp", data, CLASSES, hidden=8, layers=2, dropout=0.3)
        gas.autoscale(model, data, storage=storage, history_dir=tmp_path / storage)
        loader = gas.HaloLoader(data, 6, batch_size=2, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            for batch in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), batch.y[: batch.batch_size]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        stale = infer_from_histories(model, loader)
        gas.refresh(model, loader)
        some = gas.predict(model, loader, torch.tensor([3, 40]))
        found.append(
            [stale, some, gas.infer(model, loader), *history_rows(model).values(), *weights_of(model).values()]
        )
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_rows_are_read_ahead_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bool] = []
    start = ThreadTransfer._start

    def spy(self: ThreadTransfer, rows: BatchRows, side: int, before: BatchRows | None) -> Any:
        reads.append(before is not None)
        return start(self, rows, side, before)

    monkeypatch.setattr(ThreadTransfer, "_start", spy)
    torch.manual_seed(1)
    data = community_graph()
    model = build_model("gcn", data, CLASSES, hidden=8, layers=2)
    gas.fit(model, data, num_parts=4, epochs=2, evaluate_every=9, storage="disk", history_dir=str(tmp_path))
    # Histories come into being with the first batch; the last epoch announces one more.
    assert reads == [False, False, *[True] * 7]


@pytest.mark.parametrize(
    ("code", "words", "every"), [(errno.ENOSPC, "No space left", 1), (errno.EIO, "Input/output error", "epoch")]
)
def test_a_disk_that_fails_ends_training_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str, every: Any
) -> None:
    data = community_graph()
    options: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "epochs": 4}

    def train(**more: Any) -> tuple[nn.Module, gas.FitResult]:
        torch.manual_seed(1)
        model = build_model("gcn", data, CLASSES, hidden=8, layers=3)
        return model, gas.fit(model, data, **options, **more)

    kept: dict[str, Any] = {
        "storage": "disk",
        "history_dir": str(tmp_path / "rows"),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "checkpoint_every": every,
    }
    steps = 0

    def counted(epoch: Any) -> None:
        nonlocal steps
        steps = epoch.number

    broken = Broken(monkeypatch, code, left=30)
    with pytest.raises(InputError, match=rf"histories on disk.*\.rows \({words}") as caught:
        train(**kept, callback=counted)
    assert broken.left < 0
    assert 0 < steps < 4
    monkeypatch.undo()
    # In the same process, while the traceback still holds on to the run that failed.
    model, resumed = train(**kept, resume=str(tmp_path / "checkpoints"))
    assert caught.value is not None
    plain, expected = train()
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in expected.epochs]
    assert same_bits(weights_of(model), weights_of(plain))
