"""Exact inference over a whole graph, and predictions in constant time from histories."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in
from gnnautoscale.attach.autoscaler import Autoscaler, OpenSession, attached
from gnnautoscale.errors import InputError, StaleHistoryWarning
from gnnautoscale.forward import GraphMemory, Plan, Session, Sweep, evaluating, run_sweep
from gnnautoscale.graph import HaloLoader, check_nodes

CallModel = Callable[[nn.Module, Data], Any]


def _call_with_batch(model: nn.Module, batch: Data) -> Any:
    return model(batch)


@torch.no_grad()
def infer(
    model: nn.Module, loader: HaloLoader, *, call: CallModel = _call_with_batch, update_histories: bool = True
) -> Any:
    """Run a model on all nodes of a graph, exactly, one batch at a time.

    Histories are recomputed layer by layer: each sweep over the batches computes one layer for every node from
    the layer before it, so that nothing is stale and no layer is computed twice. Device memory is bounded by one
    batch and the histories.

    Args:
        model: An autoscaled model; it runs in evaluation mode.
        loader: Cuts the graph into batches. It may be another graph than the one the model is trained on.
        call: How to call the model with a batch, if ``model(batch)`` is not right.
        update_histories: Whether the histories of the training graph are refreshed on the way. If not, a second
            set of histories is used and dropped, so that training goes on as if nothing had happened.

    Returns:
        The model's output in host memory, one row per node in the order of the data, ``[num_nodes, ...]``.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> gas.infer(model, gas.HaloLoader(data, num_parts=4)).shape
        torch.Size([34, 4])
    """
    scaler = attached(model)
    with evaluating(model), scaler.visiting(loader.graph, apart=not update_histories) as memory:
        if len(loader) == 1:
            return _pass(model, scaler, memory, loader, call, push=update_histories)
        _sweep_all(model, scaler, memory, loader, call)
        return _collect(model, scaler, loader, call, partial(Sweep, level=None))


@torch.no_grad()
def infer_from_histories(model: nn.Module, loader: HaloLoader, *, call: CallModel = _call_with_batch) -> Any:
    """Run a model's last layer on all nodes of the training graph, over its histories as they are.

    Args:
        model: An autoscaled model; it runs in evaluation mode.
        loader: Cuts the training graph into batches.
        call: How to call the model with a batch, if ``model(batch)`` is not right.

    Returns:
        The model's output in host memory, ``[num_nodes, ...]``; as stale as the histories are.
    """
    scaler = attached(model)
    with evaluating(model):
        _plan(model, scaler, _to_model(next(loader.in_order()), model), call)
        open_session = Session if len(loader) == 1 else partial(Sweep, level=None)
        return _collect(model, scaler, loader, call, open_session)


@torch.no_grad()
def refresh(model: nn.Module, loader: HaloLoader, *, call: CallModel = _call_with_batch) -> None:
    """Recompute all histories of the training graph with the current weights, in evaluation mode.

    Args:
        model: An autoscaled model.
        loader: Cuts the training graph into batches.
        call: How to call the model with a batch, if ``model(batch)`` is not right.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> gas.refresh(model, gas.HaloLoader(data, num_parts=4))
    """
    scaler = attached(model)
    memory = scaler.memory_of(loader.graph)
    with evaluating(model):
        if len(loader) == 1:
            _pass(model, scaler, memory, loader, call, push=True)
        else:
            _sweep_all(model, scaler, memory, loader, call)


@torch.no_grad()
def predict(model: nn.Module, loader: HaloLoader, nodes: Tensor, *, call: CallModel = _call_with_batch) -> Any:
    """Run a model for some nodes only, from the histories: no layer but the last is computed.

    What is read and computed depends on the nodes and their neighbours, neither on the depth of the model nor on
    the size of the graph. The result is exact right after :func:`infer` or :func:`refresh`; if the weights have
    changed since the histories were written, a :class:`StaleHistoryWarning` says so.

    Args:
        model: An autoscaled model; it runs in evaluation mode.
        loader: A loader of the training graph.
        nodes: Node indices, ``[count]``.
        call: How to call the model with a batch, if ``model(batch)`` is not right.

    Returns:
        The model's output for these nodes, on the model's device, ``[count, ...]``.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> loader = gas.HaloLoader(data, num_parts=4)
        >>> gas.refresh(model, loader)
        >>> gas.predict(model, loader, torch.tensor([0, 33])).shape
        torch.Size([2, 4])
    """
    scaler = attached(model)
    nodes = check_nodes(nodes, loader.graph.num_nodes)
    memory = scaler.memory_of(loader.graph)
    distinct, position = torch.unique(nodes, return_inverse=True)
    batch = _to_model(loader.around(distinct), model)
    with evaluating(model):
        plan = _plan(model, scaler, batch, call)
        if plan.live - memory.histories.keys():
            raise InputError(
                "predict reads histories, so they must have been written",
                got="empty histories",
                fix="Train the model, or call gas.refresh(model, loader) first.",
            )
        if plan.live and not memory.is_written_by(weights_checksum(model)):
            warnings.warn(
                "The histories were not all written by the model's current weights, so these predictions are "
                "approximate. Call gas.refresh(model, loader) for exact ones.",
                StaleHistoryWarning,
                stacklevel=3,
            )
        with scaler.running(partial(Sweep, level=None)):
            out = call(model, batch)
    return map_tensors(lambda rows: rows[position.to(rows.device)], out)


def weights_checksum(model: nn.Module) -> list[float]:
    """Numbers that change when a weight or buffer of the model does."""
    sums = []
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.detach().flatten().double()
        # Weighted by position, so that an exchange of values does not go unnoticed.
        sums.append(values.dot(torch.linspace(1.0, 2.0, values.numel(), dtype=torch.double, device=values.device)))
    return torch.stack(sums).tolist() if sums else []


def _pass(
    model: nn.Module, scaler: Autoscaler, memory: GraphMemory, loader: HaloLoader, call: CallModel, *, push: bool
) -> Any:
    """The model's output for a graph that is one batch, and all histories on the way if these are to be pushed."""
    out = _collect(model, scaler, loader, call, partial(Session, push_all=push))
    if push:
        memory.mark_written_by(weights_checksum(model))
    return out


