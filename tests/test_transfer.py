"""Rows that move between steps and histories: what is pulled is exact, whatever overlaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from conftest import undirected_graph
from gnnautoscale.history.host import HostHistory
from gnnautoscale.loader import BatchInfo, HaloLoader
from gnnautoscale.transfer import Ahead, Direct, Transfer, _locate

SLOTS = ("first", "second")
WIDTH = 64


def infos(data: Data, num_parts: int) -> list[BatchInfo]:
    loader = HaloLoader(data, num_parts, parts="random")
    return [batch.edge_index.info for batch in loader]


def slow(cycles: int) -> None:
    """Keep the current stream busy for a while."""
    if torch.cuda.is_available():
        torch.cuda._sleep(random.randrange(cycles))  # type: ignore[no-untyped-call]


class SlowHistory(HostHistory):
    """Takes its time with everything, so that what does not wait comes too early."""

    def read(self, index: Tensor, out: Tensor, *, skip: Tensor | None = None) -> None:
        slow(2_000_000)
        super().read(index, out, skip=skip)

    def push(self, rows: Tensor, where: Tensor) -> None:
        slow(2_000_000)
        super().push(rows, where)


def disagreements(transfer: Transfer, device: torch.device, *, steps: int, seed: int) -> int:
    """Run random steps against plain tensors; returns how many pulls differ.

    Steps are announced rightly, wrongly or not at all, and sometimes histories are written from elsewhere.
    """
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    batches = infos(undirected_graph(400, 1500, seed=seed), 6)
    truth = {slot: torch.zeros(400, WIDTH) for slot in SLOTS}
    histories = {slot: SlowHistory(400, WIDTH, torch.float32, pinned=device.type == "cuda") for slot in SLOTS}
    checks: list[tuple[Tensor, Tensor]] = []
    info = random.choice(batches)
    for _ in range(steps):
        following = random.choice(batches)
        info.upcoming = random.choice([following, following, following, random.choice(batches), None])
        slow(3_000_000)
        transfer.begin(info, histories)
        for slot in SLOTS:
            rows = torch.randn(info.batch_size, WIDTH, generator=generator)
            slow(3_000_000)
            transfer.push(slot, histories[slot], rows.to(device))
            pulled = transfer.pull(slot, histories[slot], torch.float32).clone()
            checks.append((pulled, truth[slot][info.halo]))
            truth[slot] = truth[slot].clone()
            truth[slot][info.nodes] = rows
        transfer.end()
        if random.random() < 0.1:
            transfer.settle()
            rows = torch.randn(400, WIDTH, generator=generator)
            histories["first"].push(rows.to(device), torch.arange(400, device=device))
            truth["first"] = rows
        info.upcoming = None
        info = following
    wrong = sum(not torch.equal(pulled.cpu(), expected) for pulled, expected in checks)
    transfer.settle()
    for slot in SLOTS:
        left = histories[slot].pull(torch.arange(400), device=torch.device("cpu"), dtype=torch.float32)
        wrong += not torch.equal(left, truth[slot])
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_direct_transfers_are_exact(seed: int) -> None:
    assert disagreements(Direct(torch.device("cpu")), torch.device("cpu"), steps=30, seed=seed) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Direct, Ahead])
@pytest.mark.parametrize("seed", range(5))
def test_transfers_on_a_gpu_are_exact_in_any_interleaving(kind: Callable[..., Transfer], seed: int) -> None:
    device = torch.device("cuda", 0)
    assert disagreements(kind(device), device, steps=60, seed=seed) == 0


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


def test_shared_rows_are_found() -> None:
    halo, nodes = torch.tensor([2, 5, 7, 9]), torch.tensor([9, 1, 5])
    shared = torch.empty(5, dtype=torch.int32)
    _locate(halo, nodes, shared)
    assert shared[:4].tolist() == [-1, 2, -1, 0]
    _locate(halo[:0], nodes, shared[:1])


@pytest.mark.gpu
def test_a_step_has_to_begin() -> None:
    with pytest.raises(RuntimeError, match="begin"):
        Ahead(torch.device("cuda", 0)).end()
