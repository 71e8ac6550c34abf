"""Checksums of folders and of what is in JSON files, which tell that something was damaged or changed by hand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnautoscale._util.ordinary import ordinary

_PIECE = 1 << 22
_NAME = "checksum"


def checksums_of(folder: Path) -> dict[str, int]:
    """The CRC-32 of each file in a folder and below, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _checksum(path) for path in files}


def damaged_file(folder: Path, checksums: Mapping[str, int]) -> str | None:
    """The first file whose content does not have the checksum that it had, ``None`` if there is none.

    Every file is read once. One that is missing raises an ``OSError``.
    """
    return next((name for name, known in checksums.items() if _checksum(folder / name) != known), None)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be written as JSON, with a checksum of it.

    Example:
        >>> sealed = with_checksum({"ranks": 2})
        >>> is_unchanged(sealed), is_unchanged({**sealed, "ranks": 3})
        (True, False)
    """
    return {**content, _NAME: _of_values(content)}


def is_unchanged(content: Mapping[str, Any]) -> bool:
    """Whether what was read from JSON has the checksum that :func:`with_checksum` gave it."""
    return content.get(_NAME) == _of_values({name: value for name, value in content.items() if name != _NAME})


def _of_values(content: Mapping[str, Any]) -> int:
    read_again = json.loads(json.dumps(content))  # keys are words then
    return zlib.crc32(json.dumps(read_again, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    found = 0
    with ordinary(path).open("rb") as stream:
        while piece := stream.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found
