"""Training steps that make up for the border of a batch.

In a plain step the halo's rows are constants, so the gradient ends there. A step with :class:`GradientExchange` also
computes the halo's rows, as far as their neighbours are in batch and halo, and differentiates through them:

* Forward, the rows of a slot are cut off from what they were computed from. The model goes on with the batch's rows and
  with the halo's rows as the history has them, not with those computed here, which miss neighbours.
* Backward, slots come in reverse order. The gradient of the batch's rows is complete by then, and is kept for other
  batches. That of the halo's rows is what their own batches have kept. Together they flow on to the slots before.
  Kept gradients lag behind. They count as much as those of the batch's own rows have proved right, where both are
  known; the rest is what arrives at the halo's rows in this step.
* Weights get their gradient from the batch's own rows, so that each node counts once in an epoch.

A history's row and its kept gradient belong to the whole graph, and a sum over neighbours is linear in each of them.
So with fixed weights, once nothing is stale any more, the batches' gradients add up to that of the whole graph wherever
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
from gnnautoscale.forward.exchange import StepExchange, as_matrix
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

    slot: str
    out: Tensor
    rows: Tensor


class GradientExchange(StepExchange):
    """A training step whose gradient goes on beyond the border of the batch; see above."""

    _stages: list[_Stage] | None = None

    def plan_for(self, session: Session) -> Plan:
        """The first slots depend on no others: no gradient flows on from there, so the halo's rows are not needed."""
        return session.plan.closed_above if _goes_beyond(session) else session.plan

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

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Exchange the rows of a slot, and cut them off from what they were computed from."""
        if self._stages is None or slot not in session.plan.needs:
            return super().at_slot(session, slot, compute)
        out = compute()
        session.check_rows(slot, out)
        if slot in session.plan.live:
            rows = self._exchange(session, slot, session.own(out.detach()))
        else:
            rows = session.widened(out.detach())
        if not out.requires_grad:
            return rows
        stage = _Stage(slot, out, rows.detach().requires_grad_())
        self._stages.append(stage)
        return stage.rows.clone()  # which a model may write into, unlike a leaf

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
        while stages:
            stage, gradient = stages.pop(), arrived.pop()
            gradient = torch.zeros_like(stage.rows) if gradient is None else gradient
            both, own = self._exchange(stage, gradient)
            if both.size(0) == own.size(0):
                self._differentiate([stage.out], (own,), arrived, total)
            else:
                self._differentiate([stage.out], (both,), arrived, None)
                self._differentiate([stage.out], (_padded(own, both),), None, total)
        return total.values

    def _exchange(self, stage: _Stage, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the gradients of the batch's rows; returns them with those of the halo's rows, and alone."""
        session = self._session
        own = session.own(gradient)
        if stage.out.size(0) == own.size(0):
            return own, own
        place = session.memory.rows_of(session.info)
        index = place.on(session.device)
        history = session.memory.last_gradient(stage.slot, session.plan, session.device)
        kept = history.pull(index, device=session.device, dtype=own.dtype).view(-1, *own.shape[1:])
        history.push(as_matrix(own), index[: place.batch_size], place.runs)
        arrived, trust = gradient[place.batch_size :], _trust(session.own(kept), own)
        return torch.cat([own, arrived.lerp(kept[place.batch_size :], trust)]), own

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
    cut = info.table.cut(OwnRows.of(halo)).on(torch.device("cpu"))
    there = info.table.numbers.locate(cut.take(info.table.source), info.own, halo) >= 0
    found = torch.zeros(halo.numel()).index_add_(0, cut.target, there.float())
    degree = cut.ptr.diff()
    return torch.where(degree > 0, found / degree.clamp(min=1), 1.0).to(info.device)


def _trust(kept: Tensor, now: Tensor) -> Tensor:
    """How far to trust kept gradients, from 0 to 1: less by the relative change of those kept of the batch's own rows.

    It is 1 if nothing changes, and 0 as long as nothing is kept.
    """
    change: Tensor = torch.linalg.vector_norm(now - kept) / torch.linalg.vector_norm(now).clamp(min=1e-30)
    return (1.0 - change).clamp(min=0.0)


def _goes_beyond(session: Session) -> bool:
    """Whether a pass trains on a part of the graph."""
    return torch.is_grad_enabled() and session.info.batch_size < session.memory.num_nodes


def _check_halo(info: BatchInfo) -> None:
    if not info.bidirectional and not info.graph.is_symmetric:
        raise InputError(
            "compensation needs a halo of neighbours in both directions",
            got="a graph that is not symmetric, and a halo of nodes with edges into the batch only",
            fix="Build the loader with HaloLoader(..., bidirectional=True).",
        )


def _padded(own: Tensor, both: Tensor) -> Tensor:
    """The batch's rows, followed by zeros."""
    return torch.cat([own, torch.zeros_like(both[own.size(0) :])])


def _as_rows(values: Tensor, rows: Tensor) -> Tensor:
    """A value for each row, ``[num_rows]``, that applies to rows of any shape."""
    return values.to(rows).view(-1, *[1] * (rows.dim() - 1))
