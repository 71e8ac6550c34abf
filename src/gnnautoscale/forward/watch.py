"""Notices when a model changes in a way that its plan may depend on.

A plan holds for a model as it was tried: its modules, their modes and their attributes. To compare all of these in
every call would be slow. So the watch remembers the objects themselves and compares identities, which takes
microseconds; only if one differs, it looks closer.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import partial
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
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
_RUN = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_ATOMS = (type(None), bool, str, bytes, type, torch.dtype, torch.device, torch.layout)
_NUMBERS = (int, float, complex)
# Not looked into.
_OPAQUE = (Tensor, nn.Module, type, ModuleType, MethodType, BuiltinFunctionType, torch.Generator)
# Where classes and functions come from that nobody changes.
_LIBRARIES = frozenset({"torch", "torch_geometric", "builtins", "abc", "typing", "numpy", "gnnautoscale"})
_DATA = (*_ATOMS, *_NUMBERS, list, dict, set)
# Larger containers are data rather than settings.
_MOST_ITEMS = 1000
# How deep to look into the containers and objects that a module holds.
_DEPTH = 4

#: An attribute: the path of its module, and its name.
Attribute = tuple[str, str]


class Form(NamedTuple):
    """What a plan depends on without the numbers, and the numbers: another number rarely needs another plan.

    ``mode`` says which modules are in training mode; ``None`` if this is not about modules.
    """

    structure: Hashable
    numbers: tuple[Any, ...]
    mode: bool | tuple[bool, ...] | None = None


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

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        # The copy of the model may not be complete yet, so the copy of the watch looks later.
        copied = memo[id(self)] = Watch(nn.Module())
        copied._values = []
        copied._model, copied.ignored = copy.deepcopy(self._model, memo), self.ignored.copy()
        return copied

    def look(self) -> None:
        """Remember the model as it is now."""
        #: The model's modules by path.
        self.modules = dict(self._model.named_modules())
        owners: list[tuple[Attribute, Any]] = []
        seen: set[int] = set()
        flags: list[Tensor] = []
        for cls in _own_classes(self.modules):
            inside = [container for value in vars(cls).values() for container in _containers(value, _DEPTH, seen)]
            owners += [((cls.__name__, ""), container) for container in (vars(cls), *inside)]
        for path, module in self.modules.items():
            owners += [((path, name), getattr(module, name)) for name in _RUN]
            owners.append(((path, ""), vars(module)))
            for name, value in vars(module).items():
                if name not in _SKIPPED:
                    owners += [((path, name), container) for container in _containers(value, _DEPTH, seen)]
            flags += [value for value in (*module.buffers(recurse=False), *vars(module).values()) if _is_flag(value)]
        self._owners = owners
        self._dicts = [container for _, container in owners if isinstance(container, dict)]
        self._views = [
            container for _, container in owners if isinstance(container, (_Reads, _Slots, MappingProxyType))
        ]
        self._lists = [container for _, container in owners if isinstance(container, (list, set))]
        self._before = [_named(container) for _, container in owners]
        self._values, self._flags = self._values_now(), flags
        self._versions = [*map(_version, flags)]
        self._form: Form | None = None

    def _values_now(self) -> list[Any]:
        values = [view.values() for view in self._views]
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable([*values, *self._lists])]

    def has_changed(self) -> bool:
        """Whether something was replaced, added or removed since the last look."""
        try:
            # Lists compare identities first, which takes a microsecond, and values only of what was replaced.
            return self._values_now() != self._values or [*map(_version, self._flags)] != self._versions
        except (RuntimeError, ValueError):  # from tensors and arrays, which have no single truth value
            return True

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


def held_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that the modules of a model hold as plain attributes, by name."""
    return [
        (f"{path}.{name}" if path else name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]


def form_of(module: nn.Module) -> Form:
    """The form of one module and those inside it, whatever their mode."""
    return _form(dict(module.named_modules()), set())._replace(mode=None)


def form_of_values(values: Any) -> Form:
    """The form of nested tuples, lists and dictionaries."""
    numbers: list[Any] = []
    return Form(_described(values, numbers, _DEPTH, set()), tuple(numbers))


class _Reads:
    """What a function reads besides its arguments: defaults, variables of the functions around it, and global ones."""

    def __init__(self, function: FunctionType) -> None:
        self._function, own = function, _is_own(function)
        names = function.__code__.co_freevars if own else ()
        self._cells = dict(zip(names, function.__closure__ or (), strict=False))
        self._names = [name for name in function.__code__.co_names if own and name in function.__globals__]

    def items(self) -> list[tuple[str, Any]]:
        """Names and values; of global variables only data and own functions, since libraries fill the rest."""
        cells = [(name, _content(cell)) for name, cell in self._cells.items()]
        read = [(name, self._function.__globals__.get(name)) for name in self._names]
        kept = [(name, value) for name, value in read if isinstance(value, _DATA) or _is_own_function(value)]
        return [*cells, *kept, ("defaults", self._function.__defaults__)]

    def values(self) -> list[Any]:
        """Values alone."""
        return [value for _, value in self.items()]


class _Slots:
    """The attributes of an object that has no dictionary of them."""

    def __init__(self, item: Any) -> None:
        self._item = item
        names = [vars(cls).get("__slots__", ()) for cls in type(item).__mro__]
        self._names = [name for some in names for name in ([some] if isinstance(some, str) else some)]

    def items(self) -> list[tuple[str, Any]]:
        """Names and values."""
        return [(name, getattr(self._item, name, None)) for name in self._names]

    def values(self) -> list[Any]:
        """Values alone."""
        return [value for _, value in self.items()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _own_classes(modules: dict[str, nn.Module]) -> list[type]:
    """The classes of modules that belong to no library."""
    found = {cls: None for module in modules.values() for cls in type(module).__mro__}
    return [cls for cls in found if _is_own(cls)]


def _is_own_function(value: Any) -> bool:
    return isinstance(value, FunctionType) and _is_own(value)


def _is_own(item: type | FunctionType) -> bool:
    return (item.__module__ or "").split(".")[0] not in _LIBRARIES


def _form(modules: dict[str, nn.Module], ignored: set[Attribute]) -> Form:
    numbers: list[Any] = []
    structure: list[Hashable] = []
    seen: set[int] = set()
    for cls in _own_classes(modules):
        values = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        structure.append((cls, _described(values, numbers, _DEPTH, seen)))
    for path, module in modules.items():
        attributes = [
            (name, _described(value, numbers, _DEPTH, seen))
            for name, value in vars(module).items()
            if name not in _SKIPPED and (path, name) not in ignored
        ]
        weights = [(name, _shape(weight)) for name, weight in module._parameters.items()]
        buffers = [(name, _described(value, numbers, _DEPTH, seen)) for name, value in module._buffers.items()]
        hooks = [*map(id, module._forward_hooks.values()), *map(id, module._forward_pre_hooks.values())]
        structure.append((path, type(module), *attributes, *weights, *buffers, *hooks))
    modes = tuple(module.training for module in modules.values())
    return Form(tuple(structure), tuple(numbers), modes[0] if len(set(modes)) == 1 else modes)


def _described(value: Any, numbers: list[Any], depth: int, seen: set[int]) -> Hashable:
    """A value without its numbers, which are appended to a list; objects that were ``seen`` count as themselves."""
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
        inside = (_described(item, numbers, depth - 1, seen) for item in items) if depth else ()
        return (type(value), len(value), names, *inside)
    parts, identity = _parts_of(value), id(value.__code__ if isinstance(value, FunctionType) else value)
    if parts is None or not depth or id(value) in seen:
        return (type(value).__name__, identity)
    seen.add(id(value))
    below = depth if _is_callable(value) else depth - 1
    found = [_described(part, numbers, below, seen) for part in (*parts.values(), *_settings(type(value)).values())]
    return (type(value).__name__, identity, *parts, *found)


def _parts_of(value: Any) -> dict[str, Any] | None:
    """What an object consists of by name; ``None`` if it is not to be looked into."""
    if isinstance(value, FunctionType):
        return dict(_Reads(value).items())
    if isinstance(value, (staticmethod, classmethod)):
        return {"function": value.__func__}
    if isinstance(value, property):
        return {"get": value.fget}
    if isinstance(value, partial):
        return {"function": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, _OPAQUE):
        return None
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return dict(_Slots(value).items()) if hasattr(type(value), "__slots__") and _is_own(type(value)) else None


def _settings(cls: type) -> dict[str, Any]:
    """The attributes of an own class that are data."""
    if not _is_own(cls):
        return {}
    return {name: value for name, value in vars(cls).items() if isinstance(value, _DATA) and not name.startswith("__")}


def _containers(value: Any, depth: int, seen: set[int]) -> list[Any]:
    """What can change in a value, down to some depth: dictionaries, lists, attributes, and what functions read.

    What was ``seen`` before is left out.
    """
    if not depth or isinstance(value, (*_ATOMS, *_NUMBERS)) or id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        if len(value) > _MOST_ITEMS:
            return []
        found = [] if isinstance(value, (tuple, frozenset)) else [value]
        items = value.values() if isinstance(value, dict) else value
        return found + [inner for item in items for inner in _containers(item, depth - 1, seen)]
    parts = _parts_of(value)
    if parts is None:
        return []
    changing: list[Any] = [_Reads(value)] if isinstance(value, FunctionType) else []
    if not changing and hasattr(value, "__dict__"):
        changing = [vars(value)]
    elif not changing and hasattr(type(value), "__slots__"):
        changing = [_Slots(value)]
    changing += [vars(type(value))] if _settings(type(value)) else []
    # Functions call others, which does not lead away from the model as fast as other objects do.
    below = depth if _is_callable(value) else depth - 1
    return changing + [inner for part in parts.values() for inner in _containers(part, below, seen)]


def _is_callable(value: Any) -> bool:
    return isinstance(value, (FunctionType, staticmethod, classmethod, property, partial))


def _named(container: Any) -> dict[Any, Any]:
    return dict(container.items()) if hasattr(container, "items") else dict(enumerate(container))


def _is_flag(value: Any) -> bool:
    """Whether a model may branch on a tensor."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.numel() == 1


def _shape(weight: Tensor | None) -> Hashable:
    return None if weight is None else "lazy" if is_lazy(weight) else tuple(weight.shape)


_version = attrgetter("_version")
