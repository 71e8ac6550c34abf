"""Exact inference over a whole graph, and fast predictions from histories."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked, map_tensors, tensors_in, weights_of
from gnnautoscale.attach.autoscaler import Autoscaler, attached
from gnnautoscale.attach.calling import (
    CallModel,
    call_with_batch,
    device_of,
    info_of,
    model_must_run,
    to_model_device,
    weighted_sum,
)
from gnnautoscale.errors import InputError, StaleHistoryWarning
from gnnautoscale.forward import (
    ExchangePolicy,
    HistoryStore,
    Plan,
    PlanOnly,
    RowStore,
    StepExchange,
    StoreExchange,
    StreamedStore,
    SweepExchange,
    TypedPlan,
    evaluating,
    run_pass,
    step_exchange,
)
from gnnautoscale.graph import WHOLE_ID, BatchInfo, BatchTensor, Graph, HaloLoader, TypedGraph, check_nodes

# A graph that comes without a loader is cut into parts of about this size, or not at all if it is smaller.
_PART_NODES, _PART_EDGES = 100_000, 1_000_000
# For how many graphs a model keeps the loaders that were made for it.
_MOST_LOADERS = 4
# The share of a GPU's free memory that a sweep over several batches at once may take, for so many copies of their
# widest rows, and how many batches at most.
_SPARE, _COPIES, _MOST_TOGETHER = 1 / 64, 6, 16
_LOADERS: WeakKeyDictionary[Autoscaler, list[HaloLoader]] = WeakKeyDictionary()


def loader_for(model: nn.Module, graph: HaloLoader | Data | HeteroData) -> HaloLoader:
    """The given loader, or one made for a graph, which is kept for later calls with the same graph and model."""
    if isinstance(graph, HaloLoader):
        return graph
    kept = _LOADERS.setdefault(attached(model), [])
    if not isinstance(graph, (Data, HeteroData)):
        raise InputError(
            "the graph must be a torch_geometric.data.Data, a HeteroData or a HaloLoader",
            got=type(graph).__name__,
            fix="Pass data, or gas.HaloLoader(data, num_parts=...).",
        )
    typed = isinstance(graph, HeteroData)
    now: Any = TypedGraph.of(graph) if typed else Graph.of(graph)
    for loader in kept:
        if loader.data is graph and loader.graph.num_nodes == now.num_nodes:
            return loader
    num_parts = math.ceil(max(now.num_nodes / _PART_NODES, now.edge_index.size(1) / _PART_EDGES))
    num_parts = min(num_parts, now.num_nodes)
    # Any model may take its batches, and those of a large graph are cut again rather than held in memory.
    bidirectional = not typed and not now.is_symmetric
    made = HaloLoader(graph, num_parts, bidirectional=bidirectional, keep=num_parts == 1)
    kept[:] = [*(loader for loader in kept if loader.data is not graph), made][-_MOST_LOADERS:]
    return made


@checked()
@torch.no_grad()
def infer(
    model: nn.Module,
    loader: HaloLoader | Data | HeteroData,
    *,
    call: CallModel = call_with_batch,
    update_histories: bool = True,
) -> Any:
    """Run a model on all nodes of a graph, exactly, one batch at a time.

    Each sweep over the batches computes one layer for all nodes from the layer before it, so nothing is stale and no
    layer runs twice. Device memory holds one batch and the histories.

    Args:
        model: An autoscaled model; it runs in evaluation mode.
        loader: Makes the batches, of the training graph or of another one. Of a ``Data``, a loader is made and kept
            with the model: of the whole graph in one batch if it is small, else of METIS parts.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.
        update_histories: Whether to refresh the histories of the training graph on the way. If not, a temporary
            second set is used, and training continues as if nothing had happened.

    Returns:
        The model's output in host memory, one row per node in the order of the data, ``[num_nodes, ...]``. On a
        heterogeneous graph each tensor has one row for each node of its type.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> gas.infer(model, gas.HaloLoader(data, num_parts=4)).shape
        torch.Size([34, 4])
        >>> gas.infer(model, data).shape
        torch.Size([34, 4])
    """
    return infer_on(torch.device("cpu"), model, loader, call=call, update_histories=update_histories)


@torch.no_grad()
def infer_on(
    device: torch.device,
    model: nn.Module,
    loader: HaloLoader | Data | HeteroData,
    *,
    call: CallModel = call_with_batch,
    update_histories: bool = True,
) -> Any:
    """See :func:`infer`; the output is gathered on a device, that of the model or the host."""
    scaler, loader = attached(model), loader_for(model, loader)
    graph, apart = loader.follow(), not update_histories
    with evaluating(model), scaler.visiting(graph, apart=apart, sharing=loader.sharing) as memory:
        if loader.is_whole:
            out = collect(model, loader, call, StepExchange(push_all=update_histories), device)
        else:
            together = _batches_together(model, loader, call, memory)
            store = sweep(model, loader, call, together=together)
            out = collect(model, loader, call, SweepExchange(None, store), device, together=together)
        if update_histories:
            memory.mark_written_by(weights_checksum(model))
    return out


@torch.no_grad()
def infer_from_histories(model: nn.Module, loader: HaloLoader, *, call: CallModel = call_with_batch) -> Any:
    """Run a model's last layer on all nodes of the training graph, with its current histories; see :func:`infer`."""
    with evaluating(model):
        plan_of(model, loader, call)
        exchange = StoreExchange(HistoryStore(writes=False)) if loader.is_whole else SweepExchange(None)
        return collect(model, loader, call, exchange)


