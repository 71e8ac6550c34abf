"""The steps that ranks make together: on which parts each of them trains in every one, known in advance.

Which parts these are is exchanged once, when batches are drawn. So in a step both sides know which rows travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from gnnautoscale.errors import InputError
from gnnautoscale.kernels import Runs
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import World
from gnnautoscale.transfer import BatchRows

#: The parts of one batch, as its rank numbers them.
Group = tuple[int, ...]


class Steps:
    """The steps of an epoch over the batches of one loader, whatever models are trained on them."""

    def __init__(self, shard: Shard | TypedShard, world: World) -> None:
        self.shard, self.world = shard, world
        #: How often batches were drawn so far.
        self.epoch = 0
        #: The parts of all ranks in the last step, or pass beside the steps.
        self.groups: list[Group] = []
        # The groups of all ranks in each step of the epoch, and the step of each of this rank's batches.
        self._steps: list[list[Group]] = []
        self._step_of: dict[tuple[object, ...], int] = {}
        self._last = -1
        self._aside: list[Group] | None = None

    def announce(self, groups: Sequence[Group], runs: Sequence[Mapping[str, Runs]]) -> None:
        """Tell all ranks which parts this one trains on in each step of an epoch, and learn theirs.

        ``runs`` are the rows of these batches, by type.
        """
        everyone = self.world.gather(list(groups))
        self._steps = [list(step) for step in zip(*everyone, strict=True)]
        self._step_of = {tuple(tuple(each) for each in kinds.values()): step for step, kinds in enumerate(runs)}
        self._last, self.epoch = -1, self.epoch + 1

    def parts_in_step(self, step: int) -> list[Group]:
        """The parts that each rank trains on in a step of the epoch under way."""
        return self._steps[step]

    def begin(self, rows: tuple[object, ...]) -> None:
        """Begin a pass on a batch, given the rows of all types: the next one of the loader, or the same once more."""
        if self._aside is not None:
            self.groups = self._aside
            return
        step = self._step_of.get(rows)
        if step is None or not self._last <= step <= self._last + 1:
            got = "another batch" if step is None else f"batch {step + 1} after batch {self._last + 1}"
            rule = "ranks step together, each on every batch of its loader in turn"
            raise InputError(rule, got=got, fix="Call the model once with each batch that the loader yields.")
        self._last, self.groups = step, self._steps[step]

    @contextmanager
    def aside(self, rows: Mapping[str, BatchRows]) -> Iterator[None]:
        """Every rank makes a pass on some whole parts of its own, which is none of the steps."""
        groups = self.world.gather(self._parts_of(rows))
        if None in groups:
            got = f"another one on rank {groups.index(None)}"
            fix = "Pass each rank one of its batches, such as loader.batch_of([0])."
            raise InputError("ranks refresh batches of whole parts of their own", got=got, fix=fix)
        self._aside = groups
        try:
            yield
        finally:
            self._aside = None

    @property
    def is_aside(self) -> bool:
        """Whether the present pass is none of the steps."""
        return self._aside is not None

    def _parts_of(self, rows: Mapping[str, BatchRows]) -> Group | None:
        """The parts that a batch consists of; ``None`` if these are not whole ones of this rank."""
        own = {kind: each.on_host[: each.batch_size] for kind, each in rows.items()}
        shards = self.shard.kinds
        found = [torch.searchsorted(shards[kind].starts, each, right=True) - 1 for kind, each in own.items()]
        parts = torch.unique(torch.cat(found))
        if not parts.numel() or int(parts[-1]) >= self.shard.num_parts:
            return None
        whole = all(int(shards[kind].starts.diff()[parts].sum()) == each.numel() for kind, each in own.items())
        return tuple(parts.tolist()) if whole else None
