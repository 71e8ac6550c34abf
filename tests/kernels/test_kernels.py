"""The kernels against dense math and PyG: the plain versions, and Triton's on a GPU or else in its interpreter."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import scatter  # type: ignore[import-untyped]

from gnnautoscale import kernels
from gnnautoscale.errors import InputError
from gnnautoscale.kernels import (
    Adjacency,
    available,
    gather_rows,
    gather_tables,
    locate_rows,
    long_rows,
    merge_rows,
    scatter_rows,
    spmm,
    use_triton,
)

ON_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
IMPLEMENTATIONS = [
    "plain",
    pytest.param("triton", marks=[NEEDS_TRITON, *([pytest.mark.gpu] if ON_GPU else [])]),
    *([pytest.param("plain on a gpu", marks=pytest.mark.gpu)] if ON_GPU else []),
]
WIDTHS = [1, 3, 47, 64, 100, 256, 300]
REDUCES = ["sum", "mean", "max", "min"]
HALVES = [torch.bfloat16, torch.float16]
LONG = 20  # what tests take for a long row, so that small graphs have some


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Load Triton and its kernels anew, so that they run on the CPU: Triton decides that when it is imported."""

    def loaded() -> list[str]:
        # The compiled part cannot be loaded twice, and need not be.
        return [
            name
            for name in sys.modules
            if (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
            or name.startswith("gnnautoscale.kernels.triton_")
        ]

    modules = ("triton_launch", "triton_rows", "triton_spmm")
    for name in modules:
        importlib.import_module(f"gnnautoscale.kernels.{name}")  # so that all are there to come back to
    before = {name: sys.modules.pop(name) for name in loaded()}
    with pytest.MonkeyPatch.context() as patch:
        for name in modules:
            patch.delattr(kernels, name)
        patch.setenv("TRITON_INTERPRET", "1")
        interpreted: Any = importlib.import_module("triton.runtime.interpreter")
        prepare = interpreted._patch_lang_tensor

        def prepare_for_new_numpy(tensor: Any, scope: Any) -> None:
            prepare(tensor, scope)
            # Triton 3.6 calls int() on arrays of one value, which NumPy 2.4 refuses.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreted, "_patch_lang_tensor", prepare_for_new_numpy)
        for name in modules:
            importlib.import_module(f"gnnautoscale.kernels.{name}")
        rows: Any = sys.modules["gnnautoscale.kernels.triton_rows"]
        assert type(rows._gather_kernels[True]).__name__ == "InterpretedFunction"
        yield
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors must be for one of the implementations to run; the public functions then go to it."""
    if request.param == "triton" and not ON_GPU:
        request.getfixturevalue("interpreter")
    for module in ("rows", "spmm"):
        path = sys.modules[f"gnnautoscale.kernels.{module}"]
        monkeypatch.setattr(path, "use_triton", lambda tensor: request.param == "triton")
    return "cuda" if ON_GPU and request.param != "plain" else "cpu"


@NEEDS_TRITON
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 1), ("bf16", 3), ("fp32", 256)])
def test_kernels_compile_for_a_gpu(
    dtype: str, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Needs no GPU, and sees what the interpreter does not. Comes first: the interpreter replaces the kernels."""
    triton: Any = importlib.import_module("triton")
    source: Any = importlib.import_module("triton.compiler").ASTSource
    target: Any = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    rows: Any = importlib.import_module("gnnautoscale.kernels.triton_rows")
    sums: Any = importlib.import_module("gnnautoscale.kernels.triton_spmm")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    block = dict(zip(("rows_each", "columns"), rows._block(width, 4, rows.BYTES), strict=True))
    edges = {"columns": min(triton.next_power_of_2(width), 256), "unroll": 8}
    types = dict.fromkeys(("source", "staged", "rows", "x"), f"*{dtype}")
    types |= dict.fromkeys(("recent", "target", "out", "weight", "share", "grad"), "*fp32")
    types |= dict.fromkeys(("index", "skip", "where", "ptr", "col", "degrees", "ties"), "*i32")
    types |= {"side": "*i32", "count": "i32", "width": "i32", "batch_size": "i32", "room": "i32"}
    types |= dict.fromkeys(("start", "first", "length"), "i64")
    types |= dict.fromkeys(("long_row", "first_piece", "piece_begin", "piece_end"), "*i32")
    types |= {"partial": "*fp32", "num_rows": "i32", "num_pieces": "i32", "longest": "i32"}
    language: Any = importlib.import_module("triton.language")
    types_of_tables = {"source_type": language.bfloat16, "out_type": language.float32, "aligned": width == 256}
    types |= {"sources": "*i64", "outs": "*i64", "num_tables": "i32"}
    for variants, fixed in (
        (rows._gather_kernels, block),
        (rows._gather_tables_kernels, {**block, **types_of_tables}),
        (rows._scatter_kernels, block),
        (rows._merge_kernels, block),
        (rows._locate_kernels, {"block": 1024}),
        (sums._sum_kernels, {**edges, "mean": True}),
        (sums._add_kernels, {**edges, "mean": True}),
        (sums._extreme_kernels, {**edges, "largest": True}),
        (sums._gradient_kernels, edges),
    ):
        kernel = variants[False]
        names = [parameter.name for parameter in kernel.params]
        signature = {name: types.get(name, "constexpr") for name in names}
        constants = {(names.index(name),): value for name, value in fixed.items()}
        triton.compile(source(fn=kernel, signature=signature, constexprs=constants), target=target)


class Graph:
    """Random edges, also as a matrix; one target has many, some have none, and some edges are there twice."""

    def __init__(self, device: str, *, weighted: bool, num_targets: int = 6, num_sources: int = 8) -> None:
        generator = torch.Generator().manual_seed(3)
        target = torch.cat([torch.randint(num_targets - 2, (50,), generator=generator), torch.full((70,), 2)])
        self.target = torch.cat([target, torch.tensor([0, 0])]).sort().values.to(device)
        source = torch.randint(num_sources - 2, (122,), generator=generator)
        source[:2] = 1
        self.source = source.to(device)
        self.num_targets, self.num_sources = num_targets, num_sources
        # Powers of two: products and sums of small integers with these are exact in every type.
        exact = torch.tensor([-1.0, 0.5, 1.0, 2.0])[torch.randint(4, (122,), generator=generator)]
        self.weight = exact.to(device) if weighted else None

    def adjacency(self) -> Adjacency:
        return Adjacency.build(self.target, self.source, self.num_targets, self.num_sources, self.weight)

    def expected(self, x: Tensor, grad: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
        """Result and gradient by PyG's scatter, in double precision on the CPU."""
        wide = x.detach().double().cpu().requires_grad_()
        messages = wide[self.source.cpu()]
        if self.weight is not None:
            messages = messages * self.weight.double().cpu().unsqueeze(1)
        out = scatter(messages, self.target.cpu(), 0, self.num_targets, reduce=reduce)
        (gradient,) = torch.autograd.grad(out, wide, grad.double().cpu())
        return out.detach(), gradient


def integers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small whole numbers, so that there are ties and zeros and no rounding."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run(adjacency: Adjacency, x: Tensor, grad: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = spmm(adjacency, x, reduce)
    (gradient,) = torch.autograd.grad(out, x, grad)
    assert out.dtype == gradient.dtype == x.dtype
    return out.detach(), gradient


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


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("weighted", "width"), [*((False, width) for width in WIDTHS), *((True, width) for width in (3, 64, 300))]
)
def test_equals_scatter_with_its_gradient(device: str, weighted: bool, reduce: str, width: int) -> None:
    graph = Graph(device, weighted=weighted)
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
@pytest.mark.parametrize("weighted", [False, True])
def test_half_precision(device: str, weighted: bool, reduce: str, dtype: torch.dtype) -> None:
    graph = Graph(device, weighted=weighted)
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
    graph = Graph(device, weighted=False)
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
    graph = Graph("cpu", weighted=True)
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    adjacency = graph.adjacency()
    assert torch.autograd.gradcheck(lambda x: spmm(adjacency, x, reduce), x)
    grad = torch.randn(6, 3, dtype=torch.float64)
    for got, expected in zip(run(adjacency, x, grad, reduce), graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("sizes", [(3, 4, 0, 5), (0, 4, 0, 5), (3, 0, 0, 5), (0, 0, 0, 5), (3, 4, 6, 0)])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_to_do(device: str, weighted: bool, reduce: str, sizes: tuple[int, int, int, int]) -> None:
    num_targets, num_sources, num_edges, width = sizes
    edges = torch.zeros(num_edges, dtype=torch.int64, device=device)
    weight = torch.ones(num_edges, device=device) if weighted else None
    adjacency = Adjacency.build(edges, edges, num_targets, num_sources, weight)
    x, grad = torch.ones(num_sources, width, device=device), torch.ones(num_targets, width, device=device)
    out, gradient = run(adjacency, x, grad, reduce)
    assert torch.equal(out, torch.zeros(num_targets, width, device=device))
    assert torch.equal(gradient, torch.zeros(num_sources, width, device=device))


@pytest.mark.parametrize("reduce", REDUCES)
def test_values_that_are_not_finite(device: str, reduce: str) -> None:
    """The last targets have no edges, so they stay finite."""
    graph = Graph(device, weighted=False)
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
    graph = Graph(device, weighted=False)
    graph.weight = torch.randn(122, device=device)
    x, grad = torch.randn(8, 33, device=device), torch.randn(6, 33, device=device)
    first = run(graph.adjacency(), x, grad, reduce)
    second = run(graph.adjacency(), x, grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grad_rows", [0, 3, 8])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_of_the_first_rows_only(device: str, weighted: bool, reduce: str, grad_rows: int) -> None:
    adjacency = Graph(device, weighted=weighted).adjacency()
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
    adjacency = Graph(device, weighted=True).adjacency()
    x, grad = integers(8, 5, device=device), integers(1, 5, device=device, seed=1).expand(6, 5)
    expected = run(adjacency, x, grad.contiguous(), reduce)
    got = run(adjacency, x.t().contiguous().t(), grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reduce", REDUCES)
def test_autocast_changes_nothing(device: str, reduce: str) -> None:
    adjacency = Graph(device, weighted=False).adjacency()
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


def test_only_a_gradient_builds_the_transpose() -> None:
    adjacency = Graph("cpu", weighted=True).adjacency()
    spmm(adjacency, torch.ones(8, 2))
    assert adjacency._transposed is None
    run(adjacency, torch.ones(8, 2), torch.ones(6, 2), "sum")
    built = adjacency._transposed
    assert built is not None
    run(adjacency, torch.ones(8, 2), torch.ones(6, 2), "sum")
    assert adjacency._transposed is built


@pytest.mark.parametrize("weighted", [False, True])
def test_adjacency_travels_as_tensors(weighted: bool) -> None:
    adjacency = Graph("cpu", weighted=weighted).adjacency()
    tensors = adjacency.tensors()
    assert ("weight" in tensors) == ("weight_t" in tensors) == weighted
    again = Adjacency.of(tensors, 8)
    assert again._transposed is not None
    assert again.tensors().keys() == tensors.keys()
    assert all(again.tensors()[name] is tensors[name] for name in tensors)
    forward_only = Adjacency.of({name: value for name, value in tensors.items() if not name.endswith("_t")}, 8)
    assert torch.equal(forward_only.col_t, adjacency.col_t)


def test_adjacency_refuses_wrong_edges() -> None:
    ends = torch.tensor([0, 1, 2])
    with pytest.raises(InputError, match=r"one value per edge, but got source of shape \(2,\)"):
        Adjacency.build(ends, ends[:2], 3, 3)
    with pytest.raises(InputError, match=r"one value per edge, but got weight of shape \(3, 1\)"):
        Adjacency.build(ends, ends, 3, 3, torch.ones(3, 1))
    with pytest.raises(InputError, match="target is ascending"):
        Adjacency.build(ends.flip(0), ends, 3, 3)
    with pytest.raises(InputError, match="target is between 0 and 1, but got values between 0 and 2"):
        Adjacency.build(ends, ends, 2, 3)
    with pytest.raises(InputError, match="source is between 0 and 1, but got values between 0 and 2"):
        Adjacency.build(ends, ends, 3, 2)
    with pytest.raises(InputError, match="source is between 0 and 2, but got values between -1 and 1"):
        Adjacency.build(ends, ends - 1, 3, 3)


def test_spmm_refuses_wrong_input() -> None:
    adjacency = Graph("cpu", weighted=True).adjacency()
    with pytest.raises(InputError, match="reduce is one of sum, mean, max, min, but got 'add'"):
        spmm(adjacency, torch.ones(8, 2), "add")
    for x in (torch.ones(7, 2), torch.ones(8), torch.ones(8, 2, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"shape \[8, width\]"):
            spmm(adjacency, x)
    adjacency.weight = torch.ones(122, requires_grad=True)
    with pytest.raises(InputError, match="constants"):
        spmm(adjacency, torch.ones(8, 2))


# Rows of very many edges ##############################################################################################


DEGREES = {
    "one long row": [3, 0, 90, 2],
    "several": [25, 0, 21, 230, 1, 19],
    "as long as a piece": [20, 5, 20],
    "one edge more": [21, 3, 0],
    "whole pieces": [40, 60, 0],
}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are long from ``LONG`` edges on."""
    monkeypatch.setattr(long_rows, "LONG", LONG)


class Hubs(Graph):
    """Random edges with a given number for each target, or for each source."""

    def __init__(self, device: str, degrees: list[int], *, weighted: bool, of: str = "target") -> None:
        generator = torch.Generator().manual_seed(4)
        ends = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
        others = torch.randint(8, ends.shape, generator=generator)
        target, source = (ends, others) if of == "target" else (others, ends)
        target, order = target.sort(stable=True)
        self.target, self.source = target.to(device), source[order].to(device)
        self.num_targets, self.num_sources = (len(degrees), 8) if of == "target" else (8, len(degrees))
        exact = torch.tensor([-1.0, 0.5, 1.0, 2.0])[torch.randint(4, ends.shape, generator=generator)]
        self.weight = exact.to(device) if weighted else None

    def rows(self, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """What goes in and the gradient of what comes out."""
        shapes = enumerate((self.num_sources, self.num_targets))
        x, grad = (integers(n, width, device=str(self.target.device), dtype=dtype, seed=seed) for seed, n in shapes)
        return x, grad


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("of", ["target", "source"])
@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(("weighted", "width"), [(False, 1), (True, 48), (False, 70), (True, 130)])
def test_long_rows(device: str, width: int, weighted: bool, reduce: str, degrees: list[int], of: str) -> None:
    graph = Hubs(device, degrees, weighted=weighted, of=of)
    adjacency = graph.adjacency()
    pieces = adjacency.pieces if of == "target" else adjacency.pieces_t
    assert (pieces is None) == (max(degrees) <= LONG)
    x, grad = graph.rows(width)
    out, gradient = run(adjacency, x, grad, reduce)
    expected_out, expected_gradient = graph.expected(x, grad, reduce)
    tolerance = 1e-5 if reduce == "mean" else 0.0
    torch.testing.assert_close(out.double().cpu(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double().cpu(), expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_rows_that_are_really_long(device: str, reduce: str) -> None:
    longest = long_rows.LONG
    graph = Hubs(device, [longest + 1, longest, 3, 2 * longest + 7], weighted=False)
    adjacency = graph.adjacency()
    assert adjacency.pieces is not None
    assert adjacency.pieces.first_piece.tolist() == [0, 2, 5]
    x, grad = graph.rows(5)
    for got, expected in zip(run(adjacency, x, grad, reduce), graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("of", ["target", "source"])
def test_long_rows_in_half_precision(device: str, of: str, reduce: str, dtype: torch.dtype) -> None:
    graph = Hubs(device, DEGREES["several"], weighted=True, of=of)
    x, grad = graph.rows(16, dtype)
    ulp = torch.finfo(dtype).eps
    for got, expected in zip(run(graph.adjacency(), x, grad, reduce), graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=ulp, atol=ulp / 8)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("dtype", HALVES)
def test_pieces_add_in_single(device: str, dtype: torch.dtype) -> None:
    """The first piece sums up to an odd number that has no place in half precision; the second takes most of it."""
    values = torch.zeros(LONG + 1, 1)
    values[0], values[1], values[LONG] = 2 / torch.finfo(dtype).eps, 1, -2 / torch.finfo(dtype).eps
    values = values.to(device, dtype)
    each, one = torch.arange(LONG + 1, device=device), torch.zeros(LONG + 1, dtype=torch.int64, device=device)
    assert spmm(Adjacency.build(one, each, 1, LONG + 1), values).item() == 1
    _, gradient = run(Adjacency.build(each, one, LONG + 1, 1), torch.ones_like(values[:1]), values, "sum")
    assert gradient.item() == 1


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("grad_rows", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradient_of_some_long_rows_only(device: str, reduce: str, grad_rows: int) -> None:
    graph = Hubs(device, [4, 50, 7, 90, 2, 30], weighted=True, of="source")
    adjacency = graph.adjacency()
    x, grad = graph.rows(5)
    _, expected = run(adjacency, x, grad, reduce)
    expected[grad_rows:] = 0
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(spmm(adjacency, x, reduce, grad_rows=grad_rows), x, grad)
    assert torch.equal(gradient, expected)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_long_rows_have_the_same_bits_every_time(device: str, reduce: str) -> None:
    graph = Hubs(device, DEGREES["several"], weighted=False)
    graph.weight = torch.randn(296, device=device)
    x, grad = torch.randn(8, 33, device=device), torch.randn(6, 33, device=device)
    first = run(graph.adjacency(), x, grad, reduce)
    second = run(graph.adjacency(), x, grad, reduce)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for got, expected in zip(first, graph.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("reduce", REDUCES)
def test_long_rows_that_are_not_finite(device: str, reduce: str) -> None:
    """Source 8 belongs to the long row alone, which must show it and keep it from the others."""
    graph = Hubs(device, DEGREES["one long row"], weighted=False)
    graph.num_sources = 9
    graph.source[60] = 8
    x, grad = graph.rows(3)
    x[8] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    out, _ = run(graph.adjacency(), x, grad, reduce)
    expected, _ = graph.expected(x, grad, reduce)
    torch.testing.assert_close(out.double().cpu(), expected, equal_nan=True, rtol=1e-6, atol=0.0)
    assert out.isfinite().all(1).tolist() == [True, True, False, True]


@pytest.mark.usefixtures("short_pieces")
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
    # The first use loads what a CUDA graph could not load later.
    assert work(plain.adjacency()) == [("sum", 3), ("add", 0)]
    assert work(plain.adjacency()) == [("sum", 3)]
    assert work(hubs.adjacency()) == [("sum", 6 + 2 + 2 + 12), ("add", 3)]
    assert work(plain.adjacency(), reduce="mean") == [("sum", 3), ("add", 0)]
    # Whoever takes an adjacency apart need not carry the pieces.
    tensors = hubs.adjacency().tensors()
    cut = Adjacency.of({name: tensors[name] for name in ("ptr", "col")}, 8)
    assert work(cut) == [("sum", 6)]
    x, _ = hubs.rows(4)
    assert torch.equal(spmm(cut, x), spmm(hubs.adjacency(), x))


@pytest.mark.usefixtures("short_pieces")
def test_cuts_long_rows() -> None:
    ptr = torch.tensor([0, 20, 20, 41, 81, 82, 143], dtype=torch.int32)
    pieces = long_rows.cut_long_rows(ptr, 143)
    assert pieces is not None
    assert {tensor.dtype for tensor in pieces} == {torch.int32}
    assert {name: tensor.tolist() for name, tensor in pieces.named().items()} == {
        "long_row": [2, 3, 5],
        "first_piece": [0, 2, 4, 8],
        "piece_begin": [20, 40, 41, 61, 82, 102, 122, 142],
        "piece_end": [40, 41, 61, 81, 102, 122, 142, 143],
    }
    assert long_rows.cut_long_rows(ptr[:3], 20) is None
    assert long_rows.cut_long_rows(torch.arange(0, 100, LONG), 80) is None
    assert long_rows.cut_long_rows(torch.zeros(1, dtype=torch.int32), 0) is None


@pytest.mark.usefixtures("short_pieces")
def test_pieces_reach_the_last_edge() -> None:
    """Positions of edges have 32 bits, and a piece may end at the last of them."""
    last = 2**31 - 1
    pieces = long_rows.cut_long_rows(torch.tensor([0, last - 21, last], dtype=torch.int32)[1:], last)
    assert pieces is not None
    assert (pieces.piece_begin.tolist(), pieces.piece_end.tolist()) == ([last - 21, last - 1], [last - 1, last])


@pytest.mark.usefixtures("short_pieces")
def test_pieces_travel_as_tensors() -> None:
    adjacency = Hubs("cpu", [4, 50, 7, 90, 2, 30], weighted=True, of="source").adjacency()
    tensors = adjacency.tensors()
    fields = set(long_rows.Pieces._fields)
    edges = {"ptr", "col", "weight"}
    assert tensors.keys() == {name + suffix for name in fields | edges for suffix in ("", "_t")}
    again = Adjacency.of(tensors, 6)
    assert again.tensors().keys() == tensors.keys()
    assert all(again.tensors()[name] is tensors[name] for name in tensors)
    forward_only = Adjacency.of({name: value for name, value in tensors.items() if not name.endswith("_t")}, 6)
    assert forward_only._transposed is None
    assert adjacency.pieces_t is not None
    assert forward_only.pieces_t is not None
    assert all(torch.equal(a, b) for a, b in zip(forward_only.pieces_t, adjacency.pieces_t, strict=True))
    one_way = Hubs("cpu", [3, 90, 4], weighted=False, of="source").adjacency()
    one_way.pieces = None
    assert one_way.tensors().keys() == {"ptr", "col", "ptr_t", "col_t", *(name + "_t" for name in fields)}


@pytest.mark.usefixtures("short_pieces")
def test_pieces_are_cut_once_and_kept_for_training() -> None:
    adjacency = Hubs("cpu", DEGREES["several"], weighted=False).adjacency()
    with torch.inference_mode():
        spmm(adjacency, torch.ones(8, 2))
    pieces = adjacency.pieces
    assert pieces is not None
    assert not any(tensor.is_inference() for tensor in pieces)
    run(adjacency, torch.ones(8, 2), torch.ones(6, 2), "sum")
    assert adjacency.pieces is pieces


# Rows #################################################################################################################


DTYPE_PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.uint8, torch.uint8),
]


@pytest.mark.parametrize("width", [*WIDTHS, 1500])
@pytest.mark.parametrize("skipping", [False, True])
def test_gather_rows(device: str, skipping: bool, width: int) -> None:
    source = integers(40, width, device=device)
    index = torch.randint(40, (150,), device=device)
    expected = source[index]
    skip = None
    if skipping:
        skip = torch.randint(-1, 2, (150,), dtype=torch.int32, device=device)
        expected[skip >= 0] = 77
        index[skip >= 0] = 1 << 40  # must not be looked at
    for programs in (1, 3, 1000):
        out = torch.full((150, width), 77.0, device=device)
        gather_rows(source, index, out, skip=skip, programs=programs)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("skipping", [False, True])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize("width", [3, 64])
def test_gather_tables(device: str, width: int, dtypes: tuple[torch.dtype, torch.dtype], skipping: bool) -> None:
    tables = [integers(400, width, device=device, dtype=dtypes[0], seed=seed) for seed in range(3)]
    index = torch.randint(400, (150,), device=device)
    skip = torch.randint(-2, 2, (150,), dtype=torch.int32, device=device) if skipping else None
    outs = [torch.full((150, width), 77.0, dtype=dtypes[1], device=device) for _ in tables]
    expected = [out.clone() for out in outs]
    gather_tables(tables, index, outs, skip=skip, programs=3)
    for table, out, wanted in zip(tables, outs, expected, strict=True):
        gather_rows(table, index, wanted, skip=skip)
        assert torch.equal(out, wanted)
    with pytest.raises(InputError, match="one shape and type"):
        gather_tables([tables[0], tables[1][:9]], index, outs[:2])


@pytest.mark.parametrize("width", [*WIDTHS, 1500])
def test_scatter_rows(device: str, width: int) -> None:
    new = integers(150, width, device=device)
    index = torch.randperm(400, device=device)[:150]
    expected = torch.full((400, width), 77.0, device=device)
    expected[index] = new
    for programs in (1, 3, 1000):
        target = torch.full((400, width), 77.0, device=device)
        scatter_rows(new, index, target, programs=programs)
        assert torch.equal(target, expected)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("width", [*WIDTHS, 1500])
def test_merge_rows(device: str, width: int, side: int) -> None:
    own, recent = -10 - integers(30, width, device=device), 10 + integers(20, width, device=device)
    staged = integers(2 * 170, width, device=device).view(2, 170, width)
    where = torch.randint(-20, 20, (2, 170), dtype=torch.int32, device=device)
    chosen = enumerate(where[side, :150].tolist())
    expected = torch.stack([*own, *(recent[w] if w >= 0 else staged[side, i] for i, w in chosen)])
    out = torch.empty(180, width, device=device)
    merge_rows(own, staged, recent, where, torch.tensor([side], dtype=torch.int32, device=device), out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_locate_rows(device: str, count: int) -> None:
    index = torch.randint(4000, (count,), device=device)
    where = torch.full((count,), 77, dtype=torch.int32, device=device)
    locate_rows(index, 1000, 20, 500, where)
    assert where.tolist() == [i - 980 if 1000 <= i < 1500 else -1 for i in index.tolist()]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_rows_are_converted(device: str, dtypes: tuple[torch.dtype, torch.dtype], index_dtype: torch.dtype) -> None:
    first, second = dtypes
    old, recent = integers(20, 5, device=device, dtype=first), integers(8, 5, device=device, dtype=second, seed=1)
    index = torch.randperm(20, device=device).to(index_dtype)
    out = torch.empty(20, 5, dtype=second, device=device)
    gather_rows(old, index, out)
    assert torch.equal(out, old[index.long()].to(second))
    scatter_rows(old, index, out)
    assert torch.equal(out[index.long()], old.to(second))
    where = torch.arange(-7, 8, dtype=torch.int32, device=device).expand(2, -1).contiguous()
    staged = old[5:].expand(2, -1, -1).contiguous()
    merge_rows(old[:5], staged, recent, where, torch.ones(1, dtype=torch.int32, device=device), out)
    assert torch.equal(out, torch.cat([old[:12].to(second), recent]))


def test_no_rows_at_all(device: str) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device=device)

    none = torch.empty(0, dtype=torch.int64, device=device)
    side = torch.zeros(1, dtype=torch.int32, device=device)
    for count, width in ((0, 4), (0, 0)):
        gather_rows(empty(3, width), none, empty(count, width))
        gather_rows(empty(3, width), none, empty(count, width), skip=none.int())
        scatter_rows(empty(count, width), none, empty(3, width))
        merge_rows(empty(0, width), empty(2, 0, width), empty(2, width), none.int().view(2, 0), side, empty(0, width))
    staged, out = torch.ones(2, 3, 4, device=device), empty(3, 4)
    merge_rows(empty(0, 4), staged, empty(0, 4), torch.full((2, 3), -1, dtype=torch.int32, device=device), side, out)
    assert torch.equal(out, staged[0])
    index = torch.zeros(3, dtype=torch.int64, device=device)
    gather_rows(empty(3, 0), index, empty(3, 0))


def test_rows_are_constants_to_autograd(device: str) -> None:
    learned, index = torch.ones(3, 2, device=device, requires_grad=True), torch.arange(3, device=device)
    out = torch.zeros(3, 2, device=device)
    gather_rows(learned, index, out)
    scatter_rows(learned, index, out)
    where = torch.zeros(2, 1, dtype=torch.int32, device=device)
    merge_rows(learned[:2], learned[:2].view(2, 1, 2), learned, where, where[:1, 0], out)
    assert not out.requires_grad


def test_rows_refuse_wrong_shapes() -> None:
    ten, index = torch.ones(10, 4), torch.arange(10)
    with pytest.raises(InputError, match=r"same width .* got shapes \(10, 4\) and \(10, 3\)"):
        gather_rows(ten, index, torch.ones(10, 3))
    with pytest.raises(InputError, match="same width"):
        scatter_rows(ten, index, torch.ones(10, 4, 1))
    two, where = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.int32)
    with pytest.raises(InputError, match="same width"):
        merge_rows(ten, two, torch.ones(10, 5), where, where[:1, 0], ten)
    with pytest.raises(InputError, match=r"each of 10 rows, but got indices of shape \(9,\)"):
        gather_rows(ten, index[:9], ten)
    with pytest.raises(InputError, match=r"each of 10 rows, but got indices of shape \(9,\)"):
        gather_rows(ten, index, torch.ones(10, 4), skip=index[:9])
    with pytest.raises(InputError, match="each of 9 rows"):
        scatter_rows(ten[:9], index, ten)
    for out in (torch.ones(14, 4), torch.ones(9, 4)):
        with pytest.raises(InputError, match="two tables of staged rows"):
            merge_rows(ten, two, ten, where, where[:1, 0], out)
    with pytest.raises(InputError, match="one place for each index"):
        locate_rows(index, 0, 0, 1, index[:9].int())
    with pytest.raises(InputError, match="one behind the other"):
        gather_rows(ten, index[:4], ten.t()[:, :4])


def test_triton_is_for_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not use_triton(torch.ones(1))
    for installed in (True, False):
        available._triton_is_installed.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=installed: object() if found else None)
        assert available._triton_is_installed() == installed
    available._triton_is_installed.cache_clear()


def test_triton_is_imported_only_when_it_is_used() -> None:
    sources = sorted(Path(kernels.__file__).parent.glob("*.py"))
    at_the_top = set()
    for source in sources:
        for node in ast.parse(source.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any("triton" in name and name != "use_triton" for name in names):
                at_the_top.add(source.stem)
    assert at_the_top == {"triton_launch", "triton_rows", "triton_spmm"}


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize("width", [3, 100, 256])
def test_pinned_memory(width: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    kept, used = dtypes
    history = torch.randn(5000, width).to(kept).pin_memory()
    index = torch.randperm(5000)[:1234]
    out = torch.empty(1234, width, dtype=used, device="cuda")
    gather_rows(history, index.cuda(), out)
    assert torch.equal(out.cpu(), history[index].to(used))
    new = torch.randn(1234, width, device="cuda").to(used)
    expected = history.clone()
    expected[index] = new.cpu().to(kept)
    scatter_rows(new, index.cuda(), history)
    torch.cuda.synchronize()
    assert torch.equal(history, expected)


@pytest.mark.gpu
@NEEDS_GPU
def test_rows_beyond_two_billion_values() -> None:
    source = torch.empty(9_000_000, 256, dtype=torch.bfloat16, device="cuda")
    source[-1] = 3
    out = torch.zeros(1, 256, device="cuda")
    last = torch.tensor([8_999_999], device="cuda", dtype=torch.int32)
    gather_rows(source, last, out)
    assert bool((out == 3).all())
    scatter_rows(out + 2, last, source)
    assert bool((source[-1] == 5).all())
    adjacency = Adjacency.build(torch.zeros(1, device="cuda", dtype=torch.int64), last, 1, 9_000_000)
    for reduce in REDUCES:
        assert bool((spmm(adjacency, source, reduce) == 5).all())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("reduce", REDUCES)
def test_runs_in_a_cuda_graph(reduce: str) -> None:
    graph = Graph("cuda", weighted=True)
    adjacency = graph.adjacency()
    history = torch.randn(50, 48).pin_memory()
    index = torch.randint(50, (8,), device="cuda")
    skip = torch.tensor([-1, 0] * 4, dtype=torch.int32, device="cuda")
    staged, x = torch.zeros(2, 8, 48, device="cuda"), torch.zeros(8, 48, device="cuda", requires_grad=True)
    recent, grad = torch.randn(8, 48, device="cuda"), torch.randn(6, 48, device="cuda")
    where = torch.where(skip < 0, -1, torch.arange(8, device="cuda")).int().expand(2, -1).contiguous()
    table, none = torch.ones(1, dtype=torch.int32, device="cuda"), torch.empty(0, 48, device="cuda")
    goal = torch.arange(6, device="cuda")
    pushed = torch.zeros(6, 48).pin_memory()

    def step() -> tuple[Tensor, Tensor]:
        gather_rows(history, index, staged[1], skip=skip)
        merge_rows(none, staged, recent, where, table, x.detach())
        out = spmm(adjacency, x, reduce)
        (gradient,) = torch.autograd.grad(out, x, grad)
        scatter_rows(out, goal, pushed)
        return out, gradient

    torch.cuda.synchronize()  # the other stream reads what was made on this one
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    history.copy_(torch.randn(50, 48))
    recent.normal_()
    captured.replay()
    torch.cuda.synchronize()
    rows = torch.where((skip < 0).cpu().unsqueeze(1), history[index.cpu()], recent.cpu())
    expected = graph.expected(rows, grad, reduce)
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(pushed, results[0].detach().cpu())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_first_long_rows_are_in_a_cuda_graph(reduce: str) -> None:
    """A graph cannot load kernels. No other test loads those for this type and width."""
    few, many = (Hubs("cuda", DEGREES[name], weighted=True) for name in ("as long as a piece", "several"))
    adjacency = Adjacency.of(many.adjacency().tensors(), 8)
    adjacency_of_few, rows_of_few = few.adjacency(), few.rows(24, torch.float16)
    assert adjacency_of_few.pieces is None
    assert adjacency.pieces is not None
    torch.cuda.synchronize()  # the other stream reads what was made on this one
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        run(adjacency_of_few, *rows_of_few, reduce)
    torch.cuda.synchronize()
    x, grad = many.rows(24, torch.float16)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run(adjacency, x, grad, reduce)
    captured.replay()
    torch.cuda.synchronize()
    for got, expected in zip(results, many.expected(x, grad, reduce), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("width", [1, 47, 64])
def test_compiles_once_for_all_sizes(width: int) -> None:
    from gnnautoscale.kernels import triton_rows, triton_spmm

    def variants() -> int:
        found = (*vars(triton_rows).values(), *vars(triton_spmm).values())
        kernels = [kernel for value in found if isinstance(value, dict) for kernel in value.values()]
        compiled = [kernel for kernel in kernels if type(kernel).__name__ == "JITFunction"]
        assert len(compiled) == 18
        return sum(len(kernel.device_caches[0][0]) for kernel in compiled)

    def work(count: int, offset: int) -> None:
        # One buffer, so that the slices of it are aligned in different ways.
        buffer = torch.zeros(4 * (count + offset), dtype=torch.int32, device="cuda")
        index = buffer[offset : offset + count]
        rows = torch.ones(count + offset, width, device="cuda")[offset:]
        out = torch.zeros(count + offset, width, device="cuda")[offset:]
        gather_rows(rows, index, out)
        gather_rows(rows, index, out, skip=index)
        gather_tables([rows, rows], index, [out, out], skip=index)
        scatter_rows(rows[:1], index[:1], out)
        where = buffer[offset : offset + 2 * count].view(2, count)
        merge_rows(rows[:1], rows.new_zeros(2, count, width), rows, where, index[:1], out)
        locate_rows(index.long(), offset, count, count, index)
        adjacency = Adjacency.build(index, index, count, count)
        adjacency = Adjacency.of({name: shifted(tensor, offset) for name, tensor in adjacency.tensors().items()}, count)
        for reduce in REDUCES:
            x = rows.detach().requires_grad_()
            torch.autograd.grad(spmm(adjacency, x, reduce), x, out)

    def shifted(tensor: Tensor, offset: int) -> Tensor:
        buffer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")
        buffer[offset:] = tensor
        return buffer[offset:]

    work(48, 0)
    before = variants()
    # All edges lead from node 0 to itself, so that the last two have a long row.
    for count, offset in ((1, 0), (2, 1), (17, 3), (1000, 2), (1024, 4)):
        work(count, offset)
    assert variants() == before
