"""Spares layers the work on edges whose result a record replaces.

Many layers call functions such as ``gcn_norm`` or ``add_self_loops`` before they propagate, and in a batch a record
replaces what these return. So where a model runs without the batch's own edges, such a function is called once, and
later calls get the same result, even for batches of another size. This is right only if a layer hands results on as
they are: to another such function, or to an edge call that replaces them. In a trial results are tagged, and a layer
that does anything else with one of them remembers nothing.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnautoscale._util import map_tensors, others_in, tensors_in

if TYPE_CHECKING:
    from gnnautoscale.forward.edges import ActiveLayer, Values
    from gnnautoscale.forward.plan import LayerCall
    from gnnautoscale.forward.session import Session

# What a function may get besides edges. Through anything else, such as the layer itself, it could do more than return.
_SETTINGS = (bool, int, float, str, torch.dtype, NoneType)
# Instructions that write to global variables; every second byte of a function's code is one.
_WRITES = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL")}


def with_memory(forward: Callable[..., Any], running: Callable[[], Session | None]) -> Callable[..., Any]:
    """A layer's forward pass whose functions of edges remember their results; ``running`` gives the session."""
    function = getattr(forward, "__func__", None)
    if not isinstance(forward, MethodType) or not isinstance(function, FunctionType):
        return forward
    code, layer_module = function.__code__, forward.__self__
    if _WRITES & set(code.co_code[::2]):
        return forward  # a copy of it would write to other variables

    def run(*args: Any, **kwargs: Any) -> Any:
        session = running()
        layer = session.active[-1] if session is not None and session.active else None
        if layer is None or not layer.edge_values or layer.call.remembers is False:
            return forward(*args, **kwargs)
        # Looked up in every call, since names may have got other values.
        found = {name: function.__globals__.get(name) for name in code.co_names}
        functions = {name: value for name, value in found.items() if type(value) is FunctionType}
        if not functions:
            return forward(*args, **kwargs)
        remembering = {name: partial(_call, layer, name, value) for name, value in functions.items()}
        scope = {**function.__globals__, **remembering}
        made = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
        made.__kwdefaults__ = function.__kwdefaults__
        return made(layer_module, *args, **kwargs)

    return run


def handed_on(layer: ActiveLayer, edge_index: Tensor, values: Values) -> tuple[Tensor, Values]:
    """The arguments of an edge call without tags; notes if the record will not replace some that were tagged."""
    call, record = layer.call, layer.record
    if call.remembers:
        return edge_index, values
    replaced = set() if record is None else call.edge_names[layer.num_edge_calls] & record.constants.keys()
    kept = [value for name, value in values.items() if name not in replaced]
    if any(isinstance(value, _Result) for value in tensors_in(kept)):
        call.remembers = False
    return map_tensors(_untagged, (edge_index, values))


class _Result(Tensor):
    """What a function of edges has returned in a trial; its call is told when something looks at it."""

    call: LayerCall

    @staticmethod
    def of(value: Tensor, call: LayerCall) -> _Result:
        with torch._C.DisableTorchFunctionSubclass():
            tagged = value.as_subclass(_Result)
        tagged.call = call
        return tagged

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tensors_in((args, kwargs)):
            if isinstance(value, _Result):
                value.call.remembers = False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _untagged(value: Tensor) -> Tensor:
    if not isinstance(value, _Result):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _call(layer: ActiveLayer, name: str, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a layer's forward pass, or return what it returned before."""
    given, settings = tensors_in((args, kwargs)), others_in((args, kwargs))
    of_edges = given and all(id(value) in layer.edge_values for value in given)
    if not of_edges or not all(isinstance(value, _SETTINGS) for value in settings):
        return function(*args, **kwargs)
    call = layer.call
    if call.remembers:
        layer.num_functions += 1
        dtypes = *(value.dtype for value in given), *(value for value in settings if isinstance(value, torch.dtype))
        key = name, layer.num_functions, dtypes
        if key not in call.remembered:
            call.remembered[key] = function(*args, **kwargs)
        result = call.remembered[key]
    else:
        args, kwargs = map_tensors(_untagged, (args, kwargs))
        result = function(*args, **kwargs)
        if any(value is not None for value in others_in(result)):
            call.remembers = False  # something that cannot be watched
        result = map_tensors(lambda value: _Result.of(value, call), result)
    layer.edge_values.update({id(value): value for value in tensors_in(result)})
    return result
