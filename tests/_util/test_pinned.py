"""Page-locked memory, as far as it shows without a GPU and with one."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnautoscale._util import Pinned, copy_staged, copy_staged_together, pinned
from gnnautoscale._util.pinned import _is_in_file, pinned_zeros


def test_without_a_gpu_everything_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Pinned().pin(torch.zeros(5)) is None


def test_memory_in_files_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    np.arange(9000, dtype=np.float32).tofile(path)
    mapped = torch.from_file(str(path), size=9000)
    also_mapped = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c"))
    for tensor in (mapped, mapped[5000:], also_mapped):
        assert _is_in_file(tensor.data_ptr())
    shared: torch.Tensor = torch.zeros(100).share_memory_()  # type: ignore[no-untyped-call]
    for tensor in (torch.zeros(5), torch.zeros(1 << 22), shared):
        assert not _is_in_file(tensor.data_ptr())
    nowhere = mmap.mmap(-1, 4096)
    assert not _is_in_file(torch.frombuffer(nowhere, dtype=torch.uint8).data_ptr())
    assert not _is_in_file(0)


def test_unknown_systems_have_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(100))
    mapped = torch.from_file(str(path), size=100, dtype=torch.uint8)
    monkeypatch.setattr("gnnautoscale._util.pinned._MAPS", tmp_path / "nothing")
    assert not _is_in_file(mapped.data_ptr())


def test_copies_within_host_memory() -> None:
    rows = torch.arange(4)
    assert copy_staged(rows, torch.device("cpu")) is rows


class Runtime:
    """Stands in for CUDA's, and refuses to lock memory if asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.locked: list[int] = []
        self._refuses = refuses
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(pinned, "_LARGE", 100)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in self.locked)
        monkeypatch.setattr(pinned, "_runtime", lambda: self)

    def cudaHostRegister(self, address: int, _: int, __: int) -> int:  # noqa: N802
        if not self._refuses:
            self.locked.append(address)
        return int(self._refuses)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.locked.remove(address)
        return 0


def test_memory_stays_locked_until_its_last_owner_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    table = torch.zeros(50)
    first, second = Pinned(), Pinned()
    assert first.pin(table) is first.pin(table) is second.pin(table) is table
    assert runtime.locked == [table.data_ptr()]
    del first
    gc.collect()
    assert runtime.locked == [table.data_ptr()]
    del second
    gc.collect()
    assert runtime.locked == []


def test_zeros_begin_with_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    zeros, _owner = pinned_zeros((50, 3), torch.bfloat16)
    assert (zeros.shape, zeros.dtype, int(zeros.count_nonzero())) == ((50, 3), torch.bfloat16, 0)
    assert runtime.locked == [zeros.data_ptr()]
    # PyTorch asks whether the first byte of a storage is pinned.
    assert zeros.data_ptr() == zeros.untyped_storage().data_ptr()
    assert zeros.data_ptr() % mmap.PAGESIZE == 0


def test_what_cannot_be_locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = Runtime(monkeypatch)
    path = tmp_path / "rows"
    path.write_bytes(bytes(100))
    owner = Pinned()
    assert owner.pin(torch.from_file(str(path), size=100, dtype=torch.uint8)) is None
    assert owner.pin(torch.zeros(4, 4).t()[1:]) is None  # not contiguous
    assert owner.pin(torch.empty(0)) is not None
    assert runtime.locked == []
    Runtime(monkeypatch, refuses=True)
    assert owner.pin(torch.zeros(50)) is None


def test_small_tensors_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    small = torch.arange(5)
    owner = Pinned()
    copied = owner.pin(small)
    assert copied is not None
    assert copied is not small
    assert torch.equal(copied, small)
    assert runtime.locked == []


def test_memory_is_given_back_once_a_gpu_is_done_and_no_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, told = Runtime(monkeypatch), []
    capturing = True
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append(runtime.locked[:]))
    small, large = torch.arange(5), torch.zeros(50)
    owner = Pinned()
    copied = owner.pin(small)
    assert copied is not None
    there = weakref.ref(copied)
    assert owner.pin(large) is large
    del owner, copied
    gc.collect()
    assert there() is not None
    assert (runtime.locked, told) == ([large.data_ptr()], [])
    capturing, other = False, Pinned()
    other.pin(small)
    del other
    gc.collect()
    assert there() is None
    assert (runtime.locked, told) == ([], [[large.data_ptr()]])


@pytest.mark.gpu
def test_a_gpu_reads_what_is_locked() -> None:
    zeros, owner = pinned_zeros((64, 3), torch.float32)
    assert zeros.is_pinned()
    assert owner.pin(zeros[:10]) is not None  # a part of it is pinned already
    small, large = torch.arange(300.0).view(100, 3), torch.zeros(1 << 25)
    copied, locked = owner.pin(small), owner.pin(large)
    assert locked is large
    assert large.is_pinned()
    assert copied is not None
    assert torch.equal(copied.to("cuda", non_blocking=True).cpu(), small)
    del owner
    gc.collect()
    assert not large.is_pinned()


@pytest.mark.gpu
def test_small_copies_do_not_overtake_each_other() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = [copy_staged(torch.full((number + 1,), number), device) for number in range(50)]
    for number, there in enumerate(copies):
        assert there.tolist() == [number] * (number + 1)
    assert copy_staged(torch.empty(0, 3), device).shape == (0, 3)
    several = [torch.arange(5), torch.rand(3, 3), torch.empty(0, 2), torch.tensor([True])]
    for given, there in zip(several, copy_staged_together(several, device), strict=True):
        assert torch.equal(there.cpu(), given)
