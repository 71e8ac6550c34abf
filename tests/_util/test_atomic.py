from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from gnnautoscale._util.atomic import write_atomically
from gnnautoscale.errors import InputError


def test_a_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    write_atomically(file, lambda stream: stream.write(b"new"), rule="it must be writable")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def hidden() -> RuntimeError:
    """How torch.save reports an error of the system."""
    error = RuntimeError("unexpected position")
    error.__context__ = OSError("disk full")
    return error


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (OSError("disk full"), InputError, "disk full"),
        (hidden(), InputError, "disk full"),
        (RuntimeError("bug"), RuntimeError, "bug"),
        (KeyError("bug"), KeyError, "bug"),
    ],
    ids=repr,
)
def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, error: Exception, seen: type[Exception], message: str
) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def fail(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise error

    with pytest.raises(seen, match=message):
        write_atomically(file, fail, rule="it must be writable")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it must be writable, but got .*missing"):
        write_atomically(tmp_path / "missing" / "file", lambda stream: stream.write(b""), rule="it must be writable")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("folder" if name == tmp_path else name.read_text())
        sync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        done.append("move")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(tmp_path / "file", lambda stream: stream.write(b"all of it"), rule="it must be writable")
    assert done == ["all of it", "move", "folder"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_that_cannot_be_synced_is_an_error_and_a_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir() == (kind == "folder"):
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    if kind == "file":
        with pytest.raises(InputError, match="Input/output error"):
            write_atomically(tmp_path / "file", lambda stream: stream.write(b"new"), rule="it must be writable")
        assert not list(tmp_path.iterdir())
    else:
        write_atomically(tmp_path / "file", lambda stream: stream.write(b"new"), rule="it must be writable")
        assert (tmp_path / "file").read_text() == "new"
