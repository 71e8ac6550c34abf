"""Spares layers the work on edges whose result a record replaces.

Many layers call functions such as ``gcn_norm`` or ``add_self_loops`` before they propagate, and in a batch a record
replaces what these return. So where a model runs without the batch's own edges, such a function is called once, and
later calls get the same result; nobody looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from gnnautoscale._util import tensors_in

if TYPE_CHECKING:
    from gnnautoscale.forward.session import Session


def with_memory(forward: Callable[..., Any], running: Callable[[], Session | None]) -> Callable[..., Any]:
    """A layer's forward pass whose functions of edges remember their results; ``running`` gives the session."""
    function = getattr(forward, "__func__", None)
    if not isinstance(forward, MethodType) or not isinstance(function, FunctionType):
        return forward
    names = set(function.__code__.co_names) & function.__globals__.keys()
    found = {name: function.__globals__[name] for name in names}
    functions = {name: value for name, value in found.items() if type(value) is FunctionType}
    if not functions:
        return forward
    remembering = {name: _remembering(name, value, running) for name, value in functions.items()}
    scope = {**function.__globals__, **remembering}
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return MethodType(made, forward.__self__)


def _remembering(name: str, function: FunctionType, running: Callable[[], Session | None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        session = running()
        if session is None or not session.active or not session.plan.ignores_edges:
            return function(*args, **kwargs)
        layer = session.active[-1]
        given = tensors_in((args, kwargs))
        if not given or not all(id(value) in layer.edge_values for value in given):
            return function(*args, **kwargs)
        layer.num_functions += 1
        known = layer.call.remembered
        key = name, layer.num_functions
        if key not in known:
            known[key] = function(*args, **kwargs)
        layer.edge_values.update(id(value) for value in tensors_in(known[key]))
        return known[key]

    return call
