"""The versions that results depend on."""

from __future__ import annotations

import platform
from importlib import metadata

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    others = {name: metadata.version(name) for name in ("torch", "torch-geometric")}
    return {"python": platform.python_version(), **others, "gnnautoscale": __version__}
