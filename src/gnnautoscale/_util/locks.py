"""Keeps a folder for one process at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from pathlib import Path

# Descriptors of the locks that this process holds; a fork lets go of them at once.
_HELD: set[int] = set()


class FolderLock:
    """A lock on a folder, held until it is released, or its process ends in whatever way.

    Processes that this one forks do not inherit it, so that workers which outlive it keep nobody out. Where the system
    has no such locks, nobody is kept out.

    Attributes:
        file: Descriptor of the lock's file.
        taken: Whether the lock was free; if not, nothing is held.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            _HELD.add(self.file)
            self.release = weakref.finalize(self, _close, self.file)
            self.taken = self.try_again()
            if not self.taken or self._is_there():
                return
            self.release()  # its last owner has just removed the file

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Release the lock, and remove its file if it was held."""
        with contextlib.suppress(OSError):
            if self.taken and self.release.alive:
                self.path.unlink()
        self.release()

    def try_again(self) -> bool:
        """Try to take the lock; says whether it is held now."""
        try:
            import fcntl  # Windows has no such module
        except ImportError:
            return True
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.taken = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # else the file system has none
        else:
            self.taken = True
        return self.taken


def _close(file: int) -> None:
    """Unlock first: a process that was forked a moment ago may still have to let go of its copy."""
    if file in _HELD:
        _HELD.discard(file)
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _let_go() -> None:
    for file in _HELD:  # without unlocking, which would be for the parent, too
        with contextlib.suppress(OSError):
            os.close(file)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
