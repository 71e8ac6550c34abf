"""The storage contract, for every medium and precision."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, call_whole, undirected_graph
from gnnautoscale.autoscale import attached
from gnnautoscale.errors import InputError
from gnnautoscale.history import History, Storage, open_history

CPU = torch.device("cpu")
MEDIA: tuple[Storage, ...] = get_args(Storage)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

media = pytest.mark.parametrize("storage", MEDIA)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def pull(history: History, *index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return history.pull(torch.tensor(index, dtype=torch.long), device=CPU, dtype=dtype)


def test_media_are_known() -> None:
    assert set(MEDIA) == {"device", "host"}


@media
@dtypes
def test_starts_with_zeros(storage: Storage, dtype: torch.dtype) -> None:
    history = open_history(storage, 4, 3, dtype, device=CPU)
    assert (history.num_nodes, history.width, history.dtype) == (4, 3, dtype)
    assert torch.equal(pull(history, 0, 1, 2, 3), torch.zeros(4, 3))
    assert history.num_bytes == 12 * dtype.itemsize


@media
@dtypes
def test_push_then_pull(storage: Storage, dtype: torch.dtype) -> None:
    history = open_history(storage, 5, 2, dtype, device=CPU)
    rows = torch.tensor([[1.0, -2.0], [0.5, 4.0]])  # exact in every precision
    history.push(rows, torch.tensor([3, 0]))
    assert torch.equal(pull(history, 0, 3, 1, 3), torch.tensor([[0.5, 4.0], [1.0, -2.0], [0.0, 0.0], [1.0, -2.0]]))
    history.push(torch.tensor([[7.0, 7.0]]), torch.tensor([3]))
    assert torch.equal(pull(history, 3, 0), torch.tensor([[7.0, 7.0], [0.5, 4.0]]))


@media
@dtypes
def test_rows_are_rounded_once(storage: Storage, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 3, dtype=torch.float64)
    history = open_history(storage, 6, 3, dtype, device=CPU)
    history.push(rows, torch.arange(6))
    for wanted in DTYPES:
        assert torch.equal(pull(history, *range(6), dtype=wanted), rows.to(dtype).to(wanted))
        assert pull(history, 1, dtype=wanted).dtype == wanted


@media
def test_pulled_rows_are_a_copy(storage: Storage) -> None:
    history = open_history(storage, 3, 2, torch.float32, device=CPU)
    rows = torch.ones(3, 2)
    history.push(rows, torch.arange(3))
    rows.zero_()
    pulled = pull(history, 0, 1, 2)
    pulled.fill_(9.0)
    assert torch.equal(pull(history, 0, 1, 2), torch.ones(3, 2))


@media
def test_rows_are_constants(storage: Storage) -> None:
    history = open_history(storage, 3, 2, torch.float32, device=CPU)
    history.push(torch.ones(1, 2, requires_grad=True) * 2, torch.tensor([1]))
    assert not pull(history, 1).requires_grad


@media
def test_no_rows(storage: Storage) -> None:
    history = open_history(storage, 3, 2, torch.float32, device=CPU)
    history.push(torch.empty(0, 2), torch.empty(0, dtype=torch.long))
    assert pull(history).shape == (0, 2)


@media
@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (3, 3), (6,), (2, 3, 1)])
def test_wrong_shape_is_refused_and_nothing_written(storage: Storage, shape: tuple[int, ...]) -> None:
    history = open_history(storage, 4, 3, torch.float32, device=CPU)
    with pytest.raises(InputError, match=r"2 rows of width 3.*got a tensor of shape"):
        history.push(torch.ones(shape), torch.tensor([0, 1]))
    assert torch.equal(pull(history, 0, 1, 2, 3), torch.zeros(4, 3))


@media
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_numbers_than_floating_point_are_refused(storage: Storage, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="floating-point"):
        open_history(storage, 4, 3, dtype, device=CPU)


def test_unknown_medium_is_refused() -> None:
    storage: Any = "tape"
    with pytest.raises(InputError, match=r"device, host.*'tape'"):
        open_history(storage, 4, 3, torch.float32, device=CPU)


@media
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_keep_their_type_whatever_histories_use(storage: Storage, dtype: torch.dtype) -> None:
    data = undirected_graph()
    model = pyg.GraphSAGE(CHANNELS, 6, num_layers=3, out_channels=4).eval()
    expected = call_whole(model, data)
    gas.autoscale(model, data, storage=storage, dtype=dtype)
    out = gas.infer(model, gas.HaloLoader(data, 5))
    assert out.dtype == torch.float32
    kept = attached(model).memory.histories.values()
    assert [history.dtype for history in kept] == [dtype, dtype]
    assert_same(out, expected, {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 1e-5))
