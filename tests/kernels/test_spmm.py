"""Sums, means, maxima and minima over neighbours against PyG's scatter and exact numbers."""

from __future__ import annotations

import pytest
import torch

from gnnautoscale.errors import InputError
from gnnautoscale.kernels import (
    Adjacency,
    spmm,
)
from support import kernels as support
from support.kernels import (
    HALVES,
    REDUCES,
    RandomEdges,
    integers,
    run,
)

device, interpreter = support.device, support.interpreter


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True])
def test_tiny_graph(device: str, weighted: bool, reduce: str) -> None:
    """Targets 0 and 2 have the sources 3, 1 and 3; the weights are 1, 4, -2; target 1 has none."""
    weight = torch.tensor([1.0, 4.0, -2.0], device=device) if weighted else None
    target, source = torch.tensor([0, 0, 2], device=device), torch.tensor([3, 1, 3], device=device)
    x = torch.tensor([[1.0, -1.0], [2.0, -2.0], [4.0, -4.0], [8.0, -8.0]], device=device)
    grad = torch.tensor([[1.0, 2.0], [100.0, 100.0], [4.0, 8.0]], device=device)
    out, gradient = run(Adjacency.build(target, source, 3, 4, weight), x, grad, reduce)
    expected: dict[tuple[str, bool], tuple[list[list[float]], list[list[float]]]] = {
        ("sum", False): ([[10, -10], [0, 0], [8, -8]], [[0, 0], [1, 2], [0, 0], [5, 10]]),
        ("mean", False): ([[5, -5], [0, 0], [8, -8]], [[0, 0], [0.5, 1], [0, 0], [4.5, 9]]),
        ("max", False): ([[8, -2], [0, 0], [8, -8]], [[0, 0], [0, 2], [0, 0], [5, 8]]),
        ("min", False): ([[2, -8], [0, 0], [8, -8]], [[0, 0], [1, 0], [0, 0], [4, 10]]),
        ("sum", True): ([[16, -16], [0, 0], [-16, 16]], [[0, 0], [4, 8], [0, 0], [-7, -14]]),
        ("mean", True): ([[8, -8], [0, 0], [-16, 16]], [[0, 0], [2, 4], [0, 0], [-7.5, -15]]),
        # 1 * 8 and 4 * 2 tie: each gets half.
        ("max", True): ([[8, -8], [0, 0], [-16, 16]], [[0, 0], [2, 4], [0, 0], [-7.5, -15]]),
        ("min", True): ([[8, -8], [0, 0], [-16, 16]], [[0, 0], [2, 4], [0, 0], [-7.5, -15]]),
    }
    assert (out.tolist(), gradient.tolist()) == expected[reduce, weighted]


