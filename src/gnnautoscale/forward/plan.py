"""Where a model has its histories, and what is remembered about a graph.

A *slot* is a place in the model that has a history: the output of a layer, or of each propagation inside a layer
that propagates several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from torch import Tensor, nn

from gnnautoscale.forward.record import ArgumentKind

# Ways to do less work in a layer, from the most daring to the plainest:
# "pair":  it is called with (all rows, the batch's rows), PyG's convention for messages between two sets of nodes,
#          so that what follows its aggregation is computed for the batch only;
# "short": it aggregates into the batch's rows only;
# "fused": it aggregates in one go, without a row for every edge.
Shortcut = Literal["pair", "short", "fused"]
SHORTCUTS: tuple[Shortcut, ...] = get_args(Shortcut)


@dataclass
class LayerCall:
    """What is known about one call of a layer in the model's forward pass.

    Attributes:
        kinds: What each tensor among the arguments is, in order.
        own: Which attribute of the batch each of these tensors is, or ``None``.
        edge_names: For each call of ``propagate`` or ``edge_updater``, the arguments that have one row per edge.
        num_propagations: How many of these calls are ``propagate``.
        possible_shortcuts: The shortcuts that could apply, before they are tried.
        shortcuts: What may be left out without changing the batch's rows; see :data:`Shortcut`.
        inward: The events, by position, whose rows depend on no weight since the slots they come from.
        nested: Whether the layer holds other message-passing layers.
        draws: Whether the layer draws random numbers in training; ``None`` as long as nobody looked.
    """

    kinds: list[ArgumentKind]
    own: list[str | None]
    edge_names: list[frozenset[str]] = field(default_factory=list)
    num_propagations: int = 0
    possible_shortcuts: frozenset[Shortcut] = frozenset()
    shortcuts: frozenset[Shortcut] = frozenset()
    inward: set[int] = field(default_factory=set)
    nested: bool = False
    draws: bool | None = None

    @property
    def has_edge_updater(self) -> bool:
        """Whether the layer computes edge-level values through ``edge_updater``."""
        return len(self.edge_names) > self.num_propagations

    def fuses(self, position: int, constants: Mapping[str, Tensor]) -> bool:
        """Whether a propagation aggregates in one go: all it needs besides rows is recorded, as one weight at most."""
        names = self.edge_names[position]
        recorded = all(name in constants and constants[name].dim() == 1 for name in names)
        return "fused" in self.shortcuts and len(names) <= 1 and recorded

    def weight(self, position: int) -> str | None:
        """The argument that weighs the edges of a fused propagation."""
        return next(iter(self.edge_names[position]), None)


@dataclass
class Plan:
    """How a model is run with histories; found out once, by ``gnnautoscale.planner.planning``.

    Attributes:
        calls: The model's layer calls in the order they are made.
        inner: The calls that need a history at each of their propagations instead of at their output.
        explicit: Whether the model names its own slots, as the paper's interface does.
        needs: For each slot, and for ``OUTPUT``, the slots whose rows it is computed from.
        rows: For each slot a tensor of no rows that has the shape and type of its rows.
        skip_empty: Whether rows that nothing needs may be left out when histories are swept.
        node_norms: The batch norms that see one row per node.
        short_tail: Whether what follows the last layer runs on the batch's rows only.
        bare: Whether the model never looks at edges itself, so that only what was recorded is needed.
    """

    calls: dict[str, LayerCall] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    explicit: bool = False
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    skip_empty: bool = False
    node_norms: set[nn.Module] = field(default_factory=set)
    short_tail: bool = False
    bare: bool = False

    OUTPUT = "the model's output"

    @cached_property
    def live(self) -> frozenset[str]:
        """The slots that another slot is computed from; only these have a history."""
        # A layer whose output is a slot reads only what other slots need. Where the model names its own slots, layers
        # after the last one read histories too.
        readers = (slot for slot in self.needs if slot != self.OUTPUT or self.explicit)
        return frozenset().union(*(self.needs[slot] for slot in readers))

    @cached_property
    def levels(self) -> list[frozenset[str]]:
        """The live slots, grouped so that each group is computed from the groups before it."""
        depth: dict[str, int] = {}
        for slot, needed in self.needs.items():
            depth[slot] = max((depth[other] + 1 for other in needed), default=0)
        live = self.live
        groups = (frozenset(slot for slot in live if depth[slot] == level) for level in range(len(live)))
        return [group for group in groups if group]
