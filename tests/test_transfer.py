"""Rows that move between steps and histories: what is pulled is exact, whatever overlaps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from conftest import undirected_graph
from gnnautoscale.history import History, Runs
from gnnautoscale.history.host import HostHistory
from gnnautoscale.loader import HaloLoader
from gnnautoscale.transfer import Ahead, Direct, Transfer, _locate

SLOTS = ("first", "second")
WIDTH = 64

precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)


def slow(cycles: int) -> None:
    """Keep the current stream busy for a while."""
    if torch.cuda.is_available() and cycles:
        torch.cuda._sleep(random.randrange(cycles))  # type: ignore[no-untyped-call]


class SlowHistory(HostHistory):
    """Takes its time with everything, so that what does not wait comes too early."""

    delay = 0

    def read_together(
        self, others: Sequence[History], index: Tensor, outs: Sequence[Tensor], *, skip: Tensor | None = None
    ) -> None:
        slow(self.delay)
        super().read_together(others, index, outs, skip=skip)

    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        slow(self.delay)
        super().write(raw, where, runs)


class OpenSlow(Protocol):
    """Opens a history that has a ``delay``."""

    def __call__(self, num_nodes: int, width: int, dtype: torch.dtype, *, pinned: bool) -> Any: ...


def disagreements(
    transfer: Transfer,
    device: torch.device,
    *,
    steps: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    open_slow: OpenSlow = SlowHistory,
) -> int:
    """Run random steps against plain tensors; returns how many pulls differ.

    Steps are announced rightly, wrongly or not at all, sometimes a layer is run twice, and sometimes histories are
    written from elsewhere. In turns the step or the histories are slow.
    """
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    loader = HaloLoader(undirected_graph(400, 1500, seed=seed), 12, parts="random", batch_size=1 + seed % 2)
    batches = [batch.edge_index.info for batch in loader]
    order = batches[0].order
    truth = {slot: torch.zeros(400, WIDTH) for slot in SLOTS}
    histories = {slot: open_slow(400, WIDTH, dtype, pinned=device.type == "cuda") for slot in SLOTS}
    for info in batches:
        info.placed[order] = order.rows(info).index.to(device)  # so that nothing reads what is no index yet
    # Made ahead, since a copy to the GPU would wait for it.
    fresh = {(step, slot): torch.randn(400, WIDTH, generator=generator) for step in range(steps) for slot in SLOTS}
    fresh_there = {key: rows.to(device) for key, rows in fresh.items()}
    codec = histories["first"].codec  # rounds on the same device, which may divide differently from another
    kept = {key: codec.decode(codec.encode(rows), torch.float32).cpu() for key, rows in fresh_there.items()}
    row_of = order.row_of.to(device)
    checks: list[tuple[Tensor, Tensor]] = []
    info = random.choice(batches)
    for step in range(steps):
        following = random.choice(batches)
        info.upcoming = random.choice([following, following, following, random.choice(batches), None])
        slow_step = step // 10 % 2 == 0
        for history in histories.values():
            history.delay = 0 if slow_step else 20_000_000
        slow(20_000_000 if slow_step else 0)
        # In the first step histories come into being one by one.
        transfer.begin(info, order, histories if step else {})
        ahead_at_once = random.random() < 0.5
        if ahead_at_once:
            transfer.look_ahead()
        for slot in SLOTS:
            rows = fresh[step, slot][: info.batch_size]
            computed = torch.zeros(info.batch_size, WIDTH, device=device)
            slow(20_000_000 if slow_step else 0)
            computed += fresh_there[step, slot][: info.batch_size]
            for again in range(random.choice([1, 1, 2])):
                full = transfer.exchange(slot, histories[slot], computed, push=not again).clone()
                checks.append((full, torch.cat([rows, truth[slot][info.halo]])))
            truth[slot] = truth[slot].clone()
            truth[slot][info.nodes] = kept[step, slot][: info.batch_size]
        if random.random() < 0.1 and step:
            transfer.begin(info, order, histories)  # a step that did not come to its end is made again
            for slot in SLOTS:
                transfer.exchange(slot, histories[slot], fresh_there[step, slot][: info.batch_size])
        transfer.end()
        if not ahead_at_once:
            transfer.look_ahead()
        if random.random() < 0.1:
            transfer.settle()
            histories["first"].push(fresh_there[step, "second"], row_of)
            truth["first"] = kept[step, "second"]
        info.upcoming = None
        info = following
    wrong = sum(not torch.equal(full.cpu(), expected) for full, expected in checks)
    transfer.settle()
    for slot in SLOTS:
        left = histories[slot].pull(order.row_of, device=torch.device("cpu"), dtype=torch.float32)
        wrong += not torch.equal(left, truth[slot])
    return wrong


@pytest.mark.parametrize("seed", range(3))
@precisions
def test_direct_transfers_are_exact(seed: int, dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert disagreements(Direct(cpu), cpu, steps=30, seed=seed, dtype=dtype) == 0


class Line:
    """A stream that does everything at once."""

    def __init__(self, *_: Any) -> None:
        """Any device will do."""

    def wait_stream(self, other: Any) -> None:
        """There is nothing to wait for."""


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what needs a GPU's streams run on the CPU, where nothing overlaps."""
    monkeypatch.setattr(torch.cuda, "Stream", Line)
    monkeypatch.setattr(torch.cuda, "current_stream", Line)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("seed", range(6))
