"""Training steps that make up for the border of a batch.

In a plain step the halo's rows are as old as their batches' last steps, and constants, so the gradient ends there. A
step with :class:`GradientExchange` also computes the halo's rows, as far as their neighbours are in batch and halo, and
differentiates through them:

* Forward, the rows of a slot are cut off from what they were computed from. The model goes on with the batch's rows and
  with the halo's rows between the history's, which lag behind, and those computed here, which miss neighbours.
* Backward, slots come in reverse order. The gradient of the batch's rows is complete by then, and is kept for other
  batches. That of the halo's rows lies between what their own batches have kept and what has arrived here. Where rows
  are the model's output nothing arrives, since the loss is that of the batch: there it is what was kept, moved on with
  the rows themselves. Together they flow on to the slots before.
* Weights get their gradient from the batch's own rows, so that each node counts once in an epoch.

How far something lags behind is known of the batch's own rows (:func:`between`, :func:`moved_on`). If weights do not
move nothing does, and a history's row and its kept gradient belong to the whole graph. A sum over neighbours is linear
in each of them. So once nothing is stale any more the batches' gradients add up to that of the whole graph wherever
slots lie behind layers that are linear in their messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnautoscale._util import leaves_of, map_tensors, tensors_in
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward.exchange import ExchangePolicy, StepExchange, as_matrix
from gnnautoscale.forward.plan import Plan
from gnnautoscale.forward.session import Session
from gnnautoscale.graph import BatchInfo
from gnnautoscale.kernels import OwnRows

#: How steps make up for the border of a batch.
Compensation = Literal["none", "gradient", "momentum"]


def step_exchange(compensate: Compensation, *, begins: bool = True) -> StepExchange:
    """The policy of training steps; see :class:`StepExchange`."""
    kinds = {"none": StepExchange, "gradient": GradientExchange, "momentum": MomentumExchange}
    return kinds[compensate](begins=begins)


@dataclass(eq=False)
class _Stage:
    """A slot in a pass: the rows that were computed, and those that the model went on with."""

    session: Session
    slot: str
    out: Tensor
    rows: Tensor


class GradientExchange(StepExchange):
    """A training step whose gradient goes on beyond the border of the batch; see above."""

    _stages: list[_Stage] | None = None

    def plan_for(self, session: Session) -> Plan:
        """All layers compute the halo's rows too."""
        return session.plan.closed if _goes_beyond(session) else session.plan

    def begin(self, session: Session) -> None:
        """See :meth:`StepExchange.begin`."""
        super().begin(session)
        self._stages = [] if _goes_beyond(session) else None
        if self._stages is None:
            return
        if session.repeats:
            raise UnsupportedModelError(
                "compensated steps run each layer once",
                got="the local Lipschitz penalty, which runs layers twice",
                fix="Leave the penalty out, or use compensate='none'.",
            )
        _check_halo(session.info)

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`ExchangePolicy.total`: refuses it."""
        return ExchangePolicy.total(self, session, slot, rows)

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Exchange the rows of a slot, and cut them off from what they were computed from."""
        if self._stages is None or slot not in session.plan.needs:
            return super().at_slot(session, slot, compute)
        out = compute()
        session.check_rows(slot, out)
        # At the last slots there is nothing to exchange: of their rows only the batch's own are used.
        rows = self._rows_between(session, slot, out.detach()) if slot in session.plan.live else out.detach()
        if not out.requires_grad:
            return rows
        stage = _Stage(session, slot, out, rows.requires_grad_())
        self._stages.append(stage)
        return stage.rows.clone()  # which a model may write into, unlike a leaf

    def _rows_between(self, session: Session, slot: str, out: Tensor) -> Tensor:
        """Push the batch's rows; returns them, followed by the halo's."""
        memory, own = session.memory, session.own(out)
        place, halo = memory.rows_of(session.info), slice(own.size(0), None)
        memory.transfer(session.device).finish_pushes()  # so that the batch's rows of its last step are there
        history = memory.history(slot, session.plan, session.device)
        index = place.on(session.device)[: place.batch_size]
        before = history.pull(index, device=session.device, dtype=own.dtype).view(own.shape)
        known = self._exchange(session, slot, own)
        if not own.size(0):  # of a rare type there may be none, which says nothing about others
            return known
        return torch.cat([own, between(known[halo], out[halo], before, own, neighbours(session.info))])

    def output(self, session: Session, out: Any) -> Any:
        """Connect the output to the weights that it was computed with."""
        stages, self._stages = self._stages, None
        live = [value for value in tensors_in(out) if value.requires_grad]
        if not stages or not live:
            return out
        backward = _Backward(session, stages, live)
        connected = iter(_Connect.apply(backward, *backward.weights))  # type: ignore[no-untyped-call]
        return map_tensors(lambda value: next(connected) if value.requires_grad else value, out)


