"""What autograd computed a value from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def leaves_of(values: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that some values were computed from and that have gradients, found by walking autograd's graph.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> leaves_of([(2 * weight).sum()])[0] is weight
        True
    """
    found: list[Tensor] = []
    seen: set[Any] = set()
    stack: list[Any] = [value.grad_fn for value in values]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found
