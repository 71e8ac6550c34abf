"""Draws parts into the batches of epochs."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

#: The parts of one batch.
PartGroup: TypeAlias = tuple[int, ...]


class PartDrawing:
    """Draws parts into batches, epoch by epoch, and knows where an epoch was left off.

    Args:
        num_parts: Number of parts.
        batch_size: Number of parts in a batch.
        num_batches: Number of batches of an epoch, over which parts are spread as evenly as possible; by default all
            batches but the last are full.
        shuffle: Draw at random, anew for each epoch.
        drawings: Draw this many times only, then reuse these drawings at random; ``None`` draws for every epoch.
        seed: Makes drawings reproducible.

    Example:
        >>> PartDrawing(4, 2).epoch()
        [(0, 1), (2, 3)]
    """

    def __init__(
        self,
        num_parts: int,
        batch_size: int,
        num_batches: int | None = None,
        *,
        shuffle: bool = False,
        drawings: int | None = None,
        seed: int = 0,
    ) -> None:
        self._num_parts, self._batch_size, self._num_batches = num_parts, batch_size, num_batches
        self._shuffle, self._drawings = shuffle, drawings
        self._generator = torch.Generator().manual_seed(seed)
        self._current: list[PartGroup] = []
        self._left_off = 0
        self._ahead: list[PartGroup] | None = None
        self._drawn: list[list[PartGroup]] = []

    def in_order(self, together: int = 1) -> list[PartGroup]:
        """The batches of a sweep, so many of them ``together``: always the same."""
        return self._grouped(torch.arange(self._num_parts), together)

    def draw(self) -> list[PartGroup]:
        """Draw the parts into an epoch's batches; returns the parts of each batch."""
        if not self._shuffle:
            return self.in_order()
        if len(self._drawn) == self._drawings:
            known = self._drawn[int(torch.randint(self._drawings, (), generator=self._generator))]
            return [known[place] for place in torch.randperm(len(known), generator=self._generator).tolist()]
        groups = self._grouped(torch.randperm(self._num_parts, generator=self._generator))
        if self._drawings is not None:
            self._drawn.append(groups)
        return groups

    def epoch(self) -> list[PartGroup]:
        """The batches of the next epoch, or those that are left of one that was left off."""
        if self._left_off:
            first, self._left_off = self._left_off, 0
        else:
            first, self._current, self._ahead = 0, self._ahead or self.draw(), None
        return self._current[first:]

    def first_of_next_epoch(self) -> PartGroup:
        """The batch that the next epoch begins with, which is drawn by that."""
        self._ahead = self._ahead or self.draw()
        return self._ahead[0]

    def state_dict(self, done: int) -> dict[str, Any]:
        """State for a checkpoint, after so many batches of the current epoch were ``done``."""
        return {
            "done": done,
            "current": _flat(self._current if done else []),
            "ahead": _flat(self._ahead or []),
            "drawn": [_flat(groups) for groups in self._drawn],
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that would have come next when the state was taken."""
        current = _groups(state["current"])
        # In an epoch that is one exact step, none is drawn.
        if type(state["done"]) is not int or not 0 <= state["done"] <= (len(current) or 1):
            raise ValueError(f"{state['done']} of {len(current)} batches are done")
        self._left_off, self._current = state["done"], current
        self._ahead = _groups(state["ahead"]) or None
        self._drawn = [_groups(flat) for flat in state["drawn"]]
        self._generator.set_state(state["generator"])

    def _grouped(self, order: Tensor, together: int = 1) -> list[PartGroup]:
        parts, size = order.tolist(), self._batch_size
        ends = [*range(size, len(parts), size), len(parts)]
        if self._num_batches is not None:
            # Larger ones first on all ranks, which wait for the largest batch of a step.
            least, larger = divmod(len(parts), self._num_batches)
            ends = [(number + 1) * least + min(number + 1, larger) for number in range(self._num_batches)]
        ends = [*ends[together - 1 : -1 : together], len(parts)]
        # Sorted within a batch, so that the same parts give the same batch whatever the order of drawing.
        return [tuple(sorted(parts[first:end])) for first, end in zip([0, *ends], ends, strict=False)]


def _flat(groups: list[PartGroup]) -> tuple[Tensor, Tensor]:
    """The parts of all batches in one tensor, and the number of parts of each batch."""
    parts = torch.tensor([part for group in groups for part in group], dtype=torch.long)
    return parts, torch.tensor([len(group) for group in groups], dtype=torch.long)


def _groups(flat: tuple[Tensor, Tensor]) -> list[PartGroup]:
    parts, sizes = flat
    return [tuple(group.tolist()) for group in torch.split(parts, sizes.tolist())] if sizes.numel() else []
