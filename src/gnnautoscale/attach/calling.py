"""How a model is called with a batch: its arguments, its device, and one batch after another in a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.errors import InputError
from gnnautoscale.forward import run_pass
from gnnautoscale.graph import BatchInfo, BatchTensor, HaloLoader

#: Calls a model with a batch.
CallModel = Callable[[nn.Module, Data], Any]


def call_with_batch(model: nn.Module, batch: Data) -> Any:
    """Call a model as ``model(batch)``."""
    return model(batch)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights; the CPU if it has none."""
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def near(batch: Data, model: nn.Module) -> Data:
    """The batch on the model's device."""
    device = next((weight.device for weight in model.parameters()), None)
    return batch if device is None else batch.to(str(device))


def outputs(
    model: nn.Module, loader: HaloLoader, call: CallModel, running: AbstractContextManager[None]
) -> Iterator[tuple[BatchInfo, Any]]:
    """Run a model on every batch of a sweep.

    Args:
        model: An autoscaled model.
        loader: Cuts the graph into batches.
        call: Calls the model with a batch.
        running: The policy to run it in, see :meth:`Autoscaler.running`.

    Yields:
        Each batch, and the model's output for it; ``None`` if the policy ended the pass early.
    """
    with running:
        for batch in loader.in_order():
            yield batch.edge_index.info, run_pass(partial(call, model, near(batch, model)))


def find_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchInfo:
    """The batch that a model is called with."""
    found = [
        value.info
        for value in tensors_in((args, kwargs))
        if isinstance(value, BatchTensor) and value.attribute == "edge_index"
    ]
    found += [
        value.edge_index.info
        for value in (*args, *kwargs.values())
        if isinstance(value, Data) and isinstance(value.edge_index, BatchTensor)
    ]
    if not found:
        raise InputError(
            "an autoscaled model is called with a batch of a HaloLoader",
            got="arguments without a batch's edge_index",
            fix="Pass batch.edge_index as it is (moving it to a device is fine); for all nodes of a graph use "
            "gas.infer(model, loader), or gas.detach(model) first.",
        )
    if any(info is not found[0] for info in found):
        raise InputError(
            "all arguments of a call must come from the same batch", got="two batches", fix="Pass one batch at a time."
        )
    return found[0]


def needs_input_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument of a call, or a tensor of a batch among them, needs a gradient."""
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Data)]
    tensors = [value for batch in batches for _, value in batch if isinstance(value, Tensor)]
    return any(value.requires_grad for value in (*tensors_in((args, kwargs)), *tensors))


def unpack_batch(
    signature: inspect.Signature, model: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn ``model(batch)`` into the arguments that the model's forward names, unless it wants the batch itself."""
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
            f"model(batch) passes each argument of {model}.forward that the batch has by its name",
            got=f"a batch without {', '.join(missing)}",
            fix="Call the model with its arguments, e.g. model(batch.x, batch.edge_index).",
        )
    rows = {batch.num_nodes, batch.edge_index.size(1)}
    chosen = {
        parameter.name: named[parameter.name]
        for parameter in parameters
        if parameter.name in named
        and (
            parameter.default is parameter.empty
            or (isinstance(value := named[parameter.name], Tensor) and value.dim() > 0 and value.size(0) in rows)
        )
    }
    return (), {**chosen, **kwargs}
