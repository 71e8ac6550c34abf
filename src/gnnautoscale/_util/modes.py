"""Runs functions outside of PyTorch's modes; where that makes no difference, it takes no time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def for_later(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function make ordinary tensors even in inference mode, because training may use them later."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return call


def untracked(function: Callable[P, R]) -> Callable[P, R]:
    """Hide a function from autograd."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
