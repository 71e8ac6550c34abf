"""Training steps that a GPU captures once per batch and replays."""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnnautoscale.attach import attached
from gnnautoscale.forward import StepExchange, evaluating
from gnnautoscale.graph import BatchInfo, ReadyBatch
from gnnautoscale.training.feed import Feed, Item, plain_item
from gnnautoscale.training.steps import Steps
from gnnautoscale.transfer import Transfer

# Every CUDA graph takes some of the GPU's memory, however small its batch; further batches run uncaptured.
MOST_GRAPHS = 512
# Training steps before the first capture: they compile kernels and give the optimizer its state.
_WARM_UP = 2


class Engine(Steps):
    """Trains an autoscaled model on the batches of a feed.

    On a GPU each batch's step is captured as a CUDA graph if ``capture`` allows it, batches come back unchanged and the
    model does the same in every step; :attr:`how` says so, or why not. The optimizer needs ``capturable=True`` there.
    Further arguments are those of :class:`Steps`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, *, capture: bool = True, **further: Any
    ) -> None:
        super().__init__(model, optimizer, feed.task, feed.device, **further)
        self._feed = feed
        self._scaler = attached(model)
        self._warm_up = _WARM_UP
        self._graphs: dict[BatchInfo, torch.cuda.CUDAGraph] = {}
        self._versions: tuple[int, int] | None = None
        self._pool: Any = None
        self._why_not = self._obstacle(capture)
        self._model_version = self._scaler.version
        # The whole graph as a batch, if it is the same every time. With and without a refresh: the number of passes
        # over it so far, and a captured pass.
        self._whole: weakref.ref[BatchInfo] | None = None
        self._whole_feed = Feed(model, feed.task, fixed=True)
        self._passes: Counter[bool] = Counter()
        self._captured: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._why_no_pass = None if capture and self.on_gpu else "it is not wanted, or there is no GPU"

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU."""
        return self.device.type == "cuda"

    @property
    def how(self) -> str:
        """How steps run, in words."""
        if not self.on_gpu:
            return "uncaptured: CUDA graphs need a GPU"
        where = "on the GPU" if self._feed.resident else "copied ahead from host memory"
        if self._why_not is not None:
            return f"uncaptured, since {self._why_not}; batches {where}"
        return f"captured as {len(self._graphs)} CUDA graphs; batches {where}"

    def _obstacle(self, capture: bool) -> str | None:
        if not capture:
            return "this was asked for"
        if not self.on_gpu:
            return "there is no GPU"
        if not self._feed.fixed:
            return "parts are drawn into new batches every epoch (use one part per batch, no shuffling, or drawings)"
        if self._scaler.edge_dropout:
            return "edge dropout changes the number of edges in every step"
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of everything that touches the model while it trains; on a GPU it has a stream of its own."""
        if not self.on_gpu:
            yield
            return
        main, stream = torch.cuda.current_stream(self.device), _training_stream(self.device)
        stream.wait_stream(main)
        try:
            with super().running(), torch.cuda.stream(stream):
                yield
                self._scaler.memory.settle()
        finally:
            main.wait_stream(stream)
            self.times.stop()
            self._graphs.clear()
            self._feed.clear()
            self._forget_whole()

    def epoch(
        self,
        batches: Iterable[ReadyBatch],
        *,
        after_step: Callable[[Item], None] | None = None,
        then: Callable[[], ReadyBatch | None] | None = None,
    ) -> float:
        """Train on batches of the training graph; returns the mean loss over all targets, without the penalty.

        ``then`` gives the first batch of the next epoch, if it is known at the end of this one.
        """
        self._notice_changes()
        return self.train(self._feed.items(batches, then), after_step)

    def _notice_changes(self) -> None:
        """Forget what was captured and packed if the model was changed, by a callback for example."""
        version = self._scaler.version
        if version != self._model_version:
            self._model_version = version
            self._graphs.clear()
            self._feed.forget()
            self._forget_whole()

    def _run(self, item: Item) -> None:
        memory = self._scaler.memory
        if memory.medium is None:  # the first session chooses it, so only that one knows how rows move
            self._uncaptured(item)
            return
        transfer = memory.transfer(self.device)
        transfer.measure(self.times)
        memory.begin(item.info, transfer)
        graph = self._graph(item, transfer) if self._why_not is None else None
        if graph is not None:
            graph.replay()
            memory.mark_changed()
            transfer.look_ahead()
        else:
            transfer.look_ahead()
            with self._scaler.driven():
                self._uncaptured(item)
            transfer.join()  # the feed may use the batch's memory again
        transfer.complete()

    def _uncaptured(self, item: Item) -> None:
        """Run a step without capturing it; the last one before the first capture is watched for obstacles."""
        trains = item.targets.size(0) > 0
        last_of_warm_up = self._warm_up == 1 and trains
        self._warm_up = max(self._warm_up - trains, 0)
        if self._why_not is None and last_of_warm_up:
            with _watching(self._model) as reasons:
                self._step(item)
            self._why_not = next(iter(reasons), None)
        else:
            self._step(item)

    def _graph(self, item: Item, transfer: Transfer) -> torch.cuda.CUDAGraph | None:
        """The captured step of a batch; ``None`` if it must not, or not yet, be captured."""
        versions = self._feed.version, transfer.version
        if versions != self._versions:
            self._graphs.clear()
            self._versions = versions
        known = self._graphs.get(item.info)
        if known is not None or self._warm_up > 0 or item.version != self._feed.version:
            return known
        if self._penalty is not None and any(call.draws for call in self._scaler.calls.values()):
            self._why_not = "the penalty runs layers with dropout inside a second time with the same random numbers"
            return None
        return self._capture(item, transfer) if len(self._graphs) < MOST_GRAPHS else None

    def _capture(self, item: Item, transfer: Transfer) -> torch.cuda.CUDAGraph | None:
        def step() -> None:
            with self._scaler.driven():
                self._step(item)
            transfer.join()

        self._optimizer.zero_grad()
        graph, _, reason = self._record(step)
        if reason is None:
            self._graphs[item.info] = graph
            return graph
        self._why_not = f"the model cannot be captured ({reason})"
        self._graphs.clear()
        self._optimizer.zero_grad()
        return None

    def _record(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any, str | None]:
        """Capture some work; returns the graph, the work's result, and the reason if it could not be captured."""
        if not (self._graphs or self._captured):
            # Memory that graphs share lives as long as any of them.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        offset = torch.cuda.default_generators[self.device.index].get_offset()
        result, reason = None, None
        # Other threads, such as a progress bar's, go on meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        except Exception as error:  # the work runs uncaptured next, and raises what has nothing to do with capture
            reason = (str(error) or type(error).__name__).splitlines()[0]
        try:
            graph.capture_end()
        except RuntimeError as error:
            reason = reason or str(error).splitlines()[0]
            _recover_from_capture(self.device, self._pool, offset)
        return graph, result, reason

    @torch.no_grad()
    def output(self, batch: ReadyBatch, *, refresh: bool = False) -> Tensor:
        """The model's output for the whole training graph as one batch, in evaluation mode.

        On a GPU a batch that comes back stays there, and from the third pass on a captured one is replayed if nothing
        stands in the way. Another batch takes its place. A refresh also writes all histories, which must be in device
        memory then. The output, ``[num_nodes, num_outputs]``, is on the model's device; the next call overwrites it.
        """
        self._notice_changes()
        comes_back = self._whole is not None and self._whole() is batch.info
        if not comes_back:
            self._forget_whole()
            self._whole = weakref.ref(batch.info)
        if refresh not in self._captured:
            with (
                evaluating(self._model),
                self._scaler.visiting(batch.info.graph, apart=not refresh) as memory,
                self._scaler.running(StepExchange(push_all=refresh)),
            ):
                memory.mark_changed()  # not asked for during training, and checksums take time
                unpacked = [] if comes_back else [plain_item(batch.tagged_copy(), self.task, self.device)]
                for item in unpacked or self._whole_feed.items([batch]):
                    self._passes[refresh] += 1
                    resident = item.version is not None and self._whole_feed.resident
                    if self._passes[refresh] > _WARM_UP and resident and self._why_no_pass is None:
                        graph, out, self._why_no_pass = self._record(partial(self._call, item.batch))
                        if self._why_no_pass is None:
                            self._captured[refresh] = graph, out
                            break
                    plain: Tensor = self._call(item.batch)
                    return plain
        graph, out = self._captured[refresh]
        graph.replay()
        return out

    def _forget_whole(self) -> None:
        self._whole = None
        self._captured.clear()
        self._passes.clear()
        self._whole_feed.clear()


