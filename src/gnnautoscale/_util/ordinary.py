"""Refuses to read what may never end."""

from __future__ import annotations

import errno
from pathlib import Path


def ordinary(path: Path) -> Path:
    """A path to read from; a pipe or a device there, which may never end, is an ``OSError``.

    Example:
        >>> ordinary(Path("/dev/zero"))
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] It is no ordinary file: '/dev/zero'
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "It is no ordinary file", str(path))
    return path