@checked()
@torch.no_grad()
def refresh(
    model: nn.Module,
    loader: HaloLoader | Data | HeteroData,
    *,
    call: CallModel = call_with_batch,
    loss: Callable[[Any], Tensor] | None = None,
) -> None:
    """Recompute histories of the training graph with the current weights, in evaluation mode.

    Given a loader, all of them become exact. Given one of its batches, only that batch's rows are computed and pushed,
    from those that it pulls, as in a training step: cheap enough to come before each step; of several ranks each
    passes a batch of its own. The model keeps its weights, their gradients, and its mode.

    Args:
        model: An autoscaled model.
        loader: Makes the batches of the training graph; or that graph itself, see :func:`infer`; or a batch.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.
        loss: With a batch, and if the model is autoscaled with ``compensate="gradient"``: the loss, given the model's
            output for the batch, weighted as in training. Gradients of the batch's rows become fresh, too.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> loader = gas.HaloLoader(data, num_parts=4)
        >>> gas.refresh(model, loader)
        >>> for batch in loader:
        ...     gas.refresh(model, loader.batch_of([0]))  # another batch's rows, before a step on this one
    """
    if isinstance(loader, (Data, HeteroData)) and isinstance(loader.edge_stores[0].edge_index, BatchTensor):
        _refresh_batch(model, loader, call, loss)
        return
    if loss is not None:
        raise InputError("loss belongs to a batch", got="one with a loader or a graph", fix="Leave it out.")
    loader = loader_for(model, loader)
    memory = attached(model).memory_of(loader.follow())
    if memory.sharing is not None:
        memory.sharing.answer()
    with evaluating(model):
        if loader.is_whole:
            collect(model, loader, call, StepExchange(push_all=True))
        else:
            sweep(model, loader, call)
            # Sweeps do not see a second forward pass in a call; this does, and its output does not matter.
            with attached(model).running(SweepExchange(None)), warnings.catch_warnings(action="ignore"):
                _run_once(model, loader.any_batch(device_of(model)), call)
        memory.mark_written_by(weights_checksum(model))


def _refresh_batch(model: nn.Module, batch: Any, call: CallModel, loss: Callable[[Any], Tensor] | None) -> None:
    scaler, info = attached(model), info_of(batch)
    # Of a whole graph no other batch pulls rows, but predictions do.
    whole = info.holds_all_nodes
    exchange = StepExchange(push_all=True) if whole else step_exchange(scaler.compensate)
    goes_back = loss is not None and scaler.compensate == "gradient" and not whole
    memory = scaler.memory
    with evaluating(model), scaler.running(exchange), memory.aside(info), torch.set_grad_enabled(goes_back):
        out = call(model, to_model_device(batch, model))
        if loss is not None and goes_back:
            weights = [weight for weight in weights_of(model) if weight.requires_grad]
            torch.autograd.grad(loss(out), weights, allow_unused=True)
            memory.send_gradients()


