"""Evaluates a model over all batches level by level, each from histories that hold the level below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.plan import Plan
from gnnautoscale.forward.session import Session, flat
from gnnautoscale.graph import BatchInfo
from gnnautoscale.transfer import DirectTransfer


class _SweepDone(BaseException):
    """Ends a forward pass once the slots of a level are pushed."""


class Sweep(Session):
    """Evaluates one level of slots, or the output, from the levels below it, which are read from histories.

    Args:
        level: The slots to compute and push; ``None`` computes the model's output.
    """

    def __init__(
        self, info: BatchInfo, plan: Plan, memory: GraphMemory, device: torch.device, *, level: frozenset[str] | None
    ) -> None:
        super().__init__(info, plan, memory, device)
        self._transfer = DirectTransfer()
        self._level = level
        self._missing = set(level or ())
        wanted = level if level is not None else plan.needs.keys() - self.plan.live
        self._needed = frozenset().union(*(plan.needs[slot] for slot in wanted))
        self._depth = plan.levels.index(level) if level is not None else len(plan.levels)
        self._done = frozenset().union(*plan.levels[: self._depth])

    def begin(self) -> None:
        """Sweeps read and write in order, after all training steps."""
        self.memory.settle()
        super().begin()

    def slot(self, slot: str, compute: Callable[[], Any]) -> Any:
        """Read the rows of slots below the level, compute and push those of the level, leave out the rest."""
        if slot in self._done and slot in self._needed:
            return self.pull(slot, self._rows(slot, 0))
        later = self._level is not None and slot in self.plan.needs and slot not in self._level
        holds_missing = any(missing.startswith(f"{slot}>") for missing in self._missing)
        if slot in self._done or (later and not holds_missing):
            # Nothing that this sweep computes depends on these rows.
            return self._rows(slot, 0 if self.plan.skip_empty else self.info.num_rows)
        out = compute()
        if slot not in self._missing:
            return self._widened(out)
        self._check_rows(slot, out)
        self.push(slot, out)
        self._missing.discard(slot)
        if not self._missing:
            raise _SweepDone
        return out

    def push(self, slot: str, out: Tensor) -> None:
        """Write the batch's rows."""
        rows = out[: self.info.batch_size].detach()
        self.memory.mark_changed()
        place = self.memory.rows_of(self.info)
        index = place.index[: self.info.batch_size]
        self.memory.history(slot, rows).push(flat(rows), index, place.runs)

    def pull(self, slot: str, like: Tensor) -> Tensor:
        """Read the rows of batch and halo, in shape and type like the given ones."""
        place = self.memory.rows_of(self.info)
        rows = self.memory.history(slot, like).pull(place.on(self.device), device=self.device, dtype=like.dtype)
        return rows.view(-1, *like.shape[1:])

    def _rows(self, slot: str, count: int) -> Tensor:
        rows = self.plan.rows[slot]
        return torch.zeros((count, *rows.shape[1:]), dtype=rows.dtype, device=self.device)


def run_sweep(run: Callable[[], Any]) -> Any:
    """Call the model in a sweep; returns its output, or ``None`` if it ended at the sweep's level."""
    try:
        return run()
    except _SweepDone:
        return None
