"""How to call a model with a batch: finds its arguments and device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import lacks_memory, tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import Arguments, Form, attributes_of, form_of_values, has_rows, own_attribute
from gnnautoscale.graph import BatchInfo, BatchTensor, TypedInfo

#: Calls a model with a batch.
CallModel = Callable[[nn.Module, Data], Any]


_HOST = torch.device("cpu")
# How arguments of a model on a heterogeneous graph end that are dictionaries by type.
_BY_TYPE = "_dict"
# Parameters that take any number of arguments.
_LISTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What differs from batch to batch.
_COUNTS = ("batch_size", "num_nodes")


def call_with_batch(model: nn.Module, batch: Data) -> Any:
    """Call a model as ``model(batch)``."""
    return model(batch)


@contextmanager
def model_must_run(model: nn.Module) -> Iterator[None]:
    """Say that a model cannot compute with what it is given, where its layers would name a multiplication or a type."""
    try:
        yield
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if lacks_memory(error) or "CUDA error" in str(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{type(model).__name__} must run on this graph",
            got=f"{type(error).__name__}: {reason}",
            fix="Check that its layers take the graph's features, their type, and the arguments of its forward pass.",
        ) from error


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights; the CPU if it has none."""
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def to_model_device(batch: Data, model: nn.Module) -> Data:
    """Move a batch to the model's device, if the model has weights."""
    device = next((weight.device for weight in model.parameters()), None)
    edges = batch.edge_stores[0].edge_index
    there = device is None or device == getattr(getattr(edges, "info", None), "device", None) != _HOST
    return batch if there else batch.to(str(device))


def info_of(batch: Data | HeteroData) -> Any:
    """Where a batch of a loader lies in its graph."""
    if isinstance(batch, HeteroData):
        return batch[batch.edge_types[0]].edge_index.info.typed
    return batch.edge_index.info


