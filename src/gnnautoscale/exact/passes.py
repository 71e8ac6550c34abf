"""Full-batch training in constant memory: the exact gradient of any loss, one batch at a time.

The levels of slots are swept forward, then backward; see :mod:`gnnautoscale.forward.exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in, undisturbed
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.calling import CallModel, call_with_batch, device_of, to_model_device
from gnnautoscale.attach.inference import Outputs, loader_for, plan_of
from gnnautoscale.attach.regularize import LocalLipschitz
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import (
    GradientStore,
    GraphMemory,
    HistoryStore,
    NeedsStatistics,
    Plan,
    RowStore,
    Stage,
    StageExchange,
    StreamedStore,
    WholeGraphNorms,
    as_matrix,
    run_pass,
    uses_own_statistics,
)
from gnnautoscale.graph import HaloLoader
from gnnautoscale.history import RowSums

#: Given a batch and the model's output for it, the tensors to differentiate, and their gradients (``None`` for 1).
Differentiate = Callable[[Data, Any], tuple[list[Tensor], list[Tensor | None]]]


def exact_forward(
    model: nn.Module,
    loader: HaloLoader | Data,
    *,
    call: CallModel = call_with_batch,
    device: torch.device | str = "cpu",
) -> Any:
    """Run a model on all nodes of its training graph, one batch at a time, with the gradients of the whole graph.

    In place of ``model(data.x, data.edge_index)`` in a full-batch loop: the output and, after ``loss.backward()``, the
    gradients of the weights are the same, for any loss and any optimizer. Device memory holds one batch. Each layer is
    computed twice for each node, forward and backward.

    The model runs in its present mode. Batch norms in training take the statistics of all nodes. Dropout draws for each
    batch by itself, so a node of the halo has another mask than in its own batch. Histories hold the exact rows of all
    nodes afterwards; their gradients take as much memory again.

    Args:
        model: An autoscaled model.
        loader: Makes the batches. Of a ``Data``, a loader is made and kept with the model.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.
        device: Where the output is gathered, in host memory by default.

    Returns:
        The model's output, one row per node in the order of the data, ``[num_nodes, ...]``. Its gradient is computed
        before the model runs again.

    Example:
        >>> import torch.nn.functional as F
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> loader = gas.HaloLoader(data, num_parts=4)
        >>> out = gas.exact_forward(model, loader)
        >>> F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        >>> all(weight.grad is not None for weight in model.parameters())
        True
    """
    loader = loader_for(model, loader)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    passes = ExactPasses(model, loader, call)
    outputs = Outputs(loader.graph.num_nodes, torch.device(device))
    with torch.no_grad(), outputs:
        passes.forward(outputs.add)
    flat = [*tensors_in(outputs.result)]
    if torch.is_grad_enabled() and weights:
        flat = list(_WholeGraph.apply(passes, flat, *weights))  # type: ignore[no-untyped-call]
    each = iter(flat)
    return map_tensors(lambda _: next(each), outputs.result)


class ExactPasses:
    """The passes over all batches that make up one pass over the whole graph, forward and backward.

    Args:
        model: An autoscaled model.
        loader: Makes the batches, of the training graph.
        call: Calls the model with a batch.
        inside: Gives a context to call it in.
        penalty: Is added to what is differentiated, with a weight.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: HaloLoader,
        call: CallModel = call_with_batch,
        *,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        penalty: tuple[LocalLipschitz, float] | None = None,
    ) -> None:
        self._model, self._loader, self._call = model, loader, call
        self._inside, self._penalty = inside, penalty
        self._scaler, self._device = attached(model), device_of(model)
        if self._scaler.edge_dropout and model.training:
            raise UnsupportedModelError(
                "exact gradients are those of all edges",
                got=f"edge_dropout={self._scaler.edge_dropout}",
                fix="Use autoscale(..., edge_dropout=0.0), or dropout of rows inside the model.",
            )
        # One number of PyTorch's stream, so that each step draws others, and the same ones after a checkpoint. Models
        # draw nothing in evaluation.
        self._seed = int(torch.randint(2**62, ())) if model.training else None
        self._norms = WholeGraphNorms()
        self._has_norms = any(
            isinstance(module, _BatchNorm) and uses_own_statistics(module) for module in model.modules()
        )
        self._store: HistoryStore = HistoryStore()
        self._adding: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._store = StreamedStore(self._device)
            self._adding = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._plan = Plan()
        self._stages: list[Stage] = []

    @torch.no_grad()
    def forward(self, use: Callable[[Data, Any], None] | None = None) -> None:
        """Compute all histories, level by level, and the statistics of batch norms on the way.

        ``use`` gets each batch and the model's output for it; without it outputs are not computed.
        """
        with undisturbed(self._device):
            self._plan = plan_of(self._model, self._loader, self._call)
            for depth, level in enumerate(self._plan.levels):
                self._run(Stage(depth, level))
            last = Stage(len(self._plan.levels))
            if use is not None:
                self._run(last, use)
            else:
                self._prepare(last)
        self._norms.update_averages()

    @torch.enable_grad()
    def backward(self, differentiate: Differentiate) -> None:
        """Add the gradients of all weights to those that they have."""
        self._norms.forget_gradients()
        memory = self._scaler.memory_of(self._loader.graph)
        gradients = {slot: memory.gradient(slot, self._plan, self._device) for slot in self._plan.live}
        for sums in gradients.values():
            sums.clear()
        with undisturbed(self._device):
            for stage in reversed(self._stages):
                self._run_backward(stage, differentiate, memory, gradients)

    def gradients(self, weights: Sequence[Tensor], differentiate: Differentiate) -> list[Tensor | None]:
        """The gradients of some weights, which leaves those that they have as they are."""
        kept = [weight.grad for weight in weights]
        try:
            for weight in weights:
                weight.grad = None
            self.backward(differentiate)
            return [weight.grad for weight in weights]
        finally:
            for weight, before in zip(weights, kept, strict=True):
                weight.grad = before

    def moment(self) -> tuple[int, int]:
        """Changes when the model runs, or its weights change."""
        return self._scaler.num_passes, sum(weight._version for weight in self._model.parameters())

    # Forward #########################################################################################################

    def _run(self, stage: Stage, use: Callable[[Data, Any], None] | None = None) -> None:
        self._prepare(stage)
        for batch, out in self._passes(stage, self._store):
            if use is not None:
                use(batch, out)
        self._settle()

    def _prepare(self, stage: Stage) -> None:
        """Note a stage, after those that collect the statistics that it needs."""
        while (norm := self._unknown_norm(stage)) is not None:
            collecting = Stage(stage.depth, norm=norm)
            self._prepare(collecting)  # on the way to that norm there may be others
            self._norms.wanted = norm
            for _ in self._passes(collecting, self._store):
                pass
            self._norms.collected()
            self._norms.wanted = None
            self._settle()
        self._stages.append(stage)

    def _unknown_norm(self, stage: Stage) -> str | None:
        """The batch norm without statistics that a stage comes across first, if any."""
        if not self._has_norms:
            return None
        self._norms.wanted = stage.norm
        try:
            with self._norms.only_looking():
                next(self._passes(stage, GradientStore(self._store)))
        except NeedsStatistics as needed:
            return needed.norm
        finally:
            self._norms.wanted = None
            self._settle()
        return None

    # Backward ########################################################################################################

    def _run_backward(
        self, stage: Stage, differentiate: Differentiate, memory: GraphMemory, histories: dict[str, RowSums]
    ) -> None:
        store = GradientStore(self._store)
        self._norms.wanted = stage.norm
        penalty = None if self._penalty is None or stage.norm is not None else self._penalty
        for batch, out in self._passes(stage, store, None if penalty is None else penalty[0]):
            place = memory.rows_of(batch.edge_index.info)
            index = place.on(self._device)
            if stage.norm is not None:
                rows, gradients = self._norms.rows_and_gradients()
            elif stage.level is None:
                rows, gradients = differentiate(batch, out)
            else:
                rows, gradients = list(store.outputs.values()), []
                for slot, value in store.outputs.items():
                    known = histories[slot].read(index[: place.batch_size], dtype=value.dtype)
                    gradients.append(known.view_as(value))
            if penalty is not None and penalty[0].has_terms:
                share = penalty[1] * place.batch_size / self._loader.graph.num_nodes
                rows, gradients = [*rows, share * penalty[0].value()], [*gradients, None]
            pairs = [pair for pair in zip(rows, gradients, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([row for row, _ in pairs], [gradient for _, gradient in pairs])
            found = {slot: as_matrix(gradient) for slot, gradient in store.gradients.items()}
            with self._beside(index, *found.values()):
                for slot, gradient in found.items():
                    histories[slot].add(gradient, index)
            self._norms.add_gradients()
            store.start()
        self._norms.wanted = None
        self._settle()

    @contextmanager
    def _beside(self, *used: Tensor) -> Iterator[None]:
        """On a GPU, work on tensors beside the next batch; this stage only writes gradients that it does not read."""
        if self._adding is None:
            yield
            return
        self._adding.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._adding):
            yield
        for tensor in used:
            tensor.record_stream(self._adding)

    # Passes ##########################################################################################################

    def _passes(
        self, stage: Stage, store: RowStore, penalty: LocalLipschitz | None = None
    ) -> Iterator[tuple[Data, Any]]:
        """Run the model on all batches; each with its output, which is ``None`` if the pass ends early."""
        exchange = StageExchange(stage, store, self._seed)
        running = partial(self._scaler.running, exchange, input_gradients=True, normalize=self._norms.normalize)
        # The output may be used with anything that a batch has.
        alone = self._call is call_with_batch and stage != Stage(len(self._plan.levels))
        only = self._scaler.needed_attributes() if alone else None
        for number, batch in enumerate(self._loader.in_order(self._device, only=only)):
            exchange.batch = number
            with running(), self._inside(), penalty if penalty is not None else nullcontext():
                out = run_pass(partial(self._call, self._model, to_model_device(batch, self._model)))
            yield batch, out

    def _settle(self) -> None:
        """Let what follows see all rows and gradients."""
        if isinstance(self._store, StreamedStore):
            self._store.settle(self._device)
        if self._adding is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._adding)


class _WholeGraph(torch.autograd.Function):
    """Connects the outputs of all nodes to the weights that they were computed with."""

    @staticmethod
    def forward(ctx: Any, passes: ExactPasses, outputs: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        ctx.passes, ctx.weights = passes, weights
        ctx.before = passes.moment()
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights."""
        passes: ExactPasses = ctx.passes
        if passes.moment() != ctx.before:
            raise InputError(
                "the gradient of an exact pass is computed before the model runs again or changes",
                got="a call of the model, or other weights, since then",
                fix="Call loss.backward() right after gas.exact_forward.",
            )

        def differentiate(batch: Data, out: Any) -> tuple[list[Tensor], list[Tensor | None]]:
            nodes = batch.edge_index.info.nodes
            rows = tensors_in(out)
            return rows, [
                whole[nodes.to(whole.device)].to(row.device) for whole, row in zip(gradients, rows, strict=True)
            ]

        found = passes.gradients(ctx.weights, differentiate)
        ctx.before = passes.moment()
        return None, None, *found