class _Backward:
    """The backward pass of one step, slot by slot."""

    def __init__(self, session: Session, stages: list[_Stage], outputs: list[Tensor]) -> None:
        self._session, self._stages, self.outputs = session, stages, outputs
        inner = {id(stage.rows) for stage in stages}
        leaves = leaves_of([*outputs, *(stage.out for stage in stages)])
        #: The weights, and whatever else needs a gradient.
        self.weights = [leaf for leaf in leaves if id(leaf) not in inner]

    def run(self, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Given the gradients of the outputs, find those of the weights; gradients of the batch's rows are kept."""
        stages, self._stages = self._stages, []
        total = _Sums(self.weights)
        arrived = _Sums([stage.rows for stage in stages])
        self._differentiate(self.outputs, gradients, arrived, total)
        self.outputs = []
        # What arrives at the halo's rows lacks what their own outputs would add.
        puts_out = [gradient is not None for gradient in arrived.values]
        while stages:
            stage, gradient = stages.pop(), arrived.pop()
            gradient = torch.zeros_like(stage.rows) if gradient is None else gradient
            both, own = self._exchange(stage, gradient, puts_out.pop())
            if self._session.plan.needs[stage.slot]:
                self._differentiate([stage.out], (both,), arrived, None)
            self._differentiate([stage.out], (_padded(own, stage.out),), None, total)
        return total.values

    def _exchange(self, stage: _Stage, gradient: Tensor, puts_out: bool) -> tuple[Tensor, Tensor]:
        """Keep the gradients of the batch's rows; returns them with those of the halo's rows, and alone.

        With gradients of rows that the model puts out, the rows are kept too.
        """
        session = stage.session
        own, memory = session.own(gradient), session.memory
        if not session.plan.needs[stage.slot]:  # nothing flows on from there
            return own, own
        place = memory.rows_of(session.info)
        index, size = place.on(session.device), place.batch_size
        history = memory.last_gradient(stage.slot, session.plan, session.device, with_rows=puts_out)
        kept = history.pull(index, device=session.device, dtype=own.dtype)
        out, now = as_matrix(stage.out.detach()), as_matrix(own)
        history.push(torch.cat([now, out[:size]], dim=1) if puts_out else now, index[:size], place.runs)
        halo = self._of_halo(session, kept, now, out if puts_out else None, as_matrix(gradient)[size:])
        return torch.cat([own, halo.reshape(-1, *own.shape[1:])]), own

    def _of_halo(self, session: Session, kept: Tensor, now: Tensor, out: Tensor | None, arrived: Tensor) -> Tensor:
        """The gradients of the halo's rows, ``[num_halo, width]``; ``out`` are rows that the model puts out."""
        size, summed = now.size(0), neighbours(session.info)
        if not size:  # see GradientExchange._rows_between
            return kept[:, : arrived.size(1)]
        if out is None:
            return between(kept[size:], arrived, kept[:size], now, summed)
        gradients, rows = kept.chunk(2, dim=1)
        return moved_on(gradients, rows, out, now, summed)

    def _differentiate(
        self, outputs: list[Tensor], gradients: tuple[Tensor, ...], arrived: _Sums | None, total: _Sums | None
    ) -> None:
        """Add what flows back to rows of slots before, and to weights, as far as wanted."""
        sums = [each for each in (arrived, total) if each is not None]
        inputs = [leaf for each in sums for leaf in each.leaves]
        if not inputs:
            return
        # Slots share what the model computes of its inputs once, so nothing is freed yet.
        found = iter(torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True))
        for each in sums:
            each.add([next(found) for _ in each.leaves])


