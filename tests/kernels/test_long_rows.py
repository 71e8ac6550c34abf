"""Rows with very many edges: their segments, and sums and means over them."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import product
from typing import Any

import pytest
import torch

from gnnautoscale.kernels import (
    Adjacency,
    long_rows,
    spmm,
)
from support import kernels as support
from support.kernels import (
    DEGREES,
    HALVES,
    IMPLEMENTATIONS,
    LONG,
    REDUCES,
    Hubs,
    run,
)

device, interpreter = support.device, support.interpreter
short_segments = support.short_segments


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("name", "of", "reduce"),
    [(name, *ends) for name, ends in product(DEGREES, (("target", "mean"), ("source", "sum")))]
    + [("several", "target", "sum"), ("several", "source", "mean")],
)
def test_long_rows(device: str, name: str, of: str, reduce: str) -> None:
    degrees, weighted, width = DEGREES[name], reduce == "sum", 48 if reduce == "sum" else 1
    graph = Hubs(device, degrees, weighted=weighted, of=of)
    adjacency = graph.adjacency()
    segments = adjacency.segments if of == "target" else adjacency.segments_t
    assert (segments is None) == (max(degrees) <= LONG)
    x, grad = graph.rows(width)
    out, gradient = run(adjacency, x, grad, reduce)
    expected_out, expected_gradient = graph.expected(x, grad, reduce)
    tolerance = 1e-5 if reduce == "mean" else 0.0
    torch.testing.assert_close(out.double().cpu(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double().cpu(), expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_rows_that_are_really_long(device: str, reduce: str) -> None:
    longest = long_rows.LONG_ROW
    graph = Hubs(device, [longest + 1, longest, 3, 2 * longest + 7], weighted=False)
    adjacency = graph.adjacency()
    assert adjacency.segments is not None
    assert adjacency.segments.first_segment.tolist() == [0, 2, 5]
    x, grad = graph.rows(5)
    for got, expected in zip(run(adjacency, x, grad, reduce), graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("of", "reduce"), [("target", "mean"), ("source", "sum")])
def test_long_rows_in_half_precision(device: str, of: str, reduce: str, dtype: torch.dtype) -> None:
    graph = Hubs(device, DEGREES["several"], weighted=True, of=of)
    x, grad = graph.rows(16, dtype)
    ulp = torch.finfo(dtype).eps
    for got, expected in zip(run(graph.adjacency(), x, grad, reduce), graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=ulp, atol=ulp / 8)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("dtype", HALVES)
def test_segments_add_in_single(device: str, dtype: torch.dtype) -> None:
    """The first segment sums to an odd number that half precision cannot hold; the second subtracts most of it."""
    values = torch.zeros(LONG + 1, 1)
    values[0], values[1], values[LONG] = 2 / torch.finfo(dtype).eps, 1, -2 / torch.finfo(dtype).eps
    values = values.to(device, dtype)
    each, one = torch.arange(LONG + 1, device=device), torch.zeros(LONG + 1, dtype=torch.int64, device=device)
    assert spmm(Adjacency.build(one, each, 1, LONG + 1), values).item() == 1
    _, gradient = run(Adjacency.build(each, one, LONG + 1, 1), torch.ones_like(values[:1]), values, "sum")
    assert gradient.item() == 1


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("grad_rows", "reduce"), [(0, "sum"), (2, "mean"), (3, "sum"), (6, "mean")])
def test_gradient_of_some_long_rows_only(device: str, reduce: str, grad_rows: int) -> None:
    graph = Hubs(device, [4, 50, 7, 90, 2, 30], weighted=True, of="source")
    adjacency = graph.adjacency()
    x, grad = graph.rows(5)
    _, expected = run(adjacency, x, grad, reduce)
    expected[grad_rows:] = 0
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(spmm(adjacency, x, reduce, grad_rows=grad_rows), x, grad)
    assert torch.equal(gradient, expected)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_long_rows_have_the_same_bits_every_time(device: str, reduce: str) -> None:
    graph = Hubs(device, DEGREES["several"], weighted=False)
    graph.weight = torch.randn(296, device=device)
    x, grad = torch.randn(8, 9, device=device), torch.randn(6, 9, device=device)
    first = run(graph.adjacency(), x, grad, reduce)
    second = run(graph.adjacency(), x, grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for got, expected in zip(first, graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("reduce", REDUCES)
def test_long_rows_that_are_not_finite(device: str, reduce: str) -> None:
    """Only the long row has source 8: its result must show the values, and no other row may."""
    graph = Hubs(device, DEGREES["one long row"], weighted=False)
    graph.num_sources = 9
    graph.source[60] = 8
    x, grad = graph.rows(3)
    x[8] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    out, _ = run(graph.adjacency(), x, grad, reduce)
    expected, _ = graph.expected(x, grad, reduce)
    torch.testing.assert_close(out.double().cpu(), expected, equal_nan=True, rtol=1e-6, atol=0.0)
    assert out.isfinite().all(1).tolist() == [True, True, False, True]


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("device", IMPLEMENTATIONS[1:2], indirect=True)
def test_only_long_rows_cost_launches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the two kernels, with one block of columns."""
    sums: Any = importlib.import_module("gnnautoscale.kernels.triton_spmm")
    launches: list[tuple[str, int]] = []
    names = {id(sums._sum_kernels): "sum", id(sums._add_kernels): "add"}

    def spy(kernels: Any, num_programs: int, *args: Any, **kwargs: Any) -> None:
        launches.append((names[id(kernels)], num_programs))
        launch(kernels, num_programs, *args, **kwargs)

    def work(adjacency: Adjacency, **options: Any) -> list[tuple[str, int]]:
        launches.clear()
        spmm(adjacency, torch.ones(8, 4, device=device), **options)
        return launches

    launch = sums.launch
    monkeypatch.setattr(sums, "launch", spy)
    monkeypatch.setattr(sums, "_loaded", set())
    plain, hubs = (Hubs(device, DEGREES[name], weighted=False) for name in ("as long as a piece", "several"))
    # The first use loads the kernel, which a CUDA graph could not.
    assert work(plain.adjacency()) == [("sum", 3), ("add", 0)]
    assert work(plain.adjacency()) == [("sum", 3)]
    assert work(hubs.adjacency()) == [("sum", 6 + 2 + 2 + 12), ("add", 3)]
    assert work(plain.adjacency(), reduce="mean") == [("sum", 3), ("add", 0)]
    # An adjacency without its segments works, too.
    tensors = hubs.adjacency().tensors()
    cut = Adjacency.of({name: tensors[name] for name in ("ptr", "col")}, 8)
    assert work(cut) == [("sum", 6)]
    x, _ = hubs.rows(4)
    assert torch.equal(spmm(cut, x), spmm(hubs.adjacency(), x))


