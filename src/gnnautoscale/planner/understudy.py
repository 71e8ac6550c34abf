"""Copies of a model that are tried in its place, so that a trial leaves no trace in the model itself."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from gnnautoscale._util import tensors_in
from gnnautoscale.forward import Arguments, Attribute, Hooks, Session, Watch, copy_model, held_tensors
from gnnautoscale.planner.randomness import expected_randomness
from gnnautoscale.planner.trial_graph import disturb

#: Weights with more entries than this are not copied for a trial.
MOST_COPIED = 1 << 24


class Understudy:
    """A copy of a model that starts every run in the same state.

    It is as the model was, except that all weights are trainable, because they may be trained later; and that weights
    are of type ``dtype`` unless that is ``None``. If ``disturbed``, weights and buffers whose entries are all equal,
    such as gates that start at zero, get other values, because they would hide a deviation. Very large weights, such as
    an embedding of all nodes, stay as they are.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None = None, *, disturbed: bool = True, spared: Container[str] = ()
    ) -> None:
        self._original = copy_model(model, share_above=MOST_COPIED)
        self.dtype = dtype
        norms = [module for module in self._original.modules() if isinstance(module, _NormBase)]
        # Statistics of norms have their own meaning.
        statistics = {id(value) for module in norms for value in module.buffers(recurse=False)}
        named = (*self._original.named_parameters(), *self._original.named_buffers(), *held_tensors(self._original))
        for name, value in named:
            if is_lazy(value) or not value.is_floating_point():
                continue
            if isinstance(value, nn.Parameter):
                value.requires_grad_(True)
            if value.numel() <= MOST_COPIED:
                plain = not disturbed or name in spared or id(value) in statistics
                other = value.data if plain else disturb(value.data)
                value.data = other.to(dtype or other.dtype)

    @cached_property
    def _current(self) -> tuple[nn.Module, Hooks, Watch, list[int]]:
        model = copy_model(self._original, share_above=0)  # forward passes rarely write to weights
        hooks = Hooks(model, lambda *args, **kwargs: hooks.run(None, (args, kwargs)))
        return model, hooks, Watch(model), [buffer._version for buffer in model.buffers()]

    @property
    def model(self) -> nn.Module:
        """The copy in use."""
        return self._current[0]

    def touched(self) -> list[str]:
        """The attributes and buffers that runs have changed since the last reset."""
        model, _, watch, versions = self._current
        attributes = watch.changes() if watch.has_changed() else set()
        names = [
            name for (name, buffer), old in zip(model.named_buffers(), versions, strict=False) if buffer._version != old
        ]
        return sorted(f"{path}.{name}" if path else name for path, name in attributes) + names

    def reset(self) -> None:
        """Go back to the model's state."""
        if "_current" in vars(self) and self.touched():
            del self._current

    def changed_attributes(self) -> set[Attribute]:
        """The attributes that runs have changed since the last reset."""
        return self._current[2].changes()

    def kept_tensors(self) -> list[Tensor]:
        """The tensors that runs have left in the model since the last reset, apart from buffers."""
        modules = dict(self.model.named_modules())
        changed = [(modules[path], name) for path, name in sorted(self.changed_attributes()) if path in modules]
        return tensors_in([vars(module).get(name) for module, name in changed])

    def run(self, session: Session, arguments: Arguments, *, seed: int = 0, by_chance: bool = False) -> Any:
        """Run the forward pass; everything random gives its expected value unless ``by_chance``."""
        model, hooks = self._current[:2]
        seed_everything(seed, session.device)
        level = 0.5 if not seed else 0.95 if seed % 2 else 0.05
        # In evaluation mode nothing is random, and without this mode runs are faster.
        certain = not by_chance and any(module.training for module in model.modules())
        with _default_dtype(self.dtype), expected_randomness(level) if certain else nullcontext():
            return hooks.run(session, arguments)

    def run_plain(self, arguments: Arguments, device: torch.device) -> Any:
        """Run a copy without hooks, which random numbers are the same constants for."""
        model = copy_model(self._original, share_above=0)
        seed_everything(0, device)
        certain = any(module.training for module in model.modules())
        with _default_dtype(self.dtype), expected_randomness(0.5) if certain else nullcontext():
            return model(*arguments[0], **arguments[1])


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed everything random on the host and on a device; whoever calls this restores the states."""
    # Not torch.manual_seed, which takes a millisecond and seeds all devices.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Create new tensors in another type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
