"""Rows by index against plain indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.kernels import (
    WordTable,
    gather_rows,
    gather_tables,
    merge_rows,
    scatter_rows,
)
from gnnautoscale.kernels.rows import narrow_rows
from support import kernels as support
from support.kernels import (
    NEEDS_GPU,
    integers,
)

device, interpreter = support.device, support.interpreter

WIDTHS = [1, 47, 64, 300, 1500]
DTYPE_PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.uint8, torch.uint8),
]


@pytest.mark.parametrize("width", WIDTHS)
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


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize(("width", "skipping"), [(3, True), (64, False), (64, True)])
def test_gather_tables(device: str, width: int, skipping: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    tables = [integers(400, width, device=device, dtype=dtypes[0], seed=seed) for seed in range(3)]
    index = torch.randint(400, (150,), device=device)
    skip = torch.randint(-2, 2, (150,), dtype=torch.int32, device=device) if skipping else None
    outs = [torch.full((150, width), 77.0, dtype=dtypes[1], device=device) for _ in tables]
    expected = [out.clone() for out in outs]
    gather_tables(tables, index, outs, skip=skip)
    for table, out, wanted in zip(tables, outs, expected, strict=True):
        gather_rows(table, index, wanted, skip=skip)
        assert torch.equal(out, wanted)
    with pytest.raises(InputError, match="one shape and type"):
        gather_tables([tables[0], tables[1][:9]], index, outs[:2])


@pytest.mark.parametrize("width", WIDTHS)
def test_scatter_rows(device: str, width: int) -> None:
    new = integers(150, width, device=device)
    index = torch.randperm(400, device=device)[:150]
    expected = torch.full((400, width), 77.0, device=device)
    expected[index] = new
    for programs in (1, 3, 1000):
        target = torch.full((400, width), 77.0, device=device)
        scatter_rows(new, index, target, programs=programs)
        assert torch.equal(target, expected)


@pytest.mark.parametrize("width", [1, 47, 300])
def test_merge_rows(device: str, width: int) -> None:
    own, recent = -10 - integers(30, width, device=device), 10 + integers(20, width, device=device)
    staged = integers(2 * 170, width, device=device).view(2, 170, width)
    where = torch.randint(-20, 20, (2, 170), dtype=torch.int32, device=device)
    for side in (0, 1):
        chosen = enumerate(where[side, :150].tolist())
        expected = torch.stack([*own, *(recent[w] if w >= 0 else staged[side, i] for i, w in chosen)])
        out = torch.empty(180, width, device=device)
        merge_rows(own, staged, recent, where, torch.tensor([side], dtype=torch.int32, device=device), out)
        assert torch.equal(out, expected)


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
    with pytest.raises(
        InputError, match=r"same width in source and destination, but got shapes \(10, 4\) and \(10, 3\)"
    ):
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
        with pytest.raises(InputError, match="two tables with room for the halo"):
            merge_rows(ten, two, ten, where, where[:1, 0], out)
    with pytest.raises(InputError, match="contiguous in memory"):
        gather_rows(ten, index[:4], ten.t()[:, :4])


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


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_narrow_rows(device: str, shape: tuple[int, ...], index_dtype: torch.dtype) -> None:
    source = torch.randn(50, *shape)
    for count in (0, 1, 700):
        index = torch.randint(50, (count,))
        found = narrow_rows(source.to(device), index.to(device, index_dtype))
        assert torch.equal(found.cpu(), source[index])


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_pieces_of_a_table(device: str, shape: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["device"] != "triton":
        pytest.skip("the plain way is a loop of copies")
    table = torch.randint(1000, (60, *shape), dtype=torch.int32)
    table = table.pin_memory() if device == "cuda" else table
    pieces = torch.tensor([[50, 0, 10], [3, 10, 1], [20, 11, 25]])
    found = WordTable(table).copy_pieces(pieces.to(device), 36)
    assert torch.equal(found.cpu(), torch.cat([table[50:60], table[3:4], table[20:45]]))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (64,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float32, torch.bfloat16])
def test_rows_of_any_table_in_pinned_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table = torch.randint(2 if dtype == torch.bool else 100, (50, *shape)).to(dtype).pin_memory()
    index = torch.randint(50, (20,))
    for there in (index.cuda(), index.cuda().int(), index[:0].cuda()):
        found = WordTable(table).gather(there)
        assert found.is_cuda
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), table[there.cpu().long()])
    assert torch.equal(WordTable(table.cuda()).gather(index), table[index])
