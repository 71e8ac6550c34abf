"""Compiles and launches the Triton kernels of this package.

Triton recompiles a kernel for every combination of types, and by default also when a number becomes a multiple of 16 or
the alignment of a pointer changes. Counts and pointers to indices are exempt here, so new batches never recompile. If
the width is a multiple of 16, a thread can move 16 bytes at once. Kernels for other widths also ignore the alignment of
rows, which then changes from slice to slice. So the first call compiles for all later calls of the same width and
types: make it before a CUDA graph is captured.

A launch by Triton itself binds and inspects every argument, which takes longer than many of these kernels. So what it
has compiled is kept here, by all that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

VECTOR = 16  # Triton assumes alignment for multiples of this


class Kernels:
    """A kernel for widths that are a multiple of ``VECTOR``, and one for all others."""

    def __init__(self, aligned: Any, unaligned: Any) -> None:
        self._variants = {True: _Variant(aligned), False: _Variant(unaligned)}

    def __getitem__(self, aligned: bool) -> Any:
        return self._variants[aligned].kernel

    def run(self, num_programs: int, result: Tensor, arguments: tuple[Any, ...], warps: int) -> None:
        """Run one of them on the current stream of the result's device."""
        self._variants[result.size(1) % VECTOR == 0].run(num_programs, result.get_device(), arguments, warps)


class _Variant:
    """A kernel, and what was compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        params = kernel.params if isinstance(kernel, triton.runtime.JITFunction) else []
        self._looks = [_look_at(param) for param in params]  # none in the interpreter

    def run(self, num_programs: int, device: int, arguments: tuple[Any, ...], warps: int) -> None:
        key = device, warps, *[look(argument) for look, argument in zip(self._looks, arguments, strict=False)]
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[num_programs, 1, 1](*arguments)
        else:
            compiled = self.kernel[(num_programs,)](*arguments, num_warps=warps)
            if self._looks:
                self._compiled[key] = compiled


def _look_at(param: Any) -> Callable[[Any], Any]:
    """What a compiled kernel depends on in the values of a parameter."""
    if param.is_constexpr:
        return _value
    return _kind if param.do_not_specialize or param.do_not_specialize_on_alignment else _kind_and_alignment


def _value(argument: Any) -> Any:
    return argument


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument >> 31 if type(argument) is int else type(argument)  # larger numbers have another type


def _kind_and_alignment(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % VECTOR == 0
    return argument if type(argument) is int else type(argument)


def compile_variants(
    function: Callable[..., None], *, counts: list[str], indices: list[str], rows: list[str]
) -> Kernels:
    """A kernel for widths that are a multiple of ``VECTOR``, and one for all others.

    ``counts`` names the numbers that change from call to call, ``indices`` the pointers to indices and other values,
    one per row or edge, and ``rows`` the pointers to rows. One argument of the kernel is called ``width``.
    """
    aligned = triton.jit(do_not_specialize=counts, do_not_specialize_on_alignment=indices)
    unaligned = triton.jit(do_not_specialize=[*counts, "width"], do_not_specialize_on_alignment=indices + rows)
    return Kernels(aligned(function), unaligned(function))


def launch(kernels: Kernels, num_programs: int, result: Tensor, *arguments: Any, warps: int) -> None:
    """Run a kernel on the device and current stream of its result, ``[num_rows, width]``, unless that is empty."""
    if result.numel() == 0:
        return
    # Entering a device costs as much as a launch, so skip it if possible. The interpreter's tensors are on no device.
    elsewhere = result.is_cuda and result.get_device() != torch.cuda.current_device()
    with torch.cuda.device_of(result) if elsewhere else nullcontext():  # type: ignore[no-untyped-call]
        kernels.run(num_programs, result, arguments, warps)


# Triton has functions for the following two, but they take longer than the rest of a launch.


def ceil_div(count: int, size: int) -> int:
    """``count / size``, rounded up."""
    return -(-count // size)


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count`` and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
