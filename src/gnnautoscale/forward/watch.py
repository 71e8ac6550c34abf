"""Notices when a model changes in a way that its plan may depend on.

A plan holds for a model as it was tried: its modules, their modes and their attributes. To compare all of these in
every call would be slow. So the watch remembers the objects themselves and compares identities, which takes
microseconds; only if one differs, values are compared.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# What overrides, or is added to, the attributes of an attached model.
OVERRIDES = frozenset(
    {"forward", "propagate", "edge_updater", "SUPPORTS_FUSED_EDGE_INDEX", "_autoscaler", "_history_hooks"}
)
# Attributes that say nothing about a forward pass, or are looked at separately. PyG's last three never change.
_SKIPPED = frozenset(vars(nn.Module())) | OVERRIDES | {"inspector", "_user_args", "_fused_user_args"}
# Those of them that hold what a forward pass runs.
_RUN = ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
_ATOMS = (type(None), bool, str, bytes, type, torch.dtype, torch.device, torch.layout)
_NUMBERS = (int, float, complex)
# Not looked into.
_OPAQUE = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.Generator)
# How deep to look into the containers and objects that a module holds.
_DEPTH = 4

#: An attribute: the path of its module, and its name.
Attribute = tuple[str, str]


class Form(NamedTuple):
    """What a plan depends on without the numbers, and the numbers: another number rarely needs another plan."""

    structure: Hashable
    numbers: tuple[Any, ...]


class Watch:
    """Watches a model; :attr:`form` describes it as of the last look, without the ``ignored`` attributes.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        >>> watch = Watch(model)
        >>> before = watch.form
        >>> model[1].p = 0.5
        >>> watch.has_changed(), watch.changes()
        (True, {('1', 'p')})
        >>> watch.look()
        >>> watch.form.structure == before.structure, watch.form == before
        (True, False)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.ignored: set[Attribute] = set()
        self.look()

    def look(self) -> None:
        """Remember the model as it is now."""
        #: The model's modules by path.
        self.modules = dict(self._model.named_modules())
        owners: list[tuple[Attribute, Any]] = []
        flags: list[Tensor] = []
        for path, module in self.modules.items():
            owners += [((path, name), getattr(module, name)) for name in _RUN]
            owners.append(((path, ""), vars(module)))
            for name, value in vars(module).items():
                if name not in _SKIPPED:
                    owners += [((path, name), container) for container in _containers(value)]
            flags += [value for value in (*module.buffers(recurse=False), *vars(module).values()) if _is_flag(value)]
        self._owners = owners
        self._dicts = [container for _, container in owners if isinstance(container, dict)]
        self._lists = [container for _, container in owners if not isinstance(container, dict)]
        self._before = [_named(container) for _, container in owners]
        self._values, self._flags = self._values_now(), flags
        self._versions = [*map(_version, flags)]
        self._form: Form | None = None

    def _values_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._lists)]

    def has_changed(self) -> bool:
        """Whether something was replaced, added or removed since the last look, even by an equal value."""
        now = self._values_now()
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            return True
        return [*map(_version, self._flags)] != self._versions

    def changes(self) -> set[Attribute]:
        """The attributes that changed since the last look."""
        changed: set[Attribute] = set()
        for (owner, container), before in zip(self._owners, self._before, strict=True):
            now = _named(container)
            names = [name for name in {**before, **now} if now.get(name, self) is not before.get(name, self)]
            changed |= {owner if owner[1] else (owner[0], str(name)) for name in names}
        return changed

    @property
    def form(self) -> Form:
        """The model's classes, modes and attributes as of the last look."""
        if self._form is None:
            self._form = _form(self.modules, self.ignored)
        return self._form


def form_of(module: nn.Module) -> Form:
    """The form of one module and those inside it."""
    return _form(dict(module.named_modules()), set())


def form_of_values(values: Any) -> Form:
    """The form of nested tuples, lists and dictionaries."""
    numbers: list[Any] = []
    return Form(_described(values, numbers, _DEPTH), tuple(numbers))


def _form(modules: dict[str, nn.Module], ignored: set[Attribute]) -> Form:
    numbers: list[Any] = []
    modes = [module.training for module in modules.values()]
    structure: list[Hashable] = [modes[0] if len(set(modes)) == 1 else tuple(modes)]
    for path, module in modules.items():
        attributes = [
            (name, _described(value, numbers, _DEPTH))
            for name, value in vars(module).items()
            if name not in _SKIPPED and (path, name) not in ignored
        ]
        weights = [(name, _shape(weight)) for name, weight in module._parameters.items()]
        buffers = [(name, _described(value, numbers, _DEPTH)) for name, value in module._buffers.items()]
        hooks = [*map(id, module._forward_hooks.values()), *map(id, module._forward_pre_hooks.values())]
        structure.append((path, type(module), *attributes, *weights, *buffers, *hooks))
    return Form(tuple(structure), tuple(numbers))


def _described(value: Any, numbers: list[Any], depth: int) -> Hashable:
    """A value without its numbers, which are appended to a list; objects without attributes count as themselves."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, _NUMBERS):
        numbers.append(value)
        return type(value).__name__
    if isinstance(value, Tensor):
        # Values on a GPU are not looked at, except for flags: a model that branches on them reads them as well.
        return (type(value), value.dtype, value.dim(), bool(value) if _is_flag(value) else None)
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        items: Any = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        names = tuple(map(str, value)) if isinstance(value, dict) else ()
        items = value.values() if isinstance(value, dict) else items
        inside = (_described(item, numbers, depth - 1) for item in items) if depth else ()
        return (type(value), len(value), names, *inside)
    if depth and not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
        return (type(value), id(value), _described(vars(value), numbers, depth - 1))
    return (type(value), id(value))


def _containers(value: Any, depth: int = _DEPTH) -> list[Any]:
    """The mutable containers in a value, down to some depth: dictionaries, lists and the attributes of objects."""
    if not depth or isinstance(value, (*_ATOMS, *_NUMBERS, *_OPAQUE)):
        return []
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        found = [] if isinstance(value, (tuple, frozenset)) else [value]
        items = value.values() if isinstance(value, dict) else value
        return found + [inner for item in items for inner in _containers(item, depth - 1)]
    return _containers(vars(value), depth - 1) if hasattr(value, "__dict__") else []


def _named(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _is_flag(value: Any) -> bool:
    """Whether a model may branch on a tensor."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.numel() == 1


def _shape(weight: Tensor | None) -> Hashable:
    return None if weight is None else "lazy" if is_lazy(weight) else tuple(weight.shape)


_version = attrgetter("_version")
