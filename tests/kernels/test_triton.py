"""When Triton is used, and what only a compiler or a GPU can show."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnautoscale import kernels
from gnnautoscale.kernels import (
    Adjacency,
    OwnRows,
    RowNumbers,
    accumulate_rows,
    additive_scores,
    available,
    edge_dots,
    expand_targets,
    gather_rows,
    gather_sums,
    gather_tables,
    locate_and_count,
    locate_own,
    merge_rows,
    scatter_rows,
    spmm,
    use_triton,
    weighted_sum,
)
from gnnautoscale.kernels.halo import regroup
from support import kernels as support
from support.kernels import (
    DEGREES,
    NEEDS_GPU,
    NEEDS_TRITON,
    REDUCES,
    Hubs,
    RandomEdges,
    run,
)

short_segments = support.short_segments


@NEEDS_TRITON
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 1), ("bf16", 256)])
def test_kernels_compile_for_a_gpu(
    dtype: str, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Needs no GPU, and sees what the interpreter does not."""
    triton: Any = importlib.import_module("triton")
    source: Any = importlib.import_module("triton.compiler").ASTSource
    target: Any = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    rows: Any = importlib.import_module("gnnautoscale.kernels.triton_rows")
    sums: Any = importlib.import_module("gnnautoscale.kernels.triton_spmm")
    heads: Any = importlib.import_module("gnnautoscale.kernels.triton_attention")
    halo: Any = importlib.import_module("gnnautoscale.kernels.triton_halo")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    block = dict(zip(("rows_each", "columns"), rows._block(width, 4, rows.BYTES), strict=True))
    edges = {"columns": min(triton.next_power_of_2(width), 256), "unroll": 8}
    types = dict.fromkeys(("source", "staged", "rows", "x"), f"*{dtype}")
    types |= dict.fromkeys(("recent", "target", "out", "weight", "share", "grad"), "*fp32")
    types |= dict.fromkeys(("index", "skip", "where", "ptr", "col", "degrees", "ties"), "*i32")
    types |= {"side": "*i32", "count": "i32", "width": "i32", "batch_size": "i32", "room": "i32"}
    types |= dict.fromkeys(("start", "first", "length"), "i64")
    types |= dict.fromkeys(("long_row", "first_segment", "segment_begin", "segment_end"), "*i32")
    types |= {"partial": "*fp32", "num_rows": "i32", "num_segments": "i32", "longest": "i32"}
    types |= dict.fromkeys(("a", "b"), f"*{dtype}")
    types |= dict.fromkeys(("order", "owner"), "*i32") | {"factor": "*fp32", "of_factor": "*fp32"}
    types |= {"num_edges": "i32", "slope": "fp32"}
    language: Any = importlib.import_module("triton.language")
    types_of_tables = {"source_type": language.bfloat16, "out_type": language.float32, "aligned": width == 256}
    types |= {"sources": "*i64", "outs": "*i64", "num_tables": "i32"}
    keys = dict.fromkeys(("row", "key", "first", "rank", "numbered", "source", "number", "missing", "ptr"), "*i32")
    keys |= dict.fromkeys(("runs", "order", "rows", "halo", "target"), "*i64")
    keys |= dict.fromkeys(("count", "num_edges", "num_runs", "num_halo", "num_targets", "size", "width"), "i32")
    keys |= dict.fromkeys(("weight", "regrouped"), "*fp32")
    numbering = [halo._keys_kernels, halo._firsts_kernels, halo._number_kernels, halo._targets_kernels]
    numbering += [halo._locate_own_kernels, halo._own_rows_kernels]
    searching = [halo._locate_kernels, halo._regroup_kernels]
    work = [(variants, {"block": halo.BLOCK}, keys) for variants in numbering]
    work += [(variants, {"block": halo.BLOCK, "steps": 20}, keys) for variants in searching]
    of_rows = [
        (rows._gather_kernels, block),
        (rows._gather_tables_kernels, {**block, **types_of_tables}),
        (rows._scatter_kernels, block),
        (rows._merge_kernels, block),
        (sums._sum_kernels, {**edges, "mean": True}),
        (sums._add_kernels, {**edges, "mean": True}),
        (sums._extreme_kernels, {**edges, "largest": True}),
        (sums._gradient_kernels, edges),
        (heads._weighted_kernels, {**edges, "heads": 4}),
        (heads._weighted_kernels, {**edges, "heads": 1, "order": None}),
        (heads._dot_kernels, {**edges, "heads": 4}),
        (heads._score_kernels, {**edges, "heads": 4}),
        (heads._score_gradient_kernels, {**edges, "heads": 4, "of_factor": None}),
        (heads._score_gradient_kernels, {**edges, "heads": 4, "order": None}),
    ]
    work = work if width == 1 else []  # the same for all widths
    for variants, fixed, known in [*work, *((variants, fixed, types) for variants, fixed in of_rows)]:
        kernel = variants[False]
        names = [parameter.name for parameter in kernel.params]
        signature = {name: "constexpr" if name in fixed else known.get(name, "constexpr") for name in names}
        constants = {(names.index(name),): value for name, value in fixed.items()}
        triton.compile(source(fn=kernel, signature=signature, constexprs=constants), target=target)