@cache
def _training_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all training, since PyTorch keeps work space for each; steps precede transfers beside them."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


def _recover_from_capture(device: torch.device, pool: Any, offset: int) -> None:
    """Put PyTorch's allocator and random numbers right after a capture that ended with an error."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    fresh.set_offset(offset)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """List the reasons why a step cannot be captured: work that a replay would not, or could not, repeat."""
    reasons: list[str] = []
    before = _host_state(model)
    with _waits_noticed() as waits:
        yield reasons
    if waits:
        reasons.append("the model waits for values on the host (such as .item(), or indexing with a mask)")
    after = _host_state(model)
    reasons += [reason for reason, value in before.items() if value != after[reason]]


@contextmanager
def _waits_noticed() -> Iterator[list[str]]:
    """Collect PyTorch's warnings about operations that make the host wait for a GPU."""
    waits: list[str] = []
    if not torch.cuda.is_available():
        yield waits
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits += [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]


def _host_state(model: nn.Module) -> dict[str, Any]:
    plain = {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    }
    return {
        "the model draws random numbers on the host": (
            random.getstate(),
            repr(np.random.get_state(legacy=False)["state"]),  # noqa: NPY002
            torch.get_rng_state().numpy().tobytes(),
        ),
        "the model's attributes change from step to step": plain,
    }
