"""Makes the plan of a model on a heterogeneous graph, and checks it on small graphs with the same types.

A copy of the model runs on each of them three times: without histories or hooks; as a whole, which shows where its
slots are; and in batches whose histories hold the exact rows, as steps and as sweeps. All must agree, at every slot and
in the output.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import BoundArguments

import torch
from torch import Tensor, nn

from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import (
    LayerCall,
    TypedPlan,
)
from gnnautoscale.graph import TypedInfo
from gnnautoscale.planner.typed_rehearsal import (
    TypedDeviationError,
    TypedLayerError,
    TypedObservation,
    rehearsed,
    same_rows,
)
from gnnautoscale.planner.typed_trial_graph import SIZES, TypedTrialGraph
from gnnautoscale.planner.understudy import Understudy


def make_typed_plan(model: nn.Module, info: TypedInfo, arguments: BoundArguments, device: torch.device) -> TypedPlan:
    """The plan of a model, given a copy of it and a call with a batch; see :func:`make_plan`."""
    failure: Exception | None = None
    for dtype in (torch.float64, None):  # in double precision, where rounding hides nothing, if the model runs in it
        actor = Understudy(model, dtype)
        try:
            graphs = [TypedTrialGraph(info, arguments, device, size, dtype) for size in SIZES]
            wanted = [graph.run_plain(actor) for graph in graphs]
        except Exception as error:
            failure = error
            continue
        plan = _planned(graphs, actor, wanted)
        if dtype is not None:  # histories have the types of the model itself
            own = TypedObservation(
                TypedTrialGraph(info, arguments, device, SIZES[0], None),
                Understudy(model),
                plan.inner,
                {slot: (plan.kinds[slot], dim) for slot, dim in plan.node_sums.items()},
            ).plan
            plan = replace(plan, rows=own.rows, call_rows=own.call_rows)
        return plan
    raise UnsupportedModelError(
        "before a model is trained, a copy of it must run on small graphs with the types of yours",
        got=f"{type(failure).__name__}: {failure}",
        fix="If the model needs more than a batch has, such as rows of all nodes, look these up by batch[...].n_id.",
    ) from failure


def _planned(graphs: list[TypedTrialGraph], actor: Understudy, wanted: list[list[Tensor]]) -> TypedPlan:
    inner, sums = frozenset[str](), dict[str, tuple[str, int]]()
    while True:
        seen = [TypedObservation(graph, actor, inner, sums) for graph in graphs]
        for observed, plain in zip(seen, wanted, strict=True):
            if not all(same_rows(got, want) for got, want in zip(observed.outputs, plain, strict=True)):
                raise _refused("the model's output", "rows of layers that are combined in a way that is not followed")
        plan = _merged([observed.plan for observed in seen])
        deviation: TypedDeviationError | None = None
        for graph, observed in zip(graphs, seen, strict=True):
            deviation = deviation or rehearsed(graph, actor, plan, observed)
        if deviation is None:
            _take_shortcuts(plan, graphs, actor, seen)
            plan.end_trial()
            return plan
        several = {name for name, call in plan.calls.items() if call.num_propagations > 1 and _is_of_one(call)} - inner
        if several:
            inner |= several
            continue
        # What has the size of all nodes on one graph only is something else.
        found = [TypedObservation(graph, actor, inner, None).sums.items() for graph in graphs]
        before, sums = sums, dict(found[0] & found[1])
        if sums == before:
            raise _refused(
                deviation.slot,
                "other rows in a batch than on the whole graph: something looks beyond the edges into a node, as norms "
                "over the graph do, or at degrees of nodes of another type",
            )


def _take_shortcuts(
    plan: TypedPlan, graphs: list[TypedTrialGraph], actor: Understudy, seen: list[TypedObservation]
) -> None:
    """Take all shortcuts that do not change the batch's rows."""
    for call in plan.calls.values():
        call.shortcuts = call.possible_shortcuts
    plan.own_rows = True
    empty = {name: call.layer for name, call in plan.calls.items() if not call.nested and name not in plan.unchanged}
    plan.emptied = set(empty)
    _drop_wrong_shortcuts(plan, graphs, actor, seen)
    for layer in dict.fromkeys(kind for name, kind in empty.items() if name not in plan.emptied):
        plan.emptied |= (more := {name for name, kind in empty.items() if kind is layer})
        try:
            right = not any(rehearsed(graph, actor, plan, known) for graph, known in zip(graphs, seen, strict=True))
        except Exception:  # the layer needs its own edges
            right = False
        plan.emptied -= set() if right else more


def _drop_wrong_shortcuts(
    plan: TypedPlan, graphs: list[TypedTrialGraph], actor: Understudy, seen: list[TypedObservation]
) -> None:
    while True:
        culprits: list[LayerCall] = []
        try:
            found = [rehearsed(graph, actor, plan, observed) for graph, observed in zip(graphs, seen, strict=True)]
            deviation = next((each for each in found if each is not None), None)
            if deviation is None:
                return
            culprits = [call for name, call in plan.calls.items() if plan.slot_of.get(name) == deviation.slot]
        except TypedLayerError as failed:
            culprits = [call for call in plan.calls.values() if call.layer is plan.calls[failed.call].layer]
        except Exception:  # noqa: S110
            pass  # something between the layers
        paired = [call for call in culprits if "pair" in call.shortcuts]
        if plan.emptied:
            plan.emptied = set()
        elif paired:
            for call in paired:
                call.shortcuts -= {"pair", "short"}
        elif plan.own_rows:
            plan.own_rows = False
            for call in plan.calls.values():
                call.shortcuts -= {"pair", "short"}
        else:
            for call in plan.calls.values():
                call.shortcuts = frozenset()
            return


def _merged(plans: list[TypedPlan]) -> TypedPlan:
    first = replace(plans[0])  # a copy, since the observing pass has looked at what was not known yet
    for other in plans[1:]:
        same = other.needs.keys() == first.needs.keys() and list(other.calls) == list(first.calls)
        same = same and other.node_sums == first.node_sums
        if not same or other.kinds != first.kinds or other.output_kinds != first.output_kinds:
            raise _refused("the model", "layers that depend on the graph")
        for slot, needed in other.needs.items():
            first.needs[slot] |= needed
        for name, call in other.calls.items():
            known = first.calls[name]
            known.edge_names = [a & b for a, b in zip(known.edge_names, call.edge_names, strict=True)]
        first.unchanged &= other.unchanged
    return first


def _refused(where: str, got: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"an autoscaled model computes '{where}' in batches as on the whole graph",
        got=got,
        fix="Replace what looks beyond a node's neighbours, or train full batch with the plain model.",
    )


def _is_of_one(call: LayerCall) -> bool:
    """Whether a layer call gets the edges of one type."""
    return sum(name is not None and name.startswith("edge_index") for name in call.attributes) == 1