def test_triton_is_for_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not use_triton(torch.ones(1))
    for installed in (True, False):
        available.triton_is_installed.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=installed: object() if found else None)
        assert available.triton_is_installed() == installed
    available.triton_is_installed.cache_clear()


def test_triton_is_imported_only_when_it_is_used() -> None:
    sources = sorted(Path(kernels.__file__).parent.glob("*.py"))
    at_the_top = set()
    for source in sources:
        for node in ast.parse(source.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any("triton" in name and name not in ("use_triton", "triton_is_installed") for name in names):
                at_the_top.add(source.stem)
    expected = {"triton_attention", "triton_halo", "triton_launch", "triton_rows", "triton_spmm"}
    assert at_the_top == expected


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
    graph = RandomEdges("cuda", weighted=True)
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
@pytest.mark.usefixtures("short_segments")
def test_attention_runs_in_a_cuda_graph() -> None:
    graph = Hubs("cuda", DEGREES["several"], weighted=False)
    adjacency = Adjacency.of(graph.adjacency().tensors(edge_values=True), graph.num_sources)
    targets, sources = (torch.zeros(number, 2, 16, device="cuda") for number in (graph.num_targets, graph.num_sources))
    factor = torch.randn(2, 16, device="cuda")

    def step() -> list[Tensor]:
        x, y, z = (value.detach().requires_grad_() for value in (targets, sources, factor))
        scores = additive_scores(adjacency, x, y, z) + edge_dots(adjacency, x, y)
        out = weighted_sum(adjacency, scores, y)
        return [out, *torch.autograd.grad(out.square().sum(), (x, y, z))]

    torch.cuda.synchronize()  # the other stream reads what was made on this one
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    for rows in (targets, sources):
        rows.normal_()
    captured.replay()
    torch.cuda.synchronize()
    for got, expected in zip(results, step(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_first_long_rows_are_in_a_cuda_graph(reduce: str) -> None:
    """A graph cannot load kernels. No other test loads those for this type and width."""
    few, many = (Hubs("cuda", DEGREES[name], weighted=True) for name in ("as long as a piece", "several"))
    adjacency = Adjacency.of(many.adjacency().tensors(), 8)
    adjacency_of_few, rows_of_few = few.adjacency(), few.rows(24, torch.float16)
    assert adjacency_of_few.segments is None
    assert adjacency.segments is not None
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
    from gnnautoscale.kernels import triton_halo, triton_rows, triton_spmm
    from gnnautoscale.kernels.triton_launch import Kernels

    def variants() -> int:
        found = [value for module in (triton_halo, triton_rows, triton_spmm) for value in vars(module).values()]
        kernels = [value[aligned] for value in found if isinstance(value, Kernels) for aligned in (True, False)]
        compiled = [kernel for kernel in kernels if type(kernel).__name__ == "JITFunction"]
        assert len(compiled) == 40
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
        rounds = torch.zeros(count + offset, dtype=torch.int32, device="cuda")[offset:]
        accumulate_rows(rows[:1], index[:1], out, rounds, 1 + offset)
        gather_sums(rows, index, rounds, 1 + offset, out)
        where = buffer[offset : offset + 2 * count].view(2, count)
        merge_rows(rows[:1], rows.new_zeros(2, count, width), rows, where, index[:1], out)
        locate_own(index.long(), OwnRows([(offset, 0, count), (5000, count, 3)]), index)
        own, numbers = OwnRows([(5, 0, 2)]), RowNumbers(9)
        found = numbers.find(index, own).result()
        locate_and_count(numbers, index, own, shifted(found.rows, offset))
        adjacency = Adjacency.build(index, index, count, count)
        order = shifted(torch.arange(count, device="cuda"), offset)
        for weight in (None, rows[:, 0].contiguous()):
            regroup(shifted(adjacency.ptr, offset), order, weight)
        expand_targets(shifted(adjacency.ptr, offset), count)
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
