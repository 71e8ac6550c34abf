"""Evaluates a model over all batches, one level of slots at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnautoscale._util import is_capturing
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.exchange import EndOfPass, ExchangePolicy, HistoryStore, RowStore
from gnnautoscale.forward.session import Session


class SweepExchange(ExchangePolicy):
    """Computes one level of slots, or for ``None`` the output: reads the levels below it and skips those above it.

    It reads and writes the rows of ``store``, by default the histories.
    """

    skips = True

    def __init__(self, level: frozenset[str] | None, store: RowStore | None = None) -> None:
        self._level, self._store = level, store or HistoryStore()

    def begin(self, session: Session) -> None:
        """Wait for training steps, and start to read what the next pass needs."""
        if not is_capturing():
            session.memory.settle()  # nothing moves while a pass is captured
        self._sort(session)
        session.memory.prepare_edges(session.info.upcoming, session.plan.calls, gradients=torch.is_grad_enabled())
        self._store.look_ahead(session, self._done & self._needed & session.plan.live)

    def _sort(self, session: Session) -> None:
        """Sort the slots into read, computed and skipped ones."""
        plan, level = session.plan, self._level
        self._missing = set(level or ())
        wanted = level if level is not None else plan.needs.keys() - plan.live
        self._needed: frozenset[str] = frozenset().union(*(plan.needs[slot] for slot in wanted))
        depth = plan.levels.index(level) if level is not None else len(plan.levels)
        self._done: frozenset[str] = frozenset().union(*plan.levels[:depth])

    def computes(self, session: Session, slot: str) -> bool:
        """See :meth:`ExchangePolicy.computes`."""
        later = self._level is not None and slot in session.plan.needs and slot not in self._level
        holds_missing = any(missing.startswith(f"{slot}>") for missing in self._missing)
        return slot not in self._done and (not later or holds_missing)

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        """Read, compute and write, or skip a slot."""
        if slot in self._done and slot in self._needed:
            return self._store.read(session, slot, slice(None), _zeros(session, slot, 0))
        if not self.computes(session, slot):
            return self.skipped(session, slot)
        out = compute()
        if slot not in self._missing:
            return session.widened(out)
        session.check_rows(slot, out)
        self._store.write(session, slot, session.own(out))
        self._missing.discard(slot)
        if not self._missing:
            raise EndOfPass
        return out

    def total(self, session: Session, slot: str, rows: Tensor) -> Tensor:
        """See :meth:`ExchangePolicy.total`; only known once a sweep has written all rows."""
        return self._store.total(session, slot, rows) if slot in self._done else rows.sum(0)

    def skipped(self, session: Session, slot: str) -> Tensor:
        """Rows that nothing depends on that this sweep computes."""
        return _zeros(session, slot, 0 if session.plan.skip_empty else session.info.num_rows)

    def end(self, session: Session) -> None:
        """Called at the end of the model, which a sweep over slots does not reach if it finds them all."""
        if self._missing:
            raise UnsupportedModelError(
                "an autoscaled model calls the same layers in every forward pass",
                got=f"a pass without '{sorted(self._missing)[0]}', which ran when the model was tried",
                fix="Call every layer every time: without edges it adds nothing to its messages.",
            )


def _zeros(session: Session, slot: str, count: int) -> Tensor:
    rows = session.plan.rows[slot]
    return torch.zeros((count, *rows.shape[1:]), dtype=rows.dtype, device=session.device)
