"""The plan: how a model's layers are called, and where it has histories.

A *slot* is a place in the model that has a history: the output of a layer, or of each propagation in a layer that
propagates several times. An *edge call* is a layer's call of its ``propagate`` or ``edge_updater``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from torch import Tensor

from gnnautoscale.forward.record import ArgumentKind
from gnnautoscale.forward.watch import Attribute

# Savings of work in a layer, the most daring first:
# "pair":  call it with (all rows, the batch's rows), PyG's convention for messages between two sets of nodes, which
#          restricts everything after the aggregation to the batch's rows;
# "short": aggregate into the batch's rows only;
# "lazy":  compute messages without a row per edge as far as possible, see ``lazy.py``;
# "fused": aggregate in one kernel, without a row per edge.
Shortcut = Literal["pair", "short", "lazy", "fused"]
SHORTCUTS: tuple[Shortcut, ...] = get_args(Shortcut)


@dataclass
class LayerCall:
    """One call of a layer in the model's forward pass.

    Attributes:
        kinds: The kind of each tensor among the arguments, in order.
        attributes: The name of the batch's attribute that each of these tensors is, or ``None``.
        edge_names: For each edge call, the arguments with one row per edge.
        num_propagations: How many edge calls are ``propagate``.
        possible_shortcuts: The shortcuts worth trying.
        shortcuts: The shortcuts in use; they leave the batch's rows unchanged.
        constant_halo: Positions of edge calls whose input rows depend on no weight, apart from those behind slots.
        nested: Whether the layer contains other message-passing layers.
        sizes: Positions of the arguments, among those that are not tensors, that are the number of nodes.
        draws: Whether the layer draws random numbers in training; ``None`` if unknown.
        remembers: Whether the layer remembers results of functions of edges; ``None`` while that is being tried.
        remembered: Results of functions of edges that a record replaces; see :mod:`gnnautoscale.forward.memo`.
        like: An earlier call, and its name, whose records are the same on every graph.
        closed: Whether the call computes the halo's rows too.
        layer: The class of the layer, if it matters.
    """

    kinds: list[ArgumentKind]
    attributes: list[str | None]
    edge_names: list[frozenset[str]] = field(default_factory=list)
    num_propagations: int = 0
    possible_shortcuts: frozenset[Shortcut] = frozenset()
    shortcuts: frozenset[Shortcut] = frozenset()
    constant_halo: set[int] = field(default_factory=set)
    nested: bool = False
    sizes: frozenset[int] = frozenset()
    draws: bool | None = None
    remembers: bool | None = None
    remembered: dict[Any, Any] = field(default_factory=dict, repr=False)
    like: tuple[str, LayerCall] | None = None
    closed: bool = False
    layer: type | None = None

    @property
    def has_edge_updater(self) -> bool:
        """Whether the layer computes edge-level values in ``edge_updater``."""
        return len(self.edge_names) > self.num_propagations

    def fuses(self, position: int, constants: Mapping[str, Tensor]) -> bool:
        """Whether an edge call aggregates in one kernel: it needs rows and at most one recorded weight per edge."""
        names = self.edge_names[position]
        recorded = all(name in constants and constants[name].dim() == 1 for name in names)
        return "fused" in self.shortcuts and len(names) <= 1 and recorded

    def weight(self, position: int) -> str | None:
        """The argument with the edge weights of a fused edge call."""
        return next(iter(self.edge_names[position]), None)


@dataclass
class Plan:
    """How to run a model with histories; made once by ``gnnautoscale.planner``.

    Attributes:
        calls: The model's layer calls, in order.
        inner: The calls with a history at each of their propagations instead of at their output.
        explicit: Whether the model names its own slots, as in the paper's interface.
        needs: For each slot, and for ``OUTPUT``, the slots whose rows it is computed from.
        rows: For each slot an empty tensor with the shape and type of its rows, ``[0, ...]``.
        skip_empty: Whether sweeps may pass on no rows at all where nothing needs them.
        node_norms: The names of the batch norms that see one row per node.
        short_tail: Whether the model runs on the batch's rows only after its last layer.
        ignores_edges: Whether only layers use the edges, so that recorded ones suffice.
        optional: Calls that training leaves out at random.
        reads: Names of the weights and buffers whose values the forward pass reads, to branch on them for example.
        harmless: Attributes that the forward pass changes itself, and that do not change what it computes.
        node_sums: The slots whose rows are added up over all nodes, each with the dimension that these lie along.
    """

    calls: dict[str, LayerCall] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    explicit: bool = False
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    skip_empty: bool = False
    node_norms: set[str] = field(default_factory=set)
    short_tail: bool = False
    ignores_edges: bool = False
    optional: set[str] = field(default_factory=set)
    reads: frozenset[str] = frozenset()
    harmless: set[Attribute] = field(default_factory=set)
    node_sums: dict[str, int] = field(default_factory=dict)

    OUTPUT = "the model's output"

    def copy(self) -> Plan:
        """The same plan, to be tried for a model in which a number has changed."""
        calls = {name: replace(call, remembers=None, remembered={}) for name, call in self.calls.items()}
        for call in calls.values():
            call.like = None if call.like is None else (call.like[0], calls[call.like[0]])
        return replace(self, calls=calls)

    def end_trial(self) -> None:
        """Let layers remember the results of functions of edges, unless they looked at some in the trial."""
        for call in self.calls.values():
            call.remembers = call.remembers is None

    @cached_property
    def live(self) -> frozenset[str]:
        """The slots that another slot is computed from; only these have a history."""
        # Layers after the last slot read histories only in models that name their own slots.
        readers = (slot for slot in self.needs if slot != self.OUTPUT or self.explicit)
        return frozenset(self.node_sums).union(*(self.needs[slot] for slot in readers))

    @cached_property
    def closed(self) -> Plan:
        """The same plan for passes that compute the halo's rows too."""
        calls = {
            name: replace(call, closed=True, shortcuts=call.shortcuts - {"pair", "short"})
            for name, call in self.calls.items()
        }
        for call in calls.values():
            if call.like is not None:
                call.like = call.like[0], calls[call.like[0]]
        return replace(self, calls=calls, short_tail=False)

    @cached_property
    def levels(self) -> list[frozenset[str]]:
        """The live slots in groups, each computed from the groups before it."""
        depth: dict[str, int] = {}
        for slot, needed in self.needs.items():
            depth[slot] = max((depth[other] + 1 for other in needed), default=0)
        live = self.live
        groups = (frozenset(slot for slot in live if depth[slot] == level) for level in range(len(live)))
        return [group for group in groups if group]