def find_batch(arguments: Arguments) -> Any:
    """The batch among a call's arguments, which are checked."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise UnsupportedModelError(
            "histories need ordinary tensors",
            got="a call inside a transform such as torch.func.grad or torch.func.vmap, or with forward-mode gradients",
            fix="Call the model outside of it and use torch.autograd.grad; or gas.detach(model) first.",
        )
    own = [value for value in tensors_in(arguments) if isinstance(value, BatchTensor)]
    edges = [value for value in own if value.attribute == "edge_index"]
    edges += [store.edge_index for batch in _batches_in(arguments) for store in batch.edge_stores]
    infos = [value.info for value in edges if isinstance(value, BatchTensor)]
    found: list[Any] = [info if info.typed is None else info.typed for info in infos]
    if not found:
        raise InputError(
            "an autoscaled model must be called with a batch of a HaloLoader",
            got="arguments without a batch's edge_index",
            fix="Pass batch.edge_index unchanged (moving it to a device is fine); for all nodes of a graph use "
            "gas.infer(model, data), or gas.detach(model) first.",
        )
    if any(info is not found[0] for info in found):
        raise InputError(
            "all arguments of a call must come from the same batch", got="two batches", fix="Pass one batch at a time."
        )
    found[0].graph.check_unwritten(labels=False)
    _check_dense(arguments, found[0])
    return found[0]


def weighted_sum(tensor: Tensor) -> Tensor:
    """A scalar that changes when a value of the tensor does, or when two values are swapped."""
    values = tensor.detach().flatten().double()
    return values.dot(torch.linspace(1.0, 2.0, values.numel(), dtype=torch.double, device=values.device))


def form_of_arguments(info: BatchInfo | TypedInfo, arguments: Arguments) -> Form:
    """What a plan depends on in a call's arguments; numbers that count the batch's rows are alike in all batches."""
    numbers: list[Any] = []
    return Form(_described(info, arguments, numbers), tuple(numbers))


# Not a closure, which would refer to itself and keep the batch alive until garbage is collected.
def _described(info: Any, value: Any, numbers: list[Any]) -> Hashable:
    if isinstance(info, TypedInfo) and isinstance(value, Tensor):
        shape = None if isinstance(value, BatchTensor) else value.shape[1:]
        return value.dtype, shape, *attributes_of(info, value)
    if isinstance(value, HeteroData):
        stores = (*value.node_items(), *value.edge_items())
        items = [(kind, name, item) for kind, store in stores for name, item in store.items() if name not in _COUNTS]
        return tuple((kind, name, _described(info, item, numbers)) for kind, name, item in items)
    if isinstance(value, BatchTensor):
        return own_attribute(info, value), value.attribute, value.dtype
    if isinstance(value, Tensor):
        return value.dtype, value.shape[1:], has_rows(value, info.num_rows), has_rows(value, info.num_edges)
    if isinstance(value, Data):
        return type(value), *((name, _described(info, item, numbers)) for name, item in value)
    if isinstance(value, (list, tuple)):
        return type(value), *[_described(info, item, numbers) for item in value]
    if isinstance(value, dict):
        return *value, *[_described(info, item, numbers) for item in value.values()]
    if (
        type(value) is int
        and not isinstance(info, TypedInfo)
        and value
        in (
            info.num_rows,
            info.batch_size,
            info.num_edges,
        )
    ):
        return "count"
    form = form_of_values(value)
    numbers.extend(form.numbers)
    return form.structure


def _check_dense(arguments: Arguments, info: BatchInfo | TypedInfo) -> None:
    """Refuse sparse rows of nodes or edges, since histories could not replace some of them."""
    named = [(f"argument {place}", value) for place, value in enumerate(arguments[0], 1)] + [*arguments[1].items()]
    for batch in _batches_in(arguments):
        named += [(f"batch.{name}", value) for store in batch.stores for name, value in store.items()]
    counts = None if isinstance(info, TypedInfo) else (info.num_rows, info.num_edges)
    for name, value in named:
        for tensor in tensors_in(value):
            if isinstance(tensor, BatchTensor) or tensor.layout == torch.strided:
                continue
            if counts is None or has_rows(tensor, *counts):
                raise InputError(
                    "an autoscaled model takes dense rows of nodes and edges",
                    got=f"{tensor.layout} for {name}",
                    fix="Pass it .to_dense(); pass edges as batch.edge_index.",
                )


def needs_input_gradients(arguments: Arguments) -> bool:
    """Whether an argument of a call, or a tensor of a batch among them, needs a gradient."""
    stores = [store for batch in _batches_in(arguments) for store in batch.stores]
    tensors = [value for store in stores for value in store.values() if isinstance(value, Tensor)]
    return any(value.requires_grad for value in (*tensors_in(arguments), *tensors))


def _batches_in(arguments: Arguments) -> list[Any]:
    return [value for value in (*arguments[0], *arguments[1].values()) if isinstance(value, (Data, HeteroData))]


def unpack_batch(signature: inspect.Signature, model: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Turn ``model(batch)`` into the arguments of the model's forward, unless that takes the batch itself."""
    if len(args) == 1 and isinstance(args[0], HeteroData):
        return _unpack_typed(signature, model, args[0], kwargs)
    if len(args) != 1 or not isinstance(args[0], Data):
        return args, kwargs
    batch = args[0]
    has_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_name = [parameter for parameter in signature.parameters.values() if parameter.kind in has_name]
    parameters = [parameter for parameter in by_name if parameter.name not in kwargs]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    # The paper's listings call the edges adj_t.
    named = {**dict(iter(batch)), "num_nodes": batch.num_nodes, "adj_t": batch.edge_index}
    missing = [name for name in required if name not in named]
    edges = [parameter.name for parameter in by_name if parameter.name in ("edge_index", "adj_t")]
    # A graph made of several has an attribute batch, but what a model calls so is the batch.
    if not edges and len(required) == 1 and (missing or required == ["batch"]):
        return args, kwargs
    if missing:
        raise InputError(
            f"for model(batch), the batch must have an attribute for each required argument of {model}.forward",
            got=f"a batch without {', '.join(missing)}",
            fix="Store it in data, or pass the arguments one by one, e.g. model(batch.x, batch.edge_index).",
        )
    if not edges and len(by_name) < len(signature.parameters):
        raise InputError(
            f"for model(batch), {model}.forward must name its arguments, which are taken from the batch by name",
            got=f"forward{signature.replace(return_annotation=signature.empty)}",
            fix="Pass them one by one, e.g. model(batch.x, batch.edge_index), and give gas.infer a call=... that does; "
            "for gas.fit, wrap the model in a module with forward(self, x, edge_index).",
        )
    rows = batch.num_nodes, batch.edge_index.size(1)
    known = [parameter.name for parameter in parameters if parameter.name in named]
    chosen = {name: named[name] for name in known if name in (*required, *edges) or has_rows(named[name], *rows)}
    return (), {**chosen, **kwargs}


def _unpack_typed(signature: inspect.Signature, model: str, batch: HeteroData, kwargs: dict[str, Any]) -> Arguments:
    """Turn ``model(batch)`` into dictionaries by type, unless the model's forward takes the batch itself.

    Arguments are called after attributes: ``x_dict``, as models on heterogeneous graphs have it, or all of them ``x``,
    as those that ``to_hetero`` makes.
    """
    parameters = {name: each for name, each in signature.parameters.items() if name not in kwargs}
    required = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in _LISTS]
    has_suffix = any(name.endswith(_BY_TYPE) for name in signature.parameters)
    found: dict[str, Any] = {}
    for name in parameters:
        if name.endswith(_BY_TYPE) or not has_suffix:
            by_type = batch.collect(name.removesuffix(_BY_TYPE), allow_empty=True)
            found |= {name: by_type} if by_type else {}
    missing = [name for name in required if name not in found]
    # One argument that no type has an attribute for, or that is called so.
    is_batch = required == ["batch"] or (len(required) < 2 and missing == required)
    if is_batch and not has_suffix:
        return (batch,), kwargs
    if missing:
        got = f"a batch of no type with {', '.join(name.removesuffix(_BY_TYPE) for name in missing)}"
        if has_suffix and not all(name.endswith(_BY_TYPE) for name in missing):
            got = f"{', '.join(missing)} beside dictionaries, of which the type is not known"
        raise InputError(
            f"for model(batch), the batch must have an attribute for each required argument of {model}.forward",
            got=got,
            fix="Pass the arguments one by one, e.g. model(batch.x_dict, batch.edge_index_dict), and give gas.infer a "
            "call=... that does; for gas.fit, let forward take dictionaries, such as n_id_dict, or the batch.",
        )
    return (), {**found, **kwargs}
