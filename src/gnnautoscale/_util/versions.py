"""The versions that results depend on."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torch-geometric", "gnnautoscale"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its sources
            found[name] = "unknown"
    return found
