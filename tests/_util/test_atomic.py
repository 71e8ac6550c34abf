from __future__ import annotations

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


@pytest.mark.parametrize(("error", "seen"), [(OSError("disk full"), InputError), (KeyError("bug"), KeyError)])
def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, error: Exception, seen: type[Exception]) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def fail(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise error

    with pytest.raises(seen, match=str(error.args[0])):
        write_atomically(file, fail, rule="it must be writable")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it must be writable, but got .*missing"):
        write_atomically(tmp_path / "missing" / "file", lambda stream: stream.write(b""), rule="it must be writable")
