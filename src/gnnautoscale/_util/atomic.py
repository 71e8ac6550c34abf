"""Writes files whole or not at all, and leaves no empty folders behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from gnnautoscale._util.options import check_path
from gnnautoscale.errors import InputError


def check_writable(path: Path, *, rule: str, read: Iterable[Path] = ()) -> None:
    """Refuse a file that could not be written, before any work is done for it; nothing is left behind.

    ``rule`` is the rule of the error, and ``read`` are files that are read for what is written, so that it cannot
    replace them.
    """
    problem = ""
    try:
        check_path("a file to write", path)
        if path.is_dir():
            problem = "which is a folder"
        elif path.exists() and not path.is_file():
            problem = "which is no ordinary file"
        elif path.exists() and any(each.exists() and path.samefile(each) for each in read):
            problem = "which is read for it"
        else:
            temporary = path.with_name(f".{uuid4().hex}.part")
            temporary.open("wb").close()
            temporary.unlink()
    except OSError as error:
        problem = f"which cannot be written: {error.strerror or error}"
    if problem:
        raise InputError(rule, got=f"{path}, {problem}", fix="Check the path.")


def write_atomically(path: Path, write: Callable[[BinaryIO], object], *, rule: str) -> None:
    """Write a file beside its place and move it there once it is complete, so that no reader ever sees half of it.

    It is on the disk before it is moved, so even a crash of the machine leaves the old file or the new one. ``write``
    gets the open file; ``rule`` is the rule of the error if that fails.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch.save fails with an error of its own after the system's.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise InputError(rule, got=f"{path} ({cause})", fix="Check the path and the free space.") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    # Bring the move itself to the disk where the system can; the file is complete and in its place anyway.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def no_empty_folders(*paths: str | Path | None) -> Iterator[None]:
    """If what runs in this context fails, remove those of these folders and their parents that it left empty.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp()) / "a" / "b"
        >>> with contextlib.suppress(ValueError), no_empty_folders(folder):
        ...     folder.mkdir(parents=True)
        ...     raise ValueError
        >>> folder.parent.exists()
        False
    """
    wanted = [Path(path) for path in paths if path is not None]
    missing = {folder for path in wanted for folder in (path, *path.parents) if not os.path.lexists(folder)}
    try:
        yield
    except BaseException:
        for folder in sorted(missing, key=lambda each: len(each.parts), reverse=True):
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()
        raise
