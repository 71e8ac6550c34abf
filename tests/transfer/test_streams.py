"""Rows that move between steps and histories: what is pulled is exact, whatever overlaps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import undirected_graph
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.history.host import HostHistory
from gnnautoscale.transfer.base import Transfer
from gnnautoscale.transfer.direct import Direct
from gnnautoscale.transfer.streams import Ahead, _locate
from support.transfers import check_steps_that_do_not_end, disagreements, precisions


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


@pytest.mark.gpu
def test_a_step_has_to_begin() -> None:
    with pytest.raises(RuntimeError, match="begin"):
        Ahead(torch.device("cuda", 0)).end()


def test_rows_placed_for_one_order_are_not_used_for_another() -> None:
    data = undirected_graph(40, 100)
    info = next(iter(HaloLoader(data, 4))).edge_index.info
    other = next(iter(HaloLoader(data, 2, partition="random"))).edge_index.info.order
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