@pytest.mark.usefixtures("short_segments")
def test_splits_long_rows() -> None:
    ptr = torch.tensor([0, 20, 20, 41, 81, 82, 143], dtype=torch.int32)
    segments = long_rows.split_long_rows(ptr, 61)
    assert segments is not None
    assert {tensor.dtype for tensor in segments} == {torch.int32}
    assert {name: tensor.tolist() for name, tensor in segments.named().items()} == {
        "long_row": [2, 3, 5],
        "first_segment": [0, 2, 4, 8],
        "segment_begin": [20, 40, 41, 61, 82, 102, 122, 142],
        "segment_end": [40, 41, 61, 81, 102, 122, 142, 143],
    }
    assert long_rows.split_long_rows(ptr[:3], 20) is None
    assert long_rows.split_long_rows(torch.arange(0, 100, LONG), LONG) is None
    assert long_rows.split_long_rows(torch.zeros(1, dtype=torch.int32), 0) is None


@pytest.mark.usefixtures("short_segments")
def test_segments_reach_the_last_edge() -> None:
    """Positions of edges have 32 bits, and a segment may end at the last of them."""
    last = 2**31 - 1
    segments = long_rows.split_long_rows(torch.tensor([0, last - 21, last], dtype=torch.int32)[1:], 21)
    assert segments is not None
    assert (segments.segment_begin.tolist(), segments.segment_end.tolist()) == ([last - 21, last - 1], [last - 1, last])


@pytest.mark.usefixtures("short_segments")
def test_segments_travel_as_tensors() -> None:
    adjacency = Hubs("cpu", [4, 50, 7, 90, 2, 30], weighted=True, of="source").adjacency()
    tensors = adjacency.tensors()
    fields = set(long_rows.RowSegments._fields)
    edges = {"ptr", "col", "weight"}
    assert tensors.keys() == {name + suffix for name in fields | edges for suffix in ("", "_t")}
    again = Adjacency.of(tensors, 6)
    assert again.tensors().keys() == tensors.keys()
    assert all(again.tensors()[name] is tensors[name] for name in tensors)
    forward_only = Adjacency.of({name: value for name, value in tensors.items() if not name.endswith("_t")}, 6)
    assert "transposed" not in vars(forward_only)
    assert adjacency.segments_t is not None
    assert forward_only.segments_t is not None
    assert all(torch.equal(a, b) for a, b in zip(forward_only.segments_t, adjacency.segments_t, strict=True))
    one_way = Hubs("cpu", [3, 90, 4], weighted=False, of="source").adjacency()
    one_way.segments = None
    assert one_way.tensors().keys() == {"ptr", "col", "ptr_t", "col_t", *(name + "_t" for name in fields)}


@pytest.mark.usefixtures("short_segments")
def test_segments_are_found_once_and_kept_for_training() -> None:
    adjacency = Hubs("cpu", DEGREES["several"], weighted=False).adjacency()
    with torch.inference_mode():
        spmm(adjacency, torch.ones(8, 2))
    segments = adjacency.segments
    assert segments is not None
    assert not any(tensor.is_inference() for tensor in segments)
    run(adjacency, torch.ones(8, 2), torch.ones(6, 2), "sum")
    assert adjacency.segments is segments
