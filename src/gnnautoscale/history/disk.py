"""Histories in memory-mapped files on a local disk, and their folder; Linux only."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnautoscale._util import FolderLock
from gnnautoscale.errors import InputError
from gnnautoscale.history.base import History
from gnnautoscale.kernels import Runs

_SUFFIX = ".rows"
# Bytes that are read from the disk at once; larger ones, with gaps between rows, if that gives too many pieces.
_PIECES = (1 << 16, 1 << 20, 1 << 24)
_MOST_PIECES = 1024
# Rows that are looked at to tell whether rows are in memory.
_PROBES = 16
# File systems take names of up to 255 bytes, the suffix included.
_LONGEST_NAME = 200


class DiskHistory(History):
    """Rows in a file, of which the system keeps in memory as much as fits.

    Space is reserved when the file is created, so that a full disk is noticed then and not in the middle of training.
    The file at ``path`` is replaced, and removed with the history.
    """

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, *, path: Path) -> None:
        check_system()
        super().__init__(num_nodes, width, dtype)
        self._path = path
        self._row_bytes = self.codec.raw_width * self.codec.raw_dtype.itemsize
        with self._failures_named():
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, _remove, path, self._file, os.getpid())
        with self._failures_named():
            os.posix_fallocate(self._file, 0, max(self.num_bytes, 1))
            self._mapped = mapped = mmap.mmap(self._file, max(self.num_bytes, 1))
        mapped.madvise(mmap.MADV_RANDOM)  # rows are announced here, more precisely
        size = num_nodes * self.codec.raw_width
        values = torch.frombuffer(mapped, dtype=self.codec.raw_dtype, count=size) if size else torch.empty(0)
        self._raw = values.to(self.codec.raw_dtype).view(num_nodes, self.codec.raw_width)
        # The same bytes for NumPy, which lacks some types and starts no threads of its own.
        self._bytes: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = self._raw.view(torch.uint8).numpy()

    @property
    def raw(self) -> Tensor:  # type: ignore[override]
        """See :attr:`History.raw`."""
        self._check_length()
        return self._raw

    def _check_length(self) -> None:
        """Refuse a file that somebody cut off: reading its mapped end would kill the process, writing leave a hole."""
        length = os.fstat(self._file).st_size
        if length < self.num_bytes:
            rule, got = "histories on disk must stay as they are", f"{self._path}, cut off after {length} bytes"
            raise InputError(rule, got=got, fix="Resume from a checkpoint, and let nobody else change that folder.")

    def read(self, index: Tensor, out: Tensor, *, skip: Tensor | None = None) -> None:
        """See :meth:`History.read`."""
        index = index.cpu()
        if skip is not None:
            wanted = (skip.cpu() < 0).nonzero().squeeze(1)
            rows = torch.empty(wanted.numel(), out.size(1), dtype=out.dtype)
            self.read(index[wanted], rows)
            out.index_copy_(0, wanted.to(out.device), rows.to(out.device))
        elif out.is_cuda:
            rows = torch.empty(out.shape, dtype=out.dtype)
            self.read(index, rows)
            out.copy_(rows)
        else:
            self.announce(index)
            self.gather(index, out)

    def announce(self, index: Tensor) -> None:
        """Let the disk bring rows, ``[count]``, into memory before they are read, in few, long pieces.

        If a few of them are in memory, all are assumed to be: asking for each costs as much as reading it.
        """
        first = index.numpy() * self._row_bytes
        if self._in_memory(first[:: max(1, first.size // _PROBES)]):
            return
        for size in _PIECES:
            piece = size * -(-self._row_bytes // size)  # no row lies in more than two
            touched = np.unique(np.concatenate([first // piece, (first + self._row_bytes - 1) // piece]))
            ends = np.flatnonzero(np.diff(touched) > 1)
            if ends.size < _MOST_PIECES:
                break
        starts = touched[np.concatenate([[0], ends + 1])]
        lengths = touched[np.concatenate([ends, [touched.size - 1]])] - starts + 1
        with self._failures_named():
            for start, length in zip((starts * piece).tolist(), (lengths * piece).tolist(), strict=True):
                os.posix_fadvise(self._file, start, length, os.POSIX_FADV_WILLNEED)

    def _in_memory(self, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
        """Whether bytes of the file can be read without waiting for the disk."""
        byte = bytearray(1)
        try:
            for start in starts.tolist():
                os.preadv(self._file, [byte], start, os.RWF_NOWAIT)
        except OSError:  # they cannot, or the file system cannot tell
            return False
        return True

    def gather(self, index: Tensor, out: Tensor) -> None:
        """Read rows, ``[count]``, into ``[count, raw_width]`` in this thread alone, while others may run."""
        self._check_length()
        if index.numel():  # "clip" lets NumPy write to `out` without a buffer; no index is out of range
            np.take(self._bytes, index.numpy(), axis=0, out=out.view(torch.uint8).numpy(), mode="clip")

    def write(self, raw: Tensor, where: Tensor, runs: Runs | None = None) -> None:
        """See :meth:`History.write`."""
        raw = raw.cpu()
        if not self._in_runs(raw, runs):
            self.raw.index_copy_(0, where.cpu(), raw)

    def _write_run(self, start: int, raw: Tensor) -> None:
        self._check_length()
        view = raw.contiguous().view(torch.uint8).numpy().reshape(-1).data
        place = start * self._row_bytes
        with self._failures_named():
            while view:
                written = os.pwrite(self._file, view, place)
                view, place = view[written:], place + written

    def evict(self) -> None:
        """Let the system drop the file from memory, so that the next read comes from the disk."""
        self._mapped.madvise(mmap.MADV_DONTNEED)
        with self._failures_named():
            os.fsync(self._file)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            rule, got = "histories on disk must be readable and writable", f"{self._path} ({error.strerror or error})"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fix = "Free some space there, or choose another folder." if full else "Check the disk and the folder."
            raise InputError(rule, got=got, fix=fix) from None


def check_system() -> None:
    """Refuse histories on disk where the system lacks the calls that they need."""
    if sys.platform != "linux":
        fix = "Use storage='device' or 'host', and leave history_dir out."
        raise InputError("histories on disk need Linux", got=sys.platform, fix=fix)


def _remove(path: Path, file: int, owner: int) -> None:
    """Close a file and remove it, unless another one has taken its place or this is a fork of its process."""
    with contextlib.suppress(OSError):
        if os.getpid() == owner and os.path.samestat(os.fstat(file), os.stat(path)):
            path.unlink()
    os.close(file)


class Folder:
    """A folder of histories, which belongs to one run at a time.

    It is created if it is missing. Histories that an earlier run left there are removed: those that its lock names, and
    nothing else.
    """

    def __init__(self, path: Path) -> None:
        check_system()
        self.path = path
        rule, fix = "the folder of histories must be writable", "Choose another one."
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path / "lock")
        except OSError as error:
            raise InputError(rule, got=f"{path} ({error.strerror})", fix=fix) from None
        if not self._lock.taken:
            gc.collect()  # an unused model of this process may still hold it
        if not self._lock.try_again():
            self._lock.release()
            rule, got = "a folder of histories belongs to one run at a time", f"{path}, which another run is using"
            raise InputError(rule, got=got, fix="Wait for it to end, or choose another folder.")
        try:
            self._remove_left()
        except OSError as error:
            raise InputError(rule, got=f"{path} ({error.strerror})", fix=fix) from None
        self._used: dict[str, int] = {}

    def _remove_left(self) -> None:
        """Remove the histories of an earlier run, whose names are in the file of the lock, one in a line."""
        named = os.pread(self._lock.file, os.fstat(self._lock.file).st_size, 0).decode(errors="replace")
        for name in named.splitlines():
            if name.endswith(_SUFFIX) and Path(name).name == name:
                (self.path / name).unlink(missing_ok=True)
        os.ftruncate(self._lock.file, 0)

    def close(self) -> None:
        """Let another run have the folder; no new file may be created in it."""
        self._lock.release()

    def file(self, name: str) -> Path:
        """The path of a new history, where no file is."""
        made = plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST_NAME]
        # A numbered name may be taken, too, and a file may be there that no run has written.
        while made in self._used or (self.path / f"{made}{_SUFFIX}").exists():
            self._used[plain] = self._used.get(plain, 1) + 1
            made = f"{plain}.{self._used[plain]}"
        self._used.setdefault(made, 1)
        path = self.path / f"{made}{_SUFFIX}"
        try:
            os.lseek(self._lock.file, 0, os.SEEK_END)
            os.write(self._lock.file, f"{path.name}\n".encode())
        except OSError as error:
            rule, got = "the folder of histories must be writable", f"{self.path} ({error.strerror})"
            raise InputError(rule, got=got, fix="Check the disk and the folder.") from None
        return path

    def check_space(self, num_bytes: int) -> None:
        """Refuse histories that the disk has no room for."""
        try:
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            rule, got = "the folder of histories must be there", f"{self.path} ({error.strerror})"
            raise InputError(rule, got=got, fix="Check the disk and the folder.") from None
        if num_bytes > free:
            rule = f"histories of {num_bytes / 1e9:.3g} GB must fit on the disk of {self.path}"
            fix = "Free some space, choose another folder, or keep histories in a smaller type."
            raise InputError(rule, got=f"{free / 1e9:.3g} GB of free space", fix=fix)
