"""How all Triton kernels of this package are compiled and launched.

Triton compiles a kernel anew for each combination of types, and by default also when a number becomes a multiple of
16 or a pointer is aligned otherwise. Counts and the pointers to indices are exempt, so that no batch compiles anew.
Widths of a multiple of 16 let a thread move 16 bytes at once; others cannot, and their kernels also ignore how rows
are aligned, which then changes from slice to slice. So the first call compiles a kernel for all later ones with the
same width and types: call it once before it runs in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

VECTOR = 16  # Triton proves alignment for multiples of this

Kernels: TypeAlias = dict[bool, Any]


def compiled(function: Callable[..., None], *, counts: list[str], indices: list[str], rows: list[str]) -> Kernels:
    """A kernel for widths that are a multiple of ``VECTOR``, and one for all others.

    Args:
        function: The kernel. One argument is called ``width``.
        counts: Names of the arguments that are numbers and change from call to call.
        indices: Names of the pointers to indices and other values of which there is one per row or edge.
        rows: Names of the pointers to rows.
    """
    aligned = triton.jit(do_not_specialize=counts, do_not_specialize_on_alignment=indices)
    anyhow = triton.jit(do_not_specialize=[*counts, "width"], do_not_specialize_on_alignment=indices + rows)
    return {True: aligned(function), False: anyhow(function)}


def launch(kernels: Kernels, num_programs: int, result: Tensor, *arguments: Any, warps: int) -> None:
    """Run a kernel on the device and current stream of its result.

    Args:
        kernels: The two variants of the kernel.
        num_programs: Number of programs.
        result: A tensor on the GPU, ``[num_rows, width]``. Without any value in it there is nothing to do.
        arguments: What the kernel takes.
        warps: Number of warps of a program.
    """
    if result.numel() == 0:
        return
    kernel = kernels[result.size(1) % VECTOR == 0]
    # Entering a device takes as long as launching a kernel; the interpreter's tensors are on none.
    elsewhere = result.is_cuda and result.get_device() != torch.cuda.current_device()
    with torch.cuda.device_of(result) if elsewhere else nullcontext():  # type: ignore[no-untyped-call]
        kernel[(num_programs,)](*arguments, num_warps=warps)


# Triton's own functions for these also serve its compiler, and take longer than the rest of a launch.


def divided(count: int, size: int) -> int:
    """How many pieces of a size hold a count."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least the count, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