@checked(nodes={"fix": "Use torch.tensor(nodes), or a dictionary of tensors by type."})
@torch.no_grad()
def predict(
    model: nn.Module,
    loader: HaloLoader | Data | HeteroData,
    nodes: Tensor | dict[str, Tensor],
    *,
    call: CallModel = call_with_batch,
) -> Any:
    """Run a model's last layer for some nodes, from the histories.

    The cost depends on the number of nodes and neighbours, not on the depth of the model or the size of the graph. The
    result is exact right after :func:`infer` or :func:`refresh`; if the weights have changed since, a
    :class:`StaleHistoryWarning` says so.

    Args:
        model: An autoscaled model; it runs in evaluation mode.
        loader: A loader of the training graph; or that graph itself, see :func:`infer`.
        nodes: Node indices, ``[count]``; on a heterogeneous graph a dictionary of them, by type.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.

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
    scaler, loader = attached(model), loader_for(model, loader)
    graph = loader.follow()
    memory = scaler.memory_of(graph)
    given = nodes_by_type(nodes, graph)
    unique = {kind: torch.unique(each, return_inverse=True) for kind, each in given.items()}
    distinct = {kind: found[0] for kind, found in unique.items()}
    batch = to_model_device(loader.batch_for(distinct if isinstance(graph, TypedGraph) else distinct[""]), model)
    with evaluating(model):
        plan = plan_of(model, loader, call)
        if plan.live - memory.histories.keys():
            raise InputError(
                "predict needs histories with rows",
                got="empty histories",
                fix="Train the model, or call gas.refresh(model, loader) first.",
            )
        if plan.live and not memory.is_written_by(weights_checksum(model)):
            warnings.warn(
                "Some histories were written with older weights, so these predictions are approximate. Call "
                "gas.refresh(model, loader) for exact ones.",
                StaleHistoryWarning,
                stacklevel=4,
            )
        with scaler.running(SweepExchange(None)):
            out = _run_once(model, batch, call)
    kinds = iter(plan.output_kinds if isinstance(plan, TypedPlan) else [""] * len(tensors_in(out)))
    none = torch.empty(0, dtype=torch.long)

    def chosen(rows: Tensor) -> Tensor:
        position = unique.get(next(kinds), (none, none))[1]
        return rows[position.to(rows.device)]

    return map_tensors(chosen, out)


def nodes_by_type(nodes: Any, graph: Graph | TypedGraph) -> dict[str, Tensor]:
    """Checked nodes by type; a plain graph has one type, without a name."""
    if not isinstance(graph, TypedGraph):
        return {"": check_nodes(nodes, graph.num_nodes)}
    if not isinstance(nodes, dict) or not nodes or not nodes.keys() <= graph.counts.keys():
        got = f"{list(nodes)}" if isinstance(nodes, dict) else type(nodes).__name__
        rule = f"nodes of a heterogeneous graph are a dictionary by type ({', '.join(graph.counts)})"
        raise InputError(rule, got=got, fix="Pass {type: indices}.")
    return {kind: check_nodes(each, graph.counts[kind]) for kind, each in nodes.items()}


def weights_checksum(model: nn.Module) -> list[float]:
    """Numbers that change when a weight or buffer of the model does."""
    sums = [weighted_sum(tensor) for tensor in (*weights_of(model), *model.buffers())]
    return torch.stack(sums).tolist() if sums else []


def plan_of(model: nn.Module, loader: HaloLoader, call: CallModel = call_with_batch) -> Plan:
    """The plan of an autoscaled model in its present mode on a loader's graph."""
    scaler = attached(model)
    before, batch = scaler.num_passes, to_model_device(loader.any_batch(device_of(model)), model)
    with scaler.running(PlanOnly()), model_must_run(model):
        run_pass(partial(call, model, batch))
    if scaler.num_passes == before:
        fix = "Pass one such as lambda model, batch: model(batch.x, batch.edge_index)."
        raise InputError("call must be a function that runs the model on the batch", got="one that does not", fix=fix)
    return cast(Plan, scaler.plan)


def _batches_together(model: nn.Module, loader: HaloLoader, call: CallModel, memory: Any) -> int:
    """How many batches to sweep over at once: several if a GPU has memory for all histories, and some to spare."""
    device = device_of(model)
    if device.type != "cuda" or memory.medium != "device" or isinstance(loader.graph, TypedGraph):
        return 1
    plan, info = plan_of(model, loader, call), loader.any_batch(device).edge_index.info
    tables = (*plan.rows.values(), *loader.graph.features.values())
    widest = max((table.shape[1:].numel() * table.element_size() for table in tables), default=1)
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(int(_SPARE * free / (_COPIES * widest * info.num_rows)), len(loader), _MOST_TOGETHER))