def _sweep_all(model: nn.Module, scaler: Autoscaler, memory: GraphMemory, loader: HaloLoader, call: CallModel) -> None:
    """Bring all histories up to date, level by level."""
    plan = _plan(model, scaler, _to_model(next(loader.in_order()), model), call)
    for level in plan.levels:
        with scaler.running(partial(Sweep, level=level)):
            for batch in loader.in_order():
                run_sweep(partial(call, model, _to_model(batch, model)))
    memory.mark_written_by(weights_checksum(model))


class _Planned(BaseException):
    """Ends a call once the model's plan is made."""


def _plan(model: nn.Module, scaler: Autoscaler, batch: Data, call: CallModel) -> Plan:
    """The model's plan, which its first call makes."""

    def stop(*_: Any) -> Session:
        raise _Planned

    if scaler.plan is None:
        try:
            with scaler.running(stop):
                call(model, batch)
        except _Planned:
            pass
    return cast(Plan, scaler.plan)


def _to_model(batch: Data, model: nn.Module) -> Data:
    device = next((value.device for value in model.parameters()), None)
    return batch if device is None else batch.to(str(device))


def _collect(
    model: nn.Module, scaler: Autoscaler, loader: HaloLoader, call: CallModel, open_session: OpenSession
) -> Any:
    """The model's output for every batch, put together in the order of the data."""
    rooms: list[Tensor] = []
    result: Any = None
    with scaler.running(open_session):
        for batch in loader.in_order():
            out = call(model, _to_model(batch, model))
            if not rooms:
                result = map_tensors(partial(_room_for_all, rooms, loader.graph.num_nodes), out)
            nodes = batch.n_id[: batch.batch_size].cpu()
            for room, rows in zip(rooms, tensors_in(out), strict=True):
                room[nodes] = rows.cpu()
    return result


def _room_for_all(rooms: list[Tensor], num_nodes: int, rows: Tensor) -> Tensor:
    rooms.append(torch.empty((num_nodes, *rows.shape[1:]), dtype=rows.dtype))
    return rooms[-1]
