"""Copies models."""

from __future__ import annotations

import copy
import random
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnautoscale._util import tensors_in


def copy_model(model: nn.Module, *, share_above: int | None = None) -> nn.Module:
    """A deep copy of a model; what cannot be copied, such as a lock, is shared.

    Functions that the model holds use copies of the modules and containers that they used, not these themselves.

    Args:
        model: The model.
        share_above: Weights with more entries than this are not copied: the copy has parameters of its own, with the
            same memory.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> copied = copy_model(model)
        >>> copied.weight is model.weight, bool((copied.weight == model.weight).all())
        (False, True)
    """
    state = random.getstate()
    # PyG's Sequential names its generated code by a random number, and takes code of that name if there is any. Were
    # the number drawn again, the user's next Sequential would run the copy's code.
    random.seed()
    try:
        return _copied(model, share_above)
    finally:
        random.setstate(state)


def _copied(model: nn.Module, share_above: int | None) -> nn.Module:
    attributes = [value for module in model.modules() for value in vars(module).values()]
    # Tensors that a model keeps from its last call cannot be copied while autograd tracks them.
    memo: dict[int, Any] = {
        id(value): value.detach().clone() for value in tensors_in(attributes) if value.grad_fn is not None
    }
    for weight in model.parameters():
        if share_above is not None and not is_lazy(weight) and weight.numel() > share_above:
            memo[id(weight)] = nn.Parameter(weight.detach(), weight.requires_grad)
    known = memo.copy()
    try:
        copied = copy.deepcopy(model, memo)
    except Exception:  # raised by whatever object cannot be copied, such as a lock or an open file
        for value in attributes:
            if not isinstance(value, (dict, Tensor, nn.Module)):
                try:
                    copy.deepcopy(value, known.copy())
                except Exception:
                    known[id(value)] = value
        copied, memo = copy.deepcopy(model, known), known
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a GPU wants these weights side by side, and warns if they are not
        # A user's hooks run in the copy too.
        holders: tuple[dict[Any, Any], ...] = vars(module), module._forward_hooks, module._forward_pre_hooks
        for held in holders:
            for name, value in held.items():
                if isinstance(value, FunctionType) and value.__closure__:
                    held[name] = _rebound(value, memo)
    return copied


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    def rebind(cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        owner = content.__self__ if isinstance(content, MethodType) else content
        known = id(owner) in memo or isinstance(content, (dict, list, set, Tensor))
        return CellType(copy.deepcopy(content, memo)) if known else cell

    cells = tuple(rebind(cell) for cell in function.__closure__ or ())
    rebound = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound
