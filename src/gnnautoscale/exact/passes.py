"""The passes over all batches that make up a step on the whole graph.

The levels of slots are swept forward, then backward; see :mod:`gnnautoscale.forward.exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, undisturbed, weights_of
from gnnautoscale.attach import (
    CallModel,
    LocalLipschitz,
    attached,
    call_with_batch,
    device_of,
    info_of,
    plan_of,
    to_model_device,
)
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.exact.captured import CapturedSweeps
from gnnautoscale.exact.kinds import KEPT, StepKind
from gnnautoscale.exact.loss import Loss, check_gradient, differentiate, given_gradients
from gnnautoscale.exact.recipes import Recipes
from gnnautoscale.forward import (
    Draws,
    GradientStore,
    HistoryStore,
    NeedsStatistics,
    Plan,
    RowStore,
    Stage,
    StageExchange,
    StreamedStore,
    TypedMemory,
    TypedPlan,
    WholeGraphNorms,
    as_matrix,
    run_pass,
    uses_own_statistics,
)
from gnnautoscale.graph import BatchInfo, HaloLoader, TypedGraph
from gnnautoscale.history import Cast, RowSums
from gnnautoscale.kernels import triton_is_installed
from gnnautoscale.replay import on_training_stream
from gnnautoscale.transfer import Sharing


class ExactPasses:
    """The passes over all batches that make up one pass over the whole graph, forward and backward.

    On a GPU they are captured in the second step that is like the one before, and replayed from then on, unless
    something stands in the way.

    Args:
        model: An autoscaled model.
        loader: Makes the batches, of the training graph.
        call: Calls the model with a batch.
        inside: Gives a context to call it in.
        penalty: Is added to what is differentiated, with a weight.
        loss: What will be differentiated, if it has fixed inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: HaloLoader,
        call: CallModel = call_with_batch,
        *,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        penalty: tuple[LocalLipschitz, float] | None = None,
        loss: Loss | None = None,
    ) -> None:
        self._model, self._loader, self._call = model, loader, call
        self._inside, self._penalty, self._loss = inside, penalty, loss
        #: Where the model is.
        self.device = device_of(model)
        self._scaler = attached(model)
        # Of several processes each makes the passes over its own batches, and finds its share of each gradient.
        self._sharing: Sharing | None = self._scaler.memory_of(loader.graph).sharing
        self._num_nodes = sum(loader.everyone(loader.num_own))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self._scaler.edge_dropout and model.training:
            raise UnsupportedModelError(
                "exact gradients are those of all edges",
                got=f"edge_dropout={self._scaler.edge_dropout}",
                fix="Use autoscale(..., edge_dropout=0.0), or dropout of rows inside the model.",
            )
        # One number of PyTorch's stream, so that each step draws others, and the same ones after a checkpoint. Models
        # draw nothing in evaluation.
        self._seed = int(torch.randint(2**62, ())) if model.training else None
        self._draws = Draws(self._seed)
        self._norms = WholeGraphNorms() if self._sharing is None else WholeGraphNorms(self._sharing.add_up)
        self._has_norms = any(
            isinstance(module, _BatchNorm) and uses_own_statistics(module) for module in model.modules()
        )
        # Compiled modules do not ask tensors how to compute.
        compiled = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
        self._unread = not compiled and not isinstance(loader.graph, TypedGraph)
        self._store: HistoryStore = HistoryStore()
        self._adding: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._store = StreamedStore(self.device)
            self._adding = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._plan = Plan()
        self._stages: list[Stage] = []
        self._seen = StepKind()
        self._replays: CapturedSweeps | None = None

    @torch.no_grad()
    def forward(self, use: Callable[[Data, Any], None] | None = None) -> None:
        """Compute all histories, level by level, and the statistics of batch norms on the way.

        ``use`` gets each batch and the model's output for it; without it outputs are not computed.
        """
        with on_training_stream(self.device), undisturbed(self.device):
            self._plan = plan_of(self._model, self._loader, self._call)
            last = Stage(len(self._plan.levels))
            self._replays = self._captured(with_output=use is not None)
            if self._replays is not None:
                self._stages = [*map(Stage, range(len(self._plan.levels)), self._plan.levels), last]
                self._replay_forward(self._replays, use)
                return
            for depth, level in enumerate(self._plan.levels):
                self._run(Stage(depth, level))
            if use is not None:
                self._run(last, use)
            else:
                self._prepare(last)
        self._norms.update_averages()

    @torch.enable_grad()
    def backward(self, loss: Loss) -> None:
        """Add the gradients of all weights to those that they have."""
        weights = [weight for weight in weights_of(self._model) if weight.requires_grad]
        for weight, found in zip(weights, self.gradients(weights, loss), strict=True):
            if found is not None:
                weight.grad = found if weight.grad is None else weight.grad + found

    @torch.enable_grad()
    def gradients(self, weights: Sequence[Tensor], loss: Loss) -> list[Tensor | None]:
        """The gradients of some weights, which leaves those that they have as they are."""
        self._norms.forget_gradients()
        memory = self._scaler.memory_of(self._loader.graph)
        gradients = {slot: memory.gradient(slot, self._plan, self.device) for slot in self._plan.live}
        for sums in gradients.values():
            sums.clear()
        every = weights_of(self._model)
        kept = [weight.grad for weight in every]
        try:
            for weight in every:
                weight.grad = None
            with on_training_stream(self.device), undisturbed(self.device), self._by_itself():
                if self._replays is not None:
                    self._replay_backward(self._replays, loss, gradients)
                else:
                    for stage in reversed(self._stages):
                        self._run_backward(stage, loss, memory, gradients)
                    self._seen.learned = frozenset(
                        number for number, weight in enumerate(every) if weight.grad is not None
                    )
            return [weight.grad for weight in weights]
        finally:
            for weight, before in zip(every, kept, strict=True):
                weight.grad = before

    @property
    def how(self) -> str:
        """How the last passes ran, in words."""
        if self._replays is not None:
            return f"captured as {self._replays.num_graphs} CUDA graphs"
        if self.device.type != "cuda":
            return "uncaptured: CUDA graphs need a GPU"
        return f"uncaptured, since {self._seen.why_not or 'it was the first step'}"

    def of_outputs(self, batch: Data, count: int) -> list[BatchInfo]:
        """For each of so many tensors of the model's output, where the batch's nodes that it has rows of lie."""
        info = info_of(batch)
        if isinstance(self._plan, TypedPlan):
            return [info.nodes[kind] for kind in self._plan.output_kinds]
        return [info] * count

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
        if stage.level is not None:
            self._store.share(self._scaler.memory_of(self._loader.graph), stage.level)

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

    def _run_backward(self, stage: Stage, loss: Loss, memory: Any, histories: dict[str, RowSums]) -> None:
        store = GradientStore(self._store)
        self._norms.wanted = stage.norm
        if self._sharing is not None and stage.level is not None:
            self._sharing.collect(self._by_kind({slot: histories[slot] for slot in sorted(stage.level)}))
        if stage.norm is not None:
            self._norms.gather_gradients()
        penalty = None if self._penalty is None or stage.norm is not None else self._penalty
        for batch, out in self._passes(stage, store, None if penalty is None else penalty[0]):
            info = info_of(batch)
            index = {slot: memory.rows_at(slot, self._plan, info).on(self.device) for slot in self._plan.live}
            if stage.norm is not None:
                rows, gradients = self._norms.rows_and_gradients()
            elif stage.level is None:
                inputs = {name: value.to(self.device) for name, value in loss.inputs(batch).items()}
                rows, gradients = loss.seeds(out, inputs)
                check_gradient(rows)
            else:
                rows, gradients = list(store.outputs.values()), []
                for slot, value in store.outputs.items():
                    known = histories[slot].read(index[slot][: value.size(0)], dtype=value.dtype)
                    gradients.append(known.view_as(value))
            if penalty is not None and penalty[0].has_terms:
                share = penalty[1] * info.batch_size / self._num_nodes
                rows, gradients = [*rows, share * penalty[0].value()], [*gradients, None]
            differentiate(rows, gradients)
            found = {slot: as_matrix(gradient) for slot, gradient in store.gradients.items()}
            with self._beside(*index.values(), *found.values()):
                for slot, gradient in found.items():
                    histories[slot].add(gradient, index[slot])
            self._norms.add_gradients()
            store.start()
        self._norms.wanted = None
        self._settle()

    def _by_kind(self, sums: dict[str, RowSums]) -> dict[str, list[RowSums]]:
        """The sums of slots by the type of nodes that they have rows of."""
        kinds = self._plan.kinds if isinstance(self._plan, TypedPlan) else {}
        found: dict[str, list[RowSums]] = {}
        for slot, each in sums.items():
            found.setdefault(kinds.get(slot, ""), []).append(each)
        return found

    def _by_itself(self) -> AbstractContextManager[None]:
        """A context for backward passes that other processes know nothing of."""
        return nullcontext() if self._sharing is None else self._sharing.quietly()

    @contextmanager
    def _beside(self, *used: Tensor) -> Iterator[None]:
        """On a GPU, work on tensors beside the next batch; this stage only writes gradients that it does not read."""
        if self._adding is None:
            yield
            return
        self._adding.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._adding):
            yield
        for tensor in used:
            tensor.record_stream(self._adding)

    # Passes ##########################################################################################################

    def _passes(
        self, stage: Stage, store: RowStore, penalty: LocalLipschitz | None = None
    ) -> Iterator[tuple[Data, Any]]:
        """Run the model on all batches; each with its output, which is ``None`` if the pass ends early."""
        exchange = StageExchange(stage, store, self._draws)
        # The output may be used with anything that a batch has.
        alone = self._call is call_with_batch and stage != Stage(len(self._plan.levels))
        only = self._scaler.needed_attributes() if alone else None
        for number, batch in enumerate(self._loader.in_order(self.device, only=only, unread=self._unread)):
            self._draws.batch = number
            out = self._pass(exchange, batch, penalty)
            yield batch, out
            self._seen.note(stage, exchange.reads, batch, out)

    def _pass(self, exchange: StageExchange, batch: Data, penalty: LocalLipschitz | None = None) -> Any:
        """The model's output for a batch."""
        running = self._scaler.running(exchange, input_gradients=True, normalize=self._norms.normalize)
        with running, self._inside(), penalty if penalty is not None else nullcontext():
            return run_pass(partial(self._call, self._model, to_model_device(batch, self._model)))

    def _settle(self) -> None:
        """Let what follows see all rows and gradients."""
        if isinstance(self._store, StreamedStore):
            self._store.settle(self.device)
        if self._adding is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._adding)

    # Captured passes #################################################################################################

    def _captured(self, *, with_output: bool) -> CapturedSweeps | None:
        """The captured passes of such steps, once there was one; ``None`` if they cannot be captured."""
        if self.device.type != "cuda":
            return None
        key, kept = self._key(with_output), KEPT.setdefault(self._scaler, [])
        known = next((seen for seen in kept if seen.key == key), None)
        if known is None:
            # What the first step of its kind shows is needed to capture the next one. A single step of another kind,
            # such as a measurement between epochs, leaves what is captured alone.
            self._seen.key, self._seen.places = key, self._draws.places
            kept[:] = [*(seen for seen in kept if seen.replays is not None), self._seen]
            return None
        if known.replays is None and known.why_not is None:
            known.why_not = self._obstacle() or ("there was no backward pass" if known.learned is None else None)
            if known.why_not is None:
                kept[:] = [known]  # the GPU has room for one
                known.replays = self._capture(known, with_output)
                known.why_not = known.replays.why_not
                known.replays = known.replays if known.why_not is None else None
        self._seen = known
        return known.replays

    def _key(self, with_output: bool) -> Hashable:
        """What captured passes depend on besides the values of weights and rows."""
        memory = self._scaler.memory_of(self._loader.graph)
        values = (*weights_of(self._model), *self._model.buffers())
        tensors = tuple((value.data_ptr(), value.dtype, value.requires_grad) for value in values)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        form = self._scaler.version, self._scaler.form.mode, autocast, self._inside is nullcontext
        loss = None if self._loss is None else self._loss.fixed
        held = map(ref, (self._loader, self._loader.graph, memory, self._call))
        return tensors, form, loss, with_output, *held

    def _obstacle(self) -> str | None:
        memory = self._scaler.memory_of(self._loader.graph)
        if self._sharing is not None:
            return "several ranks share the graph"
        if isinstance(memory, TypedMemory):
            return "the graph is heterogeneous"
        if not triton_is_installed():
            return "Triton is missing"
        if memory.medium == "disk":
            return "histories are on disk"
        if not self._loader.keep:
            return "the loader keeps nothing"
        if self._has_norms or self._penalty is not None:
            return "there are batch norms, or a penalty"
        if any(not isinstance(history.codec, Cast) for history in memory.histories.values()):
            return "histories have a scale for each row"
        return None

    def _capture(self, known: StepKind, with_output: bool) -> CapturedSweeps:
        replays = CapturedSweeps(known.key, self.device)
        loss = self._loss if self._loss is not None and self._loss.fixed else None
        only = self._scaler.needed_attributes() if self._call is call_with_batch else None
        if only is not None:
            only = {*only, *(name for _, names in known.reads.values() for name in names)}
        batches = self._loader.in_order(self.device, only=only, unread=self._unread)
        replays.pack(self._scaler, batches, loss.inputs if loss is not None else lambda _: {})
        every = weights_of(self._model)
        for number in known.learned or ():
            known.sums[number] = torch.zeros_like(every[number])
        recipes = Recipes(self._model, self._plan, known, replays, self._pass)
        replays.capture(self._scaler, recipes.of(self._loss or given_gradients(lambda _: {}), with_output=with_output))
        return replays

    def _replay_forward(self, replays: CapturedSweeps, use: Callable[[Data, Any], None] | None) -> None:
        memory = self._scaler.memory_of(self._loader.graph)
        self._scaler.num_passes += 1
        memory.settle()
        memory.mark_changed()
        shape = self._seen.structure

        def rebuilt(batch: Data, tensors: list[Tensor]) -> None:
            each = iter(tensors)
            if use is not None:
                use(batch, map_tensors(lambda _: next(each), shape))

        for stage in self._stages:
            if stage.level is not None:
                replays.run(stage, backward=False, seed=self._seed, histories=memory.histories, gradients={})
            elif use is not None:
                histories = memory.histories
                replays.run(stage, backward=False, seed=self._seed, histories=histories, gradients={}, use=rebuilt)

    def _replay_backward(self, replays: CapturedSweeps, loss: Loss, gradients: dict[str, RowSums]) -> None:
        histories, known = self._scaler.memory_of(self._loader.graph).histories, self._seen
        for total in known.sums.values():
            total.zero_()
        for stage in reversed(self._stages):
            given = loss.inputs if stage.level is None and not loss.fixed else None
            replays.run(stage, backward=True, seed=self._seed, histories=histories, gradients=gradients, loss=given)
        for number, weight in enumerate(weights_of(self._model)):
            weight.grad = known.sums[number].clone() if number in known.sums else None
