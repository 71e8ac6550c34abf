"""Whether the Triton kernels can run."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor


def use_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels write to this tensor: it is on a GPU, and Triton is installed."""
    return tensor.is_cuda and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
