"""How all Triton kernels of this package are compiled and launched.

Triton compiles a kernel anew for each combination of types, and by default also when a number becomes a multiple of
16 or a pointer is aligned otherwise. Counts and the pointers to indices are exempt, so that no batch compiles anew.
Widths of a multiple of 16 let a thread move 16 bytes at once; others cannot, and their kernels also ignore how rows
are aligned, which then changes from slice to slice. So the first call compiles a kernel for all later ones with the
same width and types: call it once before it runs in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
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
    if not result.is_cuda:  # the interpreter
        kernel[(num_programs,)](*arguments, num_warps=warps)
    elif result.get_device() == torch.cuda.current_device():
        _launch_here(kernel, num_programs, result.get_device(), arguments, warps)
    else:  # entering a device takes as long as launching a kernel
        with torch.cuda.device_of(result):  # type: ignore[no-untyped-call]
            _launch_here(kernel, num_programs, result.get_device(), arguments, warps)


# Kernels as they were compiled, by all that Triton compiles anew for. It takes longer to look for them by itself.
_ready: dict[tuple[Any, ...], Any] = {}
# For each kernel which of its arguments are numbers that it is not compiled anew for.
_changing: dict[int, tuple[bool, ...]] = {}
_LARGEST_INT32 = 2**31 - 1


def _launch_here(kernel: Any, num_programs: int, device: int, arguments: tuple[Any, ...], warps: int) -> None:
    if id(kernel) not in _changing:
        _changing[id(kernel)] = tuple(name in kernel.do_not_specialize for name in kernel.arg_names)
    key = (id(kernel), device, warps, *map(_kind, arguments, _changing[id(kernel)]))
    ready = _ready.get(key)
    if ready is None:
        _ready[key] = kernel[(num_programs,)](*arguments, num_warps=warps)
    else:
        ready[num_programs, 1, 1](*arguments)


def _kind(value: Any, changes: bool) -> Any:
    """What a kernel may be compiled anew for in one of its arguments."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % VECTOR == 0
    return value > _LARGEST_INT32 if changes else value


# Triton's own functions for these also serve its compiler, and take longer than the rest of a launch.


def divided(count: int, size: int) -> int:
    """How many pieces of a size hold a count."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least the count, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
