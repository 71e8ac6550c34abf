"""The kinds of exact steps that a model has made, and what is captured of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in
from gnnautoscale.attach import Autoscaler, attached
from gnnautoscale.exact.captured import CapturedSweeps
from gnnautoscale.forward import Stage
from gnnautoscale.graph import UnreadRows


class StepKind:
    """What the first step of a kind has shown, and the captured passes of later ones."""

    def __init__(self) -> None:
        self.key: Hashable = None
        #: The slots and the attributes of nodes that each stage reads.
        self.reads: dict[Stage, tuple[frozenset[str], set[str]]] = {}
        #: Where random numbers were drawn.
        self.places: set[str] = set()
        #: The type and shape of a row of each output, and how the output is made of them.
        self.outputs: list[tuple[torch.dtype, torch.Size]] = []
        self.structure: Any = None
        #: The numbers of the weights that have a gradient, and where captured passes add it up.
        self.learned: frozenset[int] | None = None
        self.sums: dict[int, Tensor] = {}
        self.replays: CapturedSweeps | None = None
        self.why_not: str | None = None

    def note(self, stage: Stage, slots: frozenset[str], batch: Data, out: Any) -> None:
        """Note what a pass of a stage has read and returned."""
        values = (item for store in batch.stores for item in store.items())
        names = {name for name, value in values if isinstance(value, UnreadRows) and value.was_read}
        self.reads[stage] = slots, self.reads.get(stage, (slots, names))[1] | names
        if out is not None and not self.outputs:
            self.outputs = [(value.dtype, value.shape[1:]) for value in tensors_in(out)]
            self.structure = map_tensors(lambda value: value.detach()[:0].cpu(), out)


# The last kinds of steps of each model, at most one of them captured.
KEPT: WeakKeyDictionary[Autoscaler, list[StepKind]] = WeakKeyDictionary()


def forget_captured(model: nn.Module) -> None:
    """Free what the exact passes of a model keep on the GPU."""
    KEPT.pop(attached(model), None)
