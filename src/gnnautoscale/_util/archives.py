"""Tells whether a file that ``torch.save`` wrote is as it was written."""

from __future__ import annotations

import zipfile
from pathlib import Path

_PIECE = 1 << 20


def damage_in(path: Path) -> str | None:
    """What is wrong with a file of ``torch.save``, in words, by the CRC-32 of its records; ``None`` if nothing is.

    A file in which no record fits its checksum was written without any, and one in PyTorch's old format has none:
    nothing can be said about them.
    """
    try:
        if not zipfile.is_zipfile(path):
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
    try:
        with archive.open(name) as record:
            while record.read(_PIECE):
                pass
    except zipfile.BadZipFile:
        return False
    return True
