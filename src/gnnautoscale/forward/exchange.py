"""What happens at a slot: the policies that a session follows, and the rows they read and write.

At a slot the batch's rows leave the model and the halo's rows enter it. A policy decides where they go and come from.
Training steps move rows through a transfer; everything else reads and writes a store of rows: histories as they are,
exact rows, or nothing at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gnnautoscale.forward.session import Session


class ExchangePolicy(ABC):
    """Decides what is pushed and pulled at each slot of a forward pass."""

    def begin(self, session: Session) -> None:
        """Called before the model runs."""
        return

    @abstractmethod
    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Called in place of what a slot computes.

        Args:
            session: The pass.
            slot: The slot's name.
            compute: Computes its rows, ``[num_rows, ...]`` or for the batch alone ``[batch_size, ...]``.

        Returns:
            The rows that the model goes on with.
        """

    def end(self, session: Session) -> None:
        """Called after the model has run."""
        return


class StepExchange(ExchangePolicy):
    """A training step: the batch's rows are pushed to histories, the halo's are pulled and constant to autograd.

    Args:
        push_all: Push even rows that no other batch can pull.
        begins: Whether the session begins and completes the step; if not, its caller does.
    """

    def __init__(self, *, push_all: bool = False, begins: bool = True) -> None:
        self._push_all, self._begins = push_all, begins

    def begin(self, session: Session) -> None:
        """Start to move the rows that the step needs."""
        if self._begins:
            transfer = session.memory.transfer(session.device)
            session.memory.begin(session.info, transfer)
            transfer.look_ahead()

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Push the batch's rows and return them with the halo's behind them."""
        out = compute()
        if not is_exchanged(session, slot, push_all=self._push_all):
            return session.widened(out)
        session.check_rows(slot, out)
        rows, memory = session.own(out), session.memory
        push = not session.repeating
        if push:
            memory.mark_changed()
        history = memory.history(slot, rows)
        full = memory.transfer(session.device).exchange(slot, history, flat(rows), push=push)
        return full if out.dim() == 2 else full.view(-1, *out.shape[1:])

    def end(self, session: Session) -> None:
        """Let the pushed rows leave."""
        transfer = session.memory.transfer(session.device)
        transfer.end()
        if self._begins:
            transfer.complete()


class RowStore(ABC):
    """Rows of all nodes at every slot, wherever they are."""

    @abstractmethod
    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """Some rows of a batch.

        Args:
            session: The pass over the batch.
            slot: The slot's name.
            which: Which rows of batch and halo.
            like: Rows of the shape, type and device that are wanted, ``[any, ...]``.
        """

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """Keep the batch's rows, ``[batch_size, ...]``; by default they are not kept."""
        return


class HistoryStore(RowStore):
    """The histories themselves, read and written at once and in order.

    Args:
        writes: Whether rows are written.
    """

    def __init__(self, *, writes: bool = True) -> None:
        self._writes = writes

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`; rows that were never written are zero."""
        index = session.memory.rows_of(session.info).on(session.device)[which]
        if slot not in session.memory.histories:
            return like.new_zeros((index.numel(), *like.shape[1:]))
        rows = session.memory.histories[slot].pull(index, device=session.device, dtype=like.dtype)
        return rows.view(-1, *like.shape[1:])

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        if not self._writes:
            return
        memory, rows = session.memory, rows.detach()
        memory.mark_changed()
        place = memory.rows_of(session.info)
        memory.history(slot, rows).push(flat(rows), place.index[: place.batch_size], place.runs)


class StoreExchange(ExchangePolicy):
    """A step that reads the halo's rows from a store, and writes the batch's to it.

    Args:
        store: The rows.
        push_all: Exchange even rows that no other batch can pull.
    """

    def __init__(self, store: RowStore, *, push_all: bool = False) -> None:
        self._store, self._push_all = store, push_all

    def begin(self, session: Session) -> None:
        """Wait for training steps whose rows are still on their way."""
        session.memory.settle()

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Write the batch's rows and return them with the halo's behind them."""
        out = compute()
        if not is_exchanged(session, slot, push_all=self._push_all):
            return session.widened(out)
        session.check_rows(slot, out)
        rows = session.own(out)
        if not session.repeating:
            self._store.write(session, slot, rows)
        halo = slice(session.info.batch_size, None)
        return torch.cat([rows, self._store.read(session, slot, halo, rows)]) if session.info.num_halo else rows


class EndOfPass(BaseException):
    """Ends a forward pass early, once a policy has what it wanted."""


class PlanOnly(ExchangePolicy):
    """Ends a pass before it begins: all that is wanted is the plan, which a model's first call makes."""

    def begin(self, session: Session) -> None:
        """End the pass."""
        raise EndOfPass

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Never called."""
        raise EndOfPass


def run_pass(run: Callable[[], Any]) -> Any:
    """Call a model; returns its output, or ``None`` if its policy ended the pass early."""
    try:
        return run()
    except EndOfPass:
        return None


def is_exchanged(session: Session, slot: str, *, push_all: bool) -> bool:
    """Whether another slot reads a slot's rows, and another batch may pull them (or all are to be pushed)."""
    alone = session.info.batch_size == session.memory.num_nodes and not push_all
    return slot in session.plan.live and not alone


def flat(rows: Tensor) -> Tensor:
    """Rows of any shape as rows of a matrix."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
