"""Passes whose gradients are those of the whole graph.

A forward sweep computes one level of slots for all batches from the rows of the levels below it. A backward sweep runs
the same passes again, in reverse order of levels: the gradient of a level's rows is known by then, and what flows to
the rows that a pass has read is added to the gradients of their slots. Batch norms get the statistics of all nodes,
which a sweep of their own collects.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.edges import ActiveLayer
from gnnautoscale.forward.exchange import EndOfPass, ExchangePolicy, RowStore
from gnnautoscale.forward.norms import uses_own_statistics
from gnnautoscale.forward.session import Session
from gnnautoscale.forward.sweep import SweepExchange


@dataclass(frozen=True)
class Stage:
    """What one sweep computes, once ``depth`` levels are known: a level of slots, statistics of a norm, or the output.

    The last two have no ``level``; only statistics have a ``norm``.
    """

    depth: int
    level: frozenset[str] | None = None
    norm: str | None = None


class GradientStore(RowStore):
    """Rows of another store as inputs of a pass that is differentiated, and the rows that the pass computed."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._anchor = torch.zeros((), requires_grad=True)
        #: The rows that the last pass computed, and the gradients of those that it has read.
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def start(self) -> None:
        """Forget the last pass."""
        self.outputs, self.gradients = {}, {}

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        rows = self._store.read(session, slot, which, like)
        source: Tensor = _Source.apply(self._anchor, rows, self.gradients, slot)  # type: ignore[no-untyped-call]
        return source

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        self.outputs[slot] = rows

    def look_ahead(self, session: Session, slots: Iterable[str]) -> None:
        """See :meth:`RowStore.look_ahead`."""
        self._store.look_ahead(session, slots)


class _Source(torch.autograd.Function):
    """Rows whose gradient is collected by slot; unlike a leaf, a model may write into them."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, rows: Tensor, gradients: dict[str, Tensor], slot: str) -> Tensor:
        ctx.gradients, ctx.slot = gradients, slot
        return rows.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        before = ctx.gradients.get(ctx.slot)
        ctx.gradients[ctx.slot] = gradient if before is None else before + gradient
        return None, None, None, None


class Draws:
    """Seeds random numbers by batch and place in a pass, so that a pass draws the same ones whenever it is repeated.

    Without a ``seed`` numbers are left alone.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        #: The number of the batch.
        self.batch = 0
        #: The places where numbers were drawn on a GPU.
        self.places: set[str] = set()
        self._last: str | None = None

    def seed_of(self, place: str) -> int:
        """The seed of the batch's numbers at a place."""
        seed = self._seed or 0
        return zlib.crc32(f"{seed} {self.batch} {place}".encode()) ^ (seed & ~0xFFFFFFFF)

    def at(self, place: str, device: torch.device) -> None:
        """Go on to a place."""
        if self._seed is None:
            return
        seed = self.seed_of(place)
        # Not torch.manual_seed, which seeds all devices that there might be, and takes longer than a layer.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            generator = default_generator(device)
            if self._last is not None and generator.get_offset():
                self.places.add(self._last)
            generator.manual_seed(seed)
            self._last = place
        random.seed(seed & 0xFFFFFFFF)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002


class RecordedDraws(Draws):
    """The same numbers in a pass that a GPU captures: each place draws from a generator of its own.

    They are seeded before each replay. At other ``places`` nothing can be drawn.
    """

    def __init__(self, seed: int | None, places: Iterable[str], device: torch.device) -> None:
        super().__init__(seed)
        #: By place.
        self.generators = {place: torch.Generator(device) for place in sorted(places)}
        self._elsewhere = torch.Generator(device)

    def at(self, place: str, device: torch.device) -> None:
        """See :meth:`Draws.at`."""
        chosen = self.generators.get(place, self._elsewhere)
        default_generator(device).graphsafe_set_state(chosen.graphsafe_get_state())

    def seed(self, seed: int | None, batch: int) -> None:
        """Seed all places for a replay with a batch."""
        self._seed, self.batch = seed, batch
        for place, generator in self.generators.items():
            generator.manual_seed(self.seed_of(place))


