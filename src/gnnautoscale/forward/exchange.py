"""What happens at a slot: the policies that a session follows, and the rows they read and write.

At a slot the batch's rows leave the model and the halo's rows enter it. A policy decides where they go and come from.
Training steps move rows through a transfer; other passes read and write a :class:`RowStore`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.graph import BatchInfo, hand_over
from gnnautoscale.history import History
from gnnautoscale.kernels import Runs

if TYPE_CHECKING:
    from gnnautoscale.forward.plan import Plan
    from gnnautoscale.forward.session import Session


class ExchangePolicy(ABC):
    """Decides what is pushed and pulled at each slot of a forward pass."""

    #: Whether some layers are not run, because their rows are known or nothing needs them.
    skips = False

    def plan_for(self, session: Session) -> Plan:
        """Called first of all, with a session that has the model's plan; returns the plan to follow."""
        return session.plan

    def begin(self, session: Session) -> None:
        """Called before the model runs."""
        return

    def computes(self, session: Session, slot: str) -> bool:
        """Whether :meth:`at_slot` will need the rows of a slot."""
        return True

    @abstractmethod
    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Called in place of the computation of a slot; returns the rows that the model continues with.

        ``compute`` gives the slot's rows, ``[num_rows, ...]``, or for the batch alone ``[batch_size, ...]``.
        """

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """Called before :meth:`at_slot` if a slot's rows are added up over all nodes; returns that sum, ``[...]``.

        ``rows`` are the batch's own, ``[batch_size, ...]``.
        """
        raise UnsupportedModelError(
            "only plain steps know the rows of all nodes that a model adds up",
            got=f"an exact or compensated one, and a sum in '{slot.split(' over all nodes')[0]}'",
            fix="Leave that out: use mode 'gas' and compensate='none'.",
        )

    def run_layer(self, session: Session, call: str, compute: Callable[[], Any]) -> Any:
        """Called in place of a layer whose rows become a part of a slot later on; returns what it computes."""
        return compute()

    def end(self, session: Session) -> None:
        """Called after the model has run."""
        return

    def output(self, session: Session, out: Any) -> Any:
        """Called at last with the batch's rows of the model's output, nested; returns those that the caller gets."""
        return out


class _SlotExchange(ExchangePolicy):
    """Exchanges the rows of live slots; with ``push_all`` even those that no other batch can pull."""

    def __init__(self, *, push_all: bool = False) -> None:
        self._push_all = push_all

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Push the batch's rows and return them, followed by the halo's."""
        out = compute()
        alone = session.holds_all_nodes and not self._push_all
        if alone or slot not in session.plan.live:
            return session.widened(out)
        session.check_rows(slot, out)
        return self._exchange(session, slot, session.own(out))

    @abstractmethod
    def _exchange(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """Push rows, ``[batch_size, ...]``; returns them followed by the halo's."""


class StepExchange(_SlotExchange):
    """A training step: pushes the batch's rows to histories and pulls the halo's, which are constants to autograd.

    If it does not begin and complete the step (``begins``), the session's caller must.
    """

    def __init__(self, *, push_all: bool = False, begins: bool = True) -> None:
        super().__init__(push_all=push_all)
        self._begins = begins

    def begin(self, session: Session) -> None:
        """Start moving the rows that the step needs."""
        if self._begins:
            transfer = session.memory.transfer(session.device)
            session.memory.begin(session.info, transfer)
            session.memory.prepare_edges(session.info.upcoming, session.plan.calls, gradients=torch.is_grad_enabled())
            transfer.look_ahead()

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`ExchangePolicy.total`; the batch's rows replace those that its nodes had before."""
        others = session.memory.replace_in_total(slot, session.plan, session.info, as_matrix(rows), session.device)
        return others.view(rows.shape[1:]) + rows.sum(0)

    def _exchange(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        memory, push = session.memory, not session.repeating
        if push:
            memory.mark_changed()
        history = memory.history(slot, session.plan, session.device)
        full = memory.transfer(session.device).exchange(slot, history, as_matrix(rows), push=push)
        return full if rows.dim() == 2 else full.view(-1, *rows.shape[1:])

    def end(self, session: Session) -> None:
        """Send the pushed rows off."""
        transfer = session.memory.transfer(session.device)
        transfer.end()
        if self._begins:
            transfer.complete()


class RowStore:
    """Rows of all nodes at every slot; this one holds zeros and ignores what is written."""

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """Read rows of a batch: ``which`` of those of batch and halo, with the shape, type and device of ``like``."""
        count = len(range(session.info.num_rows)[which])
        return like.new_zeros((count, *like.shape[1:]))

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """Write the batch's rows, ``[batch_size, ...]``."""

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """The sum of a slot's rows over all nodes; see :meth:`ExchangePolicy.total`."""
        return rows.sum(0)

    def look_ahead(self, session: Session, slots: Iterable[str]) -> None:
        """Start to read all rows of some slots for the batch that is likely to follow."""
        return

    def share(self, memory: Any, slots: Iterable[str]) -> None:
        """Give other processes that have a share of the graph the rows of slots that they need, and receive theirs."""
        return


class HistoryStore(RowStore):
    """The histories, accessed directly instead of through a transfer; only read unless it ``writes``."""

    def __init__(self, *, writes: bool = True) -> None:
        self._writes = writes

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`; rows that were never written are zero."""
        index = session.memory.rows_of(session.info).on(session.device)[which]
        if slot not in session.memory.histories:
            return super().read(session, slot, which, like)
        rows = session.memory.histories[slot].pull(index, device=session.device, dtype=like.dtype)
        return rows.view(-1, *like.shape[1:])

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        """See :meth:`RowStore.write`."""
        if not self._writes:
            return
        memory = session.memory
        memory.mark_changed()
        memory.totals.pop(slot, None)
        place, history = memory.rows_of(session.info), memory.history(slot, session.plan, session.device)
        self._push(history, as_matrix(rows.detach()), place.on(rows.device)[: place.batch_size], place.runs)

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`RowStore.total`."""
        memory = session.memory
        if slot not in memory.histories:
            return super().total(session, slot, rows)
        before = self.read(session, slot, slice(session.info.batch_size), rows.detach())
        total = memory.total(slot, session.plan, session.device).view(rows.shape[1:])
        return total + (rows - before).sum(0)

    def _push(self, history: History, rows: Tensor, where: Tensor, runs: Runs) -> None:
        """Write rows of a batch, ``[batch_size, width]``, to a history."""
        history.push(rows, where, runs)

    def share(self, memory: Any, slots: Iterable[str]) -> None:
        """See :meth:`RowStore.share`."""
        memory.share(slots)


class StreamedStore(HistoryStore):
    """The histories, read ahead and written behind on streams of a GPU beside the one that computes.

    What is read ahead must not be written until :meth:`settle`; a sweep reads one level and writes another.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._reads, self._writes_behind = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._ahead: dict[tuple[BatchInfo, str], tuple[Tensor, torch.cuda.Event]] = {}

    def look_ahead(self, session: Session, slots: Iterable[str]) -> None:
        """See :meth:`RowStore.look_ahead`."""
        upcoming = session.info.upcoming
        if upcoming is None:
            return
        place = session.memory.rows_of(upcoming)
        index = place.on(session.device)
        if place.ready is not None and index is place.index:
            self._reads.wait_event(place.ready)
        else:  # it may have just been copied
            self._reads.wait_stream(torch.cuda.current_stream(session.device))
        index.record_stream(self._reads)
        with torch.cuda.stream(self._reads):
            for slot in slots:
                rows = session.memory.histories[slot].pull(
                    index, device=session.device, dtype=session.plan.rows[slot].dtype
                )
                self._ahead[upcoming, slot] = rows, self._reads.record_event()

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        """See :meth:`RowStore.read`."""
        rows, arrived = self._ahead.pop((session.info, slot), (None, None))
        if rows is None or arrived is None:
            return super().read(session, slot, which, like)
        hand_over([rows], arrived)
        return rows[which].view(-1, *like.shape[1:])

    def _push(self, history: History, rows: Tensor, where: Tensor, runs: Runs) -> None:
        self._writes_behind.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._writes_behind):
            super()._push(history, rows, where, runs)
        for used in (rows, where):
            used.record_stream(self._writes_behind)

    def share(self, memory: Any, slots: Iterable[str]) -> None:
        """See :meth:`RowStore.share`; what is read ahead from now on sees the rows of other processes."""
        super().share(memory, slots)
        self._reads.wait_stream(torch.cuda.current_stream(self._reads.device))

    def settle(self, device: torch.device) -> None:
        """Let everything that follows see all rows that were written."""
        self._ahead.clear()
        for stream in (self._reads, torch.cuda.current_stream(device)):
            stream.wait_stream(self._writes_behind)


class StoreExchange(_SlotExchange):
    """A step that reads the halo's rows from a store and writes the batch's rows to it."""

    def __init__(self, store: RowStore, *, push_all: bool = False) -> None:
        super().__init__(push_all=push_all)
        self._store = store

    def begin(self, session: Session) -> None:
        """Wait for the pushes of earlier training steps."""
        session.memory.settle()

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`ExchangePolicy.total`."""
        return self._store.total(session, slot, rows)

    def _exchange(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        if not session.repeating:
            self._store.write(session, slot, rows)
        halo = slice(session.info.batch_size, None)
        return torch.cat([rows, self._store.read(session, slot, halo, rows)]) if session.info.num_halo else rows


class EndOfPass(BaseException):
    """Ends a forward pass early, once its policy is done."""


class PlanOnly(ExchangePolicy):
    """Ends a pass before the model runs; by then its plan has been made."""

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


def as_matrix(rows: Tensor) -> Tensor:
    """Rows of any shape as a matrix, ``[num_rows, width]``."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