@precisions
def test_what_is_pulled_ahead_is_exact(seed: int, dtype: torch.dtype) -> None:
    """The bookkeeping alone."""
    cpu = torch.device("cpu")
    assert disagreements(Ahead(cpu), cpu, steps=60, seed=seed, dtype=dtype) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Direct, Ahead])
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [(torch.float32, seed) for seed in range(5)]
    + [(dtype, seed) for dtype in (torch.int8, torch.float8_e4m3fn) for seed in range(2)],
    ids=str,
)
def test_transfers_on_a_gpu_are_exact_in_any_interleaving(
    kind: Callable[..., Transfer], dtype: torch.dtype, seed: int
) -> None:
    device = torch.device("cuda", 0)
    assert disagreements(kind(device), device, steps=60, seed=seed, dtype=dtype) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("waiting", "for_what"), [("_main", "_pushes"), ("_main", "_pulls"), ("_pulls", "_main"), ("_pushes", "_main")]
)
def test_no_wait_can_be_left_out(waiting: str, for_what: str) -> None:
    """The stress test above notices when any one of the waits is missing."""

    class Hasty(Ahead):
        def _wait(self, stream: Any, other: Any) -> None:
            if (stream, other) != (getattr(self, waiting), getattr(self, for_what)):
                super()._wait(stream, other)

    device = torch.device("cuda", 0)
    assert sum(disagreements(Hasty(device), device, steps=60, seed=seed) for seed in range(3)) > 0


@pytest.mark.parametrize(
    ("runs", "expected"),
    [([(4, 0, 4)], [-1, 1, 3, -1]), ([(8, 2, 2), (2, 0, 2)], [0, -1, -1, 3]), ([], [-1, -1, -1, -1])],
)
def test_shared_rows_are_found(runs: list[tuple[int, int, int]], expected: list[int]) -> None:
    where = torch.empty(4, dtype=torch.int32)
    _locate(torch.tensor([2, 5, 7, 9]), runs, where)
    assert where.tolist() == expected


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("kind", [Direct, Ahead])
@precisions
def test_gradients_flow_to_the_batch_only(kind: Callable[..., Transfer], dtype: torch.dtype) -> None:
    loader = HaloLoader(undirected_graph(40, 100), 4)
    info = next(iter(loader)).edge_index.info
    transfer, history = kind(torch.device("cpu")), HostHistory(40, 2, dtype, pinned=False)
    rows = torch.ones(info.batch_size, 2, requires_grad=True)
    transfer.begin(info, info.order, {"first": history})
    transfer.exchange("first", history, rows).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(rows.grad, torch.ones_like(rows)) if rows.grad is not None else False


