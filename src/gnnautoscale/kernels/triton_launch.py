"""Compiles and launches the Triton kernels of this package.

Triton recompiles a kernel for every combination of types, and by default also when a number becomes a multiple of 16 or
the alignment of a pointer changes. Counts and pointers to indices are exempt here, so new batches never recompile. If
the width is a multiple of 16, a thread can move 16 bytes at once. Kernels for other widths also ignore the alignment of
rows, which then changes from slice to slice. So the first call compiles for all later calls of the same width and
types: make it before a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

VECTOR = 16  # Triton assumes alignment for multiples of this

Kernels: TypeAlias = dict[bool, Any]


def compile_variants(
    function: Callable[..., None], *, counts: list[str], indices: list[str], rows: list[str]
) -> Kernels:
    """A kernel for widths that are a multiple of ``VECTOR``, and one for all others.

    ``counts`` names the numbers that change from call to call, ``indices`` the pointers to indices and other values,
    one per row or edge, and ``rows`` the pointers to rows. One argument of the kernel is called ``width``.
    """
    aligned = triton.jit(do_not_specialize=counts, do_not_specialize_on_alignment=indices)
    unaligned = triton.jit(do_not_specialize=[*counts, "width"], do_not_specialize_on_alignment=indices + rows)
    return {True: aligned(function), False: unaligned(function)}


def launch(kernels: Kernels, num_programs: int, result: Tensor, *arguments: Any, warps: int) -> None:
    """Run a kernel on the device and current stream of its result, ``[num_rows, width]``, unless that is empty."""
    if result.numel() == 0:
        return
    kernel = kernels[result.size(1) % VECTOR == 0]
    # Entering a device costs as much as a launch, so skip it if possible. The interpreter's tensors are on no device.
    elsewhere = result.is_cuda and result.get_device() != torch.cuda.current_device()
    with torch.cuda.device_of(result) if elsewhere else nullcontext():  # type: ignore[no-untyped-call]
        kernel[(num_programs,)](*arguments, num_warps=warps)


# Triton has functions for the following two, but they take longer than the rest of a launch.


def ceil_div(count: int, size: int) -> int:
    """``count / size``, rounded up."""
    return -(-count // size)


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count`` and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
