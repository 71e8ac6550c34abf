"""Counts the rows that training steps pull and push, and their age.

Nothing here waits for a GPU or takes part in a captured step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnautoscale.graph import BatchInfo, TypedInfo

# Steps that are counted together, at most.
_MOST_WAITING = 256


class Flow:
    """Follows which rows of histories steps pull and push, part by part.

    A batch consists of parts, so all rows of a part are written at the same time. ``labels`` holds the part of each
    node, ``[num_nodes]``, and ``steps`` counts steps. Of several ranks ``own`` are the parts of this one, and rows of
    the others arrive as many passes late as ``lag`` says.
    """

    def __init__(self, labels: Tensor, *, own: range | None = None, lag: int = 0) -> None:
        self._labels = labels
        self._own = range(int(labels.max()) + 1) if own is None else own
        self.steps = 0
        # Parts whose rows are on their way from other ranks, and the step that they were written in.
        self._lag, self._arriving = lag, deque[tuple[list[int], int]]()
        # The step after which each part's rows were written last; -1 for never.
        self._written = np.full(int(labels.max()) + 1, -1)
        self._sums: Counter[str] = Counter()
        # Steps that are not counted yet; counting many of them at a time is much faster.
        self._waiting: list[tuple[_Parts, bool, list[tuple[list[int], int]]]] = []

    def step(
        self, info: BatchInfo | TypedInfo, *, skips_shared: bool = False, elsewhere: list[int] | None = None
    ) -> None:
        """Count a step; with ``skips_shared`` it found the rows that the step before it wrote without a pull.

        Meanwhile other ranks wrote rows of the parts ``elsewhere``.
        """
        self.steps += 1
        self._waiting.append((self._parts(info), skips_shared, self._arrived(elsewhere)))
        if len(self._waiting) >= _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        sums = self._sums
        first = self.steps - len(self._waiting) + 1
        for step, (batch, skips_shared, arrived) in enumerate(self._waiting, start=first):
            written, rows, hits = self._written[batch.halo], batch.rows, batch.num_halo
            if hits and written.min() < 0:
                known = written >= 0
                written, rows = written[known], rows[known]
                hits = int(rows.sum())
            ages = step - written
            moved = batch.num_halo - (int(rows[ages == 1].sum()) if skips_shared else 0)
            sums.update(pulled=batch.num_halo, moved=moved, pushed=batch.batch_size, hits=hits, ages=int(rows @ ages))
            sums["oldest"] = max(sums["oldest"], int(ages.max(initial=0)))
            self._written[batch.own] = step
            for parts, written_in in arrived:
                self._written[parts] = written_in
        self._waiting.clear()

    def _arrived(self, elsewhere: list[int] | None) -> list[tuple[list[int], int]]:
        """Send parts of other ranks on their way, and take what has arrived before the next pass."""
        self._arriving.append((elsewhere or [], self.steps))
        return [self._arriving.popleft() for _ in range(len(self._arriving) - self._lag)]

    def refreshed(self, info: BatchInfo | TypedInfo | None = None, *, elsewhere: list[int] | None = None) -> None:
        """Note that the rows of a batch, or all of them, were written after the last step; see :meth:`step`."""
        self._count()
        self._written[slice(None) if info is None else self._parts(info).own] = self.steps
        for parts, written_in in self._arrived(elsewhere) if info is not None else []:
            self._written[parts] = written_in

    def oldest(self, count: int) -> list[int]:
        """The parts whose rows were written longest ago, or never; of several, those with the lowest numbers.

        Of several ranks they are those of this one, counted from its first.
        """
        self._count()
        return [
            int(part) for part in np.argsort(self._written[self._own.start : self._own.stop], kind="stable")[:count]
        ]

    def ages(self) -> Tensor:
        """The age of each node's rows in steps as the next step finds them, -1 if never written, ``[num_nodes]``."""
        self._count()
        ages = np.where(self._written >= 0, self.steps + 1 - self._written, -1)
        return torch.from_numpy(ages)[self._labels]

    def taken(self, row_bytes: int, everyone: Callable[[Any], list[Any]] = lambda value: [value]) -> dict[str, Any]:
        """What steps moved since the last call, if anything; a node has ``row_bytes`` in all histories together.

        Of several ranks ``everyone`` gathers the values of each.
        """
        self._count()
        found, self._sums = everyone(dict(self._sums)), Counter()
        sums = Counter({"oldest": max(each.get("oldest", 0) for each in found)})
        for each in found:
            sums.update({name: value for name, value in each.items() if name != "oldest"})
        if not sums["pulled"]:
            return {}
        hits = sums["hits"]
        return {
            "pulled_bytes": sums["moved"] * row_bytes,
            "pushed_bytes": sums["pushed"] * row_bytes,
            "hit_ratio": hits / sums["pulled"],
            "age": {"mean": sums["ages"] / hits, "max": sums["oldest"]} if hits else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, for which all rows that are on their way have to arrive."""
        self._count()
        while self._arriving:
            parts, written_in = self._arriving.popleft()
            self._written[parts] = written_in
        return {"steps": self.steps, "written": torch.from_numpy(self._written.copy()), "sums": dict(self._sums)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a checkpoint; if it has no such state, all rows count as written just now."""
        if state is None:
            self.refreshed()
            return
        self.steps, self._sums = state["steps"], Counter(state["sums"])
        self._written[:] = state["written"].numpy()

    def _parts(self, batch: BatchInfo | TypedInfo) -> _Parts:
        info = batch.joined if isinstance(batch, TypedInfo) else batch

        def count() -> _Parts:
            rows = torch.bincount(self._labels[info.halo])
            own, halo = (counts.nonzero().squeeze(1) for counts in (torch.bincount(self._labels[info.nodes]), rows))
            return _Parts(own.numpy(), halo.numpy(), rows[halo].numpy(), info.batch_size, info.num_halo)

        return info.derive(self, count)


class _Parts(NamedTuple):
    """A batch's own parts, those of its halo, the number of halo nodes in each of these, and both totals."""

    own: Any
    halo: Any
    rows: Any
    batch_size: int
    num_halo: int
