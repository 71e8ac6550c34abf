"""Tells whether archives of ``torch.save`` and ``numpy.savez`` are as they were written."""

from __future__ import annotations

import contextlib
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gnnautoscale._util.ordinary import ordinary

_PIECE = 1 << 20
# The record that ends an archive: its signature, the length without and with the longest comment, and where it has the
# number of records; larger numbers stand elsewhere.
_END, _SHORTEST, _LONGEST, _COUNT, _MANY = b"PK\5\6", 22, 22 + 0xFFFF, 10, 0xFFFF

_FOLDER = 0x10  # attribute of a record


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """Open an archive of NumPy, without pickles; one whose list of arrays is damaged is a ``ValueError``.

    The arrays have checksums, which NumPy looks at when it reads them. But an array that is not on the list, or under
    another name there, would not be missed.
    """
    with ordinary(path).open("rb") as file, contextlib.ExitStack() as opened:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no archive of numpy.savez, or only a part of one")
        file.seek(0)
        archive: Any = np.load(file, allow_pickle=False)
        opened.enter_context(archive)
        listed: Any = archive.zip
        records = listed.infolist()
        file.seek(max(file.seek(0, 2) - _LONGEST, 0))
        end = file.read()
        end = end[end.rfind(_END) :]
        (count,) = struct.unpack_from("<H", end, _COUNT) if len(end) >= _SHORTEST else (None,)
        if count not in (len(records), _MANY):
            raise ValueError(f"it has {count} arrays and a list of {len(records)}")
        for each in records:
            listed.open(each).close()  # compares its name with that on the list
        yield archive


def damage_in(path: Path) -> str | None:
    """What is wrong with a file of ``torch.save``, in words, by the CRC-32 of its records; ``None`` if nothing is.

    A file in which no record fits its checksum was written without any, and one in PyTorch's old format has none:
    nothing can be said about them.
    """
    try:
        if not zipfile.is_zipfile(ordinary(path)):
            return None
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            damaged = [name for name in names if not _is_whole(archive, name)]
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    except Exception as error:  # zipfile raises many types for damaged archives
        return f"it is cut off or damaged: {error!r:.200}"
    if not damaged or (len(damaged) == len(names) and len(names) > 1):
        return None
    return f"its record {damaged[0]} is damaged"


def _is_whole(archive: zipfile.ZipFile, name: str) -> bool:
    about = archive.getinfo(name)
    # Of an empty record zipfile does not check anything, and a folder's record PyTorch takes for empty.
    is_empty = about.file_size == 0 or bool(about.external_attr & _FOLDER)
    is_longer = about.compress_type == zipfile.ZIP_STORED and about.file_size != about.compress_size
    if (is_empty and about.CRC) or is_longer:
        return False
    try:
        with archive.open(name) as record:
            while record.read(_PIECE):
                pass
    except zipfile.BadZipFile:
        return False
    return True
