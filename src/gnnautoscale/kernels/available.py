"""Whether the Triton kernels can run."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor


def use_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels write to this tensor: it is on a GPU, and Triton is installed."""
    return tensor.is_cuda and triton_is_installed()


@cache
def triton_is_installed() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
