"""Plans that tests have in common: where a test is about something else, an equal model is not tried again.

Processes that run tests side by side, and ranks, find each other's plans in a folder; one of them makes a plan, and the
others wait for it.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import pickle
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from inspect import BoundArguments
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.inspector import Inspector  # type: ignore[import-untyped]

from gnnautoscale.attach.calling import form_of_arguments
from gnnautoscale.forward import Hooks, Plan
from gnnautoscale.graph import BatchInfo, TypedInfo
from gnnautoscale.planner import graph_form, make_plan

_LIBRARIES = ("torch", "torch_geometric", "gnnautoscale", "support", "conftest")
_PLANS: dict[Hashable, Plan] = {}
#: The folder of all processes; ``None`` for none.
folder: Path | None = None


def plan_once(hooks: Hooks, info: BatchInfo | TypedInfo, arguments: BoundArguments, **options: bool) -> Plan:
    """The plan of a model; one that was made before if all but the values of weights and features is the same."""
    with hooks.lifted() as model:
        known = all(_is_known(module) for module in model.modules())
        form = form_of_arguments(info, (arguments.args, arguments.kwargs))
        graph = _form_of_types(info) if isinstance(info, TypedInfo) else graph_form(info.graph)
        key = (_described(model, {}), form, graph, *options.items()) if known else None
    if key is None:
        return make_plan(hooks, info, arguments, **options)
    if key not in _PLANS:
        path = _path_of(key)
        with _only_here(path):
            if path is not None and path.exists():
                _PLANS[key] = pickle.loads(path.read_bytes())  # noqa: S301
            else:
                _PLANS[key] = make_plan(hooks, info, arguments, **options)
                if path is not None:
                    _write(path, _PLANS[key])
    return copy.deepcopy(_PLANS[key])  # passes note something in their plan


@contextmanager
def _only_here(path: Path | None) -> Iterator[None]:
    """Within, no other process makes the plan of a file."""
    if path is None:
        yield
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _form_of_types(info: TypedInfo) -> Hashable:
    """What trials depend on in a heterogeneous graph: its types, and what its edges have."""
    edges = ((relation, each.graph.edge_attributes.items()) for relation, each in info.edges.items())
    forms = ((relation, *((name, value.dtype, value.shape[1:]) for name, value in items)) for relation, items in edges)
    return *info.nodes, *forms


def _path_of(key: Hashable) -> Path | None:
    """The file of a plan; ``None`` for models of functions that only one process knows."""
    try:
        return None if folder is None else folder / hashlib.sha256(pickle.dumps(key)).hexdigest()
    except (AttributeError, TypeError, pickle.PicklingError):
        return None


def _write(path: Path, plan: Plan) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(pickle.dumps(plan))
    temporary.rename(path)  # at once for others


def _is_known(module: nn.Module) -> bool:
    """Whether a module is of a library, or of all tests; those that a test defines may do anything."""
    lazy = any(is_lazy(weight) for weight in module.parameters(recurse=False))
    return type(module).__module__.split(".")[0] in _LIBRARIES and not lazy


def _described(value: Any, seen: dict[int, int]) -> Hashable:
    """All that a value consists of, but not the entries of its tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.device, value.requires_grad
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return value
    if isinstance(value, MethodType):
        return value.__func__, _described(value.__self__, seen)
    if isinstance(value, Inspector):
        return "Inspector"  # what it knows of a layer's class, of which the first layer reads more than others
    if not isinstance(value, (dict, list, tuple, set, frozenset)) and not hasattr(value, "__dict__"):
        return type(value), repr(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return tuple((str(name), _described(item, seen)) for name, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), *(_described(item, seen) for item in value)
    return type(value), _described(vars(value), seen)
