"""The storage contract, for every medium and precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, call_whole, undirected_graph
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.history import History, Medium, open_history

CPU = torch.device("cpu")
MEDIA: tuple[Medium, ...] = get_args(Medium)
Open = Callable[[int, int, torch.dtype], History]
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]

dtypes = pytest.mark.parametrize("dtype", [*FLOATING, *EIGHT_BITS])


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest) -> Medium:
    chosen: Medium = request.param
    return chosen


@pytest.fixture
def opened(medium: Medium, tmp_path: Path) -> Open:
    """Opens a history in each of the media."""

    def open_rows(num_nodes: int, width: int, dtype: torch.dtype) -> History:
        return open_history(medium, num_nodes, width, dtype, device=CPU, path=tmp_path / "history.rows")

    return open_rows


def pull(history: History, *index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return history.pull(torch.tensor(index, dtype=torch.long), device=CPU, dtype=dtype)


def test_media_are_known() -> None:
    assert set(MEDIA) == {"device", "host", "disk"}


@dtypes
def test_starts_with_zeros(opened: Open, dtype: torch.dtype) -> None:
    history = opened(4, 3, dtype)
    assert (history.num_nodes, history.width, history.dtype) == (4, 3, dtype)
    assert torch.equal(pull(history, 0, 1, 2, 3), torch.zeros(4, 3))
    # Eight bits: a scale of 4 bytes and 3 values, rounded up to 16 bytes.
    assert history.num_bytes == 4 * (16 if dtype in EIGHT_BITS else 3 * dtype.itemsize)


@dtypes
def test_push_then_pull(opened: Open, dtype: torch.dtype) -> None:
    history = opened(5, 2, dtype)
    rows = torch.tensor([[2.0, -2.0], [0.0, 4.0]])  # exact in every precision
    history.push(rows, torch.tensor([3, 0]))
    assert torch.equal(pull(history, 0, 3, 1, 3), torch.tensor([[0.0, 4.0], [2.0, -2.0], [0.0, 0.0], [2.0, -2.0]]))
    history.push(torch.tensor([[7.0, 7.0]]), torch.tensor([3]))
    assert torch.equal(pull(history, 3, 0), torch.tensor([[7.0, 7.0], [0.0, 4.0]]))


@dtypes
@pytest.mark.parametrize("width", [1, 3, 12, 100])
def test_rows_may_be_given_in_runs(opened: Open, dtype: torch.dtype, width: int) -> None:
    history = opened(9, width, dtype)
    rows = torch.tensor([1.0, -3.0, 0.5, 0.0, 2.0])[:, None].expand(-1, width)
    history.push(rows, torch.tensor([6, 7, 8, 1, 2]), [(6, 0, 3), (1, 3, 2)])
    assert pull(history, *range(9))[:, -1].tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0, -3.0, 0.5]
    assert torch.equal(pull(history, 2, 7), rows[[4, 1]])


@dtypes
def test_raw_rows_that_are_skipped_stay_as_they_are(opened: Open, dtype: torch.dtype) -> None:
    history = opened(4, 2, dtype)
    history.push(torch.tensor([[1.0, -1.0], [4.0, 4.0]]), torch.tensor([0, 2]))
    before = history.codec.encode(torch.full((2, 2), 9.0))
    history.read(torch.tensor([2, 0]), before, skip=torch.tensor([-1, 5], dtype=torch.int32))
    assert history.codec.decode(before, torch.float32).tolist() == [[4.0, 4.0], [9.0, 9.0]]


@pytest.mark.parametrize("dtype", FLOATING)
def test_rows_are_rounded_once(opened: Open, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 3, dtype=torch.float64)
    history = opened(6, 3, dtype)
    history.push(rows, torch.arange(6))
    for wanted in FLOATING:
        assert torch.equal(pull(history, *range(6), dtype=wanted), rows.to(dtype).to(wanted))
        assert pull(history, 1, dtype=wanted).dtype == wanted


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_rows_of_eight_bits_are_rounded_once(opened: Open, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 3, dtype=torch.float64)
    history = opened(6, 3, dtype)
    history.push(rows, torch.arange(6))
    rounded = history.codec.decode(history.codec.encode(rows), torch.float32)
    assert_same(rounded, rows.float(), {torch.int8: 1 / 254}.get(dtype, 1 / 16))
    for wanted in FLOATING:
        assert torch.equal(pull(history, *range(6), dtype=wanted), rounded.to(wanted))
        assert pull(history, 1, dtype=wanted).dtype == wanted


@dtypes
def test_pulled_rows_are_a_copy(opened: Open, dtype: torch.dtype) -> None:
    history = opened(3, 2, dtype)
    rows = torch.ones(3, 2)
    history.push(rows, torch.arange(3))
    rows.zero_()
    pulled = pull(history, 0, 1, 2)
    pulled.fill_(9.0)
    assert torch.equal(pull(history, 0, 1, 2), torch.ones(3, 2))


@dtypes
def test_rows_are_constants(opened: Open, dtype: torch.dtype) -> None:
    history = opened(3, 2, dtype)
    history.push(torch.ones(1, 2, requires_grad=True) * 2, torch.tensor([1]))
    assert not pull(history, 1).requires_grad


@dtypes
def test_no_rows(opened: Open, dtype: torch.dtype) -> None:
    history = opened(3, 2, dtype)
    history.push(torch.empty(0, 2), torch.empty(0, dtype=torch.long))
    assert pull(history).shape == (0, 2)
    assert torch.equal(pull(history, 0, 1, 2), torch.zeros(3, 2))


@dtypes
@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (3, 3), (6,), (2, 3, 1)])
def test_wrong_shape_is_refused_and_nothing_written(opened: Open, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    history = opened(4, 3, dtype)
    with pytest.raises(InputError, match=r"2 rows of width 3.*got a tensor of shape"):
        history.push(torch.ones(shape), torch.tensor([0, 1]))
    assert torch.equal(pull(history, 0, 1, 2, 3), torch.zeros(4, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
def test_other_types_are_refused(opened: Open, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"floating-point.*got {dtype}\..*torch.int8 or torch.float8_e4m3fn"):
        opened(4, 3, dtype)


def test_unknown_medium_is_refused() -> None:
    medium: Any = "tape"
    with pytest.raises(InputError, match=r"device, host.*'tape'"):
        open_history(medium, 4, 3, torch.float32, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, *EIGHT_BITS])
def test_models_keep_their_type_whatever_histories_use(medium: Medium, dtype: torch.dtype, tmp_path: Path) -> None:
    data = undirected_graph()
    model = pyg.GraphSAGE(CHANNELS, 6, num_layers=3, out_channels=4).eval()
    expected = call_whole(model, data)
    gas.autoscale(model, data, storage=medium, dtype=dtype, history_dir=tmp_path if medium == "disk" else None)
    out = gas.infer(model, gas.HaloLoader(data, 5))
    assert out.dtype == torch.float32
    kept = attached(model).memory.histories.values()
    assert [history.dtype for history in kept] == [dtype, dtype]
    coarse = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.int8: 5e-2, torch.float8_e4m3fn: 0.2}
    assert_same(out, expected, coarse.get(dtype, 1e-5))


def test_the_host_waits_for_the_history_s_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    history = open_history("host", 4, 3, torch.float32, device=torch.device("cuda", 1))
    history.push(torch.ones(2, 3), torch.tensor([0, 2]))
    assert torch.equal(pull(history, 2), torch.ones(1, 3))
    assert waited == [torch.device("cuda", 1)] * 2