class _Sums:
    """Sums of gradients of some leaves."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self.leaves = leaves
        self.values: list[Tensor | None] = [None] * len(leaves)

    def add(self, gradients: list[Tensor | None]) -> None:
        """Add a gradient for each leaf; ``None`` is zero."""
        for place, gradient in enumerate(gradients):
            before = self.values[place]
            self.values[place] = before if gradient is None else gradient if before is None else before + gradient

    def pop(self) -> Tensor | None:
        """Take the sum of the last leaf."""
        self.leaves.pop()
        return self.values.pop()


class _Connect(torch.autograd.Function):
    """Connects outputs to weights, whose gradients :class:`_Backward` finds."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        ctx.backward_pass = backward
        return tuple(output.detach() for output in backward.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights."""
        if not ctx.backward_pass.outputs:
            raise InputError(
                "a compensated step has one backward pass",
                got="a second one",
                fix="Add the losses up and call backward() once.",
            )
        return None, *ctx.backward_pass.run(gradients)


class MomentumExchange(StepExchange):
    """A training step that moves the halo's histories towards the rows that batch and halo give, then pulls them.

    A row moves by the share of its node's neighbours that are in batch and halo.
    """

    _goes_beyond = False

    def plan_for(self, session: Session) -> Plan:
        """All layers compute the halo's rows too."""
        return session.plan.closed if _goes_beyond(session) else session.plan

    def begin(self, session: Session) -> None:
        """See :meth:`StepExchange.begin`."""
        super().begin(session)
        self._goes_beyond = _goes_beyond(session)
        if self._goes_beyond:
            _check_halo(session.info)

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`ExchangePolicy.total`: refuses it."""
        return ExchangePolicy.total(self, session, slot, rows)

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Push the batch's rows, and the halo's after they have moved; returns both."""
        if not self._goes_beyond or slot not in session.plan.live:
            return super().at_slot(session, slot, compute)
        out = compute()
        session.check_rows(slot, out)
        info, memory = session.info, session.memory
        rows = self._exchange(session, slot, session.own(out))
        if session.repeating:
            return rows
        halo = rows[info.batch_size :].detach()
        moved = halo + _as_rows(share_at_hand(info), halo) * (out.detach()[info.batch_size :] - halo)
        memory.history(slot, session.plan, session.device).push(
            as_matrix(moved), memory.rows_of(info).on(session.device)[info.batch_size :]
        )
        return torch.cat([session.own(rows), moved])


def share_at_hand(info: BatchInfo) -> Tensor:
    """The share of the edges into each node of the halo that come from batch and halo, ``[num_halo]``, float32."""
    return info.derive(info.table, lambda: _share_at_hand(info))


def _share_at_hand(info: BatchInfo) -> Tensor:
    halo = info.found.rows.cpu()
    found, degree = torch.zeros(halo.numel()), torch.zeros(halo.numel(), dtype=torch.long)
    for edges in info.incoming:
        sources = edges.sources or edges
        cut = edges.table.cut(OwnRows.of(halo)).on(torch.device("cpu"))
        numbers = edges.table.numbers.locate(cut.take(edges.table.source), sources.own, sources.found.rows.cpu())
        found.index_add_(0, cut.target, (numbers >= 0).float())
        degree += cut.ptr.diff()
    return torch.where(degree > 0, found / degree.clamp(min=1), 1.0).to(info.device)


def neighbours(info: BatchInfo) -> float:
    """How many edges point to a node of a batch, on average, but at least one."""
    return max(1.0, sum(edges.num_edges for edges in info.incoming) / max(1, info.batch_size))


def between(kept: Tensor, partial: Tensor, before: Tensor, now: Tensor, summed: float = 1.0) -> Tensor:
    """Rows between those that were kept and those that miss neighbours, by how wrong both seem to be.

    Rows that were kept are as stale as those kept ``before`` of the batch, whose rows of ``now`` are known: on average
    they have moved by some way. What moves each row by itself, such as dropout, does not count. A row that is further
    than that from the partial one differs from it by missing neighbours. So it moves by the ratio of the two squared
    distances, as in Stein's estimator: all the way if it may be that stale, and not at all if nothing is.

    A layer sums up ``summed`` rows. In the sum staleness adds up, since all rows move by the same way, while what they
    miss, each something else, averages out. Therefore staleness counts that many times.

    Args:
        kept: Rows of the halo, ``[num_halo, ...]``.
        partial: The same rows, computed from some of their neighbours, ``[num_halo, ...]``.
        before: What was kept of the batch's rows, ``[batch_size, ...]``.
        now: The batch's rows, ``[batch_size, ...]``.
        summed: How many rows a layer sums up, at least 1.

    Example:
        >>> kept, partial = torch.tensor([[0.0], [0.0]]), torch.tensor([[0.5], [2.0]])
        >>> between(kept, partial, before=torch.zeros(3, 1), now=torch.ones(3, 1)).squeeze(1)
        tensor([0.5000, 0.5000])
        >>> between(kept, partial, before=torch.zeros(3, 1), now=torch.ones(3, 1), summed=3.0).squeeze(1)
        tensor([0.5000, 1.0000])
    """
    stale = as_matrix(now - before).mean(0).square().sum()
    apart = as_matrix(partial - kept).square().sum(1) + (summed - 1.0) * stale
    share = (summed * stale / apart.clamp(min=torch.finfo(apart.dtype).tiny)).clamp(max=1.0)
    return kept + _as_rows(share, kept) * (partial - kept)


def moved_on(kept: Tensor, rows: Tensor, out: Tensor, now: Tensor, summed: float = 1.0) -> Tensor:
    """Kept gradients of the halo's outputs, moved on as far as these have moved, ``[num_halo, width]``.

    The batch tells how gradients answer to outputs: the factor, at least 0, that takes the steps of its rows nearest to
    those of their gradients. It is the curvature of the loss, if that is the same everywhere. Nodes without a kept
    gradient have no target, or were never trained on, and stay without.

    Args:
        kept: Kept gradients of batch and halo, ``[num_rows, width]``.
        rows: The outputs that these belong to, ``[num_rows, width]``.
        out: The outputs of now, of the halo as far as neighbours are there, ``[num_rows, width]``.
        now: The gradients of the batch's rows of now, ``[batch_size, width]``.
        summed: See :func:`between`.

    Example:
        >>> rows, out = torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([[2.0], [3.0], [3.0]])
        >>> moved_on(0.5 * rows, rows, out, now=0.5 * out[:2])  # of the loss x^2 / 4
        tensor([[1.5000]])
    """
    own, halo, known = slice(now.size(0)), slice(now.size(0), None), (kept != 0).any(1, keepdim=True)
    moved, turned = (known[own] * (new - old[own]) for new, old in ((out[own], rows), (now, kept)))
    factor = (moved * turned).sum() / moved.square().sum().clamp(min=torch.finfo(moved.dtype).tiny)
    there = between(rows[halo], out[halo], rows[own], out[own], summed)
    return kept[halo] + factor.clamp(min=0.0) * known[halo] * (there - rows[halo])


def _goes_beyond(session: Session) -> bool:
    """Whether a pass trains on a part of the graph."""
    return torch.is_grad_enabled() and not session.holds_all_nodes


def _check_halo(info: BatchInfo) -> None:
    if not info.bidirectional and not info.graph.is_symmetric:
        raise InputError(
            "compensation needs a halo of neighbours in both directions",
            got="a graph that is not symmetric, and a halo of nodes with edges into the batch only",
            fix="Build the loader with HaloLoader(..., bidirectional=True).",
        )


def _padded(own: Tensor, out: Tensor) -> Tensor:
    """The batch's rows, followed by as many zeros as there are other rows."""
    return own if own.size(0) == out.size(0) else torch.cat([own, torch.zeros_like(out[own.size(0) :])])


def _as_rows(values: Tensor, rows: Tensor) -> Tensor:
    """A value for each row, ``[num_rows]``, that applies to rows of any shape."""
    return values.to(rows).view(-1, *[1] * (rows.dim() - 1))
