"""How to call a model with a batch: finds its arguments and device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.errors import InputError
from gnnautoscale.forward import Arguments, has_rows
from gnnautoscale.graph import BatchInfo, BatchTensor

#: Calls a model with a batch.
CallModel = Callable[[nn.Module, Data], Any]


def call_with_batch(model: nn.Module, batch: Data) -> Any:
    """Call a model as ``model(batch)``."""
    return model(batch)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights; the CPU if it has none."""
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def to_model_device(batch: Data, model: nn.Module) -> Data:
    """Move a batch to the model's device, if the model has weights."""
    device = next((weight.device for weight in model.parameters()), None)
    return batch if device is None else batch.to(str(device))


def find_batch(arguments: Arguments) -> BatchInfo:
    """The batch among a call's arguments."""
    own = [value for value in tensors_in(arguments) if isinstance(value, BatchTensor)]
    found = [value.info for value in own if value.attribute == "edge_index"]
    edges = [batch.edge_index for batch in _batches_in(arguments)]
    found += [value.info for value in edges if isinstance(value, BatchTensor)]
    if not found:
        raise InputError(
            "an autoscaled model must be called with a batch of a HaloLoader",
            got="arguments without a batch's edge_index",
            fix="Pass batch.edge_index unchanged (moving it to a device is fine); for all nodes of a graph use "
            "gas.infer(model, loader), or gas.detach(model) first.",
        )
    if any(info is not found[0] for info in found):
        raise InputError(
            "all arguments of a call must come from the same batch", got="two batches", fix="Pass one batch at a time."
        )
    found[0].graph.check_unwritten(labels=False)
    return found[0]


def needs_input_gradients(arguments: Arguments) -> bool:
    """Whether an argument of a call, or a tensor of a batch among them, needs a gradient."""
    tensors = [value for batch in _batches_in(arguments) for _, value in batch if isinstance(value, Tensor)]
    return any(value.requires_grad for value in (*tensors_in(arguments), *tensors))


def _batches_in(arguments: Arguments) -> list[Data]:
    return [value for value in (*arguments[0], *arguments[1].values()) if isinstance(value, Data)]


def unpack_batch(signature: inspect.Signature, model: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Turn ``model(batch)`` into the arguments of the model's forward, unless that takes the batch itself."""
    if len(args) != 1 or not isinstance(args[0], Data):
        return args, kwargs
    batch = args[0]
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name not in kwargs
    ]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    # The paper's listings call the edges adj_t.
    named = {("adj_t" if name == "edge_index" and "adj_t" in required else name): batch[name] for name, _ in batch}
    missing = [name for name in required if name not in named]
    if len(required) == 1 and missing:
        return args, kwargs
    if missing:
        raise InputError(
            f"for model(batch), the batch must have an attribute for each required argument of {model}.forward",
            got=f"a batch without {', '.join(missing)}",
            fix="Pass the arguments one by one, e.g. model(batch.x, batch.edge_index).",
        )
    rows = batch.num_nodes, batch.edge_index.size(1)
    known = [parameter.name for parameter in parameters if parameter.name in named]
    chosen = {name: named[name] for name in known if name in required or has_rows(named[name], *rows)}
    return (), {**chosen, **kwargs}