def sweep(
    model: nn.Module, loader: HaloLoader, call: CallModel, store: RowStore | None = None, *, together: int = 1
) -> RowStore:
    """Recompute the rows of all slots in a store, by default the histories, level by level; returns the store.

    So many batches are one ``together``.
    """
    device = device_of(model)
    if store is None:
        store = StreamedStore(device) if device.type == "cuda" else HistoryStore()
    for level in plan_of(model, loader, call).levels:
        collect(model, loader, call, SweepExchange(level, store), together=together)
        if isinstance(store, StreamedStore):
            store.settle(device)
        store.share(attached(model).memory_of(loader.graph), level)
    return store


def collect(
    model: nn.Module,
    loader: HaloLoader,
    call: CallModel,
    exchange: ExchangePolicy,
    device: torch.device | None = None,
    *,
    together: int = 1,
) -> Any:
    """The model's output for all nodes, in the order of the data; ``None`` if the policy ends passes early.

    It is gathered on a device, by default the host. So many batches are one ``together``.
    """
    scaler = attached(model)
    outputs = Outputs(loader, scaler, device or torch.device("cpu"))
    with scaler.running(exchange), outputs:
        only = scaler.needed_attributes() if call is call_with_batch else None
        for batch in loader.in_order(device_of(model), only=only, together=together):
            outputs.add(batch, _run_once(model, batch, call))
    return outputs.result


class Outputs(AbstractContextManager["Outputs"]):
    """Gathers the outputs of batches; a GPU's are written to host memory while it goes on."""

    def __init__(self, loader: HaloLoader, scaler: Autoscaler, device: torch.device) -> None:
        self._loader, self._scaler, self._device = loader, scaler, device
        self._thread = ThreadPoolExecutor(1, "outputs")
        self._writes: list[Future[None]] = []
        #: The output of all nodes.
        self.result: Any = None

    def _spaces(self, batch: Any, out: Any) -> list[tuple[BatchInfo, Tensor, int]]:
        """For each tensor of an output: where the batch's nodes of its type lie, which they are, and how many exist."""
        info = info_of(batch)
        if not isinstance(self._scaler.plan, TypedPlan):
            return [(info, batch.n_id.plain, self._loader.num_own)] * len(tensors_in(out))
        kinds, counts = self._scaler.plan.output_kinds, self._loader.own_counts
        return [(info.nodes[kind], _numbers(info.nodes[kind], batch[kind]), counts[kind]) for kind in kinds]

    def add(self, batch: Any, out: Any) -> None:
        """Add the output of a batch's own nodes."""
        spaces = self._spaces(batch, out) if out is not None else []
        if self.result is None:
            counts = iter(spaces)
            self.result = map_tensors(
                lambda rows: rows.new_empty((next(counts)[2], *rows.shape[1:]), device=self._device), out
            )
        results = zip(tensors_in(self.result), tensors_in(out), spaces, strict=True)
        for whole, rows, (info, n_id, _) in results:
            if rows.device == whole.device:
                nodes = info.nodes if rows.device.type == "cpu" else n_id[: info.batch_size]
                whole.index_copy_(0, nodes, rows)
            else:
                staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                staged.copy_(rows, non_blocking=True)
                arrived = torch.cuda.current_stream(rows.device).record_event()
                self._writes.append(self._thread.submit(_write, whole, info, staged, arrived))

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        for write in self._writes:
            write.result()


def _numbers(info: BatchInfo, store: Any) -> Tensor:
    """Which nodes of a type in the loader's data a batch has, ``[num_rows]``; ``n_id`` may be of a larger graph."""
    numbers: Tensor = info.order.nodes_at(info.rows) if WHOLE_ID in store else store.n_id.plain
    return numbers


def _write(whole: Tensor, info: BatchInfo, staged: Tensor, arrived: torch.cuda.Event) -> None:
    arrived.synchronize()
    whole.index_copy_(0, info.nodes, staged)


def _run_once(model: nn.Module, batch: Data, call: CallModel) -> Any:
    """Call a model with a batch; refuses a call that runs it several times."""
    scaler = attached(model)
    before = scaler.num_passes
    out = run_pass(partial(call, model, to_model_device(batch, model)))
    if scaler.num_passes > before + 1:
        raise InputError(
            "call must run the model once, because histories hold the rows of one forward pass",
            got=f"{scaler.num_passes - before} forward passes for one batch",
            fix="Infer once for each input and combine the results, or make what calls twice one model.",
        )
    return out
