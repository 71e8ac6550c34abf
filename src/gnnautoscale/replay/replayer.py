"""Steps on batches that a GPU captures once per batch and replays; others run as they are.

It takes any work on a batch of an autoscaled model: the step of :func:`gnnautoscale.fit`, or a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.attach import attached, info_of
from gnnautoscale.graph import BatchInfo
from gnnautoscale.replay.graphs import GraphPool, watching
from gnnautoscale.replay.packing import Package, Packer, Place, Placement
from gnnautoscale.transfer import Times, Transfer

# Every CUDA graph takes some of the GPU's memory, however small its batch; further batches run uncaptured.
MOST_GRAPHS = 512
# Runs before the first capture: they compile kernels and give an optimizer its state.
WARM_UP = 2

#: Work on a batch and further tensors; it returns what it likes.
Work = Callable[[Data, dict[str, Tensor]], Any]


@dataclass(eq=False)
class _Replay:
    """A captured step, what it returned when it was captured, and where its batch has to be."""

    graph: torch.cuda.CUDAGraph
    result: Any
    place: Place


class Replayer:
    """Runs work on batches of an autoscaled model.

    On a GPU it is captured for each batch that comes back, and replayed, unless ``capture`` forbids it or something
    stands in the way; :attr:`why_not` says what. ``attributes`` gives the attributes of a batch that the work reads, by
    default all.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        capture: bool = True,
        placement: Placement = "auto",
        attributes: Callable[[Data], Iterable[str]] | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._model, self._device, self._attributes = model, device, attributes
        self._scaler = attached(model)
        self._replays: dict[Hashable, _Replay] = {}
        self._warm_up = WARM_UP
        #: Captures further work on the same device, in the memory of all of it.
        self.graphs = GraphPool(device)
        self._versions: tuple[int, int] | None = None
        self.packer = Packer(self._scaler, device, placement)
        #: Why steps are not captured, in words; ``None`` if they are, or will be.
        self.why_not = self._obstacle(capture)
        #: Measures what steps spend their time on.
        self.times = Times()

    def _obstacle(self, capture: bool) -> str | None:
        if not capture:
            return "this was asked for"
        if self._device.type != "cuda":
            return "there is no GPU"
        if self._scaler.compensate == "momentum":
            return "the host counts the neighbours at hand for compensate='momentum'"
        if self._scaler.edge_dropout:
            return "edge dropout changes the number of edges in every step"
        return None

    @property
    def how(self) -> str:
        """How steps run, in words."""
        if self._device.type != "cuda":
            return "uncaptured: CUDA graphs need a GPU"
        if self.why_not is not None:
            return f"uncaptured, since {self.why_not}"
        where = "stay on the GPU" if self.packer.resident else "are assembled anew for each step"
        return f"captured as {len(self._replays)} CUDA graphs; batches {where}"

    def forget(self) -> None:
        """Forget what was captured, because the model, or what it works on, has changed."""
        self._replays.clear()
        self.packer.clear()

    def run(
        self, batch: Data, work: Work, extras: dict[str, Tensor], *, form: Hashable = None, trains: bool = True
    ) -> Any:
        """Run the work on a batch on the device; returns its result, which the next run may overwrite.

        Work of another ``form`` is captured by itself. Without ``trains`` it does not count as warm-up.
        """
        memory, info = self._scaler.memory, info_of(batch)
        if memory.medium is None:
            # The first session chooses the medium, so only that one knows how rows move.
            return self._uncaptured(batch, work, extras, trains)
        transfer, key = memory.transfer(self._device), (info.key, form)
        # Before the step begins: from then on the transfer knows the batch's rows, which a package moves.
        place = self._placed(batch, extras, key) if self.why_not is None else None
        transfer.measure(self.times)
        memory.begin(info, transfer)
        replay = None if place is None else self._replay(place, work, key, transfer)
        if replay is None or not self.packer.resident:
            memory.prepare_edges(info.upcoming, self._scaler.calls, gradients=True)
        if replay is not None:
            replay.graph.replay()
            memory.mark_changed()
            transfer.look_ahead()
            result = replay.result
        else:
            transfer.look_ahead()
            with self._scaler.driven():
                result = self._uncaptured(batch, work, extras, trains)
            transfer.join()  # the batch's memory may be used again
        transfer.complete()
        return result

    def _uncaptured(self, batch: Data, work: Work, extras: dict[str, Tensor], trains: bool) -> Any:
        """Run without capturing; the last run before the first capture is watched for obstacles."""
        last_of_warm_up = self._warm_up == 1 and trains
        self._warm_up = max(self._warm_up - trains, 0)
        if self.why_not is None and last_of_warm_up:
            self._scaler.memory.prepare_edges(info_of(batch), self._scaler.calls, gradients=True)
            self.packer.prepare(batch)
            with watching(self._model) as reasons:
                result = work(batch, extras)
            self.why_not = next(iter(reasons), None)
            return result
        return work(batch, extras)

    def _placed(self, batch: Data, extras: dict[str, Tensor], key: tuple[Hashable, Hashable]) -> Place | None:
        """Bring a batch to fixed addresses, as a package if its step is yet to be captured; ``None`` if it cannot."""
        info = info_of(batch)
        if not info.recurring:
            self.why_not = _why_uncaptured(info)
            return None
        known = self._replays.get(key)
        if known is not None and isinstance(known.place, Package) and known.place.holds(info):
            return known.place
        if known is None and (self._warm_up > 0 or len(self._replays) >= MOST_GRAPHS):
            return None
        names = None if self._attributes is None else self._attributes(batch)
        bring = self.packer.pack if known is None else self.packer.fill
        return bring(batch, extras, names)

    def _replay(self, place: Place, work: Work, key: tuple[Hashable, Hashable], transfer: Transfer) -> _Replay | None:
        """The captured work on a batch; ``None`` if it cannot be captured (yet)."""
        versions = self.packer.version, transfer.version
        if versions != self._versions:  # something moved
            known, self._versions = self._replays.get(key), versions
            self._replays.clear()
            if known is not None:  # its package is not in place
                return None
        known = self._replays.get(key)
        return (
            known if known is not None or not isinstance(place, Package) else self._capture(place, work, key, transfer)
        )

    def _capture(
        self, package: Package, work: Work, key: tuple[Hashable, Hashable], transfer: Transfer
    ) -> _Replay | None:
        def whole_step() -> Any:
            with self._scaler.driven():
                result = work(package.batch, package.extras)
            transfer.join()
            return result

        if not self._replays:
            self.graphs.renew()
        graph, result, reason = self.graphs.record(whole_step)
        place = package if self.packer.resident else self.packer.release(package)
        if reason is not None:
            self.why_not = f"the model cannot be captured ({reason})"
            self.forget()
            return None
        self._replays[key] = _Replay(graph, result, place)
        return self._replays[key]


def _why_uncaptured(info: BatchInfo) -> str:
    if info.device.type != "cuda":
        return "batches come from host memory (use HaloLoader(..., device='cuda'))"
    return "parts are drawn into new batches every epoch (use one part per batch, no shuffling, or drawings)"
