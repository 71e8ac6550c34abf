"""Schedules of steps that every transfer must get right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from conftest import undirected_graph
from gnnautoscale.graph import BatchInfo, HaloLoader
from gnnautoscale.history import History
from gnnautoscale.history.host import HostHistory
from gnnautoscale.kernels import Runs
from gnnautoscale.transfer import BatchRows, Transfer

precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)

SLOTS = ("first", "second")
WIDTH = 64


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


def rows_of(info: BatchInfo) -> BatchRows:
    """Where a batch's rows lie in histories that are kept in the order of its loader."""
    return info.derive(info.order, lambda: BatchRows(info.rows, info.batch_size, key=info))


class OpenSlow(Protocol):
    """Opens a history that has a ``delay``."""

    def __call__(self, num_nodes: int, width: int, dtype: torch.dtype, *, device: torch.device) -> Any: ...


def disagreements(
    transfer: Transfer,
    device: torch.device,
    *,
    steps: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    open_slow: OpenSlow = SlowHistory,
    first_late: int | None = None,
) -> int:
    """Run random steps against plain tensors; returns how many pulls differ.

    Steps are announced rightly, wrongly or not at all, sometimes a layer is run twice, and sometimes histories are
    written from elsewhere; rows from ``first_late`` on are before every step. In turns the step or the histories are
    slow.
    """
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    loader = HaloLoader(undirected_graph(400, 1500, seed=seed), 12, partition="random", batch_size=1 + seed % 2)
    infos = [batch.edge_index.info for batch in loader]
    order = infos[0].order
    late = torch.arange(400 if first_late is None else first_late, 400)
    batches = [info for info in infos if not torch.isin(info.rows[: info.batch_size], late).any()]
    assert first_late is None or any(torch.isin(info.rows, late).any() for info in batches)
    truth = {slot: torch.zeros(400, WIDTH) for slot in SLOTS}
    histories = {slot: open_slow(400, WIDTH, dtype, device=device) for slot in SLOTS}
    for info in batches:
        rows_of(info).place(rows_of(info).index.to(device))  # so that nothing reads what is no index yet
    # Made ahead, since a copy to the GPU would wait for it.
    fresh = {(step, slot): torch.randn(400, WIDTH, generator=generator) for step in range(steps) for slot in SLOTS}
    fresh_there = {key: rows.to(device) for key, rows in fresh.items()}
    codec = histories["first"].codec  # rounds on the same device, which may divide differently from another
    kept = {key: codec.decode(codec.encode(rows), torch.float32).cpu() for key, rows in fresh_there.items()}
    row_of = order.row_of.to(device).long()
    checks: list[tuple[Tensor, Tensor]] = []
    info = random.choice(batches)
    for step in range(steps):
        following = random.choice(batches)
        hint = random.choice([following, following, following, random.choice(batches), None])
        announced = None if hint is None else rows_of(hint)
        slow_step = step // 10 % 2 == 0
        for history in histories.values():
            history.delay = 0 if slow_step else 20_000_000
        slow(20_000_000 if slow_step else 0)
        if late.numel() and step:
            with transfer.after_pushes():
                for slot, history in histories.items():
                    history.push(fresh_there[step, slot][: late.numel()], late.to(device))
                    truth[slot] = truth[slot].clone()
                    truth[slot][order.nodes_at(late)] = kept[step, slot][: late.numel()]
            transfer.join()
        # In the first step histories come into being one by one.
        transfer.begin(rows_of(info), announced, histories if step else {})
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
            transfer.begin(rows_of(info), announced, histories)  # a step that did not come to its end is made again
            for slot in SLOTS:
                transfer.exchange(slot, histories[slot], fresh_there[step, slot][: info.batch_size])
        transfer.end()
        if not ahead_at_once:
            transfer.look_ahead()
        transfer.complete()
        if random.random() < 0.1:
            transfer.settle()
            histories["first"].push(fresh_there[step, "second"], row_of)
            truth["first"] = kept[step, "second"]
        info = following
    wrong = sum(not torch.equal(full.cpu(), expected) for full, expected in checks)
    transfer.settle()
    for slot in SLOTS:
        left = histories[slot].pull(order.row_of, device=torch.device("cpu"), dtype=torch.float32)
        wrong += not torch.equal(left, truth[slot])
    return wrong


def check_steps_that_fail(transfer: Transfer, history: History, *, writes_at_end: bool) -> None:
    """A step fails somewhere, and the one that was announced to follow is made; every type has all values."""
    first, second = [batch.edge_index.info for batch in HaloLoader(undirected_graph(40, 100), 4)][:2]
    assert bool(torch.isin(second.halo, first.nodes).any())
    truth = torch.ones(40, 2)
    history.push(truth, first.order.row_of.long())
    for calls in (0, 2, 1, 0, 1, 2):
        transfer.begin(rows_of(first), rows_of(second), {"first": history})
        transfer.look_ahead()
        transfer.exchange("first", history, torch.full((first.batch_size, 2), -1.0))
        if calls > 0:
            transfer.end()
        if calls > 1:
            transfer.complete()
        if calls > 1 or (calls and writes_at_end):
            truth[first.nodes] = -1.0
        transfer.begin(rows_of(second), None, {"first": history})
        full = transfer.exchange("first", history, truth[second.nodes], push=False)
        assert torch.equal(full, truth[second.n_id])
        transfer.settle()
        truth[first.nodes] = 4.0
        history.push(truth[first.nodes], first.own.index)
