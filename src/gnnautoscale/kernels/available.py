"""Whether the Triton kernels can run."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor


def use_triton(tensor: Tensor) -> bool:
    """Whether work on this tensor goes to Triton kernels: it is on a GPU, and Triton is installed.

    Args:
        tensor: Any tensor of the work that must be on the GPU.

    Example:
        >>> import torch
        >>> use_triton(torch.ones(3))
        False
    """
    return tensor.is_cuda and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