def default_generator(device: torch.device) -> torch.Generator:
    """PyTorch's own generator of a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found: torch.Generator = torch.cuda.default_generators[index]
    return found


class StageExchange(SweepExchange):
    """Runs the passes of a stage, each batch with random numbers of its own.

    Numbers are seeded before and after each slot, by the slot's name, so that what several stages compute of a batch is
    the same in all of them.
    """

    def __init__(self, stage: Stage, store: RowStore, draws: Draws) -> None:
        super().__init__(stage.level, store)
        self._stage, self._draws = stage, draws

    @property
    def reads(self) -> frozenset[str]:
        """The slots that the last pass read."""
        return self._done & self._needed

    def _sort(self, session: Session) -> None:
        super()._sort(session)
        if self._stage.norm is not None:  # which may need all rows that are known
            self._done = self._needed = frozenset().union(*session.plan.levels[: self._stage.depth])

    def begin(self, session: Session) -> None:
        """See :meth:`SweepExchange.begin`."""
        super().begin(session)
        self._draws.at("the beginning", session.device)

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`ExchangePolicy.total`: refuses it."""
        return ExchangePolicy.total(self, session, slot, rows)

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """See :meth:`SweepExchange.at_slot`."""

        def seeded() -> Any:
            self._draws.at(f"in {slot}", session.device)
            return compute()

        try:
            out = super().at_slot(session, slot, seeded)
        finally:
            self._draws.at(f"after {slot}", session.device)
        return out

    def run_layer(self, session: Session, call: str, compute: Callable[[], Any]) -> Any:
        """See :meth:`ExchangePolicy.run_layer`."""
        self._draws.at(f"in {call}", session.device)
        try:
            return compute()
        finally:
            self._draws.at(f"after {call}", session.device)

    def skipped(self, session: Session, slot: str) -> Tensor:
        """See :meth:`SweepExchange.skipped`; batch norms tell such rows by their being not a number."""
        return super().skipped(session, slot).fill_(math.nan)

    def end(self, session: Session) -> None:
        """See :meth:`SweepExchange.end`."""
        super().end(session)
        self._draws.at("the end", session.device)


class NeedsStatistics(BaseException):
    """Ends a pass at a batch norm whose statistics are not known yet."""

    def __init__(self, norm: str) -> None:
        super().__init__(norm)
        self.norm = norm


@dataclass
class _Statistics:
    """Mean and variance of all rows that a norm sees, ``[channels]`` each, their number, and their gradients."""

    norm: _BatchNorm
    mean: Tensor
    variance: Tensor
    count: int
    of_mean: Tensor
    of_variance: Tensor


