"""Transfers without a disk: what steps pull is exact, whatever overlaps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from conftest import undirected_graph
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.history.host import HostHistory
from gnnautoscale.transfer import DirectTransfer, Transfer, open_transfer
from gnnautoscale.transfer.streams import StreamTransfer
from support.tape import without_streams
from support.transfers import check_steps_that_fail, disagreements, precisions, rows_of


@pytest.mark.parametrize("seed", range(3))
@precisions
def test_direct_transfers_are_exact(seed: int, dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert disagreements(DirectTransfer(), cpu, steps=30, seed=seed, dtype=dtype) == 0


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what needs a GPU's streams run on the CPU, where nothing overlaps."""
    without_streams(monkeypatch)


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("seed", range(6))
@precisions
def test_what_is_pulled_ahead_is_exact(seed: int, dtype: torch.dtype) -> None:
    """The bookkeeping alone."""
    cpu = torch.device("cpu")
    assert disagreements(StreamTransfer(cpu), cpu, steps=60, seed=seed, dtype=dtype) == 0


@pytest.mark.usefixtures("no_streams")
def test_rows_that_others_write_between_steps_are_not_pulled_ahead() -> None:
    cpu = torch.device("cpu")
    assert (
        sum(disagreements(StreamTransfer(cpu, 300), cpu, steps=60, seed=seed, first_late=300) for seed in (0, 1)) == 0
    )
    assert disagreements(StreamTransfer(cpu), cpu, steps=60, seed=0, first_late=300) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [(torch.float32, seed) for seed in range(5)]
    + [(dtype, seed) for dtype in (torch.int8, torch.float8_e4m3fn) for seed in range(2)],
    ids=str,
)
def test_transfers_on_a_gpu_are_exact_in_any_interleaving(overlap: bool, dtype: torch.dtype, seed: int) -> None:
    device = torch.device("cuda", 0)
    transfer = open_transfer("host", device, overlap=overlap)
    assert isinstance(transfer, StreamTransfer) == overlap
    assert disagreements(transfer, device, steps=60, seed=seed, dtype=dtype) == 0
    shared = open_transfer("host", device, overlap=overlap, first_late=300)
    assert disagreements(shared, device, steps=60, seed=seed, dtype=dtype, first_late=300) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("waiting", "for_what"), [("_main", "_pushes"), ("_main", "_pulls"), ("_pulls", "_main"), ("_pushes", "_main")]
)
def test_no_wait_can_be_left_out(waiting: str, for_what: str) -> None:
    """The stress test above notices when any one of the waits is missing."""

    class Hasty(StreamTransfer):
        def _wait(self, stream: Any, other: Any) -> None:
            if (stream, other) != (getattr(self, waiting), getattr(self, for_what)):
                super()._wait(stream, other)

    device = torch.device("cuda", 0)
    # A busy GPU may let what is too early be in time after all.
    assert any(disagreements(Hasty(device), device, steps=60, seed=seed) for seed in range(20))


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("open_one", [DirectTransfer, partial(StreamTransfer, torch.device("cpu"))])
@precisions
def test_gradients_flow_to_the_batch_only(open_one: Callable[[], Transfer], dtype: torch.dtype) -> None:
    info = next(iter(HaloLoader(undirected_graph(40, 100), 4))).edge_index.info
    transfer, history = open_one(), HostHistory(40, 2, dtype, device=torch.device("cpu"))
    rows = torch.ones(info.batch_size, 2, requires_grad=True)
    transfer.begin(rows_of(info), None, {"first": history})
    transfer.exchange("first", history, rows).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(rows.grad, torch.ones_like(rows)) if rows.grad is not None else False


@pytest.mark.usefixtures("no_streams")
@precisions
def test_what_a_step_that_failed_computed_is_not_used(dtype: torch.dtype) -> None:
    """Also if the step after it was announced, and rows were pulled for that."""
    history = HostHistory(40, 2, dtype, device=torch.device("cpu"))
    check_steps_that_fail(StreamTransfer(torch.device("cpu")), history, writes_at_end=True)


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("open_one", [DirectTransfer, partial(StreamTransfer, torch.device("cpu"))])
def test_a_step_has_to_begin(open_one: Callable[[], Transfer]) -> None:
    history = HostHistory(40, 2, torch.float32, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="begin"):
        open_one().exchange("first", history, torch.ones(40, 2))


@pytest.mark.usefixtures("no_streams")
def test_rows_that_were_placed_where_others_are_now_are_not_used() -> None:
    """Batches that are copied for each step are all placed in one room."""
    cpu = torch.device("cpu")
    loader = HaloLoader(undirected_graph(40, 100), 4)
    infos = [batch.edge_index.info for batch in loader][:2]
    order = infos[0].order
    history = HostHistory(40, 2, torch.float32, device=torch.device("cpu"))
    truth = torch.arange(80.0).view(40, 2)
    history.push(truth, order.row_of.long())
    room = torch.empty(40, dtype=torch.long)
    transfer = StreamTransfer(cpu)
    # The second batch follows the first, and the first is announced to follow again.
    for info, following in zip([*infos, infos[0]], [None, infos[0], None], strict=True):
        rows = rows_of(info)
        room[: rows.num_rows] = rows.index
        rows.place(room[: rows.num_rows])
        transfer.begin(rows, None if following is None else rows_of(following), {"first": history})
        full = transfer.exchange("first", history, truth[info.nodes])
        transfer.end()
        transfer.look_ahead()
        transfer.complete()
        rows.displace()
        assert torch.equal(full, truth[info.n_id])


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_is_not_finite_is_not_hidden_by_what_is_pulled_ahead(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    info = next(iter(HaloLoader(undirected_graph(40, 100), 4))).edge_index.info
    history = HostHistory(40, 2, dtype, device=torch.device("cpu"))
    history.push(torch.tensor([[float("inf"), 1.0]]).expand(40, 2), torch.arange(40))
    transfer = StreamTransfer(cpu)
    transfer.begin(rows_of(info), None, {"first": history})
    full = transfer.exchange("first", history, torch.ones(info.batch_size, 2))
    assert torch.equal(full[: info.batch_size], torch.ones(info.batch_size, 2))
    assert bool(full[info.batch_size :].isnan().all())


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("second_is_pushed", [True, False])
def test_recent_rows_are_used_only_for_slots_that_were_pushed(second_is_pushed: bool) -> None:
    transfer = StreamTransfer(torch.device("cpu"))
    first, second = [rows_of(batch.edge_index.info) for batch in HaloLoader(undirected_graph(40, 100), 4)][:2]
    histories = {slot: HostHistory(40, 2, torch.float32, device=torch.device("cpu")) for slot in ("one", "two")}
    for step in range(2):
        transfer.begin(first, second, histories)
        transfer.look_ahead()
        for slot in histories:
            rows = torch.full((first.batch_size, 2), float(step + 1))
            transfer.exchange(slot, histories[slot], rows, push=slot == "one" or second_is_pushed)
        transfer.end()
        transfer.complete()
    transfer.begin(second, None, histories)
    assert transfer.skips_shared == second_is_pushed
    for slot, history in histories.items():
        full = transfer.exchange(slot, history, torch.zeros(second.batch_size, 2), push=False)
        assert torch.equal(full[second.batch_size :], history.raw[second.index[second.batch_size :]])
