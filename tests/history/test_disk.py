"""Histories in files: what is asked of the system, and what is left of them; rows themselves are in test_history."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gnnautoscale.history.disk as disk_module
from gnnautoscale.errors import InputError
from gnnautoscale.history import DiskHistory, Folder

CPU = torch.device("cpu")


def opened(folder: Path, num_nodes: int = 8, width: int = 4, dtype: torch.dtype = torch.float32) -> DiskHistory:
    return DiskHistory(num_nodes, width, dtype, path=folder / "convs.0.rows")


def rows_of(history: DiskHistory) -> Tensor:
    return history.pull(torch.arange(history.num_nodes), device=CPU, dtype=torch.float32)


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


# Space and the file itself ###########################################################################################


@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, 1200), (torch.bfloat16, 600), (torch.int8, 304)])
def test_space_is_reserved_before_anything_is_written(tmp_path: Path, dtype: torch.dtype, row: int) -> None:
    history = opened(tmp_path, 1000, 300, dtype)
    found = os.stat(tmp_path / "convs.0.rows")
    assert history.num_bytes == found.st_size == 1000 * row
    assert found.st_blocks * 512 >= found.st_size


@pytest.mark.parametrize("function", ["posix_fallocate", "open"])
@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "Free some space there"), (errno.EDQUOT, "Free some space there"), (errno.EIO, "Check the disk")],
)
def test_no_room_is_said_when_the_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, words: str
) -> None:
    monkeypatch.setattr(os, function, failing(code))
    with pytest.raises(InputError, match=rf"readable and writable, but got {tmp_path}/convs.0.rows \(.*{words}"):
        opened(tmp_path)
    monkeypatch.undo()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file or directory.*Check the disk and the folder"):
        opened(tmp_path / "nowhere")


def test_the_file_goes_with_the_history(tmp_path: Path) -> None:
    history = opened(tmp_path)
    assert (tmp_path / "convs.0.rows").stat().st_mode & 0o777 == 0o600
    history.push(torch.ones(8, 4), torch.arange(8))
    raw = history.raw
    del history
    assert list(tmp_path.iterdir()) == []
    # Who still has the rows may go on with them.
    assert torch.equal(raw, torch.ones(8, 4))


def test_the_file_goes_with_the_history_even_if_someone_else_removed_it(tmp_path: Path) -> None:
    history = opened(tmp_path)
    (tmp_path / "convs.0.rows").unlink()
    history.push(torch.ones(8, 4), torch.arange(8))
    assert torch.equal(rows_of(history), torch.ones(8, 4))
    del history


def test_another_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    history = opened(tmp_path)
    (tmp_path / "convs.0.rows").unlink()
    (tmp_path / "convs.0.rows").write_text("another run's")
    del history
    assert (tmp_path / "convs.0.rows").read_text() == "another run's"


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    history = DiskHistory(4, 2, torch.float32, path=tmp_path / "rows")
    os.truncate(tmp_path / "rows", 12)
    for use in (
        lambda: history.raw,
        lambda: history.pull(torch.tensor([3]), device=torch.device("cpu"), dtype=torch.float32),
        lambda: history.push(torch.ones(1, 2), torch.tensor([3])),
        lambda: history.push(torch.ones(1, 2), torch.tensor([3]), [(3, 0, 1)]),
    ):
        with pytest.raises(InputError, match="rows, cut off after 12 bytes"):
            use()


def test_a_fork_does_not_remove_the_file(tmp_path: Path) -> None:
    path = tmp_path / "convs.0.rows"
    for owner, left in ((os.getpid() + 1, True), (os.getpid(), False)):
        disk_module._remove(path, os.open(path, os.O_CREAT | os.O_RDWR), owner)
        assert path.exists() == left


def test_a_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "convs.0.rows").write_bytes(b"\x01" * 4096)
    assert torch.equal(rows_of(opened(tmp_path)), torch.zeros(8, 4))


def test_no_nodes(tmp_path: Path) -> None:
    history = opened(tmp_path, 0)
    assert (history.num_bytes, history.raw.shape) == (0, (0, 4))
    assert rows_of(history).shape == (0, 4)


def test_what_is_written_and_what_is_mapped_are_one(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.push(torch.ones(2, 4), torch.tensor([2, 3]), [(2, 0, 2)])  # through the file
    history.push(torch.full((1, 4), 5.0), torch.tensor([6]))  # through memory
    history.raw[0] = 7.0
    expected = [7.0, 0.0, 1.0, 1.0, 0.0, 0.0, 5.0, 0.0]
    assert rows_of(history)[:, 0].tolist() == expected
    content = torch.frombuffer(bytearray((tmp_path / "convs.0.rows").read_bytes()), dtype=torch.float32)
    assert content.view(8, 4)[:, 3].tolist() == expected


def test_other_systems_than_linux_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for make in (lambda: opened(tmp_path), lambda: Folder(tmp_path)):
        with pytest.raises(InputError, match=r"histories on disk need Linux, but got darwin\. Use storage='device'"):
            make()
    assert list(tmp_path.iterdir()) == []


# Announced reads #####################################################################################################


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch, cold: None) -> list[tuple[int, int]]:
    """What is announced, with small pieces: of 64, 256 and 1024 bytes, and three at most."""
    ranges: list[tuple[int, int]] = []

    def note(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        ranges.append((start, length))

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(disk_module, "_PIECES", (64, 256, 1024))
    monkeypatch.setattr(disk_module, "_MOST_PIECES", 3)
    return ranges


@pytest.mark.parametrize(
    ("width", "index", "expected"),
    [
        # Rows of 16 bytes, four to a piece.
        (4, [0], [(0, 64)]),
        (4, [3, 0, 1], [(0, 64)]),
        (4, [0, 1, 5, 9, 40, 41], [(0, 192), (640, 64)]),
        (4, [41, 9, 5, 0, 40, 1], [(0, 192), (640, 64)]),
        (4, [0, 8, 16], [(0, 64), (128, 64), (256, 64)]),
        # One piece more is too many: larger ones, with gaps in between.
        (4, [0, 8, 16, 24], [(0, 512)]),
        (4, [0, 8, 16, 24, 63], [(0, 512), (768, 256)]),
        (4, [0, 32, 64, 96], [(0, 2048)]),
        # There are no larger ones than these, however many it takes.
        (4, [0, 128, 256, 384, 512], [(0, 1024), (2048, 1024), (4096, 1024), (6144, 1024), (8192, 1024)]),
        # Rows of 24 bytes, some across two pieces.
        (6, [2], [(0, 128)]),
        (6, [2, 5], [(0, 192)]),
        (6, [3, 8], [(64, 64), (192, 64)]),
        # Rows of 160 bytes, longer than a piece, which is as long as three then.
        (40, [0, 1, 9], [(0, 384), (1344, 384)]),
        (4, [], []),
    ],
)
def test_rows_are_announced_in_few_long_pieces(
    tmp_path: Path, advised: list[tuple[int, int]], width: int, index: list[int], expected: list[tuple[int, int]]
) -> None:
    opened(tmp_path, 600, width).announce(torch.tensor(index, dtype=torch.long))
    assert advised == expected


@pytest.mark.parametrize("seed", range(30))
def test_every_row_is_announced_once(tmp_path: Path, advised: list[tuple[int, int]], seed: int) -> None:
    chance = random.Random(seed)
    width = chance.randint(1, 60)
    history = opened(tmp_path, 600, width)
    index = torch.tensor(chance.sample(range(600), chance.randint(1, chance.choice([3, 30, 300]))))
    history.announce(index)
    covered = [byte for start, length in advised for byte in range(start, start + length)]
    assert len(covered) == len(set(covered))
    wanted = {row * width * 4 + place for row in index.tolist() for place in range(width * 4)}
    assert wanted <= set(covered)
    # Pieces that touch are one.
    assert all(start + length < after for (start, length), (after, _) in pairwise(advised))
    largest = 1024 * -(-width * 4 // 1024)
    assert len(advised) <= 3 or all(length % largest == 0 for _, length in advised)


@pytest.mark.usefixtures("cold")
def test_pieces_are_of_64_kilobytes_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, length, __: ranges.append((start, length)))
    history = opened(tmp_path, 20_000, 4)
    history.announce(torch.tensor([0, 4096, 19_999]))
    assert ranges == [(0, 2 << 16), (4 << 16, 1 << 16)]


def test_rows_in_memory_are_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, length, __: ranges.append((start, length)))
    asked: list[int] = []
    in_memory = range(1000 * 16)

    def preadv(file: int, buffers: list[bytearray], start: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        asked.append(start)
        if start not in in_memory:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    history = opened(tmp_path, 20_000, 4)
    history.announce(torch.arange(1000))
    assert not ranges
    # A few of them are enough to know, and they lie all over.
    assert asked == list(range(0, 1000 * 16, 62 * 16))
    history.announce(torch.arange(999, 1001))
    assert ranges == [(0, 1 << 16)]


def test_reading_announces_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = opened(tmp_path)
    history.push(torch.arange(32.0).view(8, 4), torch.arange(8))
    calls: list[tuple[str, list[int]]] = []
    for name in ("announce", "gather"):
        method = getattr(history, name)

        def spy(index: Tensor, *args: Any, name: str = name, method: Callable[..., Any] = method) -> None:
            calls.append((name, index.tolist()))
            method(index, *args)

        monkeypatch.setattr(history, name, spy)
    pulled = history.pull(torch.tensor([5, 2]), device=CPU, dtype=torch.float32)
    assert pulled[:, 0].tolist() == [20.0, 8.0]
    assert calls == [("announce", [5, 2]), ("gather", [5, 2])]
    # What is skipped is not announced either.
    out = torch.zeros(3, 4)
    history.read(torch.tensor([1, 3, 7]), out, skip=torch.tensor([-1, 0, -1], dtype=torch.int32))
    assert calls[2:] == [("announce", [1, 7]), ("gather", [1, 7])]
    assert out[:, 0].tolist() == [4.0, 0.0, 28.0]


# Writes ##############################################################################################################


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    pwrite, lengths = os.pwrite, []

    def short(file: int, data: memoryview, start: int) -> int:
        lengths.append(len(data))
        return pwrite(file, data[:7], start)

    monkeypatch.setattr(os, "pwrite", short)
    history = opened(tmp_path, 8, 4, dtype)
    rows = torch.tensor([1.0, 2.0, -1.0, 0.0, 4.0])[:, None].expand(-1, 4)
    history.push(rows, torch.tensor([5, 6, 7, 0, 1]), [(5, 0, 3), (0, 3, 2)])
    row_bytes = history.num_bytes // 8
    assert lengths == [*range(3 * row_bytes, 0, -7), *range(2 * row_bytes, 0, -7)]
    assert rows_of(history)[:, 3].tolist() == [0.0, 4.0, 0.0, 0.0, 0.0, 1.0, 2.0, -1.0]


@pytest.mark.parametrize(("count", "writes"), [(1, 1), (64, 64), (65, 0), (100, 0)])
def test_many_runs_go_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, writes: int) -> None:
    pwrite, calls = os.pwrite, 0

    def counted(file: int, data: memoryview, start: int) -> int:
        nonlocal calls
        calls += 1
        return pwrite(file, data, start)

    monkeypatch.setattr(os, "pwrite", counted)
    history = opened(tmp_path, 300, 2)
    where = 3 * torch.randperm(100)[:count]
    rows = torch.randn(count, 2)
    history.push(rows, where, [(int(row), place, 1) for place, row in enumerate(where)])
    assert calls == writes
    expected = torch.zeros(300, 2)
    expected[where] = rows
    assert torch.equal(rows_of(history), expected)


def test_rows_that_are_not_contiguous_are_written(tmp_path: Path) -> None:
    history, rows = opened(tmp_path), torch.randn(4, 8).t()
    history.write(rows, torch.arange(8), [(0, 0, 8)])
    assert torch.equal(rows_of(history), rows)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("pwrite", errno.ENOSPC, "No space left on device.*Free some space there, or choose another folder"),
        ("pwrite", errno.EIO, "Input/output error.*Check the disk and the folder"),
        ("posix_fadvise", errno.EIO, "Input/output error.*Check the disk and the folder"),
    ],
)
def test_what_fails_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, words: str
) -> None:
    history = opened(tmp_path)
    work: Callable[[], Any] = partial(rows_of, history)
    if function == "pwrite":
        work = partial(history.push, torch.ones(1, 4), torch.tensor([0]), [(0, 0, 1)])
    monkeypatch.setattr(os, function, failing(code))
    with pytest.raises(InputError, match=rf"{tmp_path}/convs.0.rows \({words}"):
        work()


# The folder ##########################################################################################################


@pytest.mark.parametrize("inside", [".", "a/b"])
def test_what_an_earlier_run_left_is_removed_and_nothing_else(tmp_path: Path, inside: str) -> None:
    (tmp_path / "convs.0.rows").write_text("left")
    (tmp_path / "convs.0.7.rows").write_text("left")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "rows").write_text("mine")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    folder = Folder(tmp_path / inside)
    own = folder.file("convs.0")
    assert own.name == ("convs.0.2.rows" if inside == "." else "convs.0.rows")  # nothing is written over
    own.write_text("of a run that was killed")
    folder.close()
    Folder(tmp_path / inside)
    assert not own.exists()
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_a_fork_does_not_hold_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        signal.pause()  # like a worker that outlives a run
    try:
        folder.close()
        Folder(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=rf"folder of histories must be writable, but got {path} \("):
            Folder(path)
    monkeypatch.setattr(os, "open", failing(errno.EROFS))
    with pytest.raises(InputError, match="Read-only file system"):
        Folder(tmp_path / "fine")


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    path = first.file("convs.0")
    path.write_text("in use")
    with pytest.raises(InputError, match=rf"one run at a time, but got {tmp_path}, which another run is using"):
        Folder(tmp_path)
    assert path.read_text() == "in use"
    del first
    second = Folder(tmp_path)
    assert not path.exists()
    second.close()
    second.close()
    third = Folder(tmp_path)
    del second
    with pytest.raises(InputError, match="another run is using"):
        Folder(tmp_path)
    del third


def test_a_folder_of_another_process_is_refused_until_that_is_killed(tmp_path: Path) -> None:
    script = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-S", "-c", f"{script}; input()", str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            with pytest.raises(InputError, match="another run is using"):
                Folder(tmp_path)
        finally:
            process.kill()
    Folder(tmp_path)


def test_every_history_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    names = [
        "convs.0", "convs.0", "convs.0.2", "convs.0", "convs.0.3", "convs.0.2", "convs/0", "convs>0", "convs_0",
        "../up", "a/../../b", "", "", "größe", "gr__e", " ", "x" * 300, "x" * 300, "x" * 299 + "y", "lock", "e\n\0",
        "A", "a",
    ]  # fmt: skip
    paths = [folder.file(name) for name in names]
    assert len(set(paths)) == len(names)
    for path in paths:
        assert path.parent == tmp_path
        assert re.fullmatch(r"[\w.-]*\.rows", path.name, re.ASCII)
    histories = [DiskHistory(2, 1, torch.float32, path=path) for path in paths]
    for number, history in enumerate(histories):
        history.push(torch.full((2, 1), float(number)), torch.arange(2))
    assert [int(rows_of(history)[0]) for history in histories] == list(range(len(names)))
    del histories, history
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}


@pytest.mark.parametrize(("free", "fits"), [(1000, True), (999, False), (0, False)])
def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    folder = Folder(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free if path == tmp_path else 0))
    if fits:
        folder.check_space(1000)
        return
    with pytest.raises(InputError, match=r"histories of 1e-06 GB must fit on the disk of .*free space.*smaller type"):
        folder.check_space(1000)