@pytest.mark.usefixtures("no_streams")
@precisions
def test_what_a_step_that_did_not_end_computed_is_not_used(dtype: torch.dtype) -> None:
    """Also if the step after it was announced, and rows were pulled for that."""
    cpu = torch.device("cpu")
    transfer, history = Ahead(cpu), HostHistory(40, 2, dtype, pinned=False)
    check_steps_that_do_not_end(transfer, history)


def check_steps_that_do_not_end(transfer: Transfer, history: History) -> None:
    """A step fails, and the one that was announced to follow is made; all rows have values that every type has."""
    first, second = [batch.edge_index.info for batch in HaloLoader(undirected_graph(40, 100), 4)][:2]
    assert bool(torch.isin(second.halo, first.nodes).any())
    truth = torch.ones(40, 2)
    history.push(truth, first.order.row_of)
    for ended in (False, True, False):
        first.upcoming = second
        transfer.begin(first, first.order, {"first": history})
        transfer.look_ahead()
        transfer.exchange("first", history, torch.full((first.batch_size, 2), -1.0))
        if ended:
            transfer.end()
            truth[first.nodes] = -1.0
        transfer.begin(second, first.order, {"first": history})
        full = transfer.exchange("first", history, truth[second.nodes], push=False)
        assert torch.equal(full, truth[second.n_id])
        transfer.settle()
        truth[first.nodes] = 4.0
        history.push(truth[first.nodes], first.order.row_of[first.nodes])


@pytest.mark.gpu
def test_a_step_has_to_begin() -> None:
    with pytest.raises(RuntimeError, match="begin"):
        Ahead(torch.device("cuda", 0)).end()


def test_rows_placed_for_one_order_are_not_used_for_another() -> None:
    data = undirected_graph(40, 100)
    info = next(iter(HaloLoader(data, 4))).edge_index.info
    other = next(iter(HaloLoader(data, 2, parts="random"))).edge_index.info.order
    info.placed[info.order] = info.order.rows(info).index
    transfer, history = Direct(torch.device("cpu")), HostHistory(40, 2, torch.float32, pinned=False)
    values = torch.arange(80.0).view(40, 2)
    history.push(values, other.row_of)
    transfer.begin(info, other, {"first": history})
    full = transfer.exchange("first", history, values[info.nodes])
    assert torch.equal(full, values[info.n_id])


@pytest.mark.usefixtures("no_streams")
def test_rows_that_were_placed_where_others_are_now_are_not_used() -> None:
    """Batches that are copied for each step are all placed in one room."""
    cpu = torch.device("cpu")
    loader = HaloLoader(undirected_graph(40, 100), 4)
    infos = [batch.edge_index.info for batch in loader][:2]
    order = infos[0].order
    history = HostHistory(40, 2, torch.float32, pinned=False)
    truth = torch.arange(80.0).view(40, 2)
    history.push(truth, order.row_of)
    room = torch.empty(40, dtype=torch.long)
    transfer = Ahead(cpu)
    # The second batch follows the first, and the first is announced to follow again.
    for info, following in zip([*infos, infos[0]], [None, infos[0], None], strict=True):
        index = order.rows(info).index
        room[: index.numel()] = index
        info.placed[order], info.upcoming = room[: index.numel()], following
        transfer.begin(info, order, {"first": history})
        full = transfer.exchange("first", history, truth[info.nodes])
        transfer.end()
        transfer.look_ahead()
        info.placed.clear()
        assert torch.equal(full, truth[info.n_id])


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_is_not_finite_is_not_hidden_by_what_is_pulled_ahead(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    info = next(iter(HaloLoader(undirected_graph(40, 100), 4))).edge_index.info
    history = HostHistory(40, 2, dtype, pinned=False)
    history.push(torch.tensor([[float("inf"), 1.0]]).expand(40, 2), torch.arange(40))
    transfer = Ahead(cpu)
    transfer.begin(info, info.order, {"first": history})
    full = transfer.exchange("first", history, torch.ones(info.batch_size, 2))
    assert torch.equal(full[: info.batch_size], torch.ones(info.batch_size, 2))
    assert bool(full[info.batch_size :].isnan().all())
