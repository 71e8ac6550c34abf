"""Merges what was observed on several trial graphs into the plan that holds on all of them."""

from __future__ import annotations

from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import ArgumentKind, LayerCall, Plan
from gnnautoscale.planner.rehearsal import Observation


def merged(
    observations: list[Observation], inner: set[str], explicit: bool, *, everything_needed: bool = False
) -> Plan:
    """The plan that holds on all graphs that a model was observed on."""
    plans = [seen.plan for seen in observations]
    plan = Plan(inner=inner, explicit=explicit, rows=plans[0].rows)
    for other in plans[1:]:
        if list(other.calls) != list(plans[0].calls) or other.needs.keys() != plans[0].needs.keys():
            different = next(iter(other.calls.keys() ^ plans[0].calls.keys()), "layers in another order")
            raise _graph_decides(f"the same layers on every graph, but '{different}' is not")
    for name, first in plans[0].calls.items():
        calls = [other.calls[name] for other in plans]
        forms = {(call.num_propagations, len(call.edge_names), *call.attributes) for call in calls}
        kinds = [seen.kinds[name] for seen in observations]
        if len(forms) > 1 or len({len(some) for some in kinds}) > 1:
            raise _graph_decides(f"'{name}' with the same arguments and as many propagations on every graph")
        possible = [_kind(set.intersection(*some)) for some in zip(*kinds, strict=True)]
        shortcuts = frozenset.intersection(*(call.possible_shortcuts for call in calls))
        plan.calls[name] = LayerCall(
            possible,
            first.attributes,
            [frozenset.intersection(*names) for names in zip(*(call.edge_names for call in calls), strict=True)],
            first.num_propagations,
            shortcuts if possible.count("node") == 1 else shortcuts - {"pair"},
            constant_halo=set.intersection(*(call.constant_halo for call in calls)),
            nested=first.nested,
            sizes=frozenset.intersection(*(call.sizes for call in calls)),
        )
    for slot in plans[0].needs:
        plan.needs[slot] = frozenset().union(*(other.needs[slot] for other in plans))
    if everything_needed:
        slots = list(plan.needs)
        plan.needs = {slot: frozenset(slots[:number]) for number, slot in enumerate(slots)}
    plan.node_norms = set[str]().union(*(other.node_norms for other in plans))
    plan.reads = frozenset[str]().union(*(other.reads for other in plans))
    return plan


def _kind(possible: set[ArgumentKind]) -> ArgumentKind:
    """What a tensor is, if it may be all of these on every graph."""
    order: tuple[ArgumentKind, ...] = ("own", "node", "edge", "other")
    return next(kind for kind in order if kind in possible)


def _graph_decides(wanted: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "an autoscaled model makes the same layer calls on every graph",
        got=f"a model that does not call {wanted}",
        fix="Make the calls independent of the graph: a layer without edges adds nothing to its messages.",
    )