@dataclass
class TypedPlan(Plan):
    """The plan of a model on a heterogeneous graph.

    Attributes:
        kinds: The type of nodes that each slot has rows of.
        slot_of: The slot that a layer call's rows become a part of.
        call_rows: For each of these calls an empty tensor with the shape and type of its rows.
        call_kinds: The type of nodes that it has rows of, if that is one.
        norm_kinds: The type of nodes that each call of a batch norm sees.
        output_kinds: The type of nodes of each tensor of the output.
        unchanged: The layer calls that propagate over the edges that they get as they are.
        emptied: The layer calls that get no edges where recorded ones replace what they make of them.
        own_rows: Whether layers pass on rows of the batch's own nodes only, which are combined before the halo's join.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    slot_of: dict[str, str] = field(default_factory=dict)
    call_rows: dict[str, Tensor] = field(default_factory=dict)
    call_kinds: dict[str, str] = field(default_factory=dict)
    norm_kinds: dict[str, str] = field(default_factory=dict)
    output_kinds: list[str] = field(default_factory=list)
    unchanged: set[str] = field(default_factory=set)
    emptied: set[str] = field(default_factory=set)
    own_rows: bool = False

    _of_kinds: dict[str, Plan] = field(default_factory=dict, init=False, repr=False)

    def of_kind(self, kind: str) -> Plan:
        """The same plan, whose histories are those of one type of nodes."""
        if kind not in self._of_kinds:
            made = self._of_kinds[kind] = replace(self)
            made.__dict__["live"] = frozenset(slot for slot in self.live if self.kinds[slot] == kind)
            made.__dict__["levels"] = self.levels
        return self._of_kinds[kind]