@pytest.mark.parametrize(
    ("weighted", "width", "reduce"),
    [
        *((weighted, width, reduce) for weighted, width in ((False, 1), (True, 3), (True, 64)) for reduce in REDUCES),
        *((False, 300, reduce) for reduce in ("mean", "max")),
    ],
)
def test_equals_scatter_with_its_gradient(device: str, weighted: bool, reduce: str, width: int) -> None:
    graph = RandomEdges(device, weighted=weighted)
    x = integers(8, width, device=device)
    grad = integers(6, width, device=device, seed=1)
    out, gradient = run(graph.adjacency(), x, grad, reduce)
    expected_out, expected_gradient = graph.expected(x, grad, reduce)
    # Only divisions round: by a number of edges or of ties.
    tolerance = 1e-5 if reduce == "mean" else 0.0
    torch.testing.assert_close(out.double().cpu(), expected_out, rtol=tolerance, atol=tolerance)
    tolerance = 0.0 if reduce == "sum" else 1e-5
    torch.testing.assert_close(gradient.double().cpu(), expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduce", REDUCES)
def test_half_precision(device: str, reduce: str, dtype: torch.dtype) -> None:
    graph = RandomEdges(device, weighted=True)
    x, grad = integers(8, 5, device=device, dtype=dtype), integers(6, 5, device=device, dtype=dtype, seed=1)
    out, gradient = run(graph.adjacency(), x, grad, reduce)
    expected_out, expected_gradient = graph.expected(x, grad, reduce)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double().cpu(), expected_out, rtol=ulp, atol=0.0)
    torch.testing.assert_close(gradient.double().cpu(), expected_gradient, rtol=ulp, atol=ulp / 8)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_adds_in_single(device: str, dtype: torch.dtype) -> None:
    """In half precision 2048 + 1 is 2048, so a running sum would stay there."""
    target, source = torch.zeros(2049, dtype=torch.int64), torch.cat([torch.zeros(1), torch.ones(2048)]).long()
    adjacency = Adjacency.build(target.to(device), source.to(device), 1, 2)
    out = spmm(adjacency, torch.tensor([[2048.0], [1.0]], device=device, dtype=dtype))
    assert out.item() == 4096


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_gradient_finds_the_extreme_again_after_rounding(device: str, reduce: str, dtype: torch.dtype) -> None:
    graph = RandomEdges(device, weighted=False)
    graph.weight = torch.full((122,), 0.3, device=device)
    x = torch.randn(8, 7, device=device).to(dtype)
    _, gradient = run(graph.adjacency(), x, torch.ones(6, 7, device=device, dtype=dtype), reduce)
    reached = len(set(graph.target.tolist()))
    torch.testing.assert_close(
        gradient.float().sum(0), torch.full((7,), 0.3 * reached, device=device), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_messages_that_round_to_the_same_value_tie(device: str, reduce: str, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    x = torch.tensor([[1.0], [1 + step]], device=device, dtype=dtype)
    weight = torch.tensor([1.0, (1 + step / 4) / (1 + step)], device=device)  # the second message is 1 + step / 4
    target, source = torch.tensor([0, 0], device=device), torch.tensor([0, 1], device=device)
    adjacency = Adjacency.build(target, source, 1, 2, weight)
    out, gradient = run(adjacency, x, torch.ones(1, 1, device=device, dtype=dtype), reduce)
    assert out.item() == 1
    torch.testing.assert_close(gradient.squeeze(1).float(), weight / 2, rtol=step, atol=0.0)


@pytest.mark.parametrize("reduce", REDUCES)
def test_double_precision(reduce: str) -> None:
    graph = RandomEdges("cpu", weighted=True)
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    adjacency = graph.adjacency()
    assert torch.autograd.gradcheck(lambda x: spmm(adjacency, x, reduce), x)
    grad = torch.randn(6, 3, dtype=torch.float64)
    for got, expected in zip(run(adjacency, x, grad, reduce), graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("reduce", REDUCES)
def test_nothing_to_do(device: str, reduce: str) -> None:
    for num_targets, num_sources, num_edges, width in (
        (3, 4, 0, 5),
        (0, 4, 0, 5),
        (3, 0, 0, 5),
        (0, 0, 0, 5),
        (3, 4, 6, 0),
    ):
        edges = torch.zeros(num_edges, dtype=torch.int64, device=device)
        x, grad = torch.ones(num_sources, width, device=device), torch.ones(num_targets, width, device=device)
        for weight in (None, torch.ones(num_edges, device=device)):
            out, gradient = run(Adjacency.build(edges, edges, num_targets, num_sources, weight), x, grad, reduce)
            assert torch.equal(out, torch.zeros(num_targets, width, device=device))
            assert torch.equal(gradient, torch.zeros(num_sources, width, device=device))


@pytest.mark.parametrize("reduce", REDUCES)
def test_values_that_are_not_finite(device: str, reduce: str) -> None:
    """The last targets have no edges, so they stay finite."""
    graph = RandomEdges(device, weighted=False)
    x = integers(8, 3, device=device)
    x[:, 0], x[graph.source[5], 1], x[:, 2] = torch.inf, torch.nan, -torch.inf
    grad = integers(6, 3, device=device, seed=1)
    out, gradient = run(graph.adjacency(), x, grad, reduce)
    expected, expected_gradient = graph.expected(x, grad, reduce)
    torch.testing.assert_close(out.double().cpu(), expected, equal_nan=True, rtol=1e-6, atol=0.0)
    infinite = [0, 2]  # a gradient through what is not a number means nothing
    torch.testing.assert_close(
        gradient[:, infinite].double().cpu(), expected_gradient[:, infinite], rtol=1e-5, atol=1e-5
    )
    assert bool(out[:, 1].isnan().any())


@pytest.mark.parametrize("reduce", REDUCES)
def test_same_bits_every_time(device: str, reduce: str) -> None:
    graph = RandomEdges(device, weighted=False)
    graph.weight = torch.randn(122, device=device)
    x, grad = torch.randn(8, 33, device=device), torch.randn(6, 33, device=device)
    first = run(graph.adjacency(), x, grad, reduce)
    second = run(graph.adjacency(), x, grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grad_rows", [0, 3, 8])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradient_of_the_first_rows_only(device: str, reduce: str, grad_rows: int) -> None:
    adjacency = RandomEdges(device, weighted=True).adjacency()
    x, grad = integers(8, 5, device=device), integers(6, 5, device=device, seed=1)
    expected_out, expected_gradient = run(adjacency, x, grad, reduce)
    expected_gradient[grad_rows:] = 0
    x.requires_grad_()
    out = spmm(adjacency, x, reduce, grad_rows=grad_rows)
    (gradient,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(out, expected_out)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("reduce", REDUCES)
def test_any_memory_layout(device: str, reduce: str) -> None:
    adjacency = RandomEdges(device, weighted=True).adjacency()
    x, grad = integers(8, 5, device=device), integers(1, 5, device=device, seed=1).expand(6, 5)
    expected = run(adjacency, x, grad.contiguous(), reduce)
    got = run(adjacency, x.t().contiguous().t(), grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reduce", REDUCES)
def test_autocast_changes_nothing(device: str, reduce: str) -> None:
    adjacency = RandomEdges(device, weighted=False).adjacency()
    x, grad = torch.randn(8, 5, device=device), torch.randn(6, 5, device=device)
    expected = run(adjacency, x, grad, reduce)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(adjacency, x, grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_adjacency_holds_both_directions(dtype: torch.dtype) -> None:
    target, source = torch.tensor([0, 0, 2, 2, 2], dtype=dtype), torch.tensor([3, 1, 0, 3, 1], dtype=dtype)
    adjacency = Adjacency.build(target, source, 4, 5, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (adjacency.num_targets, adjacency.num_sources, adjacency.num_edges) == (4, 5, 5)
    got = {name: (tensor.dtype, tensor.tolist()) for name, tensor in adjacency.tensors().items()}
    assert got == {
        "ptr": (torch.int32, [0, 2, 2, 5, 5]),
        "col": (torch.int32, [3, 1, 0, 3, 1]),
        "weight": (torch.float32, [1, 2, 3, 4, 5]),
        "ptr_t": (torch.int32, [0, 1, 3, 3, 5, 5]),
        "col_t": (torch.int32, [2, 0, 2, 0, 2]),
        "weight_t": (torch.float32, [3, 2, 5, 1, 4]),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gpu_may_know_the_order_of_sources(weighted: bool) -> None:
    expected = RandomEdges("cpu", weighted=weighted).adjacency()
    found = RandomEdges("cuda", weighted=weighted).adjacency()
    sources, order = found.col.sort(stable=True)
    known = Adjacency(found.ptr, found.col, found.weight, 8, (order, sources), 91)
    for adjacency in (found, known):
        adjacency.prepare(gradients=True)
        for got, wanted in zip(adjacency.transposed, expected.transposed, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or wanted is None or torch.equal(got.cpu(), wanted)
        assert len([*adjacency.tensors_so_far()]) == 6 + 2 * weighted


def test_only_a_gradient_builds_the_transpose() -> None:
    adjacency = RandomEdges("cpu", weighted=True).adjacency()
    spmm(adjacency, torch.ones(8, 2))
    assert "transposed" not in vars(adjacency)
    run(adjacency, torch.ones(8, 2), torch.ones(6, 2), "sum")
    built = adjacency.transposed
    run(adjacency, torch.ones(8, 2), torch.ones(6, 2), "sum")
    assert adjacency.transposed is built


@pytest.mark.parametrize("weighted", [False, True])
def test_adjacency_travels_as_tensors(weighted: bool) -> None:
    adjacency = RandomEdges("cpu", weighted=weighted).adjacency()
    tensors = adjacency.tensors()
    assert ("weight" in tensors) == ("weight_t" in tensors) == weighted
    again = Adjacency.of(tensors, 8)
    assert "transposed" in vars(again)
    assert again.tensors().keys() == tensors.keys()
    assert all(again.tensors()[name] is tensors[name] for name in tensors)
    forward_only = Adjacency.of({name: value for name, value in tensors.items() if not name.endswith("_t")}, 8)
    assert torch.equal(forward_only.transposed[1], adjacency.transposed[1])


def test_adjacency_refuses_wrong_edges() -> None:
    ends = torch.tensor([0, 1, 2])
    with pytest.raises(InputError, match=r"one value per edge, but got source of shape \(2,\)"):
        Adjacency.build(ends, ends[:2], 3, 3)
    with pytest.raises(InputError, match=r"one value per edge, but got weight of shape \(3, 1\)"):
        Adjacency.build(ends, ends, 3, 3, torch.ones(3, 1))
    with pytest.raises(InputError, match="target must be ascending"):
        Adjacency.build(ends.flip(0), ends, 3, 3)
    with pytest.raises(InputError, match="target must be between 0 and 1, but got values from 0 to 2"):
        Adjacency.build(ends, ends, 2, 3)
    with pytest.raises(InputError, match="source must be between 0 and 1, but got values from 0 to 2"):
        Adjacency.build(ends, ends, 3, 2)
    with pytest.raises(InputError, match="source must be between 0 and 2, but got values from -1 to 1"):
        Adjacency.build(ends, ends - 1, 3, 3)


def test_spmm_refuses_wrong_input() -> None:
    adjacency = RandomEdges("cpu", weighted=True).adjacency()
    with pytest.raises(InputError, match="reduce must be one of sum, mean, max, min, but got 'add'"):
        spmm(adjacency, torch.ones(8, 2), "add")
    for x in (torch.ones(7, 2), torch.ones(8), torch.ones(8, 2, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"shape \[8, width\]"):
            spmm(adjacency, x)
    adjacency.weight = torch.ones(122, requires_grad=True)
    with pytest.raises(InputError, match="constants"):
        spmm(adjacency, torch.ones(8, 2))