class WholeGraphNorms:
    """Batch norms in training, with the statistics of all nodes; other norms run as they are.

    ``add_up`` adds up tensors over all processes that share the graph.
    """

    def __init__(self, add_up: Callable[..., Sequence[Tensor]] = lambda *tensors: tensors) -> None:
        self._add_up = add_up
        self._known: dict[str, _Statistics] = {}
        #: The norm, and the number of its call in a pass, whose statistics are being collected or differentiated.
        self.wanted: str | None = None
        self._sums: list[tuple[_BatchNorm, Tensor, Tensor, int]] = []
        # The rows that the wanted norm has seen in the last pass, ``[batch_size, channels, ...]``.
        self._rows: Tensor | None = None
        self._session: Session | None = None
        # How often each run of a layer, and the model outside of layers, has called each norm in this pass.
        self._calls: dict[int, tuple[ActiveLayer | None, Counter[str]]] = {}
        self._leaves: dict[str, tuple[Tensor, Tensor]] = {}

    def normalize(
        self, session: Session, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Normalize the rows of a batch and its halo; see :class:`Session`."""
        if not uses_own_statistics(norm):
            return run(x)
        if session.is_aggregating or name not in session.plan.node_norms:
            raise UnsupportedModelError(
                "the statistics of a batch norm in exact training are those of all nodes",
                got=f"'{name}', which normalizes something else than one row per node, such as messages",
                fix="Put it outside of the layer, use LayerNorm(mode='node') there, or train with mode='gas'.",
            )
        if session.whole is not self._session:
            self._session, self._leaves = session.whole, {}
            self._calls.clear()
        call = self._call(session.whole, name)
        if not x.size(0) or (not session.plan.skip_empty and bool(x[:1].isnan().any())):
            return x  # skipped rows
        if call == self.wanted:
            self._look(norm, session.own(x))
            raise EndOfPass
        if call not in self._known:
            raise NeedsStatistics(call)
        known = self._known[call]
        if call not in self._leaves:
            gradients = torch.is_grad_enabled()
            self._leaves[call] = (
                known.mean.detach().requires_grad_(gradients),
                known.variance.detach().requires_grad_(gradients),
            )
        mean, variance = (_as_channels(value, x) for value in self._leaves[call])
        out = (x - mean) * torch.rsqrt(variance + norm.eps)
        if norm.affine:
            out = out * _as_channels(norm.weight, x) + _as_channels(norm.bias, x)
        return out

    def _call(self, session: Session, name: str) -> str:
        """The name of this call of a norm, the same in every pass; a layer that is repeated makes the same calls."""
        layer = session.active[-1] if session.active else None
        _, calls = self._calls.setdefault(id(layer), (layer, Counter()))  # which keeps the layer's identity in use
        calls[name] += 1
        return f"{layer.name if layer is not None else ''}>{name}#{calls[name]}"

    @contextmanager
    def only_looking(self) -> Iterator[None]:
        """Collect nothing in this context."""
        kept, self._sums = self._sums, []
        try:
            yield
        finally:
            self._sums = kept

    def _look(self, norm: _BatchNorm, own: Tensor) -> None:
        if torch.is_grad_enabled():
            self._rows = own
            return
        dims = [0, *range(2, own.dim())]
        values = own.double()
        self._sums.append((norm, values.sum(dims), values.square().sum(dims), own.numel() // max(own.size(1), 1)))

    def collected(self) -> None:
        """Take what was collected in the passes over all batches for the statistics of the wanted norm."""
        if self.wanted is None or not self._sums:
            raise RuntimeError("statistics have to be collected before they are taken")
        norms, totals, squares, counts = zip(*self._sums, strict=True)
        norm = norms[0]
        total, square, number = self._add_up(
            torch.stack(totals).sum(0), torch.stack(squares).sum(0), torch.tensor([sum(counts)])
        )
        count = int(number)
        mean, square = total / count, square / count
        dtype = torch.float32 if norm.weight is None else norm.weight.dtype
        mean, variance = mean.to(dtype), (square - mean.square()).clamp_(min=0.0).to(dtype)
        zero = torch.zeros_like(mean)
        self._known[self.wanted] = _Statistics(norm, mean, variance, count, zero, zero.clone())
        self._sums.clear()

    def forget_gradients(self) -> None:
        """Begin with no gradients of statistics."""
        for known in self._known.values():
            known.of_mean.zero_()
            known.of_variance.zero_()

    def add_gradients(self) -> None:
        """Add the gradients of the statistics that the last pass used."""
        for call, (mean, variance) in self._leaves.items():
            known = self._known[call]
            if mean.grad is not None and variance.grad is not None:
                known.of_mean += mean.grad
                known.of_variance += variance.grad
        self._leaves = {}

    def gather_gradients(self) -> None:
        """Add up the gradients of the wanted norm's statistics over all processes."""
        known = self._known[self.wanted or ""]
        known.of_mean, known.of_variance = self._add_up(known.of_mean, known.of_variance)

    def rows_and_gradients(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The rows that the wanted norm has seen in the last pass, and the gradient that its statistics give them."""
        if self.wanted is None or self._rows is None:
            raise RuntimeError("there has to be a pass before its gradient")
        known, rows = self._known[self.wanted], self._rows.detach()
        centered = rows - _as_channels(known.mean, rows)
        through = 2.0 * _as_channels(known.of_variance, rows) * centered + _as_channels(known.of_mean, rows)
        return [self._rows], [through.expand_as(rows) / known.count]

    @torch.no_grad()
    def update_averages(self) -> None:
        """Update the running averages of all norms, as a pass over the whole graph would."""
        for known in self._known.values():
            norm = known.norm
            if not norm.training or norm.running_mean is None or norm.running_var is None:
                continue
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
            share = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked or 1)
            unbiased = known.variance * (known.count / max(known.count - 1, 1))
            norm.running_mean.lerp_(known.mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)


def _as_channels(value: Tensor, rows: Tensor) -> Tensor:
    """Values, ``[channels]``, that apply to the second dimension of rows."""
    return value.view(1, -1, *[1] * (rows.dim() - 2))
